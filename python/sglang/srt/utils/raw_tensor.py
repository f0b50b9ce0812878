"""A tensor over memory that torch did not allocate: at an address, on a device that is told, not asked for.

Owns nothing but the description that torch is handed (DLPack 0.x, a stable binary interface). Torch's other way,
`__cuda_array_interface__`, asks the driver which device the address is of, and fails where nothing is mapped yet.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_CPU, _CUDA = 1, 2  # kDLCPU, kDLCUDA
_UNSIGNED = 1  # kDLUInt


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """strides: None for a tensor without gaps."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


# What torch still refers to, by address: the description, its shape, and the object that keeps the memory.
_alive: dict[int, tuple[Any, ...]] = {}


def _delete(address: int, _forget: Any = _alive.pop) -> None:
    """Called by torch, from any thread, when nothing refers to the memory any more."""
    _forget(address, None)


_deleter = _Deleter(_delete)


def raw_tensor(address: int, size_bytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """(size_bytes,) uint8, the memory itself. owner: is kept for as long as torch refers to it."""
    kind = {"cpu": _CPU, "cuda": _CUDA}[device.type]
    shape = (ctypes.c_int64 * 1)(size_bytes)
    tensor = _Tensor(address, _Device(kind, device.index or 0), 1, _DataType(_UNSIGNED, 8, 1), shape, None, 0)
    managed = _ManagedTensor(tensor, None, _deleter)
    where = ctypes.addressof(managed)
    _alive[where] = (managed, shape, owner)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    try:
        return torch.utils.dlpack.from_dlpack(new_capsule(where, b"dltensor", None))
    except BaseException:
        _alive.pop(where, None)
        raise
