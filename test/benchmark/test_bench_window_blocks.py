"""The simulated tier of `bench_window_blocks.py`, by hand. Blocks have one token, windows reach two blocks."""

from __future__ import annotations

import pytest
from benchmark.bench_window_blocks import RULES, Tier

PATH = list(range(1, 21))


def tier(rule: str, capacity: float = 1000.0) -> Tier:
    return Tier(capacity, 0.5, 2, RULES[rule])


def ask(some: Tier, blocks: list[int]) -> float:
    return some.ask(blocks, [1.0] * len(blocks), len(blocks))


def test_all_layers_are_found_wherever_a_prompt_leaves() -> None:
    some = tier("all layers")
    assert ask(some, PATH) == 0 and some.written == 20
    assert ask(some, [*PATH[:7], 90]) == 7 and some.written == 21


def test_an_end_is_found_and_what_others_have_left() -> None:
    some = tier("ends alone")
    assert ask(some, PATH) == 0 and some.written == pytest.approx(20 * 0.5 + 3 * 0.5), "windows of the last three"
    assert ask(some, [*PATH, 90]) == 20
    assert ask(some, [*PATH[:7], 91]) == 0 and ask(some, [*PATH[:7], 92]) == 7


def test_a_checkpoint_is_found_before_the_place() -> None:
    some = tier("every 4 windows")
    ask(some, PATH)
    assert ask(some, [*PATH[:13], 90]) == 8 and ask(some, [*PATH[:13], 91]) == 13


def test_the_tier_gives_up_what_was_used_least_recently() -> None:
    some = tier("all layers", capacity=22)
    ask(some, PATH)
    ask(some, [100, 101, 102])
    assert ask(some, PATH) == 19, "the end of the oldest path went first"
