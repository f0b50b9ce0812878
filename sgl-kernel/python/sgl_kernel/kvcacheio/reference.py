"""The reference on the CPU: it defines the result that every other backend must match byte for byte.

Owns nothing but a temporary of at most 1 MiB per call. Arguments have been checked (`layout.check_fit`,
`layout.check_indices`). Runs in the calling thread; it is done when it returns.

The result is that of one line per layer, `dst[layer, dst_pages] = src[layer, src_pages]`. That line copies everything
twice, so that the indices decide how the copy is made:

    consecutive on both sides, or large pieces   slice copies, per run and layer or per page
    consecutive destination, in any order        one gather per layer, straight to its place
    consecutive source, in any order             one scatter per layer, straight from its place
    neither                                      gather and scatter in blocks that stay in the CPU's cache
"""

from __future__ import annotations

import numpy as np
import torch

from sgl_kernel.kvcacheio.layout import KVPages, page_is_one_run

# A slice copy of fewer bytes takes longer to begin (about 1 µs of Python) than to run.
_SLICE_BYTES = 16 << 10
# This many bytes are copied faster than the choice of a method takes, which is 40 µs and more.
_SMALL_BYTES = 64 << 10
_FEW_PAGES = 4
_BLOCK_BYTES = 1 << 20
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def copy_pages(src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """dst[:, dst_pages] = src[:, src_pages], for each component. Where a page is named twice in dst_pages, either
    stays."""
    run_bytes = max(src.run_bytes)
    if src.num_layers == 1 and len(src_pages) * run_bytes <= _SMALL_BYTES:
        _copy_plainly(src, dst, src_pages, dst_pages)
        return
    if len(src_pages) <= _FEW_PAGES:
        for a, b in zip(src_pages.tolist(), dst_pages.tolist()):
            for s, d in zip(src.components, dst.components):
                d[:, b].copy_(s[:, a])
        return
    src_ids, dst_ids = src_pages.numpy(), dst_pages.numpy()
    starts = run_starts(src_ids, dst_ids)
    many_runs = len(starts) > 1 and len(src_ids) * src.num_layers * run_bytes < len(starts) * _SLICE_BYTES
    if many_runs:
        # Sorted by destination, pages often become runs again, because frames are handed out lowest first.
        order = np.argsort(dst_ids, kind="stable")
        src_ids, dst_ids = src_ids[order], dst_ids[order]
        starts = run_starts(src_ids, dst_ids)
        many_runs = len(starts) > 1 and len(src_ids) * src.num_layers * run_bytes < len(starts) * _SLICE_BYTES
    if not all(page_is_one_run(t) for t in (*src.components, *dst.components)):
        _copy_plainly(src, dst, src_pages, dst_pages)
        return
    for s, d in zip(src.components, dst.components):
        s, d = words(s, d)
        if many_runs:
            _copy_scattered(s, d, src_ids, dst_ids)
        else:
            _copy_runs(s, d, src_ids, dst_ids, starts)


def _copy_plainly(src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Any strides; the smallest fixed cost, and the slowest per byte."""
    dst_pages = dst_pages.to(torch.int64)
    for s, d in zip(src.components, dst.components):
        if s.dtype.itemsize == 1:
            s, d = s.view(torch.uint8), d.view(torch.uint8)  # torch does not index every 8-bit float
        for layer in range(s.shape[0]):
            d[layer].index_copy_(0, dst_pages, s[layer].index_select(0, src_pages))


def run_starts(src_ids: np.ndarray, dst_ids: np.ndarray) -> np.ndarray:
    """The beginnings of runs in which both index arrays go up by one: (number of runs,) int64, the first is 0."""
    breaks = (np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1)
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(breaks) + 1])


def words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each component (num_layers, num_pages, ...) as (num_layers, num_pages, words): integers, of the widest type
    that fits all, so that no copy looks at a value."""
    bits = 8
    for t in tensors:
        layer_stride, page_stride, *_ = t.stride()
        bits |= t.data_ptr() | (layer_stride | page_stride | t.shape[2:].numel()) * t.dtype.itemsize
    width = bits & -bits  # the largest power of two that divides all of them, and 8
    return tuple(_reinterpret(t, _WORDS[width]) for t in tensors)


def _reinterpret(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like Tensor.view(dtype), which would need aligned strides of dimensions of size 1 too."""
    itemsize, width = t.dtype.itemsize, dtype.itemsize
    shape = (*t.shape[:2], t.shape[2:].numel() * itemsize // width)
    strides = (*(stride * itemsize // width for stride in t.stride()[:2]), 1)
    view = torch.empty(0, dtype=dtype, device=t.device)
    return view.set_(t.untyped_storage(), t.storage_offset() * itemsize // width, shape, strides)  # type: ignore[call-overload]


def _copy_runs(
    s: torch.Tensor, d: torch.Tensor, src_ids: np.ndarray, dst_ids: np.ndarray, starts: np.ndarray
) -> None:
    ends = np.append(starts[1:], len(src_ids))
    pieces = zip(src_ids[starts].tolist(), dst_ids[starts].tolist(), (ends - starts).tolist())
    num_layers = s.shape[0]
    source, target = s.numpy(), d.numpy()
    for a, b, n in pieces:
        if n < num_layers:
            for i in range(n):
                target[:, b + i] = source[:, a + i]
        else:
            for layer in range(num_layers):
                target[layer, b : b + n] = source[layer, a : a + n]


def _copy_scattered(s: torch.Tensor, d: torch.Tensor, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
    """dst_ids ascend. Indexed assignment is numpy's: torch's `index_copy_` goes element by element."""
    n = len(dst_ids)
    d_array = d.numpy()
    run_bytes = s.shape[2] * s.dtype.itemsize
    src_torch = torch.from_numpy(src_ids)
    if (np.diff(dst_ids) == 1).all() and d[0].is_contiguous():
        first = int(dst_ids[0])
        for layer in range(s.shape[0]):
            torch.index_select(s[layer], 0, src_torch, out=d[layer, first : first + n])
        return
    order = np.argsort(src_ids, kind="stable")
    if (np.diff(src_ids[order]) == 1).all():
        first, dst_of_src = int(src_ids[order[0]]), dst_ids[order]
        s_array = s.numpy()
        for layer in range(s.shape[0]):
            d_array[layer, dst_of_src] = s_array[layer, first : first + n]
        return
    block = max(1, _BLOCK_BYTES // run_bytes)
    scratch = torch.empty(min(block, n), s.shape[2], dtype=s.dtype)
    for layer in range(s.shape[0]):
        for i in range(0, n, block):
            m = min(block, n - i)
            torch.index_select(s[layer], 0, src_torch[i : i + m], out=scratch[:m])
            d_array[layer, dst_ids[i : i + m]] = scratch[:m].numpy()
