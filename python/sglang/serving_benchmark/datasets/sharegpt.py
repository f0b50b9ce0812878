"""ShareGPT: the first question and answer of real chats, from a file or the hub's cache. Downloads nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from sglang.serving_benchmark.datasets.errors import DatasetError
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Message, Session, Turn, Workload

_REPOSITORY = "anon8231489123/ShareGPT_Vicuna_unfiltered"
_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
# Shorter questions and answers are left out, as upstream leaves them out.
_MIN_TOKENS = 2


def chats(args: Namespace, vocabulary: Vocabulary) -> Workload:
    pairs = _pairs(_path(args.dataset_path))
    order = np.random.default_rng(args.seed).permutation(len(pairs))
    sessions: list[Session] = []
    num_dropped = 0
    for i in order.tolist():
        if len(sessions) == args.num_prompts:
            break
        question, answer = pairs[i]
        num_tokens = vocabulary.count(question)
        output_len = args.sharegpt_output_len or vocabulary.count(answer)
        if num_tokens < _MIN_TOKENS or output_len < _MIN_TOKENS:
            continue
        if args.sharegpt_context_len and num_tokens + output_len > args.sharegpt_context_len:
            num_dropped += 1
            continue
        sessions.append(Session((Turn(Message(num_tokens, text=question), output_len),)))
    notes = []
    if num_dropped:
        notes.append(f"{num_dropped} chats are longer than --sharegpt-context-len {args.sharegpt_context_len}.")
    return Workload(tuple(sessions), tuple(notes))


def _path(given: str) -> Path:
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise DatasetError(f"There is no file {given!r}: give --dataset-path the JSON file of ShareGPT.")
        return path
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(_REPOSITORY, _FILE, repo_type="dataset")
    if not isinstance(cached, str):
        raise DatasetError(
            f"The dataset sharegpt is a file: give its path with --dataset-path, download {_FILE} of the hub's "
            f"dataset {_REPOSITORY} into the hub's cache, or choose another with --dataset-name, such as random."
        )
    return Path(cached)


def _pairs(path: Path) -> list[tuple[str, str]]:
    """The first two messages of each chat."""
    try:
        rows: Any = json.loads(path.read_text())
        talks = [row.get("conversations", row.get("conversation", ())) for row in rows]
        return [(_text(talk[0]), _text(talk[1])) for talk in talks if len(talk) >= 2]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DatasetError(
            f"{path} is not in ShareGPT's format, a JSON list of "
            '{"conversations": [{"from": …, "value": …}, …]}: give another file with --dataset-path.'
        ) from None


def _text(message: Any) -> str:
    """Raises KeyError, TypeError or ValueError if it has none that can be sent."""
    value = message["value"]
    if not isinstance(value, str):
        raise TypeError("a value that is no text")
    value.encode()
    return value
