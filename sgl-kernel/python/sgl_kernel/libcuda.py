"""What bindings to the CUDA driver share: a structure, and how a call's error is told. Binds nothing itself."""

from __future__ import annotations

import ctypes
from typing import Any


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def error_of(libcuda: Any, name: str, *arguments: Any) -> str:
    """Call a function of libcuda: "", or its name and the error's."""
    result = getattr(libcuda, name)(*arguments)
    if not result:
        return ""
    error = ctypes.c_char_p()
    libcuda.cuGetErrorName(result, ctypes.byref(error))
    return f"{name}: {(error.value or b'CUDA error').decode()} ({result})"
