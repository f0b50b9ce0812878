"""The compiled library of `sgl_kernel.cpu`, and which tensors its kernels take."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from sgl_kernel.native_library import NativeLibrary

_pointer, _size, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "cpu_panel": (_size, []),
    "cpu_linear": (None, [_pointer, *[_size] * 3, _pointer, _size, *[_pointer] * 2, _int, _int, _pointer, _int]),
    "cpu_linear_heads": (None, [_pointer, *[_size] * 5, _pointer, _size, _pointer, _int, _int]),
    "cpu_rows": (None, [*[_pointer] * 3, _size, _size, _int, _int]),
    "cpu_few_rows": (_int, [_pointer, *[_size] * 3, _pointer, _size, _pointer, _pointer, _int]),
    "cpu_lanes": (_size, []),
    "cpu_decode_chunk": (_size, []),
    "cpu_decode_plan": (_size, [_pointer] * 5),
    "cpu_decode": (None, [*[_pointer] * 4, _size]),
    "cpu_extend": (None, [_pointer, _pointer]),
    "cpu_copy_pages": (None, [*[_pointer] * 4, *[_size] * 3]),
    "cpu_rmsnorm": (None, [_pointer, _pointer, _pointer, _pointer, _size, _size, _float, _int]),
    "cpu_store_rows": (None, [_pointer, _pointer, _pointer, *[_size] * 6]),
    "cpu_draw": (None, [_pointer, *[_size] * 3, *[_pointer] * 6, _int]),
    "cpu_penalize": (None, [_pointer, *[_size] * 3, *[_pointer] * 4, _int]),
    "cpu_rope": (None, [_pointer, _pointer, _pointer, *[_size] * 5, _int]),
}


LIBRARY = NativeLibrary(
    "cpu",
    (
        *("cpu_vector.h", "cpu_tile.h", "cpu_attention.h", "cpu_pool.h", "cpu_pool.c"),
        *(
            "cpu_linear.c",
            "cpu_decode.c",
            "cpu_extend.c",
            "cpu_elementwise.c",
            "cpu_copy.c",
            "cpu_sample.c",
            "cpu_few_rows.c",
        ),
    ),
    _FUNCTIONS,
    "a model computes up to three times slower in torch",
    ("-pthread",),
)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels can be used on a tensor's device and type."""
    return x.is_cpu and x.dtype == torch.float32 and LIBRARY.is_available()


@cache
def function(name: str) -> Any:
    return LIBRARY.function(name)
