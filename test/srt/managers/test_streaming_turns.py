"""`StreamingTurns` alone. What it does to requests is tested on the virtual clock, in test_streams.py."""

from __future__ import annotations

from typing import cast

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.streaming_turns import StreamingTurns
from sglang.srt.utils.time_units import LaunchSeq, Seconds

FIRST, SECOND = (cast(Req, object()) for _ in range(2))


def at(seconds: float) -> Seconds:
    return Seconds(seconds)


def after_a_chunk(began_at: float, ended_at: float) -> StreamingTurns:
    """A chunk is launch 3; the launch ahead of it ends when it begins."""
    turns = StreamingTurns()
    turns.note_chunk(LaunchSeq(3), 2, at(began_at - 1))
    turns.watch(2, at(began_at - 0.5))
    turns.watch(3, at(began_at))
    assert not turns.is_chunk_done(3) and turns.is_chunk_done(4)
    turns.watch(4, at(ended_at))
    return turns


def test_the_others_have_as_long_as_the_chunk_took() -> None:
    turns = after_a_chunk(2.0, 5.0)
    turns.watch(5, at(6.0))
    turns.note_others(None, at(6.0))
    assert turns.has_time(at(7.9)) and turns.is_others(at(7.9))
    assert not turns.has_time(at(8.0)) and not turns.is_others(at(8.0))


def test_they_have_one_launch_of_prompts_in_any_case() -> None:
    turns = after_a_chunk(2.0, 2.0)
    assert not turns.has_time(at(2.0)) and turns.is_others(at(9.0))
    turns.note_others(None, at(9.0))
    assert not turns.is_others(at(9.0))


def test_a_prompt_that_began_in_their_time_is_computed_whole() -> None:
    turns = after_a_chunk(2.0, 5.0)
    turns.note_others(FIRST, at(6.0))
    turns.note_others(SECOND, at(7.9))
    assert turns.is_others(at(50.0))
    turns.note_others(SECOND, at(50.0))
    assert turns.is_others(at(51.0))
    turns.note_others(None, at(51.0))
    assert not turns.is_others(at(51.0))


def test_one_that_begins_later_waits_for_the_next_chunk() -> None:
    """Beside the last chunk of another one."""
    turns = after_a_chunk(2.0, 5.0)
    turns.note_others(FIRST, at(7.0))
    turns.note_others(SECOND, at(9.0))
    assert not turns.is_others(at(9.0))
    turns.note_chunk(LaunchSeq(9), 9, at(9.0))
    assert turns.is_others(at(9.0))


def test_the_time_does_not_last_when_launches_are_void() -> None:
    turns = after_a_chunk(2.0, 5.0)
    turns.note_chunk(LaunchSeq(6), 6, at(6.0))
    turns.forget_chunk()
    assert turns.is_chunk_done(0) and not turns.has_time(at(6.0))
