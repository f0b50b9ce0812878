"""Which pages have frames in the pool for layers with a window, and which give theirs up first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.managers.startup.sizes import with_windowed_pool, with_windows
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node, path_of
from sglang.srt.mem_cache.windowed_pool import WindowedPool
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq
from support.storage_rig import StorageRig

REACH = 4


class Rig:
    def __init__(self, num_pages: int = 64, num_windowed_pages: int = 64) -> None:
        self.tree = HiRadixTree(1, window_reach=REACH)
        self.device = FrameTable(num_pages)
        self.pool = WindowedPool(self.tree, self.device, num_windowed_pages)
        self.now = 0

    def insert(self, tokens: list[int], below: Node | None = None) -> Node:
        """New pages behind a node, as a launch writes them."""
        frames = self.device.allocate(len(tokens))
        assert frames is not None
        self.pool.give(frames)
        self.now += 1
        ids, launch = np.array(tokens, np.int32), LaunchSeq(self.now)
        result = self.tree.insert_prefix("", below, ids, frames, LaunchSeq(0), launch)
        assert not len(result.duplicates)
        self.device.transition(frames, FrameState.HELD, FrameState.CACHED)
        return result.node

    def shed(self, num_pages: int, reads_from: dict[int, tuple[int, int]] | None = None) -> list[list[int]]:
        """What goes, in tokens."""
        victims = self.pool.victims(num_pages, reads_from or {})
        for node in victims:
            assert node.frames[0] is not None
            self.tree.make_partial(node)
            self.pool.take_away(node.frames[0], NO_LAUNCH)
        self.check()
        return [node.key.tolist() for node in victims]

    def check(self) -> None:
        self.tree.check_invariants()
        self.pool.check_invariants(self.device.state == FrameState.FREE)


def test_pages_have_frames_until_they_are_free() -> None:
    rig = Rig(num_pages=8, num_windowed_pages=4)
    pages = rig.device.allocate(3)
    assert pages is not None
    frames = rig.pool.give(pages)
    assert np.array_equal(rig.pool.of(pages), frames) and rig.pool.table.num_free == 1
    assert np.array_equal(rig.pool.take_given(), np.stack((pages, frames)))
    assert rig.pool.take_given().shape == (2, 0)
    assert rig.pool.take_away(pages[:1], LaunchSeq(3)) == 1
    assert rig.pool.table.num_free == 1, "launch 3 may read it"
    rig.pool.table.reap(4)
    assert rig.pool.table.num_free == 2
    with pytest.raises(AssertionError, match="lacks"):
        rig.pool.of(pages)
    rig.device.free_after(pages, FrameState.HELD, 5)
    rig.device.reap(5)
    assert rig.pool.table.num_free == 2, "the device waits for launch 5"
    rig.device.reap(6)
    assert rig.pool.table.num_free == 4 and (rig.pool.frame_of == -1).all()
    rig.check()


def test_what_is_far_before_all_ends_goes_first() -> None:
    rig = Rig()
    document = rig.insert(list(range(30)))
    rig.insert([50, 51], document)
    # The leaf ends at 32 and sees 28 to 31. Parts before that are the longer the farther they are from it.
    gone = [rig.shed(1)[0][0] for _ in range(4)]
    assert gone == [0, 1, 2, 3]
    other = rig.insert(list(range(60, 80)))
    assert other.end == 20
    # Up to 16 tokens before 28, then up to 8 before 28, and before 16, the older first.
    assert rig.shed(13) == [list(range(4, 17))]
    assert rig.shed(4) == [[17, 18, 19], [60]]
    assert rig.shed(7) == [list(range(61, 68))]
    # Up to 4 tokens.
    assert rig.shed(5) == [[20, 21, 22, 23], [68]]


def test_ends_go_last_and_the_oldest_first() -> None:
    rig = Rig()
    document = rig.insert(list(range(10)))
    rig.insert([20, 21], document)
    rig.insert([30, 31], document)
    # Paths part at 10, from where windows reach 6.
    assert rig.shed(3) == [[0, 1, 2]]
    assert rig.shed(3) == [[3, 4, 5]]
    # It is as old as the first end, and what the second one sees as old as that.
    assert rig.shed(4) == [[6, 7], [20, 21]]
    assert rig.shed(100) == [[30, 31], [8, 9]]
    assert rig.shed(100) == []


def test_a_prompt_that_is_asked_again_ends_before_its_answer() -> None:
    rig = Rig()
    end = rig.insert(list(range(20)))
    end.asked_end = 17
    assert rig.shed(13) == [list(range(13))], "windows reach 13 from there"
    assert rig.pool.num_seen_given_up == 0
    # Of a longer answer only the end counts.
    other = rig.insert(list(range(40, 60)))
    other.asked_end = 10
    assert rig.shed(16) == [list(range(40, 56))] and rig.pool.num_seen_given_up == 0
    # Once the path goes on, that is not its end any more.
    rig.insert([80], end)
    assert rig.shed(3) == [[13, 14, 15]] and rig.pool.num_seen_given_up == 0


def test_what_a_lock_sees_stays() -> None:
    rig = Rig()
    end = rig.insert(list(range(10)), None)
    receipt = rig.tree.lock_node(end, LaunchSeq(5))
    assert rig.shed(100) == [list(range(6))]
    assert [node.is_partial for node in path_of(end)] == [True, False]
    rig.tree.unlock(receipt, LaunchSeq(6), LaunchSeq(5))
    assert rig.shed(100) == [[6, 7, 8, 9]]


def test_what_requests_read_stays() -> None:
    rig = Rig()
    end = rig.insert(list(range(10)))
    receipt = rig.tree.lock_node(end, LaunchSeq(5))
    # The launch that is being made computes what the lock ends with.
    assert rig.shed(100, {end.id: (1, 2)}) == [[0, 1]]
    assert rig.shed(100, {end.id: (1, 2)}) == []
    rig.tree.lock_node(end, LaunchSeq(5))
    # Of one lock nothing is known: its request has not started.
    assert rig.shed(100, {end.id: (1, 50)}) == [[2, 3, 4, 5]]
    rig.tree.unlock(receipt, LaunchSeq(6), LaunchSeq(5))
    # A request that does not enter what it computes into the tree has gone on.
    assert rig.shed(100, {end.id: (1, 50)}) == [[6, 7, 8, 9]]


def test_what_a_lock_below_the_device_sees_stays() -> None:
    rig = Rig()
    top = rig.insert(list(range(10)))
    below = rig.insert([20, 21], top)
    rig.tree.lock_node(below, LaunchSeq(5))
    # Of a load: its pages are not on the device yet, and it reads 8 to 11.
    assert rig.shed(100) == [list(range(8))]


def test_frames_that_a_transfer_reads_stay() -> None:
    rig = Rig()
    first, second = rig.insert(list(range(10))), rig.insert(list(range(20, 30)))
    assert first.frames[0] is not None
    rig.pool.table.pin(rig.pool.of(first.frames[0][:1]))
    assert rig.shed(100) == [list(range(20, 30))]
    assert not first.is_partial and second.is_partial


def config(**fields: object) -> SchedulerConfig:
    return SchedulerConfig(
        **{  # type: ignore[arg-type]
            "page_size": 1,
            "num_device_pages": 12000,
            "num_host_pages": 0,
            "page_bytes": 600,
            "context_len": 100_000,
            "num_layers": 6,
            "chunked_prefill_size": 256,
            **fields,
        }
    )


WINDOWS = (128, 128, 128, 128, 128, None)


def test_a_pool_of_its_own_leaves_the_device_more_pages() -> None:
    found = with_windowed_pool(config(), WINDOWS, None, None)
    assert found.num_windowed_pages == pytest.approx(0.25 * found.num_device_pages, abs=1)
    taken = found.num_device_pages + 5 * found.num_windowed_pages
    assert 72000 - 6 < taken <= 72000
    with_windows(found, WINDOWS).check()


@pytest.mark.parametrize("window, share", [(1024, (1023 + 128) / 3072), (2048, (2047 + 128) / 3072), (4096, 0.8)])
def test_long_windows_have_more_of_the_device(window: int, share: float) -> None:
    """As the prompts that are longer than windows are few."""
    found = with_windowed_pool(config(num_device_pages=100_000), (window, None), None, None)
    assert found.num_windowed_pages == pytest.approx(share * found.num_device_pages, abs=2)
    assert found.num_device_pages == pytest.approx(200_000 / (1 + share), abs=2)


def test_no_memory_is_left_where_few_pages_are_wanted() -> None:
    found = with_windowed_pool(config(), WINDOWS, None, 20000)
    assert (found.num_device_pages, found.num_windowed_pages) == (20000, (72000 - 20000) // 5)
    # With a ratio of its own, what is not wanted is not taken.
    found = with_windowed_pool(config(), WINDOWS, 0.25, 12000)
    assert (found.num_device_pages, found.num_windowed_pages) == (12000, 3000)
    # One pool has as many.
    assert with_windowed_pool(config(), WINDOWS, None, 12000) == config()


def test_a_pool_of_its_own_has_room_for_a_request() -> None:
    found = with_windowed_pool(config(num_device_pages=2000), WINDOWS, 0.01, None)
    assert found.num_windowed_pages >= 255 + 64 + 1 + 2 * 256
    with_windows(found, WINDOWS).check()
    with pytest.raises(AssertionError, match="go on"):
        with_windows(config(num_windowed_pages=700), WINDOWS).check()


@pytest.mark.parametrize(
    "other, windows",
    [
        ({}, (None,) * 6),
        # All layers have a window: there would be no other pool.
        ({}, (128,) * 6),
        # What a request needs is no less than what there is.
        ({"num_device_pages": 700}, WINDOWS),
        # Windows hide nothing.
        ({"context_len": 255}, WINDOWS),
        ({"num_host_pages": 100, "layer_stream": LayerStreamConfig(2, 8)}, WINDOWS),
    ],
)
def test_there_is_one_pool_where_two_gain_nothing(other: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert with_windowed_pool(config(**other), windows, 0.25, None) == config(**other)


def test_nodes_are_cut_between_pages_where_blocks_would_take_much_of_the_pool() -> None:
    for block_tokens, cut in ((4, 4), (64, 1), (512, 1)):
        rig = StorageRig(window_reach=REACH, device=1 << 17, windowed=256)
        assert rig.storage.setup is not None
        rig.storage.attach_storage(replace(rig.storage.setup, block_tokens=block_tokens))
        assert rig.tree.order.cut_tokens == cut
