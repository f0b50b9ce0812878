"""`kernel` in Triton: the same copy where CuPy is missing or the GPU is not NVIDIA's.

Owns no memory. Values travel as integers, so that no bit pattern changes. Byte-exact under Triton's interpreter
(which checks index arithmetic, not races), and on an H200.

Every program takes tiles of rows (runs: one component of one page and one layer) and words. Loads bypass L1 (`.cg`),
and stores leave L2 first (`.cs`); Triton has no `L1::no_allocate`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from sgl_kernel.kvcacheio.layout import KVPages, addresses
from sgl_kernel.kvcacheio.reference import words
from sgl_kernel.triton_launch import launch

NUM_WARPS = 8
# Words per tile: four 16-byte accesses per thread of 256.
TILE_BYTES = 16 << 10


# Not compiled again for other numbers of pages.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["src_pages_ptr", "dst_pages_ptr"])
def copy_pages_kernel(
    src_ptr,
    dst_ptr,
    src_pages_ptr,
    dst_pages_ptr,
    num_rows,
    num_layers,
    run_words,
    src_layer_stride,
    src_page_stride,
    dst_layer_stride,
    dst_page_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One component. Strides and run_words count words of src_ptr's type. Row r is layer r % num_layers of page
    r // num_layers of the index arrays."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    while first < num_rows:
        row = first + tl.arange(0, ROWS)
        alive = row < num_rows
        index = row // num_layers
        layer = row - index * num_layers
        src_page = tl.load(src_pages_ptr + index, mask=alive, other=0).to(tl.int64)
        dst_page = tl.load(dst_pages_ptr + index, mask=alive, other=0).to(tl.int64)
        src_row = layer * src_layer_stride + src_page * src_page_stride
        dst_row = layer * dst_layer_stride + dst_page * dst_page_stride
        start = tl.zeros((), tl.int64)
        while start < run_words:
            col = start + tl.arange(0, COLS)
            mask = alive[:, None] & (col < run_words)[None, :]
            value = tl.load(src_ptr + src_row[:, None] + col[None, :], mask=mask, other=0, cache_modifier=".cg")
            tl.store(dst_ptr + dst_row[:, None] + col[None, :], value, mask=mask, cache_modifier=".cs")
            start += COLS
        first += step


def copy_pages(
    src: KVPages,
    dst: KVPages,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    num_warps: int,
    stream: Any = None,
) -> None:
    """See `kvcacheio.copy_pages`. Host memory, on either side, is pinned; under the interpreter any will do."""
    addresses(src), addresses(dst)
    if not (src.is_cuda or dst.is_cuda):
        _launch(src, dst, src_pages.to(torch.int64), dst_pages.to(torch.int64), num_warps)
        return
    device = dst.device if dst.is_cuda else src.device
    with torch.cuda.device(device), torch.cuda.stream(stream or torch.cuda.current_stream(device)):
        indices = [pages.to(device, torch.int64, non_blocking=True).contiguous() for pages in (src_pages, dst_pages)]
        _launch(src, dst, indices[0], indices[1], num_warps)


def _launch(src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor, num_warps: int) -> None:
    num_rows = len(src_pages) * src.num_layers
    for s, d in zip(src.components, dst.components):
        s, d = words(s, d)
        rows, cols = tile(s.shape[2], s.dtype.itemsize)
        grid = (min(math.ceil(num_warps / NUM_WARPS), math.ceil(num_rows / rows)),)
        launch(
            copy_pages_kernel,
            grid,
            s,
            d,
            src_pages,
            dst_pages,
            num_rows,
            src.num_layers,
            s.shape[2],
            *s.stride()[:2],
            *d.stride()[:2],
            ROWS=rows,
            COLS=cols,
            num_warps=NUM_WARPS,
        )


def tile(run_words: int, word_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two: a whole run per row if it fits."""
    size = TILE_BYTES // word_bytes
    cols = min(size, triton.next_power_of_2(run_words))
    return size // cols, cols
