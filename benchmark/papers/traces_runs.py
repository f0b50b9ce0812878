"""One run of a whole trace: `TraceSettings` -> `Outcome`.

Owns the table TRACES: which files are known, which of them was recorded, and how their requests arrive. Files are
read, never fetched. All numbers are simulated, but wall_s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmark.papers.runs import CHUNK_TOKENS, MAX_PREFILL_TOKENS, Outcome, run_to_the_end
from benchmark.papers.systems import SYSTEMS, System
from benchmark.simulator.cost_models import ModelShape
from benchmark.simulator.profiles import HARDWARE, MODELS, device_tokens, host_tokens
from benchmark.simulator.traces import has_sessions, read_agentic, read_mooncake
from benchmark.simulator.workloads import Workload

from sglang.simulator.simulation import Simulation

# The longest prompts have 199,947 tokens. Qwen2.5-14B-Instruct-1M takes them, and Strata's figures run on it too.
# Its model card wants several GPUs for long prompts. One GPU cannot serve the conversations at their own rate: they
# would take it three times their hour.
MODEL, MACHINE, TP = "Qwen2.5-14B", "h200", 4
# Sessions of agents at a time.
MAX_OPEN = 32
UNLIMITED = "unlimited device memory"


@dataclass(frozen=True)
class Trace:
    """A known file, by its name without .jsonl or .jsonl.gz."""

    name: str
    # recorded or generated.
    kind: str
    what: str


_ALL = (
    Trace("mooncake_conversation", "recorded", "one hour of chats of a production service (Mooncake, FAST'25)"),
    Trace(
        "mooncake_synthetic", "generated", "Mooncake's mix of long-context data sets, with times that were made up"
    ),
    Trace("agentic_200k", "generated", "sessions of coding agents, up to 200,000 tokens, made by aiperf"),
)
TRACES = {trace.name: trace for trace in _ALL}


@dataclass(frozen=True)
class TraceSettings:
    """One run."""

    # A name of SYSTEMS, or UNLIMITED.
    system: str
    # The trace's file.
    path: Path
    model: str = MODEL
    machine: str = MACHINE
    # GPUs that the model runs on.
    tp: int = TP
    # Times between requests, over those of the trace. Delays of sessions stay as they are.
    slowdown: float = 1.0
    max_open: int = MAX_OPEN
    # Of the trace's requests or sessions, its first; pools are as much smaller.
    share: float = 1.0
    # So many requests or sessions at most; pools stay.
    first: int | None = None
    # Factor of the host's memory.
    host: float = 1.0
    # Of `Runs`.
    dataset: str = "traces"

    def describe(self) -> dict[str, Any]:
        """The fields that identify a run: the first two, and each field that differs from its default."""
        others = {f.name: (getattr(self, f.name), f.default) for f in fields(self)[2:] if f.name != "dataset"}
        changed = {name: value for name, (value, usual) in others.items() if value != usual}
        return {"system": self.system, "trace": trace_name(self.path)} | changed


def trace_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def system_of(name: str) -> System:
    """UNLIMITED: our scheduler on a device with room for the whole trace, which needs no host."""
    if name != UNLIMITED:
        return SYSTEMS[name]
    return replace(
        SYSTEMS["ours"],
        name=UNLIMITED,
        models="A device with room for the whole trace and the scheduler of ours, as a bound.",
        lacks="Nothing: no such device exists.",
        has_host=False,
    )


def model_of(settings: TraceSettings) -> ModelShape:
    return replace(MODELS[settings.model], tp=settings.tp)


def workload_of(settings: TraceSettings) -> Workload:
    whole = _read(settings.path, settings.slowdown, settings.max_open)
    num_first = round(settings.share * len(whole.conversations))
    return whole.first(max(1, num_first if settings.first is None else min(settings.first, num_first)))


@lru_cache(maxsize=1)
def _read(path: Path, slowdown: float, max_open: int) -> Workload:
    """Kept, because all systems run the same trace one after another."""
    return read_agentic(path, max_open) if has_sessions(path) else read_mooncake(path, 1 / slowdown)


def capacities(settings: TraceSettings) -> tuple[int, int]:
    """Tokens of the device and of the host."""
    model, machine = model_of(settings), HARDWARE[settings.machine]
    device = device_tokens(model, machine.gpu) * settings.share
    return int(device), int(host_tokens(model, machine.host_bytes) * settings.share * settings.host)


def simulate(settings: TraceSettings) -> Outcome:
    begin = time.perf_counter()
    system, model, machine = system_of(settings.system), model_of(settings), HARDWARE[settings.machine]
    workload = workload_of(settings)
    stats = workload.stats()
    device, host = capacities(settings)
    device = max(device, 2 * stats.max_total + 2 * system.page_size)
    if settings.system == UNLIMITED:
        device = total_tokens(workload) + stats.max_total
    config = system.config(
        model,
        machine,
        system.page_size,
        context_len=stats.max_total + 1,
        num_device_tokens=device,
        num_host_tokens=host,
        chunked_prefill_size=CHUNK_TOKENS,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
    )
    sim = Simulation(config, system.hardware(model, machine, system.page_size))
    return run_to_the_end(sim, workload, model, system.page_size, begin)


def total_tokens(workload: Workload) -> int:
    """An upper bound of what a cache could hold: every message and answer, shared or not."""
    return sum(
        len(talk.context) + sum(len(turn.message) + turn.output_len for turn in talk.turns)
        for talk in workload.conversations
    )
