"""`HybridPages`: the pages of a pool whose layers with a window have memory of their own, with fewer pages.

    memory    | layers with full attention: num_pages | layers with a window: num_windowed_pages |

They overlap where a border moves between them, see border_slabs.py.

Owns no memory. A range of layers of one kind is pages like any other's; the pages of all layers have no common
numbers, and no view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.page_layout import PageLayout


class HybridPages:
    """Takes the place of `KVPages` in a pool. windowed: of each layer, whether it has a window.

    full, of_windows: the layers of each kind, in order.
    """

    def __init__(self, full: KVPages, of_windows: KVPages, windowed: Sequence[bool]) -> None:
        assert (full.num_layers, of_windows.num_layers) == (len(windowed) - sum(windowed), sum(windowed))
        self.full = full
        self.of_windows = of_windows
        self.windowed = tuple(windowed)

    @property
    def device(self) -> torch.device:
        return self.full.device

    @property
    def is_cuda(self) -> bool:
        return self.full.is_cuda

    @property
    def num_layers(self) -> int:
        return len(self.windowed)

    @property
    def run_bytes(self) -> tuple[int, ...]:
        """See `KVPages`; alike in all layers."""
        return self.full.run_bytes

    def part(self, layers: range) -> KVPages:
        """Some layers that follow each other and are of one kind."""
        is_windowed = self.windowed[layers.start]
        assert set(self.windowed[layers.start : layers.stop]) == {is_windowed}, f"layers {layers} of both kinds"
        return self.of_kind(layers, is_windowed)

    def of_kind(self, layers: range, is_windowed: bool) -> KVPages:
        """Those of some layers that are of one kind."""
        first, end = (self.windowed[:place].count(is_windowed) for place in (layers.start, layers.stop))
        return (self.of_windows if is_windowed else self.full).part(range(first, end))


def regions_of(
    layout: PageLayout, num_pages: int, windowed: Sequence[bool], num_windowed_pages: int
) -> list[tuple[int, PageLayout]]:
    """Of each part of a pool's memory, how many pages it has and what they hold: one part for all layers, or with
    num_windowed_pages one for each kind."""
    if not num_windowed_pages:
        return [(num_pages, layout)]
    assert len(windowed) == layout.num_layers, f"{len(windowed)} kinds of {layout.num_layers} layers"
    num_windowed = sum(windowed)
    return [
        (num_pages, replace(layout, num_layers=layout.num_layers - num_windowed)),
        (num_windowed_pages, replace(layout, num_layers=num_windowed)),
    ]


def runs_alike(kinds: Sequence[bool]) -> list[range]:
    """The longest runs of layers of one kind. kinds: of each layer."""
    runs, start = [], 0
    for _, alike in groupby(kinds):
        runs.append(range(start, start + len(list(alike))))
        start = runs[-1].stop
    return runs
