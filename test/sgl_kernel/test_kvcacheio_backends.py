"""Every backend that runs on the CPU against the model: all routes, dtypes, page sizes, kinds of indices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_kernel import kvcacheio
from sgl_kernel.kvcacheio import KVLayoutError, KVPages, reference
from support.kv_model import DTYPES, PAGE_SIZES, ROUTES, Pool, expected, index_patterns, random_bytes

LAYERS = 3
CPU_BACKENDS = ("cpu", "reference", "dma", "direct")


def ids(pages: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(pages, dtype=dtype)


@pytest.fixture(params=["as shipped", "all slices", "never slices"])
def reference_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference chooses its way by size; small pools must take all of them."""
    if request.param != "as shipped":
        monkeypatch.setattr(reference, "_FEW_PAGES", 0)
        monkeypatch.setattr(reference, "_SMALL_BYTES", 0)
    if request.param == "all slices":
        monkeypatch.setattr(reference, "_SLICE_BYTES", 0)
    if request.param == "never slices":
        monkeypatch.setattr(reference, "_SLICE_BYTES", 1 << 60)
        monkeypatch.setattr(reference, "_BLOCK_BYTES", 200)


def check(backend: str, page_size: int, dtype: torch.dtype, seed: int, **shapes: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    routes = ROUTES if not shapes.get("v_shape") else [r for r in ROUTES if "block_major" not in r]
    for from_layout, to_layout in routes:
        for what, src_pages, dst_pages in index_patterns(rng, 9, 12, 6):
            src = Pool(from_layout, 9, LAYERS, page_size, dtype, seed, **shapes)
            dst = Pool(to_layout, 12, LAYERS, page_size, dtype, seed + 1, **shapes)
            source, result = src.raw(), expected(src, dst, src_pages, dst_pages)
            index = (torch.int64, torch.int32)[int(rng.integers(2))]
            kvcacheio.copy_pages(src.pages, dst.pages, ids(src_pages, index), ids(dst_pages, index), backend=backend)
            assert np.array_equal(dst.raw(), result), f"{from_layout} to {to_layout}, {what}"
            assert np.array_equal(src.raw(), source), "the source was written"


# Their elements are as large as those of bfloat16 and of uint8.
SAME_SIZES = (torch.float16, torch.float8_e4m3fn)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=pytest.mark.slow if d in SAME_SIZES else ()) for d in DTYPES],
    ids=lambda d: str(d).removeprefix("torch."),
)
@pytest.mark.parametrize("page_size", PAGE_SIZES, ids="page{}".format)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_all_routes(backend: str, page_size: int, dtype: torch.dtype):
    check(backend, page_size, dtype, seed=page_size)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
@pytest.mark.parametrize("k_shape", [(1, 1), (3, 5), (2, 8)], ids="{0[0]}x{0[1]}".format)
def test_the_reference_takes_every_path(reference_paths, k_shape: tuple[int, int], seed: int):
    check("reference", 2, torch.bfloat16, seed, k_shape=k_shape)
    check("reference", 3, torch.uint8, seed, k_shape=k_shape)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("v_shape", [(2, 3), (1, 16), (5, 1)], ids="{0[0]}x{0[1]}".format)
def test_k_and_v_may_differ_in_size(v_shape: tuple[int, int], backend: str):
    check(backend, 2, torch.float16, seed=7, k_shape=(2, 6), v_shape=v_shape)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("seed", range(6), ids="seed{}".format)
def test_many_small_random_transfers(seed: int, backend: str):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        layers, page_size = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        route = ROUTES[rng.integers(len(ROUTES))]
        dtype = DTYPES[rng.integers(len(DTYPES))]
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 9)))
        src = Pool(route[0], int(rng.integers(1, 30)), layers, page_size, dtype, seed, shape)
        dst = Pool(route[1], int(rng.integers(1, 30)), layers, page_size, dtype, seed + 1, shape)
        n = int(rng.integers(0, min(src.num_pages, dst.num_pages) + 1))
        # Sorted on one side or both: many short runs.
        sides = [rng.permutation(pool.num_pages)[:n] for pool in (src, dst)]
        src_pages, dst_pages = (s if rng.random() < 0.4 else np.sort(s) for s in sides)
        result = expected(src, dst, src_pages.tolist(), dst_pages.tolist())
        to, where = torch.from_numpy(src_pages), torch.from_numpy(dst_pages)
        kvcacheio.copy_pages(src.pages, dst.pages, to, where, backend=backend)
        assert np.array_equal(dst.raw(), result)


@pytest.mark.parametrize("dst_layout", ["layer_first", "block_major"])
@pytest.mark.parametrize("src_layout", ["page_first", "layer_first"])
def test_loading_layer_by_layer_is_loading_all(src_layout: str, dst_layout: str):
    src, dst = (
        Pool(layout, 8, LAYERS, 2, torch.bfloat16, 3 + i) for i, layout in enumerate([src_layout, dst_layout])
    )
    result = expected(src, dst, [5, 1, 2], [0, 6, 7])
    for layer in range(LAYERS):
        to = dst.pages.layer(layer)
        kvcacheio.transfer_kv_per_layer_pf_lf(src.pages, to, ids([5, 1, 2]), ids([0, 6, 7]), layer)
    assert np.array_equal(dst.raw(), result)


def test_the_named_functions_are_copy_pages():
    host, device = (
        Pool("page_first", 8, LAYERS, 2, torch.float32, 1),
        Pool("layer_first", 9, LAYERS, 2, torch.float32, 2),
    )
    peer = Pool("block_major", 7, LAYERS, 2, torch.float32, 3)
    result = expected(device, host, [8, 0], [3, 1])
    kvcacheio.transfer_kv_all_layer_lf_pf(device.pages, host.pages, ids([8, 0]), ids([3, 1]))
    assert np.array_equal(host.raw(), result)
    result = expected(host, device, [3, 4], [5, 2])
    kvcacheio.transfer_kv_all_layer_pf_lf(host.pages, device.pages, ids([3, 4]), ids([5, 2]))
    assert np.array_equal(device.raw(), result)
    result = expected(device, peer, [5, 2], [6, 0])
    kvcacheio.transfer_kv_all_layer(device.pages, peer.pages, ids([5, 2]), ids([6, 0]))
    assert np.array_equal(peer.raw(), result)
    result = expected(peer, device, [6], [1])
    for i in range(LAYERS):
        kvcacheio.transfer_kv_per_layer(peer.pages.layer(i), device.pages.layer(i), ids([6]), ids([1]))
    assert np.array_equal(device.raw(), result)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("num_pages", [2, 9])
def test_pages_with_gaps_inside_are_the_references_alone(num_pages: int, dtype: torch.dtype):
    """K and V interleaved per token: no page is one run."""
    kv = random_bytes((LAYERS, 11, 4, 2, 2, 4), dtype, 1)  # (layers, pages, page_size, kv, heads, dim)
    src = KVPages(kv[:, :, :, 0], kv[:, :, :, 1])
    dst = Pool("layer_first", 12, LAYERS, 4, dtype, 2)
    src_pages, dst_pages = list(range(10, 10 - num_pages, -1)), list(range(1, num_pages + 1))
    source, result = kv.view(torch.uint8).numpy(), dst.raw()
    for s, d in zip(src_pages, dst_pages):
        for layer in range(LAYERS):
            for i in range(2):
                dst.run(result, i, layer, d)[:] = source[layer, s, :, i].reshape(-1)
    kvcacheio.copy_pages(src, dst.pages, ids(src_pages), ids(dst_pages))
    assert np.array_equal(dst.raw(), result)
    with pytest.raises(KVLayoutError, match="without gaps"):
        kvcacheio.copy_pages(src, dst.pages, ids([4]), ids([1]), backend="dma")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_components", [1, 2, 3, 5])
def test_any_number_of_components_of_any_type(reference_paths, backend: str, num_components: int):
    """Page-first with a gap behind each page, layer-first with each component in memory of its own."""
    rng = np.random.default_rng(num_components)
    some = rng.permutation(len(DTYPES))[:num_components]
    shapes = [(int(rng.integers(1, 4)), int(rng.integers(1, 40))) for _ in some]
    sizes = [DTYPES[i].itemsize * int(np.prod(shape)) for i, shape in zip(some, shapes)]
    starts = np.cumsum([0, *(-(-LAYERS * size // 8) * 8 for size in sizes)]).tolist()
    pages = random_bytes((9, starts[-1] + 8), torch.uint8, 1)
    parts = [
        pages[:, start : start + LAYERS * size].view(DTYPES[i]).unflatten(1, (LAYERS, *shape)).transpose(0, 1)
        for i, shape, size, start in zip(some, shapes, sizes, starts)
    ]
    src = KVPages(*parts)
    dst = KVPages(*(random_bytes((LAYERS, 12, *shape), DTYPES[i], 2) for i, shape in zip(some, shapes)))
    assert src.run_bytes == dst.run_bytes == tuple(sizes)
    before = pages.clone()
    for what, src_pages, dst_pages in index_patterns(rng, 9, 12, 6):
        wanted = [each.clone().view(torch.uint8) for each in dst.components]
        for of, to in zip(src.components, wanted):
            for s, d in zip(src_pages, dst_pages):
                to[:, d] = of[:, s].contiguous().view(torch.uint8)
        kvcacheio.copy_pages(src, dst, ids(src_pages), ids(dst_pages), backend=backend)
        assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(dst.components, wanted)), what
        kvcacheio.copy_pages(dst, src, ids(dst_pages), ids(src_pages), backend=backend)
        assert torch.equal(pages, before), "what comes back is what was there, gaps included"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_k_and_v_may_be_tensors_of_their_own_that_happen_to_touch(backend: str):
    """By their addresses they look like one page; each ends where its own storage does."""
    raw = [np.random.default_rng(seed).integers(0, 256, 2 * 48, dtype=np.uint8) for seed in (1, 2)]
    pools = [[torch.from_numpy(half).view(2, 1, 1, 3, 8) for half in (r[:48], r[48:])] for r in raw]
    kvcacheio.copy_pages(KVPages(*pools[0]), KVPages(*pools[1]), ids([0]), ids([0]), backend=backend)
    assert np.array_equal(raw[0], raw[1])


def test_a_page_named_twice_as_destination_touches_no_other_page():
    src, dst = (Pool("page_first", 6, 1, 1, torch.uint8, seed) for seed in (1, 2))
    before = dst.raw().reshape(6, -1)
    kvcacheio.copy_pages(src.pages, dst.pages, ids([5, 1, 3]), ids([0, 0, 2]))
    after = dst.raw().reshape(6, -1)
    assert np.array_equal(after[[1, 3, 4, 5]], before[[1, 3, 4, 5]])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    ("src_pages", "dst_pages", "message"),
    [
        (
            torch.tensor([0, 9]),
            torch.tensor([0, 1]),
            "src_pages has pages 0 to 9, index out of range for a pool of 9",
        ),
        (torch.tensor([0, 1]), torch.tensor([-1, 1]), "dst_pages has pages -1 to 1"),
        (torch.tensor([0, 1]), torch.tensor([0]), "2 source pages and 1 destination pages"),
        (torch.tensor([0.0]), torch.tensor([0]), "src_pages must be .n,. int64 or int32"),
        (torch.tensor([[0]]), torch.tensor([0]), "src_pages must be"),
        (torch.tensor([0]), torch.tensor([0], dtype=torch.int16), "dst_pages must be"),
    ],
    ids=["too large", "negative", "length", "float", "2-d", "int16"],
)
def test_bad_indices_move_nothing(backend: str, src_pages: torch.Tensor, dst_pages: torch.Tensor, message: str):
    src, dst = (Pool("layer_first", 9, LAYERS, 2, torch.float32, seed) for seed in (1, 2))
    before = dst.raw()
    with pytest.raises(KVLayoutError, match=message):
        kvcacheio.copy_pages(src.pages, dst.pages, src_pages, dst_pages, backend=backend)
    assert np.array_equal(dst.raw(), before)


def test_pools_that_do_not_fit_are_named():
    src = Pool("layer_first", 9, LAYERS, 2, torch.float32, 1).pages
    one = ids([0])
    for other, message in [
        (
            Pool("layer_first", 9, LAYERS, 2, torch.bfloat16, 1).pages,
            "K is torch.float32 in the source and torch.bfl",
        ),
        (Pool("layer_first", 9, 2, 2, torch.float32, 1).pages, "K has 3 layers in the source and 2 in the dest"),
        (Pool("layer_first", 9, LAYERS, 4, torch.float32, 1).pages, r"\(2, 2, 4\) in the source and \(4, 2, 4\)"),
        (Pool("layer_first", 9, LAYERS, 2, torch.float32, 1, (2, 4), (2, 5)).pages, "a page of V"),
    ]:
        with pytest.raises(KVLayoutError, match=message):
            kvcacheio.copy_pages(src, other, one, one)
    with pytest.raises(KVLayoutError, match="layer 3 of a pool with layers 0 to 2"):
        src.layer(3)
    with pytest.raises(KVLayoutError, match="page-first"):
        KVPages.page_first(torch.zeros(2, 3, 4, 5, 6, 7))
    with pytest.raises(KVLayoutError, match=r"must be \(num_layers"):
        KVPages(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(KVLayoutError, match="one component at least"):
        KVPages()
    with pytest.raises(KVLayoutError, match="2 components in the source and 1 in the destination"):
        kvcacheio.copy_pages(src, KVPages(src.k), one, one)
    with pytest.raises(KVLayoutError, match="must agree in num_layers"):
        KVPages(torch.zeros(1, 2, 3, 4, 5), torch.zeros(2, 2, 3, 4, 5))
    with pytest.raises(KVLayoutError, match="they must agree"):
        KVPages(torch.zeros(1, 2, 3, 4, 5), torch.zeros(1, 2, 3, 4, 5, device="meta"))


class OnGpu(KVPages):
    """Pages that say so."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, run_bytes: int, layer_stride: int) -> None:
        shape, strides = (2, 1, run_bytes), (layer_stride, run_bytes, 1)
        super().__init__(torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta"))


def test_picking_a_backend(monkeypatch: pytest.MonkeyPatch):
    pick = kvcacheio.pick_backend
    for has_library, chosen in ((True, "cpu"), (False, "reference")):
        monkeypatch.setattr(kvcacheio.pick.LIBRARY, "is_available", lambda has_library=has_library: has_library)
        for requested in ("auto", "kernel", "cuda", "triton", "bulk"):
            assert pick(requested, "cpu") == chosen
        assert pick("reference", "cpu") == "reference"
    assert pick("dma", "cpu") == "dma" and pick("direct", "cpu") == "direct"
    for requested in ("kernel", "cuda", "triton", "bulk", "dma", "direct", "reference"):
        assert pick(requested, "cuda:0") == requested
    installed = {"cupy": True, "triton": True}
    monkeypatch.setattr(kvcacheio.pick, "_installed", installed.get)
    assert pick("auto", "cuda") == "kernel" and kvcacheio.available_kernel("kernel") == "cuda"
    installed["cupy"] = False
    assert pick("auto", "cuda") == "kernel" and kvcacheio.available_kernel("kernel") == "triton"
    installed["triton"] = False
    assert pick("auto", "cuda") == "dma"
    # Large runs, where copies come in batches.
    installed |= {"cupy": True, "triton": True}
    for batch, chosen in ((None, "kernel"), (object(), "dma")):
        monkeypatch.setattr(kvcacheio.pick, "memcpy_batch", lambda batch=batch: batch)
        assert pick("auto", "cuda", 128 << 10) == pick("auto", "cuda", 16 << 10, in_rows=True) == chosen
        assert pick("auto", "cuda", 16 << 10) == pick("auto", "cuda", 2 << 10, in_rows=True) == "kernel"
        # From the memory of a peer as from the host's; to the host by rows, where a layer is no longer than a pitch.
        device, peer = OnGpu(128 << 10, 1 << 30), OnGpu(128 << 10, 128 << 10)
        assert kvcacheio.pick_between("auto", peer, device) == chosen
        host = KVPages(torch.empty(1, 1, 1))
        with torch.device("meta"):
            longer = KVPages(torch.empty(2, (1 << 31) + 1, 1, dtype=torch.uint8))
        assert kvcacheio.pick_between("auto", OnGpu(16 << 10, 1 << 30), longer) == "kernel"
        assert kvcacheio.pick_between("auto", OnGpu(16 << 10, 1 << 30), host) == chosen
        assert kvcacheio.pick_between("auto", OnGpu(16 << 10, 1 << 31), host) == "kernel"
    assert [kvcacheio.page_size_for_dma(size) for size in (2048, 1000, 512 << 10)] == [32, 128, 1]
    installed |= {"cupy": False, "triton": False}
    with pytest.raises(KVLayoutError, match="use dma instead"):
        kvcacheio.available_kernel("kernel")
    with pytest.raises(KVLayoutError, match="'rdma' is none of auto"):
        pick("rdma", "cuda")


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch):
    why_not = kvcacheio.why_not
    for requested in ("auto", "dma", "direct", "reference"):
        assert why_not(requested, "cpu") is None
    for requested in ("kernel", "cuda", "triton", "bulk"):
        assert why_not(requested, "cpu") == "it needs a GPU; on the CPU use auto, dma or direct"
    assert "none of auto" in str(why_not("rdma", "cpu"))
    installed = {"cupy": True, "triton": False}
    monkeypatch.setattr(kvcacheio.pick, "_installed", installed.get)
    for requested in ("auto", "kernel", "cuda", "dma", "direct"):
        assert why_not(requested, "cuda") is None
    assert "host memory only" in str(why_not("reference", "cuda"))
    assert "needs Triton" in str(why_not("triton", "cuda"))
    other = "it needs a GPU of compute capability 9, 10 or 11; use kernel"
    for capability, reason in (((8, 9), other), ((9, 0), None), ((10, 3), None), ((12, 0), other)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert why_not("bulk", "cuda") == reason
    installed.update(cupy=False, triton=True)
    for requested in ("auto", "kernel", "triton"):
        assert why_not(requested, "cuda") is None
    for requested in ("cuda", "bulk", "dma", "direct"):
        assert "needs CuPy" in str(why_not(requested, "cuda"))
    installed["triton"] = False
    for requested in ("auto", "kernel"):
        assert "CuPy (pip install cupy-cuda13x) or Triton" in str(why_not(requested, "cuda"))


@pytest.mark.parametrize(
    ("from_gpu", "to_gpu", "is_few"), [(True, False, True), (False, True, False), (True, True, False)]
)
def test_few_warps_write_to_the_host(from_gpu: bool, to_gpu: bool, is_few: bool) -> None:
    warps = kvcacheio.default_warps(from_gpu, to_gpu)
    assert warps == (kvcacheio.BACKUP_WARPS if is_few else kvcacheio.LOAD_WARPS)
