"""A bounded sample of blocks: what is in it, what a full one drops, what it does not tell."""

from __future__ import annotations

import json

import numpy as np

from sglang.cli.reference_sources import read_sample
from sglang.srt.managers import prefix_sampler
from sglang.srt.managers.prefix_sampler import SAMPLED_TOKENS, PrefixSampler


def prompt(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.int32)


def events(sampler: PrefixSampler) -> list[dict]:
    return json.loads(json.dumps(sampler.state()))["events"]


def test_equal_beginnings_have_equal_digests_and_nothing_else_has() -> None:
    sampler = PrefixSampler()
    first = prompt(1, 5 * SAMPLED_TOKENS + 3)
    second = first.copy()
    second[2 * SAMPLED_TOKENS] += 1
    # The same blocks at other places.
    turned = np.concatenate((first[SAMPLED_TOKENS : 2 * SAMPLED_TOKENS], first[:SAMPLED_TOKENS]))
    for namespace, ids in (("", first), ("", second), ("a", first), ("", turned)):
        sampler.note_prompt(namespace, ids)
    a, b, c, d = (each["blocks"] for each in events(sampler))
    assert len(a) == 5 and a[:2] == b[:2] and not set(a[2:]) & set(b[2:])
    assert not set(a) & set(c) and not set(a) & set(d)


def test_each_start_has_a_secret_of_its_own() -> None:
    one, other = PrefixSampler(), PrefixSampler()
    for sampler in (one, other):
        sampler.note_prompt("", prompt(1, 4 * SAMPLED_TOKENS))
    assert not set(events(one)[0]["blocks"]) & set(events(other)[0]["blocks"])


def test_answers_are_noted_with_what_is_before_them() -> None:
    sampler = PrefixSampler()
    ids = prompt(1, 4 * SAMPLED_TOKENS)
    sampler.note_prompt("", ids[: 2 * SAMPLED_TOKENS + 5])
    sampler.note_answer("", ids[: 3 * SAMPLED_TOKENS - 1], 2 * SAMPLED_TOKENS + 5)
    assert len(events(sampler)) == 1, "the answer filled no block"
    sampler.note_answer("", ids, 2 * SAMPLED_TOKENS + 5)
    asked, answered = events(sampler)
    assert answered["is_answer"] and answered["blocks"][:2] == asked["blocks"] and len(answered["blocks"]) == 4


def test_a_full_list_halves_the_rate_and_keeps_all_uses_of_what_it_keeps() -> None:
    sampler = PrefixSampler(max_digests=200)
    prompts = [prompt(seed, 40 * SAMPLED_TOKENS) for seed in range(4)]
    for ids in prompts * 10:
        sampler.note_prompt("", ids)
    state = sampler.state()
    assert state["rate"] in (1 / 8, 1 / 16) and sum(len(each["blocks"]) for each in state["events"]) <= 200
    assert len(state["events"]) == 40, "no event is lost"
    for first in range(4):
        uses = {tuple(each["blocks"]) for each in state["events"][first::4]}
        assert len(uses) == 1, "of each prompt the same blocks every time"
    log, _ = read_sample(state)
    assert log.num_requests == 40 and log.prompt_tokens == 40 * 40 * SAMPLED_TOKENS
    curve = log.curve()
    assert abs(curve.most / curve.prompt_tokens - 36 / 40) < 0.1


def test_the_oldest_events_go_where_halving_does_not_help(monkeypatch) -> None:
    monkeypatch.setattr(prefix_sampler, "MAX_EVENTS", 3)
    now = iter(range(100))
    sampler = PrefixSampler(clock=lambda: float(next(now)))
    for seed in range(5):
        sampler.note_prompt("", prompt(seed, SAMPLED_TOKENS - 1))
    state = sampler.state()
    assert state["rate"] == 1 and [each["at"] for each in state["events"]] == [0, 1, 2]
