"""`TenantBlocks`: erases and limits what one tenant has in a namespace's folder.

Owns the limits and the `TenantLog`. The blocks themselves are the segments'. What is erased leaves the index and the
table, so that no process finds it, and zeros are written over its bytes before the call returns.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from sglang.srt.mem_cache.storage.file.index_sync import IndexSync
from sglang.srt.mem_cache.storage.file.recovery import UnusableHead, read_head, segment_numbers, segment_path
from sglang.srt.mem_cache.storage.file.segment import CLAIMED
from sglang.srt.mem_cache.storage.file.segment_index import Segment, number_of, slot_of
from sglang.srt.mem_cache.storage.file.segment_writer import SegmentWriter
from sglang.srt.mem_cache.storage.file.tenant_log import TenantLog, erase_leftovers

logger = logging.getLogger(__name__)

# Other processes may be writing blocks of the tenant: these are waited for so long.
WAIT_S = 5.0
_LOOK_AGAIN_S = 0.05
# Blocks that were given up for a limit and are remembered, so that they count as stored: what memory has of them must
# not be written again and again.
_MAX_GIVEN_UP = 1 << 17
# What is over a limit goes with that share of the limit, so that the next write does not cause the same again.
_SHARE_AHEAD = 1 / 32


class TenantBlocks:
    """root: of all namespaces. sleep: in seconds, between looks at what others write."""

    def __init__(
        self, root: Path, sync: IndexSync, writer: SegmentWriter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._root = root
        # Whether other namespaces' folders have blocks of which it is not known whose they are.
        self._has_old_blocks = False
        self._sync = sync
        self._writer = writer
        self._sleep = sleep
        self.log = TenantLog(sync.folder.path, sync.files.budget.count_written)
        writer.claiming = self._note
        # Tenant -> the most blocks.
        self._limits: dict[bytes, int] = {}
        # Of tenants with a limit, the blocks that there are at most.
        self._counts: dict[bytes, int] = {}
        # Blocks that are not stored for the sake of a limit -> whose they are, oldest first.
        self._given_up: dict[bytes, bytes] = {}

    def open(self) -> None:
        """At the start. Raises OSError."""
        if self._sync.folder.writable and self._writer.lock_folder():
            try:
                self.log.create(is_complete=not self._sync.index.segments)
            finally:
                self._writer.unlock_folder()

    def _note(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        """With the folder's lock: blocks are about to be claimed. Raises OSError."""
        index = self._sync.index
        # Also for blocks that are no tenant's: later it would not be known that they are not.
        self.log.create(is_complete=not len(index))
        if not tenant:
            return
        if self.log.append(tenant, keys):
            self.log.rewrite(lambda _, key: key in index or key in index.claims or key in keys)
        if tenant in self._counts:
            self._counts[tenant] += len(keys)

    def erase(self, tenant: bytes) -> bool:
        """See TenantStore."""
        if not self._sync.folder.writable:
            logger.warning("%s cannot be written: nothing is erased from it", self._sync.folder.path)
            return False
        try:
            waited_s = 0.0
            while (num_left := self._erase(tenant)) and waited_s < WAIT_S:
                self._sleep(_LOOK_AGAIN_S)
                waited_s += _LOOK_AGAIN_S
            if num_left:
                logger.warning(
                    "others are writing %d blocks of a tenant to %s, whose blocks were erased: erase it there, "
                    "or again",
                    num_left,
                    self._sync.folder.path,
                )
                return False
            return self._is_complete()
        except OSError as error:
            self._sync.log.write_failed(error)
            return False

    def _is_complete(self) -> bool:
        if self.log.is_complete and not self._has_old_blocks:
            return True
        logger.warning(
            "%s has blocks of an earlier version, of which it is not known whose they are: clear it, and delete the "
            "folders below it that no server uses, to be certain that nothing of the tenant is left",
            self._root,
        )
        return False

    def _erase(self, tenant: bytes) -> int:
        """Returns how many blocks of the tenant are being written, or may be. Raises OSError."""
        sync, index = self._sync, self._sync.index
        if not self._writer.lock_folder():
            raise TimeoutError(0, "another process keeps the lock of the folder")
        try:
            keys = set(self.log.keys_of(tenant))
            self._drop(keys)
            self._wipe_forgotten(keys)
            claimed = self._delete_unusable(keys)
            for segment in list(index.segments.values()):
                slots = [slot for slot in range(segment.used) if segment.checksum(slot) == CLAIMED]
                mine = keys.intersection(segment.key(slot) for slot in slots)
                if mine and not self._writer.void_dead_claims(segment):
                    claimed |= mine
            self.log.rewrite(lambda whose, key: whose != tenant or key in claimed)
            self._counts.pop(tenant, None)
            if not claimed:
                self._delete_empty(list(index.segments.values()))
                self._has_old_blocks = erase_leftovers(self._root, sync.folder.path, tenant)
            return len(claimed)
        finally:
            self._writer.unlock_folder()

    def _drop(self, keys: Iterable[bytes]) -> None:
        """Take blocks out of the index, the tables and the files. With the folder's lock. Raises OSError."""
        index = self._sync.index
        slots_of: dict[int, list[int]] = defaultdict(list)
        for key in keys:
            if (place := index.places.get(key)) is not None:
                slots_of[number_of(place)].append(slot_of(place))
        for number, slots in slots_of.items():
            self._wipe(index.segments[number], sorted(slots))

    def _wipe(self, segment: Segment, slots: Sequence[int]) -> None:
        sync, index = self._sync, self._sync.index
        with sync.table_lock:
            try:
                sync.files.wipe(segment.path, segment.layout, slots)
            except FileNotFoundError:
                pass  # another process has deleted it
            with sync.lock:
                for slot in slots:
                    index.forget(segment, slot)
                    index.void(segment, slot, [segment.key(slot)])
        sync.ring_erased(segment.number)

    def _wipe_forgotten(self, keys: Collection[bytes]) -> None:
        """Blocks that are not in the index any more, though they are in the files: a bad one, or one that was to be
        overwritten, where the disk then failed. With the folder's lock. Raises OSError."""
        for segment in list(self._sync.index.segments.values()):
            with contextlib.suppress(FileNotFoundError):
                if slots := self._sync.files.slots_with(segment.path, segment.layout, keys):
                    self._wipe(segment, slots)

    def _delete_unusable(self, keys: set[bytes]) -> set[bytes]:
        """Segments whose head was damaged while the folder was open: they have left the index, and may have blocks of
        the tenant. With the folder's lock. Returns those of the keys that may be in one to which others write. Raises
        OSError."""
        files, left = self._sync.files, set[bytes]()
        for number in segment_numbers(self._sync.folder.path):
            path = segment_path(self._sync.folder.path, number)
            if number in self._sync.index.segments:
                continue
            head = read_head(path, files.layout)
            if isinstance(head, UnusableHead) and not head.is_certain:
                raise OSError(f"{path} cannot be read ({head.reason}), and may have blocks of the tenant")
            # One that is empty is about to be begun.
            if isinstance(head, UnusableHead) and head.reason:
                self._writer.close()  # it may be this process's own
                if not files.is_written_by_another(path):
                    self._writer.unlink(path)
                elif files.slots_with(path, files.layout, keys):
                    left = keys
        return set(left)

    def _delete_empty(self, segments: Iterable[Segment]) -> None:
        """With the folder's lock: segments that have no block any more, and to which no process writes."""
        index = self._sync.index
        empty = [
            segment
            for segment in segments
            if not segment.live
            and segment.used
            and segment is not index.active
            and not self._sync.files.is_written_by_another(segment.path)
        ]
        if empty:
            self._writer.delete(empty)

    # -- limits -------------------------------------------------------------------------------------------------

    def has_given_up(self, key: bytes) -> bool:
        """Whether the block is not stored because its tenant has as many as it may."""
        return key in self._given_up

    def admitted(self, tenant: bytes, keys: Sequence[bytes], missing: list[int]) -> list[int]:
        """Those of the missing blocks, by their positions among the keys, that may be stored."""
        limit = self._limits.get(tenant)
        if limit is None:
            return missing
        for i in missing[:limit]:
            self._given_up.pop(keys[i], None)
        self._give_up(tenant, [keys[i] for i in missing[limit:]])
        return missing[:limit]

    def _give_up(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._given_up.pop(key, None)
            self._given_up[key] = tenant
        while len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def limit(self, tenant: bytes, num_blocks: int) -> bool:
        """See TenantStore. Holds for what this process stores. If it fails, the limit before holds on."""
        before = self._limits.pop(tenant, None)
        self._counts.pop(tenant, None)
        self._given_up = {key: whose for key, whose in self._given_up.items() if whose != tenant}
        if num_blocks < 0:
            return True
        self._limits[tenant] = num_blocks
        try:
            self.enforce(tenant)
            return True
        except OSError as error:
            self._sync.log.write_failed(error)
            del self._limits[tenant]
            if before is not None:
                self._limits[tenant] = before
            return False

    def enforce(self, tenant: bytes) -> None:
        """After blocks were stored. Raises OSError."""
        limit = self._limits.get(tenant)
        if limit is None or self._counts.get(tenant, limit + 1) <= limit or not self._sync.folder.writable:
            return
        if not self._writer.lock_folder():
            return
        index = self._sync.index
        try:
            with contextlib.suppress(FileNotFoundError):
                places = {key: index.places[key] for key in self.log.keys_of(tenant) if key in index}
                if len(places) > limit:
                    used = sorted(places, key=lambda key: _last_use(index.segments, places[key]))
                    going = used[: len(places) - limit + int(limit * _SHARE_AHEAD)]
                    self._drop(going)
                    self._give_up(tenant, going)
                    self._sync.log.count("evicted_blocks", len(going))
                self._counts[tenant] = sum(key in index for key in places)
        finally:
            self._writer.unlock_folder()


def _last_use(segments: dict[int, Segment], place: int) -> int:
    return int(segments[number_of(place)].uses[slot_of(place)])
