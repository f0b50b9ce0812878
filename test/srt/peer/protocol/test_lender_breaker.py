"""`LenderBreaker` and `Silence`, step by step."""

from __future__ import annotations

import pytest

from sglang.srt.peer.protocol import lender_breaker
from sglang.srt.peer.protocol.lender_breaker import LONGEST_PAUSE_S, SOUND_S, LenderBreaker, Silence


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    monkeypatch.setattr(lender_breaker, "SILENT_S", 2.0)


def test_it_opens_once_and_closes_when_the_lender_answers() -> None:
    breaker = LenderBreaker()
    assert not breaker.is_open
    assert breaker.open(10.0, "it hangs") and breaker.reason == "it hangs"
    assert not breaker.open(10.5, "again"), "it is open already"
    assert breaker.reason == "it hangs" and breaker.pause_s == 1.0
    breaker.close(12.0)
    assert not breaker.is_open


def test_probes_that_fail_come_less_and_less_often() -> None:
    breaker = LenderBreaker()
    breaker.open(0.0, "it hangs")
    pauses = []
    for _ in range(8):
        pauses.append(breaker.pause_s)
        breaker.fail_probe()
    assert pauses == [1, 2, 4, 8, 16, 32, 64, LONGEST_PAUSE_S]


def test_a_lender_that_flaps_is_left_alone_longer_and_longer() -> None:
    breaker, now, pauses = LenderBreaker(), 0.0, []
    for _ in range(4):
        breaker.open(now, "it hangs")
        pauses.append(breaker.pause_s)
        breaker.close(now + breaker.pause_s)
        now += breaker.pause_s + SOUND_S / 2
    assert pauses == [1, 2, 4, 8]
    breaker.open(now + SOUND_S, "it hangs")
    assert breaker.pause_s == 1, "it was sound for a while"


def test_silence_begins_once_and_ends_with_a_heartbeat() -> None:
    silence = Silence()
    begins = [i for i in range(100) if silence.begins(0.125 * i)]
    assert begins == [16]
    silence.end()
    assert [i for i in range(100, 200) if silence.begins(0.125 * i)] == [100 + 15]


def test_time_in_which_this_process_stood_still_is_no_silence() -> None:
    """After it goes on, heartbeats may lie unread."""
    silence = Silence()
    for now in (0.0, 0.1, 1000.0, 2000.0):
        assert not silence.begins(now)
