"""Pools of every layout and the five-line model of a transfer, on raw bytes, that all backends must equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sgl_kernel.kvcacheio.layout import KVPages

LAYOUTS = ("layer_first", "page_first", "block_major")
# What transfers copy between; the elastic pool is page-first, block-major is another order of the same.
ROUTES = [
    ("page_first", "layer_first"),
    ("layer_first", "page_first"),
    ("layer_first", "layer_first"),
    ("page_first", "block_major"),
    ("block_major", "page_first"),
    ("layer_first", "block_major"),
    ("block_major", "layer_first"),
    ("block_major", "block_major"),
    ("page_first", "page_first"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn]
PAGE_SIZES = [1, 2, 3, 16, 64]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit patterns, NaN and infinities among them: a transfer must not look at them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


class Pool:
    """A pool of random bytes. k_shape, v_shape: (num_kv_heads, head_dim); they differ only where the layout is
    page-first or K and V are two tensors (layer-first)."""

    def __init__(
        self,
        layout: str,
        num_pages: int,
        num_layers: int,
        page_size: int,
        dtype: torch.dtype,
        seed: int,
        k_shape: tuple[int, int] = (2, 4),
        v_shape: tuple[int, int] | None = None,
    ) -> None:
        self.layout, self.num_pages, self.num_layers = layout, num_pages, num_layers
        v_shape = v_shape or k_shape
        runs = [page_size * heads * dim for heads, dim in (k_shape, v_shape)]
        self.run_bytes = [run * dtype.itemsize for run in runs]
        page = num_layers * sum(runs)
        self.buffer = random_bytes((num_pages * page,), dtype, seed)
        self.page_size, self.shapes = page_size, (k_shape, v_shape)
        self.pages = self.view(self.buffer)

    def view(self, buffer: torch.Tensor) -> KVPages:
        """The buffer's bytes as KVPages; on another device after `buffer.to(...)`."""
        page_size, num_layers, (k_shape, v_shape) = self.page_size, self.num_layers, self.shapes
        inner = (page_size, *k_shape)
        if k_shape == v_shape:
            if self.layout == "layer_first":
                return KVPages.layer_first(buffer.view(2, num_layers, self.num_pages, *inner))
            if self.layout == "page_first":
                return KVPages.page_first(buffer.view(self.num_pages, 2, num_layers, *inner))
            return KVPages.block_major(buffer.view(self.num_pages, num_layers, 2, *inner))
        if self.layout == "page_first":
            k_size = num_layers * page_size * k_shape[0] * k_shape[1]
            halves = buffer.view(self.num_pages, -1).tensor_split([k_size], dim=1)
            shapes = [(num_layers, page_size, *shape) for shape in (k_shape, v_shape)]
            return KVPages(*(half.unflatten(1, shape).transpose(0, 1) for half, shape in zip(halves, shapes)))
        assert self.layout == "layer_first"
        k_size = num_layers * self.num_pages * page_size * k_shape[0] * k_shape[1]
        k = buffer[:k_size].view(num_layers, self.num_pages, page_size, *k_shape)
        return KVPages(k, buffer[k_size:].view(num_layers, self.num_pages, page_size, *v_shape))

    def raw(self) -> np.ndarray:
        return self.buffer.view(torch.uint8).numpy().copy()

    def run(self, raw: np.ndarray, kv: int, layer: int, page: int) -> np.ndarray:
        """One run's bytes within raw, by the layout's definition."""
        k, v = self.run_bytes
        layers, pages, size = self.num_layers, self.num_pages, self.run_bytes[kv]
        if self.layout == "layer_first":
            start = kv * layers * pages * k + (layer * pages + page) * size
        elif self.layout == "page_first":
            start = page * layers * (k + v) + kv * layers * k + layer * size
        else:
            start = (page * layers + layer) * (k + v) + kv * k
        return raw[start : start + size]


def expected(src: Pool, dst: Pool, src_pages: list[int], dst_pages: list[int]) -> np.ndarray:
    """The model: dst's bytes after all layers of src_pages were copied to dst_pages."""
    source, result = src.raw(), dst.raw()
    for s, d in zip(src_pages, dst_pages):
        for layer in range(src.num_layers):
            for kv in range(2):
                dst.run(result, kv, layer, d)[:] = src.run(source, kv, layer, s)
    return result


def index_patterns(rng: np.random.Generator, num_src: int, num_dst: int, n: int) -> Iterator[tuple[str, list, list]]:
    """Every kind of indices that a backend treats apart; destination pages never repeat."""
    scattered_src, scattered_dst = rng.permutation(num_src)[:n].tolist(), rng.permutation(num_dst)[:n].tolist()
    a, b = int(rng.integers(num_src - n + 1)), int(rng.integers(num_dst - n + 1))
    run_src, run_dst = list(range(a, a + n)), list(range(b, b + n))
    yield "scattered", scattered_src, scattered_dst
    yield "runs", run_src, run_dst
    yield "backwards", run_src[::-1], run_dst
    yield "to a run", scattered_src, run_dst
    yield "to a shuffled run", scattered_src, rng.permutation(run_dst).tolist()
    yield "from a shuffled run", rng.permutation(run_src).tolist(), scattered_dst
    gap = int(rng.integers(1, n)) if n > 1 and b + n < num_dst else 0
    yield "runs with a gap", run_src, run_dst[:gap] + [d + 1 for d in run_dst[gap:]] if gap else run_dst
    yield "some sources twice", rng.choice(run_src, n).tolist(), scattered_dst
    yield "one source many times", [a] * n, scattered_dst
    yield "one", scattered_src[:1], scattered_dst[:1]
    yield "none", [], []
