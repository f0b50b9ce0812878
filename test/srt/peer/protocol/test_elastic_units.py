"""Units, Algorithm 1, the demand window and the sizes of the layer stream cache, over plain numbers."""

from __future__ import annotations

import math
import random

import pytest

from sglang.srt.peer.protocol.elastic_units import (
    DemandWindow,
    ElasticUnit,
    elastic_unit,
    layer_stream_sizes,
    scale_down,
    scale_up,
    stride_bytes,
)

KIB, MIB = 1 << 10, 1 << 20
# SwiftCache Table 2, page size 16, float16: 2 * layers * 16 * heads * 128 * 2.
LWM, QWEN_8B, QWEN_14B, QWEN_32B = (
    2 * layers * 16 * heads * 128 * 2 for layers, heads in ((32, 32), (36, 8), (40, 8), (64, 8))
)


def test_the_sizes_of_the_papers_models():
    assert [size / 16 / MIB for size in (LWM, QWEN_8B, QWEN_14B, QWEN_32B)] == [0.5, 0.140625, 0.15625, 0.25]


@pytest.mark.parametrize(
    "lender, borrower, slab_mib, pages",
    [
        (QWEN_8B, LWM, 72, (32, 9)),  # lcm of 2.25 and 8 MiB
        (QWEN_14B, LWM, 40, (16, 5)),  # of 2.5 and 8
        (QWEN_14B, QWEN_8B, 90, (36, 40)),  # of 2.5, 2.25 and 2
        (QWEN_32B, QWEN_32B, 4, (1, 1)),
    ],
)
def test_the_unit_is_the_least_common_multiple_in_bytes(lender: int, borrower: int, slab_mib: int, pages):
    unit = elastic_unit(lender, borrower, 2 * MIB, max_slab_bytes=128 * MIB, padded_slab_bytes=32 * MIB)
    assert unit.slab_bytes == slab_mib * MIB and (unit.lender_pages, unit.borrower_pages) == pages
    assert (unit.lender_padding, unit.borrower_padding) == (0, 0)


def test_small_pages_fill_the_granularity():
    unit = elastic_unit(3 * KIB, 4 * KIB, 4 * KIB, MIB, MIB)
    assert (unit.slab_bytes, unit.lender_pages, unit.borrower_pages) == (12 * KIB, 4, 3)
    assert elastic_unit(256, 512, 4096, MIB, MIB) == ElasticUnit(4096, 256, 512)


def test_a_huge_multiple_is_padded_at_the_borrower_only():
    # lcm(2.25, 2.5, 2) = 90 MiB. The lender's own is lcm(2.5, 2) = 10.
    unit = elastic_unit(QWEN_14B, QWEN_8B, 2 * MIB, max_slab_bytes=64 * MIB, padded_slab_bytes=32 * MIB)
    assert unit.slab_bytes == 40 * MIB and (unit.lender_pages, unit.lender_padding) == (16, 0)
    assert (unit.borrower_pages, unit.borrower_padding) == (17, 1.75 * MIB)


def test_the_target_gives_way_to_the_permitted_size():
    unit = elastic_unit(QWEN_14B, QWEN_8B, 2 * MIB, max_slab_bytes=38 * MIB, padded_slab_bytes=36 * MIB)
    assert unit.slab_bytes == 30 * MIB and unit.lender_padding == 0, "40 would be too large"


def test_both_are_padded_where_the_lenders_own_multiple_is_too_large():
    lender, borrower = 7 * 64 * KIB + 512, 5 * 64 * KIB
    unit = elastic_unit(lender, borrower, 2 * MIB, max_slab_bytes=16 * MIB, padded_slab_bytes=7 * MIB)
    assert unit.slab_bytes == 8 * MIB, "the multiple of 2 MiB above the target"
    assert (unit.lender_pages, unit.borrower_pages) == (18, 25)
    assert 0 < unit.lender_padding < lender and 0 < unit.borrower_padding < borrower


def test_a_padded_slab_holds_at_least_one_page_of_each():
    unit = elastic_unit(3 * MIB, 100 * MIB + 4096, 2 * MIB, max_slab_bytes=128 * MIB, padded_slab_bytes=MIB)
    assert unit.slab_bytes == 102 * MIB and (unit.lender_pages, unit.borrower_pages) == (34, 1)


def test_what_cannot_work_says_what_would():
    with pytest.raises(ValueError, match=r"9,000,000 bytes.* needs slabs of 10,485,760, but 8,388,608 are permitted"):
        elastic_unit(MIB, 9_000_000, 2 * MIB, 8 * MIB, 4 * MIB)
    with pytest.raises(ValueError, match="at least 8 and at most 4 bytes"):
        elastic_unit(1, 1, 1, 4, 8)
    with pytest.raises(ValueError, match="at least 1 byte"):
        elastic_unit(0, 1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"4,000 bytes holds no page of 10 \(lender\) or 4,096"):
        ElasticUnit(4000, 10, 4096)
    with pytest.raises(ValueError, match="pages of 0 and 1 bytes"):
        ElasticUnit(4000, 0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_random_units_keep_their_promises(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds = set()
    for _ in range(500):
        granularity = rng.choice((1, 64, 4096))
        lender, borrower = rng.randrange(1, 3000) * rng.choice((1, 64)), rng.randrange(1, 3000) * rng.choice((1, 64))
        largest = rng.randrange(1, 1 << 20)
        target = rng.randrange(1, largest + 1)
        try:
            unit = elastic_unit(lender, borrower, granularity, largest, target)
        except ValueError:
            assert -(-max(lender, borrower) // granularity) * granularity > largest
            kinds.add("none")
            continue
        assert unit.slab_bytes <= largest and unit.slab_bytes % granularity == 0
        assert unit.lender_pages * lender + unit.lender_padding == unit.slab_bytes
        assert unit.borrower_pages * borrower + unit.borrower_padding == unit.slab_bytes
        assert unit.lender_pages and unit.borrower_pages
        exact = math.lcm(lender, borrower, granularity)
        assert (unit.slab_bytes == exact) == (exact <= largest)
        own = math.lcm(lender, granularity)
        if unit.lender_padding:
            assert largest // own * own < max(lender, borrower), "it could do without padding"
            kinds.add("both")
        else:
            kinds.add("borrower" if unit.borrower_padding else "exact")
        stride = stride_bytes(unit.slab_bytes, borrower, granularity)
        assert (
            stride % borrower
            == stride % granularity
            == 0
            <= stride - unit.slab_bytes
            < math.lcm(borrower, granularity)
        )
    assert kinds == {"none", "both", "borrower", "exact"}


UNIT = ElasticUnit(1200, lender_page_bytes=300, borrower_page_bytes=400)  # 4 pages against 3


@pytest.mark.parametrize(
    "needed, expected", [(0, (0, 0)), (10, (0, 0)), (11, (4, 3)), (14, (4, 3)), (15, (8, 6)), (30, (20, 15))]
)
def test_scale_up_rounds_up(needed: int, expected: tuple[int, int]):
    assert scale_up(10, needed, UNIT) == expected


@pytest.mark.parametrize(
    "peak, expected", [(11, (0, 0)), (10, (0, 0)), (7, (0, 0)), (6, (4, 3)), (3, (4, 3)), (2, (8, 6)), (0, (8, 6))]
)
def test_scale_down_rounds_down(peak: int, expected: tuple[int, int]):
    assert scale_down(10, peak, UNIT) == expected


def test_what_is_lent_is_enough_to_come_back():
    """The most that can be lent leaves the peak; growing to the old size takes it all back."""
    for num_pages in range(30):
        for peak in range(num_pages + 1):
            lent, got = scale_down(num_pages, peak, UNIT)
            assert num_pages - lent >= peak and lent * 3 == got * 4
            assert scale_up(num_pages - lent, num_pages, UNIT) == (lent, got)


def test_concurrent_demand_is_not_the_longest_request():
    """Two requests of 6 pages at once need 12; the paper's window sees 6, and would lend 4 of 12 pages."""
    window = DemandWindow(60.0)
    window.add(0.0, 6)
    window.add(1.0, 12)
    window.add(2.0, 6)
    assert scale_down(12, window.peak(30.0), UNIT) == (0, 0)
    assert scale_down(12, 6, UNIT) == (4, 3)
    assert scale_down(12, window.peak(62.0), UNIT) == (4, 3), "12 were last needed just before 2 s"


def test_demand_counts_until_it_was_superseded_a_window_ago():
    window = DemandWindow(10.0)
    assert window.peak(0.0) == 0
    window.add(1.0, 5)
    assert window.peak(500.0) == 5, "it is still the demand"
    window.add(501.0, 2)
    assert window.peak(510.9) == 5 and window.peak(511.0) == 2
    window.add(512.0, 0)
    assert window.peak(521.0) == 2 and window.peak(522.0) == 0


def test_a_window_says_when_its_peak_falls():
    window = DemandWindow(10.0)
    assert window.falls_at is None
    window.add(1.0, 5)
    assert window.falls_at is None, "it is still the demand"
    window.add(2.0, 3)
    window.add(4.0, 1)
    for falls_at, below in ((12.0, 3), (14.0, 1)):
        assert window.falls_at == falls_at and window.peak(falls_at - 0.1) > window.peak(falls_at) == below
    assert window.falls_at is None


def test_time_does_not_go_back():
    window = DemandWindow()
    window.add(5.0, 1)
    with pytest.raises(AssertionError, match=r"went back from 5.0 to 4.0"):
        window.peak(4.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_window_against_all_of_history(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    window, history, now, longest = DemandWindow(20.0), [], 0.0, 0
    for _ in range(3000):
        now += rng.choice((0.0, 1.0, 5.0, 25.0 if rng.random() < 0.1 else 0.5))
        if rng.random() < 0.7:
            pages = rng.randrange(40)
            window.add(now, pages)
            history.append((now, pages))
        ends = [start for start, _ in history[1:]] + [math.inf]
        expected = max((pages for (_, pages), end in zip(history, ends) if end > now - 20.0), default=0)
        assert window.peak(now) == expected
        longest = max(longest, len(window._peaks))
    assert 2 < longest < 41, "it keeps no more than descending demands"


def test_the_papers_example():
    """SwiftCache 3.2: 10 layers, room for 100 blocks of one layer, workers with 9 and 8 blocks."""
    assert layer_stream_sizes(100, (9, 8), num_layers=10) == (17, 8)
    assert sum(layer_stream_sizes(100, (9, 8), 10)) == 25 and sum(layer_stream_sizes(100, (), 10)) == 10


@pytest.mark.parametrize(
    "k_master, k_workers, num_buffers, expected",
    [
        (100, (9, 8), 2, (17, 6)),
        (100, (200,), 1, (100, 0)),  # the stream takes all
        (100, (200,), 3, (33, 0)),
        (100, (), 2, (0, 10)),
        (0, (5,), 2, (0, 0)),
    ],
)
def test_the_sizes_with_several_buffers(k_master: int, k_workers, num_buffers: int, expected):
    assert layer_stream_sizes(k_master, k_workers, 10, num_buffers) == expected


@pytest.mark.parametrize("bad", [(-1, (1,), 1, 1), (1, (-1,), 1, 1), (1, (1,), 0, 1), (1, (1,), 1, 0)])
def test_sizes_that_make_no_sense(bad):
    with pytest.raises(ValueError, match="there has to be a layer and a buffer"):
        layer_stream_sizes(*bad)
