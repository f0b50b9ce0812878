"""What layer streaming adds to SwiftCache and what it costs, from the scheduler and the tree on the simulator.

The paper has no figure of it. One request is longer than the device: the rest of it is on the host, and each launch
reads that in pieces of a layer. Beside it the same request on a device that would hold it, which there is not.
docs/records/papers.md has what was predicted. All numbers are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import Runs
from benchmark.papers.sensitivity import Headline
from benchmark.simulator.cost_models import DMA, KERNEL_LOAD
from benchmark.simulator.hardware import scheduler_config, simulated_hardware
from benchmark.simulator.profiles import HARDWARE, MODELS, Hardware, device_tokens, host_tokens, loading_at_once

from sglang.simulator.simulation import RequestTimes, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.peer.protocol.elastic_units import layer_stream_sizes
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = 16
# New tokens of the next turn, and how many it gets.
TURN, ANSWER = 500, 40
# What comes while it decodes: short prompts, and their answers.
NUM_SHORT, SHORT, SHORT_ANSWER = 8, 200, 30
# What the long one generates meanwhile.
LONG_ANSWER = 100
# H20: 5.1. H200: all of the node's memory for one of its GPUs.
HOST_BYTES = {"h20x4": 96e9, "h200": 1e12}
CASES = (("h20x4", "Qwen3-32B"), ("h20x4", "LWM-7B"), ("h200", "Qwen3-32B"), ("h200", "Llama-3.1-8B"))
TIMES = (0.9, 1, 2, 4, 8)
SHARES = (0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class StreamSettings:
    """times: the prompt, in tokens that the device holds without buffers. streamed: False for a device that holds
    prompt and answers. wire: where what is streamed comes from, `PCIe` or `NVLink`, as if all were a peer's.
    piece: tokens; None: a whole layer. short: requests that come while it decodes. What a sensitivity table changes:
    chunk, piece, buffers, bandwidth (a factor), sharers (GPUs that read from the host at once)."""

    machine: str
    model: str
    times: float
    streamed: bool = True
    wire: str = "PCIe"
    chunk: int = 8192
    piece: int | None = 4096
    buffers: int = 2
    bandwidth: float = 1.0
    sharers: int = 1
    short: int = NUM_SHORT

    @property
    def prompt(self) -> int:
        return round(self.times * device_tokens(MODELS[self.model], HARDWARE[self.machine].gpu))


@dataclass(frozen=True)
class StreamOutcome:
    """Seconds. ttft_s: of the prompt, nothing cached. next_ttft_s, token_s: of the next turn, and of each token that
    it generates alone, the median of the second half. share: of its tokens that are streamed then. beside_ttft_s,
    beside_token_s: of the short requests that come while it generates."""

    prompt: int
    ttft_s: float
    next_ttft_s: float
    token_s: float
    share: float
    beside_ttft_s: float
    beside_token_s: float
    counters: dict[str, int] = field(compare=False)


def buffers_of(settings: StreamSettings, host: int, device: int) -> tuple[LayerStreamConfig, int]:
    """The layer stream cache, and the tokens that it leaves of the device's. host, device: tokens."""
    num_layers = MODELS[settings.model].num_layers
    pages, _ = layer_stream_sizes(device // PAGE * num_layers, [host // PAGE], num_layers, settings.buffers)
    if settings.piece is not None:
        pages = min(pages, settings.piece // PAGE)
    left = (device // PAGE * num_layers - settings.buffers * pages) // num_layers
    return LayerStreamConfig(settings.buffers, pages), left * PAGE


def simulation(settings: StreamSettings, host: int, device: int, context: int) -> Simulation:
    """host, device: tokens; the buffers are the device's. context: the longest request."""
    model, machine = MODELS[settings.model], _machine(settings)
    stream = None
    if settings.streamed:
        stream, device = buffers_of(settings, host, device)
    config = scheduler_config(
        model,
        machine,
        PAGE,
        context_len=context,
        num_device_tokens=device,
        num_host_tokens=host,
        chunked_prefill_size=settings.chunk,
        layer_stream=stream,
    )
    return Simulation(
        config, simulated_hardware(model, machine, PAGE, KERNEL_LOAD if settings.wire == "PCIe" else DMA)
    )


def simulate(settings: StreamSettings) -> StreamOutcome:
    """A prompt; its next turn, alone; and again, beside short requests."""
    prompt = settings.prompt
    # A request grows by its turns; the host has room for all that is computed.
    context = prompt + 2 * TURN + LONG_ANSWER
    spare = 4 * settings.chunk + settings.short * (SHORT + SHORT_ANSWER)
    host = context + spare
    device = settings.prompt + context + spare
    if settings.streamed:
        device = device_tokens(MODELS[settings.model], HARDWARE[settings.machine].gpu)
    sim = simulation(settings, host, device, context)
    rng = np.random.default_rng(1)
    said = rng.integers(0, 100_000, prompt + 2 * TURN, np.int32)
    first = _answer(sim, [(sim.now, _request("first", said[:prompt], 1))])["first"]
    streamed: list[int] = []

    def look(decision: BatchDecision) -> None:
        if decision.launch is not None and decision.launch.mode == LaunchMode.DECODE:
            streamed.append(sum(each.end - each.start for each in decision.launch.streams))

    turn = _request("next", said[: prompt + TURN], ANSWER)
    sim.run([(sim.now, turn)], after_step=look)
    second = sim.times["next"]
    assert len(second.tokens) == ANSWER
    token_s = float(np.median(np.diff(second.tokens)[ANSWER // 2 :]))
    share = float(np.median(streamed[ANSWER // 2 :])) / (prompt + TURN)
    beside_ttft_s = beside_token_s = 0.0
    if settings.short:
        begun = sim.now + 1.1 * second.ttft + 4 * token_s
        arrivals = [(sim.now, _request("again", said, LONG_ANSWER))]
        for i in range(settings.short):
            arrivals.append((begun, _request(f"short{i}", rng.integers(0, 100_000, SHORT, np.int32), SHORT_ANSWER)))
        times = _answer(sim, arrivals)
        short = [times[f"short{i}"] for i in range(settings.short)]
        again = times["again"].tokens
        assert again[0] < begun and max(t.tokens[-1] for t in short) < again[-1], "they do not decode together"
        beside_ttft_s = float(np.mean([t.ttft for t in short]))
        beside_token_s = float(np.median(np.concatenate([np.diff(t.tokens) for t in short])))
    sim.core.scheduler.check_invariants()
    streaming = sim.core.scheduler.streaming
    return StreamOutcome(
        prompt,
        first.ttft,
        second.ttft,
        token_s,
        share,
        beside_ttft_s,
        beside_token_s,
        dict(streaming.counters) if streaming is not None else {},
    )


def longest(settings: StreamSettings) -> int | None:
    """Tokens of the longest request with the machine's host memory; None if the buffers leave too little to start."""
    model = MODELS[settings.model]
    host = host_tokens(model, HOST_BYTES[settings.machine])
    device = device_tokens(model, HARDWARE[settings.machine].gpu)
    try:
        sim = simulation(settings, host, device, 1 << 40)
    except ValueError:
        return None
    return sim.core.scheduler.max_total_len


def _machine(settings: StreamSettings) -> Hardware:
    machine = loading_at_once(HARDWARE[settings.machine], settings.sharers)
    link = machine.link if settings.wire == "PCIe" else machine.peer_link
    return replace(machine, link=replace(link, peak=link.peak * settings.bandwidth))


def _request(rid: str, tokens: np.ndarray, answer: int) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=answer, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(tokens), sampling_params=params, stream=True)


def _answer(sim: Simulation, arrivals: Sequence[tuple[float, TokenizedGenerateReqInput]]) -> dict[str, RequestTimes]:
    times = sim.run(arrivals)
    for _, request in arrivals:
        assert len(times[request.rid].tokens) == request.sampling_params.max_new_tokens, request.rid
    return times


# -- the figure -----------------------------------------------------------------------------------------------------

USUAL = tuple(StreamSettings(machine, "Qwen3-32B", 4, short=0) for machine in ("h20x4", "h200"))
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a layer, 1 buffer", {"piece": None, "buffers": 1}),
    ("a layer, 2 buffers", {"piece": None}),
    ("pieces of 4,096, 2 buffers", {}),
)
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("half the link's bandwidth", {"bandwidth": 0.5}),
    ("twice the link's bandwidth", {"bandwidth": 2.0}),
    ("four GPUs read from the host at once", {"sharers": 4}),
    ("chunks of 2,048 tokens", {"chunk": 2048}),
    ("chunks of 512 tokens", {"chunk": 512}),
    ("pieces of 256 tokens", {"piece": 256}),
    ("pieces of 1,024 tokens", {"piece": 1024}),
    ("pieces of 16,384 tokens", {"piece": 16384}),
    ("one buffer", {"buffers": 1}),
    ("three buffers", {"buffers": 3}),
    ("a whole layer, one buffer", {"piece": None, "buffers": 1}),
)


def _headlines() -> list[Headline]:
    def ratio(name: str):
        return lambda outcomes: getattr(outcomes[0], name) / getattr(outcomes[1], name)

    return [
        Headline(f"{s.machine}: {what}, times", (s, replace(s, streamed=False)), ratio(name))
        for s in USUAL
        for what, name in (("TTFT", "ttft_s"), ("next TTFT", "next_ttft_s"), ("s/token", "token_s"))
    ]


def ours(runs: Runs) -> Result:
    """What layer streaming adds, and what it costs. Runs: `simulate`."""
    wanted = [StreamSettings(machine, model, times) for machine, model in CASES for times in TIMES]
    by_share = [
        StreamSettings(machine, "Qwen3-32B", 1 / (1 - share), wire=wire)
        for machine in ("h20x4", "h200")
        for wire in ("PCIe", "NVLink")
        for share in SHARES
    ]
    runs([each for s in (*wanted, *by_share) for each in (s, replace(s, streamed=False))])
    rows = [_row(runs, s) for s in wanted]
    shares = [_row(runs, s) for s in by_share]
    claims = [
        Claim(f"{r['machine']}, {r['model']}: longest, thousand tokens", "-", r["said"], "") for r in _lengths()
    ]
    for r in rows:
        where = f"{r['machine']}, {r['model']}, {r['times']:g} times the device"
        said = f"{r['TTFT s']:.0f} s ({r['TTFT, times']:.3f}), {r['next TTFT s']:.2f} ({r['next TTFT, times']:.2f}), "
        claims.append(Claim(f"{where}: TTFT, next turn's, s/token (times)", "-", said + _token(r), ""))
    panels = [
        Panel(
            f"Qwen3-32B, {machine}",
            "streamed, %",
            "s/token, times",
            {
                f"{wire}{what}": (
                    [r["streamed %"] for r in shares if (r["machine"], r["wire"]) == (machine, wire)],
                    [r[name] for r in shares if (r["machine"], r["wire"]) == (machine, wire)],
                )
                for wire in ("PCIe", "NVLink")
                for what, name in (("", "s/token, times"), (", short ones beside", "beside s/token, times"))
            },
            log_y=True,
        )
        for machine in ("h20x4", "h200")
    ]
    return Result(
        "papers_swiftcache_ours",
        "Requests longer than the device",
        "simulated",
        claims,
        [*rows, *shares],
        panels,
        [*rows, *shares],
        _headlines(),
        CHANGES,
        notes="Times: over a device that would hold all, which there is not. The host has as much memory as each row "
        "needs ('host GB'). Sensitivity: Qwen3-32B, 4 times the device.",
    )


def _token(row: dict[str, Any]) -> str:
    return f"{row['s/token']:.3f} ({row['s/token, times']:.1f})"


def _row(runs: Runs, settings: StreamSettings) -> dict[str, Any]:
    found, whole = runs([settings, replace(settings, streamed=False)])
    host_gb = settings.prompt * MODELS[settings.model].kv_bytes_per_token / 1e9
    return {
        "machine": settings.machine,
        "model": settings.model,
        "wire": settings.wire,
        "times": settings.times,
        "prompt": found.prompt,
        "host GB": host_gb,
        "streamed %": 100 * found.share,
        "TTFT s": found.ttft_s,
        "TTFT, times": found.ttft_s / whole.ttft_s,
        "next TTFT s": found.next_ttft_s,
        "next TTFT, times": found.next_ttft_s / whole.next_ttft_s,
        "s/token": found.token_s,
        "s/token, times": found.token_s / whole.token_s,
        "beside TTFT s": found.beside_ttft_s,
        "beside TTFT, times": found.beside_ttft_s / whole.beside_ttft_s,
        "beside s/token": found.beside_token_s,
        "beside s/token, times": found.beside_token_s / whole.beside_token_s,
    }


def _lengths() -> list[dict[str, Any]]:
    """The longest request, not streamed, and in each of the ways."""
    rows = []
    for machine, model in CASES:
        usual = StreamSettings(machine, model, 1)
        found = [longest(replace(usual, streamed=False)), *(longest(replace(usual, **way)) for _, way in WAYS)]
        names = ("not streamed", *(name for name, _ in WAYS))
        said = " / ".join(
            f"{name} {n / 1e3:,.0f}" if n else f"{name} -" for name, n in zip(names, found, strict=True)
        )
        rows.append({"machine": machine, "model": model, "said": said})
    return rows
