"""The real scheduler on a virtual clock: times that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.scheduler import SchedulerConfig
from sglang.srt.managers.simulation import RequestSource, SimulatedHardware, Simulation
from sglang.srt.mem_cache.simulated_link import SimulatedLink
from sglang.srt.mem_cache.transfer import D2H, H2D, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import Launch, LaunchMode
from sglang.srt.sampling.sampling_params import SamplingParams

LAYERS = 4
DECODE_S = 0.010
TOKEN_S = 0.001
PAGE_BYTES = 1000


def launch_seconds(launch: Launch) -> float:
    return DECODE_S if launch.mode == LaunchMode.DECODE else TOKEN_S * int(launch.lens.sum())


def simulation(h2d_bandwidth: float = 1e6, fails: float = 0.0, **changes: object) -> Simulation:
    settings = {
        "page_size": 1,
        "num_device_pages": 200,
        "num_host_pages": 2000,
        "page_bytes": PAGE_BYTES,
        "context_len": 190,
        **changes,
    }
    rng = np.random.default_rng(0)
    return Simulation(
        SchedulerConfig(**settings),  # type: ignore[arg-type]
        SimulatedHardware(LAYERS, launch_seconds, h2d_bandwidth, 1e6, load_fails=lambda op: rng.random() < fails),
    )


def request(rid: str, prompt: list[int], max_new_tokens: int = 3) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(prompt), sampling_params=params, stream=True)


def test_prefill_and_decode_take_their_time() -> None:
    times = simulation().run([(1.0, request("a", list(range(100))))])
    assert times["a"].ttft == pytest.approx(100 * TOKEN_S)
    assert np.diff(times["a"].tokens) == pytest.approx([DECODE_S, DECODE_S])


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e8])
def test_a_load_overlaps_the_computation_layer_by_layer(bandwidth: float) -> None:
    """100 tokens come from the host while 20 are computed: the slower of the two, plus one layer of the other."""
    sim = simulation(bandwidth)
    prompt = list(range(100))
    times = sim.run(
        [
            (0.0, request("a", prompt, 1)),
            (5.0, request("b", list(range(1000, 1150)), 1)),
            (10.0, request("c", prompt + list(range(500, 521)), 1)),
        ]
    )
    host = times["c"].cached_tokens_details["host"]
    load, compute = host * PAGE_BYTES / bandwidth, TOKEN_S * (121 - sum(times["c"].cached_tokens_details.values()))
    assert host >= 50
    slower = max(load + compute / LAYERS, compute + load / LAYERS)
    assert times["c"].ttft == pytest.approx(slower)
    assert sim.executor.stall_s == pytest.approx(slower - compute)


def test_failed_loads_are_computed_and_everything_ends() -> None:
    sim = simulation(fails=0.5, num_device_pages=150)
    rng = np.random.default_rng(1)
    base = [rng.integers(0, 50, 80).tolist() for _ in range(4)]
    arrivals = [(0.3 * i, request(f"r{i}", base[i % 4] + [i], 2)) for i in range(80)]
    times = sim.run(arrivals, after_step=lambda decision: sim.core.scheduler.check_invariants())
    assert len(times) == 80 and {t.finish_reason for t in times.values()} == {"length"}
    assert sim.core.scheduler.controller.counters["failed_ops"] > 3


def test_a_simulation_repeats_itself() -> None:
    def run() -> list[float]:
        rng = np.random.default_rng(2)
        arrivals = [(0.02 * i, request(f"r{i}", rng.integers(0, 3, 60).tolist())) for i in range(50)]
        return [t.ttft for t in simulation().run(arrivals).values()]

    assert run() == run()


class Chain:
    """A source whose n requests come one by one, each `think` seconds after the last one ended."""

    def __init__(self, n: int, think: float) -> None:
        self.left, self.think = n, think
        self.at: float | None = 0.0
        self.ended: list[tuple[str, float]] = []

    def next_at(self) -> float | None:
        return self.at

    def take(self, now: float) -> list[TokenizedGenerateReqInput]:
        if self.at is None or self.at > now:
            return []
        self.at = None
        self.left -= 1
        return [request(f"r{self.left}", list(range(50 * self.left, 50 * self.left + 50)))]

    def finished(self, rid: str, now: float) -> None:
        self.ended.append((rid, now))
        if self.left:
            self.at = now + self.think


def test_requests_that_wait_for_others() -> None:
    source = Chain(3, think=0.5)
    assert isinstance(source, RequestSource)
    times = simulation().run(source)
    takes = 50 * TOKEN_S + 2 * DECODE_S
    assert [t.arrival for t in times.values()] == pytest.approx([i * (takes + 0.5) for i in range(3)])
    assert source.ended == [(rid, t.tokens[-1]) for rid, t in times.items()]


def test_a_link_says_when_its_bytes_move() -> None:
    """Two operations of 3 s after a latency of 1 s each: bytes move in [1, 4) and [5, 8)."""
    link = SimulatedLink(H2D, lambda: 0.0, lambda op: 3.0, 1.0, LAYERS, lambda seq: 0.0)
    frames = np.arange(1, dtype=np.int32)
    for seq in range(2):
        link.submit(TransferOp(Ticket(H2D, seq), Tier.HOST, Tier.DEVICE, frames, frames, 1))
    assert [link.busy_between(*window) for window in ((0, 1), (0, 10), (2, 3), (3, 6), (4, 5), (6, 9), (8, 9))] == [
        0,
        6,
        1,
        2,
        0,
        2,
        0,
    ]


def test_an_operation_costs_what_the_hardware_says() -> None:
    prompt = list(range(100))
    arrivals = [(0.0, request("a", prompt, 1)), (5.0, request("b", list(range(1000, 1150)), 1))]
    last = [(10.0, request("c", prompt + [7], 1))]
    config = SchedulerConfig(
        page_size=1, num_device_pages=200, num_host_pages=2000, page_bytes=PAGE_BYTES, context_len=190
    )
    sim = Simulation(config, SimulatedHardware(LAYERS, launch_seconds, op_seconds=lambda op: 0.5))
    times = sim.run(arrivals + last)
    computed = 101 - sum(times["c"].cached_tokens_details.values())
    assert times["c"].ttft == pytest.approx(0.5 + TOKEN_S * computed / LAYERS)


def test_transfers_slow_what_runs_beside_them() -> None:
    """The backup of the first prompt runs beside its decode steps, which take half as long again meanwhile."""
    config = SchedulerConfig(
        page_size=1, num_device_pages=200, num_host_pages=2000, page_bytes=PAGE_BYTES, context_len=190
    )

    def run(share: float) -> tuple[Simulation, list[float]]:
        hardware = SimulatedHardware(
            LAYERS,
            launch_seconds,
            op_seconds=lambda op: 0.5,
            interference=lambda mode, link: share * (link == D2H and mode == LaunchMode.DECODE),
        )
        sim = Simulation(config, hardware)
        return sim, sim.run([(0.0, request("a", list(range(100)), 5))])["a"].tokens

    quiet, alone = run(0.0)
    slowed, beside = run(0.5)
    assert quiet.executor.interference_s == 0
    assert np.diff(alone) == pytest.approx([DECODE_S] * 4)
    assert slowed.executor.interference_s == pytest.approx(4 * 0.5 * DECODE_S)
    assert np.diff(beside)[-1] == pytest.approx(1.5 * DECODE_S)
    assert beside[-1] - alone[-1] == pytest.approx(slowed.executor.interference_s)


@pytest.mark.parametrize("budget", [64, 256])
def test_a_balanced_batch_hides_loads_behind_computation(budget: int) -> None:
    """Ten conversations come back from the host, before ten new prompts in the queue: first come, first served loads
    all at once with nothing to compute meanwhile."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 1000, 100).tolist() for _ in range(10)]
    fillers = [rng.integers(1000, 2000, 900).tolist() for _ in range(2)]

    def run(load_ratio: float) -> tuple[Simulation, float, list[int]]:
        sim = simulation(
            h2d_bandwidth=1e6,
            num_device_pages=2000,
            num_host_pages=6000,
            context_len=1500,
            load_ratio=load_ratio,
            bubble_filling=False,
            load_or_recompute=False,
            chunked_prefill_size=budget,
        )
        arrivals = [(0.0, request(f"first{i}", document, 1)) for i, document in enumerate(documents)]
        arrivals += [(20.0, request(f"filler{i}", text, 1)) for i, text in enumerate(fillers)]
        # While the engine is at work on the first of these, the others queue up.
        arrivals += [(40.0, request("busy", rng.integers(2000, 3000, 500).tolist(), 1))]
        arrivals += [(40.1, request(f"again{i}", [*document, i], 1)) for i, document in enumerate(documents)]
        arrivals += [(40.1, request(f"new{i}", rng.integers(3000, 4000, 40).tolist(), 1)) for i in range(10)]
        times = sim.run(arrivals, after_step=lambda decision: sim.core.scheduler.check_invariants())
        again = [t for rid, t in times.items() if rid.startswith("again")]
        assert all(t.cached_tokens_details["host"] >= 90 for t in again)
        end = max(t.tokens[-1] for t in times.values())
        return sim, end, [len(t.tokens) for t in times.values()]

    rng_state = rng.bit_generator.state
    plain, plain_end, plain_tokens = run(0.0)
    rng.bit_generator.state = rng_state
    balanced, balanced_end, balanced_tokens = run(3.0)
    assert balanced_tokens == plain_tokens
    assert plain.core.scheduler.counters["deprioritised"] == 0
    assert balanced.core.scheduler.counters["deprioritised"] > 0
    assert balanced.executor.stall_s < plain.executor.stall_s
    assert balanced_end < plain_end
