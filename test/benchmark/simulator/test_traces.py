"""Readers on tiny files in the published forms."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmark.simulator import traces


def encode(text: str) -> list[int]:
    """One token per word: its length, plus 100."""
    return [100 + len(word) for word in text.split()]


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_loogle_in_both_forms(tmp_path: Path) -> None:
    pairs = [{"Q": "who is it", "A": "me", "S": "x"}, {"Q": "why", "A": "no idea at all", "S": "y"}]
    by_document = lines(
        tmp_path / "old.jsonl",
        {"input": "a long story", "title": "t", "qa_pairs": str(pairs), "output": "none"},
        {"input": "nothing to ask", "title": "u", "qa_pairs": "none", "output": "none"},
        {"input": "another", "title": "v", "qa_pairs": pairs[:1], "output": "none"},
    )
    by_question = lines(
        tmp_path / "new.jsonl",
        {"context": "a long story", "question": "who is it", "answer": "me", "doc_id": "1"},
        {"context": "a long story", "question": "why", "answer": "no idea at all", "doc_id": "1"},
        {"context": "another", "question": "who is it", "answer": "me", "doc_id": "2"},
    )
    old, new = (traces.read_loogle(p, encode, seed=1, rate=1.0) for p in (by_document, by_question))
    for workload in (old, new):
        stats = workload.stats()
        assert (stats.num_contexts, stats.num_queries) == (2, 3)
        found = {
            (tuple(c.context.tolist()), tuple(c.turns[0].message.tolist()), c.turns[0].output_len)
            for c in workload.conversations
        }
        story = (101, 104, 105)
        assert found == {
            (story, (103, 102, 102), 1),
            (story, (103,), 4),
            ((107,), (103, 102, 102), 1),
        }


def test_a_missing_field_is_named_with_its_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"context": "a", "question": "b", "answer": "c"}, {"text": "a"})
    with pytest.raises(ValueError, match=r"x\.jsonl:2: there is no field 'context'; it has text"):
        traces.read_loogle(path, encode, 1, 1.0)
    path = lines(tmp_path / "y.jsonl", {"input": "a", "qa_pairs": "[{"})
    with pytest.raises(ValueError, match=r"y\.jsonl:1: qa_pairs"):
        traces.read_loogle(path, encode, 1, 1.0)


def test_narrativeqa_in_both_forms(tmp_path: Path) -> None:
    hub = lines(
        tmp_path / "hub.jsonl",
        {
            "document": {"id": "1", "text": "once upon a time"},
            "question": {"text": "when was it", "tokens": []},
            "answers": [{"text": "long ago", "tokens": []}, {"text": "once", "tokens": []}],
        },
    )
    bench = lines(
        tmp_path / "bench.jsonl", {"context": "once upon a time", "input": "when was it", "answers": ["long ago"]}
    )
    for path in (hub, bench):
        (c,) = traces.read_narrativeqa(path, encode, 1, 1.0).conversations
        assert c.context.tolist() == [104, 104, 101, 104] and c.turns[0].output_len == 2
        assert c.turns[0].message.tolist() == [104, 103, 102]


def test_sharegpt(tmp_path: Path) -> None:
    said = [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "hello there"},
        {"from": "gpt", "value": "hi"},
        {"from": "human", "value": "one"},
        {"from": "human", "value": "more thing"},
        {"from": "gpt", "value": "as you say"},
        {"from": "human", "value": "unanswered"},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"id": "a", "conversations": said}, {"id": "b", "conversations": said[1:2]}]))
    workload = traces.read_sharegpt(path, encode, seed=1, rate=1.0)
    (c,) = workload.conversations
    assert c.think_s == 60 and c.context.tolist() == [102, 104]
    assert [(t.message.tolist(), t.output_len) for t in c.turns] == [([105, 105], 1), ([103, 104, 105], 3)]


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [46, 47, 48]},
        {"timestamp": 0, "input_length": 1100, "output_length": 0, "hash_ids": [46, 47, 50]},
        {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [47]},
    )
    workload = traces.read_mooncake(path, speed=2.0)
    assert [c.start for c in workload.conversations] == [0.0, 0.0, 1.5] and workload.max_in_flight is None
    second, third, first = (c.turns[0] for c in workload.conversations)
    assert [len(t.message) for t in (first, second, third)] == [1500, 1100, 512]
    assert first.message.dtype == np.int32
    assert (first.message[:1024] == second.message[:1024]).all()
    assert (first.message[1024:1100] != second.message[1024:]).mean() > 0.9
    # A block's tokens depend on its hash alone.
    assert (third.message == first.message[512:1024]).all()
    assert (first.output_len, second.output_len) == (7, 1)


def test_a_mooncake_row_that_lacks_blocks_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]})
    with pytest.raises(ValueError, match=r"t\.jsonl:1: 513 tokens do not fit 1 blocks"):
        traces.read_mooncake(path)


def test_sessions_of_agents(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "timestamp": 0},
        {"session_id": "b", "input_length": 512, "output_length": 7, "hash_ids": [0], "timestamp": 0},
        {"session_id": "a", "input_length": 100, "output_length": 6, "hash_ids": [2], "delay": 3000},
    ]
    path = tmp_path / "agents.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    workload = traces.read_agentic(path, max_open=1)
    first, second = workload.conversations
    assert [(len(t.message), t.output_len, t.delay) for t in first.turns] == [(600, 5, 0.0), (100, 6, 3.0)]
    assert (first.turns[0].message[:512] == second.turns[0].message).all()
    assert workload.max_open == 1 and workload.max_in_flight is None


def test_hashes_make_different_tokens() -> None:
    ids = traces.tokens_of_hashes(np.arange(2000)).reshape(2000, 512)
    assert len({row.tobytes() for row in ids}) == 2000
    assert ids.min() >= 10 and ids.max() < 32000
    assert abs(ids.mean() - 16005) < 50
