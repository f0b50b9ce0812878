"""Plans for the copy engines: as few and as large copies as the indices allow. Pure numpy.

Knows addresses, not memory: the same plan is executed by numpy on the CPU (the tests, and `dma` without a GPU) and by
asynchronous copies on a GPU. A `PlanCache` keeps the last plans, because all layers of a load have the same one.
Imports no torch.

    pages      3 4 5 | 9 | 6 7          `merge`: a run goes on while both sides go up by one
    to         0 1 2 | 3 | 7 8          -> 3 runs per layer and component instead of 6 pages

A run of n pages is one linear copy where both sides are layer-first, else one 2-D copy: n rows, one pitch per side.
Where a run is shorter than the number of layers, rows are layers instead of pages:

    layer-first device -> page-first host, one page, 4 layers: 4 rows, pitch a layer in the source, a run in the other
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# One copy per entry: `height` rows of `width` bytes. src and dst are counted in bytes from the base address of the
# component. Rows follow each other at src_pitch and dst_pitch. With height 1 both are the width.
COPY = np.dtype(
    [
        ("component", np.int32),
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
# A 2-D copy is a call of its own, linear copies go in one call together. Of pages with so many bytes, runs of fewer
# pages are issued sooner page by page.
_IN_ONE_CALL_FROM = 32 << 10
_FEW_ROWS = 8


@dataclass(frozen=True)
class Side:
    """The places of one pool's runs, in bytes. The run of component c, of a layer and a page, is at
    base[c] + layer * layer_stride[c] + page * page_stride[c]."""

    layer_stride: tuple[int, ...]
    page_stride: tuple[int, ...]
    # base[c] - base[0] of each component, where all share one memory.
    after_first: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PoolPair:
    """The pools that pages are copied between."""

    src: Side
    dst: Side
    # Of each component of one page and one layer.
    run_bytes: tuple[int, ...]
    num_layers: int


@dataclass(frozen=True)
class _PageRuns:
    """Runs of pages that are adjacent on both sides: first pages and lengths, (n,) int64 each."""

    src_pages: np.ndarray
    dst_pages: np.ndarray
    lengths: np.ndarray

    def only(self, chosen: np.ndarray) -> _PageRuns:
        """chosen: (n,) bool."""
        return _PageRuns(self.src_pages[chosen], self.dst_pages[chosen], self.lengths[chosen])

    def single_pages(self) -> _PageRuns:
        """The same pages in runs of one page each."""
        lengths = self.lengths
        within = np.arange(int(lengths.sum()), dtype=np.int64)
        within -= np.repeat(np.cumsum(lengths) - lengths, lengths)
        src_pages, dst_pages = (np.repeat(pages, lengths) + within for pages in (self.src_pages, self.dst_pages))
        return _PageRuns(src_pages, dst_pages, np.ones_like(within))

    def split_below(self, length: int) -> _PageRuns:
        """The same pages, those of shorter runs in runs of one page each."""
        is_short = self.lengths < length
        short, long = self.only(is_short).single_pages(), self.only(~is_short)
        return _PageRuns(
            np.concatenate([long.src_pages, short.src_pages]),
            np.concatenate([long.dst_pages, short.dst_pages]),
            np.concatenate([long.lengths, short.lengths]),
        )


@dataclass(frozen=True)
class _Component:
    """One component of both pools. Strides are (source, destination), in bytes."""

    index: int
    layer_strides: tuple[int, int]
    page_strides: tuple[int, int]
    # Bytes of a run.
    width: int
    num_layers: int


def plan_copies(
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
    pools: PoolPair,
    merge: bool = True,
    max_pitch: int = MAX_PITCH,
) -> np.ndarray:
    """Copies (n,) of type COPY that move all layers of src_pages to dst_pages, (num_pages,) each.

    merge: adjacent pages become one copy. Without it every page is copied alone (`direct`, the papers' baseline).
    Layers, and components, that lie without gaps on both sides are one copy in both cases.
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
    runs = _PageRuns(src_pages[starts], dst_pages[starts], lengths)

    src, dst, run_bytes = pools.src, pools.dst, pools.run_bytes
    layers, components, widths = pools.num_layers, range(len(run_bytes)), list(run_bytes)
    if layers == 1 or src.layer_stride == dst.layer_stride == run_bytes:
        widths = [each * layers for each in run_bytes]
        layers = 1
        one_stride = len(set(src.page_stride)) == len(set(dst.page_stride)) == 1
        without_gaps = tuple(itertools.accumulate([0, *widths[:-1]]))
        if src.after_first == dst.after_first == without_gaps and one_stride:
            components, widths = range(1), [sum(widths)]
    parts = []
    for c in components:
        layer_strides, page_strides = (
            (src.layer_stride[c], dst.layer_stride[c]),
            (src.page_stride[c], dst.page_stride[c]),
        )
        parts.append(_plan_one(_Component(c, layer_strides, page_strides, widths[c], layers), runs, max_pitch))
    return np.concatenate(parts)


def _plan_one(component: _Component, runs: _PageRuns, max_pitch: int) -> np.ndarray:
    """The copies of one component."""
    layer_strides, page_strides = component.layer_strides, component.page_strides
    width, num_layers = component.width, component.num_layers
    linear = page_strides == (width, width)
    rows_of_pages = linear or max(page_strides) <= max_pitch
    rows_of_layers = num_layers > 1 and min(layer_strides) >= width and max(layer_strides) <= max_pitch
    if not rows_of_pages:
        # The pitch is too large for a 2-D copy, so that every page is copied alone.
        runs = runs.single_pages()
    elif num_layers > 1 and not rows_of_layers and not linear and width >= _IN_ONE_CALL_FROM:
        runs = runs.split_below(_FEW_ROWS)
    # The runs whose rows are layers, with one copy per page. The others have one copy per layer.
    by_layer = np.zeros(len(runs.lengths), bool) if not rows_of_layers else runs.lengths < num_layers
    parts: list[np.ndarray] = []
    if not by_layer.all():
        kept = runs.only(~by_layer)
        part = np.empty((num_layers, len(kept.lengths)), COPY)
        layer = np.arange(num_layers, dtype=np.int64)[:, None]
        part["src"] = layer * layer_strides[0] + kept.src_pages * page_strides[0]
        part["dst"] = layer * layer_strides[1] + kept.dst_pages * page_strides[1]
        n = kept.lengths
        single = (n == 1) | linear
        part["width"] = np.where(single, n * width, width)
        part["height"] = np.where(single, 1, n)
        part["src_pitch"] = np.where(single, n * width, page_strides[0])
        part["dst_pitch"] = np.where(single, n * width, page_strides[1])
        parts.append(part.reshape(-1))
    if by_layer.any():
        pages = runs.only(by_layer).single_pages()
        rows = np.empty(len(pages.lengths), COPY)
        rows["src"] = pages.src_pages * page_strides[0]
        rows["dst"] = pages.dst_pages * page_strides[1]
        rows["width"], rows["height"] = width, num_layers
        rows["src_pitch"], rows["dst_pitch"] = layer_strides
        parts.append(rows)
    result = np.concatenate(parts)
    result["component"] = component.index
    return result


@dataclass(frozen=True)
class CopyPlan:
    """The copies of a plan, and those of them that one call can enqueue. Not to be changed: it is kept."""

    # All, (n,) COPY.
    copies: np.ndarray
    # Those of several rows, (s,) COPY.
    strided: np.ndarray
    # The others, but for empty ones: (3, m) uint64, destination and source from the base addresses on, size.
    linear: np.ndarray
    # Their components, (m,).
    linear_components: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.copies.nbytes + self.strided.nbytes + self.linear.nbytes + self.linear_components.nbytes

    @staticmethod
    def of(copies: np.ndarray) -> CopyPlan:
        """copies: (n,) COPY."""
        is_strided = copies["height"] != 1
        flat = copies[~is_strided & (copies["width"] > 0)]
        linear = np.stack([flat["dst"], flat["src"], flat["width"]]).astype(np.uint64)
        return CopyPlan(copies, copies[is_strided], linear, flat["component"].astype(np.intp))

    def table(self, src: Sequence[int], dst: Sequence[int]) -> np.ndarray:
        """The linear copies as `MemcpyBatch` takes them, (3, m) uint64. src, dst: addresses of the components."""
        table = self.linear.copy()
        for row, bases in zip(table, (dst, src)):
            row += np.array(bases, np.uint64)[self.linear_components]
        return table


# What a kept plan takes besides its arrays and page numbers, about.
_ENTRY_BYTES = 2048


class PlanCache:
    """The plans that were used last, in at most max_bytes together. For any thread.

    A plan is found by the page numbers themselves, so that index arrays may be freed or changed. It fits all pools of
    the same strides, such as the layers of one pool.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # Plans with their sizes, page numbers included.
        self._plans: OrderedDict[tuple[object, ...], tuple[CopyPlan, int]] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, src_pages: np.ndarray, dst_pages: np.ndarray, pools: PoolPair, merge: bool) -> CopyPlan:
        """See `plan_copies`."""
        sides = (each for pages in (src_pages, dst_pages) for each in (pages.dtype.char, pages.tobytes()))
        key = (pools, merge, *sides)
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found[0]
        made = CopyPlan.of(plan_copies(src_pages, dst_pages, pools, merge))
        size = made.nbytes + src_pages.nbytes + dst_pages.nbytes + _ENTRY_BYTES
        if size > self._max_bytes:
            return made
        with self._lock:
            if key not in self._plans:
                self._plans[key] = made, size
                self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, (_, freed) = self._plans.popitem(last=False)
                self._num_bytes -= freed
        return made

    def check_invariants(self) -> None:
        with self._lock:
            assert self._num_bytes == sum(size for _, size in self._plans.values()) <= self._max_bytes


def execute(copies: np.ndarray, src: Sequence[np.ndarray], dst: Sequence[np.ndarray]) -> None:
    """Carry out a plan in host memory. src, dst: bytes of each component, (size,) uint8, from its base address on."""
    strided = np.lib.stride_tricks.as_strided
    for c, s, d, width, height, src_pitch, dst_pitch in copies.tolist():
        if height == 1:
            dst[c][d : d + width] = src[c][s : s + width]
        else:
            from_last, to_last = s + (height - 1) * src_pitch + width, d + (height - 1) * dst_pitch + width
            source, target = src[c][s:from_last], dst[c][d:to_last]
            assert len(source) == from_last - s and len(target) == to_last - d, "a copy leaves its pool"
            strided(target, (height, width), (dst_pitch, 1))[...] = strided(source, (height, width), (src_pitch, 1))
