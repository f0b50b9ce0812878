"""Stack distances beside a plain least-recently-used cache that is run at every size."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from sglang.cli.reuse import HitCurve, ReferenceLog

# (ids of a path's blocks, how many of them are looked up)
Path = tuple[list[int], int]


def lru_hits(paths: list[Path], tokens: dict[int, int], size: int) -> float:
    """Look up, then use from the end of the path to its beginning, then evict the least recently used."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks, num_looked_up in paths:
        # A hit needs all before it.
        for block in blocks[:num_looked_up]:
            if block not in cache:
                break
            hits += tokens[block]
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while sum(tokens[block] for block in cache) > size:
            cache.popitem(last=False)
    return hits


def curve_of(paths: list[Path], tokens: dict[int, int]) -> HitCurve:
    log = ReferenceLog()
    for blocks, num_looked_up in paths:
        sizes = [tokens[block] for block in blocks]
        log.add_request(sum(sizes[:num_looked_up]), sum(sizes[:num_looked_up]))
        log.use(blocks, sizes, num_looked_up)
    return log.curve()


def test_hits_by_size() -> None:
    paths = [([1, 2, 3], 3), ([4, 5], 2), ([1, 2], 2)]
    curve = curve_of(paths, {1: 10, 2: 10, 3: 10, 4: 10, 5: 10})
    assert [curve.hits(size) for size in (0, 29, 30, 39, 40, 1000)] == [0, 0, 10, 10, 20, 20]
    assert (curve.prompt_tokens, curve.distinct_tokens, curve.most) == (70, 50, 20)


def test_blocks_of_an_answer_are_used_and_not_looked_up() -> None:
    curve = curve_of([([1, 2], 1), ([1, 2, 3], 3)], {1: 4, 2: 4, 3: 4})
    assert curve.hits(100) == 8 and curve.prompt_tokens == 16


def test_nothing_is_used() -> None:
    curve = ReferenceLog().curve()
    assert curve.hits(1e12) == curve.most == curve.distinct_tokens == 0


@pytest.mark.parametrize("seed", range(6))
def test_every_size_is_that_of_a_cache_that_is_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # A tree of prompts with two children per block; blocks have different sizes.
    tokens = {block: int(rng.integers(1, 5)) for block in range(1, 1 << 8)}
    paths: list[Path] = []
    for _ in range(300):
        leaf = int(rng.integers(1, 1 << int(rng.integers(2, 9))))
        path = [leaf >> up for up in range(leaf.bit_length() - 1, -1, -1)]
        paths.append((path, int(rng.integers(0, len(path) + 1))))
    curve = curve_of(paths, tokens)
    for size in [*range(0, 60, 3), 100, 200, 400, 2000]:
        assert curve.hits(size) == lru_hits(paths, tokens, size), f"seed {seed}, size {size}"


def test_more_uses_than_are_compared_at_once() -> None:
    rng = np.random.default_rng(1)
    paths: list[Path] = [([int(block)], 1) for block in rng.zipf(1.3, 3000) % 200]
    curve = curve_of(paths, dict.fromkeys(range(200), 1))
    for size in (1, 5, 20, 90, 200):
        assert curve.hits(size) == lru_hits(paths, dict.fromkeys(range(200), 1), size)


def test_a_sample_of_blocks_gives_nearly_the_same_curve() -> None:
    seed = 7
    rng = np.random.default_rng(seed)
    documents = [[1000 * number + place for place in range(40)] for number in range(400)]
    uses = [documents[number] for number in rng.integers(0, 400, 1500)]
    whole, sample = ReferenceLog(), ReferenceLog(1 / 8)
    chosen = {block for each in documents for block in each if rng.random() < 1 / 8}
    for path in uses:
        for log, blocks in ((whole, path), (sample, [block for block in path if block in chosen])):
            log.add_request(64 * len(path), 64 * len(path))
            log.use(blocks, [64] * len(blocks), len(blocks))
    exact, near = whole.curve(), sample.curve()
    for part in (0.1, 0.25, 0.5, 0.8, 1.0):
        size = part * exact.distinct_tokens
        difference = (near.hits(size) - exact.hits(size)) / exact.prompt_tokens
        assert abs(difference) < 0.03, f"seed {seed}, {part:.0%} of the blocks: {difference:+.3f}"
