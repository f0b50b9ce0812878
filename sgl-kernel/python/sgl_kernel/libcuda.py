"""What bindings to the CUDA driver share: how functions are bound, how a call's error is told, and a structure."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping
from types import SimpleNamespace
from typing import Any


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def bind(signatures: Mapping[str, tuple[Any, ...]], short: Container[str] = ()) -> SimpleNamespace:
    """Functions of libcuda by their names there, each with the types of its parameters; all return a CUresult. short:
    those that keep Python's lock, as to get it back can take longer than they do. Raises OSError if there is no
    driver, or one that lacks a function."""
    libraries = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
    bound = SimpleNamespace()
    for name, takes in signatures.items():
        try:
            function = getattr(libraries[name in short], name)
        except AttributeError as error:
            raise OSError(f"libcuda.so.1 is too old: it lacks {name}") from error
        function.argtypes, function.restype = takes, ctypes.c_int
        setattr(bound, name, function)
    return bound


def error_of(libcuda: Any, name: str, *arguments: Any) -> str:
    """Call a function of libcuda: "", or its name and the error's."""
    result = getattr(libcuda, name)(*arguments)
    if not result:
        return ""
    error = ctypes.c_char_p()
    libcuda.cuGetErrorName(result, ctypes.byref(error))
    return f"{name}: {(error.value or b'CUDA error').decode()} ({result})"
