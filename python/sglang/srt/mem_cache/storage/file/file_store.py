"""`HiCacheFile`: the disk tier, a `BlockStore` of segment files in a folder per namespace.

Owns the lock around the index, the limit, and what is counted and logged. Reads go straight into the pages of the
host pool, and writes come straight from them, where the pool is page-first. Never reads the tree, starts no thread
that outlives a call, and raises on opening alone: what a medium can do wrong ends a call's count, is counted and
logged.

    block --set--> entry in the active segment --segment full--> sealed --least recently used, limit--> unlinked
      ^                  | get: checksum or read fails
      +--- set anew <----+ forgotten: out of the index, entry zeroed

Its parts: `SegmentIndex` (which blocks there are, and where), `SegmentFiles` (bytes in and out of files), `recovery`
(what a start finds), `folder` (the namespace's folder, its lock, leftovers). Format, crash safety and tuning:
docs/design/disk.md.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.storage.file.folder import Leftovers, NamespaceFolder, allocated_bytes, open_namespace
from sglang.srt.mem_cache.storage.file.page_buffers import HostPages
from sglang.srt.mem_cache.storage.file.recovery import UnusableHead, read_heads, segment_path
from sglang.srt.mem_cache.storage.file.segment import SegmentLayout, namespace_digest
from sglang.srt.mem_cache.storage.file.segment_files import SegmentFiles
from sglang.srt.mem_cache.storage.file.segment_index import Segment, SegmentIndex, number_of, runs, slot_of
from sglang.srt.mem_cache.storage.registry import CONFIG_FLAG

logger = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES = 256 << 20
# Of a limit: then evicting one segment loses little of what is stored.
_SEGMENTS_PER_LIMIT = 8
# Without a limit, the store stops growing when less than this share of the file system is free.
FREE_SHARE = 0.1
# After a failed write none is tried for so long, so that a full disk costs a failed call per pause, not per request.
WRITE_PAUSE_S = 10.0
LOG_INTERVAL_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Opening a segment: there is none, or a link in its place.
_GONE = (errno.ENOENT, errno.ELOOP)


class HiCacheFile:
    """A namespace's blocks on disk.

    root: shared with other namespaces and ranks. namespace: everything that two engines must have in common to share
    KV: the model's fingerprint, dtype, layout, rank. limit_bytes: 0 for none but FREE_SHARE of the file system.
    clock: seconds, for pauses between attempts and log lines.

    Raises StoreError where the folder cannot be used.
    """

    name = "file"

    def __init__(
        self,
        root: Path,
        namespace: str | bytes,
        pool: HostPages,
        block_tokens: int,
        limit_bytes: int = 0,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        is_exclusive: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert block_tokens % pool.page_size == 0
        self.block_tokens = block_tokens
        self.limit_bytes = limit_bytes
        self._is_exclusive = is_exclusive
        self._pages_per_block = block_tokens // pool.page_size
        shape = (block_tokens, pool.page_size, pool.page_bytes)
        raw = namespace.encode() if isinstance(namespace, str) else namespace
        layout = SegmentLayout(namespace_digest(raw, *shape), *shape, num_slots=1)
        if limit_bytes:
            segment_bytes = min(segment_bytes, limit_bytes // _SEGMENTS_PER_LIMIT)
            if limit_bytes < layout.size_bytes(1):
                raise StoreError(
                    f"limit_gb in {CONFIG_FLAG} is {limit_bytes / 1e9:g}, less than one block of this model with its "
                    f"header ({layout.size_bytes(1) / 1e9:g}): raise it"
                )
        self._layout = layout.fitting(segment_bytes)
        self._files = SegmentFiles(pool, self._layout)

        # Guards the index and the counters, and is not held during reads and writes of blocks.
        self._lock = threading.Lock()
        self._index = SegmentIndex()
        self._counters = dict.fromkeys(
            ("read_blocks", "written_blocks", "evicted_blocks", "read_errors", "write_errors"), 0
        )
        self._clock = clock
        # Whether a segment had to go for the limit.
        self._is_full = False
        self._no_write_before = -float("inf")
        self._read_log = _RateLimit(clock)
        self._write_log = _RateLimit(clock)

        # Looked up by the first write that needs room: by then the other ranks of this server hold their folders.
        self._root = root
        self._leftovers: Leftovers | None = None
        self._folder: NamespaceFolder = open_namespace(
            root, layout.namespace, raw.decode("utf-8", "backslashreplace")
        )
        try:
            self._recover()
            if self._folder.writable:
                if self.limit_bytes:
                    self._make_room(0, self._index.tick)  # The limit may have been larger.
                newest = max(self._index.segments, default=None)
                if newest is not None and self._index.segments[newest].free:
                    self._index.active = self._index.segments[newest]
            else:
                logger.warning("%s cannot be written: KV is read from it, and none is stored", self._folder.path)
        except BaseException:
            self._folder.close()
            raise

    # -- the protocol BlockStore ----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another segment is within the limit; True without a limit. Once a segment had to go for a new one
        there is none, until others are lost."""
        segment_bytes = self._layout.size_bytes(self._layout.num_slots)
        return not self.limit_bytes or (not self._is_full and self._fits(segment_bytes))

    def exists(self, keys: Sequence[bytes]) -> int:
        """See BlockStore. What is asked for is soon read."""
        with self._lock:
            return len(self._find_to_read(keys))

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """See BlockStore."""
        pages = frames.reshape(len(keys), self._pages_per_block)
        with self._lock:
            places = self._find_to_read(keys)
            pinned = {number: self._index.segments[number] for number in set(map(number_of, places))}
            for segment in pinned.values():
                segment.pins += 1
        verified = np.zeros(len(places) + 1, bool)
        try:
            for run in runs(places, self._files.batch_blocks):
                first = places[run[0]]
                verified[run], error = self._read(pinned[number_of(first)], slot_of(first), pages[run])
                if error is not None:
                    # A disk that fails often fails slowly: no more of it for this request.
                    break
        finally:
            self._unpin(pinned.values())
        count = int(verified.argmin())
        with self._lock:
            self._counters["read_blocks"] += count
            if self._keeps_unread:
                self._index.make_spare(keys[:count])
        return count

    def set(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """See BlockStore. Stops where it would have to evict what this call stored or found."""
        pages = frames.reshape(len(keys), self._pages_per_block)
        with self._lock:
            before = self._index.tick
            # Each key once, at its first position.
            first = {key: i for i, key in reversed(list(enumerate(keys)))}
            missing = sorted(i for key, i in first.items() if key not in self._index)
            self._index.use([self._index.places[key] for key in keys if key in self._index])
        if missing and self._folder.writable and self._clock() >= self._no_write_before:
            try:
                self._store(keys, pages, missing, before)
            except OSError as error:
                self._write_failed(error)
        with self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def touch(self, keys: Sequence[bytes]) -> int:
        """See TouchedStore."""
        with self._lock:
            self._index.use([place for key in keys if (place := self._index.places.get(key)) is not None])
            return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def clear(self) -> None:
        """See BlockStore. Where the folder cannot be written, the blocks are back when it is opened again."""
        with self._lock:
            segments = list(self._index.segments.values())
            dropped = [(self._index.drop(segment), segment.path) for segment in segments]
            self._is_full = False
        for fd, path in dropped:
            self._delete(fd, path)

    def close(self) -> None:
        """See BlockStore. Keeps the order of use for the next start, as times of the files."""
        with self._lock:
            segments = list(self._index.segments.values())
            fds = self._index.clear()
        for fd in fds:
            os.close(fd)
        if self._folder.writable:
            now = time.time_ns()
            for age, segment in enumerate(reversed(segments)):
                try:
                    os.utime(segment.path, ns=(now - age * 1_000_000, now - age * 1_000_000))
                except OSError:
                    pass
        self._folder.close()

    def stats(self) -> dict[str, int]:
        """See BlockStore. Beside it: segments, leftover_bytes (files of other namespaces that no process uses), and
        blocks read, written and evicted since the start."""
        with self._lock:
            return {
                "blocks": len(self._index),
                "size_bytes": self._index.size_bytes,
                "limit_bytes": self.limit_bytes,
                "segments": len(self._index.segments),
                "leftover_bytes": self._leftover_bytes,
                **self._counters,
            }

    def check_invariants(self) -> None:
        """Asserts; for tests, with no call under way."""
        self._index.check_invariants()
        assert not self.limit_bytes or self._index.size_bytes <= self.limit_bytes

    # -- start ------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Build the index from the segments' tables."""
        index = self._index
        ages = []
        for number, head in read_heads(self._folder.path, self._layout):
            path = segment_path(self._folder.path, number)
            index.next_number = number + 1
            if isinstance(head, UnusableHead):
                if head.reason:
                    self._read_failed(1, head.reason, path)
                if self._folder.writable:
                    self._delete(None, path)
                continue
            table = head.layout.read_table(head.table)
            if table.num_bad:
                self._read_failed(table.num_bad, "entries of its table do not verify", path)
            index.recover(Segment(number, path, head.layout), table, allocated_bytes(head.stat))
            ages.append((head.stat.st_mtime_ns, number))
        for _, number in sorted(ages):
            index.touch(number)

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

    def _read(self, segment: Segment, first_slot: int, pages: np.ndarray) -> tuple[np.ndarray, OSError | None]:
        """Read consecutive slots into pages (n, pages per block). Returns which verified, and why the disk failed.

        Blocks that do not verify or that the disk cannot read are forgotten; those behind one that it cannot read
        were not tried, and stay.
        """
        n = len(pages)
        try:
            fd = self._read_fd(segment)
        except OSError as error:
            none = np.zeros(n, bool)
            if error.errno in _GONE:
                if self._lose(segment):
                    self._read_failed(n, "the file is gone", segment.path)
                return none, None
            self._forget(segment, first_slot)
            self._read_failed(1, f"opening failed ({error.strerror})", segment.path)
            return none, error
        slots = range(first_slot, first_slot + n)
        verified, bad, failure = self._files.read(
            fd,
            segment.layout.slot_offset(first_slot),
            pages,
            [segment.key(slot) for slot in slots],
            [segment.checksum(slot) for slot in slots],
        )
        for i in bad:
            self._forget(segment, first_slot + i)
        if failure is not None:
            self._read_failed(len(bad), f"reading failed ({failure.strerror})", segment.path)
        elif bad:
            self._read_failed(len(bad), "blocks are cut short or do not have their checksum", segment.path)
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

    def _forget(self, segment: Segment, slot: int) -> None:
        """Take a bad block out of the index, and out of the table, so that a restart does not bring it back."""
        with self._lock:
            if not self._index.forget(segment, slot):
                return
        if self._folder.writable:
            try:
                self._files.erase_entry(segment.path, segment.layout, slot)
            except OSError:
                pass  # Then a restart finds it, and a read forgets it again.

    def _lose(self, segment: Segment) -> bool:
        """The file of a segment is gone. False: it was evicted, so this is as it should be."""
        with self._lock:
            if segment.number not in self._index.segments:
                return False
            fd = self._index.drop(segment)
            self._is_full = False
        if fd is not None:
            os.close(fd)
        return True

    # -- writing ----------------------------------------------------------------------------------------------------

    def _store(self, keys: Sequence[bytes], pages: np.ndarray, missing: list[int], before: int) -> None:
        """Write the blocks at positions `missing`; ends early where there is no room. Raises OSError.

        before: the tick at which the call started; nothing used since is evicted for it.
        """
        done = 0
        while done < len(missing):
            if self._leftovers is None:
                self._leftovers = Leftovers(self._root, self._folder.path)
            active = self._index.active
            free = active.free if active is not None else self._layout.num_slots
            batch = missing[done : done + min(free, self._files.batch_blocks)]
            need = len(batch) * self._layout.slot_bytes + (0 if active is not None else self._layout.data_offset)
            spare = None if self._leftover_bytes or self._fits(need) else self._take_spare(len(batch))
            if spare is None and not self._make_room(need, before):
                if not self.limit_bytes:
                    raise OSError(errno.ENOSPC, f"less than {FREE_SHARE:.0%} of the file system is free")
                return
            try:
                done += self._write_batch([keys[i] for i in batch], pages[batch], spare)
            except OSError as error:
                # Others fill the disk too: what is oldest here makes room for what is new, once.
                if error.errno not in _FULL or not self._evict_oldest(before):
                    raise
                done += self._write_batch([keys[i] for i in batch], pages[batch])

    def _write_batch(self, keys: list[bytes], pages: np.ndarray, spare: tuple[Segment, range] | None = None) -> int:
        """Write blocks to the active segment, or to spare slots. Returns how many, fewer only where they do not fit.
        Raises OSError."""
        if spare is not None:
            segment, slots = spare
        else:
            segment = self._index.active or self._begin_segment()
            slots = range(segment.used, segment.layout.num_slots)
        keys, pages = keys[: len(slots)], pages[: len(slots)]
        try:
            fd = self._files.open_to_write(segment.path)
        except OSError as error:
            if error.errno in _GONE:
                self._lose(segment)
            raise
        try:
            checksums = self._files.write(
                segment.path, fd, segment.layout, slots.start, keys, pages, spare is not None
            )
        finally:
            os.close(fd)
        with self._lock:
            # Unless a reader found that the file is gone, and the blocks with it.
            if segment.number in self._index.segments:
                self._index.add_blocks(segment, slots.start, keys, checksums)
                self._counters["written_blocks"] += len(keys)
        return len(keys)

    def _take_spare(self, most: int) -> tuple[Segment, range] | None:
        """See `SegmentIndex.take_spare`."""
        with self._lock:
            spare = self._index.take_spare(most)
            if spare is not None:
                self._counters["evicted_blocks"] += len(spare[1])
        return spare

    def _begin_segment(self) -> Segment:
        """A new active segment, empty."""
        number = self._index.next_number
        path = segment_path(self._folder.path, number)
        self._files.create(path)
        segment = Segment(number, path, self._layout)
        with self._lock:
            self._index.begin(segment)
        return segment

    def _make_room(self, need_bytes: int, before: int) -> bool:
        """Evict until need_bytes more are within the limit; False: that is not possible."""
        if self.limit_bytes:
            # Asked anew each time: leftovers may have gone without this store's doing.
            while not self._fits(need_bytes):
                if not self._evict_oldest(before):
                    return self._fits(need_bytes)
            return True
        disk = os.statvfs(self._folder.path)
        reserve = int(disk.f_blocks * disk.f_frsize * FREE_SHARE)
        # Where others fill the disk, the store stops growing, but gives nothing up.
        over = min(need_bytes, reserve + need_bytes - disk.f_bavail * disk.f_frsize)
        while over > 0:
            freed = self._evict_oldest(before)
            if not freed:
                return False
            over -= freed
        return True

    def _fits(self, need_bytes: int) -> bool:
        return self._index.size_bytes + self._leftover_bytes + need_bytes <= self.limit_bytes

    def _evict_oldest(self, before: int) -> int:
        """Delete what was not used for longest, other namespaces' leftovers first. Returns the bytes that this frees;
        0: all was used after tick `before`."""
        if self._leftovers is not None and (freed := self._leftovers.evict_oldest()):
            return freed
        with self._lock:
            victim = self._index.oldest()
            if victim is None or victim.last_used > before:
                return 0
            self._counters["evicted_blocks"] += victim.live
            self._is_full = True
            fd = self._index.drop(victim)
        self._delete(fd, victim.path)
        return victim.size_bytes

    @property
    def _leftover_bytes(self) -> int:
        return self._leftovers.size_bytes if self._leftovers is not None else 0

    def _delete(self, fd: int | None, path: str) -> None:
        if fd is not None:
            os.close(fd)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._write_failed(error)

    def _read_failed(self, num_blocks: int, why: str, path: str) -> None:
        with self._lock:
            self._counters["read_errors"] += num_blocks
        if self._read_log.allows():
            logger.warning(
                "%s: %s; their KV is computed again and stored anew (%d such blocks since the start; look at the "
                "disk if the number grows)",
                path,
                why,
                self._counters["read_errors"],
            )

    def _write_failed(self, error: OSError) -> None:
        with self._lock:
            self._counters["write_errors"] += 1
            self._no_write_before = self._clock() + WRITE_PAUSE_S
        if self._write_log.allows():
            advice = "free space on it or set limit_gb" if error.errno in _FULL else "look at the disk"
            logger.warning(
                "storing KV in %s failed (%s): %s, or name another folder with path in %s; requests go on without "
                "(%d such failures since the start)",
                self._folder.path,
                error.strerror,
                advice,
                CONFIG_FLAG,
                self._counters["write_errors"],
            )


class _RateLimit:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = -float("inf")

    def allows(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + LOG_INTERVAL_S
        return True
