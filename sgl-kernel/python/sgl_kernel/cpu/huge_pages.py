"""Memory on huge pages, for what every step reads: a page of 2 MiB takes the place of 512 in the TLB.

Linux gives them to memory that asks (`transparent_hugepage` is "madvise" or "always") while it has some; otherwise
the memory is ordinary.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import torch

_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64


def ask_for_huge_pages(memory: torch.Tensor) -> None:
    """memory: contiguous, on the CPU, not written yet. Ends of less than a huge page stay ordinary."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = memory.data_ptr() + memory.numel() * memory.element_size() - start
    if num_bytes > 0:
        # Fails where the kernel has no huge pages: nothing is lost.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice)


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
