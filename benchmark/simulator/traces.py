"""Readers for published files: LooGLE, NarrativeQA, ShareGPT, production traces in Mooncake's format, and sessions of
coding agents.

Files are read, never fetched. `encode` turns a text into token ids; any tokenizer's method will do. Facts that a file
lacks (when queries arrive) come from the arguments, as for generated workloads.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.simulator.workloads import (
    BLOCK,
    Conversation,
    Order,
    Prompt,
    Turn,
    Workload,
    poisson_times,
    questions_workload,
    tokens_of_hashes,
)

Encode = Callable[[str], Sequence[int]]


def read_loogle(path: Path, encode: Encode, seed: int, rate: float, order: Order = Order.SHUFFLE) -> Workload:
    """bigai-nlco/LooGLE, longdep_qa.jsonl or shortdep_qa.jsonl, in either of its two forms: one line per document
    (`input`, and `qa_pairs`, a list or its Python or JSON text, of `{"Q", "A"}`), or one line per question
    (`context`, `question`, `answer`). The answer's length in the file is the output length."""
    asked: list[tuple[str, str, str]] = []
    for where, row in _json_lines(path):
        if "qa_pairs" in row:
            pairs = _literal(row["qa_pairs"], where)
            asked += [(row["input"], pair["Q"], pair["A"]) for pair in pairs]
        else:
            asked.append((_field(row, "context", where), row["question"], row["answer"]))
    return _questions("LooGLE", asked, encode, seed, rate, order)


def read_narrativeqa(path: Path, encode: Encode, seed: int, rate: float, order: Order = Order.SHUFFLE) -> Workload:
    """deepmind/narrativeqa as JSON lines (`document.text`, `question.text`, `answers[].text`), or LongBench's
    narrativeqa.jsonl (`context`, `input`, `answers`). The first answer gives the output length."""
    asked: list[tuple[str, str, str]] = []
    for where, row in _json_lines(path):
        if "document" in row:
            asked.append((row["document"]["text"], row["question"]["text"], row["answers"][0]["text"]))
        else:
            asked.append((_field(row, "context", where), row["input"], row["answers"][0]))
    return _questions("NarrativeQA", asked, encode, seed, rate, order)


def read_sharegpt(path: Path, encode: Encode, seed: int, rate: float, think_s: float = 60.0) -> Workload:
    """ShareGPT as published: a JSON list of `{"conversations": [{"from": "human" | "gpt", "value"}]}`. A turn is the
    human's text up to an answer. The text before the first human message is the context. rate: queries per second."""
    rng = np.random.default_rng(seed)
    found: list[tuple[np.ndarray, tuple[Turn, ...]]] = []
    for row in json.loads(Path(path).read_text()):
        context: list[int] = []
        message: list[int] = []
        turns: list[Turn] = []
        for said in row["conversations"]:
            ids = list(encode(said["value"]))
            if said["from"] in ("human", "user"):
                message += ids
            elif message and said["from"] in ("gpt", "assistant", "chatgpt", "bing", "bard"):
                turns.append(Turn(np.array(message, np.int32), max(1, len(ids))))
                message = []
            elif not turns and not message:
                context += ids
        if turns:
            found.append((np.array(context, np.int32), tuple(turns)))
    num_queries = sum(len(turns) for _, turns in found)
    starts = poisson_times(rng, len(found), rate * len(found) / max(1, num_queries))
    conversations = [
        Conversation(start, context, turns, think_s) for start, (context, turns) in zip(starts.tolist(), found)
    ]
    return Workload("ShareGPT", tuple(conversations))


def read_mooncake(path: Path, speed: float = 1.0, max_in_flight: int | None = None) -> Workload:
    """Token ids are made from the hash ids, so prompts share a prefix as far as their hash ids do. speed: 2 sends
    everything in half the time. As traces of production are open loops, nothing limits what is in flight unless asked
    for."""
    none = np.empty(0, np.int32)
    conversations = [
        Conversation(
            prompt.start / speed,
            none,
            (Turn(tokens_of_hashes(prompt.blocks)[: prompt.input_len], prompt.output_len),),
        )
        for prompt in read_prompts(path)
    ]
    return Workload("Mooncake", tuple(conversations), max_in_flight)


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


def _questions(
    name: str, asked: Sequence[tuple[str, str, str]], encode: Encode, seed: int, rate: float, order: Order
) -> Workload:
    numbers: dict[str, int] = {}
    about = np.array([numbers.setdefault(context, len(numbers)) for context, _, _ in asked], np.int64)
    documents = [np.asarray(encode(text), np.int32) for text in numbers]
    turns = [Turn(np.asarray(encode(q), np.int32), max(1, len(encode(a)))) for _, q, a in asked]
    return questions_workload(name, documents, about, turns, np.random.default_rng(seed), rate, order)


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


def _literal(value: Any, where: str) -> list[dict[str, str]]:
    """qa_pairs is a list, or text: JSON, a Python literal, or the word none for a document without questions."""
    if not isinstance(value, str):
        return value or []
    if value.strip().lower() in ("", "none"):
        return []
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: qa_pairs is neither a list nor the text of one") from error
