"""Of which blocks storage should get layers with a window: rules compared on a trace.

    python -m benchmark.bench_window_blocks --trace FILE [--num-rows N]

Simulated: one tier that evicts what was used least recently, blocks as in the trace, no time passes. What a prompt
finds ends at the last place before which the tier has all layers with full attention, and layers with a window as far
as these reach. `WindowBlocks` has the rule that is used; a rule gives checkpoints.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from benchmark.common import print_table, write_json

from sglang.cli.reference_sources import read_trace
from sglang.cli.reuse import ReferenceLog
from sglang.srt.managers.window_blocks import checkpoints
from sglang.srt.mem_cache.block_store import longest_seen

# Tokens of the blocks of Mooncake's traces.
BLOCK = 512
# A length, and how far windows reach, in blocks -> where checkpoints end.
Checkpoints = Callable[[int, int], Iterator[int]]


def every(num_windows: int) -> Checkpoints:
    return lambda length, reach: iter(range(num_windows * reach, length, num_windows * reach))


# Rule -> its checkpoints, before which windows are stored beside those of ends. None: of all blocks.
RULES: dict[str, Checkpoints | None] = {
    "all layers": None,
    "ends alone": lambda length, reach: iter(()),
    "every 4 windows": every(4),
    "every 8 windows": every(8),
    "2 windows, or a quarter": partial(checkpoints, windows_apart=2, part_apart=4),
    "4 windows, or a quarter": partial(checkpoints, windows_apart=4, part_apart=4),
    "4 windows, or half": partial(checkpoints, windows_apart=4, part_apart=2),
    "8 windows, or all": partial(checkpoints, windows_apart=8, part_apart=1),
}


@dataclass(frozen=True)
class Outcome:
    """Per token that was asked."""

    hit_tokens: float
    # Over the bytes of a token.
    written: float


class Tier:
    """capacity: in tokens of all layers. windowed: of a token's bytes, those of layers with a window. num_seen: the
    blocks that windows reach."""

    def __init__(self, capacity: float, windowed: float, num_seen: int, rule: Checkpoints | None) -> None:
        self._room = capacity
        self._windowed = windowed
        self._num_seen = num_seen
        self._rule = rule
        self.written = 0.0
        # (block, whether of layers with a window) -> its size, from what was used least recently.
        self._kept: OrderedDict[tuple[int, bool], float] = OrderedDict()
        # Block -> the one that followed it first, and blocks that others have followed, too.
        self._next: dict[int, int] = {}
        self._parted: set[int] = set()

    def ask(self, blocks: list[int], sizes: list[float], num_looked_up: int) -> float:
        """A prompt of num_looked_up blocks, with the blocks of its answer behind it. Returns the tokens that are
        found."""
        looked_up = blocks[:num_looked_up]
        num_full = next((i for i, b in enumerate(looked_up) if (b, False) not in self._kept), num_looked_up)
        found = longest_seen([(b, True) in self._kept for b in looked_up[:num_full]], self._num_seen)
        wanted = self._wanted(blocks, num_looked_up, num_full)
        self._note_successors(blocks)
        # Ends go first: these are used first.
        for place in range(len(blocks) - 1, -1, -1):
            block, size = blocks[place], sizes[place]
            self._use((block, False), size * (1 - self._windowed), is_known=True)
            # What is computed can be stored.
            is_read = found - self._num_seen <= place < found
            if wanted[place] or is_read:
                self._use((block, True), size * self._windowed, is_known=place >= found)
        while self._room < 0:
            self._room += self._kept.popitem(last=False)[1]
        return sum(sizes[:found])

    def _use(self, key: tuple[int, bool], size: float, is_known: bool) -> None:
        if key in self._kept:
            self._kept.move_to_end(key)
        elif is_known:
            self._kept[key] = size
            self._room -= size
            self.written += size

    def _wanted(self, blocks: list[int], num_looked_up: int, num_full: int) -> np.ndarray:
        """(num_blocks,) bool: of which the rule stores layers with a window."""
        if self._rule is None:
            return np.ones(len(blocks), np.bool_)
        wanted = np.zeros(len(blocks), np.bool_)
        for end in self._rule(len(blocks), self._num_seen):
            wanted[end - self._num_seen : end] = True
        ends = [place + 1 for place, block in enumerate(blocks) if block in self._parted]
        for end in (*ends, num_full, num_looked_up, len(blocks)):
            wanted[max(0, end - self._num_seen - 1) : end] = True
        return wanted

    def _note_successors(self, blocks: list[int]) -> None:
        for block, follower in pairwise(blocks):
            if self._next.setdefault(block, follower) != follower:
                self._parted.add(block)


def run(log: ReferenceLog, tier: Tier) -> Outcome:
    hits = 0.0
    for blocks, sizes, num_looked_up in log.uses():
        hits += tier.ask(blocks.tolist(), sizes.tolist(), num_looked_up)
    return Outcome(hits / log.prompt_tokens, tier.written / log.prompt_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-rows", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--windowed", type=float, default=5 / 6, help="of the layers, those with a window")
    parser.add_argument(
        "--capacities", default="0.15,2", help="of the tier, over the bytes of all blocks of the trace in all layers"
    )
    args = parser.parse_args()
    log, _ = read_trace(args.trace, args.num_rows)
    distinct = log.curve().distinct_tokens
    rows = []
    for capacity in map(float, args.capacities.split(",")):
        for name, rule in RULES.items():
            tier = Tier(capacity * distinct, args.windowed, -(-args.window // BLOCK), rule)
            found = run(log, tier)
            rows.append(
                {
                    "capacity": capacity,
                    "rule": name,
                    "hit tokens": round(found.hit_tokens, 3),
                    "written": round(found.written, 3),
                }
            )
    print_table(f"{args.trace.name}, simulated, per token asked", rows)
    settings = {"trace": args.trace.name, "num_rows": args.num_rows, "window": args.window, "windowed": args.windowed}
    write_json("window_blocks", settings, rows)


if __name__ == "__main__":
    main()
