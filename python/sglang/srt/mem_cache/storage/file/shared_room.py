"""`SharedRoom`: what the stores of one rank take of the disk together, and which segment of them all goes next.

Owns the limit, and the leftovers that count against it. Deletes leftovers alone, and takes no folder's lock. Where
some layers have a window, these have a store and the others have one (`WindowedStore`); else there is one. One store
at a time is written to.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.mem_cache.storage.file.eviction import Candidates, Victim, choose_victim
from sglang.srt.mem_cache.storage.file.folder import Leftovers
from sglang.srt.mem_cache.storage.file.index_sync import IndexSync
from sglang.srt.mem_cache.storage.file.segment_index import Segment


@dataclass
class Eviction:
    """What may go for one claim, and what has gone."""

    # Whether hot blocks are copied forward before their segment goes.
    copies: bool = True
    # Its hot blocks were copied, and it goes next.
    emptied: Segment | None = None
    # Other stores give up segments while all have fewer bytes than this.
    asks_below: float = math.inf
    # To go without a limit; None: that is not known yet.
    wanted_bytes: int | None = None
    freed_bytes: int = 0


@dataclass(eq=False)
class Member:
    """A store in the room."""

    sync: IndexSync
    # Of blocks, copied forward from one segment at most.
    max_copies: int
    # Whether its segments can be evicted now.
    can_evict: Callable[[], bool]
    # Evicts one segment for another store, with no folder's lock held; True: hot blocks are copied before. Returns
    # the bytes that this frees; 0: it cannot.
    give_up: Callable[[bool], int]
    # The tick of its index at which the last `set` of all stores began; what this process has used since stays.
    before: int = 0

    @property
    def reserve_bytes(self) -> int:
        """For the blocks that are copied from one segment."""
        layout = self.sync.files.layout
        return layout.data_offset + self.max_copies * layout.slot_bytes if self.max_copies else 0

    @property
    def segment_bytes(self) -> int:
        layout = self.sync.files.layout
        return layout.size_bytes(layout.num_slots)

    def use(self, keys: Sequence[bytes]) -> None:
        """Those of the blocks that are stored."""
        index = self.sync.index
        with self.sync.lock:
            index.use([index.places[key] for key in keys if key in index])

    def candidates(self, copies: bool) -> Candidates:
        """With the index's lock. copies: whether hot blocks are copied."""
        files = self.sync.files
        max_copies = min(self.max_copies, files.budget.credit_bytes // files.layout.slot_bytes) if copies else 0
        return Candidates(list(self.sync.index.segments.values()), max_copies, files.layout.page_size)

    def used_later(self, segment: Segment) -> bool:
        """Whether another process has used the segment since this one last looked, which then counts."""
        try:
            used_ns = min(os.stat(segment.path, follow_symlinks=False).st_mtime_ns, time.time_ns())
        except OSError:
            return False
        if used_ns <= segment.used_ns:
            return False
        with self.sync.lock:
            self.sync.index.note_shared_use(segment, used_ns)
        return True


class SharedRoom:
    """root: of all namespaces. limit_bytes: of all segments and leftovers; 0 for none but FREE_SHARE."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Whether a segment had to go for the limit.
        self.is_full = False
        self._root = root
        # In the order in which `WindowedStore` writes to them.
        self._members: list[Member] = []
        self._leftovers: Leftovers | None = None

    def join(self, member: Member) -> None:
        self._members.append(member)

    def leave(self, member: Member) -> None:
        self._members = [each for each in self._members if each is not member]

    # -- how much ---------------------------------------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        return len(self._members) > 1

    @property
    def size_bytes(self) -> int:
        return sum(member.sync.index.size_bytes for member in self._members) + self.leftover_bytes

    @property
    def least_bytes(self) -> int:
        """Of a segment with one block in each store."""
        layouts = [member.sync.files.layout for member in self._members]
        return sum(layout.fitting(0).size_bytes(1) for layout in layouts)

    @property
    def has_room(self) -> bool:
        """Whether another segment is within the limit; True without a limit. Once a segment had to go for a new one
        there is none, until others are lost. Asked by another thread than the one that closes the stores, which may
        be closed already."""
        segment_bytes = max((member.segment_bytes for member in self._members), default=0)
        # Another process may have deleted all, so that much is free.
        num_free = 2 if self.is_full else 1
        return not self.limit_bytes or self.fits(num_free * segment_bytes)

    @property
    def reserve_bytes(self) -> int:
        """Kept free for the blocks that are copied while their old segment, one at a time, is still there."""
        return max((member.reserve_bytes for member in self._members), default=0)

    def fits(self, need_bytes: int) -> bool:
        return self.fits_copies(need_bytes + self.reserve_bytes)

    def fits_copies(self, need_bytes: int) -> bool:
        return self.size_bytes + need_bytes <= self.limit_bytes

    def refresh_others(self, member: Member) -> None:
        """Take in what other processes have changed in other stores than this one."""
        for other in self._members:
            if other is not member:
                other.sync.refresh()

    def is_exceeded(self, member: Member) -> bool:
        """After a claim in one store: whether all have more than the limit now. Of two processes that claim at once,
        each in another folder, one sees the other's claim."""
        if not self.limit_bytes or not self.is_shared:
            return False
        self.refresh_others(member)
        return self.size_bytes > self.limit_bytes

    # -- what goes --------------------------------------------------------------------------------------------------

    def begin_set(self, member: Member, keys: Sequence[bytes]) -> None:
        """Blocks are used as far as they are stored. A `set` of the first store begins one of all stores, to which
        the others' belong: it evicts nothing that is used from now on."""
        is_first = member is self._members[0]
        for each in self._members:
            if is_first:
                each.before = each.sync.index.tick
            if is_first or each is member:
                each.use(keys)

    def choose_victim(self, own: Member, eviction: Eviction) -> tuple[Member, Victim] | None:
        """The segment that is worth least of what may go, and whose it is. None: this process has used all, or others
        write to it. own: the store whose folder's lock this process has."""
        asks = self.size_bytes < eviction.asks_below
        givers = [each for each in self._members if each is own or (asks and each.can_evict())]
        passed_over: set[Segment] = set()
        while True:
            with contextlib.ExitStack() as locks:
                # No other thread takes two of them.
                for each in self._members:
                    locks.enter_context(each.sync.lock)
                owner_of = {
                    segment: each
                    for each in givers
                    for segment in each.sync.index.evictable(each.before)
                    if segment not in passed_over
                }
                if eviction.emptied in owner_of:
                    victim: Victim | None = Victim(eviction.emptied, [])
                else:
                    victim = choose_victim([each.candidates(eviction.copies) for each in self._members], owner_of)
            if victim is None:
                return None
            segment, owner = victim.segment, owner_of[victim.segment]
            if owner.used_later(segment):
                continue
            if owner.sync.files.is_written_by_another(segment.path):
                passed_over.add(segment)
                continue
            return owner, victim

    # -- leftovers --------------------------------------------------------------------------------------------------

    @property
    def leftover_bytes(self) -> int:
        return self._leftovers.size_bytes if self._leftovers is not None else 0

    def find_leftovers(self) -> None:
        """By the first write that needs room: by then the other ranks of this server hold their folders."""
        if self._leftovers is None:
            self._leftovers = Leftovers(self._root, [member.sync.folder.path for member in self._members])

    def evict_leftover(self) -> int:
        """Returns the bytes that this frees; 0: there is none."""
        return self._leftovers.evict_oldest() if self._leftovers is not None else 0
