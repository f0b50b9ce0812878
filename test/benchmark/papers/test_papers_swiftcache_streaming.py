"""What ours adds to SwiftCache, simulated: times by hand, and the figure to its end with two small cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.papers.figures import report
from benchmark.papers.runs import Runs
from benchmark.papers.swiftcache import run
from benchmark.papers.swiftcache_streaming import StreamSettings, buffers_of, longest, ours, simulate
from benchmark.simulator.cost_models import KERNEL_LOAD, link_rate
from benchmark.simulator.profiles import H20X4, MODELS, device_tokens, host_tokens

from benchmark import common
from benchmark.papers import figures, swiftcache_streaming

QWEN = MODELS["Qwen3-32B"]
USUAL = StreamSettings("h20x4", "Qwen3-32B", 2, short=0)
DEVICE = device_tokens(QWEN, H20X4.gpu)


def test_a_token_waits_for_all_that_is_streamed() -> None:
    outcome = simulate(USUAL)
    streamed = outcome.share * (outcome.prompt + swiftcache_streaming.TURN)
    assert outcome.prompt + swiftcache_streaming.TURN - DEVICE <= streamed < 1.2 * DEVICE
    seconds = streamed * QWEN.kv_bytes_per_token / link_rate(H20X4.link, KERNEL_LOAD, 16 * QWEN.row_bytes)
    assert outcome.token_s == pytest.approx(seconds, rel=0.02)
    assert simulate(replace(USUAL, bandwidth=2.0)).token_s < 0.8 * outcome.token_s
    assert simulate(replace(USUAL, wire="NVLink")).token_s < 0.3 * outcome.token_s


def test_what_fits_costs_nothing() -> None:
    settings = replace(USUAL, times=0.9, short=2)
    streamed, whole = simulate(settings), simulate(replace(settings, streamed=False))
    # The device keeps some room for a request that may stream.
    assert streamed.ttft_s == pytest.approx(whole.ttft_s, rel=1e-3) and streamed.share == 0
    assert replace(streamed, ttft_s=whole.ttft_s) == whole


@pytest.mark.slow
def test_short_chunks_do_not_hide_the_link() -> None:
    """A chunk has to have some 550 tokens for that."""
    ratios = []
    for chunk in (256, 2048):
        settings = replace(USUAL, chunk=chunk)
        ratios.append(simulate(settings).ttft_s / simulate(replace(settings, streamed=False)).ttft_s)
    assert ratios[0] > 1.05 > 1.01 > ratios[1] >= 1


def test_who_decodes_beside_it_waits_with_it() -> None:
    settings = replace(USUAL, short=2)
    streamed, whole = simulate(settings), simulate(replace(settings, streamed=False))
    assert streamed.beside_token_s == pytest.approx(streamed.token_s, rel=0.1)
    assert streamed.beside_token_s > 10 * whole.beside_token_s


def test_the_longest_request_by_hand() -> None:
    host = host_tokens(QWEN, 96e9)
    assert longest(replace(USUAL, streamed=False)) == DEVICE // 16 * 16 - 16
    kept = 2 * 8192 + 2 * 16
    assert longest(USUAL) == pytest.approx(DEVICE + host - 2 * 4096 / 64 - kept, abs=64)
    whole = replace(USUAL, piece=None, buffers=1)
    assert longest(whole) == pytest.approx(DEVICE + host - host / 64 - kept, abs=64)
    assert buffers_of(whole, host, DEVICE)[0].buffer_pages == host // 16
    # A layer of all that the host has fills the device.
    assert longest(replace(whole, buffers=16)) is None


@pytest.mark.slow
def test_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "OUT", tmp_path)
    monkeypatch.setattr(figures, "OUT", tmp_path)
    monkeypatch.setattr(swiftcache_streaming, "CASES", (("h20x4", "Qwen3-32B"),))
    monkeypatch.setattr(swiftcache_streaming, "TIMES", (0.9, 2))
    monkeypatch.setattr(swiftcache_streaming, "SHARES", (0.5,))
    monkeypatch.setattr(swiftcache_streaming, "USUAL", (replace(USUAL, times=1),))
    runs = Runs(quiet=True, run=run)
    result = ours(runs)
    assert result.kind == "simulated" and len(result.points) == 2 + 4
    object.__setattr__(result, "changes", result.changes[:2])
    claims = report(result, runs, {})
    written = json.loads((tmp_path / "papers_swiftcache_ours.json").read_text())
    assert len(written["rows"][0]["claims"]) == len(claims) == 3
    assert len(written["rows"][0]["sensitivity"]) == 2
    assert (tmp_path / "papers_swiftcache_ours.png").stat().st_size > 5000
