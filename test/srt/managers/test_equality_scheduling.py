"""Greedy tokens stay transformers' whatever the scheduler does about loads; see test_equality.py.

What is done depends on what things cost, and that on the clock: here the scheduler is told, and measures nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_equality import MODELS, Model, check_memory, greedy, prompts

from sglang.srt.managers.schedule_policy import pairs_of
from sglang.srt.mem_cache.transfer import H2D, Tier
from support.local_engine import LocalEngine

OFF = {"bubble_filling": False, "load_or_recompute": False, "deferral_threshold": 0, "load_ratio": 0.0}
MECHANISMS = {
    "bubble filling": {"bubble_filling": True},
    "bubble filling by batch": {"bubble_filling": True, "holds_batches": True},
    "load or recompute": {"load_or_recompute": True},
    "deferral": {"deferral_threshold": 8},
    "deferral, inserted late": {"deferral_threshold": 8, "insert_at": "completion"},
    "balanced": {"load_ratio": 0.5},
    "longest prefix": {"schedule_policy": "lpm"},
    "all": {"bubble_filling": True, "load_or_recompute": True, "deferral_threshold": 8, "load_ratio": "auto"},
    "all, inserted late": {
        "bubble_filling": True,
        "load_or_recompute": True,
        "deferral_threshold": 8,
        "load_ratio": "auto",
        "insert_at": "completion",
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(MODELS["qwen3"], str(tmp_path_factory.mktemp("qwen3")))


def engine_of(model: Model, page_size: int, **options: object) -> LocalEngine:
    engine = model.engine(
        page_size=page_size,
        num_device_pages=256 // page_size,
        num_host_pages=1600 // page_size,
        max_running_requests=3,
        **{**OFF, **options},
    )
    scheduler = engine.scheduler
    # A token takes a little longer to compute than to load, and a decode step next to nothing.
    for n in (1, 20, 100, 40):
        scheduler.planner.expected.costs.add_prefill(n, 0, pairs_of(0, n), n * 1e-2)
        scheduler.planner.expected.costs.add_copy(n * scheduler.config.page_bytes // page_size, n * 8e-3, H2D)
        scheduler.planner.expected.costs.add_decode(2, 100, 1e-6)
    for name in ("add_prefill", "add_copy", "add_decode"):
        setattr(scheduler.planner.expected.costs, name, lambda *measured: None)
    return engine


def empty_device(engine: LocalEngine) -> None:
    """What was computed is on the host alone."""
    engine.settle()
    engine.scheduler.cache.controller.evict(Tier.DEVICE, 256)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MECHANISMS)
def test_tokens_stay_the_same(model: Model, name: str, page_size: int) -> None:
    engine = engine_of(model, page_size, **MECHANISMS[name])
    # Three conversations that do not fit together, with twins; each comes back alone and with others.
    batch = prompts(21, [80, 90, 70], shared=32)
    twins = [np.concatenate([prompt, prompt[:3]]) for prompt in batch]
    hits = 0
    for group in (batch[:1], batch[1:2], [batch[2], twins[2]], [twins[0], *batch], batch[1:2], twins, batch[:1]):
        lengths = [8, 3, 5, 4][: len(group)]
        for prompt, n, answer in zip(group, lengths, engine.generate(group, [greedy(n) for n in lengths])):
            model.check(prompt, answer, n)
            hits += answer.cached_tokens_details["host"]
        empty_device(engine)
    counters = engine.scheduler.counters
    print({key: counters[key] for key in counters if not key.startswith("hit")})
    assert hits + counters["recomputed_instead_tokens"] > 400 and hits > 60
    late = "insert_at" in MECHANISMS[name]
    for counter, is_on in (
        ("bubbles_filled", "bubble" in name or "all" in name),
        ("recomputed_instead", ("recompute" in name or "all" in name) and not late),
        ("deferred", "deferral" in name or "all" in name),
    ):
        assert (counters[counter] > 0) == is_on, counter
    check_memory(model, engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("insert_at", ["launch", "completion"])
def test_loads_fail_under_all_mechanisms(model: Model, insert_at: str, page_size: int) -> None:
    options = {
        **MECHANISMS["all"],
        "insert_at": insert_at,
        "load_fail_rate": 0.5,
        "late_rate": 0.3,
        "seed": page_size,
    }
    engine = engine_of(model, page_size, **options)
    batch = prompts(22, [80, 60, 70], shared=32)
    for _ in range(3):
        for group in (batch[:2], batch[1:], batch[::2]):
            for prompt, answer in zip(group, engine.generate(group, greedy(5))):
                model.check(prompt, answer, 5)
            empty_device(engine)
    assert engine.scheduler.state()["counters"]["failed_ops"] > 0, "nothing failed"
    check_memory(model, engine)


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_computed_instead_of_loaded_is_as_good(model: Model, page_size: int) -> None:
    """One request with nobody beside it, whose prompt is on the host: a part of it is computed, the rest comes."""
    engine = engine_of(model, page_size, load_or_recompute=True)
    (prompt,) = prompts(23, [151])
    for turn in range(2):
        (answer,) = engine.generate([prompt], greedy(9))
        model.check(prompt, answer, 9)
        front = engine.scheduler.counters["recomputed_instead_tokens"]
        cached = 150 // page_size * page_size
        assert answer.cached_tokens_details == {"device": 0, "host": (cached - front) * turn}
        assert (0 < front < cached) == (turn == 1)
        if turn == 0:
            empty_device(engine)
    check_memory(model, engine)
