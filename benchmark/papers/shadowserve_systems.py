"""ShadowServe's baselines, ablations and ours as configurations of one engine.

Owns the table SYSTEMS. The systems differ by data plane, by the tier where it delivers, and by its cost for the GPU.
Model, machine and kernels are the same. The constants are those of profiles.py: Table 1, Fig. 13 and the numbers for
the parts in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmark.simulator.cost_models import KERNEL_LOAD, ModelShape
from benchmark.simulator.data_plane import RAW, Codec, DataPlane, Stage, loss_as_delay, smart_nic_stages
from benchmark.simulator.hardware import simulated_hardware
from benchmark.simulator.profiles import (
    CACHEGEN_SIZE,
    CHUNK_COMPRESSED_SHARE,
    CHUNK_QUANTIZED_SHARE,
    CHUNK_TOKENS,
    GPU_DECOMPRESS_BUSY,
    GPU_DECOMPRESS_LOSS,
    REGISTERING_SLOWER,
    Hardware,
)

from sglang.simulator.simulation import SimulatedHardware, SimulatedStore
from sglang.srt.mem_cache.transfer import FETCH, Tier, TransferOp
from sglang.srt.model_executor.launch import LaunchMode

# ShadowServe 5: 0.5 GiB for the DMA's destination, and a scattering kernel for each round that fills it.
ROUND_BYTES = 512 << 20
PROBE_S = 1e-3
# Of an operation that others follow closely: few, so that what comes next can be chosen late.
STREAMED_CHUNKS = 4


@dataclass(frozen=True)
class Assumptions:
    """What a sensitivity table changes. compressed: of ShadowServe's chunk; cachegen_size: of CacheGen's over that.
    network: Gbit/s of the network stage on the SmartNIC while all stages run. slower: without memory management."""

    compressed: float = CHUNK_COMPRESSED_SHARE
    cachegen_size: float = CACHEGEN_SIZE
    network: float | None = None
    slower: float = REGISTERING_SLOWER
    loss: float = GPU_DECOMPRESS_LOSS


@dataclass(frozen=True)
class System:
    """models: what of the named system is here; lacks: what is not. plane: of a machine, for a network of so many
    bytes per second; None: nothing is fetched. in_rounds: operations are rounds, one at a time; else a few chunks
    each, several at once. on_host: what is fetched lands in host memory, and is loaded from there. decompresses:
    with the GPU. yields: what it does on the GPU slows no launch. fetch_order, partial_hits, or_recompute: how the
    queue goes."""

    name: str
    models: str
    lacks: str
    plane: Callable[[Hardware, float, Assumptions], DataPlane] | None
    in_rounds: bool = True
    on_host: bool = False
    decompresses: bool = False
    yields: bool = False
    fetch_order: str = "fifo"
    partial_hits: bool = False
    or_recompute: bool = False

    def blocks_per_op(self, model: ModelShape) -> int:
        chunk = CHUNK_TOKENS * model.kv_bytes_per_token
        return max(1, ROUND_BYTES // chunk) if self.in_rounds else STREAMED_CHUNKS

    def hardware(
        self, model: ModelShape, machine: Hardware, page_size: int, network: float, assumed: Assumptions
    ) -> SimulatedHardware:
        simulated = simulated_hardware(model, machine, page_size, KERNEL_LOAD)
        if self.plane is None:
            return simulated
        plane = self.plane(machine, network, assumed)
        chunk = float(CHUNK_TOKENS * model.kv_bytes_per_token)
        hbm = machine.gpu.hbm_bytes_per_s * machine.gpu.hbm_efficiency
        scatter_s = 2 * chunk / hbm  # read once, written once
        by_links = simulated.interference
        assert by_links is not None
        delay = 0.0
        if self.yields:
            pass
        elif self.decompresses:
            work = next(s for s in plane.stages if s.name == "decompress").seconds(chunk, True)
            delay = work / plane.pace(chunk, True) * loss_as_delay(assumed.loss)
        elif not self.on_host:
            # Both only move memory: a decode that runs beside a scatter takes as much longer as that takes.
            delay = scatter_s / plane.pace(chunk)

        def interference(mode: LaunchMode, link: str) -> float:
            if link == FETCH:
                return delay
            return by_links(mode, link) if self.on_host else 0.0

        changed = replace(
            simulated,
            stores=(SimulatedStore(plane.fetch, probe_s=PROBE_S),),
            fetch_blocks=plane.blocks,
            interference=interference,
        )
        if self.on_host:
            return changed
        # It is on the device when it has come; what is left is not to be paid twice.
        host = simulated.op_seconds
        assert host is not None

        def op_seconds(op: TransferOp) -> float:
            return 2 * op.size_bytes / hbm if op.dst == Tier.DEVICE else host(op)

        return replace(changed, op_seconds=op_seconds)


def _codec(assumed: Assumptions) -> Codec:
    return Codec(CHUNK_QUANTIZED_SHARE, assumed.compressed)


def _rates(machine: Hardware, assumed: Assumptions, together: bool) -> dict[str, float]:
    assert machine.nic is not None, f"{machine.name} has no SmartNIC"
    rates = dict(machine.nic.together if together else machine.nic.alone)
    if together and assumed.network is not None:
        rates["network"] = assumed.network * 1e9 / 8
    return rates


def _shadowserve(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    return DataPlane(smart_nic_stages(_rates(machine, assumed, True), _codec(assumed), network))


def _no_pipeline(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    return DataPlane(smart_nic_stages(_rates(machine, assumed, False), _codec(assumed), network), pipelined=False)


def _no_memory_management(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    return replace(_shadowserve(machine, network, assumed), slower=assumed.slower)


def _no_async(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    return replace(_shadowserve(machine, network, assumed), blocks=True)


def _cachegen(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    size = assumed.compressed * assumed.cachegen_size
    busy = size / GPU_DECOMPRESS_BUSY
    stages = (Stage("network", size / network), Stage("decompress", busy * (1 - assumed.loss), busy))
    return DataPlane(stages, overlaps=True)


def _cachegen_yields(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    """While the GPU computes, decompression loses what both would lose else."""
    network_stage, decompress = _cachegen(machine, network, assumed).stages
    alone = decompress.seconds_per_byte
    return DataPlane((network_stage, replace(decompress, busy=alone / (1 - 2 * assumed.loss))), overlaps=True)


def _raw(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    return DataPlane((Stage("network", RAW.compressed / network),), overlaps=True)


def _ours(machine: Hardware, network: float, assumed: Assumptions) -> DataPlane:
    return replace(_shadowserve(machine, network, assumed), overlaps=True)


# How the remote tier does it: host memory, operations that overlap, whatever storage has.
_STREAMED: dict[str, Any] = {"in_rounds": False, "on_host": True, "partial_hits": True}
_ALL = (
    System(
        "vLLM",
        "Recomputes every prompt, batches of up to 16,384 tokens, prefill first, no cache at all.",
        "Nothing known.",
        None,
    ),
    System(
        "ShadowServe",
        "Four stages at once at the rates of Fig. 13b, rounds of 0.5 GiB with the pipeline empty between them, one "
        "request after another, a scattering kernel per round; whole prompts or nothing.",
        "GPU memory is taken when a request is launched, not when its fetch begins, so long answers do not hold "
        "fetches up. Polling, the proxy's messages and the store's own time are left out.",
        _shadowserve,
    ),
    System("No AF", "ShadowServe, and no launch begins while something is fetched.", "See ShadowServe.", _no_async),
    System(
        "No CP",
        "ShadowServe, each chunk through all stages before the next, at the rates that the stages have alone.",
        "See ShadowServe. Stages that use all cores when they are alone.",
        _no_pipeline,
    ),
    System(
        "No MM",
        "ShadowServe, every stage three times as long (4.3: registering costs up to 3 times the latency).",
        "See ShadowServe. What allocating costs beside registering.",
        _no_memory_management,
    ),
    System(
        "CacheGen-Async",
        "Network and GPU decompression pipelined chunk by chunk; 32 Gbit/s of decompression while the GPU computes, "
        "and 30 % lost on both sides while both run.",
        "Its kernels' launches, on which the paper blames much of its TPOT; dequantizing apart; the ratio of its "
        "coder is assumed.",
        _cachegen,
        in_rounds=False,
        decompresses=True,
    ),
    System(
        "CacheGen-Async-d",
        "CacheGen-Async with model computation in the default stream (A): launches lose nothing, decompression loses "
        "what both lose else: assumed, as the paper prints no rates.",
        "See CacheGen-Async; why its unloaded TTFT rises.",
        _cachegen_yields,
        in_rounds=False,
        decompresses=True,
        yields=True,
    ),
    System(
        "ShadowServe-d",
        "ShadowServe with model computation in the default stream (A): scattering slows no launch.",
        "See ShadowServe.",
        _shadowserve,
        yields=True,
    ),
    System(
        "raw",
        "No compression: the network's rate, straight to the GPU.",
        "Anything that a network of this rate is slowed by.",
        _raw,
        in_rounds=False,
    ),
    System(
        "+ partial hits",
        "ShadowServe, and what storage has of a prompt is fetched, the rest computed.",
        "See ShadowServe.",
        _shadowserve,
        partial_hits=True,
    ),
    System(
        "+ streaming",
        "The same, chunks following one another through the stages across requests, landing in host memory and "
        "loaded by a kernel layer by layer, as the remote tier does it.",
        "The store's own time.",
        _ours,
        **_STREAMED,
    ),
    System(
        "+ SJF",
        "The same, the shortest job first, with ageing.",
        "See streaming.",
        _ours,
        **_STREAMED,
        fetch_order="sjf",
    ),
    System(
        "ours",
        "The same, and what is sooner computed than fetched is computed.",
        "See streaming.",
        _ours,
        **_STREAMED,
        fetch_order="sjf",
        or_recompute=True,
    ),
)
SYSTEMS = {system.name: system for system in _ALL}
