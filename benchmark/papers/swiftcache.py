"""SwiftCache's evaluation. Here: figures 1 and 9, tables 1 and 2, in which no engine runs, and the table of all.

Figure 9 is a model of memory (simulator/memory.py), the rest the H20's cost model; figures 7, 8, 10 and 11 are in
swiftcache_serving.py, and what ours adds in swiftcache_streaming.py. docs/records/papers.md has what was predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.papers.runs import Runs
from benchmark.papers.sensitivity import Headline
from benchmark.papers.swiftcache_runs import HOST_BYTES, MASTERS, ServingOutcome, ServingSettings, simulate
from benchmark.papers.swiftcache_serving import figure7, figure8, figure10, figure11
from benchmark.papers.swiftcache_streaming import StreamOutcome, StreamSettings, ours
from benchmark.simulator.cost_models import DMA, HostLink, ModelShape, load_seconds, prefill_seconds
from benchmark.simulator.memory import activation_bytes, kv_room, longest_context
from benchmark.simulator.profiles import H20X4, MODELS

from benchmark.papers import swiftcache_streaming
from sglang.srt.managers.layer_streaming import longest_streamed_len, pages_without_context
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.startup.sizes import layer_stream_sizes_for
from sglang.srt.peer.protocol.elastic_units import layer_stream_sizes
from sglang.srt.server_args import ServerArgs

LWM = MODELS["LWM-7B"]
HISTORIES = (5_000, 10_000, 20_000, 30_000, 40_000, 50_000)
NEW_TOKENS = 256


def _load(link: HostLink, num_tokens: int) -> float:
    """LWM's KV in copies as large as its layers: what a link takes at best."""
    return load_seconds(LWM, link, DMA, num_tokens, 1, num_runs=1)


# -- figure 1, tables 1 and 2 ---------------------------------------------------------------------------------------


def figure1(runs: Runs) -> Result:
    """One H20 computes 256 new tokens of LWM behind a history that comes from the host or from the other H20."""
    rows: list[dict[str, Any]] = []
    for history in HISTORIES:
        compute = prefill_seconds(LWM, H20X4.gpu, history, NEW_TOKENS)
        loads = {"PCIe": _load(H20X4.link, history), "NVLink": _load(H20X4.peer_link, history)}
        rows.append(
            {"history": history, "compute ms": 1e3 * compute}
            | {f"{link} ms": 1e3 * load for link, load in loads.items()}
            | {f"{link} % loading": 100 * load / (load + compute) for link, load in loads.items()}
        )
    first, last = rows[0], rows[-1]
    # What computing must take if the first load takes 75 ms and the last ten times as long.
    implied = [load / share - load for load, share in ((75, 0.732), (750, 0.862))]
    claims = [
        Claim("loading 5 K over PCIe, ms", "around 75", first["PCIe ms"], "1; the link is fitted to it"),
        Claim("computing behind 5 K, ms", "about 27", first["compute ms"], "1"),
        Claim("share of loading at 5 K, %", "73.2", first["PCIe % loading"], "1"),
        Claim("share of loading at 50 K, %", "86.2", last["PCIe % loading"], "1"),
        Claim(
            "computing behind 5 K / 50 K that 75 ms and the shares imply, ms",
            "{:.0f} / {:.0f}".format(*implied),
            f"{first['compute ms']:.0f} / {last['compute ms']:.0f}",
            "1, worked out",
        ),
        Claim(
            "share of loading over NVLink at 5 K / 50 K, %",
            '"substantially reduce"',
            f"{first['NVLink % loading']:.0f} / {last['NVLink % loading']:.0f}",
            "1",
        ),
    ]
    panels = [
        Panel(
            "LWM on an H20, 256 new tokens",
            "historical tokens",
            label,
            {name: (HISTORIES, [row[f"{name} {unit}"] for row in rows]) for name in names},
        )
        for label, unit, names in (
            ("ms", "ms", ("compute", "PCIe", "NVLink")),
            ("% of loading and computing", "% loading", ("PCIe", "NVLink")),
        )
    ]
    notes = (
        "No constant computing time meets both shares, and no roofline of one efficiency: docs/records/simulator.md."
    )
    return _result("fig1", "Fig. 1, loading against computing", claims, rows, panels, notes=notes)


# Workload, average input, hit rate, seconds with and without the cache, as printed.
TABLE_1 = (
    ("summarization", 7124, 0.063, 0.77, 0.86),
    ("code completion", 155, 0.001, 0.03, 0.03),
    ("multi-turn", 6231, 0.907, 0.11, 0.72),
    ("question answering", 43958, 0.818, 0.92, 7.95),
)


def table1(runs: Runs) -> Result:
    """A prefill of one prompt of average length, alone, its hits on the device. Hits are read in two ways: every
    request has the average, or that share of the requests hits whole and costs nothing."""
    rows: list[dict[str, Any]] = []
    claims = []
    for name, length, hit_rate, cached_s, uncached_s in TABLE_1:
        hit = round(length * hit_rate)
        uncached = prefill_seconds(LWM, H20X4.gpu, 0, length)
        cached = prefill_seconds(LWM, H20X4.gpu, hit, length - hit)
        source = "Table 1" if name == "code completion" else "Table 1; the efficiency is fitted to it"
        claims += [
            Claim(f"{name}, without cache, s", f"{uncached_s}", uncached, source),
            Claim(f"{name}, with cache, all alike, s", f"{cached_s}", cached, "Table 1"),
            Claim(f"{name}, with cache, whole hits, s", f"{cached_s}", (1 - hit_rate) * uncached, "Table 1"),
        ]
        rows.append(
            {
                "workload": name,
                "paper, without": uncached_s,
                "without": uncached,
                "paper, with": cached_s,
                "with, all alike": cached,
                "with, whole hits": (1 - hit_rate) * uncached,
            }
        )
    names = [row["workload"] for row in rows]
    series = {key: (names, [row[key] for row in rows]) for key in rows[0] if key != "workload"}
    panel = Panel("LWM on an H20", "", "TTFT, s", series, kind="bars", log_y=True)
    return _result("table1", "Table 1, TTFT with and without prefix cache", claims, rows, [panel])


# MB per token in float16, as printed.
TABLE_2 = {"LWM-7B": 0.50, "Qwen3-8B": 0.141, "Qwen3-14B": 0.156, "Qwen3-32B": 0.25}


def table2(runs: Runs) -> Result:
    """2 * layers * KV heads * head size * 2 bytes; the paper's MB are MiB."""
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "layers": MODELS[name].num_layers,
            "KV heads": MODELS[name].num_kv_heads,
            "paper, MB": printed,
            "MiB": MODELS[name].kv_bytes_per_token / 2**20,
        }
        for name, printed in TABLE_2.items()
    ]
    claims = [
        Claim(f"{r['model']}, MiB per token", f"{r['paper, MB']:.3f}", f"{r['MiB']:.3f}", "Table 2") for r in rows
    ]
    series = {key: (list(TABLE_2), [r[key] for r in rows]) for key in ("paper, MB", "MiB")}
    panel = Panel("float16", "", "per token", series, kind="bars")
    return _result("table2", "Table 2, KV per token", claims, rows, [panel])


# -- figure 9 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextSystem:
    """chunk: tokens of a prefill's pass; None: the whole prompt. kv: where it may lie: `device`; `layers`, on the
    workers and one layer of it on the device, beside whole tokens; `tiers`, on device, workers and host."""

    name: str
    chunk: int | None
    kv: str
    models: str
    lacks: str


CHUNK_TOKENS = 8 * 1024
SYSTEMS = {
    s.name: s
    for s in (
        ContextSystem(
            "vLLM", None, "device", "Whole prompts; KV on the device.", "Graphs, fragments of the allocator."
        ),
        ContextSystem("vLLM, 32 K chunks", 32 * 1024, "device", "Chunked prefill; KV on the device.", "The same."),
        ContextSystem("vLLM, 8 K chunks", CHUNK_TOKENS, "device", "Chunked prefill; KV on the device.", "The same."),
        ContextSystem(
            "SwiftCache",
            None,
            "layers",
            "Whole prompts; a layer stream cache and a regular cache (Eq. 4 and 5); workers lend all that they have.",
            "Its engine's own activations, taken as vLLM's; elastic units.",
        ),
        ContextSystem(
            "SwiftCache, 8 K chunks", CHUNK_TOKENS, "layers", "SwiftCache with chunked prefill.", "The same."
        ),
        ContextSystem(
            "ours",
            CHUNK_TOKENS,
            "tiers",
            "Chunked prefill; segments of 8 K tokens streamed within a layer, two buffers; device, workers and host, "
            "as the engine's code counts them.",
            "The disk; what a prefill or a decode then takes.",
        ),
    )
}
SEGMENT_TOKENS = 8 * 1024
SEGMENT_BUFFERS = 2
# Of our engine; the slab is its flag's default.
PAGE_TOKENS = 16
SLAB_BYTES = 64 << 20
# GPUs and the workers beside the master (5.3). Data sheets call 2**30 bytes GB here, within 6 %.
WORKERS = {
    96: ("Qwen3-14B", "Qwen3-8B"),  # H20
    80: ("Qwen3-14B", "Qwen3-8B"),  # A100
    32: ("Qwen3-14B", "Qwen3-8B"),  # V100
    24: ("Qwen3-8B", "Qwen3-8B"),  # L4
}
# vLLM's default --gpu-memory-utilization.
USABLE = 0.9


@dataclass(frozen=True)
class ContextSettings:
    """The fields after gib are changed by a sensitivity table. activations: factor for all systems; streaming:
    another factor, for those that stream. lent: share of the workers' room. buffers: b of the layer stream cache; the
    paper has 1. reserved: a system that works in chunks keeps room for a whole one, however short the prompt."""

    system: str
    master: str
    gib: int
    usable: float = USABLE
    activations: float = 1.0
    streaming: float = 1.0
    lent: float = 1.0
    buffers: int = 1
    reserved: bool = False


@dataclass(frozen=True)
class LongestContext:
    """Tokens, and how many of them each tier can hold at that length."""

    tokens: int
    device: int
    peer: int
    host: int


def longest(settings: ContextSettings) -> LongestContext:
    """The longest prompt that a system can compute. Its KV and the activations of a pass share the device."""
    held = partial(_held, settings)
    tokens = longest_context(lambda n: sum(held(n)))
    return LongestContext(tokens, *held(tokens))


def _held(settings: ContextSettings, num_tokens: int) -> tuple[int, int, int]:
    """Tokens on device, workers and host while a prompt of num_tokens is computed."""
    system, master = SYSTEMS[settings.system], MODELS[settings.master]
    memory = settings.gib * 2**30 * settings.usable
    factor = settings.activations * (1.0 if system.kv == "device" else settings.streaming)
    chunk = num_tokens if system.chunk is None else system.chunk
    alive = chunk if settings.reserved else min(num_tokens, chunk)
    room = kv_room(master, memory, factor * activation_bytes(master, alive))
    if system.kv == "device":
        return int(room // master.kv_bytes_per_token), 0, 0
    # Workers keep what they need for chunks of their own.
    lent = [
        settings.lent * _worker_room(MODELS[name], memory, settings.activations) for name in WORKERS[settings.gib]
    ]
    k_workers = [int(size // master.kv_bytes_per_token) for size in lent]
    layer_bytes = 2 * master.row_bytes
    if system.kv == "layers":
        streamed, regular = layer_stream_sizes(
            int(room // layer_bytes), k_workers, master.num_layers, settings.buffers
        )
        return regular, streamed, 0
    return _held_by_ours(
        master, lent, lambda tokens: kv_room(master, memory, factor * activation_bytes(master, tokens))
    )


def _held_by_ours(master: ModelShape, lent: list[float], room: Callable[[int], float]) -> tuple[int, int, int]:
    """As the engine counts (managers/layer_streaming.py), in pages and whole slabs, with the largest chunks for which
    it starts. lent: bytes of each worker. room: bytes of the device beside the activations of a chunk."""
    page_bytes = PAGE_TOKENS * master.kv_bytes_per_token
    num_host_pages = int(HOST_BYTES // page_bytes)
    borrowed = sum(int(size // SLAB_BYTES) for size in lent) * int(SLAB_BYTES // page_bytes)
    args = ServerArgs(
        model_path="embedded",
        enable_hierarchical_cache=True,
        layer_stream=SEGMENT_BUFFERS,
        layer_stream_tokens=SEGMENT_TOKENS,
        page_size=PAGE_TOKENS,
    )
    chunk = CHUNK_TOKENS
    while chunk >= PAGE_TOKENS:
        num_pages = int(room(chunk) // page_bytes)
        stream, num_left = layer_stream_sizes_for(args, num_pages, num_host_pages, master.num_layers)
        overhead = pages_without_context(chunk // PAGE_TOKENS)
        if num_left >= overhead:
            config = SchedulerConfig(
                page_size=PAGE_TOKENS,
                num_device_pages=num_left,
                num_host_pages=num_host_pages,
                page_bytes=int(page_bytes),
                context_len=1 << 40,
                chunked_prefill_size=chunk,
                layer_stream=stream,
            )
            found = longest_streamed_len(config, borrowed)
            below = (borrowed * PAGE_TOKENS, num_host_pages * PAGE_TOKENS)
            return found - sum(below), *below
        chunk //= 2
    return 0, 0, 0


def _worker_room(worker: ModelShape, memory: float, activations: float) -> float:
    return kv_room(worker, memory, activations * activation_bytes(worker, CHUNK_TOKENS))


def hiding_bytes_per_s(model: ModelShape) -> float:
    """How fast KV must come so that attention of a chunk's queries, 4 * head_dim flops per head, key and query, hides
    it: the bytes of a token in a layer over the seconds that it is computed with."""
    flops = 4.0 * model.head_dim * model.num_heads * CHUNK_TOKENS
    return 2 * model.row_bytes * H20X4.gpu.matrix_flops * H20X4.gpu.attention_efficiency / flops


def decode_stream_seconds(model: ModelShape, context: LongestContext) -> float:
    """What one more token costs beside computing it: all that is not on the device comes again, over both links at
    once. On the H20s, the host's link unshared."""
    peer = context.peer * model.kv_bytes_per_token / H20X4.peer_link.wire
    return max(peer, context.host * model.kv_bytes_per_token / H20X4.link.wire)


CASES = [
    (master, gib)
    for gib in WORKERS
    for master in MASTERS
    if kv_room(MODELS[master], gib * 2**30 * USABLE, activation_bytes(MODELS[master], 1))
]
BASELINES = ("vLLM", "vLLM, 32 K chunks", "vLLM, 8 K chunks")
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as usual", {}),
    ("0.85 of the memory", {"usable": 0.85}),
    ("0.95 of the memory", {"usable": 0.95}),
    ("half the activations, everybody", {"activations": 0.5}),
    ("1.5 times the activations, everybody", {"activations": 1.5}),
    ("half the activations, SwiftCache alone", {"streaming": 0.5}),
    ("a quarter of the activations, SwiftCache alone", {"streaming": 0.25}),
    ("workers lend half", {"lent": 0.5}),
    ("workers lend a quarter", {"lent": 0.25}),
    ("two buffers", {"buffers": 2}),
    ("room for whole chunks", {"reserved": True}),
)


def _pairs(system: str, *baselines: str) -> tuple[ContextSettings, ...]:
    """By turns."""
    return tuple(ContextSettings(s, m, g) for m, g in CASES for b in baselines for s in (system, b))


def _ratios(outcomes: Sequence[LongestContext]) -> list[float]:
    """Of pairs. Where the baseline has no room for a token, nothing is compared."""
    return [a.tokens / b.tokens for a, b in zip(outcomes[::2], outcomes[1::2], strict=True) if b.tokens]


def _least(outcomes: Sequence[LongestContext]) -> float:
    return min(_ratios(outcomes))


def _most(outcomes: Sequence[LongestContext]) -> float:
    return max(_ratios(outcomes))


_OVER_8K, _OVER_REST = _pairs("SwiftCache", BASELINES[2]), _pairs("SwiftCache", *BASELINES[:2])
_CHUNKED = _pairs("SwiftCache, 8 K chunks", BASELINES[2])
HEADLINES = (
    Headline("over 8 K chunks, least", _OVER_8K, _least),
    Headline("most", _OVER_8K, _most),
    Headline("over 32 K and none, least", _OVER_REST, _least),
    Headline("most of these", _OVER_REST, _most),
    Headline("with 8 K chunks over 8 K chunks, least", _CHUNKED, _least),
    Headline("most with chunks", _CHUNKED, _most),
    Headline("LWM, 96 GiB, over 8 K chunks", _OVER_8K[:2], _least),
)


def figure9(runs: Runs) -> Result:
    """The longest context by GPU memory and master. Runs: `longest`."""
    rows: list[dict[str, Any]] = []
    for master, gib in CASES:
        found = dict(zip(SYSTEMS, runs([ContextSettings(name, master, gib) for name in SYSTEMS])))
        tokens = {name: context.tokens for name, context in found.items()}
        steps = {
            f"decode s/token, {name}": decode_stream_seconds(MODELS[master], found[name])
            for name in ("SwiftCache", "SwiftCache, 8 K chunks", "ours")
            if gib == 96
        }
        over = {f"over {name}": tokens["SwiftCache"] / tokens[name] for name in BASELINES}
        rows.append({"GiB": gib, "master": master} | tokens | over | steps)
    found_at = {(row["master"], row["GiB"]): row for row in rows}

    def span(settings: tuple[ContextSettings, ...]) -> str:
        outcomes = runs(settings)
        return f"{_least(outcomes):.2f} to {_most(outcomes):.2f}"

    def thousands(gib: int) -> str:
        return " / ".join(f"{found_at['LWM-7B', gib][name] / 1e3:.0f}" for name in BASELINES)

    hiding = " / ".join(f"{hiding_bytes_per_s(MODELS[name]) / 1e9:.1f}" for name in MASTERS)
    decoding = [
        " / ".join(f"{found_at[name, 96][f'decode s/token, {system}']:.2f}" for name in MASTERS)
        for system in ("SwiftCache", "SwiftCache, 8 K chunks", "ours")
    ]
    best = all(row[BASELINES[2]] >= max(row[name] for name in BASELINES[:2]) for row in rows)
    claims = [
        Claim("SwiftCache over vLLM with 8 K chunks", "1.58 to 3.98", span(_OVER_8K), "5.3"),
        Claim("SwiftCache over vLLM with 32 K chunks and without", "1.81 to 6.66", span(_OVER_REST), "5.3"),
        Claim("8 K chunks are the best baseline", "yes", "yes, or ties" if best else "no", "5.3"),
        Claim(
            "LWM, 32 GB, whole / 32 K / 8 K, thousand tokens",
            "18",
            thousands(32),
            "1; of which system it does not say",
        ),
        Claim("LWM, 96 GB, the same", "160", thousands(96), "1"),
        Claim("SwiftCache + 8 K chunks over vLLM with them", "-", span(_CHUNKED), ""),
        Claim("ours over vLLM with 8 K chunks", "-", span(_pairs("ours", BASELINES[2])), ""),
        Claim("ours over SwiftCache + 8 K chunks", "-", span(_pairs("ours", "SwiftCache, 8 K chunks")), ""),
        Claim("GB/s that chunks of 8 K hide, LWM / 14B / 32B, H20", "-", hiding, ""),
        *(
            Claim(f"streaming for one decoded token, {name}, s, 96 GB, LWM / 14B / 32B", "-", step, "")
            for name, step in zip(("SwiftCache", "+ 8 K chunks", "ours"), decoding)
        ),
    ]
    panels = [
        Panel(
            f"master {master}",
            "GiB",
            "longest context, tokens",
            {
                name: (
                    [str(r["GiB"]) for r in rows if r["master"] == master],
                    [r[name] for r in rows if r["master"] == master],
                )
                for name in SYSTEMS
            },
            kind="bars",
            log_y=True,
        )
        for master in MASTERS
    ]
    return _result("fig9", "Fig. 9, longest context", claims, rows, panels, headlines=HEADLINES, changes=CHANGES)


def _result(
    name: str,
    title: str,
    claims: Sequence[Claim],
    rows: Sequence[dict[str, Any]],
    panels: Sequence[Panel],
    **more: Any,
) -> Result:
    return Result(f"papers_swiftcache_{name}", title, "cost model", claims, rows, panels, rows, **more)


FIGURES: dict[str, Callable[[Runs], Result]] = {
    "1": figure1,
    "7": figure7,
    "8": figure8,
    "9": figure9,
    "10": figure10,
    "11": figure11,
    "table1": table1,
    "table2": table2,
    "ours": ours,
}


def run(
    settings: ContextSettings | ServingSettings | StreamSettings,
) -> LongestContext | ServingOutcome | StreamOutcome:
    """For `Runs`: of any kind."""
    if isinstance(settings, StreamSettings):
        return swiftcache_streaming.simulate(settings)
    return simulate(settings) if isinstance(settings, ServingSettings) else longest(settings)
