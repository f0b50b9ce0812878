"""Strata's baselines, ablations and ours as configurations of one engine.

Owns the table SYSTEMS. They differ by transfer method, page size and policy; model, machine and kernels are the same,
so no system here is faster or slower for its attention, its language or its HTTP server.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmark.simulator.cost_models import DIRECT, INFINITE, KERNEL_LOAD, Interference, Method
from benchmark.simulator.hardware import scheduler_config, simulated_hardware
from benchmark.simulator.profiles import Hardware, ModelShape

from sglang.simulator.simulation import SimulatedHardware
from sglang.srt.managers.scheduler_config import SchedulerConfig


@dataclass(frozen=True)
class Policy:
    """Fields of `SchedulerConfig`. The defaults are those of an engine that knows nothing of loads: first come, first
    served, pages shared once the launch that computes them has completed, one step ahead."""

    insert_at: str = "completion"
    deferral_threshold: int = 0
    load_ratio: float | str = 0.0
    bubble_filling: bool = False
    holds_batches: bool = False
    load_or_recompute: bool = False
    schedule_policy: str = "fcfs"
    write_policy: str = "write_through"
    max_ahead: int = 2


@dataclass(frozen=True)
class System:
    """models: what of the named system is here. lacks: what is not, and whom that favours. has_host: whether there is
    a host tier. blocking: a launch begins when all its loads are in, and they begin when it would (no overlap)."""

    name: str
    models: str
    lacks: str
    load: Method
    page_size: int
    policy: Policy
    has_host: bool = True
    blocking: bool = False

    def config(self, model: ModelShape, hardware: Hardware, page_size: int, **sizes: Any) -> SchedulerConfig:
        """sizes: as in `scheduler_config`, page size apart."""
        if not self.has_host:
            sizes["num_host_tokens"] = 0
        return scheduler_config(model, hardware, page_size, **sizes, **asdict(self.policy))

    def hardware(self, model: ModelShape, hardware: Hardware, page_size: int) -> SimulatedHardware:
        """A blocking system is a model of one layer that costs as much: nothing computes before everything has
        arrived. Its loads then slow no computing, and are not slowed by it."""
        if self.blocking:
            hardware = replace(hardware, interference=Interference(0.0, 0.0))
        simulated = simulated_hardware(model, hardware, page_size, self.load)
        return replace(simulated, num_layers=1) if self.blocking else simulated


_FCFS = Policy()
_DEFERRAL = Policy(deferral_threshold=100)
_BALANCE = replace(_DEFERRAL, load_ratio=100.0)
_STRATA = replace(_BALANCE, bubble_filling=True, holds_batches=True)
# Bubble filling as this engine has it by default: per request, and loads begin before the launch that needs them.
_PRELOADS = replace(_STRATA, holds_batches=False)
_OURS = replace(_PRELOADS, insert_at="launch", load_ratio="auto", load_or_recompute=True)
# LMCache and TensorRT move KV by CUDA kernels (Strata 5.3.1), with as many CTAs as there are pieces: the wire's rate.
_WIDE_KERNEL = Method("kernel", ctas=64)

_ALL = (
    System(
        "no hierarchy",
        "SGLang or vLLM without a host tier (num_host_tokens 0), page size 1.",
        "vLLM's mixed batches of prefills and decodes; page size 16.",
        KERNEL_LOAD,
        1,
        _FCFS,
        has_host=False,
    ),
    System(
        "SGLang-HiCache",
        "As the paper built it (5.1): cudaMemcpyAsync per page, layer, K and V; page size 32; layer-wise overlap.",
        "Nothing known.",
        DIRECT,
        32,
        _FCFS,
    ),
    System(
        "SGLang-HiCache 0.5.21",
        "Its defaults, and --schedule-policy lpm: KV moved by a kernel of two CTAs, write-through. Page size 64, as "
        "its guide has it. Its in-batch prefix caching is a deferral above 32 tokens.",
        "The host's layout page_first: pieces of a row or more load as fast in every layout here. LPM is first come, "
        "first served above 128 waiting requests there, which only runs with 256 in flight have.",
        KERNEL_LOAD,
        64,
        replace(_FCFS, schedule_policy="lpm", deferral_threshold=32),
    ),
    System(
        "vLLM-LMCache",
        "KV loaded by a CUDA kernel at the wire's rate before the forward pass begins, which waits for all of it; "
        "page size 32; one step at a time.",
        "Hits in whole chunks of 256 tokens (up to 255 more would be computed per question), the pass through a "
        "contiguous buffer, stores that block, Python in between, mixed batches: all of it favours this row.",
        _WIDE_KERNEL,
        32,
        replace(_FCFS, max_ahead=1),
        blocking=True,
    ),
    System(
        "TensorRT-HiCache",
        "As vLLM-LMCache, and blocks go to the host when they leave the device (write-back).",
        "Its scheduler, which admits a request only when its longest answer fits; faster kernels. How its loads and "
        "passes overlap is not documented: taken as not at all.",
        _WIDE_KERNEL,
        32,
        replace(_FCFS, max_ahead=1, write_policy="write_back"),
        blocking=True,
    ),
    System(
        "Strata-IO",
        "GPU-assisted I/O of two CTAs, page size 1; first come, first served (5.3.1).",
        "Nothing known.",
        KERNEL_LOAD,
        1,
        _FCFS,
    ),
    System(
        "Strata-Schedule-Only",
        "SGLang-HiCache with the paper's scheduler: deferral 100, load ratio 100, bubble filling by held batches.",
        "See Strata.",
        DIRECT,
        32,
        _STRATA,
    ),
    System(
        "Strata-Schedule-Only + preloads",
        "The same with this engine's bubble filling, which is decided per request: its load begins while others run, "
        "and also before the launch that needs it.",
        "Not the paper's: see Strata-Schedule-Only.",
        DIRECT,
        32,
        _PRELOADS,
    ),
    System(
        "Strata-IO-LPM",
        "Strata-IO, the queue sorted by the longest prefix match.",
        "Nothing known.",
        KERNEL_LOAD,
        1,
        replace(_FCFS, schedule_policy="lpm"),
    ),
    System(
        "Strata",
        "As the paper has it: GPU-assisted I/O, page size 1, deferral 100, load ratio 100, and bubble filling, by "
        "which a batch that would stall is held while decode batches run.",
        "A batch that waits takes no request in; the paper does not tell. Deferral is by the tokens of launches that "
        "have not completed.",
        KERNEL_LOAD,
        1,
        _STRATA,
    ),
    System(
        "Strata + preloads",
        "Strata with this engine's bubble filling: per request, and loads begin before the launch that needs them.",
        "Not the paper's: see Strata.",
        KERNEL_LOAD,
        1,
        _PRELOADS,
    ),
    System(
        "ours",
        "A launched prompt can be shared by the next launch, the load ratio is expected seconds over seconds, bubble "
        "filling is decided per request, and the front of what would be loaded is computed while its tail loads.",
        "Nothing: these are the engine's defaults, but for the load ratio, which is 100 there.",
        KERNEL_LOAD,
        1,
        _OURS,
    ),
    System(
        "oracle",
        "Strata with loads that take no time (5.4's Strata-Oracle).",
        "Nothing known.",
        INFINITE,
        1,
        _STRATA,
    ),
    # The steps of figure 11 between SGLang-HiCache and Strata.
    System(
        "+ deferral", "SGLang-HiCache and deferral on delay hits (Fig. 11).", "Nothing known.", DIRECT, 32, _DEFERRAL
    ),
    System("+ I/O", "The same with GPU-assisted I/O, page size 1.", "Nothing known.", KERNEL_LOAD, 1, _DEFERRAL),
    System("+ balance", "The same with balanced batches, ratio 100.", "Nothing known.", KERNEL_LOAD, 1, _BALANCE),
)
SYSTEMS = {system.name: system for system in _ALL}
