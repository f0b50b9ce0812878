"""`sgl_kernel.cpu.huge_pages`: memory that is nobody else's, whatever pages it is on."""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sgl_kernel.cpu import huge_pages
from sgl_kernel.cpu.huge_pages import HugePageBlocks, ask_for_huge_pages, populate
from sglang.srt.utils.shared_memory import SharedMemory


def test_tensors_of_blocks_share_no_memory(monkeypatch):
    monkeypatch.setattr(huge_pages, "_BLOCK_BYTES", 4096)
    blocks = HugePageBlocks()
    shapes = [(3, 5), (1,), (1024,), (0, 4), (1500, 2), (7, 2, 9), (1,)] * 20
    with ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(lambda shape: blocks.zeros(*shape), shapes))
    for i, (tensor, shape) in enumerate(zip(tensors, shapes)):
        assert tensor.shape == shape and tensor.is_contiguous() and not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors):
        assert bool((tensor == i + 1).all())


def test_any_memory_may_ask_for_huge_pages():
    for num_bytes in (0, 1, 4095, 5 << 20):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        ask_for_huge_pages(memory)
        assert not memory.zero_().any()


@pytest.mark.skipif(sys.platform != "linux", reason="madvise's advice is Linux's")
@pytest.mark.parametrize("kind", ["anonymous", "shared"])
def test_populated_memory_is_there(kind, monkeypatch):
    monkeypatch.setattr(huge_pages, "_BLOCK_BYTES", 1 << 20)
    size = (24 << 20) + 100
    if kind == "shared":
        array = SharedMemory.allocate(size, "test").memory
    else:
        array = torch.empty(size, dtype=torch.uint8).numpy()
    array[[0, size - 1]] = 7
    if not populate(torch.from_numpy(array), 3):
        pytest.skip("this system cannot")
    assert array[0] == array[size - 1] == 7
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array.view(np.uint8)[::4096] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
    assert populate(torch.empty(0, dtype=torch.uint8), 3)
