"""Frames of the host pool after churn: how many blocks of 64 tokens are one run of memory, and the cost of a frame.

Allocations of realistic sizes are made and freed in random order until every frame has been used many times, with the
free list as a stack and as whole blocks. A block that is one run is read from disk with one buffer, and moved to the
device as one piece. No tree and no memory: frames alone.

    python benchmark/bench_frames.py [--quick]
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np
from common import percentiles, print_table, write_json

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable

BLOCK = 64
# Name -> frames per block, and whether the table is told where in a block an allocation begins.
VARIANTS = {"stack": (1, False), "whole blocks": (BLOCK, False), "cut at borders": (BLOCK, True)}


class Churn:
    """A table in use. A *piece* is the allocation of one request, backup or fetch: frames, and the place of its first
    token within a block."""

    def __init__(self, num_pages: int, block_pages: int, tell: bool, used: float, seed: int) -> None:
        self.tell = tell
        self.table = FrameTable(num_pages, block_pages)
        self.limit = int(num_pages * used)
        self.rng = random.Random(seed)
        self.pieces: list[tuple[np.ndarray, int]] = []
        self.used = 0
        self.allocate_s: dict[int, list[float]] = {}
        self.free_s: list[float] = []
        self.turned_over = 0

    def size(self) -> int:
        kind = self.rng.random()
        if kind < 0.3:
            return BLOCK  # published by a decoding request
        if kind < 0.5:
            return BLOCK * self.rng.randint(1, 32)  # fetched from storage
        if kind < 0.6:
            return 1000  # always alike, to be timed
        return min(2048, int(self.rng.lognormvariate(5.5, 1.2)) + 1)  # a chunk, or what is new of a short prompt

    def step(self) -> None:
        n = self.size()
        offset = self.rng.choice((0, self.rng.randrange(BLOCK)))
        while self.used + n > self.limit:
            self.give_back()
        start = time.perf_counter()
        frames = self.table.allocate(n, first_page=offset if self.tell else 0)
        self.allocate_s.setdefault(n, []).append(time.perf_counter() - start)
        assert frames is not None
        self.used += n
        self.turned_over += n
        self.pieces.append((frames, offset))

    def give_back(self) -> None:
        """Free a piece, or its tail, because eviction goes from the leaves upwards."""
        at = self.rng.randrange(len(self.pieces))
        self.pieces[at], self.pieces[-1] = self.pieces[-1], self.pieces[at]
        frames, offset = self.pieces.pop()
        keep = self.rng.choice((0, len(frames) // 2))
        if keep:
            self.pieces.append((frames[:keep], offset))
        start = time.perf_counter()
        self.table.free_after(frames[keep:], FrameState.HELD, -1)
        self.table.reap(0)
        seconds = time.perf_counter() - start
        self.table.take_freed()
        if len(frames) - keep == 1000:
            self.free_s.append(seconds)
        self.used -= len(frames) - keep

    def blocks(self) -> tuple[int, int, int]:
        """Whole blocks in use, those that are one ascending run, and runs in all of them."""
        total = whole = runs = 0
        for frames, offset in self.pieces:
            first = -offset % BLOCK
            num = max(0, (len(frames) - first) // BLOCK)
            if num:
                breaks = (np.diff(frames[first : first + num * BLOCK].reshape(num, BLOCK), axis=1) != 1).sum(1)
                total += num
                whole += int((breaks == 0).sum())
                runs += num + int(breaks.sum())
        return total, whole, runs


def measure(num_pages: int, used: float, rounds: int, seed: int) -> list[dict[str, Any]]:
    churns = {name: Churn(num_pages, *variant, used, seed) for name, variant in VARIANTS.items()}
    while any(c.turned_over < rounds * num_pages for c in churns.values()):
        for churn in churns.values():  # by turns, since machines are noisy
            for _ in range(50):
                churn.step()
    rows = []
    for name, churn in churns.items():
        churn.table.check_invariants()
        total, whole, runs = churn.blocks()

        def us(samples: list[float]) -> float:
            return percentiles(samples[len(samples) // 2 :], 50)[0] * 1e6  # the second half: a pool that is worn in

        rows.append(
            {
                "frames": num_pages,
                "in use": f"{used:.0%}",
                "free list": name,
                "blocks in one run %": 100 * whole / total,
                "runs per block": runs / total,
                "allocate 64, us": us(churn.allocate_s[BLOCK]),
                "allocate 1,000, us": us(churn.allocate_s[1000]),
                "free 1,000, us": us(churn.free_s),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size of pool, fewer rounds")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = []
    pools = [(262_144, 0.9)] if args.quick else [(262_144, 0.8), (262_144, 0.9), (262_144, 0.98), (2_097_152, 0.9)]
    for num_pages, used in pools:
        rows += measure(num_pages, used, 5 if args.quick else 20, args.seed)
    print_table("Frames after churn, page size 1", rows)
    write_json("bench_frames", vars(args), rows)


if __name__ == "__main__":
    main()
