"""Traces of services without their texts: Mooncake's, and those of coding agents. Files are read, never fetched.

Both name prompts by the hashes of their blocks of 512 tokens. Equal hashes give equal tokens. Lengths may be scaled:
a block then has fewer tokens, and as large a share of each prompt is shared as before. `fitting_scale` finds the
factor at which a server takes all of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from argparse import Namespace
from bisect import bisect_left
from itertools import islice
from pathlib import Path
from typing import Any

from sglang.serving_benchmark.datasets.errors import DatasetError
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Limits, Message, Session, Turn, Workload

# Tokens that one hash stands for.
BLOCK = 512
# Of an answer: no model gives longer ones. Of a time: more than since 1970.
_MOST_OUTPUT, _MOST_S = 10_000_000, 1e12
SAMPLES = Path(__file__).parents[1] / "samples"


def mooncake(args: Namespace, vocabulary: Vocabulary) -> Workload:
    """Rows of timestamp (ms), input_length, output_length and hash_ids."""
    path, notes = _path(args.dataset_path, f"mooncake_{args.mooncake_workload}.jsonl", "--mooncake-workload")
    scale = _Scale(args.scale_lengths)
    # More than are sent would take memory for nothing.
    rounds = min(args.mooncake_num_rounds, args.num_prompts)
    sessions = []
    for where, row in _rows(path, args.num_prompts):
        try:
            turn = scale.turn(row)
            start = _seconds(row, "timestamp")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _malformed(where, error) from None
        sessions.append(Session((turn,) * rounds, start_s=start))
    sessions.sort(key=lambda session: session.start_s or 0.0)
    return Workload(tuple(sessions), (*notes, *scale.notes), scale.factor)


def agentic(args: Namespace, vocabulary: Vocabulary) -> Workload:
    """One row per turn: session_id, output_length, and the input_length and hash_ids of what is new in it. A first
    turn has a timestamp, a later one the delay after the answer before, both in ms."""
    path, notes = _path(args.dataset_path, "agentic.jsonl", "")
    scale = _Scale(args.scale_lengths)
    turns: dict[str, list[Turn]] = {}
    starts: dict[str, float] = {}
    for where, row in _rows(path, args.num_prompts):
        try:
            name = str(row["session_id"])
            delay = _seconds(row, "delay") * args.mooncake_slowdown_factor if name in turns else 0.0
            if name not in turns:
                starts[name] = _seconds(row, "timestamp")
            turns.setdefault(name, []).append(scale.turn(row, delay))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _malformed(where, error) from None
    sessions = [Session(tuple(each), start_s=starts[name]) for name, each in turns.items()]
    return Workload(tuple(sessions), (*notes, *scale.notes), scale.factor)


def has_sessions(args: Namespace) -> bool:
    """Whether the trace is one for `agentic`."""
    rows = _rows(_path(args.dataset_path, "", "")[0], 1)
    return bool(rows) and "session_id" in rows[0][1]


def fitting_scale(workload: Workload, limits: Limits) -> float:
    """The largest factor up to 1 at which every request fits; at least one token a block. workload: not scaled."""
    most = limits.max_total_len
    assert most is not None and workload.length_scale is None

    def fits(block_len: int) -> bool:
        scale = _Scale(block_len / BLOCK)
        for session in workload.sessions:
            extra = limits.first_extra + (len(session.turns) - 1) * limits.turn_extra
            turns = ((scale.prompt_len(t.message.num_tokens), scale.output_len(t.output_len)) for t in session.turns)
            if extra + sum(map(sum, turns)) > most:
                return False
        return True

    # How many of the lengths from 1 to BLOCK fit: shorter ones fit if a longer one does.
    fitting = bisect_left(range(1, BLOCK + 1), True, key=lambda block_len: not fits(block_len))
    return max(1, fitting) / BLOCK


class _Scale:
    """Lengths of a trace times a factor. The tokens of a block are a whole number, which gives the real factor."""

    def __init__(self, asked: float) -> None:
        self._block_len = max(1, round(BLOCK * asked))
        by = self._block_len / BLOCK
        self.factor = by if by != 1 else None
        self.notes = (
            (
                f"Lengths are scaled by {by:.4g}: a block of {BLOCK} tokens has {self._block_len}. Blocks that were "
                "shared are shared.",
            )
            if self.factor
            else ()
        )

    def turn(self, row: dict[str, Any], delay_s: float = 0.0) -> Turn:
        """Raises KeyError, TypeError, ValueError or OverflowError."""
        if not isinstance(row["hash_ids"], list):
            raise ValueError("hash_ids is no list")
        keys = tuple(int(key) % (1 << 64) for key in row["hash_ids"])
        length, output_len = int(row["input_length"]), int(row["output_length"])
        if not keys or not 0 < length <= len(keys) * BLOCK:
            raise ValueError(f"{length} tokens do not fit {len(keys)} blocks of {BLOCK}")
        if not 1 <= output_len <= _MOST_OUTPUT:
            raise ValueError(f"output_length is {row['output_length']!s:.30}")
        scaled = self.prompt_len(length)
        message = Message(scaled, keys=keys[: -(-length // BLOCK)], block_len=self._block_len)
        return Turn(message, self.output_len(output_len), delay_s)

    def prompt_len(self, length: int) -> int:
        """Whole blocks stay whole, so that what follows a shared prefix begins at a block."""
        whole, rest = divmod(length, BLOCK)
        return whole * self._block_len + (self.output_len(rest) if rest else 0)

    def output_len(self, length: int) -> int:
        return max(1, round(length * self._block_len / BLOCK))


def _seconds(row: dict[str, Any], field: str) -> float:
    """Of a field in ms. Raises KeyError, TypeError or ValueError."""
    found = float(row[field]) / 1000
    if not 0 <= found <= _MOST_S:
        raise ValueError(f"{field} is {row[field]}")
    return found


def _path(given: str, sample: str, flag: str) -> tuple[Path, tuple[str, ...]]:
    """(file, notes): the sample of the package if none is given."""
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise DatasetError(f"There is no file {given!r}: give --dataset-path the trace, as .jsonl or .jsonl.gz.")
        return path, ()
    path = SAMPLES / sample
    if not path.is_file():
        raise DatasetError(
            f"The package has no sample {sample}: give the trace with --dataset-path, or change {flag}."
        )
    return path, (f"The trace is the package's sample {sample}: --dataset-path takes a whole one.",)


def _rows(path: Path, most: int) -> list[tuple[str, dict[str, Any]]]:
    """(where, row): where names file and line. The first `most` rows."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            found = [(f"{path}:{number}", _parsed(number, line)) for number, line in islice(numbered, most)]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DatasetError(f"{path} is not a trace in JSON lines ({error}).") from None
    for where, row in found:
        if not isinstance(row, dict):
            raise DatasetError(f"{where} is no JSON object: give --dataset-path a trace, one row a line.")
    return found


def _parsed(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None


def _malformed(where: str, error: Exception) -> DatasetError:
    reason = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
    return DatasetError(f"{where} is no row of this kind of trace: {reason}.")
