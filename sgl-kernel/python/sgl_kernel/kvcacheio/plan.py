"""Plans for the copy engines: which bytes go where, as few and large copies as the indices allow. Pure numpy.

Knows addresses, not memory: the same plan is executed by numpy on the CPU (the tests, and `dma` without a GPU) and by
asynchronous copies on a GPU. Imports no torch.

    pages      3 4 5 | 9 | 6 7          `merge`: a run goes on while both sides go up by one
    to         0 1 2 | 3 | 7 8          -> 3 runs per layer and K/V instead of 6 pages

A run of n pages is one linear copy where both sides are layer-first, else one 2-D copy: n rows, one pitch per side.
Where a run is shorter than the number of layers, rows are layers instead of pages:

    layer-first device -> page-first host, one page, 4 layers: 4 rows, pitch a layer in the source, a run in the other
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# One copy per row: `height` rows of `width` bytes. kv: 0 and 1 name the base address of K and of V that src and dst
# (bytes) are counted from. Rows follow each other at src_pitch and dst_pitch; with height 1 both are the width.
COPY = np.dtype(
    [
        ("kv", np.int32),
        ("src", np.int64),
        ("dst", np.int64),
        ("width", np.int64),
        ("height", np.int64),
        ("src_pitch", np.int64),
        ("dst_pitch", np.int64),
    ]
)
# cudaDevAttrMaxPitch of every current GPU. A pool's layer stride can be larger.
MAX_PITCH = (1 << 31) - 1


@dataclass(frozen=True)
class Side:
    """Strides of one pool in bytes, for K and V: run (kv, layer, page) lies at
    base[kv] + layer * layer_stride[kv] + page * page_stride[kv].

    v_after_k: base[1] - base[0] where K and V share their memory, else None.
    """

    layer_stride: tuple[int, int]
    page_stride: tuple[int, int]
    v_after_k: int | None = None


def plan_copies(
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
    src: Side,
    dst: Side,
    run_bytes: tuple[int, int],
    num_layers: int,
    merge: bool = True,
    max_pitch: int = MAX_PITCH,
) -> np.ndarray:
    """Copies (n,) of type COPY that move K and V of all layers of src_pages to dst_pages, (num_pages,) each.

    merge: adjacent pages become one copy; without it every page is copied alone (`direct`, the papers' baseline).
    Layers, and K and V, that lie without gaps on both sides are one copy either way.
    """
    if not len(src_pages):
        return np.empty(0, COPY)
    src_pages, dst_pages = src_pages.astype(np.int64), dst_pages.astype(np.int64)
    if merge:
        breaks = (np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1)
        starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(breaks) + 1])
    else:
        starts = np.arange(len(src_pages))
    lengths = np.diff(np.append(starts, len(src_pages)))
    first_src, first_dst = src_pages[starts], dst_pages[starts]

    parts = []
    layers, kvs, widths = num_layers, [0, 1], list(run_bytes)
    folded = [num_layers == 1 or (src.layer_stride[kv] == dst.layer_stride[kv] == run_bytes[kv]) for kv in kvs]
    if all(folded):
        widths = [run_bytes[0] * num_layers, run_bytes[1] * num_layers]
        layers = 1
        same_pages = src.page_stride[0] == src.page_stride[1] and dst.page_stride[0] == dst.page_stride[1]
        if src.v_after_k == dst.v_after_k == widths[0] and same_pages:
            kvs, widths = [0], [sum(widths)]
    for kv in kvs:
        parts.append(
            _plan_one(
                kv,
                first_src,
                first_dst,
                lengths,
                (src.layer_stride[kv], dst.layer_stride[kv]),
                (src.page_stride[kv], dst.page_stride[kv]),
                widths[kv],
                layers,
                max_pitch,
            )
        )
    return np.concatenate(parts)


def _plan_one(
    kv: int,
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
    lengths: np.ndarray,
    layer_strides: tuple[int, int],
    page_strides: tuple[int, int],
    width: int,
    num_layers: int,
    max_pitch: int,
) -> np.ndarray:
    """Runs of pages of K or of V. Each strides argument: source, destination."""
    linear = page_strides == (width, width)
    rows_of_pages = linear or max(page_strides) <= max_pitch
    rows_of_layers = num_layers > 1 and min(layer_strides) >= width and max(layer_strides) <= max_pitch
    if not rows_of_pages:
        # A pitch too large for a 2-D copy: every page alone.
        src_pages, dst_pages, lengths = _single_pages(src_pages, dst_pages, lengths)
    # Copies that a run becomes: one per layer, or one per page.
    by_layer = np.zeros(len(lengths), bool) if not rows_of_layers else lengths < num_layers
    parts: list[np.ndarray] = []
    if not by_layer.all():
        keep = ~by_layer
        part = np.empty((num_layers, int(keep.sum())), COPY)
        layer = np.arange(num_layers, dtype=np.int64)[:, None]
        part["src"] = layer * layer_strides[0] + src_pages[keep] * page_strides[0]
        part["dst"] = layer * layer_strides[1] + dst_pages[keep] * page_strides[1]
        n = lengths[keep]
        single = (n == 1) | linear
        part["width"] = np.where(single, n * width, width)
        part["height"] = np.where(single, 1, n)
        part["src_pitch"] = np.where(single, n * width, page_strides[0])
        part["dst_pitch"] = np.where(single, n * width, page_strides[1])
        parts.append(part.reshape(-1))
    if by_layer.any():
        src_pages, dst_pages, _ = _single_pages(src_pages[by_layer], dst_pages[by_layer], lengths[by_layer])
        rows = np.empty(len(src_pages), COPY)
        rows["src"] = src_pages * page_strides[0]
        rows["dst"] = dst_pages * page_strides[1]
        rows["width"], rows["height"] = width, num_layers
        rows["src_pitch"], rows["dst_pitch"] = layer_strides
        parts.append(rows)
    result = np.concatenate(parts)
    result["kv"] = kv
    return result


def _single_pages(
    src_pages: np.ndarray, dst_pages: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs taken apart into their pages."""
    within = np.arange(int(lengths.sum()), dtype=np.int64)
    within -= np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(src_pages, lengths) + within, np.repeat(dst_pages, lengths) + within, np.ones_like(within)


@dataclass(frozen=True)
class StagedRound:
    """Copy `copies` into the staging buffer, then scatter its pages [0, len(dst_pages)) to dst_pages."""

    copies: np.ndarray
    dst_pages: np.ndarray


def plan_staged(
    src_pages: np.ndarray, dst_pages: np.ndarray, page_stride: int, page_bytes: int, staging_pages: int
) -> list[StagedRound]:
    """Rounds that bring whole page-first pages through a buffer of staging_pages pages (page-first, without gaps).

    Only the source pages have to be adjacent for a large copy; where they go is the scatter's business.
    page_stride: the source pool's, in bytes; page_bytes: K and V of all layers.
    """
    if staging_pages < 1:
        raise ValueError("the staging buffer must hold one page at least")
    side = Side((0, 0), (page_stride, page_stride))
    staging = Side((0, 0), (page_bytes, page_bytes))
    rounds = []
    for first in range(0, len(src_pages), staging_pages):
        part = src_pages[first : first + staging_pages]
        copies = plan_copies(part, np.arange(len(part)), side, staging, (page_bytes, 0), 1)
        rounds.append(StagedRound(copies[copies["width"] > 0], dst_pages[first : first + staging_pages]))
    return rounds


def execute(copies: np.ndarray, src: tuple[np.ndarray, np.ndarray], dst: tuple[np.ndarray, np.ndarray]) -> None:
    """Carry out a plan in host memory. src, dst: bytes of K and of V, (size,) uint8, from their base address on."""
    strided = np.lib.stride_tricks.as_strided
    for kv, s, d, width, height, src_pitch, dst_pitch in copies.tolist():
        if height == 1:
            dst[kv][d : d + width] = src[kv][s : s + width]
        else:
            from_last, to_last = s + (height - 1) * src_pitch + width, d + (height - 1) * dst_pitch + width
            source, target = src[kv][s:from_last], dst[kv][d:to_last]
            assert len(source) == from_last - s and len(target) == to_last - d, "a copy leaves its pool"
            strided(target, (height, width), (dst_pitch, 1))[...] = strided(source, (height, width), (src_pitch, 1))
