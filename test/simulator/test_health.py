"""Links that are slow, hang, flap or fail on the virtual clock: ends by hand, and what a simulation makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang.simulator.health import HEALTHY, LinkHealth
from sglang.simulator.links import SimulatedStorage, SimulatedStorageLink
from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.transfer import D2H, FETCH, H2D, PROBE, STORE, StorageAction, StorageOp, Ticket
from sglang.srt.model_executor.launch import Launch
from sglang.srt.sampling.sampling_params import SamplingParams

INF = float("inf")
BLOCK = 16


@pytest.mark.parametrize(
    ("health", "begin", "seconds", "end"),
    [
        (HEALTHY, 1.0, 2.0, 3.0),
        # Ten times slower from 2 on: one second before, one of ten behind.
        (LinkHealth(rates=((2.0, 0.1),)), 1.0, 2.0, 12.0),
        (LinkHealth(rates=((2.0, 0.1),)), 5.0, 0.5, 10.0),
        # Hangs for ever.
        (LinkHealth(rates=((2.0, 0.0),)), 1.0, 2.0, INF),
        (LinkHealth(rates=((2.0, 0.0),)), 1.0, 1.0, 2.0),
        # Hangs from 2 to 7 and recovers.
        (LinkHealth(rates=((2.0, 0.0), (7.0, 1.0))), 1.0, 2.0, 8.0),
        (LinkHealth(rates=((2.0, 0.0), (7.0, 1.0))), 3.0, 2.0, 9.0),
        (LinkHealth(rates=((2.0, 0.0), (7.0, 1.0))), 8.0, 2.0, 10.0),
        # Of no length, but it must begin.
        (LinkHealth(rates=((2.0, 0.0), (7.0, 1.0))), 3.0, 0.0, 7.0),
    ],
)
def test_ends_by_hand(health: LinkHealth, begin: float, seconds: float, end: float) -> None:
    assert health.outcome(begin, seconds) == (end, True)


def test_an_operation_that_takes_too_long_fails_at_its_timeout() -> None:
    health = LinkHealth(rates=((2.0, 0.0),), timeout_s=5.0)
    assert health.outcome(1.0, 2.0) == (6.0, False)
    assert health.outcome(1.0, 0.5) == (1.5, True)


def test_what_is_under_way_in_a_failing_window_fails_at_its_usual_end() -> None:
    health = LinkHealth(failing=((2.0, 3.0),))
    outcomes = [health.outcome(begin, 1.0) for begin in (0.5, 1.5, 2.5, 3.0)]
    assert outcomes == [(1.5, True), (2.5, False), (3.5, False), (4.0, True)]


def keys(*names: int) -> np.ndarray:
    return np.array([[name] * 16 for name in names], np.uint8)


def storage_op(link: str, seq: int, action: StorageAction, *names: int) -> StorageOp:
    return StorageOp(Ticket(link, seq), action, keys(*names), np.empty(0, np.int32), 0)


def test_full_storage_evicts_what_was_used_least_recently_and_keeps_fronts() -> None:
    storage = SimulatedStorage(max_blocks=4)
    storage.add(keys(1, 2, 3))
    # Block 3 is the oldest of the three, although all were written at once.
    storage.add(keys(7, 8))
    assert sorted(key[0] for key in storage.blocks) == [1, 2, 7, 8]
    assert storage.carry_out(storage_op(FETCH, 0, StorageAction.GET, 1, 2, 3)) == 2
    storage.add(keys(9))
    assert sorted(key[0] for key in storage.blocks) == [1, 2, 7, 9] and storage.num_evicted == 2
    assert storage.carry_out(storage_op(PROBE, 0, StorageAction.EXISTS, 1, 2)) == 2


def test_a_failed_storage_operation_counts_nothing_and_stores_nothing() -> None:
    now, storage = [0.0], SimulatedStorage()
    health = LinkHealth(failing=((0.0, 1.0),))
    link = SimulatedStorageLink(STORE, lambda: now[0], [storage], lambda op, at: health.outcome(now[0], 0.5))
    for seq in range(3):
        link.submit(storage_op(STORE, seq, StorageAction.SET, seq))
    results = []
    for now[0] in (0.5, 1.0, 1.5):
        results += link.poll()
    assert [result.count for result in results] == [0, 0, 1]
    assert [key[0] for key in storage.blocks] == [2]


def simulation(
    health: dict[str, LinkHealth], storage: bool = False, chunk: int = 512, load_or_recompute: bool = False
) -> Simulation:
    setup = StorageSetup(
        backend="simulated",
        setup="",
        secret=b"health",
        block_tokens=BLOCK,
        limits=StorageLimits(blocks_per_op=4, max_fetch_pages=60, max_store_pages=60),
        prefetch=PrefetchConfig(threshold=BLOCK, timeout_base_s=0.25, timeout_per_ki_token_s=0.0),
        write_policy="write_through",
    )
    config = SchedulerConfig(
        page_size=4,
        num_device_pages=50,
        num_host_pages=100,
        page_bytes=4000,
        context_len=190,
        load_or_recompute=load_or_recompute,
        chunked_prefill_size=chunk,
        new_token_ratio=0.1,
        storage=setup if storage else None,
    )

    def launch_seconds(launch: Launch) -> float:
        return 0.001 * int(launch.lens.sum())

    return Simulation(config, SimulatedHardware(4, launch_seconds, 1e6, 1e6, health=health))


def arrivals(num_documents: int, num_requests: int, apart_s: float = 0.5, size: int = 96, new_tokens: int = 2) -> Any:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    documents = [list(range(1000 * i, 1000 * i + size)) for i in range(num_documents)]
    return [
        (
            apart_s * n,
            TokenizedGenerateReqInput(
                rid=str(n),
                input_ids=ids_to_bytes([*documents[n % num_documents], 7, n]),
                sampling_params=params,
                stream=True,
            ),
        )
        for n in range(num_requests)
    ]


def test_a_slow_link_slows_only_what_it_loads() -> None:
    """Three documents and a device for two: from the second round on, each comes from the host."""
    quick, slow = (simulation(health) for health in ({}, {H2D: LinkHealth(rates=((16.0, 0.1),))}))
    before, after = (sim.run(arrivals(3, 16, apart_s=2.0)) for sim in (quick, slow))
    for rid, times in after.items():
        assert times.cached_tokens_details == before[rid].cached_tokens_details
        slower = times.arrival >= 16.0 and times.cached_tokens_details["host"] > 0
        # 96 tokens of 1,000 bytes at a tenth of a megabyte per second.
        assert (times.ttft > before[rid].ttft + 0.5) == slower
    assert sum(times.arrival >= 16.0 for times in after.values()) == 8


def test_a_load_that_hangs_for_ever_ends_the_simulation_with_requests_unanswered() -> None:
    sim = simulation({H2D: LinkHealth(rates=((4.0, 0.0),))})
    times = sim.run(arrivals(3, 16))
    unanswered = [rid for rid, each in times.items() if not each.tokens]
    assert len(times) == 16 and "8" in unanswered and not {"0", "5"} & set(unanswered)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [96, 32])
@pytest.mark.parametrize("since", [0.1, 0.3, 0.4, 0.6])
def test_every_request_ends_though_a_backup_hangs_for_ever(since: float, size: int) -> None:
    """A few pages of the device are never free again: nothing may wait for them. Of the longer prompts one has
    room at a time; three of the shorter ones start together, and outgrow the device."""
    sim = simulation({D2H: LinkHealth(rates=((since, 0.0),))}, chunk=16)
    times = sim.run(arrivals(8, 12, apart_s=0.08, size=size, new_tokens=60))
    assert {each.finish_reason for each in times.values()} == {"length"}
    scheduler = sim.core.scheduler
    assert scheduler.cache.device.num_pinned_only == 0 and scheduler.cache.controller.links.late == {D2H}
    assert (scheduler.counters["retracted_reqs"] > 0) == (size == 32)


def test_a_backup_that_fails_for_a_while_costs_hits_but_no_request() -> None:
    sim = simulation({D2H: LinkHealth(failing=((0.0, 4.0),))})
    times = sim.run(arrivals(3, 20), after_step=lambda decision: sim.core.scheduler.check_invariants())
    assert {each.finish_reason for each in times.values()} == {"length"}
    assert sim.core.scheduler.counters["failed_ops"] > 0
    healthy = simulation({})
    healthy.run(arrivals(3, 20))
    hits: Any = [each.core.scheduler.counters["hit_tokens_host"] for each in (sim, healthy)]
    assert 0 < hits[0] < hits[1]


def test_while_loads_fail_few_are_tried() -> None:
    """For eight seconds. What they lose is computed, and copied to the host again."""
    sim = simulation({H2D: LinkHealth(failing=((2.0, 10.0),))}, load_or_recompute=True)
    times = sim.run(arrivals(12, 400, apart_s=0.03, size=24))
    assert {each.finish_reason for each in times.values()} == {"length"}
    assert 0 < sim.core.scheduler.counters["failed_ops"] <= 8 / 0.25 + 1
    # To compute a prompt takes 26 ms. They come every 30.
    assert max(each.ttft for each in times.values()) < 0.1


@pytest.mark.parametrize("link", [PROBE, FETCH])
def test_storage_that_hangs_for_ever_costs_the_first_request_alone(link: str) -> None:
    """Six documents of 24 pages, a host for four of them and storage for all."""
    sim = simulation({link: LinkHealth(rates=((10.0, 0.0),))}, storage=True)
    times = sim.run(arrivals(6, 36))
    assert {each.finish_reason for each in times.values()} == {"length"}
    late = [each for each in times.values() if each.arrival >= 10.0]
    early = [each for each in times.values() if 3.0 <= each.arrival < 10.0]
    assert max(each.ttft for each in early) < 0.25 <= late[0].ttft < 0.5
    assert max(each.ttft for each in late[1:]) < 0.13, "96 tokens are computed in 0.1 s"
    assert sum(each.cached_tokens_details.get("disk", 0) for each in early) > 0
    assert sum(each.cached_tokens_details.get("disk", 0) for each in late) == 0
    assert sim.core.scheduler.storage.stores.near.reads.num_opened == 1


@pytest.mark.parametrize("link", [PROBE, FETCH])
def test_storage_that_hung_is_used_again_within_seconds(link: str) -> None:
    sim = simulation({link: LinkHealth(rates=((5.0, 0.0), (12.0, 1.0)))}, storage=True)
    times = sim.run(arrivals(6, 60))
    assert max(each.ttft for each in times.values() if each.arrival > 6.0) < 0.13
    served = [each.arrival for each in times.values() if each.cached_tokens_details.get("disk", 0)]
    assert any(arrival < 5.0 for arrival in served) and not any(6.0 < arrival < 12.0 for arrival in served)
    assert min(arrival for arrival in served if arrival >= 12.0) < 15.0
    assert not sim.core.scheduler.storage.stores.near.reads.is_open


def test_storage_whose_reads_fail_is_left_alone_and_tried_without_anybody_waiting() -> None:
    sim = simulation({FETCH: LinkHealth(failing=((5.0, 12.0),))}, storage=True)
    times = sim.run(arrivals(6, 60), after_step=lambda decision: sim.core.scheduler.check_invariants())
    reads = sim.core.scheduler.storage.stores.near.reads
    assert reads.num_opened == 1 and not reads.is_open
    served = [each.arrival for each in times.values() if each.cached_tokens_details.get("disk", 0)]
    assert min(arrival for arrival in served if arrival >= 12.0) < 15.0


def test_writes_that_hang_hold_on_to_no_more_than_their_limit() -> None:
    sim = simulation({STORE: LinkHealth(rates=((3.0, 0.0), (30.0, 1.0)))}, storage=True)
    pinned = []

    def look(decision: Any) -> None:
        sim.core.scheduler.check_invariants()
        pinned.append(sim.core.scheduler.storage.stores.near.writer.storing_pages)

    times = sim.run(arrivals(16, 80), after_step=look)
    writes = sim.core.scheduler.storage.stores.near.writes
    assert {each.finish_reason for each in times.values()} == {"length"}
    assert max(pinned) <= 60 and writes.num_opened == 1 and not writes.is_open
    assert pinned[-1] == 0
