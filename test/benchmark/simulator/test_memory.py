"""What fits a GPU beside weights and activations, by hand; and the longest context against a search one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmark.simulator.memory import (
    SAMPLED_ROWS,
    activation_bytes,
    kv_room,
    longest_context,
)
from benchmark.simulator.profiles import MODELS

LWM = MODELS["LWM-7B"]


def test_activations_by_hand() -> None:
    # LWM's MLP: residual, input and output of 4,096; gate, up and product of 11,008; 2 bytes each.
    assert activation_bytes(LWM, 1000) == 1000 * 2 * 3 * (4096 + 11008)
    # A few tokens: 256 rows of 32,000 logits in 2 and in 4 bytes, beside residual and input.
    assert activation_bytes(LWM, 10) == 2 * 10 * 2 * 4096 + SAMPLED_ROWS * 32000 * (2 + 4)
    assert activation_bytes(LWM, 10, num_sampled=1) == 10 * 2 * 3 * (4096 + 11008)
    # A narrow MLP: 64 heads of 128 for Q and for the output, 8 for K and for V.
    narrow = replace(LWM, intermediate=1000, num_heads=64, num_kv_heads=8)
    assert activation_bytes(narrow, 1000, num_sampled=1) == 1000 * 2 * (2 * 4096 + 2 * 8192 + 2 * 1024)


def test_room_is_what_weights_and_activations_leave() -> None:
    assert kv_room(LWM, 20e9, 1e9) == 19e9 - LWM.resident_weight_bytes > 5e9
    assert kv_room(LWM, 14e9, 1e9) == 0


def test_longest_context_against_counting() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        most, falls, least = rng.randrange(200), rng.random() * 2, rng.randrange(50)

        def capacity(n: int) -> int:
            return max(min(most, least), int(most - falls * n))  # noqa: B023

        assert longest_context(capacity) == max(n for n in range(300) if n <= capacity(n))
    assert longest_context(lambda n: 0) == 0


@pytest.mark.parametrize("name", ["LWM-7B", "Qwen3-14B", "Qwen3-32B"])
def test_a_longer_pass_never_needs_less(name: str) -> None:
    sizes = [activation_bytes(MODELS[name], n) for n in range(0, 20_000, 500)]
    assert sizes == sorted(sizes) and sizes[0] > 0
