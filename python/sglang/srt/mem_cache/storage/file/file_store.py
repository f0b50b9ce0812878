"""`HiCacheFile`: the disk tier, a `BlockStore` of segment files in a folder per namespace, which processes share.

Owns its parts, and reads with them. Reads go straight into the pages of the host pool, and writes come straight from
them, where the pool is page-first. Never reads the tree, starts no thread that outlives a call, and raises on opening
alone: what a medium can do wrong ends a call's count, is counted and logged.

    block --set--> entry in the active segment --segment full--> sealed --worth least, limit--> unlinked
      ^                  | get: checksum or read fails    ^              | hot blocks
      +--- set anew <----+ forgotten: entry zeroed        +--------------+ copied forward

Its parts: `SegmentIndex` (which blocks there are, and where), `IndexSync` (what other processes change),
`SegmentWriter` (claims, room, copies), `SharedRoom` (the limit, which the stores of a rank share), `TenantBlocks`
(erasing and limits of tenants), `eviction` (which segment goes), `WriteBudget` (bytes written), `SegmentFiles` (bytes
in and out of files), `recovery` (what a start finds), `folder` (the namespace's folder, leftovers). Format, crash
safety and tuning: docs/design/disk.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang.srt.mem_cache.block_store import StoreError, longest_seen
from sglang.srt.mem_cache.storage.file.folder import NamespaceFolder, cannot_use, find_earlier_format
from sglang.srt.mem_cache.storage.file.index_sync import IndexSync
from sglang.srt.mem_cache.storage.file.segment import VERSION, SegmentLayout, namespace_digest
from sglang.srt.mem_cache.storage.file.segment_files import SegmentFiles
from sglang.srt.mem_cache.storage.file.segment_index import Segment, number_of, runs, slot_of
from sglang.srt.mem_cache.storage.file.segment_writer import SegmentWriter
from sglang.srt.mem_cache.storage.file.shared_room import SharedRoom
from sglang.srt.mem_cache.storage.file.store_log import StoreLog
from sglang.srt.mem_cache.storage.file.tenant_blocks import TenantBlocks
from sglang.srt.mem_cache.storage.file.write_budget import DEFAULT_REWRITE_SHARE, WriteBudget
from sglang.srt.mem_cache.storage.host_pages import HostPages
from sglang.srt.mem_cache.storage.registry import CONFIG_FLAG
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.byte_sizes import shown_size

logger = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES = 256 << 20
# Of a limit: then evicting one segment loses little of what is stored.
_SEGMENTS_PER_LIMIT = 8
# What `stats` tells of all stores in a room.
_OF_ROOM = frozenset(("limit_bytes", "leftover_bytes", "last_day_written_bytes", "daily_limit_bytes"))
# Segments that may go with as many hot blocks as can be copied, after others have gone without any.
_MAX_CREDIT_SEGMENTS = 8


@dataclass(frozen=True)
class FileStoreOptions:
    """How much a store writes, and in which files."""

    # Of all segments; 0: no limit but FREE_SHARE of the file system.
    limit_bytes: int = 0
    # Of one segment at most.
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    # See `StorageSetup`.
    is_exclusive: bool = False
    # See `WriteBudget`.
    rewrite_share: float = DEFAULT_REWRITE_SHARE
    daily_write_bytes: int = 0


class HiCacheFile:
    """A namespace's blocks on disk.

    root: shared with other namespaces and ranks. namespace: everything that two engines must have in common to share
    KV, beside the layout without its page size: the model's fingerprint, rank. clock: seconds, for pauses between
    attempts, log lines and the last day. beside: a store of this process under the same root, with the same options,
    with which this one shares the limits; a `set` of both begins with the one that was opened first.

    Raises StoreError where the folder cannot be used.
    """

    name = "file"

    def __init__(
        self,
        root: Path,
        namespace: str | bytes,
        pool: HostPages,
        block_tokens: int,
        options: FileStoreOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        beside: HiCacheFile | None = None,
    ) -> None:
        options = options or FileStoreOptions()
        limit_bytes, segment_bytes = options.limit_bytes, options.segment_bytes
        assert block_tokens % pool.page_size == 0
        self.block_tokens = block_tokens
        self.limit_bytes = limit_bytes
        self._is_exclusive = options.is_exclusive
        self._pages_per_block = block_tokens // pool.page_size
        raw = namespace.encode() if isinstance(namespace, str) else namespace
        digest = namespace_digest(raw, block_tokens, pool.page_layout)
        layout = SegmentLayout(digest, block_tokens, pool.page_layout, num_slots=1)
        self._room: SharedRoom = beside._room if beside is not None else SharedRoom(root, limit_bytes)
        if limit_bytes:
            segment_bytes = min(segment_bytes, limit_bytes // _SEGMENTS_PER_LIMIT)
            least_bytes = self._room.least_bytes + layout.size_bytes(1)
            if limit_bytes < least_bytes:
                raise StoreError(
                    f"limit_gb in {CONFIG_FLAG} is {limit_bytes / 1e9:g}, less than one block of this model with its "
                    f"header ({least_bytes / 1e9:g}): raise it"
                )
        description = raw.decode("utf-8", "backslashreplace")
        self._folder = NamespaceFolder(root, digest, description)
        self._log = StoreLog(self._folder.path, clock)
        layout = layout.fitting(segment_bytes)
        # With as many from each segment, what is copied is that share of what is stored.
        max_copies = int(layout.num_slots * options.rewrite_share / (1 + options.rewrite_share))
        max_credit = _MAX_CREDIT_SEGMENTS * max_copies * layout.slot_bytes
        self._budget: WriteBudget = WriteBudget(
            options.rewrite_share,
            max_credit,
            options.daily_write_bytes,
            clock,
            beside._budget if beside is not None else None,
        )
        self._files = SegmentFiles(pool, layout, self._budget)
        self._sync = IndexSync(self._folder, self._files, self._log, clock)
        # Guards the index, and is not held during reads and writes.
        self._lock, self._index = self._sync.lock, self._sync.index
        self._writer = SegmentWriter(self._room, self._sync, max_copies, clock)
        self._tenants = TenantBlocks(root, self._sync, self._writer)
        try:
            self._sync.open()
            if self._folder.writable:
                with contextlib.suppress(OSError):
                    self._writer.delete_unusable()
                    self._writer.shrink()
                    self._tenants.open()
            else:
                logger.warning("%s cannot be written: KV is read from it, and none is stored", self._folder.path)
            if self._folder.writable and not self._folder.has_locks:
                logger.warning(
                    "the file system of %s has no file locks (flock): no other process may write to this folder; "
                    "give each server a folder of its own with path in %s",
                    self._folder.path,
                    CONFIG_FLAG,
                )
            self._refused_segments = self._refuse_earlier_format(root, description)
        except OSError as error:
            self.close()
            raise StoreError(cannot_use(root, error)) from error
        except BaseException:
            self.close()
            raise

    # -- what is there --------------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is stored, as this process knows it. From any thread."""
        return key in self._index

    def take_given_up(self) -> list[bytes]:
        """Keys of blocks that were given up since the last call, by this process or another one, as far as this one
        has seen it; since the first call. They may be stored again by now. From any thread."""
        taken_out = self._index.taken_out
        if taken_out is None:
            self._index.taken_out = deque()
            return []
        return [taken_out.popleft() for _ in range(len(taken_out))]

    # -- the protocol BlockStore ----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """See `SharedRoom`."""
        return self._room.has_room

    def exists(self, keys: Sequence[bytes]) -> int:
        """See BlockStore. What is asked for is soon read."""
        self._sync.refresh()
        with self._lock:
            count = len(self._find_to_read(keys))
        self._sync.share_uses()
        return count

    def longest_seen(self, keys: Sequence[bytes], num_seen: int) -> int:
        """See WindowStore. What windows reach there is soon read."""
        self._sync.refresh()
        with self._lock:
            end = longest_seen([key in self._index for key in keys], num_seen)
            self._find_to_read(keys[max(0, end - num_seen) : end])
        self._sync.share_uses()
        return end

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """See BlockStore."""
        self._sync.refresh()
        pages = frames.reshape(len(keys), self._pages_per_block)
        with self._lock:
            places = self._find_to_read(keys)
            pinned = {number: self._index.segments[number] for number in set(map(number_of, places))}
            expected = [(key, pinned[number_of(at)].checksum(slot_of(at))) for key, at in zip(keys, places)]
            for segment in pinned.values():
                segment.pins += 1
        verified = np.zeros(len(places) + 1, bool)
        try:
            for run in runs(places, self._files.batch_blocks):
                segment, first = pinned[number_of(places[run[0]])], slot_of(places[run[0]])
                verified[run], error = self._read(segment, first, pages[run], [expected[i] for i in run])
                if error is not None:
                    # A disk that fails often fails slowly: no more of it for this request.
                    break
        finally:
            self._unpin(pinned.values())
        count = int(verified.argmin())
        self._log.count("read_blocks", count)
        with self._lock:
            if self._keeps_unread:
                self._index.make_spare(keys[:count])
        return count

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        """See BlockStore. Stops where it would have to evict what this call stored or found."""
        self._sync.refresh()
        pages = frames.reshape(len(keys), self._pages_per_block)
        self._writer.begin_set(keys)
        with self._lock:
            # Each key once, at its first position.
            first = {key: i for i, key in reversed(list(enumerate(keys)))}
            missing = sorted(i for key, i in first.items() if key not in self._index)
        if tenant:
            missing = self._tenants.admitted(tenant, keys, missing)
        self._writer.store(keys, pages, missing, tenant)
        if tenant:
            with contextlib.suppress(OSError):
                self._tenants.enforce(tenant)
        with self._lock:
            return self._num_leading(keys)

    def _num_leading(self, keys: Sequence[bytes]) -> int:
        """Of blocks that are stored, or are not for the sake of a limit."""
        lacking = (i for i, key in enumerate(keys) if key not in self._index and not self._tenants.has_given_up(key))
        return next(lacking, len(keys))

    def touch(self, keys: Sequence[bytes]) -> int:
        """See TouchedStore."""
        self._sync.refresh()
        with self._lock:
            self._index.use([place for key in keys if (place := self._index.places.get(key)) is not None])
            count = self._num_leading(keys)
        self._sync.share_uses()
        return count

    def erase(self, tenant: bytes, tier: Tier = Tier.DISK) -> bool:
        """See TenantStore."""
        return self._tenants.erase(tenant)

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        """See TenantStore."""
        assert tier == Tier.DISK
        return self._tenants.limit(tenant, num_blocks)

    def clear(self) -> bool:
        """See BlockStore. Where the folder cannot be written, the blocks are back when it is opened again."""
        try:
            return self._writer.clear()
        except OSError as error:
            self._log.write_failed(error)
            return False

    def close(self) -> None:
        """See BlockStore. Keeps the order of use for the next start, as times of the files."""
        self._writer.leave_room()
        self._sync.close()
        self._folder.close()

    def stats(self) -> dict[str, int]:
        """See BlockStore. Beside it: segments, leftover_bytes (files of other namespaces that no process uses),
        refused_segments (files of this namespace in an earlier format), the bytes of `WriteBudget`, and since the
        start blocks read, their bytes, blocks written, copied forward, evicted and refused by the daily limit, and
        lock_timeouts (pauses in writing because another process kept the folder's lock)."""
        counters = self._log.counters()
        with self._lock:
            return {
                "blocks": len(self._index),
                "size_bytes": self._index.size_bytes,
                "limit_bytes": self.limit_bytes,
                "segments": len(self._index.segments),
                "leftover_bytes": self._room.leftover_bytes,
                "refused_segments": self._refused_segments,
                **self._budget.stats(),
                **counters,
                "read_bytes": counters["read_blocks"] * self._files.layout.slot_bytes,
            }

    def is_of_all(self, name: str) -> bool:
        """See BlockStore."""
        return self._room.is_shared and name in _OF_ROOM

    def check_invariants(self) -> None:
        """Asserts; for tests, with no call under way."""
        self._index.check_invariants()

    # -- start ------------------------------------------------------------------------------------------------------

    def _refuse_earlier_format(self, root: Path, description: str) -> int:
        """Name what an earlier version has stored for this model and rank. Returns the number of its segments."""
        found = find_earlier_format(root, self._folder.path, description)
        if found.num_segments:
            logger.warning(
                "%s: %d files with %s of KV have a format before version %d, which is not read: they count "
                "against limit_gb and go first; delete them to have their space at once",
                ", ".join(map(str, found.folders)),
                found.num_segments,
                shown_size(found.size_bytes),
                VERSION,
            )
        return found.num_segments

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def _keeps_unread(self) -> bool:
        """Whether reading a block makes it the first to be evicted, instead of the last."""
        return self._is_exclusive and not self.has_room

    def _find_to_read(self, keys: Sequence[bytes]) -> list[int]:
        """The places of the leading keys that are stored."""
        places = self._index.find(keys)
        if not self._keeps_unread:
            self._index.use(places)
        return places

    def _read(
        self, segment: Segment, first_slot: int, pages: np.ndarray, expected: list[tuple[bytes, bytes]]
    ) -> tuple[np.ndarray, OSError | None]:
        """Read consecutive slots into pages (n, pages per block). expected: keys and checksums. Returns which
        verified, and why the disk failed.

        Blocks that do not verify or that the disk cannot read are forgotten; those behind one that it cannot read
        were not tried, and stay. What another process has evicted or overwritten is lost, and no error.
        """
        n = len(pages)
        try:
            fd = self._read_fd(segment)
        except OSError as error:
            none = np.zeros(n, bool)
            if error.errno == errno.ENOENT:
                self._sync.drop(segment)
                return none, None
            if error.errno == errno.ELOOP:
                self._sync.drop(segment)
                self._log.read_failed(n, "a link is in the place of the file", segment.path)
                return none, None
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # no fault of the block
                self._forget(segment, first_slot, *expected[0])
            self._log.read_failed(1, f"opening failed ({error.strerror})", segment.path)
            return none, error
        verified, bad, failure = self._files.read(fd, segment.layout, first_slot, pages, expected)
        damaged = []
        for i in bad:
            again = slice(i, i + 1)
            if (
                failure is None
                and self._files.read(fd, segment.layout, first_slot + i, pages[again], expected[again])[0]
            ):
                # The same block was overwritten meanwhile, and has been stored there again.
                verified[i] = True
            elif failure is None and self._files.is_replaced(fd, segment.layout, first_slot + i, *expected[i]):
                with self._lock:
                    self._index.forget_if(segment, first_slot + i, *expected[i])
            else:
                self._forget(segment, first_slot + i, *expected[i])
                damaged.append(i)
        if failure is not None:
            self._log.read_failed(len(bad), f"reading failed ({failure.strerror})", segment.path)
        elif damaged:
            self._log.read_failed(len(damaged), "blocks are cut short or do not have their checksum", segment.path)
        return verified, failure

    def _read_fd(self, segment: Segment) -> int:
        """The file of a pinned segment, open for reading. Only `get` opens, so no file is opened twice."""
        with self._lock:
            fd = self._index.open_file(segment)
        if fd is not None:
            return fd
        fd = self._files.open_to_read(segment.path)
        with self._lock:
            surplus = self._index.add_open_file(segment, fd)
        for other in surplus:
            os.close(other)
        return fd

    def _unpin(self, segments: Iterable[Segment]) -> None:
        with self._lock:
            unused = [self._index.unpin(segment) for segment in segments]
        for fd in unused:
            if fd is not None:
                os.close(fd)

    def _forget(self, segment: Segment, slot: int, key: bytes, checksum: bytes) -> None:
        """Take a bad block out of the index, and out of the table, so that no process and no restart finds it."""
        with self._lock:
            if not self._index.forget_if(segment, slot, key, checksum):
                return
        changes = self._sync.changes
        # Else others find the block too, and forget it when they read it.
        if not self._folder.writable or not changes.lock(short=True):
            return
        try:
            if self._files.erase_entry(segment.path, segment.layout, slot, key, checksum):
                changes.ring_erased([segment.number])
        except OSError:
            pass
        finally:
            changes.unlock()
