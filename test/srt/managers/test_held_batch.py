"""Bubble filling as Strata has it: a batch waits for its loads as a whole. Costs as in test_load_scheduling.py:

decode step 10 ms     prefill 1 ms per new token, in 4 layers     load: 5 ms per token, unless a test tells another
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from test_load_scheduling import (
    DECODE_S,
    DOCUMENT,
    RUNNER,
    SMALL_POOL,
    TOKEN_S,
    Rig,
    fresh,
    gaps,
    request,
    run_questions,
)

from sglang.simulator.simulation import RequestTimes
from sglang.srt.managers.scheduler_config import PriorityConfig

HELD = {"bubble_filling": True, "holds_batches": True}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loader_first", [True, False])
def test_a_batch_waits_for_its_loads_as_a_whole_while_others_decode(loader_first: bool) -> None:
    """A prompt of 20 new tokens is in one batch with another one that loads for half a second. Decided per request,
    it passes that one; a batch that is held takes it along, and no request that comes later."""
    both = [request("loads", DOCUMENT + fresh(5, 1)), request("cold", fresh(20, 2))]
    arrivals = [RUNNER, *((0.1, each) for each in (both if loader_first else both[::-1]))]
    arrivals.append((0.2, request("late", fresh(20, 3))))

    def run(**settings: object) -> tuple[Rig, dict[str, RequestTimes]]:
        rig = Rig(**settings)
        rig.remember(DOCUMENT)
        return rig, rig.run(arrivals)

    per_request, passed = run(bubble_filling=True)
    assert per_request.first(passed, "cold") < 0.15 and per_request.first(passed, "late") < 0.25
    held, times = run(**HELD)
    first = held.first(times, "loads")
    assert first == held.first(times, "cold") == pytest.approx(0.6, abs=4 * DECODE_S)
    assert held.first(times, "late") > first
    assert [len(launch.lens) for _, launch in held.prefills()] == [1, 2, 1]
    # The runner decodes all the time, but for the two prefills.
    assert max(gaps(times["runner"])) <= 2 * DECODE_S + (25 + 20) * TOKEN_S + 1e-9
    assert held.counter("bubbles_filled") >= 40 and held.sim.executor.stall_s <= DECODE_S


def test_a_batch_is_not_held_when_no_request_decodes() -> None:
    """Another prefill fills no bubble of the paper's: the batch is launched, and stalls."""
    rig = Rig(**HELD)
    rig.remember(DOCUMENT)
    times = rig.run([(0.0, request("loads", DOCUMENT + fresh(5, 1))), (0.0, request("cold", fresh(20, 2)))])
    assert [len(launch.lens) for _, launch in rig.prefills()] == [2]
    assert times["cold"].ttft == times["loads"].ttft >= 0.5 and rig.counter("bubbles_filled") == 0


def test_the_end_of_decoding_ends_the_waiting_of_a_batch() -> None:
    rig = Rig(**HELD)
    rig.remember(DOCUMENT)
    arrivals = [(0.0, request("runner", fresh(10), 20)), (0.1, request("loads", DOCUMENT + fresh(5, 1)))]
    times = rig.run([*arrivals, (0.1, request("cold", fresh(20, 2)))])
    over = times["runner"].tokens[-1] - rig.began
    assert over < 0.3 and rig.prefills()[1][0] <= over + DECODE_S
    assert rig.first(times, "cold") == rig.first(times, "loads") >= 0.6


def test_a_batch_whose_load_is_hidden_is_not_held() -> None:
    """300 tokens are computed while 100 are loaded."""
    rig = Rig(0.0003, **HELD)
    rig.remember(DOCUMENT)
    times = rig.run([RUNNER, (0.1, request("loads", DOCUMENT + fresh(300, 1)))])
    assert rig.counter("bubbles_filled") == 0 and not rig.preloads
    assert times["loads"].ttft <= 300 * TOKEN_S + 3 * DECODE_S


def test_an_abort_ends_the_waiting_of_the_others() -> None:
    rig = Rig(**HELD)
    rig.remember(DOCUMENT)
    rig.aborts = {"loads": 0.3}
    arrivals = [(0.1, request("loads", DOCUMENT + fresh(5, 1))), (0.1, request("cold", fresh(20, 2)))]
    times = rig.run([RUNNER, *arrivals])
    assert 0.3 <= rig.first(times, "cold") <= 0.3 + 5 * DECODE_S


def test_a_batch_that_lost_a_preload_is_not_held_again() -> None:
    """While the batch waits for its second load, its oldest request lacks room and takes back what the first one
    brought. Held again, it would wait for that load once more."""
    rig = Rig(0.01, **HELD, num_device_pages=160, context_len=159)
    documents = [fresh(50, i) for i in range(2)]
    rig.remember(*documents)
    arrivals = [(0.0, request("runner", fresh(5, 8), 120)), (0.05, request("cold", fresh(30, 9)))]
    times = rig.run([*arrivals, *((0.05, request(f"loads{i}", [*d, i])) for i, d in enumerate(documents))])
    assert {t.finish_reason for t in times.values()} == {"length"}
    assert 0.5 < times["cold"].ttft < 0.6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_held_batches_in_a_small_pool(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rig = Rig(
        0.003,
        **HELD,
        deferral_threshold=30,
        load_ratio=(0.0, 100.0, "auto")[seed],
        fails=lambda op: bool(rng.random() < 0.2),
        check_every=5,
        **SMALL_POOL,
        insert_at=("launch", "completion")[seed % 2],
    )
    run_questions(rig, rng)
    assert rig.counter("bubbles_filled") > 0


def test_a_request_that_started_and_lost_its_memory_is_of_the_batch_no_more() -> None:
    """Else it starts before the one of higher priority that took its memory, which takes it again, and so on."""
    rig = Rig(0.01, **HELD, priorities=PriorityConfig(preemption_threshold=0), max_running_requests=2)
    rig.remember(DOCUMENT)
    arrivals = [
        (0.0, msgspec.structs.replace(request("runner", fresh(10, 1), 200), priority=5)),
        (0.2, request("low", DOCUMENT + fresh(5, 2), 20)),
        (0.3, msgspec.structs.replace(request("high", fresh(5, 3), 20), priority=5)),
    ]
    launches: list[None] = []

    def after(_: object) -> None:
        launches.append(None)
        assert len(launches) < 3000, "no request makes a token"

    times = rig.run(arrivals, after)
    assert rig.counter("preempted_reqs") <= 2 and len(times) == 3


def test_a_batch_does_not_wait_for_a_load_that_finds_no_room() -> None:
    rig = Rig(0.01, **HELD, num_device_pages=130, context_len=129, new_token_ratio=0.0)
    documents = [fresh(50, i) for i in range(2)]
    rig.remember(*documents)
    arrivals = [(0.0, request("runner", fresh(5, 8), 120))]
    times = rig.run([*arrivals, *((0.05, request(f"loads{i}", [*d, i])) for i, d in enumerate(documents))])
    assert times["loads0"].ttft < 0.8 < times["runner"].tokens[-1] - rig.began
