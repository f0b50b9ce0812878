"""The real scheduler on a virtual clock: times that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sglang.simulator.links import SimulatedLink
from sglang.simulator.simulation import RequestSource, SimulatedHardware, SimulatedStore, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import D2H, H2D, StorageOp, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import Launch, LaunchMode
from sglang.srt.sampling.sampling_params import SamplingParams

# Write policies of test-all; random mixes in test_simulation_random.py have them all.
LATE = [policy for policy in WRITE_POLICIES if policy != "write_through"]
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
    # While no load is measured, loads are believed to be as fast as backups: ten times faster than computing.
    return Simulation(
        SchedulerConfig(**settings),  # type: ignore[arg-type]
        SimulatedHardware(LAYERS, launch_seconds, h2d_bandwidth, 1e7, load_fails=lambda op: rng.random() < fails),
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


def test_a_launch_ends_with_the_layer_at_which_its_load_has_failed() -> None:
    """The last of four layers, before which the load has failed. 50 tokens are on the device, and 50 come from the
    host while 21 are computed."""
    prompt = list(range(100))
    arrivals = [
        (0.0, request("a", prompt, 1)),
        (5.0, request("b", list(range(1000, 1150)), 1)),
        (10.0, request("c", prompt + list(range(500, 521)), 1)),
    ]
    sim = simulation(fails=1.0, load_or_recompute=False)
    times = sim.run(arrivals)
    assert times["c"].cached_tokens_details["device"] == 50 == sim.core.scheduler.counters["load_back_tokens"]
    assert sim.executor.busy_s == pytest.approx(TOKEN_S * (100 + 150 + 0.75 * 21 + 71))


@pytest.mark.slow
def test_failed_loads_are_computed_and_everything_ends() -> None:
    sim = simulation(1e7, fails=0.5, num_device_pages=150)
    rng = np.random.default_rng(1)
    base = [rng.integers(0, 50, 80).tolist() for _ in range(4)]
    arrivals = [(0.3 * i, request(f"r{i}", base[i % 4] + [i], 2)) for i in range(80)]
    times = sim.run(arrivals, after_step=lambda decision: sim.core.scheduler.check_invariants())
    assert len(times) == 80 and {t.finish_reason for t in times.values()} == {"length"}
    assert sim.core.scheduler.counters["failed_ops"] > 3


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
        page_size=1,
        num_device_pages=200,
        num_host_pages=2000,
        page_bytes=PAGE_BYTES,
        context_len=190,
        # To compute again would be faster.
        load_or_recompute=False,
    )
    sim = Simulation(config, SimulatedHardware(LAYERS, launch_seconds, op_seconds=lambda op: 0.5))
    times = sim.run(arrivals + last)
    computed = 101 - sum(times["c"].cached_tokens_details.values())
    assert times["c"].ttft == pytest.approx(0.5 + TOKEN_S * computed / LAYERS)


def test_transfers_slow_what_runs_beside_them() -> None:
    """The backup of the first prompt runs beside its decode steps, which take half as long again meanwhile."""
    config = SchedulerConfig(
        page_size=1,
        num_device_pages=200,
        num_host_pages=2000,
        page_bytes=PAGE_BYTES,
        context_len=190,
        write_policy="write_through",
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


@pytest.mark.sampled(1)
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


# -- storage ----------------------------------------------------------------------------------------------------

BLOCK = 10
NAMES = BlockKeys(b"sim", BLOCK)


def stored(
    *prompts: list[int], block_s: float = 0.02, policy: str = "wait_complete", **changes: object
) -> Simulation:
    """Storage has these prompts; a block takes block_s, one after another, and a question 5 ms."""
    setup = StorageSetup(
        backend="simulated",
        setup="",
        secret=b"sim",
        block_tokens=BLOCK,
        limits=StorageLimits(1, 1000, 1000, fetch_window_ops=changes.pop("window", 2)),  # type: ignore[arg-type]
        prefetch=PrefetchConfig(policy, 1, fetch_order=changes.pop("order", "fifo")),  # type: ignore[arg-type]
        write_policy="write_through_selective",
    )
    hardware = SimulatedHardware(
        LAYERS,
        launch_seconds,
        1e9,
        1e9,
        stores=(SimulatedStore(changes.pop("fetch", lambda: one_by_one(block_s)), probe_s=0.005),),  # type: ignore[arg-type]
        fetch_blocks=bool(changes.pop("fetch_blocks", False)),
    )
    settings = {
        "page_size": 1,
        "num_device_pages": 1000,
        "num_host_pages": 2000,
        "page_bytes": PAGE_BYTES,
        "context_len": 400,
        "storage": setup,
        **changes,
    }
    sim = Simulation(SchedulerConfig(**settings), hardware)  # type: ignore[arg-type]
    for prompt in prompts:
        sim.stores[0].add(NAMES.of_prompt("", np.array(prompt, np.int32)))
    return sim


def one_by_one(block_s: float) -> Callable[[StorageOp, float, bool], float]:
    free_at = 0.0

    def ends(op: StorageOp, submitted: float, is_busy: bool) -> float:
        nonlocal free_at
        free_at = max(free_at, submitted) + block_s * len(op.keys)
        return free_at

    return ends


def numbers(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


def test_what_storage_has_is_fetched_and_the_rest_computed() -> None:
    text = numbers(0, 105)
    times = stored(text).run([(1.0, request("a", text)), (5.0, request("b", text[:50] + numbers(500, 20)))])
    assert times["a"].cached_tokens_details == {"device": 0, "host": 0, "disk": 100}
    load_s = 100 * PAGE_BYTES / 1e9
    assert times["a"].ttft == pytest.approx(0.005 + 10 * 0.02 + 5 * TOKEN_S, abs=load_s)
    assert times["b"].cached_tokens_details["device"] == 50 and times["b"].cached_tokens_details["disk"] == 0


@pytest.mark.slow
def test_no_request_waits_for_answers_that_are_not_worth_it() -> None:
    """A question takes 5 ms, computing 40 tokens 40 ms. While storage has nothing that is asked for, requests start
    at once; the answers still come, and when they are worth it again, requests wait for them."""
    warm = [numbers(10_000 + 100 * i, 41) for i in range(40)]
    sim = stored(*warm, block_s=0.001, policy="timeout")
    cold = [(float(i), request(f"cold{i}", numbers(100 * i, 41))) for i in range(60)]
    again = [(100.0 + i, request(f"warm{i}", prompt)) for i, prompt in enumerate(warm)]
    times = sim.run([*cold, *again], after_step=lambda decision: sim.core.scheduler.check_invariants())
    assert times["cold0"].ttft == pytest.approx(0.005 + 41 * TOKEN_S)
    assert times["cold59"].ttft == pytest.approx(41 * TOKEN_S)
    assert times["warm0"].cached_tokens_details["disk"] == 0
    assert times["warm39"].cached_tokens_details["disk"] == 40
    assert times["warm39"].ttft < 0.5 * times["warm0"].ttft


def test_bypassing_the_local_tiers_the_same_is_fetched_again() -> None:
    text = numbers(0, 105)
    sim = stored(text, bypass_local=True, load_or_recompute=False)
    times = sim.run([(float(i), request(f"r{i}", text)) for i in range(4)])
    assert {t.cached_tokens_details["disk"] for t in times.values()} == {100}
    assert [t.ttft for t in times.values()] == pytest.approx([times["r0"].ttft] * 4)
    assert sim.core.scheduler.counters["backuped_tokens"] == 0, "nothing is used twice"


def test_what_is_computed_is_stored_when_it_is_written_through() -> None:
    text = numbers(0, 105)
    sim = stored()
    setup = replace(sim.core.scheduler.config.storage, write_policy="write_through")
    sim = stored(storage=setup)
    sim.run([(0.0, request("a", text))])
    while (
        end := min((t for link in sim.links.values() if (t := link.next_end()) is not None), default=None)
    ) is not None:
        sim.now = end
        sim.core.step(sim.now, sim.core.progress())
    assert {k.tobytes() for k in NAMES.of_prompt("", np.array(text, np.int32))} <= sim.stores[0].blocks.keys()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["write_through", *(pytest.param(n, marks=pytest.mark.slow) for n in LATE)])
@pytest.mark.parametrize(
    "tiers",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("peer", "disk", "stream")),
        *("peer disk", "peer stream", "disk stream", "peer disk stream"),
    ],
)
def test_every_mix_of_tiers_runs_on_the_virtual_clock(tiers: str, write_policy: str) -> None:
    """Storage is written to. Prompts share fronts of a few documents, and nothing has room for all of them."""
    rng = np.random.default_rng(seed := 7)
    config = stored().core.scheduler.config
    streams = "stream" in tiers
    config = replace(
        config,
        num_device_pages=120 if streams else 200,
        num_host_pages=60 if write_policy == "write_through_selective" else 200,
        num_peer_pages=120 if "peer" in tiers else 0,
        layer_stream=LayerStreamConfig(2, 20) if streams else None,
        chunked_prefill_size=40,
        num_swap_pages=200 if streams else 0,
        storage=replace(config.storage, write_policy=write_policy) if "disk" in tiers else None,
        write_policy=write_policy,
        load_or_recompute=False,
    )
    hardware = SimulatedHardware(
        LAYERS, launch_seconds, 1e6, 1e6, 1e7, 1e7, stores=(SimulatedStore(None, 1e6, probe_s=1e-4),)
    )
    sim = Simulation(config, hardware)
    documents = [rng.integers(10, 1000, n).tolist() for n in rng.integers(60, 170, 8)]
    arrivals = []
    for i in range(60):
        text = documents[rng.integers(8)]
        prompt = text[: rng.integers(20, len(text) + 1)] + rng.integers(10, 1000, 3).tolist()
        arrivals.append((0.1 * i, request(f"r{i}", prompt, int(rng.integers(1, 15)))))

    def check(decision: BatchDecision) -> None:
        if decision.step % 4 == 0:
            sim.core.scheduler.check_invariants()

    times = sim.run(arrivals, after_step=check)
    assert {t.finish_reason for t in times.values()} == {"length"}, f"seed {seed}"
    counters = sim.core.scheduler.state()["counters"]
    for name in tiers.split() if write_policy == "write_through" else ():
        counter = "streamed_reqs" if name == "stream" else f"hit_tokens_{name}"
        assert counters.get(counter, 0) > 0, f"{tiers}: {name} is never used"


def test_a_fetch_that_blocks_holds_up_decoding() -> None:
    """b decodes while a is fetched, unless that blocks."""
    text, other = numbers(0, 105), numbers(1000, 5)

    def longest_gap(blocks: bool) -> float:
        sim = stored(text, block_s=0.05, fetch_blocks=blocks, load_or_recompute=False)
        times = sim.run([(0.0, request("b", other, 60)), (0.1, request("a", text))])
        return float(np.diff(times["b"].tokens).max())

    sim = stored(text, block_s=0.05, fetch_blocks=True, load_or_recompute=False)
    sim.run([(0.0, request("b", other, 60)), (0.1, request("a", text))])
    assert sim.executor.busy_s + 10 * 0.05 <= sim.now + 1e-9, "they take turns"
    assert longest_gap(False) < 2 * DECODE_S and longest_gap(True) > 3 * DECODE_S


def test_the_shortest_job_first() -> None:
    """Four long ones come together, then a short one; three of four need not be over before it."""
    texts = [numbers(1000 * i, 105) for i in range(4)] + [numbers(9000, 15)]
    arrivals = [(0.001 * i, request(f"r{i}", text)) for i, text in enumerate(texts)]
    sims = {order: stored(*texts, order=order, load_or_recompute=False) for order in ("fifo", "sjf")}
    ttft = {order: sim.run(arrivals)["r4"].ttft for order, sim in sims.items()}
    assert ttft["fifo"] > 0.8 > 0.1 > ttft["sjf"]


def test_a_fetch_that_takes_longer_than_computing_is_cut() -> None:
    """A block takes 100 ms, and 10 ms to compute: once both are known, nothing is fetched any more."""
    texts = [numbers(1000 * i, 105) for i in range(6)]
    cold = numbers(90_000, 105)

    def run(**changes: object) -> Simulation:
        sim = stored(*texts, block_s=0.1, **changes)
        arrivals = [(0.0, request("cold", cold)), *((3.0 * i + 1, request(f"r{i}", t)) for i, t in enumerate(texts))]
        sim.run(arrivals, after_step=lambda decision: sim.core.scheduler.check_invariants())
        return sim

    sim = run()
    # The first one learns it from its first block; the second is on its way by then.
    assert sim.times["r0"].cached_tokens_details["disk"] == 20
    for i in range(1, 6):
        assert sim.times[f"r{i}"].ttft == pytest.approx(105 * TOKEN_S + 0.005, rel=0.01)
        assert sim.times[f"r{i}"].cached_tokens_details["disk"] == 0
    counters = sim.core.scheduler.state()["counters"]
    assert (counters["fetches_cut"], counters["fetch_cut_tokens"]) == (6, 580)
    waits = run(load_or_recompute=False)
    assert all(waits.times[f"r{i}"].ttft > 1.0 for i in range(6))


def test_short_prompts_are_enough_to_know_that_a_fetch_takes_longer() -> None:
    """A block takes 300 ms. After many short prompts nobody remembers what a long one took, but its pieces take 105
    ms together."""
    known, asked = numbers(0, 105), numbers(1000, 105)
    sim = stored(known, asked, block_s=0.3)
    short = [(5.0 + 0.02 * i, request(f"short {i}", numbers(9000 + 10 * i, 5), 1)) for i in range(60)]
    sim.run([(0.0, request("cold", numbers(90_000, 105))), (1.0, request("known", known)), *short])
    assert sim.core.scheduler.planner.expected.costs.known_prefill < 105
    times = sim.run([(10.0, request("asked", asked))])
    assert times["asked"].ttft == pytest.approx(105 * TOKEN_S + 0.005, rel=0.01)


def test_a_queue_on_the_link_is_shared_with_the_device() -> None:
    """Fetching takes half as long as computing; of ten that come at once some are computed meanwhile."""
    texts = [numbers(1000 * i, 105) for i in range(12)]
    arrivals = [(0.0, request("cold", numbers(90_000, 105))), (1.0, request("warm", texts[0]))]
    arrivals += [(3.0, request(f"r{i}", text)) for i, text in enumerate(texts[1:])]
    last = {}
    for way in (False, True):
        sim = stored(*texts, block_s=0.005, load_or_recompute=way, num_device_pages=4000)
        sim.run(arrivals)
        last[way] = max(t.arrival + t.ttft for t in sim.times.values()) - 3.0
        disk = [sim.times[f"r{i}"].cached_tokens_details["disk"] for i in range(11)]
        assert (min(disk) == 100) != way and max(disk) == 100
    assert last[True] < 0.85 * last[False]


def test_all_that_a_fetch_slows_is_booked() -> None:
    """While prompts are fetched one after another, decoding takes half as long again, whatever the window."""
    texts = [numbers(1000 * i, 105) for i in range(5)]
    stores = (SimulatedStore(lambda: one_by_one(0.02)),)
    slow = SimulatedHardware(LAYERS, launch_seconds, 1e9, 1e9, stores=stores, interference=lambda mode, link: 0.5)
    for window in (1, 2, 8):
        config = stored(window=window, load_or_recompute=False).core.scheduler.config
        sim = Simulation(config, slow)
        for text in texts:
            sim.stores[0].add(NAMES.of_prompt("", np.array(text, np.int32)))
        arrivals = [
            (0.0, request("d", numbers(9000, 5), 150)),
            *((0.1, request(f"r{i}", t, 1)) for i, t in enumerate(texts)),
        ]
        sim.run(arrivals)
        # 50 blocks of 20 ms: a third of that time.
        assert sim.executor.interference_s == pytest.approx(1 / 3, rel=0.1)
