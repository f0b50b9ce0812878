"""Readers on tiny files in the published forms."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmark.simulator import traces


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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


def test_a_missing_field_is_named_with_its_line(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path = lines(tmp_path / "x.jsonl", row, {"text": "a"})
    with pytest.raises(ValueError, match=r"x\.jsonl:2: there is no field 'hash_ids'; it has text"):
        traces.read_mooncake(path)


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
