"""Strides, Algorithm 1, the demand window and the sizes of the layer stream cache, over plain numbers."""

from __future__ import annotations

import math
import random

import pytest

from sglang.srt.peer.protocol.elastic_units import (
    DemandWindow,
    layer_stream_sizes,
    scale_down,
    scale_up,
    stride_bytes,
)


@pytest.mark.parametrize("seed", range(3))
def test_slabs_lie_so_that_all_pages_have_one_stride(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        granularity, page_bytes = rng.choice((1, 64, 4096)), rng.randrange(1, 3000) * rng.choice((1, 64))
        slab_bytes = granularity * rng.randrange(1, 200)
        stride = stride_bytes(slab_bytes, page_bytes, granularity)
        assert stride % page_bytes == stride % granularity == 0
        assert 0 <= stride - slab_bytes < math.lcm(page_bytes, granularity)


@pytest.mark.parametrize("needed, expected", [(0, 0), (10, 0), (11, 1), (14, 1), (15, 2), (30, 5)])
def test_scale_up_rounds_up(needed: int, expected: int):
    assert scale_up(10, needed, slab_pages=4) == expected


@pytest.mark.parametrize("peak, expected", [(11, 0), (10, 0), (7, 0), (6, 1), (3, 1), (2, 2), (0, 2)])
def test_scale_down_rounds_down(peak: int, expected: int):
    assert scale_down(10, peak, slab_pages=4) == expected


def test_what_is_lent_is_enough_to_come_back():
    """The most that can be lent leaves the peak; growing to the old size takes it all back."""
    for num_pages in range(30):
        for peak in range(num_pages + 1):
            lent = scale_down(num_pages, peak, 4)
            assert num_pages - 4 * lent >= peak
            assert scale_up(num_pages - 4 * lent, num_pages, 4) == lent


def test_concurrent_demand_is_not_the_longest_request():
    """Two requests of 6 pages at once need 12; the paper's window sees 6, and would lend 4 of 12 pages."""
    window = DemandWindow(60.0)
    window.add(0.0, 6)
    window.add(1.0, 12)
    window.add(2.0, 6)
    assert scale_down(12, window.peak(30.0), 4) == 0
    assert scale_down(12, 6, 4) == 1
    assert scale_down(12, window.peak(62.0), 4) == 1, "12 were last needed just before 2 s"


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
