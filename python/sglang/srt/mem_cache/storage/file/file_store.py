"""`HiCacheFile`: the disk tier, a `BlockStore` of segment files in a folder per namespace.

Owns the index, the segments' order of use and their deletion. Knows the host pool as `HostPages` only: reads go
straight into its pages and writes come straight from them where it is page-first. Never reads the tree, starts no
thread, and raises on opening alone: what a medium can do wrong ends a call's count, is counted and logged.

    block --set--> entry in the active segment --segment full--> sealed --least recently used, limit--> unlinked
      ^                  | get: checksum or read fails
      +--- set anew <----+ forgotten: out of the index, entry zeroed

Format, crash safety and tuning: docs/design/disk.md.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.storage.file.folder import (
    CONFIG_FLAG,
    SEGMENT_SUFFIX,
    Leftovers,
    NamespaceFolder,
    allocated_bytes,
    open_namespace,
)
from sglang.srt.mem_cache.storage.file.segment import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    ENTRY_BYTES,
    KEY_BYTES,
    MAX_SLOTS,
    SegmentError,
    SegmentLayout,
    namespace_digest,
    pieces,
)
from sglang.srt.mem_cache.storage.file.vectored import PartialTransferError, chained, transfer

logger = logging.getLogger(__name__)

ROOT_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
DEFAULT_ROOT = "/tmp/hicache"
DEFAULT_SEGMENT_BYTES = 256 << 20
# Of a limit: then evicting one segment loses little of what is stored.
_SEGMENTS_PER_LIMIT = 8
# Without a limit, the store stops growing when less than this share of the file system is free.
FREE_SHARE = 0.1
# After a failed write none is tried for so long, so that a full disk costs a failed call per pause, not per request.
WRITE_PAUSE_S = 10.0
LOG_INTERVAL_S = 60.0
# Of payloads before their entries are written; of the scratch buffers.
_BATCH_BYTES = 16 << 20
# Per call of reading: it is hashed while it lies in the core's cache, and meanwhile the kernel reads ahead.
_READ_BYTES = 1 << 20
_MAX_OPEN_FILES = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_O_DIRECT = getattr(os, "O_DIRECT", 0)
# Opening a segment: there is none, or a link in its place.
_GONE = (errno.ENOENT, errno.ELOOP)

# The number of a segment and a slot in it, as one int: the index holds a million of them.
_SLOT_BITS = MAX_SLOTS.bit_length() - 1


class HostPages(Protocol):
    """The host pool, as a store sees it. page_bytes: of one page, K and V of all layers; page_size: tokens.

    Frames passed to these are held by the caller until the store's call returns; nobody else writes to them.
    """

    @property
    def page_bytes(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        """The writable memory of pages `frames` (n,) int32, in order, as bytes; neighbours in memory merged into one
        buffer. None: the pool is not page-first, so a page is not one piece of memory."""
        ...

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        """Pages to page-first bytes. out: (n, page_bytes) uint8."""
        ...

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        """Page-first bytes to pages. data: (n, page_bytes) uint8."""
        ...


@dataclass(frozen=True)
class FileSettings:
    """What the extra config holds for this backend."""

    root: Path
    # Of all ranks together; 0 for none.
    limit_bytes: int
    segment_bytes: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FileSettings:
        """From the keys path, limit_gb (1e9 bytes) and segment_mb (1e6). Opens nothing. Raises StoreError."""
        if unknown := sorted(config.keys() - {"path", "limit_gb", "segment_mb"}):
            raise StoreError(
                f"{CONFIG_FLAG} has {', '.join(map(repr, unknown))}, which --hicache-storage-backend file does not "
                "know: it takes path, limit_gb and segment_mb"
            )
        limit_bytes = int(_number(config, "limit_gb", 0) * 1e9)
        segment_bytes = int(_number(config, "segment_mb", DEFAULT_SEGMENT_BYTES / 1e6) * 1e6)
        return cls(config_root(config), limit_bytes, segment_bytes)


class _Segment:
    """A file of blocks, and what is known of it. keys, checksums: of its used slots, one after the other."""

    __slots__ = ("checksums", "fd", "keys", "last_used", "layout", "live", "number", "path", "pins", "size_bytes")

    def __init__(self, number: int, path: str, layout: SegmentLayout) -> None:
        self.number = number
        self.path = path
        self.layout = layout
        self.keys = bytearray()
        self.checksums = bytearray()
        # Slots that the index points to.
        self.live = 0
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert block_tokens % pool.page_size == 0
        self.block_tokens = block_tokens
        self.limit_bytes = limit_bytes
        self._pool = pool
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
        self._batch_blocks = max(1, _BATCH_BYTES // layout.slot_bytes)
        padding_bytes = layout.slot_bytes - layout.payload_bytes
        self._read_padding, self._write_padding = (memoryview(bytearray(padding_bytes)) for _ in range(2))
        # Writes go past the page cache until one shows that the file system does not allow it; through the scratch
        # buffer once one shows that the pool's memory is not aligned.
        self._direct = _O_DIRECT != 0 and not padding_bytes
        self._staged = False
        # For such writes, and for pools that are not page-first; two, as a get and a set may run at once.
        self._read_scratch: np.ndarray | None = None
        self._write_scratch: np.ndarray | None = None

        # Guards all that follows, and is not held during reads and writes of blocks.
        self._lock = threading.Lock()
        self._index: dict[bytes, int] = {}
        # By number; the least recently used first.
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._active: _Segment | None = None
        self._open_files: OrderedDict[int, _Segment] = OrderedDict()
        self._next_number = 1
        self._tick = 0
        self._size_bytes = 0
        self._counters = dict.fromkeys(
            ("read_blocks", "written_blocks", "evicted_blocks", "read_errors", "write_errors"), 0
        )
        self._clock = clock
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
            self._load()
            if self._folder.writable:
                if self.limit_bytes:
                    self._make_room(0, self._tick)  # The limit may have been larger.
                newest = max(self._segments, default=None)
                if newest is not None and self._segments[newest].free:
                    self._active = self._segments[newest]
            else:
                logger.warning("%s cannot be written: KV is read from it, and none is stored", self._folder.path)
        except BaseException:
            self._folder.close()
            raise

    @classmethod
    def from_config(
        cls, config: dict[str, Any], namespace: str | bytes, pool: HostPages, block_tokens: int, num_ranks: int = 1
    ) -> HiCacheFile:
        """From --hicache-storage-backend-extra-config; num_ranks share the limit. Raises StoreError."""
        settings = FileSettings.from_config(config)
        limit_bytes = settings.limit_bytes // num_ranks
        return cls(settings.root, namespace, pool, block_tokens, limit_bytes, settings.segment_bytes)

    # -- the protocol BlockStore ----------------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> int:
        """See BlockStore. What is asked for is soon read, so it counts as used."""
        with self._lock:
            return len(self._use(keys))

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """See BlockStore."""
        pages = frames.reshape(len(keys), self._pages_per_block)
        with self._lock:
            places = self._use(keys)
            pinned = {number: self._segments[number] for number in {p >> _SLOT_BITS for p in places}}
            for segment in pinned.values():
                segment.pins += 1
        verified = np.zeros(len(places) + 1, bool)
        try:
            for run in _runs(places, self._batch_blocks):
                segment = pinned[places[run[0]] >> _SLOT_BITS]
                first_slot = places[run[0]] & (MAX_SLOTS - 1)
                verified[run], error = self._read(segment, first_slot, pages[run])
                if error is not None:
                    # A disk that fails often fails slowly: no more of it for this request.
                    break
        finally:
            self._unpin(pinned.values())
        count = int(verified.argmin())
        with self._lock:
            self._counters["read_blocks"] += count
        return count

    def set(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        """See BlockStore. Stops where it would have to evict what this call stored or found."""
        pages = frames.reshape(len(keys), self._pages_per_block)
        with self._lock:
            before = self._tick
            # Each key once, at its first position.
            first = {key: i for i, key in reversed(list(enumerate(keys)))}
            missing = sorted(i for key, i in first.items() if key not in self._index)
            self._touch_all([self._index[key] for key in keys if key in self._index])
        if missing and self._folder.writable and self._clock() >= self._no_write_before:
            try:
                self._store(keys, pages, missing, before)
            except OSError as error:
                self._write_failed(error)
        with self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def clear(self) -> None:
        """See BlockStore. Where the folder cannot be written, the blocks are back when it is opened again."""
        with self._lock:
            dropped = [self._drop(segment) for segment in list(self._segments.values())]
            self._active = None
        for fd, path in dropped:
            self._delete(fd, path)

    def close(self) -> None:
        """See BlockStore. Keeps the order of use for the next start, as times of the files."""
        with self._lock:
            segments = list(self._segments.values())
            fds = [segment.fd for segment in self._open_files.values()]
            self._open_files.clear()
            self._index.clear()
            self._segments.clear()
            self._active = None
        for fd in fds:
            if fd is not None:
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
        """See BlockStore. Beside it: segments, leftover_bytes (other namespaces' files that nobody uses), and blocks
        read, written and evicted since the start."""
        with self._lock:
            return {
                "blocks": len(self._index),
                "size_bytes": self._size_bytes,
                "limit_bytes": self.limit_bytes,
                "segments": len(self._segments),
                "leftover_bytes": self._leftover_bytes,
                **self._counters,
            }

    def check_invariants(self) -> None:
        """Asserts; for tests, with no call under way."""
        assert self._size_bytes == sum(s.size_bytes for s in self._segments.values())
        assert len(self._index) == sum(s.live for s in self._segments.values())
        for number, segment in self._segments.items():
            assert number == segment.number < self._next_number
            assert segment.pins == 0
            assert segment.used <= segment.layout.num_slots
            assert len(segment.checksums) == segment.used * CHECKSUM_BYTES
            live = [slot for slot in range(segment.used) if self._index.get(segment.key(slot)) == segment.place(slot)]
            assert len(live) == segment.live
            assert (segment.fd is not None) == (number in self._open_files)
        assert self._active is None or self._segments[self._active.number] is self._active
        assert len(self._open_files) <= _MAX_OPEN_FILES
        assert self._open_files.keys() <= self._segments.keys()
        assert not self.limit_bytes or self._size_bytes <= self.limit_bytes

    # -- start ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Build the index from the segments' tables; the blocks themselves are not read."""
        numbers = sorted(n for name in os.listdir(self._folder.path) if (n := _number_of(name)) is not None)
        parts = [numbers[i : i + 256] for i in range(0, len(numbers), 256)]
        # Threads, because a cold disk answers many small reads at once faster than one by one.
        with ThreadPoolExecutor(8, "hicache-open") as threads:
            heads = [
                head for part in threads.map(lambda part: list(map(self._read_head, part)), parts) for head in part
            ]
        ages = []
        for number, head in zip(numbers, heads):
            path = self._path(number)
            self._next_number = number + 1
            if isinstance(head, str):
                if head:
                    self._read_failed(1, head, path)
                if self._folder.writable:
                    self._delete(None, path)
                continue
            stat, layout, raw = head
            table = layout.read_table(raw)
            if table.num_bad:
                self._read_failed(table.num_bad, "entries of its table do not verify", path)
            segment = _Segment(number, path, layout)
            segment.keys, segment.checksums = bytearray(table.keys), bytearray(table.checksums)
            segment.size_bytes = max(layout.size_bytes(segment.used), allocated_bytes(stat))
            segment.live = len(table.slots)
            self._segments[number] = segment
            self._size_bytes += segment.size_bytes
            ages.append((stat.st_mtime_ns, number))
            keys = [table.keys[at : at + KEY_BYTES] for at in range(0, len(table.keys), KEY_BYTES)]
            for slot in table.slots:
                # The same key again: stored anew after its block had gone bad, so the later one counts.
                if (earlier := self._index.get(keys[slot])) is not None:
                    self._segments[earlier >> _SLOT_BITS].live -= 1
                self._index[keys[slot]] = number << _SLOT_BITS | slot
        for _, number in sorted(ages):
            self._touch(number)

    def _read_head(self, number: int) -> tuple[os.stat_result, SegmentLayout, bytes] | str:
        """A file's state, layout and table; a string says why it cannot be used, "" that nothing was written yet."""
        try:
            fd = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # One read for header and table of the segments that this store would write.
                head = os.pread(fd, self._layout.data_offset, 0)
                if not head:
                    return ""
                layout = self._layout.read_header(head)
                if layout.data_offset > len(head):
                    head += os.pread(fd, layout.data_offset - len(head), len(head))
                return os.fstat(fd), layout, head[ALIGNMENT : ALIGNMENT + layout.num_slots * ENTRY_BYTES]
            finally:
                os.close(fd)
        except SegmentError as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)

    def _path(self, number: int) -> str:
        return f"{self._folder.path}/{number:08d}{SEGMENT_SUFFIX}"

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self, segment: _Segment, first_slot: int, pages: np.ndarray) -> tuple[np.ndarray, OSError | None]:
        """Read consecutive slots into pages (n, pages per block). Returns which verified, and why the disk failed.

        Blocks that do not verify or that the disk cannot read are forgotten; those behind one that it cannot read
        were not tried, and stay.
        """
        n = len(pages)
        verified = np.zeros(n, bool)
        blocks_per_call = max(1, _READ_BYTES // segment.layout.slot_bytes)
        try:
            fd = self._read_fd(segment)
        except OSError as error:
            if error.errno in _GONE:
                if self._lose(segment):
                    self._read_failed(n, "the file is gone", segment.path)
                return verified, None
            self._forget(segment, first_slot)
            self._read_failed(1, f"opening failed ({error.strerror})", segment.path)
            return verified, error
        blocks = self._block_buffers(pages, reading=True)
        bad = []
        start = 0
        failure: OSError | None = None
        while start < n and failure is None:
            tried = blocks[start : start + blocks_per_call]
            keys = [segment.key(first_slot + start + i) for i in range(len(tried))]
            digests, failure = self._read_and_hash(fd, segment.layout.slot_offset(first_slot + start), keys, tried)
            for i, digest in enumerate(digests, start):
                verified[i] = digest == segment.checksum(first_slot + i)
                if not verified[i]:
                    bad.append(i)
            start += len(digests)
            if len(digests) < len(tried):
                bad.append(start)
                start += 1
        for i in bad:
            self._forget(segment, first_slot + i)
        if failure is not None:
            self._read_failed(len(bad), f"reading failed ({failure.strerror})", segment.path)
        elif bad:
            self._read_failed(len(bad), "blocks are cut short or do not have their checksum", segment.path)
        if self._read_scratch is not None and verified.any():
            data = self._read_scratch[:n][verified].reshape(-1, self._pool.page_bytes)
            self._pool.copy_in(pages[verified].reshape(-1), data)
        return verified, failure

    def _read_and_hash(
        self, fd: int, offset: int, keys: list[bytes], blocks: list[list[memoryview]]
    ) -> tuple[list[bytes], OSError | None]:
        """Read neighbouring blocks into their buffers. Returns the checksums of those that came in full, and why the
        disk failed."""
        layout = self._layout
        try:
            if len(blocks) == 1:
                state = layout.hasher(keys[0])
                done = 0
                for part in pieces(blocks[0], _READ_BYTES):
                    got = transfer(os.preadv, fd, list(part), offset + done)
                    if got < sum(map(len, part)):
                        return [], None
                    for piece in part:
                        state.update(piece)
                    done += got
                return [state.digest()], None
            done, failure = transfer(os.preadv, fd, chained(blocks, self._read_padding), offset), None
        except PartialTransferError as error:
            if len(blocks) == 1:
                return [], error.error
            done, failure = error.done_bytes, error.error
        # The padding behind the last block need not be there.
        whole = (done + layout.slot_bytes - layout.payload_bytes) // layout.slot_bytes
        return [layout.checksum(key, block) for key, block in zip(keys[:whole], blocks)], failure

    def _read_fd(self, segment: _Segment) -> int:
        """The file of a pinned segment, open for reading. Only `get` opens, so nobody opens it twice."""
        with self._lock:
            if segment.fd is not None:
                self._open_files.move_to_end(segment.number)
                return segment.fd
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        surplus = []
        with self._lock:
            segment.fd = fd
            self._open_files[segment.number] = segment
            for other in list(self._open_files.values()):
                if len(self._open_files) <= _MAX_OPEN_FILES:
                    break
                if not other.pins:
                    surplus.append(other.fd)
                    other.fd = None
                    del self._open_files[other.number]
        for old in surplus:
            assert old is not None
            os.close(old)
        return fd

    def _unpin(self, segments: Any) -> None:
        unused = []
        with self._lock:
            for segment in segments:
                segment.pins -= 1
                # It was dropped meanwhile, and left open for this call.
                if not segment.pins and segment.number not in self._segments and segment.fd is not None:
                    unused.append(segment.fd)
                    segment.fd = None
                    self._open_files.pop(segment.number, None)
        for fd in unused:
            os.close(fd)

    def _forget(self, segment: _Segment, slot: int) -> None:
        """Take a bad block out of the index, and out of the table, so that a restart does not bring it back."""
        with self._lock:
            key = segment.key(slot)
            if self._index.get(key) != segment.place(slot):
                return
            del self._index[key]
            segment.live -= 1
        if self._folder.writable:
            try:
                fd = os.open(segment.path, _WRITE)
                try:
                    os.pwrite(fd, bytes(ENTRY_BYTES), segment.layout.entry_offset(slot))
                finally:
                    os.close(fd)
            except OSError:
                pass  # Then a restart finds it, and a read forgets it again.

    def _lose(self, segment: _Segment) -> bool:
        """The file of a segment is gone. False: it was evicted, so this is as it should be."""
        with self._lock:
            if segment.number not in self._segments:
                return False
            fd, _ = self._drop(segment)
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
            active = self._active
            free = active.free if active is not None else self._layout.num_slots
            batch = missing[done : done + min(free, self._batch_blocks)]
            need = len(batch) * self._layout.slot_bytes + (0 if active is not None else self._layout.data_offset)
            if not self._make_room(need, before):
                if not self.limit_bytes:
                    raise OSError(errno.ENOSPC, f"less than {FREE_SHARE:.0%} of the file system is free")
                return
            try:
                done += self._write_batch([keys[i] for i in batch], pages[batch])
            except OSError as error:
                # Others fill the disk too: what is oldest here makes room for what is new, once.
                if error.errno not in _FULL or not self._evict_oldest(before):
                    raise
                done += self._write_batch([keys[i] for i in batch], pages[batch])

    def _write_batch(self, keys: list[bytes], pages: np.ndarray) -> int:
        """Write blocks to the active segment, first their payloads, then their entries. Returns how many, fewer only
        where they do not fit. Raises OSError."""
        segment = self._active or self._create()
        layout = segment.layout
        keys, pages = keys[: segment.free], pages[: segment.free]
        slot = segment.used
        try:
            fd = os.open(segment.path, _WRITE)
        except OSError as error:
            if error.errno in _GONE:
                self._lose(segment)
            raise
        try:
            try:
                blocks = self._write_payloads(segment.path, fd, pages, layout.slot_offset(slot))
                checksums = [layout.checksum(key, block) for key, block in zip(keys, blocks)]
                rows = [layout.entry(slot + i, key, checksums[i]) for i, key in enumerate(keys)]
                transfer(os.pwritev, fd, [memoryview(b"".join(rows))], layout.entry_offset(slot))
            except OSError as error:
                failed = error.error if isinstance(error, PartialTransferError) else error
                # What was written of it is not reachable; give the space back.
                try:
                    os.pwrite(fd, bytes(ENTRY_BYTES * len(keys)), layout.entry_offset(slot))
                    os.ftruncate(fd, layout.slot_offset(slot))
                except OSError:
                    pass
                raise failed from None
        finally:
            os.close(fd)
        with self._lock:
            if segment.number not in self._segments:
                return len(keys)  # A reader found that the file is gone, and the blocks with it.
            segment.keys += b"".join(keys)
            segment.checksums += b"".join(checksums)
            for i, key in enumerate(keys):
                self._index[key] = segment.place(slot + i)
            segment.live += len(keys)
            added = max(0, layout.size_bytes(segment.used) - segment.size_bytes)
            segment.size_bytes += added
            self._size_bytes += added
            self._touch(segment.number)
            self._counters["written_blocks"] += len(keys)
            if not segment.free:
                self._active = None
        return len(keys)

    def _write_payloads(self, path: str, fd: int, pages: np.ndarray, offset: int) -> list[list[memoryview]]:
        """Write the blocks of pages, and return the memory that they were written from.

        Past the page cache where the file system allows it: what was just stored is in the host pool, so a copy of it
        in the page cache would cost a core and memory for nothing. Unaligned memory goes through the scratch buffer.
        """
        while self._direct:
            blocks = self._block_buffers(pages, reading=False)
            try:
                direct_fd = os.open(path, _WRITE | _O_DIRECT)
                try:
                    transfer(os.pwritev, direct_fd, chained(blocks, self._write_padding), offset)
                finally:
                    os.close(direct_fd)
                return blocks
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if isinstance(error, PartialTransferError) and error.done_bytes:
                    break  # A call fell short and ended at an odd place: this once through the page cache.
                # The memory is to blame, or else the file system.
                self._direct = self._staged = not self._staged and self._pool.buffers(pages[0]) is not None
        blocks = self._block_buffers(pages, reading=False)
        transfer(os.pwritev, fd, chained(blocks, self._write_padding), offset)
        return blocks

    def _create(self) -> _Segment:
        """A new active segment, empty."""
        number = self._next_number
        path = self._path(number)
        fd = os.open(path, _WRITE | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            transfer(os.pwritev, fd, [memoryview(self._layout.header())], 0)
            os.ftruncate(fd, self._layout.data_offset)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        segment = _Segment(number, path, self._layout)
        with self._lock:
            self._next_number += 1
            self._segments[number] = segment
            self._size_bytes += segment.size_bytes
            self._touch(number)
            self._active = segment
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
        return self._size_bytes + self._leftover_bytes + need_bytes <= self.limit_bytes

    def _evict_oldest(self, before: int) -> int:
        """Delete what was not used for longest, other namespaces' leftovers first. Returns the bytes that this frees;
        0: all was used after tick `before`."""
        if self._leftovers is not None and (freed := self._leftovers.evict_oldest()):
            return freed
        with self._lock:
            victim = next((s for s in self._segments.values() if s is not self._active), None)
            if victim is None or victim.last_used > before:
                return 0
            self._counters["evicted_blocks"] += victim.live
            fd, path = self._drop(victim)
        self._delete(fd, path)
        return victim.size_bytes

    @property
    def _leftover_bytes(self) -> int:
        return self._leftovers.size_bytes if self._leftovers is not None else 0

    # -- shared -----------------------------------------------------------------------------------------------------

    def _block_buffers(self, pages: np.ndarray, reading: bool) -> list[list[memoryview]]:
        """The memory of each block of pages (n, pages per block), in pieces: the pool's own, or a scratch buffer,
        filled if it is to be written."""
        n = len(pages)
        staged = self._staged and not reading
        buffers = None if staged else self._pool.buffers(pages.reshape(-1))
        if buffers is None:
            shape = (self._batch_blocks, self._layout.payload_bytes)
            if reading:
                if self._read_scratch is None:
                    self._read_scratch = _aligned_empty(*shape)
                scratch = self._read_scratch
            else:
                if self._write_scratch is None:
                    self._write_scratch = _aligned_empty(*shape)
                scratch = self._write_scratch
                self._pool.copy_out(pages.reshape(-1), scratch[:n].reshape(-1, self._pool.page_bytes))
            buffers = [scratch[:n].reshape(-1).data]
        blocks = pieces(buffers, self._layout.payload_bytes)
        assert len(blocks) == n and sum(map(len, blocks[-1])) == self._layout.payload_bytes
        return blocks

    def _use(self, keys: Sequence[bytes]) -> list[int]:
        """The places of the leading keys that are stored; their segments become the most recently used. Locked."""
        places = []
        for key in keys:
            place = self._index.get(key)
            if place is None:
                break
            places.append(place)
        self._touch_all(places)
        return places

    def _touch_all(self, places: list[int]) -> None:
        """The segments of a prompt's blocks become the most recently used. Locked."""
        last = None
        # Its front most of all: without it the rest is of no use.
        for place in reversed(places):
            if place >> _SLOT_BITS != last:
                last = place >> _SLOT_BITS
                self._touch(last)

    def _touch(self, number: int) -> None:
        self._tick += 1
        self._segments[number].last_used = self._tick
        self._segments.move_to_end(number)

    def _drop(self, segment: _Segment) -> tuple[int | None, str]:
        """Forget a segment and its blocks. Returns the file to close, unless a read still uses it. Locked."""
        for slot in range(segment.used):
            key = segment.key(slot)
            if self._index.get(key) == segment.place(slot):
                del self._index[key]
        segment.live = 0
        del self._segments[segment.number]
        self._size_bytes -= segment.size_bytes
        if segment is self._active:
            self._active = None
        fd = None
        if not segment.pins:
            self._open_files.pop(segment.number, None)
            fd, segment.fd = segment.fd, None
        return fd, segment.path

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


def config_root(config: dict[str, Any]) -> Path:
    """The folder: `path` of --hicache-storage-backend-extra-config, else upstream's environment variable, else its
    default. Raises StoreError."""
    path = config.get("path")
    if path is not None and (not isinstance(path, str) or not path):
        raise StoreError(f"path in {CONFIG_FLAG} is {path!r}: give a folder's name")
    if path is not None:
        return Path(path).expanduser().absolute()
    if path := os.environ.get(ROOT_ENV):
        return Path(path).absolute()
    root = Path(DEFAULT_ROOT)
    # Anybody may make a folder there before the server starts, and would then own the KV that it trusts.
    if root.exists() and root.stat().st_uid != os.geteuid():
        raise StoreError(f"{root} belongs to another user: name a folder of your own with path in {CONFIG_FLAG}")
    return root


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < 1e9 or value == default):
        raise StoreError(f"{key} in {CONFIG_FLAG} is {value!r}: give a number above 0 and below 1e9, or leave it out")
    return value


def _aligned_empty(num_rows: int, row_bytes: int) -> np.ndarray:
    memory = np.empty(num_rows * row_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)


def _number_of(name: str) -> int | None:
    stem, suffix = os.path.splitext(name)
    return int(stem) if suffix == SEGMENT_SUFFIX and len(stem) == 8 and stem.isdecimal() else None


def _runs(places: list[int], max_blocks: int) -> Iterator[list[int]]:
    """Positions of places, grouped into consecutive slots of one segment."""
    run: list[int] = []
    for i in sorted(range(len(places)), key=places.__getitem__):
        if run and (places[i] != places[run[-1]] + 1 or len(run) == max_blocks or not places[i] & (MAX_SLOTS - 1)):
            yield run
            run = []
        run.append(i)
    if run:
        yield run
