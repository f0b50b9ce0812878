"""The yardsticks by hand and by brute force, and that the engine never does better than the best choice in
hindsight."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from benchmark.simulator.bounds import (
    Documents,
    Trace,
    hindsight_hits,
    hindsight_share,
    page_trace,
    run_documents,
    usable_share,
    with_unlimited_device,
)
from benchmark.simulator.small_machine import BYTES_PER_TOKEN, TOKEN_S, SmallMachine

from sglang.simulator.simulation import Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams

DEVICE_AND_HOST = {Tier.DEVICE: 4096, Tier.HOST: 4096}


def best_by_brute_force(trace: Trace, capacity: int, counted_from: int = 0) -> int:
    """Every choice of what to keep after every request."""
    reachable = {frozenset[int](): 0}
    for place, pages in enumerate(trace):
        following: dict[frozenset[int], int] = {}
        for memory, hits in reachable.items():
            found = hits + (len(memory & set(pages)) if place >= counted_from else 0)
            there = memory | set(pages)
            for kept in combinations(sorted(there), min(capacity, len(there))):
                following[frozenset(kept)] = max(following.get(frozenset(kept), 0), found)
        reachable = following
    return max(reachable.values())


def random_prompts(rng: np.random.Generator, count: int, most_pages: int, page_size: int) -> list[np.ndarray]:
    """Two kinds of page, so that prompts share prefixes. The last token is computed in any case."""
    lengths = rng.integers(1, most_pages + 1, count)
    return [np.append(np.repeat(rng.integers(10, 12, n), page_size), 5).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("seed", range(40))
def test_hindsight_is_the_best_of_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace = page_trace(random_prompts(rng, 7, 3, 2), 2)
    capacity, counted_from = int(rng.integers(0, 5)), int(rng.integers(0, 3))
    assert hindsight_hits(trace, capacity, counted_from) == best_by_brute_force(trace, capacity, counted_from)


def test_hindsight_by_hand() -> None:
    """A memory of two pages, and three documents of one: of 0 1 2 0 1 2, one that knows the future keeps 0 and 1."""
    trace = [[0], [1], [2], [0], [1], [2]]
    assert [hindsight_hits(trace, n) for n in range(4)] == [0, 1, 2, 3]
    # Of one document of three pages, a memory of two keeps the front.
    assert hindsight_hits([[0, 1, 2], [0, 1, 2]], 2) == 2
    assert hindsight_hits(trace, 2, counted_from=4) == 2


def test_pages_of_equal_prefixes_are_equal() -> None:
    prompts = [np.array(p, np.int32) for p in ([1, 2, 3, 4, 9], [1, 2, 5, 6, 9], [3, 4, 3, 4], [1, 2, 3, 4, 9])]
    # The third prompt's last page has its last token, and its first is another prompt's second, at another place.
    assert page_trace(prompts, 2) == [[0, 1], [0, 2], [3], [0, 1]]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_the_engine_never_does_better_than_hindsight(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page = 4
    tokens = int(rng.integers(6, 10)) * page
    sizes = {
        Tier.DEVICE: tokens,
        Tier.HOST: int(rng.integers(1, 8)) * page,
        Tier.PEER: int(rng.integers(0, 3)) * page,
    }
    machine = SmallMachine(sizes, page_size=page, write_policy=policy, chunk_tokens=16, context_len=tokens - 1)
    sim = Simulation(machine.config(), machine.hardware())
    prompts = random_prompts(rng, 30, 4, page)
    started: dict[str, None] = {}

    def look(decision: object) -> None:
        queues = sim.core.scheduler.queues
        active = [*queues.running, *([queues.prefilling] if queues.prefilling is not None else [])]
        started.update(dict.fromkeys(req.rid for req in active))

    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    arrivals = [
        (
            0.02 * i,
            TokenizedGenerateReqInput(rid=str(i), input_ids=ids_to_bytes(p), sampling_params=params, stream=True),
        )
        for i, p in enumerate(prompts)
    ]
    times = sim.run(arrivals, after_step=look)
    trace = page_trace([prompts[int(rid)] for rid in started], page)
    found = sum(sum(each.cached_tokens_details.values()) for each in times.values())
    assert len(started) == 30
    assert 0 < found <= page * hindsight_hits(trace, machine.sum_tokens // page)


@pytest.mark.slow
def test_memory_and_a_full_disk_add_up() -> None:
    """All tiers together hold the documents. What leaves memory is stored whole, its front too, and the disk gives
    up what memory has read."""
    machine = SmallMachine({Tier.DEVICE: 4096, Tier.HOST: 8192, Tier.DISK: 16384})
    documents = Documents(round(0.9 * machine.sum_tokens / Documents.document_tokens), 150)
    outcome, _ = run_documents(machine, documents)
    assert sum(outcome.hits.values()) > 0.9


def test_documents_are_asked_about_once_before_they_count() -> None:
    documents = Documents(5, 20)
    assert sorted(documents.about()[:5]) == list(range(5)) and len(documents.about()) == 25
    workload = documents.workload()
    assert [documents.is_measured(f"{i}-0") for i in range(25)] == [False] * 5 + [True] * 20
    stats = workload.stats()
    assert (stats.num_contexts, stats.mean_in, stats.mean_out) == (5, 520, 8)


def test_the_formula_by_hand() -> None:
    machine = SmallMachine({Tier.DEVICE: 4000, Tier.HOST: 6000}, chunk_tokens=512)
    # 10,000, less 168 that are held, 512 of a chunk and two pages of each of ten requests.
    assert usable_share(machine, 18_000, held_tokens=168, running=10) == pytest.approx(9_000 / 18_000)
    assert usable_share(machine, 8_000, held_tokens=168, running=10) == 1.0


def test_everything_is_found_where_the_device_holds_everything() -> None:
    machine, documents = SmallMachine(DEVICE_AND_HOST), Documents(24, 30)
    unlimited, _ = run_documents(with_unlimited_device(machine, documents), documents)
    assert unlimited.hits == {"device": 1.0}
    limited, prompts = run_documents(machine, documents)
    assert 0 < limited.hit_rate <= hindsight_share(prompts, machine, documents)
    assert limited.mean_ttft_s > 2 * unlimited.mean_ttft_s


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", [Tier.PEER, Tier.HOST, Tier.DISK, Tier.REMOTE])
def test_every_tier_of_the_small_machine_is_hit(tier: Tier) -> None:
    sizes = {Tier.DEVICE: 2048, Tier.HOST: 2048} | {tier: 8192}
    outcome, _ = run_documents(SmallMachine(sizes), Documents(12, 40, rate=2.0))
    assert outcome.hits[tier.name.lower()] > 0.1


def test_a_link_takes_as_long_as_its_speed_says() -> None:
    machine = SmallMachine(
        {Tier.DEVICE: 1024, Tier.HOST: 1024, Tier.REMOTE: 1024}, {Tier.HOST: 4.0, Tier.REMOTE: 0.5}
    )
    hardware = machine.hardware()
    assert 100 * BYTES_PER_TOKEN / hardware.h2d_bandwidth == pytest.approx(100 * TOKEN_S / 4)
    assert 100 * BYTES_PER_TOKEN / hardware.stores[0].store_bandwidth == pytest.approx(100 * TOKEN_S / 0.5)
    assert machine._data_plane(Tier.REMOTE).pace(100 * BYTES_PER_TOKEN) == pytest.approx(100 * TOKEN_S / 0.5)
