"""`SegmentFiles`: how blocks get into the files of segments and out of them.

Owns the buffers, and whether writes go past the page cache. Knows neither the index nor the limit: it is told a
file and the slots in it. Raises OSError where the medium fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import numpy as np

from sglang.srt.mem_cache.storage.file.page_buffers import HostPages, PageBuffers
from sglang.srt.mem_cache.storage.file.segment import ENTRY_BYTES, SegmentLayout, pieces
from sglang.srt.mem_cache.storage.file.vectored import PartialTransferError, chained, transfer

# Of payloads before their entries are written; of the scratch buffers.
_BATCH_BYTES = 16 << 20
# Per call of reading: it is hashed while it lies in the core's cache, and meanwhile the kernel reads ahead.
_READ_BYTES = 1 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class SegmentFiles:
    """layout: of the segments that are written. One read and one write may be under way at a time."""

    def __init__(self, pool: HostPages, layout: SegmentLayout) -> None:
        self.layout = layout
        # Blocks of one call of `read` or `write`.
        self.batch_blocks = max(1, _BATCH_BYTES // layout.slot_bytes)
        self._buffers = PageBuffers(pool, layout.payload_bytes, self.batch_blocks)
        padding_bytes = layout.slot_bytes - layout.payload_bytes
        self._read_padding, self._write_padding = (memoryview(bytearray(padding_bytes)) for _ in range(2))
        # Writes go past the page cache until one shows that the file system does not allow it; through the scratch
        # buffer once one shows that the pool's memory is not aligned.
        self._direct = _O_DIRECT != 0 and not padding_bytes
        self._staged = False

    # -- reading ----------------------------------------------------------------------------------------------------

    @staticmethod
    def open_to_read(path: str) -> int:
        return os.open(path, _READ)

    def read(
        self, fd: int, offset: int, pages: np.ndarray, keys: Sequence[bytes], checksums: Sequence[bytes]
    ) -> tuple[np.ndarray, list[int], OSError | None]:
        """Read the blocks of consecutive slots, the first at `offset`, into pages (n, pages per block).

        Returns which verified, (n,) bool; the numbers of those that do not verify or that the disk cannot read; and
        why the disk failed. Those behind a block that the disk cannot read are not tried.
        """
        n = len(pages)
        verified = np.zeros(n, bool)
        blocks_per_call = max(1, _READ_BYTES // self.layout.slot_bytes)
        blocks = self._buffers.for_reading(pages)
        bad = []
        start = 0
        failure: OSError | None = None
        while start < n and failure is None:
            tried = blocks[start : start + blocks_per_call]
            place = offset + start * self.layout.slot_bytes
            digests, failure = self._read_and_hash(fd, place, keys[start : start + len(tried)], tried)
            for i, digest in enumerate(digests, start):
                verified[i] = digest == checksums[i]
                if not verified[i]:
                    bad.append(i)
            start += len(digests)
            if len(digests) < len(tried):
                bad.append(start)
                start += 1
        self._buffers.deliver(pages, verified)
        return verified, bad, failure

    def _read_and_hash(
        self, fd: int, offset: int, keys: Sequence[bytes], blocks: list[list[memoryview]]
    ) -> tuple[list[bytes], OSError | None]:
        """Read neighbouring blocks into their buffers. Returns the checksums of those that came in full, and why the
        disk failed."""
        layout = self.layout
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

    # -- writing ----------------------------------------------------------------------------------------------------

    @staticmethod
    def open_to_write(path: str) -> int:
        return os.open(path, _WRITE)

    def create(self, path: str) -> None:
        """A new segment, empty."""
        fd = os.open(path, _WRITE | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            transfer(os.pwritev, fd, [memoryview(self.layout.header())], 0)
            os.ftruncate(fd, self.layout.data_offset)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def write(
        self,
        path: str,
        fd: int,
        layout: SegmentLayout,
        slot: int,
        keys: list[bytes],
        pages: np.ndarray,
        overwrites: bool = False,
    ) -> list[bytes]:
        """Write blocks to the slots from `slot` on, first their payloads, then their entries. Returns their
        checksums. overwrites: the slots have others, whose entries go before; else they are the last ones, and where
        it fails their space is given back."""
        no_entries = bytes(ENTRY_BYTES * len(keys))
        try:
            if overwrites:
                transfer(os.pwritev, fd, [memoryview(no_entries)], layout.entry_offset(slot))
            blocks = self._write_payloads(path, fd, pages, layout.slot_offset(slot))
            checksums = [layout.checksum(key, block) for key, block in zip(keys, blocks)]
            rows = [layout.entry(slot + i, key, checksums[i]) for i, key in enumerate(keys)]
            transfer(os.pwritev, fd, [memoryview(b"".join(rows))], layout.entry_offset(slot))
        except OSError as error:
            failed = error.error if isinstance(error, PartialTransferError) else error
            # What was written of it is not reachable.
            try:
                os.pwrite(fd, no_entries, layout.entry_offset(slot))
                if not overwrites:
                    os.ftruncate(fd, layout.slot_offset(slot))
            except OSError:
                pass
            raise failed from None
        return checksums

    @staticmethod
    def erase_entry(path: str, layout: SegmentLayout, slot: int) -> None:
        """Zero the entry of a block, so that a restart does not find it."""
        fd = os.open(path, _WRITE)
        try:
            os.pwrite(fd, bytes(ENTRY_BYTES), layout.entry_offset(slot))
        finally:
            os.close(fd)

    def _write_payloads(self, path: str, fd: int, pages: np.ndarray, offset: int) -> list[list[memoryview]]:
        """Write the blocks of pages, and return the memory that they were written from.

        Past the page cache where the file system allows it: what was just stored is in the host pool, so a copy of it
        in the page cache would cost a core and memory for nothing. Unaligned memory goes through the scratch buffer.
        """
        while self._direct:
            blocks = self._buffers.for_writing(pages, self._staged)
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
                self._direct = self._staged = not self._staged and self._buffers.is_pool_memory(pages[0])
        blocks = self._buffers.for_writing(pages, self._staged)
        transfer(os.pwritev, fd, chained(blocks, self._write_padding), offset)
        return blocks
