"""Memory on huge pages, for what every step reads: a page of 2 MiB takes the place of 512 in the TLB. And memory that
is there before it is first written.

Linux gives huge pages to memory that asks (`transparent_hugepage` is "madvise" or "always") while it has some;
otherwise the memory is ordinary.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64
# Linux's number, since 5.14.
_MADV_POPULATE_WRITE = 23


def ask_for_huge_pages(memory: torch.Tensor) -> None:
    """memory: contiguous, on the CPU, not written yet. Ends of less than a huge page stay ordinary."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start, end = _whole_pages(memory)
    if advice is not None and start < end:
        # Fails where the kernel has no huge pages: nothing is lost.
        _advise(start, end, advice)


def populate(memory: torch.Tensor, num_threads: int) -> bool:
    """Bring memory into being, which would otherwise be done page by page at the first write. Its bytes stay. memory:
    contiguous, on the CPU. Returns whether the system could."""
    start, end = _whole_pages(memory)
    if sys.platform != "linux":
        return False
    starts = range(start, end, _BLOCK_BYTES)
    with ThreadPoolExecutor(num_threads) as pool:
        # Without the interpreter's lock, as all calls of a CDLL.
        done = pool.map(lambda at: _advise(at, min(end, at + _BLOCK_BYTES), _MADV_POPULATE_WRITE), starts)
        return all(done)


def _whole_pages(memory: torch.Tensor) -> tuple[int, int]:
    """The address of the first whole page, and the memory's end."""
    start = memory.data_ptr()
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, start + memory.numel() * memory.element_size()


def _advise(start: int, end: int, advice: int) -> bool:
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice) == 0


class HugePageBlocks:
    """Tensors that share blocks of huge pages, so that small ones have them too. A block is freed with the last of
    its tensors. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, *shape: int) -> torch.Tensor:
        """float32 on the CPU."""
        num_bytes = 4 * torch.Size(shape).numel()
        with self._lock:
            if num_bytes > len(self._left):
                self._left = torch.empty(max(_BLOCK_BYTES, num_bytes), dtype=torch.uint8)
                ask_for_huge_pages(self._left)
            memory = self._left[:num_bytes]
            self._left = self._left[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return memory.view(torch.float32).view(shape).zero_()
