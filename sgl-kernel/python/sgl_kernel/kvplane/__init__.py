"""The data plane of the offload proxy, in C (`csrc/kvplane/`): on threads of this process, or a program of its own.

`offload/proxy/plane.py` speaks with it. Owns nothing but how it is built.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sgl_kernel.native_library import CSRC, NativeLibrary, cache_dir

_PARTS = ("control", "destinations", "engines", "libraries", "piece", "pipeline", "slots", "store")
_MAIN = "kvplane/main.c"
LIBRARY = NativeLibrary(
    "kvplane",
    (*(f"kvplane/{name}.c" for name in _PARTS), "kvplane/plane.h", "kvcodec.c", "inflate.c"),
    {"kvplane_run": (ctypes.c_int, [ctypes.c_int, ctypes.c_int])},
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
