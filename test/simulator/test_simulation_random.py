"""Random mixes of tiers, sizes, speeds and policies on the virtual clock: every request ends, and the books agree.

The soak has real memory and random orders; here operations take the time that a link's speed says, so that requests
queue, preload and overtake as they would on hardware.
"""

from __future__ import annotations

import random
from functools import partial

import msgspec
import numpy as np
import pytest

from sglang.simulator.simulation import SimulatedHardware, SimulatedStore, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.managers.storage_setup import PREFETCH_POLICIES, PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams

TOKEN_BYTES, TOKEN_S, LAYERS, NUM_REQUESTS = 100, 1e-3, 4, 60
# Of 45 seeds none takes more than 3,000 steps.
MAX_STEPS = 12_000


def draw_config(rng: random.Random) -> SchedulerConfig:
    page = rng.choice((1, 4, 16))
    write_policy = rng.choice(WRITE_POLICIES)
    storage = StorageSetup(
        backend="simulated",
        setup="",
        secret=b"random",
        block_tokens=page * rng.choice((1, 4)),
        limits=StorageLimits(rng.choice((1, 4)), rng.choice((8, 64)), rng.choice((8, 64)), rng.choice((1, 8))),
        prefetch=PrefetchConfig(
            rng.choice(PREFETCH_POLICIES),
            rng.choice((1, 32)),
            timeout_base_s=rng.choice((0.001, 0.1, 1.0)),
            fetch_order=rng.choice(("fifo", "sjf")),
        ),
        write_policy=write_policy,
        tiers=(rng.choice((Tier.DISK, Tier.REMOTE)),),
    )
    streams = rng.random() < 0.5
    return SchedulerConfig(
        page_size=page,
        num_device_pages=(120 if streams else rng.choice((200, 400))) // page + 4,
        num_host_pages=rng.choice((40, 100, 300)) // page + 4,
        num_peer_pages=rng.choice((0, 60, 300)) // page,
        page_bytes=TOKEN_BYTES * page,
        context_len=250,
        storage=storage if rng.random() < 0.8 else None,
        write_policy=write_policy,
        eviction_policy=rng.choice(list(EVICTION_POLICIES)),
        load_or_recompute=rng.random() < 0.5,
        bubble_filling=rng.random() < 0.7,
        chunked_prefill_size=max(page, rng.choice((16, 40))),
        insert_at=rng.choice(("launch", "completion")),
        max_running_requests=rng.choice((2, 8)),
        layer_stream=LayerStreamConfig(2, max(2, 20 // page)) if streams else None,
        num_swap_pages=rng.choice((0, 200)) // page if streams else 0,
        holds_batches=rng.random() < 0.3,
    )


def draw_hardware(rng: random.Random) -> SimulatedHardware:
    fail_rate, block_s = rng.choice((0.0, 0.0, 0.1)), rng.choice((1e-3, 0.05))

    def fetch_ends(op, submitted: float, is_busy: bool) -> float:
        return submitted + block_s * len(op.keys)

    bandwidth = partial(rng.choice, (1e4, 1e6, 1e8))
    return SimulatedHardware(
        LAYERS,
        lambda launch: TOKEN_S * int(launch.lens.sum()),
        *(bandwidth() for _ in range(4)),
        load_fails=lambda op: rng.random() < fail_rate,
        stores=(SimulatedStore(lambda: fetch_ends, rng.choice((1e4, 1e7)), probe_s=rng.choice((1e-4, 0.05))),),
        swap_bandwidth=1e6,
    )


def draw_requests(rng: random.Random) -> list[tuple[float, TokenizedGenerateReqInput]]:
    """Fronts of a few documents, each with an end of its own."""

    def tokens(n: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(n)]

    documents = [tokens(rng.randrange(40, 200)) for _ in range(8)]
    pause_s, now = rng.choice((0.02, 0.2)), 0.0
    arrivals = []
    for i in range(NUM_REQUESTS):
        document = rng.choice(documents)
        prompt = document[: rng.randrange(20, len(document) + 1)] + tokens(3)
        params = SamplingParams(max_new_tokens=rng.randrange(1, 20), temperature=0.0, ignore_eos=True)
        request = TokenizedGenerateReqInput(
            rid=f"r{i}",
            input_ids=ids_to_bytes(np.array(prompt, np.int32)),
            sampling_params=params,
            priority=rng.randrange(-1, 2),
        )
        arrivals.append((now, request))
        now += rng.expovariate(1 / pause_s)
    return arrivals


QUICK = (0, 2, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in range(80) if n not in QUICK)]
)
def test_every_request_ends(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sim = Simulation(draw_config(rng), draw_hardware(rng))

    def check(decision: BatchDecision) -> None:
        assert decision.step < MAX_STEPS, "it goes round in circles"
        if decision.step % 5 == 0:
            sim.core.scheduler.check_invariants()

    requests = draw_requests(rng)
    times = sim.run(requests, after_step=check)
    most = 4 * sim.core.scheduler.max_total_len  # bytes of token ids
    for _, request in requests:
        fits = len(request.input_ids) < most
        assert times[request.rid].finish_reason == ("length" if fits else "abort"), request.rid
    sim.core.scheduler.check_invariants()
    assert all(node.lock == 0 for node in sim.core.scheduler.cache.tree.walk())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in range(100, 140))])
def test_sessions_end_too_and_two_runs_decide_alike(seed: int) -> None:
    """Each request names one of a few sessions or none. Ranks are replicas: their inputs alone decide."""
    print(f"seed {seed}")

    def run() -> tuple[list[bytes], dict[str, str]]:
        rng = random.Random(seed)
        sim, decisions = Simulation(draw_config(rng), draw_hardware(rng)), []

        def note(decision: BatchDecision) -> None:
            assert decision.step < MAX_STEPS, "it goes round in circles"
            decisions.append(decision.encode())
            if decision.step % 50 == 0:
                sim.core.scheduler.check_invariants()

        requests = [
            (at, msgspec.structs.replace(request, session_id=rng.choice(("", "a", "b", "c"))))
            for at, request in draw_requests(rng)
        ]
        times = sim.run(requests, after_step=note)
        assert sim.core.scheduler.state()["sessions"]["known"] > 0
        return decisions, {rid: each.finish_reason for rid, each in times.items()}

    first, ends = run()
    assert (first, ends) == run()
    assert set(ends.values()) <= {"length", "abort"}
