"""Every backend on a GPU against the model. Skipped without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_kernel import kvcacheio
from sgl_kernel.kvcacheio import KVLayoutError, KVPages
from support.kv_model import DTYPES, Pool, expected, index_patterns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BACKENDS = ("cuda", "triton", "bulk", "persistent", "dma", "direct")
# Source and destination: layout, and whether it lies on the device.
GPU_ROUTES = [
    (("page_first", False), ("layer_first", True)),
    (("layer_first", False), ("layer_first", True)),
    (("page_first", False), ("block_major", True)),
    (("layer_first", True), ("page_first", False)),
    (("block_major", True), ("page_first", False)),
    (("page_first", True), ("layer_first", True)),
    (("layer_first", True), ("block_major", True)),
]


def place(pool: Pool, on_device: bool) -> tuple[torch.Tensor, KVPages]:
    buffer = pool.buffer.cuda() if on_device else pool.buffer.pin_memory()
    return buffer, pool.view(buffer)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if reason := kvcacheio.why_not(request.param, "cuda"):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("page_size", [1, 3, 16, 64], ids="page{}".format)
def test_every_backend_is_exact(backend: str, page_size: int, dtype: torch.dtype):
    rng = np.random.default_rng(page_size)
    for k_shape in ((2, 64), (3, 5)):
        for (from_layout, from_device), (to_layout, to_device) in GPU_ROUTES:
            for what, src_pages, dst_pages in index_patterns(rng, 40, 50, 30):
                src = Pool(from_layout, 40, 3, page_size, dtype, 1, k_shape)
                dst = Pool(to_layout, 50, 3, page_size, dtype, 2, k_shape)
                result = expected(src, dst, src_pages, dst_pages)
                (_, source), (buffer, target) = place(src, from_device), place(dst, to_device)
                ids = [torch.tensor(p, dtype=torch.int64) for p in (src_pages, dst_pages)]
                kvcacheio.copy_pages(source, target, *ids, backend=backend)
                torch.cuda.synchronize()
                found = buffer.cpu().view(torch.uint8).numpy()
                assert np.array_equal(found, result), f"{from_layout} to {to_layout}, {what}, {k_shape}"


@pytest.mark.parametrize("num_warps", [8, 64, 512])
def test_any_quota_is_exact_and_in_stream_order(backend: str, num_warps: int):
    src, dst = Pool("page_first", 300, 4, 1, torch.bfloat16, 1, (8, 128)), None
    dst = Pool("layer_first", 300, 4, 1, torch.bfloat16, 2, (8, 128))
    pages = np.random.default_rng(num_warps).permutation(300)
    result = expected(src, dst, pages.tolist(), pages[::-1].tolist())
    (_, source), (buffer, target) = place(src, False), place(dst, True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer.zero_()
        buffer.copy_(dst.buffer, non_blocking=True)
    ids = torch.from_numpy(pages), torch.from_numpy(pages[::-1].copy())
    kvcacheio.copy_pages(source, target, *ids, backend=backend, num_warps=num_warps, stream=stream)
    with torch.cuda.stream(stream):
        found = buffer.to("cpu")
    assert np.array_equal(found.view(torch.uint8).numpy(), result)


@pytest.mark.parametrize("num_pages", [1, 700])
@pytest.mark.parametrize("k_shape", [(2, 64), (3, 5)], ids=str)
def test_a_load_by_one_kernel_tells_of_each_group(k_shape: tuple[int, int], num_pages: int):
    """Another stream reads a group's layers when it is told that they are there, of several loads."""
    if reason := kvcacheio.why_not("persistent", "cuda"):
        pytest.skip(reason)
    layers, ends = 9, (1, 2, 4, 9)
    src = Pool("page_first", 700, layers, 1, torch.bfloat16, 1, k_shape)
    dst = Pool("layer_first", 700, layers, 1, torch.bfloat16, 2, k_shape)
    (_, source), (buffer, target) = place(src, False), place(dst, True)
    loads, reads = torch.cuda.Stream(), torch.cuda.Stream()
    flags = kvcacheio.LayerFlags(ends, buffer.device)
    for turn in range(4):
        rng = np.random.default_rng(turn)
        src_pages, dst_pages = (rng.permutation(700)[:num_pages] for _ in range(2))
        buffer.fill_(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(loads):
            ids = [torch.from_numpy(pages).cuda() for pages in (src_pages, dst_pages)]
            value = kvcacheio.load_layers(source, target, *ids, flags)
        seen = []
        with torch.cuda.stream(reads):
            for group, (begin, end) in enumerate(zip((0, *ends), ends)):
                flags.wait(group, value, reads)
                seen.append([each[begin:end].clone() for each in target.components])
        torch.cuda.synchronize()
        assert flags.words.tolist() == [value] * len(ends)
        for found, loaded in zip(zip(*seen), src.pages.components):
            there, wanted = torch.cat(found).cpu()[:, dst_pages], loaded[:, src_pages]
            assert torch.equal(there.view(torch.int16), wanted.contiguous().view(torch.int16))


@pytest.mark.parametrize("on_default_stream", [False, True], ids=["a stream", "the default stream"])
@pytest.mark.parametrize("src_layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("copy_engines", ["dma", "direct"])
def test_hundreds_of_scattered_copies(copy_engines: str, src_layout: str, on_default_stream: bool):
    """Layer by layer, there and back, with runs of all lengths among single pages. On a stream of its own linear
    copies are one batch; the driver refuses batches on the default stream."""
    if reason := kvcacheio.why_not(copy_engines, "cuda"):
        pytest.skip(reason)
    src, dst = (
        Pool(each, 900, 3, 16, torch.bfloat16, i, (2, 64)) for i, each in ((1, src_layout), (2, "layer_first"))
    )
    rng = np.random.default_rng(3)
    pieces = np.split(np.arange(900), np.sort(rng.permutation(900)[:500]))
    src_pages = np.concatenate([pieces[i] for i in rng.permutation(len(pieces))[:400]])
    if src_layout == "layer_first":  # linear copies of one to many pages
        dst_pages = (src_pages + 100) % 900
    else:
        dst_pages = rng.permutation(900)[: len(src_pages)]
    ids = torch.from_numpy(src_pages.copy()), torch.from_numpy(dst_pages.copy())
    result = expected(src, dst, src_pages.tolist(), dst_pages.tolist())
    (host, source), (buffer, target) = place(src, False), place(dst, True)
    stream = torch.cuda.default_stream() if on_default_stream else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in range(3):
            of, to = source.layer(layer), target.layer(layer)
            kvcacheio.copy_pages(of, to, *ids, backend=copy_engines)
        found = buffer.to("cpu")
        assert np.array_equal(found.view(torch.uint8).numpy(), result)
        # Behind a write of the same stream, which the copies read.
        buffer.zero_()
        for layer in range(3):
            kvcacheio.copy_pages(target.layer(layer), source.layer(layer), *ids[::-1], backend=copy_engines)
        stream.synchronize()
    zeros = Pool("layer_first", 900, 3, 16, torch.bfloat16, 2, (2, 64))
    zeros.buffer.zero_()
    back = expected(zeros, src, dst_pages.tolist(), src_pages.tolist())
    assert np.array_equal(host.view(torch.uint8).numpy(), back)


def test_unpinned_memory_is_refused():
    pytest.importorskip("cupy")
    src, dst = (Pool("page_first", 4, 1, 1, torch.bfloat16, seed) for seed in (1, 2))
    one = torch.tensor([0])
    with pytest.raises(KVLayoutError, match="pinned"):
        kvcacheio.copy_pages(src.pages, place(dst, True)[1], one, one, backend="cuda")
