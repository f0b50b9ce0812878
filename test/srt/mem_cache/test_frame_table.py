"""The frame table: every transition with exact frame ids, then random ones against a dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable

FREE, HELD, FILLING, CACHED, PENDING_FREE, LENT = FrameState


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


def states(table: FrameTable) -> str:
    """One letter per frame: Free, Held, fIlling, Cached, penDing free, Lent."""
    table.check_invariants()
    return "".join("FHICDL"[s] for s in table.state)


def take(table: FrameTable, n: int, state: FrameState = HELD) -> np.ndarray:
    frames = table.allocate(n, state)
    assert frames is not None
    return frames


def test_a_table_needs_a_page():
    with pytest.raises(ValueError, match="at least one page, got 0"):
        FrameTable(0)
    with pytest.raises(ValueError, match="not both"):
        FrameTable(4, block_pages=2, lowest_first=True)


def test_allocate_hands_out_the_lowest_frames_first():
    table = FrameTable(6)
    assert states(table) == "FFFFFF" and table.num_free == 6
    frames = table.allocate(2)
    assert frames.tolist() == [0, 1] and frames.dtype == np.int32
    assert take(table, 1, state=FILLING).tolist() == [2]
    assert states(table) == "HHIFFF"
    assert table.counts[FREE] == table.num_free == 3 and table.counts[HELD] == 2 and table.counts[FILLING] == 1


def test_allocate_more_than_is_free_changes_nothing():
    table = FrameTable(3)
    take(table, 1)
    assert table.allocate(3) is None
    assert states(table) == "HFF"
    assert take(table, 2).tolist() == [1, 2]
    assert table.allocate(1) is None
    assert table.allocate(0).tolist() == []


def test_publish_and_commit():
    table = FrameTable(5)
    held, filling = take(table, 2), take(table, 2, state=FILLING)
    table.transition(held, HELD, CACHED)
    assert states(table) == "CCIIF"
    table.transition(filling, FILLING, CACHED)
    assert states(table) == "CCCCF" and table.counts[CACHED] == 4


@pytest.mark.parametrize("state", [HELD, FILLING, CACHED])
def test_free_after_from_every_live_state(state: FrameState):
    table = FrameTable(2)
    frames = take(table, 1, state=FILLING if state == FILLING else HELD)
    if state == CACHED:
        table.transition(frames, HELD, CACHED)
    table.free_after(frames, state, fence=-1)
    assert states(table) == "DF"
    table.reap(done=0)
    assert states(table) == "FF"


def test_a_transition_asserts_the_state_before():
    table = FrameTable(4)
    table.transition(take(table, 2), HELD, CACHED)
    with pytest.raises(AssertionError, match="not all HELD"):
        table.transition(ids(1), HELD, CACHED)
    take(table, 1)
    with pytest.raises(AssertionError, match="not all CACHED"):
        table.transition(ids(1, 2), CACHED, PENDING_FREE)
    with pytest.raises(AssertionError, match="not all CACHED"):
        table.free_after(ids(3), CACHED, -1)
    assert states(table) == "CCHF"


def test_a_frame_cannot_be_given_up_twice():
    table = FrameTable(2)
    frames = take(table, 1)
    table.free_after(frames, HELD, 0)
    with pytest.raises(AssertionError, match="not all HELD"):
        table.free_after(frames, HELD, 0)
    assert states(table) == "DF"


def test_a_fence_has_passed_when_done_is_above_it():
    table = FrameTable(4)
    frames = take(table, 4)
    table.free_after(frames[:1], HELD, fence=5)
    table.free_after(frames[1:2], HELD, fence=6)
    table.free_after(frames[2:], HELD, fence=5)
    table.reap(done=5)
    assert states(table) == "DDDD" and table.take_freed().tolist() == []
    table.reap(done=6)
    assert states(table) == "FDFF" and sorted(table.take_freed().tolist()) == [0, 2, 3]
    table.reap(done=7)
    assert states(table) == "FFFF" and table.take_freed().tolist() == [1]
    assert table.take_freed().tolist() == []


def test_a_pin_outlives_the_fence():
    table = FrameTable(3)
    frames = take(table, 3)
    table.pin(ids(1))
    table.free_after(frames, HELD, fence=0)
    table.reap(done=1)
    assert states(table) == "FDF"
    table.reap(done=9)
    assert states(table) == "FDF"
    table.unpin(ids(1))
    assert states(table) == "FDF", "only reap frees"
    table.reap(done=9)
    assert states(table) == "FFF"


def test_a_fence_outlives_the_pin():
    table = FrameTable(1)
    frames = take(table, 1)
    table.pin(frames)
    table.free_after(frames, HELD, fence=3)
    table.unpin(frames)
    table.reap(done=3)
    assert states(table) == "D"
    table.reap(done=4)
    assert states(table) == "F"


def test_two_pins_need_two_unpins():
    table = FrameTable(2)
    frames = take(table, 2)
    table.pin(frames)
    table.pin(ids(0))
    table.free_after(frames, HELD, fence=-1)
    table.unpin(frames)
    table.reap(done=0)
    assert states(table) == "DF" and table.pins.tolist() == [1, 0]
    table.unpin(ids(0))
    table.reap(done=0)
    assert states(table) == "FF"


def test_unpinning_more_often_than_pinning_is_a_bug():
    table = FrameTable(2)
    take(table, 2)
    table.pin(ids(0))
    table.unpin(ids(0))
    with pytest.raises(AssertionError, match="more often than pinned"):
        table.unpin(ids(0))


def test_giving_up_nothing_is_nothing():
    table = FrameTable(1)
    table.free_after(ids(), HELD, 0)
    table.reap(1)
    assert states(table) == "F" and len(table.take_freed()) == 0


def test_a_freed_run_comes_back_as_the_same_run():
    table = FrameTable(8)
    a, b = take(table, 3), take(table, 3)
    assert (a.tolist(), b.tolist()) == ([0, 1, 2], [3, 4, 5])
    table.free_after(a, HELD, -1)
    table.reap(0)
    assert take(table, 3).tolist() == [0, 1, 2], "the run freed last is on top, in its own order"
    table.free_after(b, HELD, -1)
    table.reap(0)
    assert take(table, 5).tolist() == [3, 4, 5, 6, 7]


def test_frames_freed_and_taken_again_are_still_reported():
    table = FrameTable(2)
    frames = take(table, 1)
    table.free_after(frames, HELD, -1)
    table.reap(0)
    assert take(table, 1).tolist() == [0]
    assert table.take_freed().tolist() == [0]


def test_long_runs_and_long_scatters_are_treated_alike():
    """Runs of 128 frames and more go through slices."""
    table = FrameTable(400)
    run = take(table, 300)
    table.pin(run)
    assert table.pins.sum() == 300 and table.pins[299] == 1 and table.pins[300] == 0
    table.unpin(run)
    scattered = run.copy()
    np.random.default_rng(0).shuffle(scattered)
    almost = np.concatenate([run[:199], run[200:]])
    bent = run[:200].copy()
    bent[100] = 250
    for frames in (scattered, almost, bent, run[::-1]):
        table.pin(frames)
        assert table.pins.sum() == len(frames) and table.pins[frames].all()
        table.unpin(frames)
    table.transition(scattered, HELD, CACHED)
    table.free_after(almost, CACHED, -1)
    table.reap(0)
    assert states(table) == "F" * 199 + "C" + "F" * 200


def test_lent_and_taken_back():
    table = FrameTable(6, lowest_first=True)
    take(table, 2)
    table.lend(ids(4, 5))
    assert states(table) == "HHFFLL" and table.num_free == 2 and table.counts[LENT] == 2
    assert table.allocate(3) is None, "lent frames are not to be had"
    assert take(table, 2).tolist() == [2, 3]
    table.reclaim(ids(4))
    assert states(table) == "HHHHFL" and take(table, 1).tolist() == [4]
    assert table.take_freed().tolist() == [4], "poisoned like whatever becomes free"


def test_nothing_is_lent_twice():
    table = FrameTable(4, lowest_first=True)
    take(table, 1)
    table.lend(ids(0, 3))
    for frames in (ids(0, 1), ids(3)):
        with pytest.raises(AssertionError, match="lent already"):
            table.lend(frames)
    with pytest.raises(AssertionError, match="not all LENT"):
        table.reclaim(ids(2, 3))
    assert states(table) == "HFFL"


@pytest.mark.parametrize("lowest_first", [True, False])
def test_what_is_in_use_is_lent_when_it_would_be_free_and_nobody_gets_it_before(lowest_first):
    table = FrameTable(4, lowest_first=lowest_first)
    became_free: list[int] = []
    table.watch_freed(lambda frames: became_free.extend(frames.tolist()))
    taken = take(table, 4)
    table.free_after(taken[:3], HELD, fence=5)
    table.pin(taken[:1])
    table.lend(taken[:2])
    table.reap(6)
    assert table.num_free == 1 and table.counts[LENT] == 1 and table.counts[PENDING_FREE] == 1
    assert sorted(table.take_freed().tolist()) == sorted(taken[1:3].tolist()), "poison reaches it before it goes"
    table.unpin(taken[:1])
    table.reap(6)
    assert table.num_free == 1 and table.counts[LENT] == 2
    assert sorted(became_free) == sorted(taken[:3].tolist()), "what has given way has nothing of the pool's"
    assert take(table, 1).tolist() == taken[2:3].tolist() and table.allocate(1) is None
    table.check_invariants()
    table.reclaim(taken[:2])
    assert table.num_free == 2
    table.check_invariants()


def test_what_was_lent_and_is_kept_is_as_if_it_had_not_been():
    table = FrameTable(6, lowest_first=True)
    table.pin(take(table, 3)[:1])
    table.lend(ids(0, 1, 2, 4, 5))
    table.free_after(ids(1), HELD, fence=-1)
    table.free_after(ids(0), HELD, fence=-1)
    table.reap(0)
    assert states(table) == "DLHFLL"
    table.cancel_lend(ids(0, 1, 2, 4, 5))
    assert states(table) == "DFHFFF" and table.num_free == 4
    table.unpin(ids(0))
    table.free_after(ids(2), HELD, fence=-1)
    table.reap(0)
    assert states(table) == "FFFFFF"
    assert sorted(table.take_freed().tolist()) == [0, 1, 1, 2, 4, 5]
    table.check_invariants()


def test_a_transfer_keeps_lent_frames_from_coming_back():
    """In strict mode the lender itself copies to and from them."""
    table = FrameTable(2, lowest_first=True)
    table.lend(ids(1))
    table.pin(ids(1))
    with pytest.raises(AssertionError, match="a transfer still"):
        table.reclaim(ids(1))
    table.unpin(ids(1))
    table.reclaim(ids(1))
    assert states(table) == "FF"


def corrupt_count(table: FrameTable) -> None:
    table.counts[FREE] -= 1


def corrupt_state(table: FrameTable) -> None:
    table.state[0] = CACHED


def corrupt_free(table: FrameTable) -> None:
    table._free.take(1)


def corrupt_pending(table: FrameTable) -> None:
    table._pending.clear()


def corrupt_pin(table: FrameTable) -> None:
    table.pins[5] = 1


@pytest.mark.parametrize("corrupt", [corrupt_count, corrupt_state, corrupt_free, corrupt_pending, corrupt_pin])
@pytest.mark.parametrize("block_pages, lowest_first", [(1, False), (2, False), (1, True)])
def test_check_invariants_notices(corrupt, block_pages: int, lowest_first: bool):
    table = FrameTable(6, block_pages, lowest_first)
    frames = take(table, 3)
    table.free_after(frames[1:], HELD, 4)
    table.check_invariants()
    corrupt(table)
    with pytest.raises(AssertionError):
        table.check_invariants()


class Model:
    """The same rules, one dictionary entry per frame."""

    def __init__(self, num_pages: int) -> None:
        self.state = dict.fromkeys(range(num_pages), FREE)
        self.pins = dict.fromkeys(range(num_pages), 0)
        self.fence: dict[int, int] = {}

    def of(self, state: FrameState) -> list[int]:
        return [f for f, s in self.state.items() if s == state]

    def reap(self, done: int) -> set[int]:
        freed = {f for f, fence in self.fence.items() if fence < done and self.pins[f] == 0}
        for f in freed:
            del self.fence[f]
            self.state[f] = FREE
        return freed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "num_pages, block_pages",
    [(3, 1), (40, 1), (700, 1), (3, 2), (41, 4), (700, 16), (700, 300), (3, 0), (40, 0), (1500, 0)],
    ids=lambda n: "lowest" if n == 0 else str(n),
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_random_operations_against_a_dictionary(seed: int, num_pages: int, block_pages: int):
    """block_pages 0: the lowest frames first."""
    print(f"seed {seed}, {num_pages} pages in blocks of {block_pages}")
    rng = random.Random(seed * 1000 + num_pages)
    table, model = FrameTable(num_pages, max(1, block_pages), lowest_first=block_pages == 0), Model(num_pages)
    done = 0
    transfers: list[np.ndarray] = []
    num_reaped = 0

    def some(state: FrameState) -> np.ndarray:
        frames = model.of(state)
        chosen = rng.sample(frames, rng.randrange(len(frames) + 1))
        if rng.random() < 0.5:
            chosen.sort()
        return np.array(chosen, np.int32)

    for _ in range(1500 if num_pages < 700 else 450):
        match rng.randrange(10):
            case 0 | 1:
                n = rng.randrange(num_pages // 2 + 2)
                state = rng.choice((HELD, FILLING))
                frames = table.allocate(n, state)
                if n > len(model.of(FREE)):
                    assert frames is None
                else:
                    assert len(set(frames.tolist())) == len(frames) == n
                    if block_pages == 0:
                        assert frames.tolist() == model.of(FREE)[:n]
                    for f in frames.tolist():
                        assert model.state[f] == FREE
                        model.state[f] = state
            case 2:
                before = rng.choice((HELD, FILLING))
                frames = some(before)
                table.transition(frames, before, CACHED)
                model.state.update(dict.fromkeys(frames.tolist(), CACHED))
            case 3:
                frames = some(rng.choice((HELD, FILLING, CACHED)))
                table.pin(frames)
                transfers.append(frames)
                for f in frames.tolist():
                    model.pins[f] += 1
            case 4 if transfers:
                frames = transfers.pop(rng.randrange(len(transfers)))
                table.unpin(frames)
                for f in frames.tolist():
                    model.pins[f] -= 1
            case 5:
                before = rng.choice((HELD, FILLING, CACHED))
                frames = some(before)
                fence = rng.randrange(-1, done + 4)
                table.free_after(frames, before, fence)
                model.state.update(dict.fromkeys(frames.tolist(), PENDING_FREE))
                model.fence.update(dict.fromkeys(frames.tolist(), fence))
            case 6:
                done += rng.randrange(3)
                table.take_freed()
                table.reap(done)
                freed = table.take_freed().tolist()
                assert len(set(freed)) == len(freed)
                assert set(freed) == model.reap(done)
                num_reaped += len(freed)
            case 7:
                frames = some(FREE)
                table.lend(frames)
                model.state.update(dict.fromkeys(frames.tolist(), LENT))
            case 8:
                frames = some(LENT)
                table.take_freed()
                table.reclaim(frames)
                assert table.take_freed().tolist() == frames.tolist()
                model.state.update(dict.fromkeys(frames.tolist(), FREE))
        table.check_invariants()
        assert table.state.tolist() == list(model.state.values())
        assert table.pins.tolist() == list(model.pins.values())
        assert table.counts == [len(model.of(state)) for state in FrameState]
    table.reclaim(np.array(model.of(LENT), np.int32))
    for frames in transfers:
        table.unpin(frames)
    for state in (HELD, FILLING, CACHED):
        table.free_after(np.array(model.of(state), np.int32), state, done)
    table.reap(done + 4)
    assert table.num_free == num_pages and num_reaped > num_pages


@pytest.mark.parametrize("first_page", [0, 1, 5, 8, 11])
def test_blocks_of_a_sequence_lie_in_blocks_of_frames(first_page: int) -> None:
    table = FrameTable(64, block_pages=8)
    frames = table.allocate(19, first_page=first_page)
    assert frames is not None and len(np.unique(frames)) == 19
    table.check_invariants()
    for start in range(-first_page % 8, 19 - 7, 8):
        block = frames[start : start + 8]
        assert block[0] % 8 == 0 and (np.diff(block) == 1).all()


@pytest.mark.parametrize("num_pages", [8, 300])
def test_a_long_run_that_is_lent_when_it_is_given_up_is_not_free(num_pages: int):
    """Long runs are accessed by slices, which are views."""
    table = FrameTable(2 * num_pages)
    frames = table.allocate(num_pages)
    assert frames is not None
    frames = np.sort(frames)
    table.lend(frames[: num_pages // 2])
    table.free_after(frames, FrameState.HELD, -1)
    table.reap(0)
    table.check_invariants()
    assert (table.state[frames[: num_pages // 2]] == FrameState.LENT).all()
    assert (table.state[frames[num_pages // 2 :]] == FrameState.FREE).all()
