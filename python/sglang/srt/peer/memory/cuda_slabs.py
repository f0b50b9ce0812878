"""`CudaSlabRange`: slabs of a GPU's memory, for processes on that GPU, or on one that reaches it (not tried).

As in `slabs.py`, but with the driver's virtual memory management:

    lender      | slab 0 | slab 1 | slab 2 | slab 3 |      cuMemCreate, each memory of its own
                                       |  cuMemExportToShareableHandle: a file descriptor over a Unix socket
                                       v
    borrower    | ------ | slab   . | ------ | ------ |    cuMemImportFromShareableHandle, cuMemMap, cuMemSetAccess

- The borrower's own device gets access. Where the memory is another GPU's and the two do not reach each other, or the
  borrower does not see that GPU (CUDA_VISIBLE_DEVICES), the driver refuses, and the slab goes back.
- There is no way to ask how large the memory behind a descriptor is. Mapping more than there is fails in the driver.
  What is mapped is therefore of the agreed size or larger, and of a larger one no more than that is within reach. No
  allocation changes its size, so there is nothing to seal.
- The range owns addresses, not memory. A handle is released as soon as its memory is mapped and exported; mappings
  and descriptors keep the memory alive.

**Why nothing touches a slab that is lent or given back.** A device does its work later than the host enqueues it, and
nothing here waits for other streams. It need not:

1. A slab is drained, at a lender and at a borrower, when all its frames are LENT (`SlabLedger.take_drained`). A frame
   is pinned by every transfer that names it, and its owner's launches are its fence.
2. A transfer is over for the scheduler when its link has reported it, a launch when the executor has; both report
   from `Stream.when_done`, so after the device is done with all that was enqueued for it, failed and cancelled
   operations and void launches included. A launch waits on its stream for every copy that it streamed, also where it
   failed, so these end with it.
3. When a slab is drained, the device is thus done with it, and no work on it is enqueued any more. The lender
   overwrites it; a borrower unmaps it and then gives it back. What a device has done before an event has passed,
   every other device sees.
4. Overwriting runs on a stream of its own, for which the host waits: before the slab is lent, thus before a borrower
   can ask for its descriptor, and before its frames are FREE again at the lender. Mapping and access are complete
   when the calls return, before the frames are FREE at the borrower.
5. A borrower that was killed uses nothing any more when its pidfd is readable: Linux closes the files of a process
   first, and the driver ends the process's work on the device as the last of them is closed. It is not known whether
   some driver does that later; `test_cuda_slabs.py` tests it on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass
from functools import cache

import torch

from sglang.srt.peer.memory.cuda_driver import CudaDriver
from sglang.srt.peer.memory.slabs import GRANULARITY, SlabError, SlabRange, Slabs
from sglang.srt.peer.protocol.elastic_units import scratch_bytes, stride_bytes
from sglang.srt.utils.device import CPU


class CudaSlabRange(Slabs):
    """See `Slabs`; memory is on the device. Called from any thread, one at a time."""

    memory: torch.Tensor

    def __init__(
        self,
        num_slabs: int,
        slab_bytes: int,
        stride_bytes: int | None = None,
        *,
        device: torch.device,
        driver: CudaDriver | None = None,
        tail_bytes: int = 0,
    ) -> None:
        self._driver = driver = driver or cuda_driver()
        self._device = device.index
        driver.check(self._device)
        super().__init__(num_slabs, slab_bytes, stride_bytes, driver.granularity(self._device), tail_bytes)
        self._addresses = _Addresses(driver, self._device, self.size_bytes)
        self.memory = driver.tensor(
            self._addresses.first, self._addresses.size_bytes, self._device, owner=self._addresses
        )
        self._allocate_tail()

    def tensor(self) -> torch.Tensor:
        return self.memory

    def _allocate(self, offset: int, size_bytes: int) -> int:
        driver = self._driver
        with driver.on(self._device), contextlib.ExitStack() as undo:
            handle = driver.create(size_bytes, self._device)
            try:
                fd = driver.export(handle)
                undo.callback(os.close, fd)
                self._addresses.map(offset, size_bytes, handle)
            finally:
                driver.release(handle)
            undo.callback(self._addresses.unmap, offset)
            # The driver does not promise what is in new memory.
            self._addresses.zero(offset, size_bytes)
            undo.pop_all()
        return fd

    def _map(self, offset: int, fd: int) -> None:
        driver = self._driver
        with driver.on(self._device):
            handle = driver.import_fd(fd)
            try:
                self._addresses.map(offset, self.slab_bytes, handle)
            finally:
                driver.release(handle)

    def _unmap(self, offset: int) -> None:
        with self._driver.on(self._device):
            self._addresses.unmap(offset)

    def _zero(self, offset: int) -> None:
        with self._driver.on(self._device):
            self._addresses.zero(offset, self.slab_bytes)


class _Addresses:
    """size_bytes of addresses without memory behind them, and what is mapped at them. They are the driver's again
    when nothing refers to them; what is still mapped is unmapped then. Methods are called in the device's context."""

    def __init__(self, driver: CudaDriver, device: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._driver = driver
        self._device = device
        self._mapped: dict[int, int] = {}  # offset -> size
        with driver.on(device):
            self._stream = driver.stream_create()
            try:
                self.first = driver.reserve(size_bytes)
            except BaseException:
                driver.stream_destroy(self._stream)
                raise
        arguments = (driver, device, self.first, size_bytes, self._mapped, self._stream)
        # Not at the end of the process: the device may still be reading.
        weakref.finalize(self, _give_up, *arguments).atexit = False

    def map(self, offset: int, size_bytes: int, handle: int) -> None:
        driver, address = self._driver, self.first + offset
        driver.map(address, size_bytes, handle)
        try:
            driver.set_access(address, size_bytes, self._device)
        except BaseException:
            driver.unmap(address, size_bytes)
            raise
        self._mapped[offset] = size_bytes

    def unmap(self, offset: int) -> None:
        self._driver.unmap(self.first + offset, self._mapped[offset])
        del self._mapped[offset]

    def zero(self, offset: int, size_bytes: int) -> None:
        self._driver.memset_async(self.first + offset, 0, size_bytes, self._stream)
        self._driver.synchronize(self._stream)


def _give_up(
    driver: CudaDriver, device: int, first: int, size_bytes: int, mapped: dict[int, int], stream: int
) -> None:
    with driver.on(device):
        for offset, mapped_bytes in mapped.items():
            driver.unmap(first + offset, mapped_bytes)
        driver.free(first, size_bytes)
        driver.stream_destroy(stream)


@cache
def cuda_driver() -> CudaDriver:
    """This machine's driver. Raises SlabError."""
    return CudaDriver()


@dataclass(frozen=True)
class SlabsConfig:
    """How many slabs, and of what memory."""

    num_slabs: int
    slab_bytes: int
    device: torch.device = CPU
    # Of a GPU; None: this machine's.
    driver: CudaDriver | None = None
    # Whether a page of scratch memory lies behind the slabs.
    has_scratch: bool = False


def granularity_of(device: torch.device, driver: CudaDriver | None = None) -> int:
    """Of the memory of slabs on a device, in bytes. driver: of a GPU; None: this machine's. Raises SlabError."""
    return GRANULARITY if device.type == "cpu" else (driver or cuda_driver()).granularity(device.index)


def reserve_slabs(config: SlabsConfig, page_bytes: int) -> Slabs:
    """Places for slabs, so far apart that all pages have one stride. Other code need not know what kind of memory the
    slabs are. Raises ValueError for impossible sizes, SlabError for memory that is not available."""
    num_slabs, slab_bytes, device = config.num_slabs, config.slab_bytes, config.device
    granularity = granularity_of(device, config.driver)
    stride = stride_bytes(slab_bytes, page_bytes, granularity)
    tail = scratch_bytes(page_bytes, granularity) if config.has_scratch else 0
    if device.type == "cpu":
        return SlabRange(num_slabs, slab_bytes, stride, tail)
    if slab_bytes % granularity:
        raise SlabError(
            f"memory of {device} is mapped in pieces of {granularity:,} bytes, of which slabs of {slab_bytes:,} are "
            "no multiple (see --peer-slab-size, on both sides)"
        )
    return CudaSlabRange(num_slabs, slab_bytes, stride, device=device, driver=config.driver, tail_bytes=tail)
