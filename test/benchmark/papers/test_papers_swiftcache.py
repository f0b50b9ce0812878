"""SwiftCache's evaluation: longest contexts by hand, what no system may lose, each figure to its end, and the CLI."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.papers.__main__ import main
from benchmark.papers.figures import report
from benchmark.papers.runs import Runs
from benchmark.papers.swiftcache import (
    BASELINES,
    CASES,
    CHANGES,
    CHUNK_TOKENS,
    FIGURES,
    SYSTEMS,
    ContextSettings,
    decode_stream_seconds,
    hiding_bytes_per_s,
    longest,
)
from benchmark.simulator.profiles import MODELS

LWM_24 = ContextSettings("vLLM", "LWM-7B", 24)
# 0.9 of 24 GiB, less 6.74 billion parameters; bytes of KV, and of activations, per token.
ROOM, KV, ACTIVE = 0.9 * 24 * 2**30 - 13.477e9, 2**19, 2 * 3 * (4096 + 11008)
# Two workers, each without Qwen3-8B and the activations of 8,192 tokens.
LENT = 2 * (0.9 * 24 * 2**30 - 16.381e9 - 8192 * 2 * 3 * (4096 + 12288))


def tokens(system: str, settings: ContextSettings = LWM_24) -> int:
    return longest(replace(settings, system=system)).tokens


def test_every_system_says_what_it_is() -> None:
    for system in SYSTEMS.values():
        assert system.models.endswith(".") and system.lacks.endswith(".")


def test_the_longest_context_of_vllm_by_hand() -> None:
    assert tokens("vLLM") == pytest.approx(ROOM / (KV + ACTIVE), rel=1e-3)
    # The prompt is shorter than such a chunk.
    assert tokens("vLLM, 32 K chunks") == tokens("vLLM")
    assert tokens("vLLM, 8 K chunks") == pytest.approx((ROOM - 8192 * ACTIVE) / KV, rel=1e-3)
    whole = replace(LWM_24, system="vLLM, 32 K chunks", reserved=True)
    assert longest(whole).tokens == pytest.approx((ROOM - 32768 * ACTIVE) / KV, rel=1e-3)


def test_the_longest_context_of_swiftcache_by_hand() -> None:
    """Each streamed token takes a layer's share of the device, all others the whole."""
    streamed = LENT / KV
    whole = (ROOM - streamed * KV / 32 + streamed * KV) / (KV + ACTIVE)
    found = longest(replace(LWM_24, system="SwiftCache"))
    assert found.tokens == pytest.approx(whole, rel=1e-3)
    assert found.peer == pytest.approx(streamed, rel=1e-3) and found.host == 0
    assert found.device + found.peer == pytest.approx(found.tokens, abs=1)
    chunked = (ROOM - 8192 * ACTIVE - streamed * KV / 32) / KV + streamed
    assert tokens("SwiftCache, 8 K chunks") == pytest.approx(chunked, rel=1e-3)


def test_where_workers_have_more_than_the_master_streams() -> None:
    """Qwen3-14B: one layer's KV and the activations of the whole prompt fill the device."""
    found = longest(ContextSettings("SwiftCache", "Qwen3-14B", 96))
    per_token = 163840 / 40 + 2 * 3 * (5120 + 17408)
    assert found.tokens == pytest.approx((0.9 * 96 * 2**30 - 29.536e9) / per_token, rel=1e-3)
    assert found.device == 0 and found.peer == pytest.approx(found.tokens, rel=1e-4)


def test_ours_is_the_sum_of_the_tiers_less_what_the_engine_cannot_use() -> None:
    """Two chunks, two pages, and what is no whole slab of a worker."""
    found = longest(replace(LWM_24, system="ours"))
    buffers, chunk = 2 * 8192 * KV / 32, 8192
    device = (ROOM - chunk * ACTIVE - buffers) / KV
    assert found.device == pytest.approx(device - 2 * chunk - 32, abs=32)
    slabs = LENT / 2**26
    assert slabs - 2 < found.peer / (2**26 / KV) <= slabs and found.host == int(96e9 // (16 * KV)) * 16
    assert found.tokens == found.device + found.peer + found.host


@pytest.mark.parametrize("change", [c for _, c in CHANGES], ids=[name for name, _ in CHANGES])
def test_order_of_systems(change: dict[str, float]) -> None:
    for master, gib in CASES:
        settings = ContextSettings("vLLM", master, gib, **change)  # type: ignore[arg-type]
        none, large, small = (tokens(name, settings) for name in BASELINES)
        assert small >= large and (none <= large or settings.reserved)
        streamed, chunked, ours = (tokens(n, settings) for n in ("SwiftCache", "SwiftCache, 8 K chunks", "ours"))
        assert chunked >= small
        # Qwen3-14B leaves hardly anything of 32 GiB, and buffers take some of that.
        assert ours >= chunked or small < CHUNK_TOKENS
        assert streamed <= chunked or settings.reserved


def test_nothing_fits_where_weights_do_not() -> None:
    for name in SYSTEMS:
        assert tokens(name, ContextSettings(name, "Qwen3-32B", 24)) == 0


def test_what_streaming_takes_by_hand() -> None:
    lwm, qwen = MODELS["LWM-7B"], MODELS["Qwen3-32B"]
    # 8,192 queries per key: 16 KiB and 4 * 128 * 32 flops each; GQA has an eighth of the bytes for twice the heads.
    assert hiding_bytes_per_s(lwm) == pytest.approx(16384 * 148e12 * 0.867 / (4 * 128 * 32 * 8192))
    assert hiding_bytes_per_s(qwen) == pytest.approx(hiding_bytes_per_s(lwm) / 8)
    found = longest(ContextSettings("ours", "LWM-7B", 96))
    assert decode_stream_seconds(lwm, found) == pytest.approx(found.host * KV / 32e9)
    found = replace(found, host=0)
    assert decode_stream_seconds(lwm, found) == pytest.approx(found.peer * KV / (0.889 * 200e9))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["1", "9", "table1", "table2"])
def test_a_figure(name: str, out: Path) -> None:
    result = FIGURES[name](Runs(quiet=True, run=longest))
    assert result.kind == "cost model" and result.points
    object.__setattr__(result, "changes", result.changes[:2])
    claims = report(result, Runs(quiet=True, run=longest), {})
    written = json.loads((out / f"{result.name}.json").read_text())
    assert len(written["rows"][0]["claims"]) == len(claims) == len(result.claims) > 0
    assert len(written["rows"][0]["sensitivity"]) == (2 if result.headlines else 0)
    assert (out / f"{result.name}.png").stat().st_size > 5000


def test_the_command_line(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "swiftcache", "--figure", "table2", "--quick"])
    main()
    assert {path.name for path in out.iterdir()} == {f"papers_swiftcache_table2.{kind}" for kind in ("json", "png")}
    assert "Cost model: Table 2" in capsys.readouterr().out


def test_the_command_line_refuses_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "swiftcache", "--figure", "3"])
    with pytest.raises(SystemExit):
        main()
    assert "invalid choice: '3'" in capsys.readouterr().err
