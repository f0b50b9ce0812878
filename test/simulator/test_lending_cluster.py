"""`Cluster`: engines that lend and borrow on one virtual clock, with the real policies and leases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang.simulator.cluster import Cluster, PeerCosts, SimulatedBorrowed, SimulatedLent
from sglang.simulator.simulation import SimulatedEngine, SimulatedHardware
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.mem_cache.transfer import D2P
from sglang.srt.model_executor.launch import Launch
from sglang.srt.peer.borrowed_places import BorrowedOptions
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.lending import LendingConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.peer_timing import PeerTiming

# Pages of one token; ten of them in a slab, on both sides.
SLAB, NUM_SLABS, PAGE_BYTES = 10, 10, 8
WINDOW_S = 20.0
TIMING = PeerTiming(idle=30.0)


def launch_seconds(launch: Launch) -> float:
    return 1e-3 * int(launch.lens.sum())


HARDWARE = SimulatedHardware(2, launch_seconds, 8e3, 8e3, p2d_bandwidth=8e4, d2p_bandwidth=8e4)


class Rig:
    """One master and one worker, each with room for 100 tokens on its device; what the worker's longest request
    needs, 25 tokens, it keeps."""

    def __init__(self, by_value: bool = True, **changes: object) -> None:
        self.cluster = Cluster(PeerCosts(timing=TIMING))
        slabs = tuple((i * SLAB, (i + 1) * SLAB) for i in range(NUM_SLABS))
        config = SchedulerConfig(
            page_size=1,
            num_device_pages=100,
            num_host_pages=0,
            page_bytes=PAGE_BYTES,
            context_len=25,
            chunked_prefill_size=10,
        )
        lending = LendingConfig(window_s=WINDOW_S)
        self.lent: SimulatedLent = self.cluster.lend("worker", NUM_SLABS, SLAB * PAGE_BYTES)
        self.worker = SimulatedEngine(
            replace(config, slabs=slabs, lending=lending), HARDWARE, self.cluster.clock, self.lent
        )
        options = BorrowedOptions(num_wanted=0) if by_value else BorrowedOptions(value_us=1 << 40)
        self.borrowed: SimulatedBorrowed = self.cluster.borrow(
            "master", ["worker"], NUM_SLABS, SLAB * PAGE_BYTES, PAGE_BYTES, options
        )
        master = replace(config, num_host_pages=1, context_len=95, num_peer_pages=100, slabs=slabs)
        if by_value:
            master = replace(master, borrowing=BorrowingConfig(TIMING.demand, TIMING.idle))
        self.master = SimulatedEngine(
            replace(master, **changes),  # type: ignore[arg-type]
            HARDWARE,
            self.cluster.clock,
            self.borrowed,
        )
        for engine in (self.worker, self.master):
            self.cluster.add(engine)

    def run(
        self,
        master: list[tuple[float, TokenizedGenerateReqInput]],
        worker: list[tuple[float, TokenizedGenerateReqInput]] = [],  # noqa: B006
    ) -> None:
        """Times count from now. Every request ends well, and nothing is lost."""
        now = self.cluster.clock.now
        for engine, arrivals in ((self.master, master), (self.worker, worker)):
            engine.begin([(now + at, each) for at, each in arrivals], lambda decision, e=engine: check(e))
        self.cluster.run()
        for engine, arrivals in ((self.master, master), (self.worker, worker)):
            for _, each in arrivals:
                assert engine.times[each.rid].finish_reason == "length"

    def wait(self, seconds: float) -> None:
        self.cluster.run(self.cluster.clock.now + seconds)

    @property
    def num_home(self) -> int:
        return sum(self.lent.poll_mapped().mapped)


def check(engine: SimulatedEngine) -> None:
    engine.core.scheduler.check_invariants()


def request(rid: str, seed: int, length: int, output: int = 1) -> TokenizedGenerateReqInput:
    tokens = np.random.default_rng(seed).integers(10, 10_000, length).astype(np.int32)
    params = SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(tokens), sampling_params=params, stream=True)


def conversations(name: str, num: int, every_s: float = 1.0) -> list[tuple[float, TokenizedGenerateReqInput]]:
    """Prompts of 60 tokens: two do not fit the master's device."""
    return [(every_s * i, request(f"{name}{i}", i, 60)) for i in range(num)]


def test_a_master_borrows_what_it_lacks_and_finds_its_conversations_there() -> None:
    rig = Rig()
    rig.wait(2 * WINDOW_S)
    assert rig.num_home == NUM_SLABS, "nobody asked for a slab"
    rig.run([(4.0 * i, request(f"turn{i}", i % 2, 60)) for i in range(8)])
    assert rig.num_home < NUM_SLABS
    found = [rig.master.times[f"turn{i}"].cached_tokens_details for i in range(8)]
    assert all(each["device"] + each["peer"] == 59 for each in found[-2:]), "device and worker have both"
    assert any(each["peer"] for each in found)


def test_an_idle_master_gives_everything_back() -> None:
    rig = Rig()
    rig.wait(2 * WINDOW_S)
    rig.run(conversations("first", 4, 8.0))
    assert rig.num_home < NUM_SLABS
    rig.wait(TIMING.idle + TIMING.demand + 5)
    assert rig.num_home == NUM_SLABS


def test_a_burst_at_the_worker_brings_its_slabs_home() -> None:
    rig = Rig()
    rig.wait(2 * WINDOW_S)
    rig.run(conversations("first", 4, 8.0))
    before = rig.num_home
    # Four at once: together 92 tokens, which need every slab.
    rig.run([], [(0.0, request(f"burst{i}", 50 + i, 20, 3)) for i in range(4)])
    assert before < NUM_SLABS == rig.num_home
    assert rig.worker.core.scheduler.state()["counters"]["slabs_asked_back"] == NUM_SLABS - before
    rig.lent.leases.lender.check_invariants()
    rig.borrowed.leases.borrowers["worker"].check_invariants()


def test_without_values_a_master_takes_all_that_the_worker_does_not_need_at_once() -> None:
    """As SwiftCache has it (Algorithm 1): the peak of a window is kept, whatever else is cached."""
    rig = Rig(by_value=False)
    rig.wait(3 * WINDOW_S)
    # The longest request has 25 tokens, and a page stays free.
    assert rig.num_home == 3


def test_pages_go_to_peers_as_they_are_computed_if_that_is_asked_for() -> None:
    copied = {}
    for early in (False, True):
        rig = Rig(by_value=False, peers_written_through=early, write_policy="write_back")
        rig.wait(3 * WINDOW_S)
        rig.run([(0.0, request("only", 3, 40))])
        copied[early] = rig.master.core.scheduler.state()["links"][D2P]["operations_done"]
    assert copied[False] == 0 < copied[True]


def test_requests_beyond_a_length_stream_though_the_device_could_hold_them() -> None:
    streamed = {}
    for most in (None, 30):
        stream = LayerStreamConfig(1, 100, max_resident_tokens=most)
        rig = Rig(by_value=False, layer_stream=stream, num_host_pages=100)
        rig.wait(3 * WINDOW_S)
        rig.run([(0.0, request("long", 3, 60, 4)), (0.0, request("too", 4, 60, 4))])
        streaming = rig.master.core.scheduler.streaming
        assert streaming.max_resident_len == (most or 95)
        streamed[most] = streaming.counters["streamed_reqs"]
    assert streamed[None] == 0 and streamed[30] >= 2


def test_a_full_host_does_not_keep_peers_from_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is measured, fast, and has room for one page; of peers nothing is known."""
    fast = replace(HARDWARE, h2d_bandwidth=8 * 3e3, d2h_bandwidth=8 * 3e3)
    monkeypatch.setitem(globals(), "HARDWARE", fast)
    rig = Rig()
    rig.wait(2 * WINDOW_S)
    rig.run([(4.0 * i, request(f"turn{i}", i % 2, 60)) for i in range(8)])
    assert rig.master.times["turn7"].cached_tokens_details["peer"] == 19


def test_a_run_is_the_same_each_time() -> None:
    def times() -> list[float]:
        rig = Rig()
        rig.wait(2 * WINDOW_S)
        rig.run(conversations("first", 5, 3.0), [(2.0 + i, request(f"w{i}", 70 + i, 20, 2)) for i in range(5)])
        return [t for engine in (rig.master, rig.worker) for each in engine.times.values() for t in each.tokens]

    assert times() == times()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_random_loads_of_both_leave_nothing_lost(seed: int) -> None:
    """Whatever comes, every request ends well, and all slabs come home when nobody asks for them any more."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    rig = Rig()
    master = [(float(rng.uniform(0, 120)), request(f"m{i}", int(rng.integers(6)), 60, 2)) for i in range(25)]
    worker = [
        (float(rng.uniform(0, 120)), request(f"w{i}", 90 + int(rng.integers(8)), 20, int(rng.integers(1, 5))))
        for i in range(40)
    ]
    rig.run(master, worker)
    rig.wait(TIMING.idle + TIMING.demand + 5)
    assert rig.num_home == NUM_SLABS
    rig.lent.leases.lender.check_invariants()
