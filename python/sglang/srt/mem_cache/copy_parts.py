"""`CopyPart`: layers of two pools that one copy takes, and in which parts a link loads and backs up.

Layers of one kind, with a window or without, have common page numbers in a divided pool (`HybridPages`), and a load
may leave out those with a window. Then what a part takes has one kind. Loads by a kernel, a number is a part:

    layers; w: with a window       w w w w w f w w w w w f
    both pools are divided         1 2 3 3 4 5 4 4 4 6 6 7
    one of them is; none is, and   1 2 3 3 4 5 6 6 6 7 7 8
      some layers are left out
    none is                        1 2 3 3 4 4 4 4 5 5 5 5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.hybrid_pages import HybridPages, runs_alike

# Layers of a load that one launch of a kernel copies; the first are few, because a forward pass waits for them. A
# launch begins when the kernel that holds the multiprocessors ends: beside large products of matrices a load with a
# launch per layer got 7 of 48 GB/s on an H200.
LAYERS_AT_ONCE = 4


@dataclass(frozen=True)
class CopyPart:
    """layers: of the model. of_windows: whether they have a window, where that matters."""

    layers: tuple[int, ...]
    of_windows: bool
    # These layers on the device, or the host for copies from peers, and below it.
    above: KVPages
    below: KVPages


def copy_parts(
    above: KVPages | HybridPages, below: KVPages | HybridPages, layers: range, windowed: Sequence[bool] = ()
) -> list[CopyPart]:
    """As few as take some layers that follow each other. windowed: of each layer of the model, whether it has a
    window; none: all are alike, which those of a divided pool are not."""
    kinds = windowed[layers.start : layers.stop] or (False,) * len(layers)
    if isinstance(above, HybridPages) and isinstance(below, HybridPages):
        return [
            CopyPart(
                tuple(layer for layer, of_windows in zip(layers, kinds, strict=True) if of_windows == kind),
                kind,
                above.of_kind(layers, kind),
                below.of_kind(layers, kind),
            )
            for kind in dict.fromkeys(kinds)
        ]
    runs = [range(layers.start + run.start, layers.start + run.stop) for run in runs_alike(kinds)]
    return [CopyPart(tuple(run), kinds[run.start - layers.start], above.part(run), below.part(run)) for run in runs]


def load_parts(
    above: KVPages | HybridPages, below: KVPages | HybridPages, most: int, windowed: Sequence[bool] = ()
) -> list[CopyPart]:
    """The parts of a load, in order. most: layers of a part."""
    groups = layer_groups(above.num_layers, most, windowed)
    return [part for layers in groups for part in copy_parts(above, below, layers, windowed)]


def layer_groups(num_layers: int, most: int, kinds: Sequence[Any] = ()) -> list[range]:
    """Layers that are loaded one after the other: of each kind one, one, and then twice as many each time, up to
    `most`. kinds: of each layer; none: all are alike."""
    groups: list[range] = []
    end = 0
    while end < num_layers:
        start, size, counts = end, min(most, 1 << max(len(groups) - 1, 0)), Counter[Any]()
        while end < num_layers and counts[kind := kinds[end] if kinds else None] < size:
            counts[kind] += 1
            end += 1
        groups.append(range(start, end))
    return groups
