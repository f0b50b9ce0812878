"""What is asked: sessions of turns. Plain data, and functions that cut it to what a server takes.

A message is a text of a file, or made up from block keys: equal keys give equal tokens, so that prompts share a
prefix as far as their keys do. Its text is made when it is sent; a trace of long prompts would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sglang.serving_benchmark.draws import splitmix64
from sglang.serving_benchmark.vocabulary import Vocabulary

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Message:
    # Tokens; near the real number if the text was not made up of whole words.
    num_tokens: int
    # From a file; None: made up from the keys.
    text: str | None = None
    # One number per block. Blocks with equal keys have equal tokens.
    keys: tuple[int, ...] = ()
    # Tokens of every block; the last may be cut by num_tokens.
    block_len: int = 0

    def text_in(self, vocabulary: Vocabulary, salt: int) -> str:
        """salt: another one gives other tokens for the same keys."""
        return vocabulary.text_at(self._places(vocabulary, salt)) if self.text is None else self.text

    def ids_in(self, vocabulary: Vocabulary, salt: int) -> list[int]:
        if self.text is not None:
            return vocabulary.encode(self.text)
        return vocabulary.ids_at(self._places(vocabulary, salt))

    def _places(self, vocabulary: Vocabulary, salt: int) -> np.ndarray:
        salted = np.array(self.keys, np.uint64) ^ splitmix64(np.array([salt & _MASK], np.uint64))
        numbers = splitmix64(splitmix64(salted)[:, None] + np.arange(self.block_len, dtype=np.uint64))
        return vocabulary.pick(numbers.ravel()[: self.num_tokens])


def made_up(key: int, num_tokens: int) -> Message:
    """A message of one block."""
    return Message(int(num_tokens), keys=(key,), block_len=int(num_tokens))


@dataclass(frozen=True)
class Turn:
    # What is new in this turn's prompt.
    message: Message
    # Tokens to ask for, at least 1.
    output_len: int
    # Seconds from the answer before to this turn; of a first turn 0.
    delay_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """A turn is sent once the one before is answered, with all that came before it, the real answers included."""

    turns: tuple[Turn, ...]
    # Stands before the first message, and may be shared by sessions.
    context: Message | None = None
    # Seconds from the trace's beginning; None: the dataset has no times.
    start_s: float | None = None


@dataclass(frozen=True)
class Workload:
    sessions: tuple[Session, ...]
    # Sentences that belong to every result: what was scaled, cut or taken from a sample.
    notes: tuple[str, ...] = ()
    # By which the lengths of a trace were multiplied; None: they were not.
    length_scale: float | None = None
    # Requests that are longer than the server takes, or follow one in their session.
    num_dropped: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


@dataclass(frozen=True)
class Limits:
    # Tokens of a prompt with its answer; None: not known.
    max_total_len: int | None
    # Tokens that the server puts around a session's first message, and around each later one.
    first_extra: int = 0
    turn_extra: int = 0


def first_requests(workload: Workload, num_requests: int) -> Workload:
    """The first so many requests, in the order of sessions. The last session may be cut."""
    sessions: list[Session] = []
    left = num_requests
    for session in workload.sessions:
        if left <= 0:
            break
        sessions.append(replace(session, turns=session.turns[:left]))
        left -= len(session.turns)
    return replace(workload, sessions=tuple(sessions))


def fit(workload: Workload, limits: Limits) -> Workload:
    """Without the requests that are too long. Later turns of their sessions are longer, and are left out too."""
    if limits.max_total_len is None:
        return workload
    kept: list[Session] = []
    dropped = 0
    for session in workload.sessions:
        turns = list(_fitting(session, limits, limits.max_total_len))
        dropped += len(session.turns) - len(turns)
        if turns:
            kept.append(replace(session, turns=tuple(turns)))
    return replace(workload, sessions=tuple(kept), num_dropped=dropped)


def _fitting(session: Session, limits: Limits, max_total_len: int) -> Iterable[Turn]:
    length = limits.first_extra + (session.context.num_tokens if session.context else 0)
    for turn in session.turns:
        length += turn.message.num_tokens + turn.output_len
        if length > max_total_len:
            return
        yield turn
        length += limits.turn_extra
