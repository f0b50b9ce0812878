"""Plans of `dma` and `direct`: how many copies, of what shape. test_kvcacheio_backends executes them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sgl_kernel.kvcacheio.plan import COPY, PoolPair, Side, plan_copies

RUN, LAYERS, PAGES = 64, 4, 100
LAYER_FIRST = Side((PAGES * RUN,) * 2, (RUN,) * 2, (0, LAYERS * PAGES * RUN))
PAGE_FIRST = Side((RUN,) * 2, (2 * LAYERS * RUN,) * 2, (0, LAYERS * RUN))
PAGE = 2 * LAYERS * RUN


def copies(src_pages: list[int], dst_pages: list[int], src: Side, dst: Side, **options) -> list[tuple]:
    layers = options.pop("num_layers", LAYERS)
    plan = plan_copies(np.array(src_pages), np.array(dst_pages), PoolPair(src, dst, (RUN, RUN), layers), **options)
    assert plan.dtype == COPY
    return plan.tolist()


def test_a_run_of_layer_first_pages_is_one_linear_copy():
    plan = copies([3, 4, 5], [7, 8, 9], LAYER_FIRST, LAYER_FIRST, num_layers=1)
    assert plan == [(kv, 3 * RUN, 7 * RUN, 3 * RUN, 1, 3 * RUN, 3 * RUN) for kv in range(2)]


def test_a_run_of_page_first_pages_is_strided_per_layer():
    plan = copies([3, 4, 5], [7, 8, 9], PAGE_FIRST, LAYER_FIRST, num_layers=1)
    assert plan == [(kv, 3 * PAGE, 7 * RUN, RUN, 3, PAGE, RUN) for kv in range(2)]


def test_both_sides_must_go_up_by_one():
    assert len(copies([3, 4, 5, 6], [7, 8, 20, 21], PAGE_FIRST, LAYER_FIRST, num_layers=1)) == 2 * 2
    assert len(copies([3, 2, 1], [7, 8, 9], PAGE_FIRST, LAYER_FIRST, num_layers=1)) == 2 * 3
    assert len(copies([3, 3, 3], [7, 8, 9], PAGE_FIRST, LAYER_FIRST, num_layers=1)) == 2 * 3


def test_direct_merges_nothing():
    plan = copies([3, 4, 5], [7, 8, 9], LAYER_FIRST, LAYER_FIRST, num_layers=1, merge=False)
    assert len(plan) == 2 * 3 and {(c[3], c[4]) for c in plan} == {(RUN, 1)}


def test_rows_are_layers_where_a_run_is_shorter_than_the_layers():
    one = copies([3], [7], LAYER_FIRST, PAGE_FIRST)
    assert one == [(kv, 3 * RUN, 7 * PAGE, RUN, LAYERS, PAGES * RUN, RUN) for kv in range(2)]
    assert len(copies(list(range(4)), list(range(4)), LAYER_FIRST, PAGE_FIRST)) == 2 * LAYERS
    long = copies(list(range(50)), list(range(50)), LAYER_FIRST, PAGE_FIRST)
    assert len(long) == 2 * LAYERS and {(c[3], c[4], c[5], c[6]) for c in long} == {(RUN, 50, RUN, PAGE)}


def test_short_runs_of_large_pages_go_together_where_rows_cannot_be_layers():
    run = 32 << 10
    layer_first = Side((PAGES * run,), (run,))
    page_first = Side((run,), (LAYERS * run,))
    pages = np.array([*range(8), 20, 21, 22, 40])
    for width, lengths in ((run, {8: 1, 1: 4}), (run // 2, {8: 1, 3: 1, 1: 1})):
        pools = PoolPair(layer_first, page_first, (width,), LAYERS)
        heights = plan_copies(pages, pages, pools, max_pitch=PAGES * run - 1)["height"]
        assert Counter(heights.tolist()) == {height: n * LAYERS for height, n in lengths.items()}


def test_whole_pages_without_gaps_are_one_copy():
    assert copies([3, 4, 9], [0, 1, 2], PAGE_FIRST, PAGE_FIRST) == [
        (0, 3 * PAGE, 0, 2 * PAGE, 1, 2 * PAGE, 2 * PAGE),
        (0, 9 * PAGE, 2 * PAGE, PAGE, 1, PAGE, PAGE),
    ]
    assert len(copies([3, 4, 9], [0, 1, 2], PAGE_FIRST, PAGE_FIRST, merge=False)) == 3


def test_k_and_v_in_memory_of_their_own_are_two_copies():
    apart = Side(PAGE_FIRST.layer_stride, PAGE_FIRST.page_stride)
    assert [c[0] for c in copies([3, 4], [0, 1], apart, PAGE_FIRST)] == [0, 1]


def test_k_and_v_with_page_strides_of_their_own_are_two_copies():
    odd = Side((RUN, RUN), (PAGE, 2 * PAGE), (0, LAYERS * RUN))
    assert [c[0] for c in copies([3], [0], odd, PAGE_FIRST)] == [0, 1]


def test_no_pitch_is_larger_than_a_gpu_allows():
    for pages in (list(range(10)), [3], [5, 1, 2, 9, 8]):
        for src, dst in ((LAYER_FIRST, PAGE_FIRST), (PAGE_FIRST, LAYER_FIRST), (PAGE_FIRST, PAGE_FIRST)):
            for limit in (RUN, PAGE - 1, PAGE, PAGES * RUN - 1, PAGES * RUN):
                for layers in (1, LAYERS):
                    plan = copies(pages, pages, src, dst, max_pitch=limit, num_layers=layers)
                    assert sum(c[3] * c[4] for c in plan) == len(pages) * layers * 2 * RUN
                    for _, _, _, width, height, src_pitch, dst_pitch in plan:
                        assert height == 1 or width <= min(src_pitch, dst_pitch) <= max(src_pitch, dst_pitch) <= limit


@pytest.mark.parametrize("seed", range(20), ids="seed{}".format)
def test_every_byte_is_written_once_whatever_the_limits(seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("sgl_kernel.kvcacheio.plan._IN_ONE_CALL_FROM", int(rng.choice([RUN, 2 * RUN])))
    sides = [LAYER_FIRST, PAGE_FIRST]
    src, dst = sides[rng.integers(2)], sides[rng.integers(2)]
    n = int(rng.integers(1, 30))
    pages = [np.sort(rng.permutation(40)[:n]) if rng.random() < 0.5 else rng.permutation(40)[:n] for _ in range(2)]
    limit = int(rng.choice([RUN, PAGE, PAGES * RUN]))
    plan = plan_copies(pages[0], pages[1], PoolPair(src, dst, (RUN, RUN), LAYERS), bool(rng.integers(2)), limit)
    moved = {}
    for kv, s, d, width, height, src_pitch, dst_pitch in plan.tolist():
        for row in range(height):
            for byte in range(0, width, RUN):
                source = s + row * src_pitch + byte + src.after_first[kv]
                target = d + row * dst_pitch + byte + dst.after_first[kv]
                assert target not in moved
                moved[target] = source
    wanted = {}
    for a, b in zip(pages[0].tolist(), pages[1].tolist()):
        for layer in range(LAYERS):
            for kv in range(2):
                at = [side.layer_stride[0] * layer + side.page_stride[0] * p for side, p in ((src, a), (dst, b))]
                wanted[at[1] + dst.after_first[kv]] = at[0] + src.after_first[kv]
    assert moved == wanted


def test_nothing_to_copy_is_no_copy():
    assert copies([], [], PAGE_FIRST, LAYER_FIRST) == []
