"""`SegmentWriter`: stores blocks: claims them, writes them, and makes room for them.

Owns the segment that this process appends to, and the pause after a failed write. One call at a time, of all stores
in a `SharedRoom`.

    missing --folder's lock--> claimed in the table --no lock--> payloads, then entries written: stored
                 |                                       |
                 | stored or being written by another    +--failed--> entry zeroed
                 +--> left out

Processes take turns only to claim: look what is missing, make room, choose slots, write down whose they are. A claim
counts while its writer holds the lock of the segment's file, that is, until it ends, however that happens.

Before a segment goes, its hot blocks are copied forward: they are read without the lock, then claimed and written as
others are. A process that is killed meanwhile leaves them in the old segment, in the new one, or in both.

A segment of another store in the room is evicted by that store's writer, after this folder's lock was released: no
process has two, as others may take them in another order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from sglang.srt.mem_cache.storage.file.eviction import Victim
from sglang.srt.mem_cache.storage.file.folder import allocated_bytes
from sglang.srt.mem_cache.storage.file.index_sync import IndexSync
from sglang.srt.mem_cache.storage.file.recovery import UsableHead, read_head, segment_numbers, segment_path
from sglang.srt.mem_cache.storage.file.segment_index import Segment, number_of
from sglang.srt.mem_cache.storage.file.shared_room import Eviction, Member, SharedRoom
from sglang.srt.mem_cache.storage.file.store_log import FULL

# Without a limit, the store stops growing when less than this share of the file system is free.
FREE_SHARE = 0.1
# After a failed write none is tried for so long, so that a full disk costs a failed call per pause, not per request.
WRITE_PAUSE_S = 10.0
# Unfinished segments of processes that have ended are tried to be filled up, so many at a time.
_MAX_ADOPTIONS = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Claim:
    """Slots that this process fills. fd: the segment, open and locked."""

    segment: Segment
    fd: int
    slot: int
    # Of the blocks among those of the call.
    positions: list[int]
    keys: list[bytes]
    # In place of other blocks, else behind the last one.
    overwrites: bool


class _UnlockFirstError(Exception):
    """Before more is evicted, hot blocks of the victim are to be copied forward, or another store is to give it up.
    used_bytes: by all stores."""

    def __init__(self, owner: Member, victim: Victim, used_bytes: int) -> None:
        super().__init__()
        self.owner = owner
        self.victim = victim
        self.used_bytes = used_bytes


class SegmentWriter:
    """room: which this store joins. max_copies: of blocks, copied forward from one segment."""

    def __init__(
        self,
        room: SharedRoom,
        sync: IndexSync,
        max_copies: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._sync = sync
        self._clock = clock
        self._member = Member(sync, max_copies, lambda: self._may_write, self.give_up_segment)
        room.join(self._member)
        # The file of the index's active segment, open and locked.
        self._held: tuple[Segment, int] | None = None
        self._no_write_before = -float("inf")
        self._budget = sync.files.budget
        # Called with the folder's lock, a tenant and keys of its blocks that are about to be claimed.
        self.claiming: Callable[[bytes, Sequence[bytes]], None] = lambda tenant, keys: None

    def fits(self, need_bytes: int) -> bool:
        """See SharedRoom."""
        return self._room.fits(need_bytes)

    def close(self) -> None:
        """Others may go on with the active segment."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = self._sync.index.active = None

    def leave_room(self) -> None:
        """For the end."""
        self.close()
        self._room.leave(self._member)

    # -- storing --------------------------------------------------------------------------------------------------

    def begin_set(self, keys: Sequence[bytes]) -> None:
        """See SharedRoom."""
        self._room.begin_set(self._member, keys)

    def store(self, keys: Sequence[bytes], pages: np.ndarray, missing: list[int], tenant: bytes = b"") -> None:
        """Write the blocks at positions `missing`, as far as there is room and no other process stores them. After
        `begin_set`. tenant: whose they are."""
        if not missing or not self._may_write:
            return
        if self._budget.is_used_up:
            self._sync.log.writes_refused(len(missing), self._budget.daily_bytes)
            return
        with self._pausing():
            self._store(keys, pages, missing, tenant)

    @property
    def _may_write(self) -> bool:
        return self._sync.folder.writable and self._clock() >= self._no_write_before

    def pause(self) -> None:
        self._no_write_before = self._clock() + WRITE_PAUSE_S

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        """After a write that fails."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOENT:
                self.pause()
                self._sync.log.write_failed(error)
            elif not self._sync.changes.is_there():
                # Deleted during the write. The next one makes it anew.
                self._sync.log.folder_is_gone()

    def _store(self, keys: Sequence[bytes], pages: np.ndarray, missing: list[int], tenant: bytes) -> None:
        """Raises OSError."""
        index = self._sync.index
        has_made_room = False
        while missing:
            eviction = Eviction()
            try:
                claim = self._with_lock(eviction, partial(self._claim, keys, missing, eviction, tenant))
                if claim is None:
                    return
                self._fill(claim, pages[claim.positions])
            except OSError as error:
                # Others fill the disk too: what is oldest here makes room for what is new, once.
                if error.errno not in FULL or has_made_room or not self._make_room_on_disk():
                    raise
                has_made_room = True
                continue
            has_made_room = False
            last = claim.positions[-1]
            missing = [i for i in missing if i > last and keys[i] not in index]

    def _claim(self, keys: Sequence[bytes], missing: list[int], eviction: Eviction, tenant: bytes) -> _Claim | None:
        """With the folder's lock: claim as many of the missing blocks as one write takes; None: none are left, or
        there is no room. Raises OSError and _UnlockFirstError."""
        sync = self._sync
        live: set[int] = set()
        missing = [i for i in missing if keys[i] not in sync.index and not self._is_being_stored(keys[i], live)]
        if not missing:
            return None
        found = self._find_slots(len(missing), eviction)
        if found is None:
            return None
        segment, fd, slots, overwrites = found
        positions = missing[: len(slots)]
        claim = _Claim(segment, fd, slots.start, positions, [keys[i] for i in positions], overwrites)
        try:
            self.claiming(tenant, claim.keys)
        except OSError:
            if overwrites:
                os.close(fd)
            raise
        return claim if self._write_claim(claim) else None

    def _write_claim(self, claim: _Claim) -> bool:
        """With the folder's lock. False: another process has just taken the room, for blocks of another store. Raises
        OSError; nothing is claimed then, either."""
        sync, segment = self._sync, claim.segment
        try:
            with sync.table_lock:
                sync.files.claim(claim.fd, segment.layout, claim.slot, claim.keys)
                with sync.lock:
                    if sync.index.segments.get(segment.number) is not segment:
                        raise FileNotFoundError(errno.ENOENT, "a read has found the segment gone", segment.path)
                    sync.index.claim(segment, claim.slot, claim.keys)
            sync.ring_erased(segment.number)
        except OSError:
            self._void(claim)
            raise
        if claim.overwrites or not self._room.is_exceeded(self._member):
            return True
        self._void(claim)
        return False

    def _fill(self, claim: _Claim, pages: np.ndarray) -> None:
        """Write the blocks of a claim. Raises OSError; they are not stored then."""
        files, segment = self._sync.files, claim.segment
        args = (segment.path, claim.fd, segment.layout, claim.slot)
        if self._complete(claim, lambda: files.write_payloads(*args, claim.keys, pages)):
            self._sync.log.count("written_blocks", len(claim.keys))
            self._budget.count_stored(len(claim.keys) * segment.layout.slot_bytes)

    def _complete(self, claim: _Claim, write: Callable[[], list[bytes]], uses: np.ndarray | None = None) -> bool:
        """write: writes the payloads, and returns their checksums. uses: see `SegmentIndex`. False: the file was
        gone, and the blocks with it. Raises OSError; they are not stored then."""
        sync, segment = self._sync, claim.segment
        try:
            checksums = write()
            with sync.table_lock:
                sync.files.complete(claim.fd, segment.layout, claim.slot, claim.keys, checksums)
                with sync.lock:
                    is_there = sync.index.segments.get(segment.number) is segment
                    if is_there:
                        sync.index.complete(segment, claim.slot, claim.keys, checksums, uses)
                with contextlib.suppress(OSError):
                    sync.ring_stored(segment.number)
        except OSError:
            self._void(claim)
            raise
        if claim.overwrites:
            os.close(claim.fd)
        elif not segment.free:
            self.close()
        return is_there

    def _void(self, claim: _Claim) -> None:
        sync, segment = self._sync, claim.segment
        with sync.table_lock:
            are_last = not claim.overwrites and claim.slot + len(claim.keys) >= segment.used
            sync.files.void(claim.fd, segment.layout, claim.slot, len(claim.keys), are_last)
            with sync.lock:
                if sync.index.segments.get(segment.number) is segment:
                    sync.index.void(segment, claim.slot, claim.keys)
            with contextlib.suppress(OSError):
                sync.ring_stored(segment.number)
        if claim.overwrites:
            os.close(claim.fd)

    # -- copying hot blocks forward ---------------------------------------------------------------------------------

    def _copy_forward(self, victim: Victim) -> None:
        """Copy the victim's hot blocks to the active segment, as far as there is room. Raises OSError."""
        sync, segment, slots = self._sync, victim.segment, victim.hot
        try:
            fd = sync.files.open_to_read(segment.path)
        except FileNotFoundError:
            sync.drop(segment)
            return
        except OSError as error:
            sync.log.read_failed(len(slots), f"opening failed ({error.strerror})", segment.path)
            return
        try:
            while slots and (num_done := self._copy_some(fd, segment, slots[: sync.files.copy_blocks])):
                slots = slots[num_done:]
        except OSError as error:
            # Where the disk is full, the blocks go with their segment.
            if error.errno not in FULL:
                raise
        finally:
            os.close(fd)

    def _copy_some(self, fd: int, segment: Segment, slots: list[int]) -> int:
        """Returns how many of the slots are done with; 0: there is no room. Raises OSError."""
        sync, files = self._sync, self._sync.files
        with sync.lock:
            expected = [(segment.key(slot), segment.checksum(slot)) for slot in slots]
            uses = segment.uses[slots]
        payloads, verified = files.read_copies(fd, segment.layout, slots, expected)
        bad = np.flatnonzero(~verified).tolist()
        damaged = [i for i in bad if not files.is_replaced(fd, segment.layout, slots[i], *expected[i])]
        if damaged:
            sync.log.read_failed(len(damaged), "blocks cannot be copied", segment.path)
        with sync.lock:
            for i in bad:
                sync.index.forget_if(segment, slots[i], *expected[i])
        has_room, claim = self._claim_copies(segment, slots, expected, np.flatnonzero(verified).tolist())
        if claim is None:
            return len(slots) if has_room else 0
        copied, target = claim.positions, claim.segment

        def write() -> list[bytes]:
            files.write_copies(target.path, claim.fd, target.layout, claim.slot, [payloads[i] for i in copied])
            return [expected[i][1] for i in copied]

        if self._complete(claim, write, uses[copied]):
            sync.log.count("copied_blocks", len(copied))
        self._budget.count_copied(len(copied) * target.layout.slot_bytes)
        return copied[-1] + 1

    def _claim_copies(
        self, segment: Segment, slots: list[int], expected: list[tuple[bytes, bytes]], positions: list[int]
    ) -> tuple[bool, _Claim | None]:
        """Claim room in the active segment for blocks of `segment`, positions: among `slots`. Whether there is room,
        and no claim where none of the blocks is there any more. Raises OSError."""
        if not self.lock_folder():
            return False, None
        sync = self._sync
        layout = sync.files.layout
        try:
            # Others may have stored them elsewhere, or evicted the segment.
            place_of = sync.index.places.get
            positions = [
                i
                for i in positions
                if place_of(expected[i][0]) == segment.place(slots[i])
                and segment.checksum(slots[i]) == expected[i][1]
            ]
            if not positions:
                return True, None
            held = self._usable_held() or self._adopt()
            positions = positions[: held[0].free if held is not None else layout.num_slots]
            need = len(positions) * layout.slot_bytes + (0 if held is not None else layout.data_offset)
            has_room = not self._room.limit_bytes or self._room.fits_copies(need)
            if not has_room or (held is not None and held[0] is segment):
                return False, None
            target, fd = held or self._begin_segment()
            claim = _Claim(target, fd, target.used, positions, [expected[i][0] for i in positions], False)
            return (True, claim) if self._write_claim(claim) else (False, None)
        finally:
            self.unlock_folder()

    # -- the folder's lock ------------------------------------------------------------------------------------------

    def _with_lock(self, eviction: Eviction, act: Callable[[], _T]) -> _T | None:
        """Do something that may evict with the folder's lock. None: another process hangs. Raises OSError."""
        while self.lock_folder():
            try:
                return act()
            except _UnlockFirstError as error:
                first = error
            finally:
                self.unlock_folder()
            # This ends: a segment from which blocks were copied goes next, or is in use and then stays. Other stores
            # are asked only while all shrink, and not after one gave up nothing.
            if first.owner is self._member:
                self._copy_forward(first.victim)
                eviction.emptied, eviction.wanted_bytes = first.victim.segment, None
            else:
                freed = first.owner.give_up(eviction.copies)
                eviction.asks_below = first.used_bytes if freed else 0
                eviction.freed_bytes += freed
        return None

    def lock_folder(self) -> bool:
        """Take the folder's lock, and take in what others have changed. False: another process hangs, and nothing is
        written for a while. Raises OSError."""
        changes = self._sync.changes
        if not self._sync.folder.is_held():
            self._sync.make_anew()
        if not changes.lock():
            if not changes.is_there():
                self._sync.make_anew()
            if not changes.lock(short=True):
                self.pause()
                self._sync.log.lock_timed_out()
                return False
        try:
            self._sync.refresh_locked()
            self._room.refresh_others(self._member)
            changes.set_holder(True)
            self._delete_unusable()
        except BaseException:
            changes.unlock()
            raise
        return True

    def unlock_folder(self) -> None:
        with contextlib.suppress(OSError):
            self._sync.changes.set_holder(False)
        self._sync.changes.unlock()

    # -- where blocks go, with the folder's lock ---------------------------------------------------------------------

    def _is_being_stored(self, key: bytes, live: set[int]) -> bool:
        """Whether another process is storing the block, or has stored it by now. live: numbers of segments that were
        found to be written to by others. Raises OSError."""
        sync = self._sync
        place = sync.index.claims.get(key)
        segment = sync.index.segments.get(number_of(place)) if place is not None else None
        if segment is not None and segment.number not in live:
            sync.reread(segment)
            if key not in sync.index.claims:
                return key in sync.index
            if self._held is not None and segment is self._held[0]:
                return False  # A claim of this process that could not be taken back.
            fd = self._open_locked(segment)
            if fd is None:
                if sync.index.segments.get(segment.number) is segment:
                    live.add(segment.number)
            else:
                try:
                    self._void_dead_claims(segment, fd)
                finally:
                    os.close(fd)
        return key in sync.index.claims or key in sync.index

    def _open_locked(self, segment: Segment) -> int | None:
        """The segment's file; None: another process writes to it, or it is gone. Raises OSError."""
        try:
            fd = self._sync.files.open_locked(segment.path)
        except FileNotFoundError:
            self._sync.drop(segment)
            return None
        if fd is not None and not self._sync.files.is_segment(fd, segment.layout, segment.inode):
            os.close(fd)
            self._sync.reread(segment)  # Another file has its name.
            return None
        return fd

    def void_dead_claims(self, segment: Segment) -> bool:
        """With the folder's lock: take back claims that will not be filled. False: another process fills them. Raises
        OSError."""
        if self._held is not None and segment is self._held[0]:
            self._void_dead_claims(segment, self._held[1])
            return True
        fd = self._open_locked(segment)
        if fd is None:
            return segment.number not in self._sync.index.segments
        try:
            self._void_dead_claims(segment, fd)
        finally:
            os.close(fd)
        return True

    def _void_dead_claims(self, segment: Segment, fd: int) -> None:
        """fd: locked, so that no process writes to the segment. Raises OSError."""
        sync = self._sync
        with sync.table_lock:
            table = sync.files.void_dead_claims(fd, segment.layout)
            with sync.lock:
                if sync.index.segments.get(segment.number) is segment:
                    sync.index.sync(segment, table, allocated_bytes(os.fstat(fd)))
        sync.ring_erased(segment.number)

    def _find_slots(self, num_missing: int, eviction: Eviction) -> tuple[Segment, int, range, bool] | None:
        """A segment, its file, locked, free slots for some of the blocks, and whether these hold spare blocks. None:
        there is no room. Raises OSError and _UnlockFirstError."""
        sync = self._sync
        files, layout = sync.files, sync.files.layout
        self._room.find_leftovers()
        held = self._usable_held() or self._adopt()
        free = held[0].free if held is not None else layout.num_slots
        num_blocks = min(num_missing, free, files.batch_blocks)
        need = num_blocks * layout.slot_bytes + (0 if held is not None else layout.data_offset)
        can_grow = self._room.leftover_bytes or self.fits(need)
        if not can_grow and (spare := self._take_spare(num_blocks)) is not None:
            return *spare, True
        if not self._make_room(need, eviction):
            if not self._room.limit_bytes:
                raise OSError(errno.ENOSPC, f"less than {FREE_SHARE:.0%} of the file system is free")
            return None
        segment, fd = held or self._begin_segment()
        return segment, fd, range(segment.used, segment.used + num_blocks), False

    def _usable_held(self) -> tuple[Segment, int] | None:
        """The active segment, if it has free slots and its file was not deleted."""
        index = self._sync.index
        if self._held is None:
            return None
        segment, fd = self._held
        if segment is index.active:
            if not os.fstat(fd).st_nlink:
                self._sync.drop(segment)
            elif segment.free:
                return self._held
        self.close()
        return None

    def _adopt(self) -> tuple[Segment, int] | None:
        """An unfinished segment that no process writes to becomes the active one. Raises OSError."""
        sync = self._sync
        page_size = sync.files.layout.page_size
        unfinished = [s for s in sync.index.segments.values() if s.free and s.layout.page_size == page_size]
        for segment in sorted(unfinished, key=lambda s: -s.number)[:_MAX_ADOPTIONS]:
            fd = self._open_locked(segment)
            if fd is None:
                continue
            try:
                self._void_dead_claims(segment, fd)
            except OSError:
                os.close(fd)
                raise
            if segment.free:
                sync.index.active, self._held = segment, (segment, fd)
                return self._held
            os.close(fd)
        return None

    def _begin_segment(self) -> tuple[Segment, int]:
        """A new active segment, empty. Raises OSError."""
        sync = self._sync
        numbers = segment_numbers(sync.folder.path)
        number = max(sync.index.next_number, numbers[-1] + 1 if numbers else 1)
        path = segment_path(sync.folder.path, number)
        fd = sync.files.create(path)
        segment = Segment(number, path, sync.files.layout, os.fstat(fd).st_ino)
        with sync.lock:
            sync.index.begin(segment)
        self._held = segment, fd
        try:
            sync.ring_folder()
        except OSError:
            # Others would not know of what is written to it.
            self.close()
            sync.drop(segment)
            self.unlink(path)
            raise
        return self._held

    def _take_spare(self, most: int) -> tuple[Segment, int, range] | None:
        """Slots whose blocks are given up, `most` at most. Raises OSError."""
        sync = self._sync
        written_by_others: set[int] = set()
        while True:
            with sync.lock:
                segment = sync.index.most_spare(sync.files.layout.page_size, written_by_others)
            if segment is None:
                return None
            if self._held is not None and segment is self._held[0]:
                fd: int | None = os.dup(self._held[1])
            else:
                fd = self._open_locked(segment)
            if fd is None:
                written_by_others.add(segment.number)
                continue
            with sync.lock:
                # A read may use the segment now, or have found its blocks damaged.
                if is_spare := sync.index.is_spare(segment):
                    slots = sync.index.take_spare(segment, most)
            if is_spare:
                sync.log.count("evicted_blocks", len(slots))
                return segment, fd, slots
            os.close(fd)

    # -- room -----------------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """To the limit, which may have been larger. What was being copied by a process that was killed stays. Raises
        OSError."""
        if self._room.limit_bytes and not self._room.fits_copies(0):
            eviction = Eviction(copies=False)
            self._with_lock(eviction, lambda: self._make_room(-self._room.reserve_bytes, eviction))

    def _make_room(self, need_bytes: int, eviction: Eviction) -> bool:
        """Evict until need_bytes more are within the limit; False: that is not possible. Raises _UnlockFirstError."""
        if self._room.limit_bytes:
            # Asked anew each time: leftovers may have gone without this store's doing.
            while not self.fits(need_bytes):
                if not self._evict(eviction):
                    return self.fits(need_bytes)
            return True
        if eviction.wanted_bytes is None:
            disk = os.statvfs(self._sync.folder.path)
            reserve = int(disk.f_blocks * disk.f_frsize * FREE_SHARE)
            # Where others fill the disk, the store stops growing, but gives nothing up.
            eviction.wanted_bytes = min(need_bytes, reserve + need_bytes - disk.f_bavail * disk.f_frsize)
            eviction.freed_bytes = 0
        while eviction.freed_bytes < eviction.wanted_bytes:
            if not self._evict(eviction):
                return False
        return True

    def _make_room_on_disk(self) -> bool:
        eviction = Eviction(copies=False)
        return bool(self._with_lock(eviction, lambda: eviction.freed_bytes > 0 or self._evict(eviction)))

    def give_up_segment(self, copies: bool) -> int:
        """See Member."""
        eviction = Eviction(copies, asks_below=0)
        with self._pausing():
            self._with_lock(eviction, lambda: self._evict(eviction))
        return eviction.freed_bytes

    def _evict(self, eviction: Eviction) -> bool:
        """Delete the segment that is worth least, other namespaces' leftovers first. False: this process has used
        all, or others write to it. Raises _UnlockFirstError."""
        freed = self._room.evict_leftover()
        if not freed:
            chosen = self._room.choose_victim(self._member, eviction)
            if chosen is None:
                return False
            owner, victim = chosen
            if owner is not self._member or victim.hot:
                raise _UnlockFirstError(owner, victim, self._room.size_bytes)
            self._sync.log.count("evicted_blocks", victim.segment.live)
            self._room.is_full = True
            self.delete([victim.segment])
            freed = victim.segment.size_bytes
        eviction.freed_bytes += freed
        return True

    def delete(self, segments: list[Segment]) -> bool:
        """With the folder's lock: forget segments, and delete their files. Whether all files are gone."""
        are_gone = True
        for segment in segments:
            self._sync.drop(segment)
            are_gone &= self.unlink(segment.path)
        with contextlib.suppress(OSError):
            self._sync.ring_folder()
        return are_gone

    def unlink(self, path: str) -> bool:
        """Whether the file is gone."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.pause()
            self._sync.log.write_failed(error)
            return False
        return True

    def clear(self) -> bool:
        """Delete every segment, those too to which others write: they find that out at their next write. Without the
        lock, where another process hangs: it finds its files gone. Whether all files are gone."""
        self.close()
        sync = self._sync
        is_locked = self.lock_folder() if sync.folder.writable else False
        try:
            sync.refresh()
            are_gone = self.delete(list(sync.index.segments.values()))
            # What is no segment any more is not in the index.
            for number in sorted(sync.unusable):
                if self.unlink(segment_path(sync.folder.path, number)):
                    sync.unusable.discard(number)
                else:
                    are_gone = False
        finally:
            if is_locked:
                self.unlock_folder()
        self._room.is_full = False
        return are_gone

    def delete_unusable(self) -> None:
        """At the start: files that are no segments. Raises OSError."""
        if self._sync.unusable and self.lock_folder():
            self.unlock_folder()

    def _delete_unusable(self) -> None:
        """With the folder's lock: what is certainly no segment, and is not written to by another process."""
        sync = self._sync
        is_any_gone = False
        for number in sorted(sync.unusable):
            path = segment_path(sync.folder.path, number)
            head = read_head(path, sync.files.layout)
            if isinstance(head, UsableHead):
                sync.take_in(number)
            elif not head.is_certain or sync.files.is_written_by_another(path):
                continue
            else:
                try:
                    os.unlink(path)
                    is_any_gone = True
                except FileNotFoundError:
                    pass
                except OSError:
                    continue
            sync.unusable.discard(number)
        if is_any_gone:
            sync.ring_folder()
