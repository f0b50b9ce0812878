"""Cost models against numbers worked out by hand, and properties that any such model must have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmark.simulator import cost_models as cm

# 2 layers, hidden 4, MLP 8, 2 heads of 2 on 1 KV head, vocabulary 16, 2 bytes.
TINY = cm.ModelShape("tiny", 2, 4, 8, 2, 1, 2, 16)
GPU = cm.Gpu(
    "gpu",
    matrix_flops=1000.0,
    hbm_bytes_per_s=100.0,
    hbm_bytes=1e6,
    matmul_efficiency=0.5,
    attention_efficiency=0.25,
    hbm_efficiency=0.5,
    layer_launch_s=0.0,
    graph_launch_s=0.0,
    step_s=0.0,
)
LINK = cm.HostLink(
    "link", peak=100e9, usable=0.5, copy_s=1e-6, batched_copy_s=1e-7, cta_bytes=5e4, kernel_latency_s=1e-6
)
LLAMA = cm.ModelShape("llama-8b", 32, 4096, 14336, 32, 8, 128, 128256)


def test_a_models_sizes() -> None:
    # Q 4x4, K and V 4x2 each, O 4x4, three of 4x8.
    assert TINY.layer_params == 16 + 2 * 8 + 16 + 3 * 32
    assert TINY.row_bytes == 4 and TINY.kv_bytes_per_token == 2 * 2 * 4
    assert TINY.pass_weight_bytes == 2 * (2 * 144 + 64)
    assert TINY.resident_weight_bytes == TINY.pass_weight_bytes + 128
    assert LLAMA.kv_bytes_per_token == 131072
    # 40 GB hold "roughly 0.3M tokens" of Llama-8B (Strata 1), whose parameters are 8.03 billion.
    assert 40e9 / LLAMA.kv_bytes_per_token == pytest.approx(0.3e6, rel=0.03)
    assert LLAMA.resident_weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)


def test_tensor_parallelism_divides_a_rank() -> None:
    four = replace(LLAMA, tp=4)
    assert four.kv_bytes_per_token * 4 == LLAMA.kv_bytes_per_token
    assert four.pass_weight_bytes * 4 == LLAMA.pass_weight_bytes
    with pytest.raises(ValueError, match="KV heads"):
        replace(LLAMA, tp=16)


def test_flops_by_hand() -> None:
    assert cm.matmul_flops(TINY, num_tokens=3, num_sampled=1) == 2 * (3 * 2 * 144 + 64)
    # 2 new tokens behind 3 see 4 and 5 keys, 1 token behind none sees itself: 10 pairs.
    pairs = 4 + 5 + 1
    assert cm.attention_flops(TINY, np.array([3, 0]), np.array([2, 1])) == 4 * 2 * 2 * 2 * pairs


def test_a_prefill_is_bound_by_flops_and_a_decode_by_bytes() -> None:
    prefill = cm.pass_cost(TINY, GPU, np.array([0]), np.array([100]), 1)
    assert prefill.matmul == pytest.approx(2 * (100 * 2 * 144 + 64) / 500)
    assert prefill.attention == pytest.approx(4 * 2 * 2 * 2 * 5050 / 250)
    decode = cm.pass_cost(TINY, GPU, np.array([9]), np.array([1]), decode=True)
    assert decode.matmul == pytest.approx(TINY.pass_weight_bytes / 50)
    assert decode.attention == pytest.approx(10 * 16 / 50)
    assert decode.seconds == pytest.approx(decode.matmul + decode.attention)


def test_launches_count_only_where_the_gpu_is_faster() -> None:
    slow_host = replace(GPU, layer_launch_s=1000.0, graph_launch_s=0.5, step_s=7.0)
    eager = cm.pass_cost(TINY, slow_host, np.array([0]), np.array([1]))
    assert eager.seconds == 2 * 1000.0 + 7.0
    graph = cm.pass_cost(TINY, slow_host, np.array([0]), np.array([1]), decode=True)
    assert graph.seconds == pytest.approx(graph.matmul + graph.attention + 7.0)


def test_all_reduces() -> None:
    two = cm.ModelShape("two", 2, 4, 8, 2, 2, 2, 16, tp=2)
    gpu = replace(GPU, peer_bytes_per_s=10.0, allreduce_latency_s=0.25)
    cost = cm.pass_cost(two, gpu, np.array([0]), np.array([5]))
    assert cost.allreduce == pytest.approx(4 * (0.25 + 5 * 4 * 2 * 2 * (1 / 2) / 10))
    with pytest.raises(AssertionError, match="no link"):
        cm.pass_cost(two, GPU, np.array([0]), np.array([5]))


@pytest.mark.parametrize("seed", range(20))
def test_more_work_never_takes_less_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gpu = replace(GPU, matrix_flops=1e15, hbm_bytes_per_s=4e12, layer_launch_s=1e-4)
    starts, lens = rng.integers(0, 50_000, 4), rng.integers(1, 4000, 4)
    base = cm.pass_cost(LLAMA, gpu, starts, lens).seconds
    assert cm.pass_cost(LLAMA, gpu, starts + 100, lens).seconds >= base
    assert cm.pass_cost(LLAMA, gpu, starts, lens + 10).seconds >= base
    assert cm.pass_cost(LLAMA, gpu, starts[:3], lens[:3]).seconds <= base
    # The order of requests means nothing, and a chunked prompt costs no less than a whole one.
    assert cm.pass_cost(LLAMA, gpu, starts[::-1], lens[::-1]).seconds == pytest.approx(base)
    whole = cm.prefill_seconds(LLAMA, gpu, 0, 8192)
    assert cm.prefill_seconds(LLAMA, gpu, 0, 4096) + cm.prefill_seconds(LLAMA, gpu, 4096, 4096) >= whole


def test_littles_law() -> None:
    # Small operations: C S / L. Large ones: the wire.
    assert cm.throughput(1.0, 8, 1e-6, 1e12) == pytest.approx(8e6, rel=1e-4)
    assert cm.throughput(1e12, 1, 1e-6, 5e10) == pytest.approx(5e10, rel=1e-4)
    # At 50 KB a copy of 1 us plus 1 us on the wire runs at half of it.
    assert cm.link_rate(LINK, cm.DIRECT, 5e4) == pytest.approx(25e9)


def test_a_load_by_hand() -> None:
    # 100 tokens in pages of 32: 4 pages, each 2 layers x K and V of 128 bytes.
    rate = cm.throughput(128, 1, 1e-6, 50e9)
    assert cm.load_seconds(TINY, LINK, cm.DIRECT, 100, 32) == pytest.approx(4 * 4 * 128 / rate)
    # As many operations, one after another, each its cost and its bytes on the wire.
    assert cm.load_seconds(TINY, LINK, cm.DIRECT, 100, 32) == pytest.approx(16 * (1e-6 + 128 / 50e9))
    # dma: two runs of 64 tokens, K and V, two layers.
    assert cm.load_seconds(TINY, LINK, cm.DMA, 128, 1, num_runs=2) == pytest.approx(8 * (1e-7 + 64 * 4 / 50e9))
    assert cm.load_seconds(TINY, LINK, cm.INFINITE, 100, 1) == cm.load_seconds(TINY, LINK, cm.DIRECT, 0, 1) == 0


def test_the_kernel_does_not_care_for_pages_of_128_bytes_and_more() -> None:
    by_page = [cm.load_seconds(LLAMA, LINK, cm.KERNEL_LOAD, 8192, page) for page in (1, 2, 16, 32, 512)]
    assert by_page == pytest.approx([by_page[0]] * 5)
    assert cm.link_rate(LINK, cm.KERNEL_LOAD, 64) == pytest.approx(cm.link_rate(LINK, cm.KERNEL_LOAD, 128) / 2)
    assert cm.link_rate(LINK, cm.KERNEL_LOAD, 192) == pytest.approx(cm.link_rate(LINK, cm.KERNEL_LOAD, 128) * 0.75)


def test_links_are_monotonic() -> None:
    pieces = [128 * 2**i for i in range(18)]
    for method in (cm.DIRECT, cm.DMA):
        rates = [cm.link_rate(LINK, method, s) for s in pieces]
        assert rates == sorted(rates) and rates[-1] < LINK.wire
    by_ctas = [cm.link_rate(LINK, cm.Method("kernel", ctas=n), 2048) for n in range(1, 9)]
    assert by_ctas == sorted(by_ctas) and by_ctas[-1] < LINK.wire
    by_sharers = [cm.link_rate(replace(LINK, sharers=n), cm.KERNEL_LOAD, 2048) for n in (1, 2, 4)]
    assert by_sharers == sorted(by_sharers, reverse=True) and by_sharers[2] > by_sharers[0] / 4
    assert cm.link_rate(LINK, cm.DMA, 8192) > cm.link_rate(LINK, cm.DIRECT, 8192)
    with pytest.raises(ValueError, match="kernel, direct, dma or infinite"):
        cm.Method("magic")


def test_interference_grows_with_the_quota_and_spares_copy_engines() -> None:
    both = cm.Interference(prefill_per_cta=0.02, decode_per_cta=0.05)
    assert both.slowdown(cm.KERNEL_LOAD, decode=True) == pytest.approx(0.10)
    assert both.slowdown(cm.KERNEL_BACKUP, decode=False) == pytest.approx(0.02)
    assert both.slowdown(cm.DIRECT, decode=True) == both.slowdown(cm.DMA, decode=False) == 0


def test_stalls() -> None:
    assert cm.overlapped_seconds(4.0, 0.0, 4) == 4.0
    assert cm.overlapped_seconds(1.0, 10.0, 4) == 10.25
    assert cm.stall_share(0.0, 3.0, 4) == 0.0
    assert cm.stall_share(100.0, 1.0, 50) == pytest.approx(1 - 1 / 100.02)


def test_a_remote_fetch_is_as_fast_as_its_slowest_stage() -> None:
    rates = {"network": 1.0, "decompress": 10.0, "dequantize": 8.0, "dma": 16.0}
    nic = cm.SmartNic(rates, rates)
    assert cm.fetch_seconds(nic, 16.0, quantized=0.5, compressed=0.25) == 4.0
    assert cm.fetch_seconds(nic, 16.0, quantized=0.5, compressed=0.01) == 2.0
    assert cm.fetch_seconds(nic, 16.0, 0.5, 0.25, network_limit=0.5) == 8.0
