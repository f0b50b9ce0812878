"""Slabs of GPU memory: over a driver that is not there, in one process and between two; and on a GPU, where there is
one. What engines do with them is in `test_borrowed_memory.py`, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import select
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kernel.kvcacheio import pick_between, transfer_kv_all_layer
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.link import index_device
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory import cuda_driver, cuda_slabs
from sglang.srt.peer.memory.cuda_driver import CudaDriver
from sglang.srt.peer.memory.cuda_slabs import CudaSlabRange, SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.slabs import SlabError, SlabRange, allocate_slab
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.raw_tensor import raw_tensor
from support.children import children
from support.cuda_header import assert_signatures, assert_values, layout_of, needs_header
from support.device_emulator import emulated_device
from support.fake_cuda_driver import FakeCudaDriver
from support.local_engine import LocalEngine
from support.paged_attention import PagedAttention
from support.pool_pages import fill_all, pages_of, poison
from support.slab_process import hold_cuda
from support.tiny_model import tiny_llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

GPU = torch.device("cuda", 0)
PIECE = 1 << 16  # what the driver that is not there maps
SLAB = 2 * PIECE
on_gpu = pytest.param(
    "gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture
def driver() -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver(PIECE)
    _kept.clear()
    _kept.update(_handles())
    yield driver
    gc.collect()
    assert not driver.fake.broken and driver.fake.is_empty() and num_fds() == 0


# What the process had open before: a thread of an engine of another test keeps what it lends.
_kept: set[str] = set()


def num_fds() -> int:
    """Handles of memory that this test has open."""
    return len(_handles() - _kept)


def _handles() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "fake-cuda-memory" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(fd)
    return found


def make(
    driver: CudaDriver | None, num_slabs: int, slab: int = SLAB, stride: int | None = None, tail: int = 0
) -> CudaSlabRange:
    return CudaSlabRange(num_slabs, slab, stride, device=GPU, driver=driver, tail_bytes=tail)


def owned(driver: CudaDriver | None, num_slabs: int, slab: int = SLAB) -> CudaSlabRange:
    slabs = make(driver, num_slabs, slab)
    slabs.allocate_all()
    return slabs


# -- the binding ------------------------------------------------------------------------------------------------


STRUCTS = {
    "CUmemLocation": cuda_driver.MemLocation,
    "CUmemAllocationProp": cuda_driver.MemAllocationProp,
    "CUmemAccessDesc": cuda_driver.MemAccessDesc,
}
CONSTANTS = {
    "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_driver.PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": cuda_driver.ON_DEVICE,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_driver.POSIX_FILE_DESCRIPTOR,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_driver.READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_driver.GRANULARITY_MINIMUM,
    "CU_STREAM_NON_BLOCKING": cuda_driver.STREAM_NON_BLOCKING,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_driver.ATTRIBUTE_VIRTUAL_MEMORY,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": cuda_driver.ATTRIBUTE_POSIX_FILE_DESCRIPTOR,
}


@needs_header
def test_structs_and_constants_are_those_of_the_header(tmp_path: Path):
    expected = layout_of(STRUCTS) | CONSTANTS
    for each, *_ in cuda_driver.MemAllocFlags._fields_:
        expected[f"offsetof(CUmemAllocationProp, allocFlags.{each})"] = (
            cuda_driver.MemAllocationProp.allocFlags.offset + getattr(cuda_driver.MemAllocFlags, each).offset
        )
    assert_values(tmp_path, expected)


@needs_header
def test_functions_take_what_the_header_says(tmp_path: Path):
    assert_signatures(tmp_path, cuda_driver.SIGNATURES, STRUCTS)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch):
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(SlabError, match=r"need the CUDA driver's virtual memory: libcuda\.so\.1: cannot open"):
        CudaDriver()


@pytest.mark.parametrize(
    "bad",
    [
        lambda driver, at: driver.unmap(at, PIECE),
        lambda driver, at: driver.free(at, 4 * SLAB),
        lambda driver, at: driver.memset_async(at + SLAB, 0, SLAB, 1),
        lambda driver, at: driver.set_access(at, SLAB // 2, 0),
        lambda driver, at: driver.map(at, SLAB, driver.create(SLAB, 0)),
        lambda driver, at: driver.map(at + 1, SLAB, driver.create(SLAB, 0)),
        lambda driver, at: driver.release(7),
        lambda driver, at: driver.create(SLAB + 1, 0),
        lambda driver, at: driver.stream_destroy(driver.stream_create()) or driver.synchronize(1),
    ],
)
def test_the_driver_that_is_not_there_sees_what_is_wrong(bad: Any):
    driver = FakeCudaDriver(PIECE)
    slabs = owned(driver, 2)
    with driver.on(0), pytest.raises(SlabError):
        bad(driver, slabs.memory.data_ptr())
    assert len(driver.fake.broken) == 1
    driver.fake.close()


def test_a_tensor_over_memory_of_ones_own_keeps_its_owner():
    class Owner:
        pass

    memory, owner = (ctypes.c_uint8 * 4096)(), Owner()
    kept: list[str] = []
    weakref.finalize(owner, kept.append, "gone")
    tensor = raw_tensor(ctypes.addressof(memory), 4096, torch.device("cpu"), owner)
    del owner
    view = tensor.view(torch.float32).view(32, 32)[3]
    del tensor
    view.fill_(1.0)
    gc.collect()
    assert not kept and memory[3 * 128 + 3] == 0x3F and memory[3 * 128 - 1] == 0
    del view
    assert kept == ["gone"]


# -- a range ----------------------------------------------------------------------------------------------------


def test_slabs_are_zero_and_both_sides_see_the_same_bytes(driver: FakeCudaDriver):
    lender, borrower = owned(driver, 3), make(driver, 5, SLAB, 3 * PIECE)
    assert lender.memory.shape == (3 * SLAB,) and not lender.memory.any(), "new memory is junk"
    assert lender.tensor() is lender.memory
    fd = os.dup(lender.fileno(1))
    borrower.map(4, fd)
    os.close(fd)
    borrower.slab(4)[:] = 7
    assert [int(lender.slab(i).sum()) for i in range(3)] == [0, 7 * SLAB, 0]
    assert borrower.memory[12 * PIECE :][:SLAB].sum() == 7 * SLAB
    lender.scrub(1)
    assert not borrower.slab(4).any(), "it is over when the call returns"
    borrower.slab(4)[:] = 3
    lender.close()
    assert (borrower.slab(4) == 3).all(), "it lives while it is mapped"
    assert num_fds() == 0, "nobody keeps handles"
    borrower.close()


def test_what_is_mapped_is_of_the_agreed_size(driver: FakeCudaDriver):
    """Of a larger one, no more is within reach; a smaller one is refused."""
    borrower = make(driver, 2)
    small, large = owned(driver, 1, PIECE), owned(driver, 1, 2 * SLAB)
    with pytest.raises(SlabError, match=r"cuMemMap: CUDA_ERROR_INVALID_VALUE \(1\)"):
        borrower.map(0, small.fileno(0))
    borrower.map(0, large.fileno(0))
    borrower.slab(0)[:] = 1
    assert large.slab(0).sum() == SLAB and not borrower.is_mapped(1)
    for slabs in (small, large, borrower):
        slabs.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bad", [(0, SLAB, SLAB), (1, 4096, 4096), (1, SLAB, SLAB + 4096), (2, SLAB, PIECE)])
def test_sizes_that_cannot_be_mapped(driver: FakeCudaDriver, bad: tuple[int, int, int]):
    with pytest.raises(ValueError, match=f"multiples of {PIECE}"):
        make(driver, *bad)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"]
)
def test_a_slab_that_cannot_be_had_leaves_nothing(driver: FakeCudaDriver, name: str):
    slabs = make(driver, 1)
    driver.fake.fail = name
    with pytest.raises(SlabError, match=f"{name}: CUDA_ERROR_OUT_OF_MEMORY"):
        slabs.allocate(0)
    assert not slabs.is_mapped(0) and num_fds() == 0
    slabs.allocate(0)
    assert not slabs.slab(0).any()
    slabs.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_slab_that_cannot_be_mapped_leaves_nothing(driver: FakeCudaDriver, name: str):
    lender, borrower = owned(driver, 1), make(driver, 1)
    driver.fake.fail = name
    with pytest.raises(SlabError, match=name):
        borrower.map(0, lender.fileno(0))
    assert not borrower.is_mapped(0) and num_fds() == 1
    borrower.map(0, lender.fileno(0))
    for slabs in (lender, borrower):
        slabs.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cuMemAddressReserve", "cuStreamCreate", "cuMemGetAllocationGranularity"])
def test_a_range_that_cannot_be_had_leaves_nothing(driver: FakeCudaDriver, name: str):
    driver.fake.fail = name
    with pytest.raises(SlabError, match=name):
        make(driver, 1)


def test_a_tail_is_mapped_from_the_start_and_stays(driver: FakeCudaDriver):
    slabs = make(driver, 2, SLAB, 3 * PIECE, PIECE)
    tail = slabs.memory[6 * PIECE :]
    assert tail.shape == (PIECE,) and not tail.any(), "new memory is junk"
    assert not slabs.is_mapped(0) and num_fds() == 0, "no descriptor of it can be sent"
    slabs.allocate_all()
    tail[:] = 3
    for i in (0, 1):
        slabs.slab(i)[:] = 7
        slabs.scrub(i)
        slabs.unmap(i)
    slabs.close()
    assert (tail == 3).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemsetD8Async"])
def test_a_tail_that_cannot_be_had_leaves_nothing(driver: FakeCudaDriver, name: str):
    driver.fake.fail = name
    with pytest.raises(SlabError, match=f"{name}: CUDA_ERROR_OUT_OF_MEMORY"):
        make(driver, 1, tail=PIECE)


def test_a_range_that_nobody_has_closed_goes_with_the_last_who_refers_to_it(driver: FakeCudaDriver):
    slabs = owned(driver, 3)
    view = slabs.slab(1)
    del slabs
    gc.collect()
    view[:] = 5
    assert view.sum() == 5 * SLAB and not driver.fake.is_empty()


def test_slabs_of_the_other_kind_are_refused(driver: FakeCudaDriver):
    slabs, on_cpu = owned(driver, 1), SlabRange(1, SLAB)
    with pytest.raises(SlabError, match=r"not sealed|is no slab"):
        on_cpu.map(0, slabs.fileno(0))
    fd = allocate_slab(SLAB)
    with pytest.raises(SlabError, match="CUDA_ERROR_INVALID_VALUE"):
        make(driver, 1).map(0, fd)
    assert CudaDriver.is_host_memory(driver, fd), "said before the driver is asked"
    os.close(fd)
    slabs.close()


def test_the_device_decides_which_kind_it_is(driver: FakeCudaDriver):
    on_cpu = reserve_slabs(SlabsConfig(2, 8192), 12288)
    assert type(on_cpu) is SlabRange and on_cpu.stride_bytes == 12288
    on_gpu = reserve_slabs(SlabsConfig(2, SLAB, GPU, driver), 3 << 12)
    assert type(on_gpu) is CudaSlabRange and on_gpu.stride_bytes == 3 * PIECE
    assert on_cpu.tail_bytes == on_gpu.tail_bytes == 0
    for page_bytes, tail_bytes in ((3 << 12, PIECE), (PIECE + 256, 2 * PIECE)):
        assert reserve_slabs(SlabsConfig(2, SLAB, GPU, driver, has_scratch=True), page_bytes).tail_bytes == tail_bytes
    with pytest.raises(SlabError, match=r"mapped in pieces of 65,536 bytes, .*--peer-slab-size"):
        reserve_slabs(SlabsConfig(2, 8192, GPU, driver), 4096)


# -- pools and engines ------------------------------------------------------------------------------------------

LAYERS, HEADS, DIM = 3, 2, 16


@contextlib.contextmanager
def device_of(kind: str) -> Iterator[CudaDriver | None]:
    """The emulated device and its driver, or the GPU and its own."""
    if kind == "gpu":
        yield None
        return
    driver = FakeCudaDriver(PIECE)
    with emulated_device(3):
        yield driver
    assert not driver.fake.broken


def pool_in_slabs(
    driver: CudaDriver | None, num_pages: int, layout: PageLayout, has_scratch: bool = False
) -> ElasticPool:
    """Of as many pages at least."""
    page_bytes = layout.page_bytes
    slab_bytes = SLAB if driver is not None else 2 << 20
    num_slabs = -(-num_pages // (slab_bytes // page_bytes))
    slabs = reserve_slabs(SlabsConfig(num_slabs, slab_bytes, GPU, driver, has_scratch), page_bytes)
    slabs.allocate_all()
    return ElasticPool(slabs, layout)


@pytest.mark.parametrize("kind", ["emulated", on_gpu])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_store_pages_and_poison_are_those_of_the_other_pool(kind: str, page_size: int):
    layout = PageLayout.kv(page_size, LAYERS, HEADS, DIM, torch.float32)
    with device_of(kind) as driver:
        pool = pool_in_slabs(driver, 40, layout)
        usable = np.concatenate([pool.frames_of(slab) for slab in range(pool.slabs.num_slabs)])
        frames = torch.from_numpy(np.random.default_rng(1).permutation(usable)[:40]).long().to(GPU)
        other = MHATokenToKVPool(40, layout)
        there = torch.arange(40)
        for layer in range(LAYERS):
            kv = torch.randn(2, 40 * page_size, HEADS, DIM, generator=torch.Generator().manual_seed(layer))
            for each, pages in ((pool, frames), (other, there)):
                where = pages.device
                slots = (pages[:, None] * page_size + torch.arange(page_size, device=where)).view(-1)
                each.store(layer, slots, *kv.to(where).unbind())
        assert pool.kv.is_cuda and torch.equal(pages_of(pool, frames).cpu(), pages_of(other, there))
        poison(pool, frames[:2])
        assert torch.isnan(pages_of(pool, frames[:2])).cpu().all()
        assert torch.equal(pages_of(pool, frames[2:]).cpu(), pages_of(other, there[2:]))


@pytest.mark.parametrize("kind", ["emulated", on_gpu])
@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("backend", ["auto", "dma"])
def test_copies_cross_the_borders_of_slabs(kind: str, order: str, backend: str):
    """Slabs are mapped one by one, and a run of pages, or the layers of a page, lie in several. A page is as large as
    some part of a slab."""
    slab_bytes = SLAB if kind == "emulated" else 2 << 20
    layout = PageLayout.kv(slab_bytes // 4096, LAYERS, HEADS, 32, torch.float32)
    assert slab_bytes // 4 <= layout.page_bytes <= slab_bytes
    there = torch.arange(12)
    with device_of(kind) as driver:
        lent, borrowed = (pool_in_slabs(driver, 12, layout) for _ in range(2))
        of_lent, of_borrowed = (
            torch.from_numpy(np.concatenate(list(map(pool.frames_of, range(pool.slabs.num_slabs)))))[:12].long()
            for pool in (lent, borrowed)
        )
        host, back = (MHATokenToKVPoolHost(lent, 12, order) for _ in range(2))
        fill_all(back, 0.0)
        generator = torch.Generator().manual_seed(3)
        for component in host.kv_pages.components:
            component.copy_(torch.randn(component.shape, generator=generator))
        # In runs, and backwards.
        copies = (host, lent, there, of_lent), (lent, borrowed, of_lent, of_borrowed.flip(0))
        for src, dst, *numbers in (*copies, (borrowed, back, of_borrowed.flip(0), there)):
            chosen = pick_between(backend, src.kv_pages, dst.kv_pages)
            on = [each.to(index_device(chosen, GPU)) for each in numbers]
            transfer_kv_all_layer(src.kv_pages, dst.kv_pages, *on, backend=chosen)
            torch.cuda.synchronize()
        assert torch.equal(pages_of(back, there), pages_of(host, there))


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.mark.parametrize("kind", ["emulated", on_gpu])
def test_a_lender_gives_the_same_tokens(model_config: ModelConfig, kind: str):
    """Its device pool is in slabs; prompts with a shared prefix, eviction, loads and backups."""
    rng = np.random.default_rng(6)
    prefix = rng.integers(3, 97, 30)
    prompts = [np.concatenate((prefix, rng.integers(3, 97, n))).astype(np.int32) for n in (3, 40, 60)] * 2
    params = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True, sampling_seed=0)

    def answers(**options: Any) -> tuple[list[list[int]], int]:
        engine = LocalEngine(model_config, 32, num_host_pages=150, page_size=4, chunked_prefill_size=32, **options)
        found = [engine.generate([prompt], params)[0] for prompt in prompts]
        engine.settle()
        engine.close()
        return [each.tokens for each in found], sum(each.cached_tokens_details["host"] for each in found)

    with device_of(kind) as driver:
        pools = []

        def in_slabs(num_pages: int, layout: PageLayout, device: torch.device, **options: Any) -> ElasticPool:
            pools.append(pool_in_slabs(driver, num_pages, layout))
            return pools[0]

        found, loaded = answers(device="cuda", make_pool=in_slabs)
        assert pools[0].kv.is_cuda and loaded > 0
        if kind == "gpu":
            assert found == answers(device="cuda")[0]
    if kind == "emulated":
        assert found == answers(device="cpu")[0]


@pytest.mark.parametrize("kind", ["emulated", on_gpu])
@pytest.mark.parametrize(
    ("page_size", "kv_dtype"),
    [
        pytest.param(1, None, marks=pytest.mark.slow),
        (16, torch.float8_e5m2),
        pytest.param(64, None, marks=pytest.mark.slow),
    ],
)
def test_graphs_of_a_lender_give_the_same_tokens(
    model_config: ModelConfig, kind: str, page_size: int, kv_dtype: torch.dtype | None
):
    """Decodes and short prefills, with rows of padding, which write to the scratch page."""
    config = dataclasses.replace(model_config, kv_cache_dtype=kv_dtype)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 97, n).astype(np.int32) for n in (3, 40, 21)]
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True, sampling_seed=0)
    pools: list[ElasticPool] = []

    def answers(**options: Any) -> list[list[int]]:
        engine = LocalEngine(config, 320 // page_size, page_size=page_size, chunked_prefill_size=64, **options)
        # The second time most of each prompt is there, and the rest is short.
        found = engine.generate(prompts, params) + engine.generate(prompts, params)
        engine.close()
        return [each.tokens for each in found]

    attention = PagedAttention(captures_extends=True)
    with device_of(kind) as driver:

        def in_slabs(num_pages: int, layout: PageLayout, device: torch.device, has_scratch: bool) -> ElasticPool:
            pools.append(pool_in_slabs(driver, num_pages, layout, has_scratch))
            return pools[0]

        graphs = {"make_pool": in_slabs, "graph_batch_size": 8, "graph_prefill_tokens": 32}
        own = {"attention_backend": attention} if kind == "emulated" else {}
        found = answers(device="cuda", **graphs, **own)
        scratch = torch.from_numpy(np.array([pools[0].num_pages])).to(GPU)
        assert pages_of(pools[0], scratch).cpu().view(torch.uint8).any(), "rows of padding are written there"
        if kind == "gpu":
            assert found == answers(device="cuda")
    if kind == "emulated":
        assert attention.replayed > 6 and found == answers(device="cpu")


# -- two processes ----------------------------------------------------------------------------------------------


def share_with_another_process(kind: str, slab: int, device: int) -> None:
    """A range full of the lender's own bytes lends two slabs; one is given back, in use of the other the borrower is
    killed. device: the borrower's."""
    driver = FakeCudaDriver(slab // 2) if kind == "fake" else None
    lender = owned(driver, 4, slab)
    lender.memory.fill_(0xAA)
    if kind == "gpu":
        torch.cuda.synchronize()
    for i in (1, 2):
        lender.scrub(i)
    ours, theirs = socket.socketpair()
    with children() as start, ours:
        borrower = start(hold_cuda, theirs, kind, slab, device)
        theirs.close()
        socket.send_fds(ours, [b"x"], [lender.fileno(i) for i in (1, 2)])
        assert borrower.wait_for("wrote") == ["wrote", [0, 0]], "the borrower sees zeros"
        assert [set(lender.slab(i).tolist()) for i in range(4)] == [{0xAA}, {0xB0}, {0xB1}, {0xAA}]
        ours.sendall(b"x")
        borrower.wait_for("gave back")
        lender.scrub(1)
        assert not lender.slab(1).any() and set(lender.slab(2).tolist()) == {0xB1}
        ours.sendall(b"x")
        borrower.wait_for("writes")
        pidfd = os.pidfd_open(borrower.pid)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        borrower.kill()
        assert ended.poll(60_000)
        lender.scrub(2)
        os.close(pidfd)
        # Whatever was still queued on the device is not done any more.
        for _ in range(50):
            assert not lender.slab(2).any()
            time.sleep(0.002 if kind == "fake" else 0.02)
    lender.slab(2).fill_(9)
    assert [set(lender.slab(i).tolist()) for i in range(4)] == [{0xAA}, {0}, {9}, {0xAA}]
    lender.close()
    assert driver is None or not driver.fake.broken


@pytest.mark.parametrize("kind", ["fake", on_gpu])
def test_another_process_uses_a_slab_until_it_unmaps_it_or_dies(kind: str):
    share_with_another_process(kind, SLAB if kind == "fake" else 4 << 20, 0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_another_gpu_uses_a_slab():
    if not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("the GPUs do not reach each other")
    share_with_another_process("gpu", 4 << 20, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_memory_is_given_back():
    """Two thirds of what is free, and once more. Other tests use the GPU at the same time."""
    torch.zeros(1, device=GPU)
    assert cuda_slabs.cuda_driver().granularity(0) == 2 << 20
    slab = torch.cuda.mem_get_info(GPU)[0] // 12 >> 21 << 21
    for _ in range(2):
        lender, borrower = owned(None, 8, slab), make(None, 8, slab, 2 * slab)
        borrower.map(3, lender.fileno(0))
        lender.slab(0)[:1000].fill_(1)
        torch.cuda.synchronize()
        assert borrower.slab(3)[:1000].sum() == 1000
        lender.close()
        borrower.unmap(3)
