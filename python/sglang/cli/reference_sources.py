"""Where uses of blocks come from: a trace's file, or a sample of a live server. Stateless."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from sglang.cli.reuse import ReferenceLog
from sglang.cli.server import CommandError, number_in
from sglang.serving_benchmark.datasets.errors import DatasetError
from sglang.serving_benchmark.datasets.traces import agentic, has_sessions, mooncake
from sglang.serving_benchmark.workload import Message, Session

# No server samples more rarely.
_LEAST_RATE = 1e-6


def read_trace(path: Path, num_rows: int) -> tuple[ReferenceLog, float | None]:
    """The uses of blocks in a trace, and its seconds; None where later turns wait for answers, whose times no trace
    has. num_rows: the most that are read. Both kinds of traces of `bench_serving` are known. Requests come in the
    order of their times; an answer takes none."""
    settings = Namespace(
        dataset_path=str(path),
        num_prompts=num_rows,
        scale_lengths=1.0,
        mooncake_workload="",
        mooncake_num_rounds=1,
        mooncake_slowdown_factor=1.0,
    )
    try:
        # A trace without texts needs no vocabulary.
        sessions = (agentic if has_sessions(settings) else mooncake)(settings, cast(Any, None)).sessions
    except DatasetError as error:
        raise CommandError(str(error).replace("--dataset-path", "--trace")) from None
    if not sessions:
        raise CommandError(f"the trace {path} has no requests")
    log, numbers = ReferenceLog(), _Numbers()
    turns = sorted(_turns(sessions), key=lambda each: each[0])
    for _, blocks, tokens, prompt_len, num_looked_up in turns:
        ids = numbers.of_path(blocks)
        log.add_request(prompt_len, prompt_len)
        log.use(ids, tokens, num_looked_up)
    if any(len(session.turns) > 1 for session in sessions):
        return log, None
    return log, turns[-1][0] - turns[0][0]


Parts = list[tuple[Any, ...]]


def _turns(sessions: tuple[Session, ...]) -> Iterator[tuple[float, Parts, list[int], int, int]]:
    """Of each turn: when, the parts of its prompt and answer, their tokens, the prompt's tokens, its parts."""
    for number, session in enumerate(sessions):
        now = session.start_s or 0.0
        parts: Parts = []
        tokens: list[int] = []
        for place, turn in enumerate(session.turns):
            now += turn.delay_s
            for part, size in _parts_of(turn.message):
                parts.append(part)
                tokens.append(size)
            prompt = len(parts), sum(tokens)
            # Answers are read by their own session alone.
            parts.append(("answer", number, place))
            tokens.append(turn.output_len)
            yield now, list(parts), list(tokens), prompt[1], prompt[0]


def _parts_of(message: Message) -> Iterator[tuple[tuple[Any, ...], int]]:
    for place, key in enumerate(message.keys):
        size = min(message.block_len, message.num_tokens - place * message.block_len)
        yield (key, size), size


class _Numbers:
    """Numbers for paths of parts: equal ones for equal beginnings."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[Any, ...]], int] = {}

    def of_path(self, parts: Parts) -> list[int]:
        found: list[int] = []
        last = -1
        for part in parts:
            last = self._numbers.setdefault((last, part), len(self._numbers))
            found.append(last)
        return found


def read_sample(sample: Mapping[str, Any]) -> tuple[ReferenceLog, float]:
    """The uses of blocks in the reply of GET /hicache/sample, and its seconds."""
    try:
        size, seconds = int(number_in(sample, "block_tokens", least=1)), float(number_in(sample, "seconds"))
        rate = float(number_in(sample, "rate", least=_LEAST_RATE, most=1))
        log, numbers = ReferenceLog(rate), _Numbers()
        for event in sample["events"]:
            if not isinstance(event["blocks"], list):
                raise TypeError("blocks is no list")
            # A digest stands for everything up to its block's end.
            ids = [numbers.of_path([(digest,)])[0] for digest in event["blocks"]]
            prompt_len = int(number_in(event, "prompt_tokens"))
            if not event["is_answer"]:
                if len(ids) > prompt_len // size:
                    raise ValueError(f"{len(ids)} blocks of {size} tokens in a prompt of {prompt_len}")
                log.add_request(prompt_len, prompt_len // size * size)
            log.use(ids, [size] * len(ids), 0 if event["is_answer"] else len(ids))
        return log, seconds
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"this is no reply of GET /hicache/sample ({type(error).__name__}: {error})") from None


def load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{path} cannot be read ({error}): save the reply of GET /hicache/sample there") from None
