"""`SegmentIndex`: which blocks are stored, in which segment and slot, and in which order segments were used.

Owns the segments' records, their order of use, and which of their files are open. Never opens, closes, reads or
deletes a file; a method that takes one out of use returns what is to be closed. Not safe between threads: the store
holds its lock around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sglang.srt.mem_cache.storage.file.segment import CHECKSUM_BYTES, KEY_BYTES, MAX_SLOTS, SegmentLayout, Table

MAX_OPEN_FILES = 64
# The number of a segment and a slot in it, as one int: the index holds a million of them.
_SLOT_BITS = MAX_SLOTS.bit_length() - 1


def number_of(place: int) -> int:
    """The number of a place's segment."""
    return place >> _SLOT_BITS


def slot_of(place: int) -> int:
    return place & (MAX_SLOTS - 1)


class Segment:
    """A file of blocks, and what is known of it. keys, checksums: of its used slots, one after the other."""

    __slots__ = (
        *("number", "path", "layout", "keys", "checksums", "live", "spare", "size_bytes", "last_used", "pins", "fd"),
    )

    def __init__(self, number: int, path: str, layout: SegmentLayout) -> None:
        self.number = number
        self.path = path
        self.layout = layout
        self.keys = bytearray()
        self.checksums = bytearray()
        # Slots that the index points to.
        self.live = 0
        # Of those, the ones that memory has, see `SegmentIndex.make_spare`.
        self.spare: set[int] = set()
        self.size_bytes = layout.size_bytes(0)
        self.last_used = 0
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
        # By number; the least recently used first.
        self.segments: OrderedDict[int, Segment] = OrderedDict()
        # Takes what is written; None: the next write begins a segment.
        self.active: Segment | None = None
        self.size_bytes = 0
        # Spare slots of all segments.
        self.num_spare = 0
        # Rises with every use of a segment.
        self.tick = 0
        self.next_number = 1
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
        last = None
        # Its front most of all: without it the rest is of no use.
        for place in reversed(places):
            if self.num_spare:
                self._end_spare(self.segments[number_of(place)], slot_of(place))
            if number_of(place) != last:
                last = number_of(place)
                self.touch(last)

    def make_spare(self, keys: Sequence[bytes]) -> None:
        """Memory has these blocks now, and stores them when it gives them up: they may go first."""
        for key in keys:
            if (place := self.places.get(key)) is None:
                continue
            segment = self.segments[number_of(place)]
            if slot_of(place) not in segment.spare:
                segment.spare.add(slot_of(place))
                self.num_spare += 1

    def take_spare(self, most: int) -> tuple[Segment, range] | None:
        """Slots to overwrite, neighbours and `most` at most, whose blocks are forgotten: spare ones of the segment
        that has most of them and is not being read. None if there are none."""
        if not self.num_spare:
            return None
        unread = (segment for segment in self.segments.values() if segment.spare and not segment.pins)
        segment = max(unread, key=lambda segment: len(segment.spare), default=None)
        if segment is None:
            return None
        first = last = min(segment.spare)
        while last + 1 in segment.spare and last + 1 - first < most:
            last += 1
        slots = range(first, last + 1)
        for slot in slots:
            self.forget(segment, slot)
        return segment, slots

    def _end_spare(self, segment: Segment, slot: int) -> None:
        if slot in segment.spare:
            segment.spare.remove(slot)
            self.num_spare -= 1

    def add_blocks(self, segment: Segment, slot: int, keys: Sequence[bytes], checksums: Sequence[bytes]) -> None:
        """Blocks have been written to the slots from `slot` on, behind the used ones or in place of spare ones."""
        end = slot + len(keys)
        segment.keys[slot * KEY_BYTES : end * KEY_BYTES] = b"".join(keys)
        segment.checksums[slot * CHECKSUM_BYTES : end * CHECKSUM_BYTES] = b"".join(checksums)
        for i, key in enumerate(keys):
            self.places[key] = segment.place(slot + i)
        segment.live += len(keys)
        added = max(0, segment.layout.size_bytes(segment.used) - segment.size_bytes)
        segment.size_bytes += added
        self.size_bytes += added
        self.touch(segment.number)
        if segment is self.active and not segment.free:
            self.active = None

    def forget(self, segment: Segment, slot: int) -> bool:
        """Take a block out. False: it is not there, or stored elsewhere by now."""
        key = segment.key(slot)
        if self.places.get(key) != segment.place(slot):
            return False
        del self.places[key]
        segment.live -= 1
        self._end_spare(segment, slot)
        return True

    # -- segments ---------------------------------------------------------------------------------------------------

    def begin(self, segment: Segment) -> None:
        """A new, empty segment becomes the active one."""
        self.next_number += 1
        self.segments[segment.number] = segment
        self.size_bytes += segment.size_bytes
        self.touch(segment.number)
        self.active = segment

    def recover(self, segment: Segment, table: Table, file_bytes: int) -> None:
        """Take in a segment that was there before the start. In the order of their numbers. file_bytes: what the file
        takes on the disk."""
        segment.keys, segment.checksums = bytearray(table.keys), bytearray(table.checksums)
        segment.size_bytes = max(segment.layout.size_bytes(segment.used), file_bytes)
        segment.live = len(table.slots)
        self.segments[segment.number] = segment
        self.size_bytes += segment.size_bytes
        keys = [table.keys[at : at + KEY_BYTES] for at in range(0, len(table.keys), KEY_BYTES)]
        for slot in table.slots:
            # The same key again: stored anew after its block had gone bad, so the later one counts.
            if (earlier := self.places.get(keys[slot])) is not None:
                self.segments[number_of(earlier)].live -= 1
            self.places[keys[slot]] = segment.place(slot)

    def touch(self, number: int) -> None:
        """The segment becomes the most recently used."""
        self.tick += 1
        self.segments[number].last_used = self.tick
        self.segments.move_to_end(number)

    def oldest(self) -> Segment | None:
        """The least recently used one that can be evicted."""
        return next((segment for segment in self.segments.values() if segment is not self.active), None)

    def drop(self, segment: Segment) -> int | None:
        """Forget a segment and its blocks. Returns the file to close, unless a read still uses it."""
        for slot in range(segment.used):
            key = segment.key(slot)
            if self.places.get(key) == segment.place(slot):
                del self.places[key]
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
        for number, segment in self.segments.items():
            assert number == segment.number < self.next_number
            assert segment.pins == 0
            assert segment.used <= segment.layout.num_slots
            assert len(segment.checksums) == segment.used * CHECKSUM_BYTES
            slots = range(segment.used)
            live = [slot for slot in slots if self.places.get(segment.key(slot)) == segment.place(slot)]
            assert len(live) == segment.live and segment.spare <= set(live)
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
