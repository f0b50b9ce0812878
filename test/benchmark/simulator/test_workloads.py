"""Generators: the statistics of Strata's Table 1, repeatability, orders, and the source that drives them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.simulator import workloads as w
from sglang.simulator.simulation import RequestSource
from sglang.srt.managers.io_struct import bytes_to_ids

SPECS = [w.LOOGLE, w.LOOGLE_CLOZE, w.NARRATIVEQA, w.REVIEWMT, w.SHAREGPT.scaled(counts=0.05)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("seed", [1, 2])
def test_table_1(spec: w.QuestionSpec | w.ConversationSpec, seed: int) -> None:
    stats = spec.generate(seed, rate=2.0).stats()
    assert stats.mean_in == pytest.approx(spec.mean_in, rel=0.001)
    assert stats.mean_out == pytest.approx(spec.mean_out, rel=0.005)
    assert stats.num_queries == spec.num_queries
    if isinstance(spec, w.QuestionSpec):
        assert stats.num_contexts == spec.num_contexts


def test_the_printed_numbers() -> None:
    assert [(s.mean_in, s.mean_out, s.num_queries) for s in (w.LOOGLE, w.NARRATIVEQA, w.REVIEWMT, w.SHAREGPT)] == [
        (21613, 15.60, 2410),
        (54797, 13.00, 1461),
        (17708, 208.3, 1092),
        (680.9, 260.9, 200869),
    ]
    assert (w.LOOGLE.num_contexts, w.NARRATIVEQA.num_contexts, w.REVIEWMT.num_conversations) == (105, 50, 100)
    assert (w.SHAREGPT.think_s, w.MAX_IN_FLIGHT) == (60.0, 128)


def test_cloze_questions_are_longer_and_documents_are_not() -> None:
    usual, cloze = (spec.scaled(counts=0.1).generate(1, 1.0).conversations for spec in (w.LOOGLE, w.LOOGLE_CLOZE))
    questions = [np.mean([len(c.turns[0].message) for c in each]) for each in (usual, cloze)]
    assert questions == pytest.approx([30, 150], rel=0.02)
    documents = [np.mean([len(c.context) for c in each]) for each in (usual, cloze)]
    assert documents[0] == pytest.approx(documents[1], rel=0.01)


def test_scaled() -> None:
    small = w.LOOGLE.scaled(lengths=1 / 16, counts=0.1).generate(1, 1.0).stats()
    assert (small.num_contexts, small.num_queries) == (10, 241)
    assert small.mean_in == pytest.approx(21613 / 16, rel=0.01) and small.mean_out == pytest.approx(15.6, rel=0.01)


def test_no_prompt_is_longer_than_the_cut() -> None:
    workload = w.NARRATIVEQA.generate(1, 1.0)
    assert max(len(c.context) for c in workload.conversations) <= 128_000


@pytest.mark.parametrize("spec", [w.LOOGLE.scaled(0.05, 0.2), w.SHAREGPT.scaled(1, 0.002)], ids=lambda s: s.name)
def test_a_seed_says_everything(spec: w.QuestionSpec | w.ConversationSpec) -> None:
    def flat(seed: int) -> bytes:
        parts = []
        for c in spec.generate(seed, 3.0).conversations:
            parts += [np.float64(c.start).tobytes(), c.context.tobytes()]
            parts += [t.message.tobytes() + bytes([t.output_len % 256]) for t in c.turns]
        return b"".join(parts)

    assert flat(7) == flat(7) != flat(8)


def test_tokens_are_int32_and_questions_share_their_document() -> None:
    workload = w.LOOGLE.scaled(0.02, 0.2).generate(1, 1.0)
    by_document: dict[int, int] = {}
    for c in workload.conversations:
        assert c.context.dtype == c.turns[0].message.dtype == np.int32
        assert c.context.min() >= w.FIRST_TOKEN > w.ANSWER_TOKEN and c.context.max() < w.LAST_TOKEN
        by_document[id(c.context)] = by_document.get(id(c.context), 0) + 1
    assert len(by_document) == 21 and min(by_document.values()) >= 1 and sum(by_document.values()) == 482


def test_arrivals_are_poisson() -> None:
    rng = np.random.default_rng(1)
    gaps = np.diff(w.poisson_times(rng, 20_000, rate=5.0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() == pytest.approx(0.2, rel=0.05)
    assert (w.poisson_times(rng, 3, np.inf) == 0).all()
    # Queries per second, not conversations.
    chats = w.SHAREGPT.scaled(counts=0.05).generate(1, rate=10.0)
    assert chats.conversations[-1].start == pytest.approx(200869 * 0.05 / 10.0, rel=0.05)


def distances(about: np.ndarray) -> float:
    """Mean number of queries from one to the next about the same document."""
    places = {d: np.flatnonzero(about == d) for d in set(about.tolist())}
    return float(np.mean(np.concatenate([np.diff(p) for p in places.values() if len(p) > 1])))


def test_orders_by_hand() -> None:
    about = np.array([0, 0, 1, 1, 2, 2])
    rng = np.random.default_rng(0)
    assert about[w.arrange(about, w.Order.MINIMUM, rng)].tolist() == [0, 0, 1, 1, 2, 2]
    assert about[w.arrange(about, w.Order.MAXIMUM, rng)].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_orders_keep_every_query_and_differ_in_distance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    about = rng.integers(0, 20, 400)
    found = {}
    for order in w.Order:
        sequence = w.arrange(about, order, rng)
        assert sorted(sequence.tolist()) == list(range(400))
        found[order] = about[sequence]
    assert distances(found[w.Order.MINIMUM]) == 1
    assert distances(found[w.Order.SHUFFLE]) <= distances(found[w.Order.MAXIMUM])
    smallest = {o: min(np.diff(np.flatnonzero(a == d)).min() for d in range(20)) for o, a in found.items()}
    assert smallest[w.Order.MAXIMUM] > 5 > smallest[w.Order.SHUFFLE]


# -- the source -----------------------------------------------------------------------------------------------------


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def prompts(requests: list) -> dict[str, list[int]]:
    return {r.rid: bytes_to_ids(r.input_ids).tolist() for r in requests}


def test_the_next_turn_waits_for_the_answer_and_then_thinks() -> None:
    turns = (w.Turn(tokens(50, 51), 2), w.Turn(tokens(60), 1))
    source = w.Workload("x", (w.Conversation(1.0, tokens(40), turns, think_s=5.0),)).source()
    assert isinstance(source, RequestSource)
    assert source.take(0.5) == [] and source.next_at() == 1.0
    first = source.take(1.0)
    assert prompts(first) == {"0-0": [40, 50, 51]} and first[0].sampling_params.max_new_tokens == 2
    assert source.next_at() is None and source.take(100.0) == []
    source.finished("0-0", 3.0)
    assert source.next_at() == 8.0 and source.take(7.9) == []
    assert prompts(source.take(8.0)) == {"0-1": [40, 50, 51, 1, 1, 60]}
    source.finished("0-1", 9.0)
    assert source.next_at() is None and source.num_in_flight == 0
    assert source.due == {"0-0": 1.0, "0-1": 8.0}


def test_requests_beyond_the_limit_wait_in_order() -> None:
    one = (w.Turn(tokens(5), 1),)
    conversations = tuple(w.Conversation(float(i), tokens(i), one) for i in range(4))
    source = w.Workload("x", conversations, max_in_flight=2).source()
    assert list(prompts(source.take(3.0))) == ["0-0", "1-0"]
    assert source.next_at() is None and source.num_waiting == 2
    source.finished("1-0", 4.0)
    assert list(prompts(source.take(4.0))) == ["2-0"] and source.due["2-0"] == 2.0
    source.finished("0-0", 5.0)
    source.finished("2-0", 5.0)
    assert list(prompts(source.take(5.0))) == ["3-0"]


def test_sessions_begin_as_others_end_and_turns_have_delays_of_their_own() -> None:
    turn, none = w.Turn(np.arange(10, 13, dtype=np.int32), 1), np.empty(0, np.int32)
    later = w.Turn(turn.message, 1, delay=7.0)
    conversations = (w.Conversation(0.0, none, (turn, later), think_s=1.0), *[w.Conversation(0.0, none, (turn,))] * 2)
    source = w.Workload("x", conversations, max_in_flight=None, max_open=2).source(names_sessions=True)
    assert [(r.rid, r.session_id) for r in source.take(0.0)] == [("0-0", "0"), ("1-0", "1")]
    source.finished("0-0", 1.0)
    assert source.next_at() == 9.0
    source.finished("1-0", 2.0)
    assert [r.rid for r in source.take(2.0)] == ["2-0"]
    assert [(r.rid, r.session_id) for r in source.take(9.0)] == [("0-1", "0")]
    source.finished("0-1", 10.0)
    source.finished("2-0", 10.0)
    assert source.next_at() is None


def test_the_runs_of_a_workload_do_not_share_state() -> None:
    workload = w.REVIEWMT.scaled(0.01, 0.05).generate(1, 1.0)

    def drive() -> list[str]:
        source, sent = workload.source(), []
        now = 0.0
        while (at := source.next_at()) is not None:
            now = max(now, at)
            for request in source.take(now):
                sent.append(request.rid)
                source.finished(request.rid, now + 1)
        return sent

    assert drive() == drive() and len(drive()) == workload.stats().num_queries


def test_impossible_means_are_refused() -> None:
    with pytest.raises(ValueError, match="below 1"):
        w.lengths_with_mean(np.random.default_rng(0), 5, 0.5, 1.0)
    with pytest.raises(ValueError, match="answers alone"):
        w.ConversationSpec("x", 10, 100, 5, 50, 5, 0.0, has_context=False, cv=0.1).generate(1, 1.0)
