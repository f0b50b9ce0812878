"""The short table: aims are compared with what was measured, and what was not measured meets none."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark.gpu_summary import Constants, Line, Outcome, constants, summary


def transfer(what: str, pages: str, page: int = 1, auto: str = "cuda 64", **found: float) -> dict[str, Any]:
    row = {"what": what, "page size": page, "host": "page_first", "pages": pages, "auto": auto, "memcpy GB/s": 50.0}
    for name, ratio in found.items():
        name = name.replace("_", " ")
        row |= {f"{name} ratio": ratio, f"{name} GB/s": 50 * ratio}
    return row | {"run bytes": 2048 * page}


def beside(what: str, variant: str, prefill: float, decode: float, stream: str = "normal") -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "variant": variant, "page size": 1, "pages": "scattered", "stream": stream}
    row |= {"prefill loss, %": prefill, "decode loss, %": decode}
    return row | {"prefill GB/s": 45.0, "decode GB/s": 45.0}


def documents(variant: str, requests_per_s: float, cut_off: str = "") -> dict[str, Any]:
    row = {"part": "documents", "variant": variant, "requests/s": requests_per_s, "TTFT p50 s": 0.5}
    return row | {"cut off": cut_off}


def well(part: str, *rows: dict[str, Any], **more: Any) -> Outcome:
    return Outcome(part, 0, 10.0, {"complete": True, "rows": list(rows), **more})


def table(*outcomes: Outcome) -> dict[str, tuple[str, str]]:
    """What -> value and whether the aim is met."""
    return {row["what"]: (row["value"], row["met"]) for row in summary(outcomes)}


@pytest.mark.parametrize(
    ("value", "least", "most", "met"),
    [
        (0.95, 0.95, None, True),
        (0.949, 0.95, None, False),
        (3.0, None, 3.0, True),
        (3.01, None, 3.0, False),
        (-2.0, None, 3.0, True),
        (None, 0.95, None, None),
        (0.1, None, None, None),
    ],
)
def test_an_aim_includes_its_border(
    value: float | None, least: float | None, most: float | None, met: bool | None
) -> None:
    assert Line("", value, least=least, most=most).is_met is met


def test_what_was_not_measured_meets_no_aim() -> None:
    assert Line("x", None, least=0.95).row() == {"what": "x", "value": "not measured", "aim": ">= 0.95", "met": "?"}


def test_transfers_name_the_best_backend_and_where_auto_is_worst() -> None:
    found = table(
        well(
            "kvcacheio",
            transfer("load", "scattered", cuda_64=0.96, dma=0.05),
            transfer("load", "in runs", cuda_64=0.90, dma=0.99),
            transfer("back up", "scattered", auto="cuda 32", cuda_32=0.8),
            transfer("load", "scattered", page=64, auto="dma", cuda_64=0.97, dma=0.96),
        )
    )
    assert found["load, page 1, scattered, of a memcpy: best"] == ("0.96 (cuda 64)", "yes")
    assert found["load, page 1, in runs, of a memcpy: best"] == ("0.99 (dma)", "yes")
    assert found["load, page 1, in runs, of a memcpy: auto"] == ("0.9 (cuda 64)", "no")
    assert found["back up, page 1, scattered, of a memcpy: auto"] == ("0.8 (cuda 32)", "no")
    assert found["auto, of the best backend: worst case"] == ("0.909 (load, page 1, in runs)", "no")


def test_interference_is_that_of_the_quotas_in_use() -> None:
    """Of an urgent stream for loads, and of no other quota; Triton's kernel where there is no other."""
    rows = [
        beside("load", "cuda 32", 0, 0, "urgent"),
        beside("load", "cuda 64", 9, 9),
        beside("load", "cuda 64", 2.5, 4, "urgent"),
        beside("back up", "dma", 2.5, 4) | {"page size": 64},
    ]
    found = table(well("interference", *rows, beside("back up", "triton 16", 1, 1)))
    assert found["prefill lost to loads, kernel, 64 warps"] == ("2.5 % (at 45 GB/s)", "yes")
    assert found["decode lost to loads, kernel, 64 warps"] == ("4 % (at 45 GB/s)", "no")
    assert found["decode lost to back ups, kernel, 16 warps"] == ("1 % (at 45 GB/s)", "yes")
    assert found["prefill lost to loads, dma, page 64"] == ("not measured", "?")
    assert found["decode lost to back ups, dma, page 64"] == ("4 % (at 45 GB/s)", "no")


def test_variants_are_compared_with_everything() -> None:
    found = table(
        well(
            "gpu_engine",
            documents("everything", 6.0),
            documents("no hierarchy", 2.0, cut_off="9 of 72 in 15.0 s"),
            documents("direct, page 32", 8.0),
            documents("kernel only", 0.0, cut_off="0 of 72 in 15.0 s"),
            {"part": "documents", "variant": "scheduling only", "error": "RuntimeError()"},
        )
    )
    over = "documents, requests/s, everything over"
    assert found[f"{over} no hierarchy"] == ("3 x (cut off)", "yes")
    assert found[f"{over} direct, page 32"] == ("0.75 x", "no")
    assert found[f"{over} kernel only"] == ("not measured (cut off)", "?")
    assert found[f"{over} scheduling only"] == ("not measured", "?")


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (Outcome("kvcacheio", 1, 3.0, None, "RuntimeError: no GPU"), "crashed (1): RuntimeError: no GPU"),
        (Outcome("kvcacheio", None, 125.0), "killed after 125 s"),
        (Outcome("kvcacheio", None, 0.0), "not begun: no time left"),
        (Outcome("kvcacheio", 0, 3.0), "wrote no report"),
        (Outcome("kvcacheio", 0, 113.0, {"complete": False, "rows": []}), "stopped after 113 s"),
    ],
)
def test_a_part_that_went_wrong_comes_first(outcome: Outcome, complaint: str) -> None:
    first = summary([well("attention"), outcome])[0]
    assert first == {"what": f"kvcacheio: {complaint}", "value": "", "aim": "", "met": "no"}


def test_what_a_killed_part_had_written_counts() -> None:
    report = {"complete": False, "rows": [transfer("load", "scattered", cuda_64=0.96)]}
    found = table(Outcome("kvcacheio", None, 125.0, report))
    assert found["load, page 1, scattered, of a memcpy: auto"] == ("0.96 (cuda 64)", "yes")
    assert found["back up, page 1, scattered, of a memcpy: auto"] == ("not measured", "?")


def test_the_whole_table_is_short() -> None:
    """And a part that was not asked for takes no line."""
    parts = ("kvcacheio", "interference", "gpu_engine", "attention")
    assert len(summary([well(part) for part in parts])) <= 27
    assert len(summary([well("attention")])) == 4


PROFILE = Constants(
    matrix_flops=1000e12,
    memory_bytes_per_s=4e12,
    link_bytes_per_s=64e9,
    matmul_efficiency=0.65,
    attention_efficiency=0.55,
    memory_efficiency=0.85,
    usable=0.875,
    copy_s=3.5e-6,
    cta_bytes=131072,
    kernel_latency_s=0.74e-6,
    step_s=5e-4,
    prefill_per_cta=0.025,
    decode_per_cta=0.05,
)


def test_constants_stand_beside_what_was_measured() -> None:
    row = transfer("load", "scattered", page=32, direct=0.25)
    outcomes = [
        well("gpu_engine", device={"matrix_flops": 780e12, "copy_bytes_per_s": 3.6e12}),
        well("kvcacheio", row, transfer("load", "scattered", cuda_32=0.8)),
        well("interference", beside("load", "cuda 64", 3, 6, "urgent")),
    ]
    found = {row["constant"]: (row["simulator"], row["measured"]) for row in constants(outcomes, PROFILE)}
    assert found["matrices, share of the peak"] == (0.65, pytest.approx(0.78))
    assert found["memory, share of the peak"] == (0.85, pytest.approx(0.9))
    assert found["link, share of the peak, endless"] == (0.875, pytest.approx(50 / 64))
    # 64 KiB at 12.5 GB/s, of which the wire takes a quarter.
    assert found["an asynchronous copy, µs (page 32)"] == (3.5, pytest.approx(1e6 * 65536 / 12.5e9 * 0.75))
    assert found["kernel, 32 warps, GB/s"] == (pytest.approx(131072 / (0.74e-6 + 131072 / 56e9) / 1e9), 40.0)
    assert found["kernel, 64 warps, GB/s"][1] is None
    assert found["loss per 32 warps, decode, %"] == (5.0, 3.0)
    assert found["a step beside its launch, ms"] == (0.5, None)
