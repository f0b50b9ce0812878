"""`SegmentIndex`: which blocks are stored, in which segment and slot, and in which order segments were used.

It is what this process knows of the folder, which other processes change too (`index_sync`). Owns the segments'
records, their order of use, and which of their files are open. Never opens, closes, reads or deletes a file; a method
that takes one out of use returns what is to be closed. Not safe between threads: the store holds its lock around
every call.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from sglang.srt.mem_cache.storage.file.segment import (
    CHECKSUM_BYTES,
    CLAIMED,
    KEY_BYTES,
    MAX_SLOTS,
    NO_CHECKSUM,
    SegmentLayout,
    Table,
)

MAX_OPEN_FILES = 64
# The number of a segment and a slot in it, as one int: the index holds a million of them.
_SLOT_BITS = MAX_SLOTS.bit_length() - 1


def number_of(place: int) -> int:
    """The number of a place's segment."""
    return place >> _SLOT_BITS


def slot_of(place: int) -> int:
    return place & (MAX_SLOTS - 1)


class Segment:
    """A file of blocks, and what is known of it. keys, checksums: of its used slots, one after the other; zeros where
    a slot holds no block, and `CLAIMED` for the checksum where it is claimed."""

    __slots__ = (
        *("number", "path", "inode", "layout", "keys", "checksums", "live", "spare", "file_bytes", "size_bytes"),
        *("uses", "last_used", "used_ns", "shared_ns", "pins", "fd"),
    )

    def __init__(self, number: int, path: str, layout: SegmentLayout, inode: int) -> None:
        self.number = number
        self.path = path
        self.inode = inode
        self.layout = layout
        self.keys = bytearray()
        self.checksums = bytearray()
        # What the file takes on the disk, where that was looked up; it may be more than the used slots do.
        self.file_bytes = 0
        # Slots that the index points to.
        self.live = 0
        # Of those, the ones that memory has, see `SegmentIndex.make_spare`.
        self.spare: set[int] = set()
        self.size_bytes = layout.size_bytes(0)
        # When the block of each slot was last used, in ns; 0 where the index points to none.
        self.uses = np.zeros(layout.num_slots, np.int64)
        # The tick of its last use by this process.
        self.last_used = 0
        # When any process last used it, as far as is known, and the time that other processes see on the file.
        self.used_ns = 0
        self.shared_ns = 0
        # Calls that are using the file; it is closed only at 0.
        self.pins = 0
        self.fd: int | None = None

    @property
    def used(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def free(self) -> int:
        return self.layout.num_slots - self.used

    def key(self, slot: int) -> bytes:
        return bytes(self.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def checksum(self, slot: int) -> bytes:
        return bytes(self.checksums[slot * CHECKSUM_BYTES : (slot + 1) * CHECKSUM_BYTES])

    def place(self, slot: int) -> int:
        return self.number << _SLOT_BITS | slot


class SegmentIndex:
    """`key in index`: whether a block is stored. A place is a segment's number and a slot in it."""

    def __init__(self) -> None:
        self.places: dict[bytes, int] = {}
        # Blocks that a process is writing, or was writing when it died.
        self.claims: dict[bytes, int] = {}
        # By number.
        self.segments: dict[int, Segment] = {}
        # Takes what is written; None: the next write begins a segment.
        self.active: Segment | None = None
        self.size_bytes = 0
        # Spare slots of all segments.
        self.num_spare = 0
        # Rises with every use of a segment.
        self.tick = 0
        self.next_number = 1
        # Blocks that were taken out; None: that is not noted.
        self.taken_out: deque[bytes] | None = None
        self._wall_ns = time.time_ns
        self._last_ns = 0
        self._open_files: OrderedDict[int, Segment] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self.places

    def __len__(self) -> int:
        return len(self.places)

    # -- blocks -----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The places of the leading keys that are stored."""
        places = []
        for key in keys:
            place = self.places.get(key)
            if place is None:
                break
            places.append(place)
        return places

    def use(self, places: Sequence[int]) -> None:
        """A prompt's blocks are used here: none is spare, and their segments become the most recently used."""
        if not places:
            return
        if self.num_spare:
            for place in places:
                self._end_spare(self.segments[number_of(place)], slot_of(place))
        array = np.array(places, np.int64)
        numbers, slots, uses = array >> _SLOT_BITS, array & (MAX_SLOTS - 1), self._new_uses(len(places))
        # The segment of its front last.
        for number in dict.fromkeys(numbers[::-1].tolist()):
            segment, own = self.segments[number], numbers == number
            segment.uses[slots[own]] = uses[own]
            self._touch(segment, int(uses[own].max()))

    def _new_uses(self, num_blocks: int) -> np.ndarray:
        """Times for a prompt's blocks that are used now, (n,) int64, its front last: without it the rest is of no
        use."""
        first = max(self._wall_ns(), self._last_ns + 1)
        self._last_ns = first + num_blocks - 1
        return first + np.arange(num_blocks - 1, -1, -1, dtype=np.int64)

    def note_shared_use(self, segment: Segment, used_ns: int) -> None:
        """Another process has used the segment, which may have been any of its blocks."""
        segment.used_ns = segment.shared_ns = used_ns
        uses = segment.uses
        np.maximum(uses, used_ns, out=uses, where=uses > 0)

    def make_spare(self, keys: Sequence[bytes]) -> None:
        """Memory has these blocks now, and stores them when it gives them up: they may go first."""
        for key in keys:
            if (place := self.places.get(key)) is None:
                continue
            segment = self.segments[number_of(place)]
            if slot_of(place) not in segment.spare:
                segment.spare.add(slot_of(place))
                self.num_spare += 1

    def most_spare(self, page_size: int, but: Collection[int]) -> Segment | None:
        """The segment with pages of this size that has most spare slots and is not being read by this process. but:
        numbers of segments to pass over."""
        if not self.num_spare:
            return None
        unread = (
            segment
            for segment in self.segments.values()
            if self.is_spare(segment) and segment.layout.page_size == page_size and segment.number not in but
        )
        return max(unread, key=lambda segment: len(segment.spare), default=None)

    def is_spare(self, segment: Segment) -> bool:
        """Whether it has spare slots and is not being read by this process. One that was dropped has none."""
        return bool(segment.spare) and not segment.pins

    def take_spare(self, segment: Segment, most: int) -> range:
        """Slots of the segment to overwrite, neighbours and `most` at most, whose blocks are forgotten."""
        first = last = min(segment.spare)
        while last + 1 in segment.spare and last + 1 - first < most:
            last += 1
        slots = range(first, last + 1)
        for slot in slots:
            self.forget(segment, slot)
        return slots

    def _end_spare(self, segment: Segment, slot: int) -> None:
        if slot in segment.spare:
            segment.spare.remove(slot)
            self.num_spare -= 1

    def claim(self, segment: Segment, slot: int, keys: Sequence[bytes]) -> None:
        """This process begins to write blocks to the slots from `slot` on, behind the used ones or in place of spare
        ones. They count as used, and as no blocks."""
        self._put(segment, slot, keys, [CLAIMED] * len(keys))
        for i, key in enumerate(keys):
            if key not in self.places:  # else it is copied
                self.claims[key] = segment.place(slot + i)

    def complete(
        self,
        segment: Segment,
        slot: int,
        keys: Sequence[bytes],
        checksums: Sequence[bytes],
        uses: np.ndarray | None = None,
    ) -> None:
        """The blocks of a claim have been written. uses: when copied blocks were last used, (n,) int64; None: now."""
        self._put(segment, slot, keys, checksums)
        now = self._new_uses(len(keys))
        segment.uses[slot : slot + len(keys)] = now if uses is None else uses
        for i, key in enumerate(keys):
            self._add(segment, slot + i, key)
        self._touch(segment, int(now[0]))
        if segment is self.active and not segment.free:
            self.active = None

    def void(self, segment: Segment, slot: int, keys: Sequence[bytes]) -> None:
        """The blocks of a claim were not written: its slots hold nothing."""
        for i, key in enumerate(keys):
            if self.claims.get(key) == segment.place(slot + i):
                del self.claims[key]
        self._put(segment, slot, [bytes(KEY_BYTES)] * len(keys), [NO_CHECKSUM] * len(keys))
        if slot + len(keys) == segment.used:
            del segment.keys[slot * KEY_BYTES :], segment.checksums[slot * CHECKSUM_BYTES :]
        self._resize(segment)

    def _put(self, segment: Segment, slot: int, keys: Sequence[bytes], checksums: Sequence[bytes]) -> None:
        end = slot + len(keys)
        if segment.used < slot:  # Another process has erased the last blocks.
            segment.keys.extend(bytes(slot * KEY_BYTES - len(segment.keys)))
            segment.checksums.extend(bytes(slot * CHECKSUM_BYTES - len(segment.checksums)))
        segment.keys[slot * KEY_BYTES : end * KEY_BYTES] = b"".join(keys)
        segment.checksums[slot * CHECKSUM_BYTES : end * CHECKSUM_BYTES] = b"".join(checksums)
        self._resize(segment)

    def _add(self, segment: Segment, slot: int, key: bytes) -> None:
        """The slot holds the block. Where another one holds it too, that one was bad, or its writer died."""
        if (earlier := self.places.get(key)) is not None:
            self.forget(self.segments[number_of(earlier)], slot_of(earlier))
        self.claims.pop(key, None)
        self.places[key] = segment.place(slot)
        segment.live += 1

    def _resize(self, segment: Segment) -> None:
        size_bytes = max(segment.file_bytes, segment.layout.size_bytes(segment.used))
        self.size_bytes += size_bytes - segment.size_bytes
        segment.size_bytes = size_bytes

    def forget(self, segment: Segment, slot: int) -> bool:
        """Take a block out. False: it is not there, or stored elsewhere by now."""
        key = segment.key(slot)
        if self.places.get(key) != segment.place(slot):
            return False
        self._take_out(key)
        segment.live -= 1
        segment.uses[slot] = 0
        self._end_spare(segment, slot)
        return True

    def _take_out(self, key: bytes) -> None:
        del self.places[key]
        if self.taken_out is not None:
            self.taken_out.append(key)

    def forget_if(self, segment: Segment, slot: int, key: bytes, checksum: bytes) -> bool:
        """As `forget`, unless the slot holds something else by now."""
        if segment.key(slot) != key or segment.checksum(slot) != checksum:
            return False
        return self.forget(segment, slot)

    # -- segments ---------------------------------------------------------------------------------------------------

    def begin(self, segment: Segment) -> None:
        """A new, empty segment becomes the active one."""
        self.next_number = max(self.next_number, segment.number + 1)
        self.segments[segment.number] = segment
        self.size_bytes += segment.size_bytes
        self._touch(segment, int(self._new_uses(1)[0]))
        self.active = segment

    def recover(self, segment: Segment, table: Table, file_bytes: int, used_ns: int) -> None:
        """Take in a segment that this process did not begin. At the start in the order of their numbers. file_bytes:
        what the file takes on the disk; used_ns: the time on it."""
        self.segments[segment.number] = segment
        self.next_number = max(self.next_number, segment.number + 1)
        self.size_bytes += segment.size_bytes
        segment.used_ns = segment.shared_ns = max(1, min(used_ns, self._wall_ns()))
        self._sync(segment, table, file_bytes, segment.used_ns)

    def sync(self, segment: Segment, table: Table, file_bytes: int) -> None:
        """Another process may have changed the segment, and its table is this one now. What is new in it counts as
        used now."""
        self._sync(segment, table, file_bytes, self._wall_ns())

    def _sync(self, segment: Segment, table: Table, file_bytes: int, used_ns: int) -> None:
        changed = set(table.changed(segment.keys, segment.checksums))
        for slot in changed:
            if slot < segment.used:
                self.forget(segment, slot)
                if self.claims.get(key := segment.key(slot)) == segment.place(slot):
                    del self.claims[key]
        segment.keys, segment.checksums = bytearray(table.keys), bytearray(table.checksums)
        segment.file_bytes = file_bytes
        self._resize(segment)
        added = sorted(changed.intersection(table.slots))
        segment.uses[added] = used_ns
        for slot in added:
            self._add(segment, slot, segment.key(slot))
        for slot in changed.intersection(table.claims):
            key = segment.key(slot)
            if key not in self.places:
                self.claims[key] = segment.place(slot)

    def _touch(self, segment: Segment, used_ns: int) -> None:
        """This process uses the segment."""
        self.tick += 1
        segment.last_used = self.tick
        segment.used_ns = used_ns

    def evictable(self, before: int) -> list[Segment]:
        """Segments that this process neither writes to nor has used after tick `before`."""
        return [
            segment
            for segment in self.segments.values()
            if segment is not self.active and segment.last_used <= before
        ]

    def unshared(self) -> list[Segment]:
        """Segments of which other processes do not see the last use on the file."""
        return [segment for segment in self.segments.values() if segment.used_ns > segment.shared_ns]

    def drop(self, segment: Segment) -> int | None:
        """Forget a segment and its blocks. Returns the file to close, unless a read still uses it."""
        for slot in range(segment.used):
            key = segment.key(slot)
            if self.places.get(key) == segment.place(slot):
                self._take_out(key)
            if self.claims.get(key) == segment.place(slot):
                del self.claims[key]
        segment.uses[:] = 0
        segment.live = 0
        self.num_spare -= len(segment.spare)
        segment.spare.clear()
        del self.segments[segment.number]
        self.size_bytes -= segment.size_bytes
        if segment is self.active:
            self.active = None
        fd = None
        if not segment.pins:
            self._open_files.pop(segment.number, None)
            fd, segment.fd = segment.fd, None
        return fd

    def clear(self) -> list[int]:
        """Forget everything, for the end. Returns the files to close."""
        fds = [segment.fd for segment in self._open_files.values() if segment.fd is not None]
        self._open_files.clear()
        self.places.clear()
        self.claims.clear()
        self.segments.clear()
        self.active = None
        self.num_spare = 0
        return fds

    # -- open files -------------------------------------------------------------------------------------------------

    def open_file(self, segment: Segment) -> int | None:
        """The segment's open file, which becomes the most recently used; None: it is to be opened."""
        if segment.fd is not None:
            self._open_files.move_to_end(segment.number)
        return segment.fd

    def add_open_file(self, segment: Segment, fd: int) -> list[int]:
        """The file of a pinned segment is open. Returns the files to close, so that no more than `MAX_OPEN_FILES`
        stay open beside those that are pinned."""
        segment.fd = fd
        self._open_files[segment.number] = segment
        surplus: list[int] = []
        for other in list(self._open_files.values()):
            if len(self._open_files) <= MAX_OPEN_FILES:
                break
            if not other.pins:
                assert other.fd is not None
                surplus.append(other.fd)
                other.fd = None
                del self._open_files[other.number]
        return surplus

    def unpin(self, segment: Segment) -> int | None:
        """A call no longer uses the segment. Returns the file to close, if it was dropped meanwhile and left open for
        this call."""
        segment.pins -= 1
        if segment.pins or segment.number in self.segments or segment.fd is None:
            return None
        fd, segment.fd = segment.fd, None
        self._open_files.pop(segment.number, None)
        return fd

    def check_invariants(self) -> None:
        """Asserts; with no call under way."""
        assert self.size_bytes == sum(s.size_bytes for s in self.segments.values())
        assert len(self.places) == sum(s.live for s in self.segments.values())
        assert self.num_spare == sum(len(s.spare) for s in self.segments.values())
        assert not self.claims.keys() & self.places.keys()
        for key, place in self.claims.items():
            segment = self.segments[number_of(place)]
            assert segment.key(slot_of(place)) == key and segment.checksum(slot_of(place)) == CLAIMED
        for number, segment in self.segments.items():
            assert number == segment.number < self.next_number
            assert segment.pins == 0
            assert segment.used <= segment.layout.num_slots
            assert segment.size_bytes == max(segment.file_bytes, segment.layout.size_bytes(segment.used))
            assert len(segment.checksums) == segment.used * CHECKSUM_BYTES
            slots = range(segment.used)
            live = [slot for slot in slots if self.places.get(segment.key(slot)) == segment.place(slot)]
            assert len(live) == segment.live and segment.spare <= set(live)
            assert live == np.flatnonzero(segment.uses).tolist()
            assert (segment.fd is not None) == (number in self._open_files)
        assert self.active is None or self.segments[self.active.number] is self.active
        assert len(self._open_files) <= MAX_OPEN_FILES
        assert self._open_files.keys() <= self.segments.keys()


def runs(places: list[int], max_blocks: int) -> Iterator[list[int]]:
    """Positions of places, grouped into consecutive slots of one segment."""
    run: list[int] = []
    for i in sorted(range(len(places)), key=places.__getitem__):
        if run and (places[i] != places[run[-1]] + 1 or len(run) == max_blocks or not slot_of(places[i])):
            yield run
            run = []
        run.append(i)
    if run:
        yield run
