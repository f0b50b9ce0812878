"""What `make demo-peers` has measured: its table at the end, and which of its aims were missed.

Owns the aims. Pure functions over plain data: asks no server and prints nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.demo_common import Answer

# The prompt tokens of returning turns that a borrowing master finds more than one alone, as a part of all of them.
LEAST_GAIN = 0.2
# What a worker finds of its second turns when the master is idle, as a part of what one finds that lends nothing.
LEAST_FOUND = 0.95


@dataclass(frozen=True)
class Turn:
    """A question to three servers with the master's model. alone: has the master's flags, without peers."""

    number: int
    uncached: Answer
    alone: Answer
    master: Answer

    @property
    def is_same(self) -> bool:
        return self.uncached.text == self.alone.text == self.master.text


@dataclass(frozen=True)
class LongPrompt:
    """A prompt for which the master has no room without peers."""

    # The longest prompts that the servers accept, as they tell.
    limit_alone: int
    limit_master: int
    # The message with which the master alone refuses it; "" if it does not.
    refusal: str
    uncached: Answer
    master: Answer

    @property
    def is_same(self) -> bool:
        return self.uncached.text == self.master.text


@dataclass(frozen=True)
class Work:
    """Second turns of a worker's own conversations: on the worker, and on one with its flags that lends nothing."""

    lends: tuple[Answer, ...] = ()
    alone: tuple[Answer, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(self.lends + other.lends, self.alone + other.alone)

    @property
    def share(self) -> float:
        """What the worker finds, as a part of what the other one finds."""
        return found(self.lends) / max(1, found(self.alone))


@dataclass(frozen=True)
class Slabs:
    """Of the worker that gets work, since its start."""

    lent: int
    asked_back: int
    # What the master has given back, to all workers.
    withdrawn: int
    # The worker waited at most so long for slabs that it asked back, in seconds.
    longest_s: float


@dataclass(frozen=True)
class Outcome:
    turns: Sequence[Turn]
    long_prompt: LongPrompt
    # Before the worker has back what it lent a busy master, and after that.
    work_lent: Work
    work_idle: Work
    slabs: Slabs

    @property
    def returning(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.number > 1]


def found(answers: Sequence[Answer]) -> int:
    """Prompt tokens that were in a cache."""
    return sum(sum(answer.tiers.values()) for answer in answers)


def prompt_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.prompt_tokens for answer in answers)


def first_token_ms(answers: Sequence[Answer]) -> float:
    """The median."""
    return statistics.median(answer.ttft_s for answer in answers) * 1e3


def longest_wait_s(samples: Sequence[tuple[float, int, int]]) -> float:
    """samples: when a worker was looked at, in seconds; how many slabs it had asked back until then, since its start;
    and how many of them were not back. Returns the most seconds that some were not back, counted from the look before
    they were asked back."""
    longest_s, began = 0.0, None
    for (before, last_asked, _), (now, asked, coming) in itertools.pairwise(samples):
        if asked > last_asked and began is None:
            began = before
        if began is not None:
            longest_s = max(longest_s, now - began)
            if not coming:
                began = None
    return longest_s


def problems(outcome: Outcome) -> list[str]:
    """The aims that were missed, a sentence each."""
    turns, returning, long = outcome.turns, outcome.returning, outcome.long_prompt
    missed = []
    if num := sum(not turn.is_same for turn in turns):
        missed.append(f"{num} of {len(turns)} answers differ from those of the server without a cache")
    if not any(turn.master.tiers.get("peer", 0) for turn in turns):
        missed.append("the master found no tokens at peers")
    alone, master = ([getattr(turn, name) for turn in returning] for name in ("alone", "master"))
    if found(master) - found(alone) < LEAST_GAIN * prompt_tokens(master):
        missed.append(
            f"of {prompt_tokens(master)} prompt tokens of returning turns the master found {found(master)} with "
            f"peers and {found(alone)} alone: at least {LEAST_GAIN:.0%} of them more are expected"
        )
    if long.limit_master <= long.limit_alone:
        missed.append(f"the longest prompt is {long.limit_master} tokens with peers, {long.limit_alone} alone")
    if not long.refusal:
        missed.append(f"the master alone took a prompt of {long.uncached.prompt_tokens} tokens")
    if not long.is_same:
        missed.append("the answer to the long prompt differs from that of the server without a cache")
    if outcome.work_idle.share < LEAST_FOUND:
        missed.append(
            f"with an idle master the worker found {found(outcome.work_idle.lends)} tokens of its second turns, and "
            f"{found(outcome.work_idle.alone)} alone: at least {LEAST_FOUND:.0%} are expected"
        )
    if not (outcome.slabs.lent and outcome.slabs.asked_back and outcome.slabs.withdrawn):
        missed.append("no slab was lent, or none was reclaimed")
    return missed


def table(outcome: Outcome) -> list[str]:
    """The gains of the master and the cost of the worker, as lines of at most 100 characters."""
    long, slabs = outcome.long_prompt, outcome.slabs
    returning = outcome.returning
    alone, master = [turn.alone for turn in returning], [turn.master for turn in returning]
    lines = [_row("What the master gains", "alone", "with peers")]
    lines.append(_row(f"prompt tokens found, {len(returning)} returning turns", _share(alone), _share(master)))
    lines.append(_row("their time to first token, median, measured", _first_token(alone), _first_token(master)))
    lines.append(_row("longest prompt that it accepts, tokens", f"{long.limit_alone:,}", f"{long.limit_master:,}"))
    answer = "answered, equal" if long.is_same else "answer differs"
    lines.append(
        _row(f"a prompt of {long.uncached.prompt_tokens:,} tokens", "refused" if long.refusal else "taken", answer)
    )
    lines += ["", _row("What it costs the worker", "alone", "lends")]
    for when, work in (("memory lent", outcome.work_lent), ("master idle", outcome.work_idle)):
        what = f"{when}: prompt tokens found, {len(work.alone)} second turns"
        lines.append(_row(what, _share(work.alone), _share(work.lends)))
        lines.append(
            _row(f"{when}: time to first token, median, measured", _first_token(work.alone), _first_token(work.lends))
        )
    lines.append(_row("slabs lent, and asked back", "-", f"{slabs.lent}, {slabs.asked_back}"))
    lines.append(_row("longest wait for slabs, measured", "-", f"{slabs.longest_s * 1e3:.0f} ms"))
    return lines


def _row(what: str, alone: str, other: str) -> str:
    return f"{what:<54} {alone:>18} {other:>18}".rstrip()


def _share(answers: Sequence[Answer]) -> str:
    return f"{found(answers):,} ({found(answers) / max(1, prompt_tokens(answers)):.0%})"


def _first_token(answers: Sequence[Answer]) -> str:
    return f"{first_token_ms(answers):.0f} ms"
