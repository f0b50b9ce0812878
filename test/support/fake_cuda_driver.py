"""`FakeCudaDriver`: the CUDA driver's virtual memory in host memory, which checks the rules of its interface.

Functions are called through C pointers of the true signatures, so what is passed is converted as for libcuda. Memory
is a memfd, addresses are the process's own: what is not mapped, or mapped without access, ends the process when it is
touched, and what two ranges map is the same bytes, also in two processes. As a GPU's driver may, it gives out memory
full of junk, and overwrites it no sooner than somebody waits for the stream.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sglang.srt.peer.memory import slabs as host_slabs
from sglang.srt.peer.memory.cuda_driver import (
    GRANULARITY_MINIMUM,
    ON_DEVICE,
    PINNED,
    POSIX_FILE_DESCRIPTOR,
    READ_WRITE,
    SIGNATURES,
    STREAM_NON_BLOCKING,
    CudaDriver,
    MemAllocationProp,
)
from sglang.srt.utils.raw_tensor import raw_tensor
from support import device_emulator

JUNK = 0xA5
_NAMES = {1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 101: "CUDA_ERROR_INVALID_DEVICE"}
_CODES = {name: code for code, name in _NAMES.items()}


@dataclass
class _Mapping:
    size_bytes: int
    has_access: bool = False


@dataclass
class _Range:
    """mapped: by address."""

    size_bytes: int
    mapped: dict[int, _Mapping] = field(default_factory=dict)


class _Refusal(Exception):
    """What the driver answers with an error."""


class FakeLibcuda:
    """The functions of SIGNATURES, for one process. granularity: of the pretended device. broken: rules that were;
    nothing a sound caller does adds to it. fail: name of a function whose next call fails as if there were no memory.
    """

    def __init__(self, granularity: int, device: int = 0) -> None:
        self.granularity = granularity
        self.broken: list[str] = []
        self.fail: str | None = None
        self._device = device
        self._libc = host_slabs._libc()
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._contexts = threading.local()
        self._handles: dict[int, int] = {}  # -> memfd
        self._ranges: dict[int, _Range] = {}  # by address
        self._streams: dict[int, list[Callable[[], object]]] = {}
        self._next = 1000
        for name, takes in SIGNATURES.items():
            function = self._call(name, getattr(self, "_" + name.removesuffix("_v2")))
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *takes)(function))

    def is_empty(self) -> bool:
        """All is given back but contexts."""
        return not (self._handles or self._ranges or self._streams)

    def close(self) -> None:
        """Of handles that nobody released."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    # -- how it is called ---------------------------------------------------------------------------------------

    def _call(self, name: str, function: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if self.fail == name:
                self.fail = None
                return _CODES["CUDA_ERROR_OUT_OF_MEMORY"]
            try:
                function(*arguments)
            except _Refusal as refusal:
                return _CODES[str(refusal)]
            except Exception as error:
                self.broken.append(f"{name}: {error!r}")
                return 1
            return 0

        return call

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(what)

    def _in_context(self) -> None:
        self._check(bool(getattr(self._contexts, "stack", [])), "no context is current")

    def _whole(self, *sizes: int) -> None:
        for size in sizes:
            self._check(size % self.granularity == 0, f"{size} is no multiple of {self.granularity}")

    # -- functions ----------------------------------------------------------------------------------------------

    def _cuInit(self, flags: int) -> None:
        self._check(flags == 0, "flags")

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        out[0] = _NAMES[code].encode()

    def _cuDeviceGet(self, out: Any, ordinal: int) -> None:
        if ordinal != self._device:
            raise _Refusal("CUDA_ERROR_INVALID_DEVICE")
        out[0] = ordinal

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        self._check(attribute in (102, 103), "attribute")
        out[0] = 1

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out[0] = 0xC0 + device

    def _cuCtxPushCurrent(self, context: int) -> None:
        self._check(context == 0xC0 + self._device, "context")
        self._contexts.stack = [*getattr(self._contexts, "stack", []), context]

    def _cuCtxPopCurrent(self, out: Any) -> None:
        self._in_context()
        out[0] = self._contexts.stack.pop()

    def _cuStreamCreate(self, out: Any, flags: int) -> None:
        self._in_context()
        self._check(flags == STREAM_NON_BLOCKING, "a stream that waits for the default stream")
        out[0] = self._new()
        self._streams[out[0]] = []

    def _cuStreamDestroy(self, stream: int) -> None:
        self._check(not self._streams.pop(stream), "the stream has work that nobody waits for")

    def _cuStreamSynchronize(self, stream: int) -> None:
        self._in_context()
        while self._streams[stream]:
            self._streams[stream].pop(0)()

    def _check_prop(self, prop: MemAllocationProp) -> None:
        self._check((prop.type, prop.requestedHandleTypes) == (PINNED, POSIX_FILE_DESCRIPTOR), "kind of allocation")
        self._check((prop.location.type, prop.location.id) == (ON_DEVICE, self._device), "location")
        self._check(prop.win32HandleMetaData is None and not any(bytes(prop.allocFlags)), "what has to be zero")

    def _cuMemGetAllocationGranularity(self, out: Any, prop: Any, option: int) -> None:
        self._check_prop(prop.contents)
        self._check(option == GRANULARITY_MINIMUM, "option")
        out[0] = self.granularity

    def _cuMemAddressReserve(self, out: Any, size: int, alignment: int, hint: int, flags: int) -> None:
        self._whole(size)
        self._check((alignment, hint, flags) == (0, 0, 0), "alignment, hint, flags")
        # Aligned as a GPU's are.
        first = self._mmap(None, size + self.granularity, -1, 0)
        aligned = -(-first // self.granularity) * self.granularity
        for start, end in ((first, aligned), (aligned + size, first + size + self.granularity)):
            if end > start:
                self._libc.munmap(start, end - start)
        self._ranges[aligned] = _Range(size)
        out[0] = aligned

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        found = self._ranges[address]
        self._check(found.size_bytes == size, "not the size that was reserved")
        self._check(not found.mapped, "something is mapped there")
        del self._ranges[address]
        self._libc.munmap(address, size)

    def _cuMemCreate(self, out: Any, size: int, prop: Any, flags: int) -> None:
        self._whole(size)
        self._check_prop(prop.contents)
        self._check(flags == 0 and size > 0, "flags, size")
        fd = os.memfd_create("fake-cuda-memory", os.MFD_CLOEXEC)
        os.pwrite(fd, bytes([JUNK]) * size, 0)
        out[0] = self._new()
        self._handles[out[0]] = fd

    def _cuMemRelease(self, handle: int) -> None:
        os.close(self._handles.pop(handle))

    def _cuMemExportToShareableHandle(self, out: int, handle: int, kind: int, flags: int) -> None:
        self._check((kind, flags) == (POSIX_FILE_DESCRIPTOR, 0), "kind, flags")
        ctypes.c_int.from_address(out).value = os.dup(self._handles[handle])

    def _cuMemImportFromShareableHandle(self, out: Any, fd: int | None, kind: int) -> None:
        self._check(kind == POSIX_FILE_DESCRIPTOR, "kind")
        if "fake-cuda-memory" not in os.readlink(f"/proc/self/fd/{fd or 0}"):
            raise _Refusal("CUDA_ERROR_INVALID_VALUE")
        out[0] = self._new()
        self._handles[out[0]] = os.dup(fd or 0)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self._in_context()
        self._whole(address, size)
        self._check((offset, flags) == (0, 0), "offset, flags")
        within = self._range_of(address, size)
        for start, mapping in within.mapped.items():
            self._check(address + size <= start or start + mapping.size_bytes <= address, "it is mapped already")
        if size > os.fstat(self._handles[handle]).st_size:
            raise _Refusal("CUDA_ERROR_INVALID_VALUE")
        self._mmap(address, size, self._handles[handle], 0)
        within.mapped[address] = _Mapping(size)

    def _cuMemSetAccess(self, address: int, size: int, descriptor: Any, count: int) -> None:
        self._in_context()
        mapping = self._mapping_of(address, size)
        access = descriptor.contents
        self._check((access.location.type, access.location.id) == (ON_DEVICE, self._device), "location")
        self._check((access.flags, count) == (READ_WRITE, 1), "flags, count")
        self._check(
            self._libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0, "the system refuses access"
        )
        mapping.has_access = True

    def _cuMemUnmap(self, address: int, size: int) -> None:
        self._in_context()
        self._mapping_of(address, size)
        del self._range_of(address, size).mapped[address]
        self._mmap(address, size, -1, 0)

    def _cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:
        self._in_context()
        self._check(self._mapping_of(address, size).has_access, "the device has no access")
        self._streams[stream].append(partial(ctypes.memset, address, value, size))

    # -- inside -------------------------------------------------------------------------------------------------

    def _range_of(self, address: int, size: int) -> _Range:
        for first, found in self._ranges.items():
            if first <= address and address + size <= first + found.size_bytes:
                return found
        raise AssertionError("not in one range of reserved addresses")

    def _mapping_of(self, address: int, size: int) -> _Mapping:
        mapping = self._range_of(address, size).mapped[address]
        self._check(mapping.size_bytes == size, "not what was mapped by one call")
        return mapping

    def _mmap(self, address: int | None, size: int, fd: int, protection: int) -> int:
        flags = host_slabs._NOTHING if fd < 0 else mmap.MAP_SHARED
        result = self._libc.mmap(address, size, protection, flags | (host_slabs._MAP_FIXED if address else 0), fd, 0)
        if result == ctypes.c_void_p(-1).value:
            raise _Refusal("CUDA_ERROR_OUT_OF_MEMORY")
        return result


class FakeCudaDriver(CudaDriver):
    """Tensors are on the emulated device where there is one, else on the CPU."""

    def __init__(self, granularity: int = 2 << 20) -> None:
        self.fake = FakeLibcuda(granularity)
        super().__init__(self.fake)

    def tensor(self, address: int, size_bytes: int, device: int, owner: Any) -> torch.Tensor:
        tensor = raw_tensor(address, size_bytes, torch.device("cpu"), owner)
        return device_emulator.EmulatedTensor(tensor) if device_emulator._active is not None else tensor

    def is_host_memory(self, fd: int) -> bool:
        return False
