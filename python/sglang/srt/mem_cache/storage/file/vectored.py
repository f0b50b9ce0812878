"""Reads and writes of many buffers at once: preadv and pwritev, however many buffers and however short they fall.

Knows neither blocks nor files' contents.
"""

from __future__ import annotations

import os
from collections.abc import Callable

MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))


class PartialTransferError(OSError):
    """error, after done_bytes were transferred."""

    def __init__(self, error: OSError, done_bytes: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.error = error
        self.done_bytes = done_bytes


def chained(blocks: list[list[memoryview]], padding: memoryview) -> list[memoryview]:
    """The buffers of slots: each block's and the padding behind it; without one, neighbours in memory are one."""
    if len(padding):
        return [piece for block in blocks for piece in (*block, padding)]
    return [piece for block in blocks for piece in block]


def transfer(call: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
    """preadv or pwritev (`call`) of all buffers; returns the bytes, fewer only at the end of a file.

    buffers: may be changed. Raises PartialTransferError.
    """
    total = 0
    first = 0
    while first < len(buffers):
        batch = buffers[first : first + MAX_BUFFERS]
        try:
            done = call(fd, batch, offset + total)
        except OSError as error:
            raise PartialTransferError(error, total) from error
        if not done:
            break
        total += done
        while done and first < len(buffers):
            size = len(buffers[first])
            if done < size:
                buffers[first] = buffers[first][done:]
                break
            done -= size
            first += 1
    return total
