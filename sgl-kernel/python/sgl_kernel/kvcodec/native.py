"""`csrc/kvcodec.c` and `csrc/inflate.c`, see `NativeLibrary`. `kvcodec/__init__.py` has checked the arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from sgl_kernel.native_library import NativeLibrary

_pointer, _size = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    **{f"kvcodec_split{n}": (None, [_pointer, _size, _pointer, _pointer]) for n in (2, 4)},
    **{f"kvcodec_merge{n}": (None, [_pointer, _pointer, _size, _pointer]) for n in (2, 4)},
    "kvcodec_deflate": (_size, [_pointer, _size, _pointer, _size]),
    "kvcodec_inflate": (ctypes.c_int, [_pointer, _size, _pointer, _size]),
    **{
        f"kvcodec_bin_{dtype}": (ctypes.c_int, [_pointer, _size, _size, _pointer, _pointer, _pointer])
        for dtype in ("bfloat16", "float16", "float32")
    },
    **{
        f"kvcodec_unbin_{dtype}": (None, [_pointer, _pointer, _size, _size, _pointer])
        for dtype in ("bfloat16", "float16", "float32")
    },
}
# IEEE results: no contraction.
LIBRARY = NativeLibrary(
    "kvcodec",
    ("kvcodec.c", "inflate.c"),
    _FUNCTIONS,
    "codecs run several times slower in numpy",
    ("-ffp-contract=off",),
)


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


def inflate(stream: np.ndarray, out: np.ndarray) -> bool:
    return _function("kvcodec_inflate")(_address(stream), len(stream), _address(out), len(out)) == 0


def is_available() -> bool:
    return LIBRARY.is_available()


def _function(name: str) -> Any:
    return LIBRARY.function(name)


def _address(array: np.ndarray) -> int:
    return array.ctypes.data
