"""Memory that is shared slab by slab, in one range of addresses: `Slabs`, whatever it is memory of, and `SlabRange`,
host memory. `cuda_slabs.py` has a GPU's. Needs Linux.

Owns its addresses and the slabs that it has allocated. Knows no pages, and not who borrows what. Every slab is memory
of its own (here a memfd), so that whoever is sent the file descriptor of one can reach that one and nothing else:

    lender      | slab 0 | slab 1 | slab 2 | slab 3 |      its own, all mapped
                                       |  fileno(2): a file descriptor over a Unix socket
                                       v
    borrower    | ------ | slab   . | ------ | ------ |    mapped at 1; the stride may be larger than the slab

- Reading or writing what is not mapped, or between the end of a slab and the next stride, ends the process (here by
  SIGSEGV; a GPU's context is of no use any more).
- The lender keeps a lent slab mapped and does not touch it until it has come back. No lender can revoke a mapping:
  memory is safe to use again once the borrower has unmapped it or is dead.
- A slab is scrubbed before it is lent and before its lender uses it again. All calls here have taken effect when they
  return, on a GPU too.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from abc import ABC, abstractmethod
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
    """A slab cannot be had or mapped; the message says why."""


class Slabs(ABC):
    """Places for num_slabs slabs of slab_bytes each, stride_bytes apart; none is mapped yet.

    memory: (num_slabs * stride_bytes,) uint8, all addresses, mapped or not, as numpy has it or, of a GPU, as torch
    does. They stay reserved for as long as anything refers to memory, even after `close`. granularity: sizes are
    multiples of it. Raises ValueError on others, SlabError where the system has no addresses.
    """

    memory: Any

    def __init__(self, num_slabs: int, slab_bytes: int, stride_bytes: int | None, granularity: int) -> None:
        stride_bytes = slab_bytes if stride_bytes is None else stride_bytes
        if (
            num_slabs < 1
            or not 0 < slab_bytes <= stride_bytes
            or slab_bytes % granularity
            or stride_bytes % granularity
        ):
            raise ValueError(
                f"{num_slabs} slabs of {slab_bytes} bytes every {stride_bytes}: there has to be one, and both sizes "
                f"are multiples of {granularity}, the stride no less than the slab"
            )
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.stride_bytes = stride_bytes
        self.granularity = granularity
        # None: not mapped; -1: another's; else the file descriptor of our own.
        self._fds: list[int | None] = [None] * num_slabs
        weakref.finalize(self, _close_all, self._fds)

    # -- of each kind: offset is a place's, in bytes ------------------------------------------------------------

    @abstractmethod
    def _allocate(self, offset: int) -> int:
        """Map new memory, of zeros. Returns a file descriptor that stands for it."""

    @abstractmethod
    def _map(self, offset: int, fd: int) -> None: ...

    @abstractmethod
    def _unmap(self, offset: int) -> None: ...

    @abstractmethod
    def _zero(self, offset: int) -> None:
        """Overwrite a slab; it is done when this returns."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """memory as torch has it, on its device."""

    # -- of all -------------------------------------------------------------------------------------------------

    def allocate(self, index: int) -> None:
        """A new slab of our own, of zeros, mapped at `index`. Raises SlabError."""
        self._check_place(index)
        self._fds[index] = self._allocate(index * self.stride_bytes)

    def allocate_all(self) -> None:
        """A lender's: every slab its own. Raises SlabError."""
        for index in range(self.num_slabs):
            self.allocate(index)

    def map(self, index: int, fd: int) -> None:
        """Map another's slab; fd stays the caller's, who may close it. Raises SlabError for what is no slab of this
        size: whose size could be changed by the other side would be a crash to come."""
        self._check_place(index)
        self._map(index * self.stride_bytes, fd)
        self._fds[index] = -1

    def unmap(self, index: int) -> None:
        """Let go of a slab. The memory is the system's again when the last one who maps it has let go."""
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
        """The file descriptor of a slab of our own, to be sent to a borrower; it stays ours."""
        fd = self._fds[index]
        assert fd is not None and fd >= 0, f"slab {index} is not our own"
        return fd

    def scrub(self, index: int) -> None:
        """Overwrite a slab with zeros."""
        assert self.is_mapped(index), f"slab {index} is not mapped"
        self._zero(index * self.stride_bytes)

    def close(self) -> None:
        """Unmap all slabs."""
        for index in range(self.num_slabs):
            if self.is_mapped(index):
                self.unmap(index)

    def _check_place(self, index: int) -> None:
        assert 0 <= index < self.num_slabs and self._fds[index] is None, f"slab {index} is mapped already, or none"


class SlabRange(Slabs):
    """In host memory."""

    memory: np.ndarray

    def __init__(self, num_slabs: int, slab_bytes: int, stride_bytes: int | None = None) -> None:
        super().__init__(num_slabs, slab_bytes, stride_bytes, GRANULARITY)
        self._reservation = _Reservation(num_slabs * self.stride_bytes)
        self.memory = self._reservation.array()

    @classmethod
    def owned(cls, num_slabs: int, slab_bytes: int, stride_bytes: int | None = None) -> SlabRange:
        """A lender's: every slab its own, mapped and zero."""
        slabs = cls(num_slabs, slab_bytes, stride_bytes)
        slabs.allocate_all()
        return slabs

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.memory)

    def _allocate(self, offset: int) -> int:
        fd = allocate_slab(self.slab_bytes)
        try:
            self._map(offset, fd)
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
    """A file descriptor of size_bytes of zeros whose size nobody can change. Raises SlabError."""
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
        raise SlabError("a slab whose size is not sealed: its owner could make it shorter while it is mapped")


def _close_all(fds: list[int | None]) -> None:
    for fd in fds:
        if fd is not None and fd >= 0:
            os.close(fd)


class _Reservation:
    """size_bytes of addresses without memory behind them, the system's again when nothing refers to them."""

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
