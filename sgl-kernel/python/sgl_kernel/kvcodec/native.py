"""Compiles `csrc/kvcodec.c` at first use and calls it through ctypes, which releases the GIL.

Owns the compiled library and its file in the user's cache. The file's name is a hash of the source, the command, the
compiler's version and the CPU's features; a change to one of them gives another file. Any number of processes may
compile at once: each writes a file of its own, and renames it. `kvcodec/__init__.py` has checked the arguments.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "kvcodec.c"
# IEEE results: no contraction. errno and floating-point traps are given up.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120

logger = logging.getLogger(__name__)

_pointer, _size = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    **{f"kvcodec_split{n}": (None, [_pointer, _size, _pointer, _pointer]) for n in (2, 4)},
    **{f"kvcodec_merge{n}": (None, [_pointer, _pointer, _size, _pointer]) for n in (2, 4)},
    "kvcodec_deflate": (_size, [_pointer, _size, _pointer, _size]),
    **{
        f"kvcodec_bin_{dtype}": (ctypes.c_int, [_pointer, _size, _size, _pointer, _pointer, _pointer])
        for dtype in ("bfloat16", "float16", "float32")
    },
    **{
        f"kvcodec_unbin_{dtype}": (None, [_pointer, _pointer, _size, _size, _pointer])
        for dtype in ("bfloat16", "float16", "float32")
    },
}


def split_planes(raw: np.ndarray, itemsize: int, first: np.ndarray, rest: np.ndarray) -> None:
    _function(f"kvcodec_split{itemsize}")(_address(raw), len(first), _address(first), _address(rest))


def merge_planes(first: np.ndarray, rest: np.ndarray, itemsize: int, out: np.ndarray) -> None:
    _function(f"kvcodec_merge{itemsize}")(_address(first), _address(rest), len(first), _address(out))


def bin_vectors(
    raw: np.ndarray, dtype: str, dim: int, half: np.ndarray, scales: np.ndarray, codes: np.ndarray
) -> bool:
    arrays = (_address(half), _address(scales), _address(codes))
    return bool(_function(f"kvcodec_bin_{dtype}")(_address(raw), len(half), dim, *arrays))


def unbin_vectors(scales: np.ndarray, codes: np.ndarray, dtype: str, dim: int, out: np.ndarray) -> None:
    num_vectors = len(codes) // dim
    _function(f"kvcodec_unbin_{dtype}")(_address(scales), _address(codes), num_vectors, dim, _address(out))


def deflate_literals(data: np.ndarray, out: np.ndarray) -> int | None:
    size = _function("kvcodec_deflate")(_address(data), len(data), _address(out), len(out))
    return None if size < 0 else size


@cache
def is_available() -> bool:
    """Whether the library can be used, compiled now if necessary. If not, one line in the log gives the reason."""
    try:
        _library()
    except (OSError, subprocess.SubprocessError, AttributeError) as e:
        detail = getattr(e, "stderr", None) or str(e)
        logger.warning("kvcodec: no compiled loops, codecs run several times slower in numpy: %s", detail.strip())
        return False
    return True


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-kernels"


def compile_library(directory: Path) -> Path:
    """The compiled library in `directory`, written first if it does not exist. OSError or SubprocessError if that
    fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler found; install gcc or clang, or set CC")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S
    ).stdout
    made_of = "\0".join((SOURCE.read_text(), compiler, *FLAGS, version, platform.machine(), _cpu_features()))
    final = directory / f"kvcodec-{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    if final.is_file():
        return final
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=directory) as ours:
        built = Path(ours) / final.name
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)
        built.replace(final)
    return final


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_library(cache_dir())))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _function(name: str) -> ctypes._NamedFuncPointer:
    return getattr(_library(), name)


def _cpu_features() -> str:
    """The features that `-march=native` depends on. Machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("flags", "Features", "model name", "model\t", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _address(array: np.ndarray) -> int:
    return array.ctypes.data
