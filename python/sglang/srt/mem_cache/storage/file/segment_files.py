"""`SegmentFiles`: how blocks get into the files of segments and out of them.

Owns the buffers, and whether writes go past the page cache. Knows neither the index nor the limit: it is told a
file and the slots in it. Raises OSError where the medium fails.

A process that writes to a segment holds a lock (flock) on the file that it has open. Others see so that it is alive.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from sglang.srt.mem_cache.storage.file.page_buffers import OtherPages, PageBuffers, aligned_empty
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES, KEY_BYTES, SegmentLayout, Table, pieces
from sglang.srt.mem_cache.storage.file.shared_changes import try_flock
from sglang.srt.mem_cache.storage.file.vectored import PartialTransferError, chained, transfer
from sglang.srt.mem_cache.storage.file.write_budget import WriteBudget
from sglang.srt.mem_cache.storage.host_pages import HostPages

# Of payloads before their entries are written; of the scratch buffers.
_BATCH_BYTES = 16 << 20
# Per call of reading: it is hashed while it lies in the core's cache, and meanwhile the kernel reads ahead.
_READ_BYTES = 1 << 20
# Of blocks that are copied from one segment to another at once.
_COPY_BYTES = 4 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
# A process may read an entry while another one writes it, and then reads it once more.
_TABLE_READS = 3


class SegmentFiles:
    """layout: of the segments that are written. budget: counts what is written; a part of a page of a table counts as
    a page, though the system may write it once for several changes. One read and one write may be under way at a
    time."""

    def __init__(self, pool: HostPages, layout: SegmentLayout, budget: WriteBudget) -> None:
        self.layout = layout
        self.budget = budget
        # Blocks of one call of `read` or of one claim.
        self.batch_blocks = max(1, _BATCH_BYTES // layout.slot_bytes)
        # Blocks of one call of `read_copies`.
        self.copy_blocks = max(1, _COPY_BYTES // layout.slot_bytes)
        self._copies: np.ndarray | None = None
        self._pool = pool
        self._buffers = PageBuffers(pool, layout.payload_bytes, self.batch_blocks)
        # By page size, of segments with another one.
        self._others: dict[int, OtherPages] = {}
        self._write_padding = _padding(layout)
        # Writes go past the page cache until one shows that the file system does not allow it; through the scratch
        # buffer once one shows that the pool's memory is not aligned.
        self._direct = _O_DIRECT != 0 and not self._write_padding
        self._staged = False

    # -- reading ----------------------------------------------------------------------------------------------------

    @staticmethod
    def open_to_read(path: str) -> int:
        return os.open(path, _READ)

    @staticmethod
    def is_segment(fd: int, layout: SegmentLayout, inode: int) -> bool:
        """Whether an open file is the segment that had this layout and inode. File systems give a new file the inode
        of one that is gone, and its pages may have another size. Raises OSError."""
        return os.fstat(fd).st_ino == inode and layout.begins(os.pread(fd, ALIGNMENT, 0))

    @staticmethod
    def read_table(fd: int, layout: SegmentLayout) -> Table:
        for _ in range(_TABLE_READS):
            table = layout.read_table(os.pread(fd, layout.num_slots * ENTRY_BYTES, ALIGNMENT))
            if not table.num_bad:
                break
        return table

    @classmethod
    def slots_with(cls, path: str, layout: SegmentLayout, keys: Collection[bytes]) -> list[int]:
        """The slots that hold blocks with these keys, by the file. Raises OSError."""
        fd = cls.open_to_read(path)
        try:
            table = cls.read_table(fd, layout)
        finally:
            os.close(fd)
        return [slot for slot in table.slots if table.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] in keys]

    @staticmethod
    def read_table_if_changed(
        fd: int, layout: SegmentLayout, keys: bytes | bytearray, checksums: bytes | bytearray
    ) -> Table | None:
        """None: the table has these keys and checksums."""
        raw = os.pread(fd, layout.num_slots * ENTRY_BYTES, ALIGNMENT)
        return None if layout.is_table_of(raw, keys, checksums) else SegmentFiles.read_table(fd, layout)

    @staticmethod
    def is_replaced(fd: int, layout: SegmentLayout, slot: int, key: bytes, checksum: bytes) -> bool:
        """Whether another process has written something else to a slot since its entry was read: then a payload that
        does not verify is not damaged."""
        try:
            if not layout.begins(os.pread(fd, ALIGNMENT, 0)):
                return False
            row = os.pread(fd, ENTRY_BYTES, layout.entry_offset(slot))
        except OSError:
            return False
        return row != layout.entry(slot, key, checksum) and layout.is_entry(slot, row)

    def read(
        self, fd: int, layout: SegmentLayout, slot: int, pages: np.ndarray, expected: Sequence[tuple[bytes, bytes]]
    ) -> tuple[np.ndarray, list[int], OSError | None]:
        """Read the blocks of consecutive slots, the first `slot`, into pages (n, pages per block). layout: of the
        segment; expected: key and checksum of each block.

        Returns which verified, (n,) bool; the numbers of those that do not verify or that the disk cannot read; and
        why the disk failed. Those behind a block that the disk cannot read are not tried.
        """
        n = len(pages)
        verified = np.zeros(n, bool)
        blocks_per_call = max(1, _READ_BYTES // layout.slot_bytes)
        buffers = self._buffers_of(layout)
        blocks = buffers.for_reading(pages)
        bad = []
        start = 0
        failure: OSError | None = None
        while start < n and failure is None:
            tried = blocks[start : start + blocks_per_call]
            keys = [key for key, _ in expected[start : start + len(tried)]]
            digests, failure = _read_and_hash(fd, layout, slot + start, keys, tried)
            for i, digest in enumerate(digests, start):
                verified[i] = digest == expected[i][1]
                if not verified[i]:
                    bad.append(i)
            start += len(digests)
            if len(digests) < len(tried):
                bad.append(start)
                start += 1
        buffers.deliver(pages, verified)
        return verified, bad, failure

    def read_copies(
        self, fd: int, layout: SegmentLayout, slots: list[int], expected: Sequence[tuple[bytes, bytes]]
    ) -> tuple[list[memoryview], np.ndarray]:
        """Read blocks to copy them to another segment, `copy_blocks` at most. slots: ascending; expected: key and
        checksum of each block. Returns their payloads, until the next call, and which of them verified, (n,) bool."""
        if self._copies is None:
            self._copies = aligned_empty(self.copy_blocks, layout.payload_bytes)
        payloads = [row.data for row in self._copies[: len(slots)]]
        verified = np.zeros(len(slots), bool)
        first = 0
        while first < len(slots):
            end = first + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1:
                end += 1
            keys, blocks = [key for key, _ in expected[first:end]], [[row] for row in payloads[first:end]]
            digests, failure = _read_and_hash(fd, layout, slots[first], keys, blocks)
            for i, digest in enumerate(digests, first):
                verified[i] = digest == expected[i][1]
            # A disk that cannot read one block often takes long over it.
            first = end if failure is None else len(slots)
        return payloads, verified

    def _buffers_of(self, layout: SegmentLayout) -> PageBuffers | OtherPages:
        if layout.page_size == self.layout.page_size:
            return self._buffers
        if layout.page_size not in self._others:
            other = OtherPages(self._pool, layout.pages, layout.payload_bytes, self.batch_blocks)
            self._others[layout.page_size] = other
        return self._others[layout.page_size]

    # -- writing ----------------------------------------------------------------------------------------------------

    def create(self, path: str) -> int:
        """A new segment, empty. Returns the file, open and locked."""
        fd = os.open(path, _WRITE | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try_flock(fd)
            self._write_table(fd, self.layout.header(), 0)
            os.ftruncate(fd, self.layout.data_offset)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return fd

    @staticmethod
    def open_locked(path: str) -> int | None:
        """The file, open for writing and locked; None: a process is writing to it."""
        fd = os.open(path, _WRITE)
        if try_flock(fd) is False:
            os.close(fd)
            return None
        return fd

    @staticmethod
    def is_written_by_another(path: str) -> bool:
        """True too where that cannot be found out."""
        try:
            fd = os.open(path, _READ)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            return try_flock(fd, shared=True) is False
        finally:
            os.close(fd)

    def claim(self, fd: int, layout: SegmentLayout, slot: int, keys: Sequence[bytes]) -> None:
        """Others see that these blocks are being written to the slots from `slot` on."""
        rows = b"".join(layout.claim(slot + i, key) for i, key in enumerate(keys))
        self._write_table(fd, rows, layout.entry_offset(slot))

    def write_payloads(
        self, path: str, fd: int, layout: SegmentLayout, slot: int, keys: Sequence[bytes], pages: np.ndarray
    ) -> list[bytes]:
        """Write what claimed slots hold. Returns the blocks' checksums."""
        blocks = self._write_blocks(
            path,
            fd,
            layout.slot_offset(slot),
            lambda staged: self._buffers.for_writing(pages, staged),
            lambda: self._buffers.is_pool_memory(pages[0]),
        )
        return [layout.checksum(key, block) for key, block in zip(keys, blocks)]

    def write_copies(self, path: str, fd: int, layout: SegmentLayout, slot: int, payloads: list[memoryview]) -> None:
        """As `write_payloads`, of what `read_copies` has read."""
        blocks = [[payload] for payload in payloads]
        self._write_blocks(path, fd, layout.slot_offset(slot), lambda staged: blocks, lambda: False)

    def complete(
        self, fd: int, layout: SegmentLayout, slot: int, keys: Sequence[bytes], checksums: Sequence[bytes]
    ) -> None:
        """The blocks of a claim are whole."""
        rows = b"".join(layout.entry(slot + i, key, checksums[i]) for i, key in enumerate(keys))
        self._count_table(len(rows), layout.entry_offset(slot))
        try:
            transfer(os.pwritev, fd, [memoryview(rows)], layout.entry_offset(slot))
        except PartialTransferError as error:
            raise error.error from None

    def void(self, fd: int, layout: SegmentLayout, slot: int, num_slots: int, are_last: bool) -> None:
        """Take back a claim. are_last: no slot behind these is used, and their space is given back."""
        try:
            self._write_table(fd, bytes(ENTRY_BYTES * num_slots), layout.entry_offset(slot))
            if are_last:
                os.ftruncate(fd, layout.slot_offset(slot))
            else:
                self._write_zeros(fd, layout, range(slot, slot + num_slots))
        except OSError:
            pass  # The claim counts for nothing once this process no longer writes to the segment.

    def void_dead_claims(self, fd: int, layout: SegmentLayout) -> Table:
        """Take back the claims of a process that died, and the space behind the last block. fd: locked. Returns the
        table without them. Keeps the time of the file."""
        table = self.read_table(fd, layout)
        stat = os.fstat(fd)
        dead = table.claims
        for slot in dead:
            self._write_table(fd, bytes(ENTRY_BYTES), layout.entry_offset(slot))
        if table.claims:
            table = self.read_table(fd, layout)
        end = layout.slot_offset(len(table.keys) // KEY_BYTES)
        if stat.st_size > end:
            os.ftruncate(fd, end)
        self._write_zeros(fd, layout, dead)
        os.utime(fd, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return table

    def erase_entry(self, path: str, layout: SegmentLayout, slot: int, key: bytes, checksum: bytes) -> bool:
        """Zero the entry of a block, so that no process finds it, and its payload, which may be a part of a tenant's;
        False: it was replaced. Keeps the time of the file, which is that of its last use."""
        fd = os.open(path, _WRITE)
        try:
            stat = os.fstat(fd)
            if os.pread(fd, ENTRY_BYTES, layout.entry_offset(slot)) != layout.entry(slot, key, checksum):
                return False
            self._write_table(fd, bytes(ENTRY_BYTES), layout.entry_offset(slot))
            self._write_zeros(fd, layout, [slot])
            os.utime(fd, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        finally:
            os.close(fd)
        return True

    def wipe(self, path: str, layout: SegmentLayout, slots: Sequence[int]) -> None:
        """Zero the entries of blocks, so that no process finds them, then their payloads, so that the disk does not
        have them any more. Keeps the time of the file. Raises OSError."""
        fd = os.open(path, _WRITE)
        try:
            stat = os.fstat(fd)
            for slot in slots:
                self._write_table(fd, bytes(ENTRY_BYTES), layout.entry_offset(slot))
            self._write_zeros(fd, layout, slots)
            os.fsync(fd)
            os.utime(fd, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        finally:
            os.close(fd)

    def _write_zeros(self, fd: int, layout: SegmentLayout, slots: Iterable[int]) -> None:
        """In place of payloads, no further than the file goes. Raises OSError."""
        end, zeros = os.fstat(fd).st_size, bytes(layout.slot_bytes)
        for slot in slots:
            size, done = min(layout.slot_bytes, max(0, end - layout.slot_offset(slot))), 0
            while done < size:
                done += os.pwrite(fd, zeros[done:size], layout.slot_offset(slot) + done)
            self.budget.count_written(size)

    def _write_blocks(
        self,
        path: str,
        fd: int,
        offset: int,
        blocks_of: Callable[[bool], list[list[memoryview]]],
        is_pool_memory: Callable[[], bool],
    ) -> list[list[memoryview]]:
        """Write blocks, and return the memory that they were written from. blocks_of(staged): that memory, aligned if
        staged; is_pool_memory: whether it may not be aligned otherwise. Raises OSError.

        Past the page cache where the file system allows it: what was just stored is in the host pool, so a copy of it
        in the page cache would cost a core and memory for nothing. Unaligned memory goes through the scratch buffer.
        """
        try:
            while self._direct:
                blocks = blocks_of(self._staged)
                try:
                    direct_fd = os.open(path, _WRITE | _O_DIRECT)
                    try:
                        if not os.path.samestat(os.fstat(direct_fd), os.fstat(fd)):
                            raise OSError(errno.ENOENT, "the file was replaced")
                        self._write(direct_fd, chained(blocks, self._write_padding), offset)
                    finally:
                        os.close(direct_fd)
                    return blocks
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    if isinstance(error, PartialTransferError) and error.done_bytes:
                        break  # A call fell short and ended at an odd place: this once through the page cache.
                    # The memory is to blame, or else the file system.
                    self._direct = self._staged = not self._staged and is_pool_memory()
            blocks = blocks_of(self._staged)
            self._write(fd, chained(blocks, self._write_padding), offset)
            return blocks
        except PartialTransferError as error:
            raise error.error from None

    def _write(self, fd: int, buffers: list[memoryview], offset: int) -> None:
        """Raises PartialTransferError."""
        try:
            self.budget.count_written(transfer(os.pwritev, fd, buffers, offset))
        except PartialTransferError as error:
            self.budget.count_written(error.done_bytes)
            raise

    def _write_table(self, fd: int, data: bytes, offset: int) -> None:
        """A part of the first pages of a file. Raises OSError."""
        self._count_table(len(data), offset)
        while data:
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done

    def _count_table(self, size_bytes: int, offset: int) -> None:
        first, end = offset // ALIGNMENT, -(-(offset + size_bytes) // ALIGNMENT)
        self.budget.count_written((end - first) * ALIGNMENT)


def _read_and_hash(
    fd: int, layout: SegmentLayout, slot: int, keys: Sequence[bytes], blocks: list[list[memoryview]]
) -> tuple[list[bytes], OSError | None]:
    """Read neighbouring blocks into their buffers. Returns the checksums of those that came in full, and why the
    disk failed."""
    offset = layout.slot_offset(slot)
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
        done, failure = transfer(os.preadv, fd, chained(blocks, _padding(layout)), offset), None
    except PartialTransferError as error:
        if len(blocks) == 1:
            return [], error.error
        done, failure = error.done_bytes, error.error
    # The padding behind the last block need not be there.
    whole = (done + layout.slot_bytes - layout.payload_bytes) // layout.slot_bytes
    return [layout.checksum(key, block) for key, block in zip(keys[:whole], blocks)], failure


def _padding(layout: SegmentLayout) -> memoryview:
    """Memory for what lies behind the payload of a slot."""
    return memoryview(bytearray(layout.slot_bytes - layout.payload_bytes))
