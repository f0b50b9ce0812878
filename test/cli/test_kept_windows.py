"""Of which tokens layers with a window are kept, beside a walk over every token."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from sglang.cli.kept_windows import kept_share
from sglang.cli.reuse import ReferenceLog
from sglang.srt.managers.window_blocks import checkpoints


def by_tokens(paths: list[tuple[list[int], list[int], int]], reach: int) -> float:
    followers: dict[int, set[int]] = {}
    for blocks, _, _ in paths:
        for block, follower in pairwise(blocks):
            followers.setdefault(block, set()).add(follower)
    kept: dict[int, float] = {}
    sizes: dict[int, int] = {}
    for blocks, tokens, num_looked_up in paths:
        owner = [block for block, size in zip(blocks, tokens) for _ in range(size)]
        leaves = [sum(tokens), sum(tokens[:num_looked_up]), *checkpoints(sum(tokens), reach)]
        leaves += [sum(tokens[: i + 1]) for i, block in enumerate(blocks) if len(followers.get(block, ())) > 1]
        seen = {at for end in leaves for at in range(max(0, end - reach), end)}
        for block, size in zip(blocks, tokens):
            sizes[block] = size
            num_seen = sum(owner[at] == block for at in seen)
            kept[block] = max(kept.get(block, 0), num_seen)
    return sum(kept.values()) / sum(sizes.values())


@pytest.mark.parametrize("seed", range(8))
def test_as_a_walk_over_tokens(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    reach = rng.choice([1, 5, 30])
    log, paths = ReferenceLog(), []
    for _ in range(rng.randrange(1, 12)):
        # A block is known by its path, and has the same size everywhere.
        name, blocks, tokens = 1, [], []
        for _ in range(rng.randrange(1, 15)):
            name = 2 * name + rng.randrange(2)
            blocks.append(name)
            tokens.append(1 + name % 9)
        num_looked_up = rng.randrange(len(blocks) + 1)
        log.use(blocks, tokens, num_looked_up)
        paths.append((blocks, tokens, num_looked_up))
    # Parts of a block may be seen from different paths; the most of one path counts.
    assert kept_share(log, reach) == pytest.approx(by_tokens(paths, reach))


def test_nothing_is_asked() -> None:
    log = ReferenceLog()
    assert kept_share(log, 5) == 0
    log.use([], [], 0)
    assert kept_share(log, 5) == 0


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_a_sample_tells_about_the_same(rate: float) -> None:
    rng = np.random.default_rng(3)
    logs = ReferenceLog(), ReferenceLog(rate)
    for number in range(60):
        blocks = number * 1000 + np.arange(rng.integers(100, 400))
        is_sampled = rng.random(len(blocks)) < rate
        for log, some in zip(logs, (blocks, blocks[is_sampled])):
            log.use(some, [64] * len(some), len(some))
    whole, sampled = (kept_share(log, 256) for log in logs)
    assert 0.1 < whole < 0.5 and sampled == pytest.approx(whole, rel=0.2)
