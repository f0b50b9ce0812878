"""Memory that is shared slab by slab, in one range of addresses: `Slabs`, of any kind of memory, and `SlabRange`, of
host memory. `cuda_slabs.py` has a GPU's. Needs Linux.

Owns its addresses and the slabs that it has allocated. Knows no pages and no borrowers. Every slab is memory of its
own (here a memfd): a process that is sent the file descriptor of one slab can reach that slab and nothing else:

    lender      | slab 0 | slab 1 | slab 2 | slab 3 |      all allocated and mapped
                                       |  fileno(2): a file descriptor over a Unix socket
                                       v
    borrower    | ------ | slab   . | ------ | ------ |    mapped at 1; the stride may be larger than the slab

A range may have a *tail* behind the last slab: memory of its own, which is always mapped and never lent. It has no
file descriptor.

- Reading or writing what is not mapped, or between the end of a slab and the next stride, ends the process (here by
  SIGSEGV; a GPU's context is of no use any more).
- The lender keeps a lent slab mapped and does not touch it until it is given back. No lender can revoke a mapping:
  memory is safe to use again once the borrower has unmapped it or is dead.
- A slab is scrubbed before it is lent and before its lender uses it again. Every call here has taken effect when it
  returns, on a GPU too.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang.srt.utils.shared_memory import SIZE_SEALS, sealed_memfd

# Of Linux, beyond what Python's mmap module has.
_PROT_NONE, _MAP_FIXED = 0x0, 0x10
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)

# Of host memory.
GRANULARITY = mmap.PAGESIZE


class SlabError(RuntimeError):
    """A slab cannot be allocated or mapped; the message has the reason."""


@dataclass(frozen=True)
class SlabFiles:
    """The file descriptors of slabs that can be lent."""

    num_slabs: int
    slab_bytes: int
    # Slab -> file descriptor of its memory, which stays the callee's. Called from other threads.
    fileno: Callable[[int], int]


class Slabs(ABC):
    """Places for num_slabs slabs of slab_bytes each, stride_bytes apart; none is mapped yet. tail_bytes: of memory
    behind them, zeros, which is mapped from the start; 0 for none.

    memory: (num_slabs * stride_bytes + tail_bytes,) uint8, all addresses, mapped or not: a numpy array, or of a GPU a
    torch tensor. The addresses stay reserved, and the tail mapped, for as long as anything refers to memory, even
    after `close`. granularity: sizes must be multiples of it. Raises ValueError on other sizes, SlabError where the
    system has no addresses, or no memory for the tail.
    """

    memory: Any

    def __init__(
        self, num_slabs: int, slab_bytes: int, stride_bytes: int | None, granularity: int, tail_bytes: int
    ) -> None:
        stride_bytes = slab_bytes if stride_bytes is None else stride_bytes
        if (
            num_slabs < 1
            or not 0 < slab_bytes <= stride_bytes
            or slab_bytes % granularity
            or stride_bytes % granularity
            or tail_bytes < 0
            or tail_bytes % granularity
        ):
            raise ValueError(
                f"{num_slabs} slabs of {slab_bytes} bytes, one every {stride_bytes}, and {tail_bytes} behind them: "
                f"there must be at least one, all sizes must be multiples of {granularity}, and the stride must not "
                "be below the slab"
            )
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.stride_bytes = stride_bytes
        self.tail_bytes = tail_bytes
        # Per slab: None if it is not mapped, -1 if another process allocated it, else its file descriptor.
        self._fds: list[int | None] = [None] * num_slabs
        weakref.finalize(self, _close_all, self._fds)

    # -- of each kind of memory; offset: of a slab or the tail, in bytes ----------------------------------------

    @abstractmethod
    def _allocate(self, offset: int, size_bytes: int) -> int:
        """Map new memory, of zeros. Returns a file descriptor of it."""

    @abstractmethod
    def _map(self, offset: int, fd: int) -> None: ...

    @abstractmethod
    def _unmap(self, offset: int) -> None: ...

    @abstractmethod
    def _zero(self, offset: int) -> None:
        """Overwrite a slab; it is done when this returns."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """memory as a torch tensor, on its device."""

    # -- of all kinds -------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Of memory, the tail included."""
        return self.num_slabs * self.stride_bytes + self.tail_bytes

    def _allocate_tail(self) -> None:
        """Called once, by the constructors of subclasses."""
        if self.tail_bytes:
            # The mapping keeps the memory. It cannot be sent without a descriptor.
            os.close(self._allocate(self.num_slabs * self.stride_bytes, self.tail_bytes))

    def allocate(self, index: int) -> None:
        """Allocate a slab, of zeros, mapped at `index`. Raises SlabError."""
        self._check_place(index)
        self._fds[index] = self._allocate(index * self.stride_bytes, self.slab_bytes)

    def allocate_all(self) -> None:
        """Allocate every slab. Raises SlabError."""
        for index in range(self.num_slabs):
            self.allocate(index)

    def map(self, index: int, fd: int) -> None:
        """Map a slab that another process allocated. fd stays the caller's, which may close it. Raises SlabError for
        what is no slab of this size. That includes memory whose size the other side could change: reading beyond its
        end would crash."""
        self._check_place(index)
        self._map(index * self.stride_bytes, fd)
        self._fds[index] = -1

    def unmap(self, index: int) -> None:
        """Unmap a slab. Its memory is the system's again when the last process has unmapped it."""
        fd = self._fds[index]
        assert fd is not None, f"slab {index} is not mapped"
        self._unmap(index * self.stride_bytes)
        self._fds[index] = None
        if fd >= 0:
            os.close(fd)

    def is_mapped(self, index: int) -> bool:
        return self._fds[index] is not None

    def slab(self, index: int) -> Any:
        """(slab_bytes,) uint8, the part of memory that is a mapped slab."""
        assert self.is_mapped(index), f"slab {index} is not mapped"
        start = index * self.stride_bytes
        return self.memory[start : start + self.slab_bytes]

    def fileno(self, index: int) -> int:
        """The file descriptor of a slab that was allocated here, to be sent to a borrower; it stays this object's."""
        fd = self._fds[index]
        assert fd is not None and fd >= 0, f"slab {index} was not allocated here"
        return fd

    def scrub(self, index: int) -> None:
        """Overwrite a slab with zeros."""
        assert self.is_mapped(index), f"slab {index} is not mapped"
        self._zero(index * self.stride_bytes)

    def close(self) -> None:
        """Unmap all slabs. The tail stays."""
        for index in range(self.num_slabs):
            if self.is_mapped(index):
                self.unmap(index)

    def _check_place(self, index: int) -> None:
        assert 0 <= index < self.num_slabs and self._fds[index] is None, (
            f"slab {index} is mapped already, or there is no such slab"
        )


class SlabRange(Slabs):
    """Slabs of host memory."""

    memory: np.ndarray

    def __init__(self, num_slabs: int, slab_bytes: int, stride_bytes: int | None = None, tail_bytes: int = 0) -> None:
        super().__init__(num_slabs, slab_bytes, stride_bytes, GRANULARITY, tail_bytes)
        self._reservation = _Reservation(self.size_bytes)
        self.memory = self._reservation.array()
        self._allocate_tail()

    @classmethod
    def owned(
        cls, num_slabs: int, slab_bytes: int, stride_bytes: int | None = None, tail_bytes: int = 0
    ) -> SlabRange:
        """With every slab allocated, mapped and zero."""
        slabs = cls(num_slabs, slab_bytes, stride_bytes, tail_bytes)
        slabs.allocate_all()
        return slabs

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.memory)

    def _allocate(self, offset: int, size_bytes: int) -> int:
        fd = allocate_slab(size_bytes)
        try:
            self._reservation.map(offset, size_bytes, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _map(self, offset: int, fd: int) -> None:
        _check_slab(fd, self.slab_bytes)
        self._reservation.map(offset, self.slab_bytes, fd)

    def _unmap(self, offset: int) -> None:
        self._reservation.unmap(offset, self.slab_bytes)

    def _zero(self, offset: int) -> None:
        self.memory[offset : offset + self.slab_bytes].fill(0)


def allocate_slab(size_bytes: int) -> int:
    """A file descriptor of size_bytes of zeros whose size no process can change. Raises SlabError."""
    if not hasattr(os, "memfd_create"):
        raise SlabError(f"memory cannot be shared slab by slab on {sys.platform}: it needs memfd_create, of Linux")
    try:
        return sealed_memfd(size_bytes, "peer-slab")
    except OSError as error:
        raise SlabError(f"cannot allocate a slab of {size_bytes:,} bytes: {error}") from error


def _check_slab(fd: int, size_bytes: int) -> None:
    try:
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SlabError(f"file descriptor {fd} is no slab: {error}") from error
    if size != size_bytes:
        raise SlabError(f"a slab of {size:,} bytes, where {size_bytes:,} were agreed on")
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise SlabError("a slab whose size is not sealed: its lender could make it shorter while it is mapped")


def _close_all(fds: list[int | None]) -> None:
    for fd in fds:
        if fd is not None and fd >= 0:
            os.close(fd)


class _Reservation:
    """size_bytes of addresses without memory behind them. They are the system's again when nothing refers to them."""

    def __init__(self, size_bytes: int) -> None:
        self._libc = _libc()
        self._size_bytes = size_bytes
        self._address = self._call(None, size_bytes, _PROT_NONE, _NOTHING, -1)
        # Not at the end of the process: other threads may still be reading.
        weakref.finalize(self, self._libc.munmap, self._address, size_bytes).atexit = False

    def array(self) -> np.ndarray:
        """(size_bytes,) uint8, which keeps the reservation alive."""
        buffer = (ctypes.c_uint8 * self._size_bytes).from_address(self._address)
        buffer.reservation = self  # type: ignore[attr-defined]
        return np.frombuffer(memoryview(buffer), np.uint8)

    def map(self, offset: int, size_bytes: int, fd: int) -> None:
        """Put the memory of fd in the place of what is there."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        self._call(self._address + offset, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)

    def unmap(self, offset: int, size_bytes: int) -> None:
        """Put nothing in the place of what is there."""
        self._call(self._address + offset, size_bytes, _PROT_NONE, _NOTHING | _MAP_FIXED, -1)

    def _call(self, address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
        result = self._libc.mmap(address, size_bytes, protection, flags, fd, 0)
        if result == ctypes.c_void_p(-1).value:
            errno = ctypes.get_errno()
            raise SlabError(f"cannot map {size_bytes:,} bytes: {os.strerror(errno)} (errno {errno})")
        return result or 0


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_ssize_t,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
