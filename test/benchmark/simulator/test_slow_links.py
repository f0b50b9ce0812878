"""Links that are slow, slower one way, change their speed or hang, beside full devices: a server with such a tier
beside one without it, on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmark.harm import ServerRun, run_server
from benchmark.simulator.small_machine import BYTES_PER_TOKEN, TOKEN_S, SmallMachine
from benchmark.simulator.workloads import Conversation, Turn, Workload, poisson_times, random_tokens

from sglang.simulator.health import LinkHealth
from sglang.simulator.simulation import SimulatedHardware
from sglang.srt.mem_cache.transfer import D2H, H2D, Tier

HOST, DEVICE = Tier.HOST, Tier.DEVICE
ALONE = SmallMachine({DEVICE: 4096}, context_len=4096)
WITH_HOST = replace(ALONE, sizes={DEVICE: 4096, HOST: 4096})


class OddMachine(SmallMachine):
    """One whose links differ from what its tiers' speeds make of them."""

    def hardware(self) -> SimulatedHardware:
        return replace(super().hardware(), **self.changes)


def odd(**changes: object) -> OddMachine:
    machine = OddMachine(WITH_HOST.sizes, context_len=WITH_HOST.context_len)
    object.__setattr__(machine, "changes", changes)
    return machine


def asked(prompts: list[np.ndarray], per_s: float, new_tokens: int = 16) -> Workload:
    starts = poisson_times(np.random.default_rng(1), len(prompts), per_s)
    turn = Turn(np.zeros(0, np.int32), new_tokens)
    talks = (Conversation(float(at), prompt, (turn,)) for at, prompt in zip(starts, prompts, strict=True))
    return Workload("asked", tuple(talks), max_in_flight=None)


def unique(number: int, size: int = 512, longer: int = 0) -> list[np.ndarray]:
    """Every tenth prompt is as long as `longer`, if given."""
    rng = np.random.default_rng(2)
    return [random_tokens(rng, longer if longer and i % 10 == 9 else size) for i in range(number)]


def ms(run: ServerRun) -> tuple[float, float]:
    """Mean and largest time to first token."""
    return 1e3 * float(np.mean(run.ttft_s)), 1e3 * max(run.ttft_s)


@pytest.mark.slow
@pytest.mark.parametrize("speed", [0.01, pytest.param(0.001, marks=pytest.mark.slow)])
def test_long_answers_do_not_wait_for_a_slow_host(speed: float) -> None:
    """Those who run outgrow the device, and must not wait for the little that is copied."""
    work = [asked(unique(40), per_s=6, new_tokens=500)]
    alone, beside = (run_server(m, work) for m in (ALONE, replace(WITH_HOST, speeds={HOST: speed})))
    assert alone.counters["retracted_reqs"] > 0
    assert ms(beside)[0] < 1.1 * ms(alone)[0]
    assert np.mean(beside.tpot_s) < 1.1 * np.mean(alone.tpot_s)


def test_prompts_as_long_as_the_device_start_though_a_copy_hangs_for_ever() -> None:
    work = [asked(unique(40, longer=3900), per_s=3)]
    hung = odd(health={D2H: LinkHealth(rates=((4.0, 0.0),))})
    alone, beside = (ms(run_server(m, work)) for m in (ALONE, hung))
    # The hang is noticed after one second.
    assert beside[1] < alone[1] + 1_100
    assert beside[0] < 1.5 * alone[0]


@pytest.mark.slow
def test_a_link_that_is_slow_now_and_then_leaves_no_device_idle() -> None:
    """While a copy takes longer than expected, other pages go."""
    slow = tuple((3.0 * i, 0.02 if i % 2 else 1.0) for i in range(1, 10))
    work = [asked(unique(90), per_s=3)]
    alone = replace(ALONE, page_size=1, chunk_tokens=256)
    beside = replace(
        alone, sizes={DEVICE: 4096, HOST: 2048}, speeds={HOST: 1.0}, health={HOST: LinkHealth(rates=slow)}
    )
    alone, with_host = (ms(run_server(m, work)) for m in (alone, beside))
    assert with_host[0] < 1.1 * alone[0] and with_host[1] < 1.2 * alone[1]


@pytest.mark.slow
def test_loads_that_are_far_slower_than_backups_are_tried_seldom() -> None:
    """A load of 512 tokens takes 0.5 s, which launches wait for, and computing them 0.05 s. How many requests
    come meanwhile is chance, so that four runs are judged together."""
    texts = unique(12)
    waits: dict[str, list[float]] = {"alone": [], "beside": []}
    for seed in range(3, 7):
        picked = np.random.default_rng(seed).integers(0, 12, 200).tolist()
        work = [asked([texts[i] for i in picked], per_s=5)]
        beside = run_server(odd(h2d_bandwidth=0.1 * BYTES_PER_TOKEN / TOKEN_S), work)
        assert 0 < beside.loaded < 4 * 512 and beside.stall_s < 2.0, seed
        waits["beside"] += beside.ttft_s
        waits["alone"] += run_server(ALONE, work).ttft_s
    assert np.mean(waits["beside"]) < 1.5 * np.mean(waits["alone"])


@pytest.mark.slow
def test_a_load_that_was_overtaken_by_computing_is_tried_again_when_its_link_is_fast() -> None:
    texts = unique(12)
    picked = np.random.default_rng(3).integers(0, 12, 300).tolist()
    work = [asked([texts[i] for i in picked], per_s=5)]
    recovering = LinkHealth(rates=((10.0, 0.01), (20.0, 1.0)))
    healthy, beside = (run_server(m, work) for m in (WITH_HOST, odd(health={H2D: recovering, D2H: recovering})))
    assert 0.7 * healthy.loaded < beside.loaded < healthy.loaded


def test_a_link_that_is_suddenly_a_thousand_times_slower_holds_up_few_launches() -> None:
    """A load of 512 tokens takes 0.5 s for 0.5 ms, so that the requests of six seconds waited for theirs."""
    texts = unique(12)
    picked = np.random.default_rng(3).integers(0, 12, 120).tolist()
    work = [asked([texts[i] for i in picked], per_s=10)]
    slow = LinkHealth(rates=((4.0, 0.001), (10.0, 1.0)))
    alone, beside = (
        run_server(m, work) for m in (ALONE, replace(WITH_HOST, speeds={HOST: 100.0}, health={HOST: slow}))
    )
    assert beside.loaded > 8 * 512 and beside.stall_s < 1.0
    assert ms(beside)[0] < 1.5 * ms(alone)[0]
