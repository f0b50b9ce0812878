"""`dma` and `direct` as they are issued on a GPU, over a driver that is not there: batches, single copies, errors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kernel import kvcacheio
from sgl_kernel.kvcacheio import KVPages, dma, memcpy_batch
from sgl_kernel.kvcacheio.memcpy_batch import FUNCTION, MemcpyBatch, MemcpyError
from sgl_kernel.kvcacheio.plan import PlanCache, plan_copies
from support.cuda_header import assert_signatures, assert_values, header, layout_of, needs_header
from support.fake_memcpy_driver import FakeMemcpyDriver
from support.kv_model import ROUTES, Pool, expected, index_patterns

LAYERS = 3
STREAM = 0x7000
has_batches = pytest.mark.skipif(
    header() is not None and FUNCTION not in (header() / "cuda.h").read_text(),  # type: ignore[operator]
    reason="needs the cuda.h of CUDA 13.0",
)
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "CUmemLocation": memcpy_batch.MemLocation,
    "CUmemcpyAttributes": memcpy_batch.MemcpyAttributes,
}


class Gpu:
    """Pools in host memory that pass for a GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_batches = True
        self._patch = monkeypatch
        monkeypatch.setattr(KVPages, "is_cuda", True)
        monkeypatch.setattr(dma, "_plans", PlanCache(1 << 20))

    def connect(self, *memory: torch.Tensor) -> FakeMemcpyDriver:
        """A driver whose copies may touch this memory."""
        driver = FakeMemcpyDriver(*memory)
        batch = MemcpyBatch(driver) if self.has_batches else None
        self._patch.setattr(dma, "memcpy_batch", lambda: batch)
        cupy = ModuleType("cupy.cuda")
        cupy.runtime = driver  # type: ignore[attr-defined]
        self._patch.setitem(sys.modules, "cupy", ModuleType("cupy"))
        self._patch.setitem(sys.modules, "cupy.cuda", cupy)
        return driver


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu(monkeypatch)
    yield gpu
    dma._plans.check_invariants()


def copy(src: KVPages, dst: KVPages, src_pages: list[int], dst_pages: list[int], **options: Any) -> None:
    stream = SimpleNamespace(cuda_stream=options.pop("stream", STREAM))
    options.setdefault("backend", "dma")
    ids = (torch.tensor(pages, dtype=torch.int64) for pages in (src_pages, dst_pages))
    kvcacheio.copy_pages(src, dst, *ids, stream=stream, **options)


def layer_pools(num_pages: int) -> tuple[Pool, Pool]:
    src = Pool("page_first", num_pages, LAYERS, 2, torch.bfloat16, 1)
    return src, Pool("layer_first", num_pages, LAYERS, 2, torch.bfloat16, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_batches", [True, False], ids=["batches", "an older driver"])
@pytest.mark.parametrize("stream", [STREAM, 0], ids=["a stream", "the default stream"])
@pytest.mark.parametrize("backend", ["dma", "direct"])
def test_all_routes(gpu: Gpu, backend: str, stream: int, has_batches: bool):
    gpu.has_batches = has_batches
    rng = np.random.default_rng(1)
    num_batches = 0
    for from_layout, to_layout in ROUTES:
        for what, src_pages, dst_pages in index_patterns(rng, 9, 12, 6):
            src, dst = (
                Pool(from_layout, 9, LAYERS, 2, torch.bfloat16, 1),
                Pool(to_layout, 12, LAYERS, 2, torch.bfloat16, 2),
            )
            result = expected(src, dst, src_pages, dst_pages)
            driver = gpu.connect(src.buffer, dst.buffer)
            copy(src.pages, dst.pages, src_pages, dst_pages, backend=backend, stream=stream)
            assert np.array_equal(dst.raw(), result), f"{from_layout} to {to_layout}, {what}"
            assert not driver.broken and not driver.contexts and driver.streams <= {stream}
            num_batches += len(driver.batches)
    assert (num_batches > 0) == (has_batches and stream == STREAM)


def test_scattered_pages_of_a_layer_are_one_call_and_runs_stay_2d(gpu: Gpu):
    src, dst = layer_pools(60)
    run = src.run_bytes[0]
    src_pages, dst_pages = [*range(20, 2, -2), 30, 31, 32], [*range(9), 40, 41, 42]
    result = expected(src, dst, src_pages, dst_pages)
    for layer in range(LAYERS):
        driver = gpu.connect(src.buffer, dst.buffer)
        copy(src.pages.layer(layer), dst.pages.layer(layer), src_pages, dst_pages)
        assert driver.batches == [[run] * 18], "K and V of nine pages"
        assert driver.singles == [(run, 3)] * 2, "K and V of a run"
    assert np.array_equal(dst.raw(), result)


def test_sizes_are_mixed_where_runs_are_linear(gpu: Gpu):
    src, dst = (Pool("layer_first", 60, LAYERS, 2, torch.bfloat16, seed) for seed in (1, 2))
    run = src.run_bytes[0]
    src_pages, dst_pages = [3, 4, 5, 50, 20, 21], [7, 8, 9, 0, 30, 31]
    result = expected(src, dst, src_pages, dst_pages)
    for layer in range(LAYERS):
        driver = gpu.connect(src.buffer, dst.buffer)
        copy(src.pages.layer(layer), dst.pages.layer(layer), src_pages, dst_pages)
        assert driver.batches == [[3 * run, run, 2 * run] * 2] and not driver.singles
    assert np.array_equal(dst.raw(), result)


def test_two_copies_are_no_batch(gpu: Gpu):
    src, dst = layer_pools(60)
    driver = gpu.connect(src.buffer, dst.buffer)
    copy(src.pages.layer(1), dst.pages.layer(1), [5], [9])
    assert not driver.batches and driver.singles == [(src.run_bytes[0], 1)] * 2


def test_a_long_batch_is_several_calls(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memcpy_batch, "MAX_COPIES", 7)
    src, dst = layer_pools(60)
    driver = gpu.connect(src.buffer, dst.buffer)
    src_pages, dst_pages = list(range(20, 0, -2)), list(range(10))
    result = expected(src, dst, src_pages, dst_pages)
    for layer in range(LAYERS):
        copy(src.pages.layer(layer), dst.pages.layer(layer), src_pages, dst_pages)
    assert [len(each) for each in driver.batches] == [7, 7, 6] * LAYERS
    assert np.array_equal(dst.raw(), result)


def test_components_without_bytes_are_not_copied(gpu: Gpu):
    """The driver is not asked to copy nothing."""
    kv = [torch.arange(40, dtype=torch.uint8).view(1, 10, 4), torch.zeros(1, 10, 0, dtype=torch.uint8)]
    to = [torch.zeros_like(each) for each in kv]
    driver = gpu.connect(kv[0], to[0])
    copy(KVPages(*kv), KVPages(*to), [9, 5, 3], [0, 2, 7])
    assert driver.batches == [[4, 4, 4]] and not driver.broken
    assert torch.equal(to[0][0, [0, 2, 7]], kv[0][0, [9, 5, 3]])


@pytest.mark.parametrize("function", [FUNCTION, "cuStreamGetCtx", "cuCtxPushCurrent_v2"])
def test_an_error_names_the_function_and_what_cuda_calls_it(gpu: Gpu, function: str):
    src, dst = layer_pools(60)
    before = dst.raw()
    driver = gpu.connect(src.buffer, dst.buffer)
    driver.fail = function
    arguments = src.pages.layer(0), dst.pages.layer(0), [9, 5, 3], [0, 2, 7]
    with pytest.raises(MemcpyError, match=rf"{function}: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        copy(*arguments)
    assert np.array_equal(dst.raw(), before) and not driver.contexts
    copy(*arguments)
    assert len(driver.batches) == 1 and not driver.broken


def test_the_fake_driver_sees_a_copy_that_leaves_its_pool(gpu: Gpu):
    src, dst = layer_pools(60)
    driver = gpu.connect(src.buffer, dst.buffer)
    base = dst.buffer.data_ptr()
    table = np.array([[base, base + dst.buffer.nbytes - 8], [src.buffer.data_ptr()] * 2, [16, 16]], np.uint64)
    with pytest.raises(MemcpyError, match="CUDA_ERROR_INVALID_VALUE"):
        MemcpyBatch(driver).enqueue(table, STREAM)
    assert "leaves its pool" in driver.broken[0]


# -- plans ------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of pages of the plans that are made."""
    found: list[int] = []
    plan_copies = kvcacheio.plan.plan_copies

    def spy(src_pages: np.ndarray, *arguments: Any) -> np.ndarray:
        found.append(len(src_pages))
        return plan_copies(src_pages, *arguments)

    monkeypatch.setattr(kvcacheio.plan, "plan_copies", spy)
    return found


def test_all_layers_of_a_load_have_one_plan(gpu: Gpu, planned: list[int]):
    src, dst = layer_pools(60)
    gpu.connect(src.buffer, dst.buffer)
    result = expected(src, dst, [9, 5, 3], [0, 2, 7])
    for layer in range(LAYERS):
        copy(src.pages.layer(layer), dst.pages.layer(layer), [9, 5, 3], [0, 2, 7])
    assert planned == [3] and np.array_equal(dst.raw(), result)
    copy(src.pages.layer(0), dst.pages.layer(0), [9, 5, 3], [0, 2, 7], backend="direct")
    copy(dst.pages.layer(0), src.pages.layer(0), [9, 5, 3], [0, 2, 7])
    assert planned == [3, 3, 3], "another backend and another direction have plans of their own"


def test_an_index_array_that_changes_has_another_plan(gpu: Gpu, planned: list[int]):
    src, dst = layer_pools(60)
    gpu.connect(src.buffer, dst.buffer)
    src_pages, dst_pages = torch.tensor([9, 5, 3]), torch.tensor([0, 2, 7])
    stream = SimpleNamespace(cuda_stream=STREAM)
    for changed in (9, 11, 9):
        src_pages[0] = changed
        result = expected(src, dst, src_pages.tolist(), dst_pages.tolist())
        for layer in range(LAYERS):
            of, to = src.pages.layer(layer), dst.pages.layer(layer)
            kvcacheio.copy_pages(of, to, src_pages, dst_pages, backend="dma", stream=stream)
        assert np.array_equal(dst.raw(), result)
    assert planned == [3, 3], "the first plan is still there"


def test_numbers_of_other_types_are_other_pages(gpu: Gpu):
    """As bytes, [5, 0] of int32 is [5] of int64."""
    src, dst = (Pool("layer_first", 9, 1, 2, torch.uint8, seed) for seed in (1, 2))
    gpu.connect(src.buffer, dst.buffer)
    stream = SimpleNamespace(cuda_stream=STREAM)
    for src_pages, dst_pages in (([5, 0], [7, 0]), ([5], [7])):
        result = expected(src, dst, src_pages, dst_pages)
        index = torch.int32 if len(src_pages) == 2 else torch.int64
        ids = torch.tensor(src_pages, dtype=index), torch.tensor(dst_pages, dtype=index)
        kvcacheio.copy_pages(src.pages, dst.pages, *ids, backend="dma", stream=stream)
        assert np.array_equal(dst.raw(), result)
        dst.buffer.zero_()


def test_plans_are_dropped_in_the_order_of_their_last_use(planned: list[int]):
    src, dst = layer_pools(60)
    pools = kvcacheio.plan.PoolPair(dma.side(src.pages.layer(0)), dma.side(dst.pages.layer(0)), (32, 32), 1)
    few, many_copies = (np.arange(0, 2 * n, 2) for n in (3, 200))
    # As much as two plans of three scattered pages, but not three.
    one_size = kvcacheio.plan.CopyPlan.of(plan_copies(few, few[::-1], pools)).nbytes
    plans = PlanCache(max_bytes=5 * (one_size + 2 * few.nbytes + 2048) // 2)

    def ask(first: int) -> None:
        plans.plan(np.array([first, 20, 10]), np.array([0, 2, 4]), pools, True)
        plans.check_invariants()

    for first in (30, 32, 30, 34, 30, 32):
        ask(first)
    assert len(planned) == 4, "30 stays, 32 is made twice"
    for many in (many_copies, np.arange(10_000)):
        planned.clear()
        for _ in range(2):
            plans.plan(many, many, pools, True)
            plans.check_invariants()
        assert planned == [len(many)] * 2, "more copies, or page numbers of one copy, than are kept"


# -- the binding ------------------------------------------------------------------------------------------------


@needs_header
@has_batches
def test_structs_and_constants_are_those_of_the_header(tmp_path: Path):
    constants = {
        "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": memcpy_batch.SOURCE_IN_STREAM_ORDER,
        "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": memcpy_batch.PREFER_OVERLAP_WITH_COMPUTE,
        "(size_t)CU_STREAM_LEGACY": 1,
    }
    assert_values(tmp_path, layout_of(STRUCTS) | constants)
    assert not MemcpyBatch.accepts(0) and not MemcpyBatch.accepts(1)


@needs_header
@has_batches
def test_functions_take_what_the_header_says(tmp_path: Path):
    assert_signatures(tmp_path, memcpy_batch.SIGNATURES, STRUCTS)


class OldLibrary:
    """libcuda of CUDA 12.8."""

    def __init__(self, name: str) -> None:
        assert name == "libcuda.so.1"
        for each in {*memcpy_batch.SIGNATURES, "cuMemcpyBatchAsync"} - {FUNCTION}:
            setattr(self, each, SimpleNamespace())


def missing(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("library", [OldLibrary, missing], ids=["an older driver", "no driver"])
def test_a_driver_without_batches(monkeypatch: pytest.MonkeyPatch, library: Any):
    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(ctypes, "PyDLL", library)
    assert memcpy_batch.memcpy_batch.__wrapped__() is None


def test_a_driver_with_batches(monkeypatch: pytest.MonkeyPatch):
    class Library(OldLibrary):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.cuMemcpyBatchAsync_v2 = SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(ctypes, "PyDLL", Library)
    batch = memcpy_batch.memcpy_batch.__wrapped__()
    assert batch is not None
    assert getattr(batch._libcuda, FUNCTION).argtypes == memcpy_batch.SIGNATURES[FUNCTION]
