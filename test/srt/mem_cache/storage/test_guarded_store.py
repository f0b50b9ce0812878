"""`GuardedStore`: a far store that hangs or fails is left alone, the near one goes on, and trials bring it back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.guarded_store import EMPTY_TRIALS, GuardedStore, _Question
from sglang.srt.mem_cache.storage.tiered_store import TieredStore
from support.faults import Gate
from support.memory_store import MemoryStore
from support.server_fixture import wait_until

# A store that works answers sooner, also beside busy loops; the tests of stores that hang take a short limit.
NO_HURRY_S = 60.0
HURRY_S = 0.02
KEYS = [bytes([i]) * 16 for i in range(8)]
FRAMES = np.arange(8, dtype=np.int32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FarStore(MemoryStore):
    """Counts the calls of `exists`; `fails` makes every call raise, `brings` limits what a read brings. Its reads
    overlap: they end when the test ends them."""

    def __init__(self, pool: MHATokenToKVPoolHost) -> None:
        super().__init__(pool, 4)
        self.num_asked, self.num_read, self.num_written = 0, 0, 0
        self.fails, self.brings, self.ends_at_once = False, 8, True
        self.under_way: list[Callable[[], None]] = []
        self.times_given_up = 0

    def exists(self, keys) -> int:
        self.num_asked += 1
        self._perhaps_fail()
        return super().exists(keys)

    def get(self, keys, frames) -> int:
        self.num_read += 1
        self._perhaps_fail()
        return min(self.brings, super().get(keys, frames))

    def start_get(self, keys, frames, on_end) -> Callable[[], None]:
        if self.ends_at_once:
            on_end(self.get(keys, frames))
        else:
            self.under_way.append(lambda: on_end(0))
        return self._give_up

    def set(self, keys, frames, tenant=b"") -> int:
        self.num_written += 1
        self._perhaps_fail()
        return super().set(keys, frames)

    def touch(self, keys) -> int:
        self._perhaps_fail()
        return super().touch(keys)

    def _give_up(self) -> None:
        self.times_given_up += 1

    def _perhaps_fail(self) -> None:
        if self.fails:
            raise OSError("injected")


class Rig:
    """near before far; far has all KEYS and has answered."""

    def __init__(self) -> None:
        pool = MHATokenToKVPoolHost(MHATokenToKVPool(4, PageLayout.kv(4, 2, 1, 8, torch.float32)), 8)
        self.clock = Clock()
        self.near, self.far = MemoryStore(pool, 4), FarStore(pool)
        self.guarded = GuardedStore(self.far, NO_HURRY_S, self.clock)
        self.both = TieredStore(self.near, self.guarded)
        assert self.guarded.set(KEYS, FRAMES) == 8 and self.guarded.exists(KEYS) == 8

    @property
    def is_left_alone(self) -> bool:
        return bool(self.guarded.stats()["left_alone"])

    def hang(self) -> Gate:
        """The far store has stopped answering, and this has been found out."""
        gate = Gate(self.far, "exists")
        counts: list[int] = []
        waiting = threading.Thread(target=lambda: counts.append(self.guarded.exists(KEYS)))
        waiting.start()
        assert gate.entered.wait(60)
        self.guarded._leave_alone("it hangs")
        waiting.join(60)
        assert counts == [0] and self.is_left_alone
        return gate

    def pass_s(self, seconds: float) -> None:
        with self.guarded._changed:
            self.clock.now += seconds
            self.guarded._changed.notify_all()

    def wait_for_trial(self, number: int) -> None:
        """Until the far store was asked so often, and the answer was taken."""
        wait_until(lambda: self.far.num_asked >= number and self.guarded._asking is None)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.guarded.close()


def test_a_far_store_that_hangs_is_left_alone_and_the_near_one_goes_on(rig: Rig):
    rig.near.set(KEYS[:3], FRAMES[:3])
    gate = rig.hang()
    assert rig.both.locate(KEYS) == rig.both.locate(KEYS, skips=(1,)) == (3, 0, 3)
    assert rig.both.locate(KEYS, skips=(0,)) == (0, 0, 0)
    assert rig.guarded.get(KEYS, FRAMES) == 0
    ended: list[int] = []
    rig.guarded.start_get(KEYS, FRAMES, ended.append)
    assert ended == [0]
    assert rig.guarded.set(KEYS[:5], FRAMES[:5]) == 0
    assert rig.guarded.touch(KEYS[:4]) == 4
    assert (rig.far.num_read, rig.far.num_written) == (0, 1), "only what came before"
    gate.open.set()


def test_no_caller_waits_beyond_the_limit(rig: Rig):
    gate = Gate(rig.far, "exists")
    rig.near.set(KEYS[:3], FRAMES[:3])
    rig.guarded._limit_s = HURRY_S
    assert rig.both.locate(KEYS) == (3, 0, 3) and rig.is_left_alone
    gate.open.set()


def test_two_who_ask_for_the_same_both_get_an_answer(rig: Rig):
    gate = Gate(rig.far, "exists")
    counts: list[int] = []
    waiting = [threading.Thread(target=lambda: counts.append(rig.guarded.exists(KEYS))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(rig.guarded._questions) == 2)
    gate.open.set()
    for thread in waiting:
        thread.join(60)
    assert counts == [8, 8, 8] and not rig.is_left_alone


def test_who_waits_behind_one_that_found_out_goes_on_at_once(rig: Rig):
    gate = Gate(rig.far, "exists")
    counts: list[int] = []
    waiting = threading.Thread(target=lambda: counts.append(rig.guarded.exists(KEYS)))
    waiting.start()
    assert gate.entered.wait(60)
    with rig.guarded._changed:
        rig.guarded._limit_s = HURRY_S
    assert rig.guarded.exists(KEYS) == 0 and rig.is_left_alone
    waiting.join(NO_HURRY_S / 2)
    assert counts == [0], "the first one does not wait for its own limit"
    gate.open.set()


def test_the_limit_follows_what_is_usual(rig: Rig):
    rig.guarded._least_limit_s = 0.5

    def slow(seconds: float) -> None:
        rig.guarded._changed.acquire()
        for _ in range(50):
            question = _Question(KEYS, count=8)
            rig.guarded._note_answer(question, seconds, "")
        rig.guarded._changed.release()

    slow(0.001)
    assert rig.guarded._limit_s == 0.5
    slow(0.08)
    assert 0.75 < rig.guarded._limit_s < 0.85
    slow(0.4)
    assert rig.guarded._limit_s == 1.0
    rig.guarded._limit_s = NO_HURRY_S


def test_a_trial_shows_that_it_works_again(rig: Rig, caplog: pytest.LogCaptureFixture):
    gate = rig.hang()
    gate.open.set()
    wait_until(lambda: rig.guarded._asking is None)
    assert rig.is_left_alone, "an answer that comes late is no trial"
    asked = rig.far.num_asked
    rig.pass_s(0.9)
    assert rig.is_left_alone and rig.far.num_asked == asked
    rig.pass_s(0.2)
    wait_until(lambda: not rig.is_left_alone)
    assert rig.both.locate(KEYS) == (0, 8, 8) and rig.guarded.get(KEYS, FRAMES) == 8
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "the memory store is left alone",
        "the memory store is used again",
    ]


def test_trials_become_rarer_while_it_fails(rig: Rig):
    rig.far.fails = True
    assert rig.guarded.exists(KEYS) == 0 and rig.is_left_alone, "a store that raises is left alone at once"
    number = rig.far.num_asked
    for pause_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        rig.pass_s(pause_s - 0.1)
        assert rig.far.num_asked == number
        rig.pass_s(0.2)
        number += 1
        rig.wait_for_trial(number)
    rig.far.fails = False
    rig.pass_s(8.1)
    wait_until(lambda: not rig.is_left_alone)


def test_a_trial_that_finds_a_block_makes_the_next_one_quick(rig: Rig):
    rig.far.fails = True
    assert rig.guarded.exists(KEYS) == 0 and rig.is_left_alone
    number = rig.far.num_asked
    for pause_s in (1.1, 2.1, 4.1):
        rig.pass_s(pause_s)
        number += 1
        rig.wait_for_trial(number)
    rig.far.fails = False
    rig.pass_s(8.1)
    wait_until(lambda: not rig.is_left_alone)
    rig.guarded._leave_alone("again")
    rig.pass_s(1.1)
    wait_until(lambda: not rig.is_left_alone)


def test_one_that_has_lost_all_is_used_again_after_some_trials_in_time(rig: Rig):
    gate = rig.hang()
    rig.far.blocks.clear()
    gate.open.set()
    wait_until(lambda: rig.guarded._asking is None)
    number = rig.far.num_asked
    for i in range(EMPTY_TRIALS):
        assert rig.is_left_alone, i
        rig.pass_s(8.1)
        rig.wait_for_trial(number + i + 1)
    assert not rig.is_left_alone


def test_a_trial_that_is_late_does_not_count(rig: Rig):
    gate = rig.hang()
    gate.open.set()
    wait_until(lambda: rig.guarded._asking is None)
    slow = Gate(rig.far, "exists")
    rig.guarded._limit_s = rig.guarded._least_limit_s = 1.0
    rig.pass_s(1.1)
    assert slow.entered.wait(60)
    rig.pass_s(1.5)
    slow.open.set()
    wait_until(lambda: rig.guarded._asking is None)
    assert rig.is_left_alone
    rig.pass_s(1.1)
    wait_until(lambda: not rig.is_left_alone)


def test_reads_in_a_row_that_bring_nothing(rig: Rig):
    rig.far.brings = 0
    assert rig.guarded.get(KEYS, FRAMES) == 0 and not rig.is_left_alone
    rig.far.brings = 8
    assert rig.guarded.get(KEYS, FRAMES) == 8
    rig.far.brings = 0
    assert rig.guarded.get(KEYS, FRAMES) == 0 and not rig.is_left_alone
    assert rig.guarded.get(KEYS, FRAMES) == 0 and rig.is_left_alone


def test_what_takes_long_and_fails(rig: Rig):
    def slow_get(keys, frames) -> int:
        rig.clock.now += 5
        return 2

    rig.far.start_get = lambda keys, frames, on_end: on_end(slow_get(keys, frames)) or rig.far._give_up
    ended: list[int] = []
    rig.guarded.start_get(KEYS, FRAMES, ended.append)
    assert ended == [2] and rig.is_left_alone


@pytest.mark.parametrize("call", ["get", "set", "touch", "start_get"])
def test_calls_that_raise(rig: Rig, call: str):
    real, rig.far.exists = rig.far.exists, lambda keys: 0
    rig.far.fails = True
    ended: list[int] = []
    if call == "start_get":
        rig.guarded.start_get(KEYS, FRAMES, ended.append)
        assert ended == [0]
    elif call == "touch":
        assert rig.guarded.touch(KEYS[:2]) == 2, "it is not known that any is lost"
    else:
        assert getattr(rig.guarded, call)(KEYS, FRAMES) == 0
    assert rig.is_left_alone
    rig.far.exists = real


def test_a_full_store_is_still_read(rig: Rig):
    rig.far.set = lambda keys, frames, tenant: 0
    for _ in range(5):
        assert rig.guarded.set(KEYS, FRAMES) == 0
    assert not rig.is_left_alone


def test_a_write_asks_before_it_begins(rig: Rig):
    gate = Gate(rig.far, "exists")
    rig.guarded._limit_s = HURRY_S
    assert rig.guarded.set(KEYS, FRAMES) == 0 and rig.is_left_alone and rig.far.num_written == 1
    gate.open.set()


def test_a_read_asks_before_it_begins_if_there_was_no_answer_lately(rig: Rig):
    gate = Gate(rig.far, "exists")
    rig.guarded._limit_s = HURRY_S
    assert rig.guarded.get(KEYS, FRAMES) == 8 and not gate.entered.is_set(), "it has just answered"
    rig.clock.now += 1.5
    assert rig.guarded.get(KEYS, FRAMES) == 0 and rig.is_left_alone and rig.far.num_read == 1
    gate.open.set()


def test_what_was_given_up_tells_nothing(rig: Rig):
    rig.far.ends_at_once = False
    ended: list[int] = []
    give_ups = [rig.guarded.start_get(KEYS, FRAMES, ended.append) for _ in range(3)]
    for give_up in give_ups:
        give_up()
    rig.clock.now += 10
    for end in rig.far.under_way:
        end()
    assert ended == [0] * 3 and rig.far.times_given_up == 3 and not rig.is_left_alone


def test_what_it_missed_counts_as_lost_once_it_is_used_again(rig: Rig):
    rig.far.blocks = dict(list(rig.far.blocks.items())[:1])
    gate = rig.hang()
    assert rig.guarded.set(KEYS[1:6], FRAMES[1:6]) == 0
    assert rig.guarded.touch(KEYS[:6]) == 6, "it is not told while it is left alone"
    gate.open.set()
    wait_until(lambda: rig.guarded._asking is None)
    rig.pass_s(1.1)
    wait_until(lambda: not rig.is_left_alone)
    rig.far.touch = len  # as a store that is not told
    assert rig.guarded.touch(KEYS[:6]) == 1
    assert rig.guarded.set(KEYS[1:6], FRAMES[1:6]) == 5
    assert rig.guarded.touch(KEYS[:6]) == 6 == len(rig.far.blocks)


def test_reads_are_waited_for_where_the_far_store_wants_that(rig: Rig):
    assert not rig.both.is_synchronous
    rig.far.is_synchronous = True  # type: ignore[attr-defined]
    assert rig.both.is_synchronous


def test_clear(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.near.set(KEYS, FRAMES)
    gate = rig.hang()
    assert not rig.both.clear()
    assert not rig.near.blocks and rig.far.blocks and "was not emptied" in caplog.text
    gate.open.set()
    wait_until(lambda: rig.guarded._asking is None)
    rig.pass_s(1.1)
    wait_until(lambda: not rig.is_left_alone)
    assert rig.both.clear()
    assert not rig.far.blocks and rig.guarded.exists(KEYS) == 0


def test_close_ends_while_it_hangs(rig: Rig):
    gate = rig.hang()
    rig.guarded._limit_s = HURRY_S
    rig.both.close()
    assert not rig.far.is_open and not rig.near.is_open
    assert rig.both.far.exists(KEYS) == 0 and rig.guarded.set(KEYS, FRAMES) == 0
    gate.open.set()


def test_close_ends_those_who_wait(rig: Rig):
    gate = Gate(rig.far, "exists")
    counts: list[int] = []
    waiting = threading.Thread(target=lambda: counts.append(rig.guarded.exists(KEYS)))
    waiting.start()
    assert gate.entered.wait(60)
    rig.guarded._limit_s = HURRY_S
    rig.guarded.close()
    waiting.join(60)
    assert counts == [0]
    gate.open.set()
