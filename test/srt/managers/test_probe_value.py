"""Whether a request should wait for storage's answer."""

from __future__ import annotations

from sglang.srt.managers.probe_value import ProbeValue


def test_until_something_is_known_it_is_worth_it() -> None:
    value = ProbeValue()
    assert value.is_worth_waiting(None) and value.is_worth_waiting(-1.0)
    value.add(0.01, 1.0)
    assert value.is_worth_waiting(None)


def test_what_it_takes_is_compared_with_what_it_brings_in_the_mean() -> None:
    value = ProbeValue()
    for i in range(100):
        value.add(0.01, float(i % 2))
    assert value.is_worth_waiting(0.025) and not value.is_worth_waiting(0.015)


def test_prompts_of_which_storage_has_nothing_make_it_worthless_and_hits_restore_it() -> None:
    value = ProbeValue()
    for _ in range(50):
        value.add(0.002, 0.0)
    assert not value.is_worth_waiting(0.05)
    for _ in range(10):
        value.add(0.002, 1.0)
    assert value.is_worth_waiting(0.05)


def test_a_probe_that_has_become_slow_is_not_waited_for() -> None:
    value = ProbeValue()
    for _ in range(10):
        value.add(0.002, 0.5)
    assert value.is_worth_waiting(0.02)
    for _ in range(10):
        value.add(0.02, 0.5)
    assert not value.is_worth_waiting(0.02)


def test_a_probe_that_takes_less_than_a_hundredth_of_what_it_may_save_is_waited_for() -> None:
    value = ProbeValue()
    for _ in range(1000):
        value.add(0.002, 0.0)
    assert value.is_worth_waiting(0.2) and not value.is_worth_waiting(0.19)


def test_one_probe_that_was_given_up_is_enough_where_it_took_far_longer_than_it_saves() -> None:
    value = ProbeValue()
    for _ in range(50):
        value.add(0.002, 1.0)
    value.add_wait(1.0)
    assert not value.is_worth_waiting(0.4)
    value.add_wait(0.01)
    assert not value.is_worth_waiting(0.4), "a shorter wait tells nothing"
    for _ in range(5):
        value.add(0.002, 1.0)
    assert value.is_worth_waiting(0.4)
