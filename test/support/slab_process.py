"""Borrowers of slabs, of the host's memory and of a GPU's, as a `Child`. Slabs come over a socket, and then a byte
for each step that it may take."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sglang.srt.peer.memory.cuda_slabs import CudaSlabRange
from sglang.srt.peer.memory.slabs import SlabRange
from support.fake_cuda_driver import FakeCudaDriver


def hold(say: Callable[..., None], peer: socket.socket, num: int, slab: int) -> None:
    """Looks at `num` slabs of `slab` bytes and at what lies beyond them, writes to them, gives them back."""
    _, fds, _, _ = socket.recv_fds(peer, 1, num)
    slabs = SlabRange(num + 1, slab, 2 * slab)
    for i, fd in enumerate(fds):
        slabs.map(i, fd)
    resized = 0
    for fd in fds:
        for size in (0, 2 * slab):
            try:
                os.ftruncate(fd, size)
                resized += 1
            except PermissionError:
                pass
        try:
            mmap.mmap(fd, 2 * slab)
            resized += 1
        except ValueError:
            pass

    def dies(position: int) -> bool:
        child = os.fork()
        if child == 0:
            read(slabs, position)
            os._exit(0)
        return os.waitpid(child, 0)[1] == signal.SIGSEGV

    seen = {
        "bytes": sorted({int(b) for i in range(num) for b in np.unique(slabs.slab(i))}),
        "beyond": sum(len(os.pread(fd, 1 << 20, slab)) for fd in fds),
        "resized": resized,
        "readable": not dies(slab - 1),
        "ends": [dies(position) for position in (slab, 2 * slab - 1, num * 2 * slab)],
    }
    for i in range(num):
        slabs.slab(i)[:] = 0xB0 + i
    say("looked", seen)
    peer.recv(1)
    for i in range(num):
        slabs.unmap(i)
    mapped = Path("/proc/self/maps").read_text().count("peer-slab")
    say("unmapped", {"ends": [dies(i * 2 * slab) for i in range(num)], "mapped": mapped})


def read(slabs: SlabRange, position: int) -> int:
    return int(slabs.memory[position])


def read_beyond_the_end(say: Callable[..., None], slab: int) -> None:
    slabs = SlabRange(2, slab, 2 * slab)
    slabs.allocate(0)
    read(slabs, slab - 1)
    say("read")
    read(slabs, slab)


def hold_cuda(say: Callable[..., None], peer: socket.socket, kind: str, slab: int, device_index: int) -> None:
    """Writes to two slabs, gives one back, and writes to the other until it is killed."""
    device = torch.device("cuda", device_index)
    driver = FakeCudaDriver(slab // 2) if kind == "fake" else None
    if kind == "gpu":
        torch.zeros(1, device=device)

    def wait() -> None:
        if kind == "gpu":
            torch.cuda.synchronize(device)

    _, fds, _, _ = socket.recv_fds(peer, 1, 2)
    slabs = CudaSlabRange(3, slab, 2 * slab, device=device, driver=driver)
    for i, fd in enumerate(fds):
        slabs.map(i, fd)
    found = [int(slabs.slab(i).sum()) for i in range(2)]
    for i in range(2):
        slabs.slab(i).fill_(0xB0 + i)
    wait()
    say("wrote", found)
    peer.recv(1)
    slabs.unmap(0)
    assert driver is None or not driver.fake.broken, driver.fake.broken
    say("gave back")
    peer.recv(1)
    slabs.slab(1).fill_(7)
    wait()
    say("writes")
    while True:
        slabs.slab(1).fill_(7)
