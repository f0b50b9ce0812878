"""Workloads through the real scheduler on simulated hardware: nothing is lost, and costs point the right way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmark.simulator.hardware import count_runs, scheduler_config, simulated_hardware
from benchmark.simulator.profiles import HARDWARE, MODELS, loading_at_once
from benchmark.simulator.smoke import Outcome, run
from benchmark.simulator.workloads import LOOGLE, REVIEWMT, SHAREGPT, Order, Workload

from benchmark.simulator import cost_models as cm
from sglang.simulator.simulation import Simulation
from sglang.srt.mem_cache.transfer import D2H, D2P, H2D, P2D, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import Launch, LaunchMode, StreamedPrefix

LLAMA, H200 = MODELS["Llama-3.1-8B"], HARDWARE["h200"]


def simulate(
    workload: Workload,
    method: cm.Method = cm.KERNEL_LOAD,
    page_size: int = 1,
    model: cm.ModelShape = LLAMA,
    host: int = 200_000,
    check: bool = False,
) -> Outcome:
    longest = workload.stats().max_total
    config = scheduler_config(
        model,
        H200,
        page_size,
        context_len=longest + 1,
        num_device_tokens=max(8000, 3 * longest),
        num_host_tokens=host,
    )
    sim = Simulation(config, simulated_hardware(model, H200, page_size, method))
    outcome = run(sim, workload)
    if check:
        sim.core.scheduler.check_invariants()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [pytest.param(o, marks=() if o is Order.MAXIMUM else pytest.mark.slow) for o in Order]
)
def test_loogle_runs_to_its_end(order: Order) -> None:
    workload = LOOGLE.scaled(lengths=0.1, counts=0.1).generate(1, rate=20.0, order=order)
    outcome = simulate(workload, check=True)
    assert outcome.num_requests == 241
    assert sum(outcome.hit_tokens.values()) > 0.7 * outcome.prompt_tokens


@pytest.mark.slow
def test_conversations_hit_their_own_history() -> None:
    reviews = simulate(REVIEWMT.scaled(lengths=0.05, counts=0.1).generate(1, rate=5.0))
    assert sum(reviews.hit_tokens.values()) > 0.75 * reviews.prompt_tokens
    chats = simulate(SHAREGPT.scaled(lengths=0.2, counts=0.0005).generate(1, rate=20.0))
    assert chats.num_requests == 100 and sum(chats.hit_tokens.values()) > 0.3 * chats.prompt_tokens
    # Somebody thought for a minute.
    assert chats.simulated_s > 60


@pytest.mark.slow
def test_a_simulation_repeats_itself() -> None:
    workload = LOOGLE.scaled(0.05, 0.05).generate(3, rate=50.0)
    first, second = (replace(simulate(workload), wall_s=0.0) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_better_links_stall_less() -> None:
    """Contexts come from the host in turns, and are long, as short ones load too fast to tell."""
    workload = LOOGLE.scaled(lengths=0.5, counts=0.1).generate(1, rate=50.0, order=Order.MAXIMUM)
    direct = simulate(workload, cm.DIRECT, page_size=32)
    kernel = simulate(workload)
    oracle = simulate(workload, cm.INFINITE)
    assert direct.hit_tokens["host"] > 0.3 * direct.prompt_tokens
    assert oracle.stall_s == pytest.approx(0, abs=1e-9) and oracle.interference_s == 0
    assert 0 < 2 * kernel.stall_s < direct.stall_s
    assert oracle.mean_ttft_s < kernel.mean_ttft_s < direct.mean_ttft_s
    assert kernel.interference_s > 0 == direct.interference_s


@pytest.mark.slow
def test_no_hierarchy_computes_more() -> None:
    workload = LOOGLE.scaled(lengths=0.1, counts=0.1).generate(1, rate=20.0, order=Order.MAXIMUM)
    with_host, without = simulate(workload), simulate(workload, host=0)
    assert without.hit_tokens["host"] == 0 and without.computed_tokens > 2 * with_host.computed_tokens


def test_costs_of_operations() -> None:
    hardware = simulated_hardware(LLAMA, H200, 32, cm.DMA)
    assert hardware.op_seconds is not None and hardware.interference is not None
    frames = np.arange(4, dtype=np.int32)
    apart = np.array([0, 2, 4, 6], np.int32)
    size = 4 * 32 * LLAMA.kv_bytes_per_token

    def op(src: np.ndarray, dst: np.ndarray) -> TransferOp:
        return TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, src, dst, size)

    assert (count_runs(frames, frames), count_runs(frames, apart), count_runs(apart, apart)) == (1, 4, 4)
    assert count_runs(np.array([5, 6, 9, 10]), np.array([1, 2, 3, 4])) == 2
    together, scattered = hardware.op_seconds(op(frames, frames)), hardware.op_seconds(op(frames, apart))
    copies = 2 * LLAMA.num_layers * 3  # three more runs
    assert scattered - together == pytest.approx(copies * H200.link.batched_copy_s)
    assert hardware.interference(LaunchMode.DECODE, H2D) == 0
    kernel = simulated_hardware(LLAMA, H200, 1)
    assert kernel.interference is not None and kernel.op_seconds is not None
    assert kernel.interference(LaunchMode.DECODE, H2D) == pytest.approx(0.10)
    assert kernel.interference(LaunchMode.EXTEND, D2H) == pytest.approx(0.025)
    load = TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, frames, frames, size)
    backup = TransferOp(Ticket(D2H, 0), Tier.DEVICE, Tier.HOST, frames, frames, size)
    assert kernel.op_seconds(load) < kernel.op_seconds(backup)


def test_one_rank_of_four_holds_a_quarter_of_every_token() -> None:
    model = MODELS["Llama-3.1-70B"]
    config = scheduler_config(model, H200, 16, context_len=1000)
    assert config.page_bytes == 16 * 80 * 2 * 2 * 128 * 2
    # 1 TB is for all four ranks.
    assert config.num_host_pages * config.page_bytes * 4 == pytest.approx(1e12, rel=0.001)
    outcome = simulate(REVIEWMT.scaled(0.02, 0.03).generate(1, 5.0), model=model)
    assert outcome.busy_s > 0


def test_copies_of_peers_have_a_link_of_their_own() -> None:
    h20, model = HARDWARE["h20x4"], MODELS["LWM-7B"]
    frames = np.arange(1000, dtype=np.int32)

    def seconds(src: Tier, dst: Tier, sharers: int = 1) -> float:
        hardware = simulated_hardware(model, loading_at_once(h20, sharers), 16)
        assert hardware.op_seconds is not None
        return hardware.op_seconds(TransferOp(Ticket(P2D, 0), src, dst, frames, frames, 0))

    size = 16_000 * 2**19
    reading = seconds(Tier.PEER, Tier.DEVICE)
    assert reading == pytest.approx(size / (0.889 * 200e9), rel=0.01)
    assert reading == seconds(Tier.DEVICE, Tier.PEER) == seconds(Tier.PEER, Tier.DEVICE, sharers=4)
    assert seconds(Tier.HOST, Tier.DEVICE) > 5 * reading
    # Copy engines move them, whatever loads from the host.
    hardware = simulated_hardware(model, h20, 16)
    assert hardware.interference is not None
    for mode in LaunchMode:
        assert hardware.interference(mode, P2D) == hardware.interference(mode, D2P) == 0
        assert hardware.interference(mode, H2D) > 0


def test_what_a_launch_streams_costs_as_much_as_a_load_of_it() -> None:
    """A decode behind 100,000 tokens, 80,000 of them streamed: most of its attention, by KV read from HBM."""
    hardware = simulated_hardware(LLAMA, H200, 16)
    assert hardware.copy_seconds is not None and hardware.attention_seconds is not None
    frames = np.arange(5000)
    rate = cm.link_rate(H200.link, cm.KERNEL_LOAD, 16 * LLAMA.row_bytes)
    layer_s = 80_000 * LLAMA.kv_bytes_per_token / LLAMA.num_layers / rate
    assert hardware.copy_seconds(Tier.HOST, frames) == pytest.approx(layer_s)
    fast = cm.load_seconds(LLAMA, H200.peer_link, cm.DMA, 80_000, 16, num_runs=1) / LLAMA.num_layers
    assert hardware.copy_seconds(Tier.PEER, frames) == pytest.approx(fast, rel=0.01)
    one = np.ones(1, np.int32)
    prefix = StreamedPrefix(0, 10_000, 90_000, ((Tier.HOST, frames),))
    launch = Launch(
        0,
        LaunchMode.DECODE,
        one,
        one * 99_999,
        one,
        one,
        one > 0,
        (),
        (),
        np.empty((3, 0), np.int32),
        (),
        streams=(prefix,),
    )
    kv_s = 80_000 * LLAMA.kv_bytes_per_token / (H200.gpu.hbm_bytes_per_s * H200.gpu.hbm_efficiency)
    assert hardware.attention_seconds(launch) == pytest.approx(kv_s)
    # Launching layer by layer takes longer than a graph, and hides behind the work of the GPU here.
    assert hardware.launch_seconds(launch) == hardware.launch_seconds(replace(launch, streams=()))
