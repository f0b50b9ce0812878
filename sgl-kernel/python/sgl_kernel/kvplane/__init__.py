"""The data plane of the offload proxy, in C (`csrc/kvplane/`): on threads of this process, or a program of its own;
and the other end of its frames, beside an engine.

`offload/proxy/plane.py` speaks with it. Owns nothing but how it is built.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sgl_kernel.native_library import CSRC, NativeLibrary, cache_dir

_PARTS = (
    *("clock", "control", "destinations", "engines", "fetches", "libraries"),
    *("piece", "pipeline", "receive", "relay", "slots", "store"),
)
_MAIN = "kvplane/main.c"
_pointer = ctypes.c_void_p
LIBRARY = NativeLibrary(
    "kvplane",
    (*(f"kvplane/{name}.c" for name in _PARTS), "kvplane/plane.h", "kvcodec.c", "inflate.c"),
    {
        "kvplane_run": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
        "kvplane_relay": (_pointer, [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, _pointer, _pointer]),
        "kvplane_relay_open": (ctypes.c_int, [_pointer, ctypes.c_uint64, ctypes.c_uint32, _pointer]),
        "kvplane_relay_end": (ctypes.c_int64, [_pointer, ctypes.c_uint64]),
        "kvplane_relay_receive": (ctypes.c_int64, [_pointer, ctypes.POINTER(_pointer)]),
        "kvplane_relay_free": (None, [_pointer]),
    },
    "the remote tier cannot be used",
    # IEEE results: no contraction, as for kvcodec.
    ("-std=gnu11", "-D_GNU_SOURCE", "-pthread", "-ffp-contract=off"),
    ("-ldl",),
)


def is_available() -> bool:
    return LIBRARY.is_available()


def run(control_fd: int) -> int:
    """Serve the control plane at this socket, which it closes, until the other side does. Returns 0, or 1 after a
    message that was none. Without the GIL."""
    status: int = LIBRARY.function("kvplane_run")(control_fd, False)
    return status


def program() -> Path:
    """The program, for this machine: `kvplane FD`. OSError or SubprocessError if it cannot be compiled."""
    return LIBRARY.compile_program(cache_dir(), _MAIN)


def cross_compile(compiler: Sequence[str], to: Path) -> None:
    """The program for another machine. compiler: a C compiler's command, like ("aarch64-linux-gnu-gcc",). OSError or
    SubprocessError if that fails."""
    units = [str(CSRC / name) for name in (*LIBRARY.sources, _MAIN) if name.endswith(".c")]
    command = [*compiler, "-O3", *LIBRARY.flags, "-o", str(to), *units, *LIBRARY.linked, "-lm"]
    subprocess.run(command, capture_output=True, text=True, check=True)


class FrameError(Exception):
    """No frame comes any more; why."""


class _Layout(ctypes.Structure):
    _fields_ = (
        ("block_bytes", ctypes.c_uint64),
        ("page_bytes", ctypes.c_uint32),
        ("pages_per_block", ctypes.c_uint32),
        ("piece_bytes", ctypes.c_uint32),
        ("num_pieces", ctypes.c_uint32),
    )


class FrameReceiver:
    """Checks the frames of a proxy elsewhere, and writes the bytes of open fetches into an engine's pages.

    fd: a connected socket, the caller's. key: of 32 bytes, with which the next frame, `number`, is authenticated.
    pool: (bytes,) uint8, which outlives this object.
    """

    _REASONS = (
        "the other side has gone",
        "a frame was not made with this side's key",
        "not a frame",
        "bytes came for no piece of the operation, or out of order",
    )

    def __init__(
        self,
        fd: int,
        key: bytes,
        number: int,
        pool: np.ndarray,
        *,
        block_bytes: int,
        page_bytes: int,
        pages_per_block: int,
        piece_bytes: int,
        num_pieces: int,
    ) -> None:
        """Raises OSError without OpenSSL's library."""
        assert len(key) == 32
        self._pool = pool
        layout = _Layout(block_bytes, page_bytes, pages_per_block, piece_bytes, num_pieces)
        self._relay = LIBRARY.function("kvplane_relay")(fd, key, number, pool.ctypes.data, ctypes.byref(layout))
        if not self._relay:
            raise OSError("there is no libcrypto.so.3 or 1.1: install it (libssl3)")

    def open(self, operation: int, pages: np.ndarray) -> None:
        """Bytes of a fetch may come. pages: (blocks, pages per block) int32, all of the pool."""
        assert pages.dtype == np.int32 and pages.flags.c_contiguous
        if LIBRARY.function("kvplane_relay_open")(self._relay, operation, len(pages), pages.ctypes.data):
            raise MemoryError

    def end(self, operation: int) -> int | None:
        """Nothing is written for a fetch any more. Returns how many of its leading blocks have come; None: it is not
        open."""
        num = LIBRARY.function("kvplane_relay_end")(self._relay, operation)
        return None if num < 0 else num

    def receive(self) -> bytes:
        """The next message. For one thread, without the GIL. Raises FrameError."""
        message = _pointer()
        size = LIBRARY.function("kvplane_relay_receive")(self._relay, ctypes.byref(message))
        if size < 0:
            raise FrameError(self._REASONS[-size - 1])
        return ctypes.string_at(message, size)

    def close(self) -> None:
        """After the last call of the others."""
        LIBRARY.function("kvplane_relay_free")(self._relay)
