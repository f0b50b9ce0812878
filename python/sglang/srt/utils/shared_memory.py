"""`SharedMemory`: memory that another process can be given. It has no name, so no other process can
open it and nothing is left behind. A process that holds the file descriptor may map it. It is gone when the last one
has let go.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref

import numpy as np

SIZE_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class SharedMemory:
    """memory: (size_bytes,) uint8, writable, begins at a page of the system. fd: stands for the memory and may be
    sent over a Unix socket; -1 where the system has no such memory (then it is ordinary memory)."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        # np keeps the mapping alive, for as long as anything refers to the bytes.
        self.memory = np.frombuffer(mmap.mmap(fd, max(size_bytes, 1)), np.uint8)[:size_bytes]
        if fd >= 0:
            weakref.finalize(self, os.close, fd)

    @classmethod
    def allocate(cls, size_bytes: int, name: str) -> SharedMemory:
        """Untouched memory: zeros, of which none is taken yet. name: what a person sees in /proc."""
        if not has_shared_memory():
            return cls(-1, size_bytes)
        return cls(sealed_memfd(size_bytes, name), size_bytes)

    @classmethod
    def of_process(cls, pid: int, fd: int, size_bytes: int) -> SharedMemory:
        """The memory of another process of the same user. fd: its own. Raises OSError."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), size_bytes)


def has_shared_memory() -> bool:
    return hasattr(os, "memfd_create")


def sealed_memfd(size_bytes: int, name: str) -> int:
    """A file descriptor of memory without a name, whose size cannot change: a process that maps it may rely on it.
    Zeros, of which none is taken yet. name: what a person sees in /proc. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, max(size_bytes, 1))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EFBIG:
            needed = f"{size_bytes} bytes of shared memory ({name}) are above the limit of a file's size"
            raise OSError(f"{needed}: raise it with `ulimit -f`") from None
        raise
    return fd
