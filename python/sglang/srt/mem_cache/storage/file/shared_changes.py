"""`SharedChanges`: how the processes that share a namespace's folder see what has changed, and take turns.

Owns the file `changes` of the folder: its lock (flock), and the numbers in it. Knows no blocks.

    0        8          16                    4096                  8192
    | holder | folder   | erased, 510 numbers | stored, 512 numbers |
      1 while  files      blocks of segment n   blocks of segment n
      the lock came or    were claimed or lost  became complete
      is used  went       (n modulo 510)        (n modulo 512)

A process that has changed something *rings*: it overwrites the number for it with a random one. Others compare all
numbers with those that they saw before, which is one read in the page cache. What is rung for is written before the
number, and a number is read before what it stands for, so that no change is missed. `holder` and the numbers of the
first half are written under the lock only. A process that has taken the lock and finds `holder` set rings for all:
another process was killed while it changed something.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

SIZE_BYTES = 8192
_WORD_BYTES = 8
_FOLDER = 1
_FIRST_ERASED, _NUM_ERASED = 2, 510
_FIRST_STORED, _NUM_STORED = 512, 512
# Waits between attempts to take the lock: about a second in total, then another process hangs.
_WAITS_S = (*(0.001,) * 10, *(0.01,) * 20, *(0.05,) * 16)
_SHORT_WAITS_S = (0.001,) * 10


class SharedChanges:
    """The file of one folder. writable: else it is only read, and is not there before another process has made it.
    count_written: is told how many bytes are written."""

    def __init__(self, folder: Path, writable: bool, count_written: Callable[[int], None]) -> None:
        self.path = str(folder / "changes")
        # False: the file system has no locks, so that one process at most may write.
        self.has_locks = True
        self._writable = writable
        self._count_written = count_written
        self._fd: int | None = None
        self._inode: tuple[int, int] | None = None
        # Of files that are gone. Closed at the end: other threads may be about to use them.
        self._old: list[int] = []
        self._locked: int | None = None
        # The lock belongs to the open file, that is, to all threads.
        self._turn = threading.Lock()

    def open(self) -> None:
        """Open the file that is there now, or make one. Raises OSError."""
        if self._fd is not None:
            self._old.append(self._fd)
            self._fd = self._inode = None
        flags = os.O_RDWR | os.O_CREAT if self._writable else os.O_RDONLY
        try:
            fd = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            if self._writable:
                raise
            return
        try:
            stat = os.fstat(fd)
            if self._writable and stat.st_size < SIZE_BYTES:
                os.ftruncate(fd, SIZE_BYTES)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._inode = fd, (stat.st_dev, stat.st_ino)

    def close(self) -> None:
        for fd in self._old if self._fd is None else [*self._old, self._fd]:
            os.close(fd)
        self._old.clear()
        self._fd = self._inode = None

    def is_there(self) -> bool:
        """Whether the file that is open still has this path."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._inode

    def read(self) -> bytes:
        """All numbers but the holder; empty where the file was deleted. A file that was moved away is found by
        `lock` alone: looking it up by its path takes longer than all else here."""
        fd = self._fd
        if fd is None:
            return b""
        try:
            return os.pread(fd, SIZE_BYTES - _WORD_BYTES, _WORD_BYTES) if os.fstat(fd).st_nlink else b""
        except OSError:
            return b""

    def is_holder_set(self) -> bool:
        """With the lock, before `set_holder`: whether the one who had it before was killed meanwhile."""
        fd = self._fd
        return fd is not None and any(os.pread(fd, _WORD_BYTES, 0))

    # -- ringing ------------------------------------------------------------------------------------------------

    def ring_folder(self) -> list[tuple[int, bytes]]:
        """Files came or went. With the lock. Returns what was written, (offset, bytes), as the
        others do. Raises OSError."""
        return self._ring([_FOLDER])

    def ring_erased(self, numbers: Iterable[int]) -> list[tuple[int, bytes]]:
        """Blocks were claimed, overwritten or lost in segments `numbers`. With the lock."""
        return self._ring(sorted({_FIRST_ERASED + number % _NUM_ERASED for number in numbers}))

    def ring_stored(self, number: int) -> list[tuple[int, bytes]]:
        """Blocks of a segment became complete; by its writer. Two writers of segments with the same number here may
        hide each other's change, until the next one: blocks are then found late."""
        return self._ring([_FIRST_STORED + number % _NUM_STORED])

    def ring_all(self) -> list[tuple[int, bytes]]:
        """Anything may have changed. With the lock."""
        return self._ring(list(range(_FOLDER, _FIRST_ERASED + _NUM_ERASED)))

    def _ring(self, words: list[int]) -> list[tuple[int, bytes]]:
        written = [(word * _WORD_BYTES, secrets.token_bytes(_WORD_BYTES)) for word in words]
        for offset, token in written:
            if self._fd is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._count_written(os.pwrite(self._fd, token, offset))
        return written

    # -- the lock -------------------------------------------------------------------------------------------------

    def lock(self, short: bool = False) -> bool:
        """Take the lock, or False: another process has had it for a second (short: 10 ms), or the file is gone."""
        waits = _SHORT_WAITS_S if short else _WAITS_S
        if not self._turn.acquire(timeout=sum(waits)):
            return False
        fd = self._fd
        for wait_s in (*waits, 0.0):
            if fd is None:
                break
            if not self.has_locks or self._try_lock(fd):
                self._locked = fd
                if self.is_there():
                    return True
                self.unlock()
                return False
            time.sleep(wait_s)
        self._turn.release()
        return False

    def unlock(self) -> None:
        fd, self._locked = self._locked, None
        if fd is not None and self.has_locks:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self._turn.release()

    def set_holder(self, is_changing: bool) -> None:
        """With the lock: whether its holder is changing something. Raises OSError."""
        if self._fd is not None:
            self._count_written(os.pwrite(self._fd, int(is_changing).to_bytes(_WORD_BYTES, "little"), 0))

    def _try_lock(self, fd: int) -> bool:
        locked = try_flock(fd)
        if locked is None:
            self.has_locks = False
        return locked is not False


class Seen:
    """The numbers as a process has last seen them. Not safe between threads."""

    def __init__(self) -> None:
        self._page = bytearray()

    def equals(self, page: bytes) -> bool:
        return self._page == page

    def take(self, page: bytes) -> None:
        self._page = bytearray(page)

    def take_own(self, written: Iterable[tuple[int, bytes]]) -> None:
        """What this process rang itself."""
        for offset, token in written:
            self._page[offset - _WORD_BYTES : offset] = token

    def forget(self) -> None:
        """Everything counts as changed."""
        self._page = bytearray()

    def changes(self, page: bytes) -> Changes:
        if len(page) != len(self._page):
            return Changes(None)
        return Changes(np.frombuffer(page, "<u8") != np.frombuffer(self._page, "<u8"))


class Changes:
    """differs: (numbers but the holder,) bool, or None for all."""

    def __init__(self, differs: np.ndarray | None) -> None:
        self._differs = differs

    @property
    def folder(self) -> bool:
        return self._differs is None or bool(self._differs[_FOLDER - 1])

    def of(self, number: int) -> bool:
        """Whether the segment may have changed."""
        if self._differs is None:
            return True
        erased, stored = _FIRST_ERASED + number % _NUM_ERASED, _FIRST_STORED + number % _NUM_STORED
        return bool(self._differs[erased - 1]) or bool(self._differs[stored - 1])


def try_flock(fd: int, shared: bool = False) -> bool | None:
    """False: another process holds it; None: the file system has no locks, as some network mounts."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR) else None
    return True
