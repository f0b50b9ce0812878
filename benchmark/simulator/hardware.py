"""Puts cost models under the engine's simulation: from model, machine and method to `SimulatedHardware` and pools.

Owns no state. The one file here that knows the engine's launches and transfer operations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from benchmark.simulator.cost_models import (
    DMA,
    KERNEL_LOAD,
    Method,
    ModelShape,
    PassCost,
    attention_pairs,
    load_seconds,
    pass_cost,
)
from benchmark.simulator.profiles import Hardware, device_tokens, host_tokens

from sglang.simulator.simulation import SimulatedHardware
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.transfer import D2H, D2P, P2D, P2H, P2P, Tier, TransferOp
from sglang.srt.model_executor.launch import Launch, LaunchMode


def simulated_hardware(
    model: ModelShape,
    hardware: Hardware,
    page_size: int,
    load: Method = KERNEL_LOAD,
    backup: Method | None = None,
    peer: Method = DMA,
) -> SimulatedHardware:
    """One rank of the model on the machine; the others do the same at the same time. backup: None: as `load`, by one
    CTA if that is a kernel (Strata 4.2). peer: both ways between peers and device, over a link of their own. A layer
    stream cache is filled like the device. Launches that stream are issued layer by layer, not as a graph."""
    to_host = backup if backup is not None else replace(load, ctas=1)

    def launch_seconds(launch: Launch) -> float:
        return cost_of(launch).seconds

    def attention_seconds(launch: Launch) -> float:
        # Alike in flops and in bytes: every new token of a request meets all that the request streams.
        pairs = sum(int(launch.lens[each.req]) * (each.end - each.start) for each in launch.streams)
        return cost_of(launch).attention * pairs / attention_pairs(launch.starts, launch.lens)

    def cost_of(launch: Launch) -> PassCost:
        graph = launch.mode == LaunchMode.DECODE and not launch.streams
        return pass_cost(model, hardware.gpu, launch.starts, launch.lens, int(launch.samples.sum()), graph)

    def copy_seconds(tier: Tier, frames: np.ndarray) -> float:
        assert tier != Tier.DISK, "no profile has a disk"
        link, method = (hardware.peer_link, peer) if tier == Tier.PEER else (hardware.link, load)
        num_runs = count_runs(frames, np.arange(len(frames))) if method.kind == "dma" else None
        # Submitted long before it begins.
        link = replace(link, submit_s=0.0)
        return load_seconds(model, link, method, len(frames) * page_size, page_size, num_runs) / model.num_layers

    def op_seconds(op: TransferOp) -> float:
        to_peer = Tier.PEER in (op.src, op.dst)
        link = hardware.peer_link if to_peer else hardware.link
        method = peer if to_peer else to_host if op.dst == Tier.HOST else load
        num_runs = count_runs(op.src_frames, op.dst_frames) if method.kind == "dma" else None
        return load_seconds(model, link, method, len(op.src_frames) * page_size, page_size, num_runs)

    def interference(mode: LaunchMode, link: str) -> float:
        method = peer if link in (P2D, D2P, P2H, P2P) else to_host if link == D2H else load
        return hardware.interference.slowdown(method, mode == LaunchMode.DECODE)

    return SimulatedHardware(
        num_layers=model.num_layers,
        launch_seconds=launch_seconds,
        op_seconds=op_seconds,
        interference=interference,
        copy_seconds=copy_seconds,
        attention_seconds=attention_seconds,
    )


def count_runs(src: np.ndarray, dst: np.ndarray) -> int:
    """Runs of pages that lie side by side in both pools."""
    if not len(src):
        return 0
    return 1 + int(np.count_nonzero((np.diff(src) != 1) | (np.diff(dst) != 1)))


def scheduler_config(
    model: ModelShape,
    hardware: Hardware,
    page_size: int,
    num_device_tokens: int | None = None,
    num_host_tokens: int | None = None,
    num_peer_tokens: int = 0,
    **changes: Any,
) -> SchedulerConfig:
    """Pools as large as the machine has them, unless given otherwise; num_host_tokens 0: no hierarchy. changes:
    further fields of the configuration, `context_len` among them. One rank holds its share of every token. Its pages
    are therefore tp times smaller, and as many."""
    device = device_tokens(model, hardware.gpu) if num_device_tokens is None else num_device_tokens
    host = host_tokens(model, hardware.host_bytes) if num_host_tokens is None else num_host_tokens
    return SchedulerConfig(
        page_size=page_size,
        num_device_pages=device // page_size,
        num_host_pages=host // page_size,
        num_peer_pages=num_peer_tokens // page_size,
        page_bytes=page_size * model.kv_bytes_per_token,
        **changes,
    )
