"""`CudaDriver`: the part of the CUDA driver that slabs of GPU memory need: its virtual memory management, as of
cuda.h 13.0.

Owns the binding to libcuda. A method is one call of the driver, nearly under its name there. A call that fails raises
SlabError with the names of the function and of the error. Methods are called within `on`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator
from typing import Any

import torch

from sgl_kernel.libcuda import MemLocation, bind, error_of
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.utils.raw_tensor import raw_tensor

# Of cuda.h: CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType, CUmemAccess_flags,
# CUmemAllocationGranularity_flags, CUstream_flags, CUdevice_attribute.
PINNED = 1
ON_DEVICE = 1
POSIX_FILE_DESCRIPTOR = 1
READ_WRITE = 3
GRANULARITY_MINIMUM = 0
STREAM_NON_BLOCKING = 1
ATTRIBUTE_VIRTUAL_MEMORY = 102
ATTRIBUTE_POSIX_FILE_DESCRIPTOR = 103


class MemAllocFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", MemAllocFlags),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


_int, _uint, _size, _void_p = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
# CUdeviceptr and CUmemGenericAllocationHandle; contexts and streams are pointers.
_u64 = ctypes.c_ulonglong
_to = ctypes.POINTER

# What each function takes; all return a CUresult. Where cuda.h renames one to its newest version, that is its name.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_uint,),
    "cuGetErrorName": (_int, _to(ctypes.c_char_p)),
    "cuDeviceGet": (_to(_int), _int),
    "cuDeviceGetAttribute": (_to(_int), _int, _int),
    "cuDevicePrimaryCtxRetain": (_to(_void_p), _int),
    "cuCtxPushCurrent_v2": (_void_p,),
    "cuCtxPopCurrent_v2": (_to(_void_p),),
    "cuStreamCreate": (_to(_void_p), _uint),
    "cuStreamDestroy_v2": (_void_p,),
    "cuStreamSynchronize": (_void_p,),
    "cuMemGetAllocationGranularity": (_to(_size), _to(MemAllocationProp), _int),
    "cuMemAddressReserve": (_to(_u64), _size, _size, _u64, _u64),
    "cuMemAddressFree": (_u64, _size),
    "cuMemCreate": (_to(_u64), _size, _to(MemAllocationProp), _u64),
    "cuMemRelease": (_u64,),
    "cuMemExportToShareableHandle": (_void_p, _u64, _int, _u64),
    "cuMemImportFromShareableHandle": (_to(_u64), _void_p, _int),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemSetAccess": (_u64, _size, _to(MemAccessDesc), _size),
    "cuMemUnmap": (_u64, _size),
    "cuMemsetD8Async": (_u64, ctypes.c_ubyte, _size, _void_p),
}


def load_libcuda() -> Any:
    """Raises SlabError if there is no driver."""
    try:
        return bind(SIGNATURES)
    except OSError as error:
        raise SlabError(f"slabs of GPU memory need the CUDA driver's virtual memory: {error}") from error


class CudaDriver:
    """libcuda: functions under the names of SIGNATURES; None: the system's. Methods take a device by its number for
    CUDA, as torch counts too. Raises SlabError, like all methods."""

    def __init__(self, libcuda: Any = None) -> None:
        self._libcuda = libcuda or load_libcuda()
        self._contexts: dict[int, int | None] = {}
        self._call("cuInit", 0)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """The device's primary context, which is torch's too, is the current one on this thread. It is never
        released."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(device))
            self._contexts[device] = context.value
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def check(self, device: int) -> None:
        """Raises SlabError if the device has no memory that can be shared slab by slab."""
        for attribute, what in (
            (ATTRIBUTE_VIRTUAL_MEMORY, "virtual memory management"),
            (ATTRIBUTE_POSIX_FILE_DESCRIPTOR, "memory as file descriptors"),
        ):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._handle(device))
            if not value.value:
                raise SlabError(f"GPU {device} has no {what}, which slabs need; use --device cpu")

    def granularity(self, device: int) -> int:
        """In bytes: sizes and addresses have to be multiples of it."""
        size = ctypes.c_size_t()
        prop = allocation(device)
        with self.on(device):
            self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(prop), GRANULARITY_MINIMUM)
        return size.value

    def reserve(self, size_bytes: int) -> int:
        """Addresses without memory."""
        address = ctypes.c_ulonglong()
        self._call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
        return address.value

    def free(self, address: int, size_bytes: int) -> None:
        """Give up reserved addresses, at which nothing is mapped."""
        self._call("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int, device: int) -> int:
        """A handle of new memory, of undefined content, which the caller releases. The memory exists while it is
        mapped, or has a handle or a file descriptor."""
        handle = ctypes.c_ulonglong()
        prop = allocation(device)
        self._call("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(prop), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """A file descriptor, which the caller closes and no child inherits."""
        fd = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, POSIX_FILE_DESCRIPTOR, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """A handle of memory that another process exported; the caller releases it. fd stays the caller's."""
        if self.is_host_memory(fd):
            raise SlabError("a slab of host memory: its worker does not run on a GPU")
        handle = ctypes.c_ulonglong()
        # The number itself, as a pointer.
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, POSIX_FILE_DESCRIPTOR)
        return handle.value

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Map the first size_bytes of a handle's memory, without access."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def set_access(self, address: int, size_bytes: int, device: int) -> None:
        """Let the device read and write what is mapped there, also if it is another device's memory."""
        access = MemAccessDesc(MemLocation(ON_DEVICE, device), READ_WRITE)
        self._call("cuMemSetAccess", address, size_bytes, ctypes.byref(access), 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap what one call mapped."""
        self._call("cuMemUnmap", address, size_bytes)

    def stream_create(self) -> int:
        """A stream that waits for no other."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def memset_async(self, address: int, value: int, size_bytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, value, size_bytes, stream)

    def synchronize(self, stream: int) -> None:
        """Wait for the stream, without Python's lock."""
        self._call("cuStreamSynchronize", stream)

    def tensor(self, address: int, size_bytes: int, device: int, owner: Any) -> torch.Tensor:
        """See `raw_tensor`."""
        torch.cuda.init()  # a tensor made from an address does not do it
        return raw_tensor(address, size_bytes, torch.device("cuda", device), owner)

    def is_host_memory(self, fd: int) -> bool:
        """The driver's descriptors are of a device file; a memfd is a regular one."""
        try:
            return stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError as error:
            raise SlabError(f"file descriptor {fd} is no slab: {error}") from error

    def _handle(self, device: int) -> int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        return handle.value

    def _call(self, name: str, *arguments: Any) -> None:
        if error := error_of(self._libcuda, name, *arguments):
            raise SlabError(error)


def allocation(device: int) -> MemAllocationProp:
    """Properties of a device's memory that other processes can map."""
    return MemAllocationProp(PINNED, POSIX_FILE_DESCRIPTOR, MemLocation(ON_DEVICE, device))
