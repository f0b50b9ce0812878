"""When storage is left alone, and when it is used again: the breaker by itself."""

from __future__ import annotations

import pytest

from sglang.srt.managers.storage_breaker import (
    EMPTY_TRIALS,
    FAILURES_IN_A_ROW,
    MAX_PAUSES,
    SOUND_S,
    TRIAL_PAUSE_S,
    StorageBreaker,
)
from sglang.srt.mem_cache.block_keys import NO_KEYS
from sglang.srt.mem_cache.transfer import FETCH, PROBE, STORE, StorageAction, StorageOp, Ticket
from sglang.srt.utils.time_units import Seconds


def op(seq: int, link: str = FETCH) -> StorageOp:
    return StorageOp(Ticket(link, seq), StorageAction.GET, NO_KEYS, NO_KEYS, 0, "")


class Rig:
    def __init__(self, hang_s: float = 1.0, expected_s: float = 0.0) -> None:
        self.breaker = StorageBreaker((PROBE, FETCH), hang_s, lambda op: expected_s)

    def at(self, now: float, *in_flight: StorageOp) -> bool:
        """Whether it is open after a step at `now`."""
        self.breaker.now = Seconds(now)
        self.breaker.watch(in_flight)
        return self.breaker.is_open


def test_an_operation_that_hangs_opens_it() -> None:
    rig = Rig()
    assert not rig.at(5.0, op(0)) and rig.breaker.next_at == 6.0
    assert not rig.at(5.9, op(0), op(1))
    assert rig.at(6.0, op(0), op(1)) and "fetch" in rig.breaker.reason and rig.breaker.next_at is None
    assert rig.breaker.num_opened == 1
    assert rig.at(7.0, op(0), op(1)) and rig.breaker.num_opened == 1


def test_each_operation_has_its_own_time_and_an_expected_one_ten_times_that() -> None:
    rig = Rig()
    for i in range(20):
        assert not rig.at(0.9 * i, op(i), op(i + 1)), "the link moves on"
    slow = Rig(expected_s=0.5)
    assert not slow.at(0.0, op(0)) and not slow.at(4.9, op(0)) and slow.at(5.0, op(0))


def test_operations_of_other_links_do_not_matter() -> None:
    rig = Rig()
    assert not rig.at(0.0, op(0, STORE)) and not rig.at(100.0, op(0, STORE)) and rig.breaker.next_at is None


def test_what_the_other_link_does_well_ends_no_hang() -> None:
    rig = Rig()
    rig.at(0.0, op(0, PROBE), op(0))
    assert rig.at(1.0, op(0, PROBE), op(1))
    for seq in range(2, 5):
        rig.breaker.end(FETCH, succeeded=True)
        assert rig.at(1.1, op(0, PROBE), op(seq))
    assert rig.breaker.num_opened == 1
    # The probe has ended.
    assert rig.at(1.2, op(4))
    rig.breaker.end(FETCH, succeeded=True)
    assert not rig.at(1.3)


def test_what_hung_and_failed_leaves_the_trial_to_the_other_link() -> None:
    rig = Rig()
    rig.at(0.0, op(0, PROBE))
    assert rig.at(1.0, op(0, PROBE))
    rig.breaker.end(PROBE, succeeded=False)
    assert rig.at(1.1) and rig.at(3.0) and rig.breaker.may_try
    assert rig.at(3.1, op(0))
    rig.breaker.end(FETCH, succeeded=True)
    assert not rig.at(3.2)


def test_what_hung_closes_it_when_it_returns_with_something() -> None:
    rig = Rig()
    rig.at(0.0, op(0))
    assert rig.at(1.0, op(0)) and not rig.breaker.may_try
    rig.breaker.end(FETCH, succeeded=True)
    assert not rig.at(9.0)


@pytest.mark.parametrize("hung", [PROBE, FETCH])
def test_an_answer_tells_only_that_its_own_link_does_not_hang(hung: str) -> None:
    rig = Rig()
    rig.at(0.0, op(0, hung))
    rig.at(1.0, op(0, hung))
    rig.breaker.answer(PROBE)
    assert rig.breaker.is_open == (hung == FETCH)


def test_a_trial_is_due_a_pause_after_nothing_is_under_way_and_decides() -> None:
    rig = Rig()
    rig.at(0.0, op(0))
    rig.at(3.0, op(0))
    assert rig.at(3.5) and not rig.breaker.may_try
    rig.at(3.0 + TRIAL_PAUSE_S)
    assert rig.breaker.may_try
    assert rig.at(5.0, op(1)) and not rig.breaker.may_try, "one at a time"
    rig.breaker.end(FETCH, succeeded=False)
    assert rig.at(5.5) and not rig.breaker.may_try
    rig.at(7.0)
    assert rig.breaker.may_try
    rig.breaker.end(FETCH, succeeded=True)
    assert not rig.at(7.1)


def test_failures_in_a_row_open_it_and_one_success_between_does_not() -> None:
    rig = Rig()
    for _ in range(5):
        for _ in range(FAILURES_IN_A_ROW - 1):
            rig.breaker.end(FETCH, succeeded=False)
        rig.breaker.end(FETCH, succeeded=True)
    assert not rig.at(0.0)
    for _ in range(FAILURES_IN_A_ROW):
        rig.breaker.end(FETCH, succeeded=False)
    assert rig.at(0.1) and "failed" in rig.breaker.reason


def test_other_storage_begins_closed() -> None:
    rig = Rig()
    rig.at(0.0, op(0))
    rig.at(1.0, op(0))
    rig.breaker.reset()
    assert not rig.at(1.1) and rig.breaker.may_try


def test_trials_that_find_nothing_are_paced_and_close_it_at_last() -> None:
    breaker = StorageBreaker(("fetch",), 1.0, lambda op: 0.0)
    for _ in range(FAILURES_IN_A_ROW):
        breaker.end(FETCH, succeeded=False)
    for trial in range(1, EMPTY_TRIALS + 1):
        assert breaker.is_open and not breaker.may_try
        breaker.now = Seconds(trial * TRIAL_PAUSE_S)
        assert breaker.may_try
        breaker.end_empty_trial()
    assert not breaker.is_open
    breaker.end(FETCH, succeeded=False)
    assert breaker.is_open, "one failure is enough now"


def test_what_had_begun_before_the_failures_does_not_close_it() -> None:
    breaker = StorageBreaker(("store",), 1.0, lambda op: 0.0)
    for _ in range(FAILURES_IN_A_ROW):
        breaker.end(FETCH, succeeded=False)
    breaker.end(FETCH, succeeded=True)
    assert breaker.is_open
    breaker.now = TRIAL_PAUSE_S
    breaker.end(FETCH, succeeded=True)
    assert not breaker.is_open


def test_an_operation_is_late_before_it_hangs() -> None:
    rig = Rig(expected_s=1.0)
    rig.at(0.0, op(0))
    assert not rig.breaker.is_late and rig.breaker.late_at == 2.0
    rig.at(2.0, op(0))
    assert rig.breaker.is_late and not rig.breaker.is_open and rig.breaker.late_at == float("inf")
    rig.at(2.1)
    assert not rig.breaker.is_late


def test_a_breaker_that_opens_again_soon_waits_longer_for_a_trial() -> None:
    breaker = StorageBreaker(("fetch",), 1.0, lambda op: 0.0)
    now, pauses = 0.0, []
    for _ in range(6):
        for _ in range(FAILURES_IN_A_ROW):
            breaker.end(FETCH, succeeded=False)
        begin = now
        while not breaker.may_try:
            now += 0.25
            breaker.now = Seconds(now)
        pauses.append(now - begin)
        breaker.end(FETCH, succeeded=True)
    assert pauses == [1, 2, 4, MAX_PAUSES, MAX_PAUSES, MAX_PAUSES]
    breaker.now = Seconds(now + SOUND_S)
    for _ in range(FAILURES_IN_A_ROW):
        breaker.end(FETCH, succeeded=False)
    breaker.now = Seconds(now + SOUND_S + TRIAL_PAUSE_S)
    assert breaker.may_try
