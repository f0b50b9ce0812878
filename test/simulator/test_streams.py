"""The pipeline of a simulated layer stream: against a model that moves tick by tick, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from sglang.simulator.executor import LaunchCosts, SimulatedExecutor
from sglang.simulator.links import SimulatedLink, at_bandwidth
from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.simulator.streams import PieceCost, SimulatedStream, cut
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.mem_cache.transfer import H2D, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import Launch, LaunchMode, StreamedPrefix
from sglang.srt.sampling.sampling_params import SamplingParams

# -- the pipeline -------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """Of one layer, in ticks: each piece's copy and attention, and the rest, behind them."""

    pieces: list[tuple[int, int]]
    rest: int


def tick_by_tick(layers: list[Work], num_buffers: int) -> int:
    """Two machines, one that copies and one that computes. A buffer is free, filled, or being read."""
    copies = [copy for layer in layers for copy, _ in layer.pieces]
    tasks: list[tuple[str, int]] = []
    for layer in layers:
        tasks += [("attend", attend) for _, attend in layer.pieces] + [("rest", layer.rest)]
    tick = filled = read = next_task = 0
    copy_left = work_left = None
    while next_task < len(tasks):
        # Whatever takes no time happens within the tick.
        moved = True
        while moved:
            moved = False
            if copy_left is None and filled < len(copies) and filled - read < num_buffers:
                copy_left, moved = copies[filled], True
            if copy_left == 0:
                filled, copy_left, moved = filled + 1, None, True
            if work_left is None and next_task < len(tasks):
                kind, seconds = tasks[next_task]
                if kind == "rest" or read < filled:
                    work_left, moved = seconds, True
            if work_left == 0:
                read += tasks[next_task][0] == "attend"
                next_task, work_left, moved = next_task + 1, None, True
        if next_task == len(tasks):
            break
        tick += 1
        copy_left = copy_left - 1 if copy_left else copy_left
        work_left = work_left - 1 if work_left else work_left
    return tick


@pytest.mark.parametrize("seed", range(40))
def test_against_two_machines_that_move_tick_by_tick(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_buffers = int(rng.integers(1, 5))
    layers = [
        Work([(int(c), int(a)) for c, a in rng.integers(0, 9, (rng.integers(1, 7), 2))], int(rng.integers(0, 15)))
        for _ in range(rng.integers(1, 6))
    ]
    stream = SimulatedStream(num_buffers, 1, lambda tier, frames: 0.0)
    stream.begin(0.0, {})
    time = copied = 0.0
    for layer in layers:
        pieces = [PieceCost(((Tier.HOST, float(copy)),), float(attend)) for copy, attend in layer.pieces]
        time, copied_s = stream.layer(pieces, time)
        time += layer.rest
        copied += copied_s
    assert time == tick_by_tick(layers, num_buffers)
    assert copied == sum(copy for layer in layers for copy, _ in layer.pieces)


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_are_alike_are_not_all_gone_through(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_buffers, rest = int(rng.integers(1, 5)), float(rng.uniform(0, 9))
    pieces = [PieceCost(((Tier.HOST, c),), a) for c, a in rng.uniform(0, 5, (rng.integers(1, 7), 2)).tolist()]
    both = [SimulatedStream(num_buffers, 1, lambda tier, frames: 0.0) for _ in range(2)]
    calls = []
    layer = both[0].layer
    both[0].layer = lambda *args: calls.append(args) or layer(*args)  # type: ignore[method-assign, func-returns-value]
    ends = [0.0, 0.0]
    for launch in range(3):
        for stream in both:
            # The last one comes when all is over.
            stream.begin(0.0 if launch < 2 else ends[0] + 50.0, {Tier.HOST: 3.0} if launch == 1 else {})
        start = max(ends[0], 50.0 + ends[0] if launch == 2 else 0.0)
        time, copied = start, 0.0
        for _ in range(40):
            time, copied_s = both[1].layer(pieces, time)
            time, copied = time + rest, copied + copied_s
        ends = [both[0].layers(pieces, 40, rest, start)[0], time]
        assert ends[0] == pytest.approx(ends[1], abs=1e-6)
    assert len(calls) < 100, "of 120"


@pytest.mark.parametrize(("buffer_pages", "lengths"), [(3, [7]), (3, [2, 2, 5]), (4, [1, 1, 1, 1, 1]), (100, [3, 4])])
def test_pieces_are_full_but_the_last_and_in_order(buffer_pages: int, lengths: list[int]) -> None:
    tiers = [Tier.HOST, Tier.PEER]
    parts = tuple((tiers[i % 2], np.arange(n) + 10 * i) for i, n in enumerate(lengths))
    pieces = cut(parts, buffer_pages)
    sizes = [sum(len(frames) for _, frames in piece) for piece in pieces]
    assert all(n == buffer_pages for n in sizes[:-1]) and 0 < sizes[-1] <= buffer_pages
    joined = [(tier, frame) for piece in pieces for tier, frames in piece for frame in frames.tolist()]
    assert joined == [(tier, frame) for tier, frames in parts for frame in frames.tolist()]
    assert all(a[0] != b[0] for piece in pieces for a, b in pairwise(piece)), "runs of a tier are one copy"


# -- an executor --------------------------------------------------------------------------------------------------

LAYERS, PAGE_S, COMPUTE_S = 4, 0.010, 0.2


class Bench:
    """Launches that stream 10 pages in pieces of 4, 4 and 2; attention is half of what they compute."""

    def __init__(
        self,
        num_buffers: int = 2,
        page_s: float = PAGE_S,
        link: SimulatedLink | None = None,
        interference: Callable[[LaunchMode, str], float] | None = None,
    ) -> None:
        self.now = 0.0
        self.parts = ((Tier.HOST, np.arange(10)),)
        self.executor = SimulatedExecutor(
            lambda: self.now,
            LaunchCosts(
                LAYERS, lambda launch: COMPUTE_S, interference, attention_seconds=lambda launch: COMPUTE_S / 2
            ),
            {H2D: link} if link is not None else {},
            SimulatedStream(num_buffers, 4, lambda tier, frames: page_s * len(frames)),
        )

    def launch(self, seq: int = 0, streams: bool = True) -> float:
        """When it ends."""
        one = np.ones(1, np.int32)
        prefix = StreamedPrefix(0, 0, 10, self.parts)
        self.executor.launch(
            Launch(
                seq,
                LaunchMode.DECODE,
                one,
                one * 100,
                one,
                one,
                one.astype(bool),
                (),
                (),
                np.empty((3, 0), np.int32),
                (),
                streams=(prefix,) if streams else (),
            )
        )
        return self.executor.launch_end(seq)


@pytest.mark.parametrize("num_buffers", [2, 5])
def test_a_slow_link_is_all_that_counts(num_buffers: int) -> None:
    """10 pages in each of 4 layers take 0.4 s; what is left to compute behind the last piece is 1/5 of a layer's
    attention and the rest of it. The second launch's copies begin while the first one computes that."""
    bench = Bench(num_buffers)
    tail = COMPUTE_S / LAYERS * (0.5 / 5 + 0.5)
    assert bench.launch(0) == pytest.approx(0.4 + tail)
    assert bench.launch(1) == pytest.approx(0.8 + tail)
    bench.now = 2.0
    first, second = bench.executor.poll()
    assert first.stream_s == pytest.approx(0.4) and first.seconds == COMPUTE_S
    assert first.stall_s == pytest.approx(0.4 + tail - COMPUTE_S)
    assert second.stall_s == pytest.approx(0.4 - COMPUTE_S)


def test_with_one_buffer_copies_and_attention_take_turns() -> None:
    """Only the rest of a layer, half of it, runs beside a copy, of the 4 pages that come next."""
    bench = Bench(num_buffers=1)
    beside = min(COMPUTE_S / LAYERS / 2, 4 * PAGE_S)
    assert bench.launch() == pytest.approx(0.4 + COMPUTE_S - (LAYERS - 1) * beside)


def test_a_fast_link_costs_one_piece() -> None:
    bench = Bench(page_s=1e-4)
    assert bench.launch(0) == pytest.approx(COMPUTE_S + 4e-4)
    assert bench.launch(1) == pytest.approx(2 * COMPUTE_S + 4e-4), "the next launch's first piece has come before"
    assert bench.launch(2, streams=False) == pytest.approx(3 * COMPUTE_S + 4e-4)


def test_loads_take_their_part_of_the_link() -> None:
    """A load of 0.1 s that is under way makes what the launch streams come 0.1 s later, and slows nothing else."""

    def ends(size: int) -> list[float]:
        link = SimulatedLink(H2D, lambda: 0.0, at_bandwidth(1e3), 0.0, LAYERS, lambda seq: 0.0)
        bench = Bench(link=link)
        if size:
            frames = np.arange(1, dtype=np.int32)
            link.submit(TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, frames, frames, size))
        return [bench.launch(0), bench.launch(1)]

    alone, beside = ends(0), ends(100)
    assert beside == pytest.approx([end + 0.1 for end in alone])


def test_transfer_kernels_slow_what_streams() -> None:
    link = SimulatedLink(H2D, lambda: 0.0, at_bandwidth(1.0), 0.0, LAYERS, lambda seq: 0.0)
    bench = Bench(page_s=1e-3, link=link, interference=lambda mode, link: 0.5)
    bench.launch()
    assert bench.executor.interference_s == pytest.approx(0.5 * 10 * LAYERS * 1e-3)
    assert bench.executor.stream_s == pytest.approx(10 * LAYERS * 1e-3)


# -- the scheduler on it ------------------------------------------------------------------------------------------

PAGE_BYTES, CHUNK, DECODE_S, TOKEN_S = 1000, 32, 0.010, 0.001
ROOM = 200


def launch_seconds(launch: Launch) -> float:
    return DECODE_S if launch.mode == LaunchMode.DECODE else TOKEN_S * int(launch.lens.sum())


def simulation(bandwidth: float, device: int = ROOM, **changes: object) -> Simulation:
    settings = {
        "page_size": 1,
        "num_device_pages": device,
        "num_host_pages": 2000,
        "page_bytes": PAGE_BYTES,
        "context_len": 1900,
        "chunked_prefill_size": CHUNK,
        "layer_stream": LayerStreamConfig(2, 16),
        **changes,
    }
    hardware = SimulatedHardware(LAYERS, launch_seconds, bandwidth, bandwidth, swap_bandwidth=bandwidth / 10)
    return Simulation(SchedulerConfig(**settings), hardware)  # type: ignore[arg-type]


def request(rid: str, num_tokens: int, max_new_tokens: int, first: int = 0) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    ids = ids_to_bytes(list(range(first, first + num_tokens)))
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids, sampling_params=params, stream=True)


def checked(sim: Simulation, also: Callable[[BatchDecision], None] = lambda decision: None):
    def after_step(decision: BatchDecision) -> None:
        sim.core.scheduler.check_invariants()
        also(decision)

    return after_step


def launches_of(
    sim: Simulation, arrivals: list[tuple[float, TokenizedGenerateReqInput]]
) -> list[tuple[float, LaunchMode]]:
    """When each launch ended, and its mode."""
    ends: list[tuple[float, LaunchMode]] = []
    modes: list[LaunchMode] = []

    def look(decision: BatchDecision) -> None:
        while len(ends) < sim.core.scheduler.clock.done:
            ends.append((sim.now, modes[len(ends)]))
        if decision.launch is not None:
            modes.append(decision.launch.mode)

    sim.run(arrivals, look)
    return ends


def test_a_token_takes_as_long_as_what_it_streams() -> None:
    """600 tokens, of which the device has at most 200; the link moves 10,000 tokens per second. While the rest of a
    layer is computed, it fills both buffers and no more."""
    sim = simulation(1e7)
    streamed: list[int] = []

    def look(decision: BatchDecision) -> None:
        if decision.launch is not None and decision.launch.mode == LaunchMode.DECODE:
            streamed.append(sum(each.end - each.start for each in decision.launch.streams))

    times = sim.run([(0.0, request("a", 600, 60))], after_step=checked(sim, look))["a"]
    assert len(times.tokens) == 60
    steps = np.diff(times.tokens)
    assert streamed[0] >= 600 - ROOM and 659 - ROOM <= streamed[-1] < 659 - ROOM + CHUNK
    both_buffers = 2 * 16 * 1e-4 / LAYERS
    token_s = np.array(streamed) * 1e-4 + LAYERS * (DECODE_S / LAYERS - both_buffers)
    # Some wait for the device's room besides, or share the link with what is promoted.
    assert np.isclose(steps, token_s).mean() > 0.7 and (steps > token_s - 1e-9).all()
    costs = sim.core.scheduler.planner.expected.costs.state()
    assert costs["stream_byte_s"] == pytest.approx(1e-7, rel=0.01)


def test_a_prompt_whose_chunks_hide_the_link_takes_what_it_takes() -> None:
    """A chunk computes for 32 ms; streaming 400 tokens takes 0.4 ms."""
    slow, fast = simulation(1e6), simulation(1e9)
    large = simulation(1e9, device=2000)
    ttft = [sim.run([(0.0, request("a", 600, 2))], checked(sim))["a"].ttft for sim in (slow, fast, large)]
    assert ttft[2] == pytest.approx(0.6)
    assert ttft[1] == pytest.approx(0.6, rel=0.01)
    assert ttft[0] > 2 * ttft[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_prompt", "num_new"), [(20, 4), (20, 20), (70, 12)])
def test_a_short_answer_takes_one_chunk_of_a_long_prompt_and_its_own_time(num_prompt: int, num_new: int) -> None:
    """Where it takes less time than a chunk. Chunks take up to 0.5 s, a decode step 0.01 s."""
    long = request("long", 700, 4)
    alone = simulation(1e6).run([(0.0, request("a", num_prompt, num_new, 5000))])["a"]
    ends = [end for end, mode in launches_of(simulation(1e6), [(0.0, long)]) if mode == LaunchMode.EXTEND]
    for at, chunk_s in [(ends[i] + 0.001, ends[i + 1] - ends[i]) for i in (10, 15, 18)]:
        sim = simulation(1e6)
        beside = sim.run([(0.0, long), (at, request("a", num_prompt, num_new, 5000))], checked(sim))["a"]
        waited = beside.tokens[-1] - at - alone.tokens[-1]
        # Besides what it reads of the long one's stream, copies for room that it takes from that.
        assert waited <= 1.2 * chunk_s, f"at {at:.3f}: {waited:.3f} s more than alone, a chunk takes {chunk_s:.3f}"


def test_a_short_prompt_waits_for_one_chunk_of_several_long_ones() -> None:
    """It needs nearly all of the device but for the next chunks of one."""
    longs = [(0.0, request(f"{i}", 2000, 4, 5000 * i)) for i in range(2)]
    num_tokens = 736 - 4 * 64 - 50
    sim = simulation(2e6, 736, chunked_prefill_size=64, num_host_pages=5000, context_len=3000)
    beside = sim.run([*longs, (5.0, request("short", num_tokens, 4, 20000))], checked(sim))["short"]
    # One chunk takes up to 0.6 s; the short one is computed in half a second and gets its room by copies.
    assert beside.ttft < 1.5


@pytest.mark.slow
def test_a_long_prompt_goes_on_beside_others_without_end() -> None:
    """Answers, or prompts, enough for all of the time. They have half of it, and pages that are then streamed."""
    long = (0.0, request("long", 700, 4))
    alone = simulation(1e6).run([long])["long"].ttft
    answers = [(0.5 + i / 4, request(f"{i}", 10, 60, 2000 + 20 * i)) for i in range(100)]
    prompts = [(0.5 + i / 20, request(f"{i}", 40, 4, 2000 + 50 * i)) for i in range(400)]
    for others in (answers, prompts):
        sim = simulation(1e6)
        times = sim.run([long, *others], checked(sim))
        assert times[others[-1][1].rid].tokens[-1] > times["long"].ttft, "the others end first"
        assert 1.8 < times["long"].ttft / alone < 3


def test_what_decodes_beside_it_waits_for_its_pieces() -> None:
    alone, beside = simulation(1e6, layer_stream=None), simulation(1e6)
    short = request("short", 20, 30, 5000)
    tpot = [np.diff(alone.run([(0.0, short)], checked(alone))["short"].tokens)]
    tpot.append(np.diff(beside.run([(0.0, request("long", 500, 60)), (9.0, short)], checked(beside))["short"].tokens))
    assert np.median(tpot[0]) == pytest.approx(DECODE_S)
    assert np.median(tpot[1]) > 10 * DECODE_S


def test_what_the_host_has_no_room_for_comes_from_the_swap_file() -> None:
    """The disk is a tenth as fast as the host, and the scheduler finds that out."""
    sim = simulation(1e7, num_host_pages=150, num_swap_pages=500)
    tiers: list[dict[Tier, int]] = []

    def look(decision: BatchDecision) -> None:
        if decision.launch is not None and decision.launch.mode == LaunchMode.DECODE:
            parts = [part for each in decision.launch.streams for part in each.parts]
            tiers.append({t: sum(len(f) for tier, f in parts if tier == t) for t in (Tier.HOST, Tier.DISK)})

    tokens = sim.run([(0.0, request("a", 600, 30))], checked(sim, look))["a"].tokens
    least = np.array([1e-4 * each[Tier.HOST] + 1e-3 * each[Tier.DISK] for each in tiers])
    assert all(each[Tier.HOST] > 50 and each[Tier.DISK] > 200 for each in tiers)
    steps = np.diff(tokens)
    assert (steps > least - 1e-9).all() and (steps < least + 2 * DECODE_S).mean() > 0.7
    costs = sim.core.scheduler.planner.expected.costs.state()
    assert costs["stream_disk_byte_s"] == pytest.approx(9e-7, rel=0.2)
