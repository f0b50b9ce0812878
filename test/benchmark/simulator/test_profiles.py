"""Machines and models: what the sources say, and that the constants are what the fit gives."""

from __future__ import annotations

import pytest
from benchmark.simulator.cost_models import DIRECT, KERNEL_LOAD, link_rate, load_seconds, prefill_seconds
from benchmark.simulator.profiles import HARDWARE, MODELS, device_tokens, host_tokens, loading_at_once

from benchmark.simulator import fit, profiles

# Parameters in billions, from the model cards; KV per token in MB of 2**20 bytes, from SwiftCache's table.
PARAMETERS = {
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Qwen2.5-14B": 14.8,
    "Mistral-7B": 7.24,
    "Mistral-24B": 23.6,
    "LWM-7B": 6.74,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
}
KV_MB = {"LWM-7B": 0.5, "Qwen3-8B": 0.141, "Qwen3-14B": 0.156, "Qwen3-32B": 0.25}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_agree_with_the_model_card(name: str) -> None:
    model = MODELS[name]
    billions = model.resident_weight_bytes * model.tp / model.dtype_bytes / 1e9
    assert billions == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", KV_MB)
def test_kv_per_token_agrees_with_swiftcache(name: str) -> None:
    assert MODELS[name].kv_bytes_per_token / 2**20 == pytest.approx(KV_MB[name], rel=0.01)


def test_the_constants_are_the_fit() -> None:
    fitted = fit.fit()
    assert fitted.copy_s == pytest.approx(profiles.COPY_S, rel=0.01)
    assert fitted.usable == pytest.approx(profiles.USABLE, rel=0.01)
    assert fitted.kernel_latency_s == pytest.approx(profiles.KERNEL_LATENCY_S, rel=0.01)
    assert fitted.gh200_copy_s == pytest.approx(HARDWARE["gh200"].link.copy_s, rel=0.01)
    assert fitted.h20_efficiency == pytest.approx(HARDWARE["h20x4"].gpu.matmul_efficiency, rel=0.01)
    assert fitted.h20_usable == HARDWARE["h20x4"].link.usable == 1.0


def test_the_model_is_near_what_it_was_fitted_to() -> None:
    rows = [row for row in fit.comparison() if row["role"] == "fitted"]
    assert len(rows) == 9
    for row in rows:
        assert row["model"] == pytest.approx(row["printed"], rel=0.08), row["what"]


def test_what_contradicts_stays_a_contradiction() -> None:
    """If one of these comes true, docs/records/simulator.md is wrong."""
    rows = {row["what"]: row for row in fit.comparison() if row["role"] == "contradicts"}
    full = rows["stall of one request, 21,500 loaded, 64 new"]
    assert full["model"] > 2 * full["printed"]
    swift = rows["LWM, 5,000 tokens over 32 GB/s at its peak"]
    assert swift["model"] > 1.08 * swift["printed"]
    share = rows["LWM, 50,000 loaded, 256 new"]
    assert 100 - share["model"] < 0.7 * (100 - share["printed"])


def test_fig_3_by_hand() -> None:
    """16,384 copies of 64 KiB, one after another, each 3.5 us and its bytes: 22 % of 64 GB/s."""
    link, llama = HARDWARE["h200"].link, MODELS["Llama-3.1-8B"]
    seconds = load_seconds(llama, link, DIRECT, 8192, 32)
    assert seconds == pytest.approx(2 * 32 * 256 * (3.5e-6 + 65536 / (0.889 * 64e9)), rel=1e-3)
    assert 2**30 / seconds / 64e9 == pytest.approx(0.22, abs=0.003)
    assert link_rate(HARDWARE["gh200"].link, DIRECT, 65536) / 384e9 == pytest.approx(0.05, abs=0.001)
    assert link_rate(link, KERNEL_LOAD, 2048) == pytest.approx(49e9, rel=0.02)


def test_gpus_that_share_a_link_get_their_part() -> None:
    alone = HARDWARE["h20x4"]
    together = loading_at_once(alone, 4)
    assert together.link.wire * 4 == alone.link.wire == 32e9
    assert alone.peer_bytes_per_s == alone.peer_link.peak == 200e9 > alone.peer_link.wire
    # The other machines' GPUs have a link each.
    assert all(h.link.sharers == 1 for h in HARDWARE.values())


def test_memory() -> None:
    llama = MODELS["Llama-3.1-8B"]
    assert device_tokens(llama, HARDWARE["h200"].gpu, 0.5) == int((70.5e9 - llama.resident_weight_bytes) // 131072)
    assert 700_000 < device_tokens(llama, HARDWARE["h200"].gpu) < 950_000
    assert host_tokens(MODELS["Llama-3.1-70B"], 1e12) == int(1e12 // (80 * 2 * 8 * 128 * 2))
    with pytest.raises(ValueError, match="does not fit"):
        device_tokens(MODELS["Qwen3-32B"], HARDWARE["l40s-bluefield3"].gpu)


def test_a_machine_with_more_flops_is_faster() -> None:
    llama = MODELS["Llama-3.1-8B"]
    h200, l40s, h20 = (prefill_seconds(llama, HARDWARE[n].gpu, 0, 8192) for n in ("h200", "l40s-bluefield3", "h20x4"))
    assert h200 < l40s < h20
