"""Readers for published files: production traces in Mooncake's format, and sessions of coding agents. Files are read,
never fetched."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.simulator.workloads import (
    BLOCK,
    Conversation,
    Prompt,
    Turn,
    Workload,
    tokens_of_hashes,
)


def read_mooncake(path: Path, speed: float = 1.0) -> Workload:
    """Token ids are made from the hash ids, so prompts share a prefix as far as their hash ids do. speed: 2 sends
    everything in half the time. Traces of production are open loops: nothing limits what is in flight."""
    none = np.empty(0, np.int32)
    conversations = [
        Conversation(
            prompt.start / speed,
            none,
            (Turn(tokens_of_hashes(prompt.blocks)[: prompt.input_len], prompt.output_len),),
        )
        for prompt in read_prompts(path)
    ]
    return Workload("Mooncake", tuple(conversations), max_in_flight=None)


def read_prompts(path: Path) -> list[Prompt]:
    """JSON lines of `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one per block of 512 tokens, of
    which the last may be cut short; by time."""
    prompts = []
    for where, row in _json_lines(path):
        hashes = np.asarray(_field(row, "hash_ids", where), np.uint64)
        length = int(row["input_length"])
        if not 0 < length <= len(hashes) * BLOCK:
            raise ValueError(f"{where}: {length} tokens do not fit {len(hashes)} blocks of {BLOCK}")
        used = hashes[: -(-length // BLOCK)].astype(np.int64)
        prompts.append(Prompt(float(row["timestamp"]) / 1000, used, length, max(1, int(row["output_length"]))))
    return sorted(prompts, key=lambda prompt: prompt.start)


def read_agentic(path: Path, max_open: int) -> Workload:
    """JSON lines, perhaps in gzip, one per turn: `session_id`, `output_length`, `input_length` and `hash_ids` of what
    is new in the turn, and `delay` (ms) after the answer before. Sessions begin in the file's order, max_open at a
    time."""
    turns: dict[str, list[Turn]] = {}
    for where, row in _json_lines(path):
        message = tokens_of_hashes(np.asarray(_field(row, "hash_ids", where), np.uint64))[: int(row["input_length"])]
        session = turns.setdefault(str(_field(row, "session_id", where)), [])
        session.append(Turn(message, max(1, int(row["output_length"])), delay=float(row.get("delay", 0)) / 1000))
    none = np.empty(0, np.int32)
    conversations = tuple(Conversation(0.0, none, tuple(session)) for session in turns.values())
    return Workload("coding agents", conversations, max_in_flight=None, max_open=max_open)


def has_sessions(path: Path) -> bool:
    """Whether a trace has rows of sessions, as coding agents' has, and not single prompts."""
    return "session_id" in next((row for _, row in _json_lines(path)), {})


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row): where names file and line, for error messages."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", json.loads(line)


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise ValueError(f"{where}: there is no field {name!r}; it has {', '.join(row) or 'none'}")
    return row[name]
