"""The free lists, with exact frames; random operations are in test_frame_table.py."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.free_frames import FreeBlocks, FreeList, FreeLowest, FreeStack


def blocks_with_free(num_pages: int, *frames: int) -> FreeBlocks:
    """Blocks of four frames of which exactly these are free."""
    free = FreeBlocks(num_pages, 4)
    free.take(num_pages)
    free.give(np.array(frames, np.int32))
    return free


def take(free: FreeBlocks, n: int) -> list[int]:
    before = set(free.frames().tolist())
    frames = free.take(n)
    assert frames.dtype == np.int32 and frames.base is None
    assert before - set(free.frames().tolist()) == set(frames.tolist()) and len(set(frames.tolist())) == n
    return frames.tolist()


def test_a_fresh_pool_hands_out_whole_blocks_in_order():
    free = FreeBlocks(20, 4)
    assert take(free, 10) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert take(free, 4) == [12, 13, 14, 15], "a whole block, though two frames were free before it"
    assert take(free, 1) == [10] and take(free, 0) == []
    assert take(free, 2) == [16, 17], "it does not fit into the broken block"
    assert take(free, 3) == [18, 19, 11], "no block has three"


def test_a_rest_goes_where_it_fits_best_and_adjacent():
    assert take(blocks_with_free(16, 0, 1, 2, 4, 6, 7, 9, 10), 2) == [9, 10], "that block has no more"
    assert take(blocks_with_free(16, 0, 1, 2, 4, 6, 7), 2) == [0, 1]
    assert take(blocks_with_free(16, 4, 6, 7), 2) == [6, 7], "not 4 and 6"
    assert take(blocks_with_free(16, 4, 7), 2) == [4, 7]
    assert take(blocks_with_free(16, 0, 1, 2, 3, 8), 2) == [0, 1], "breaks a block, as no broken one has two"


def test_blocks_come_from_the_run_that_fits():
    whole = [*range(8), *range(12, 16), *range(20, 32)]  # blocks 0, 1; 3; 5, 6, 7
    for n, first in ((1, 12), (2, 0), (3, 20)):
        assert take(blocks_with_free(40, *whole), 4 * n) == list(range(first, first + 4 * n))
    assert take(blocks_with_free(40, *whole[:8], *whole[12:]), 4) == [0, 1, 2, 3], "the front of a longer run"
    # Four: no run has as many; a run of two, then exactly two of the three.
    assert take(blocks_with_free(40, *whole), 16) == [*range(8), *range(20, 28)]


def test_when_no_block_is_whole_the_fullest_come_first():
    free = blocks_with_free(16, 0, 4, 5, 6, 8, 9, 13)
    assert take(free, 5) == [4, 5, 6, 8, 9]
    assert sorted(take(free, 2)) == [0, 13]


def test_whole_blocks_and_broken_ones_together():
    assert take(blocks_with_free(16, 1, 4, 5, 6, 7, 13), 6) == [4, 5, 6, 7, 13, 1]
    assert take(blocks_with_free(16, 1, 2, 4, 5, 6, 7, 13), 6) == [4, 5, 6, 7, 1, 2]


@pytest.mark.parametrize("num_pages", [1, 3, 4, 5, 11])
def test_a_short_last_block(num_pages: int):
    free = FreeBlocks(num_pages, 4)
    assert sorted(take(free, num_pages)) == list(range(num_pages))
    free.give(np.arange(num_pages, dtype=np.int32)[::-1])
    assert len(free.frames()) == num_pages


@pytest.mark.parametrize("block", [64, 256, 300])
def test_blocks_of_other_sizes(block: int):
    """The counts are of another type from 256 on; the comparison by wrapping must hold in each."""
    free = FreeBlocks(10 * block, block)
    assert take(free, block - 1) == list(range(block - 1))
    assert take(free, 1) == [block - 1], "best fit, among blocks that are empty, full and nearly so"
    free.give(np.arange(block - 1, dtype=np.int32))
    assert take(free, block - 1) == list(range(block - 1)), "the broken one, not a whole one"
    assert take(free, 2 * block) == list(range(block, 3 * block))


def test_equal_histories_give_equal_frames():
    def history(seed: int) -> list[list[int]]:
        rng, table, held = random.Random(seed), FrameTable(500, 8), []
        taken = []
        for done in range(200):
            frames = table.allocate(rng.randrange(40))
            if frames is not None:
                held.append(frames)
                taken.append(frames.tolist())
            elif held:
                table.free_after(held.pop(rng.randrange(len(held))), FrameState.HELD, done)
                table.reap(done + 1)
        return taken

    assert history(3) == history(3) != history(4)


def test_after_churn_most_blocks_are_one_run():
    """The stack leaves half as many; benchmark/bench_frames.py has the numbers."""

    def share(block_pages: int) -> float:
        rng, table, held = random.Random(1), FrameTable(8192, block_pages), []
        for _ in range(2000):
            n = rng.choice((64, 64 * rng.randint(1, 8), rng.randint(1, 400)))
            while table.num_free < n + 800:
                table.free_after(held.pop(rng.randrange(len(held))), FrameState.HELD, -1)
                table.reap(0)
            frames = table.allocate(n)
            assert frames is not None
            held.append(frames)
        table.check_invariants()
        pieces = [f[i : i + 64] for f in held for i in range(0, len(f) - 63, 64)]
        return sum(bool((np.diff(p) == 1).all()) for p in pieces) / len(pieces)

    assert share(64) > 0.9 > 0.6 > share(1)


def test_the_lowest_come_first_however_they_came_back():
    free = FreeLowest(10)
    assert free.take(4).tolist() == [0, 1, 2, 3]
    free.give(np.array([2, 0], np.int32))
    frames = free.take(3)
    assert frames.tolist() == [0, 2, 4] and frames.dtype == np.int32
    free.remove(np.array([5, 9], np.int32))
    assert free.take(0).tolist() == [] and free.take(3).tolist() == [6, 7, 8] and len(free.frames()) == 0
    assert free.take(0).tolist() == []


def test_the_lowest_across_groups():
    """Groups are of 1,024 frames; those without a free one are passed over."""
    free = FreeLowest(5000)
    assert free.take(4500).tolist() == list(range(4500))
    free.give(np.array([4100, 1023, 1024, 7], np.int32))
    assert free.take(6).tolist() == [7, 1023, 1024, 4100, 4500, 4501]
    assert free.take(498).tolist() == list(range(4502, 5000))


@pytest.mark.parametrize("free", [FreeStack(9), FreeBlocks(9, 4), FreeLowest(9)], ids=lambda f: type(f).__name__)
def test_what_is_removed_is_not_handed_out(free: FreeList):
    free.remove(np.array([8, 3, 4], np.int32))
    assert sorted(free.frames().tolist()) == [0, 1, 2, 5, 6, 7]
    free.give(np.array([4], np.int32))
    assert sorted(free.take(7).tolist()) == [0, 1, 2, 4, 5, 6, 7]
