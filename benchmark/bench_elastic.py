"""Resizing a pool that lends memory: block-major (the elastic pool) against layer-major, over the size of the pool.

A worker with a full pool lends its last slab and gets it back. *Resize* is the cost of the layout. For the
block-major pool, that is the frame table. For the layer-major one, which has to be contiguous
(SwiftCache Figure 5), all layers but the first move, and the benchmark checks that every page has survived. The work
of both layouts is listed apart: drain (drop the pages of the slab, with no transfer to wait for), scrub, and the
borrower's map and unmap. The numbers are the fastest of the rounds, because the machine has other work. The variants
take turns.

    python benchmark/bench_elastic.py [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
from typing import Any

import numpy as np
import torch
from common import print_table, timed, write_json

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.slabs import SlabRange

MIB = 1 << 20
GRANULARITY = 2 * MIB  # as on a GPU
# A Qwen3-8B's heads and as many layers, pages of 1 token in bfloat16: 144 KiB per page.
LAYOUT = PageLayout.kv(1, 36, 8, 128, torch.bfloat16)


class LayerMajorPool:
    """(2 * num_layers, num_pages, bytes of a run), contiguous for the current number of pages, at the start of memory
    that is large enough for max_pages. Resizing moves all layers but the first."""

    def __init__(self, max_pages: int, num_layers: int, run_bytes: int) -> None:
        self.num_pages = max_pages
        self.num_layers = num_layers
        self.run_bytes = run_bytes
        self.memory = np.zeros(2 * num_layers * max_pages * run_bytes, np.uint8)

    def kv(self) -> np.ndarray:
        used = self.memory[: 2 * self.num_layers * self.num_pages * self.run_bytes]
        return used.reshape(2 * self.num_layers, self.num_pages, self.run_bytes)

    def resize(self, num_pages: int) -> None:
        """The first min(old, new) pages keep their content. New pages hold the memory's old bytes."""
        before, after = self.num_pages * self.run_bytes, num_pages * self.run_bytes
        base, kept = self.memory.ctypes.data, min(before, after)
        layers = range(1, 2 * self.num_layers)
        # Shrinking begins at the first layer, growing at the last, so that no layer is overwritten before it has
        # moved.
        for layer in layers if after < before else reversed(layers):
            ctypes.memmove(base + layer * after, base + layer * before, kept)
        self.num_pages = num_pages


class BlockMajor:
    """A full pool whose last slab is lent and taken back, with its frame table."""

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self.pool = ElasticPool(SlabRange.owned(num_slabs, slab_bytes), LAYOUT)
        self.table = FrameTable(self.pool.num_pages, lowest_first=True)
        frames = self.table.allocate(self.pool.num_pages)
        assert frames is not None
        self.table.transition(frames, FrameState.HELD, FrameState.CACHED)
        self.pool.slabs.memory.fill(1)
        self.borrower = SlabRange(1, slab_bytes)
        self.last = num_slabs - 1

    def drain(self) -> None:
        boundary = self.last * self.pool.slab_pages
        self.table.free_after(
            np.flatnonzero(self.table.state[boundary:] == FrameState.CACHED).astype(np.int32) + boundary,
            FrameState.CACHED,
            fence=-1,
        )
        self.table.reap(0)

    def shrink(self) -> None:
        self.table.lend(self.pool.frames_of(self.last))

    def scrub(self) -> None:
        self.pool.slabs.scrub(self.last)

    def map(self) -> None:
        fd = os.dup(self.pool.slabs.fileno(self.last))
        self.borrower.map(0, fd)
        os.close(fd)

    def use(self) -> None:
        self.borrower.slab(0).fill(2)

    def unmap(self) -> None:
        self.borrower.unmap(0)

    def grow(self) -> None:
        self.table.reclaim(self.pool.frames_of(self.last))

    def refill(self) -> None:
        """As before: all pages in use."""
        frames = self.table.allocate(self.pool.slab_pages)
        assert frames is not None and frames.tolist() == self.pool.frames_of(self.last).tolist()
        self.table.transition(frames, FrameState.HELD, FrameState.CACHED)
        self.table.take_freed()
        self.table.check_invariants()


def measure(pool_bytes: int, rounds: int) -> dict[str, Any]:
    num_layers, run_bytes, page_bytes = LAYOUT.num_layers, LAYOUT.run_bytes[0], LAYOUT.page_bytes
    slab_bytes = math.lcm(page_bytes, GRANULARITY)
    num_slabs = pool_bytes // slab_bytes
    block = BlockMajor(num_slabs, slab_bytes)
    layer = LayerMajorPool(block.pool.num_pages, num_layers, run_bytes)
    kept_pages = block.pool.num_pages - block.pool.slab_pages
    marks = (np.arange(2 * num_layers)[:, None] * 31 + np.arange(layer.num_pages)) % 251
    layer.kv()[:] = marks[:, :, None]
    copy_from, copy_to = np.ones(layer.memory.nbytes, np.uint8), np.ones(layer.memory.nbytes, np.uint8)
    steps = ("drain", "shrink", "scrub", "map", "use", "unmap", "grow", "refill")
    times: dict[str, list[float]] = {name: [] for name in (*steps, "layer shrink", "layer grow", "memcpy")}
    for _ in range(rounds):
        for name in steps:
            times[name].append(timed(getattr(block, name)))
        times["layer shrink"].append(timed(lambda: layer.resize(kept_pages)))
        assert (layer.kv()[:, :, 0] == marks[:, :kept_pages]).all(), "a page got lost"
        times["layer grow"].append(timed(lambda: layer.resize(block.pool.num_pages)))
        assert (layer.kv()[:, :kept_pages, -1] == marks[:, :kept_pages]).all(), "a page got lost"
        layer.kv()[:] = marks[:, :, None]
        times["memcpy"].append(timed(lambda: np.copyto(copy_to, copy_from)))
    moved = (2 * num_layers - 1) * kept_pages * run_bytes
    best = {name: min(samples) for name, samples in times.items()}
    resize, baseline = best["shrink"] + best["grow"], best["layer shrink"] + best["layer grow"]
    return {
        "MiB": num_slabs * slab_bytes // MIB,
        "pages": block.pool.num_pages,
        "slab, MiB": slab_bytes // MIB,
        "block-major: shrink, us": best["shrink"] * 1e6,
        "grow, us": best["grow"] * 1e6,
        "layer-major: shrink, ms": best["layer shrink"] * 1e3,
        "grow, ms": best["layer grow"] * 1e3,
        "layer / block": baseline / resize,
        "shrink / memcpy of the moved": best["layer shrink"] / (best["memcpy"] * moved / layer.memory.nbytes),
        "drain, us": best["drain"] * 1e6,
        "scrub, ms": best["scrub"] * 1e3,
        "map, us": best["map"] * 1e6,
        "unmap, us": best["unmap"] * 1e6,
        "both resizes, s": resize,
        "both resizes, layer-major, s": baseline,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small pools, fewer rounds")
    args = parser.parse_args()
    sizes = (36, 72, 144) if args.quick else (72, 144, 288, 576, 1152)
    rows = [measure(size * MIB, 3 if args.quick else 15) for size in sizes]
    for row in rows:
        row["block-major, times the first"] = row["both resizes, s"] / rows[0]["both resizes, s"]
        name = "both resizes, layer-major, s"
        row["layer-major, times the first"] = row[name] / rows[0][name]
    shown = [{name: value for name, value in row.items() if not name.startswith("both")} for row in rows]
    print_table("Resize by one slab", shown)
    write_json("bench_elastic", vars(args), rows)


if __name__ == "__main__":
    main()
