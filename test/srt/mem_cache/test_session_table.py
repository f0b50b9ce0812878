"""The table of sessions: by examples, and against lists without limits."""

from __future__ import annotations

import random

import pytest

from sglang.srt.mem_cache.session_table import MAX_SESSIONS, SessionTable


def test_a_gap_is_from_an_answer_to_the_next_turn():
    table = SessionTable()
    table.begin_turn(("", "a"), 0)
    record = table.end_turn(("", "a"), 10)
    assert table.num_between_turns() == 1
    table.begin_turn(("", "a"), 25)
    assert list(record.gaps) == [16] and table.num_between_turns() == 0
    # Another request of the session in parallel: no answer lies between them.
    table.begin_turn(("", "a"), 26)
    assert list(record.gaps) == [16]


def test_a_turn_that_ends_without_an_answer_holds_up_no_other():
    """The first record is the one that is forgotten first; in a turn for ever, it would stay, and all behind it."""
    table = SessionTable()
    table.longest_age = 1
    table.end_turn(("", "known"), 0)
    table.begin_turn(("", "known"), 1)
    table.begin_turn(("", "left"), 1)
    for key in ("known", "left"):
        table.leave_turn(("", key), 2)
    assert table.num_between_turns() == 2
    table.end_turn(("", "other"), 1000)
    assert len(table) == 1
    table.leave_turn(("", "unknown"), 1001)
    assert len(table) == 1


def test_tenants_do_not_share_sessions():
    table = SessionTable()
    table.end_turn(("x", "a"), 0)
    table.begin_turn(("y", "a"), 5)
    assert len(table) == 2 and not table.get(("y", "a")).gaps


def test_another_session_knows_what_all_have_shown():
    table = SessionTable()
    assert len(table.expected_returns(table.end_turn(("", "a"), 0)).gaps) == 0
    table.begin_turn(("", "a"), 7)
    assert table.expected_returns(table.end_turn(("", "b"), 8)).gaps.tolist() == [8]


def test_a_turn_that_waits_starts_for_certain():
    table = SessionTable()
    assert len(table.expected_starts().gaps) == 0
    table.note_wait(3)
    table.note_wait(1)
    likely = table.expected_starts()
    assert likely.gaps.tolist() == [3, 1] and likely.weights.sum() == pytest.approx(1)


def test_a_new_name_for_each_request_takes_no_more_memory_and_teaches_that_none_returns():
    table = SessionTable()
    for i in range(3 * MAX_SESSIONS):
        table.begin_turn(("", str(i)), i)
        table.end_turn(("", str(i)), i)
    assert len(table) == MAX_SESSIONS
    assert table.return_share < 0.01
    table.check_invariants(3 * MAX_SESSIONS)


def test_a_session_that_waits_for_too_long_has_ended():
    table = SessionTable()
    table.longest_age = 10
    table.end_turn(("", "a"), 0)
    table.begin_turn(("", "a"), 30)
    table.end_turn(("", "a"), 30)
    table.begin_turn(("", "b"), 92)
    assert table.get(("", "a")) is not None, "twice the longest gap is not over"
    table.begin_turn(("", "b"), 93)
    assert table.get(("", "a")) is None and len(table) == 1


def test_weighted_tokens_end_by_themselves_and_with_the_next_turn():
    table = SessionTable()
    for name, until in (("a", 20), ("b", 40)):
        table.note_weight(table.end_turn(("", name), 10), 100, until)
    assert [table.weighted_tokens(now) for now in (10, 30, 50)] == [200, 100, 0]
    table.begin_turn(("", "a"), 15)
    assert table.weighted_tokens(15) == 100


@pytest.mark.parametrize("seed", range(10))
def test_against_a_plain_model(seed):
    """A dict of lists, in the order of use; nothing ends by waiting."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    size = rng.randrange(1, 6)
    table, now = SessionTable(size), 0
    model: dict[str, tuple[list[int], int | None]] = {}
    known: list[int] = []
    for _ in range(400):
        now += rng.randrange(5)
        name = rng.choice("abcdefgh")
        gaps, answered = model.pop(name, ([], None))
        if len(model) == size:
            del model[next(iter(model))]
        if rng.random() < 0.5:
            if answered is not None:
                gaps.append(now - answered + 1)
                known.append(now - answered + 1)
            answered = None
            table.begin_turn(("", name), now)
        else:
            answered = now
            table.end_turn(("", name), now)
        model[name] = gaps, answered
        table.check_invariants(now)
        assert len(table) == len(model)
        assert table.num_between_turns() == sum(answered is not None for _, answered in model.values())
        record = table.get(("", name))
        assert record is not None and list(record.gaps) == gaps[-16:] and record.answered == answered
        expected = [*gaps[-16:], *known[-512:]] if known else []
        assert table.expected_returns(record).gaps.tolist() == expected
