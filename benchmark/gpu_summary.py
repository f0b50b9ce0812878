"""The summary of a GPU's benchmarks: a short table of values and aims, and the simulator's constants beside the
measured ones. Pure functions over parsed JSON; reads no file and starts nothing.

A part is one benchmark. A value that it did not measure, because it crashed, was killed or had no time, stands in the
table as absent: it meets no aim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Report = dict[str, Any]
NOT_MEASURED = "not measured"

# Parts of one large memcpy, and the allowed cost of transfers for computation: the project's aims
# (docs/evidence.md).
LEAST_OF_MEMCPY = 0.95
MOST_LOSS = 3.0
# The allowed distance of `auto` from the best backend.
LEAST_OF_BEST = 0.95


@dataclass(frozen=True)
class Outcome:
    """How a part ended. returncode: None if it was killed at its limit, or not begun; then seconds is 0. report: as
    far as it was written. last_line: of its output."""

    part: str
    returncode: int | None
    seconds: float
    report: Report | None = None
    last_line: str = ""

    @property
    def is_well(self) -> bool:
        return self.returncode == 0 and self.report is not None

    @property
    def complaint(self) -> str:
        """Empty if the part succeeded."""
        if self.returncode is None:
            return f"killed after {self.seconds:.0f} s" if self.seconds else "not begun: no time left"
        if self.returncode:
            return f"crashed ({self.returncode}): {self.last_line[:80]}"
        if self.report is None:
            return "wrote no report"
        return "" if self.report.get("complete", True) else f"stopped after {self.seconds:.0f} s"


@dataclass(frozen=True)
class Line:
    """value: None if it was not measured. least, most: the aim; neither: none. note: behind the value."""

    what: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None without an aim, or without a value to compare with it."""
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def row(self) -> dict[str, str]:
        aim = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}" if self.most is not None else ""
        value = NOT_MEASURED if self.value is None else f"{self.value:.3g}{self.unit}"
        met = {None: "", True: "yes", False: "no"}[self.is_met]
        if self.value is None and aim:
            met = "?"
        return {"what": self.what, "value": f"{value} {self.note}".rstrip(), "aim": aim, "met": met}


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Rows of the last table: failures first, then values."""
    rows = [
        {"what": f"{outcome.part}: {outcome.complaint}", "value": "", "aim": "", "met": "no"}
        for outcome in outcomes
        if outcome.complaint
    ]
    reports = {outcome.part: outcome.report or {} for outcome in outcomes}
    for part, lines in LINES.items():
        if part in reports:
            rows += [line.row() for line in lines(_rows(reports[part]))]
    return rows


def _rows(report: Report) -> list[Report]:
    return list(report.get("rows", []))


def _find(rows: Sequence[Report], **wanted: Any) -> Report:
    """The first row with these values; names have _ for a blank. Empty where there is none."""
    columns = {name.replace("_", " "): value for name, value in wanted.items()}
    return next((row for row in rows if all(row.get(c) == v for c, v in columns.items())), {})


# -- transfers ------------------------------------------------------------------------------------------------------


def ratios(row: Report) -> dict[str, float]:
    """Of a memcpy, by variant."""
    return {name.removesuffix(" ratio"): row[name] for name in row if name.endswith(" ratio")}


def _transfer_lines(rows: list[Report]) -> Iterator[Line]:
    for what, order in (("load", "scattered"), ("load", "in runs"), ("back up", "scattered")):
        row = _find(rows, what=what, page_size=1, host="page_first", pages=order)
        found = ratios(row)
        best = max(found, key=found.__getitem__, default=None)
        title = f"{what}, page 1, {order}, of a memcpy"
        yield Line(
            f"{title}: best", found[best] if best else None, least=LEAST_OF_MEMCPY, note=f"({best})" * bool(best)
        )
        auto = row.get("auto", "")
        yield Line(f"{title}: auto", found.get(auto), least=LEAST_OF_MEMCPY, note=f"({auto})" * bool(auto))
    behind = {}
    for row in rows:
        found = ratios(row)
        if row.get("auto") in found:
            behind[f"{row['what']}, page {row['page size']}, {row['pages']}"] = found[row["auto"]] / max(
                found.values()
            )
    worst = min(behind, key=behind.__getitem__, default=None)
    note = f"({worst})" if worst else ""
    yield Line("auto, of the best backend: worst case", behind.get(worst or ""), least=LEAST_OF_BEST, note=note)


# -- interference ---------------------------------------------------------------------------------------------------

_WORKS = ("prefill", "decode")


def kernel_row(rows: Sequence[Report], what: str, quota: int) -> Report:
    """Page size 1, by the kernel of so many warps: CUDA's, or Triton's where that is not there. Loads are urgent, as
    the engine's."""
    for name in (f"cuda {quota}", f"triton {quota}"):
        if row := _find(rows, what=what, variant=name, page_size=1, stream="urgent" if what == "load" else "normal"):
            return row
    return {}


def _interference_lines(rows: list[Report]) -> Iterator[Line]:
    for what, quota in (("load", 64), ("back up", 16)):
        copies = _find(rows, what=what, variant="dma", page_size=64, pages="scattered")
        for how, row in ((f"kernel, {quota} warps", kernel_row(rows, what, quota)), ("dma, page 64", copies)):
            for work in _WORKS:
                rate = row.get(f"{work} GB/s")
                note = f"(at {rate:.0f} GB/s)" if rate is not None else ""
                yield Line(
                    f"{work} lost to {what}s, {how}", row.get(f"{work} loss, %"), " %", most=MOST_LOSS, note=note
                )


# -- the engine -----------------------------------------------------------------------------------------------------


def _engine_lines(rows: list[Report]) -> Iterator[Line]:
    yield Line("prefill of 8K, of a matrix product", _find(rows, part="prefill").get("of a matrix product"))
    for row in [row for row in rows if row.get("part") == "decode" and "batch" in row] or [{}]:
        batch = f" of {row['batch']}{_how(row)}" if row else ""
        idle = f"({row['not launching, %']:.0f} % between launches)" if row else ""
        yield Line(f"decode{batch}, of its memory's time", row.get("floor / step"), note=idle)
    documents = {row.get("variant"): row for row in rows if row.get("part") == "documents"}
    everything = documents.get("everything", {})
    cut = "(cut off)" if everything.get("cut off") else ""
    yield Line("documents, everything: TTFT p50", everything.get("TTFT p50 s"), " s", note=cut)
    for other in ("no hierarchy", "direct, page 32", "kernel only", "scheduling only"):
        row = documents.get(other, {})
        mine, theirs = everything.get("requests/s"), row.get("requests/s")
        # A variant that finished nothing in its time is beaten by any number; by which is not known.
        ratio = mine / theirs if mine and theirs else None
        cut = "(cut off)" if row.get("cut off") else ""
        yield Line(f"documents, requests/s, everything over {other}", ratio, " x", least=1.0, note=cut)
    streams = {row.get("context / device"): row for row in rows if row.get("part") == "stream"}
    one, two = streams.get(1, {}).get("TPOT ms"), streams.get(2, {}).get("TPOT ms")
    yield Line("streamed, twice the device: TPOT", two, " ms", note=f"({two / one:.1f} times)" if one and two else "")


def _how(row: Report) -> str:
    """How a row's decode steps ran. In reports from before tokens were drawn all are greedy."""
    how = row.get("sampling", "greedy")
    return ("" if row["graphs"] == "yes" else ", no graphs") + ("" if how == "greedy" else f", {how}")


def _attention_lines(title: str, rows: list[Report]) -> Iterator[Line]:
    row = _find(rows, requests=1, prefix=0, new=8192, page_size=1)
    yield Line(f"{title}, prefill of 8K, of a matrix product", row.get("of a matrix product"))
    for what, of in (
        ("decode of 128", {"requests": 128}),
        ("48 tokens behind 12K", {"new": 48, "beside": ""}),
        ("decode of 40, and one of 128K", {"requests": 40}),
    ):
        row = _find(rows, **of, page_size=1)
        yield Line(f"{title}, {what}, of a copy", row.get("of a copy"))


def _shape_lines(shape: str, rows: list[Report]) -> Iterator[Line]:
    yield Line(f"{shape}, prefill of 8K, of a matrix product", _find(rows, part="prefill").get("of a matrix product"))
    for row in [row for row in rows if row.get("part") == "decode" and "batch" in row] or [{}]:
        of, step = (f" of {row['batch']}", f"({row['step ms']:.3g} ms a step)") if row else ("", "")
        how = _how(row) if row else ""
        yield Line(f"{shape}, decode{of}{how}, of its memory's time", row.get("floor / step"), note=step)


def _expert_lines(shape: str, rows: list[Report]) -> Iterator[Line]:
    """Of the weights that its checkpoints have: few tokens are bound by memory, many by products."""
    weights = {"qwen3": "fp8, blocks of 128", "deepseek": "fp8, blocks of 128", "gpt-oss": "mxfp4"}[shape]
    for tokens, of in ((32, "of a copy"), (2048, "of a product")):
        row = _find(rows, tokens=tokens, weights=weights)
        yield Line(f"experts of {shape}, {tokens} tokens, {of}", row.get(of), note=f"({weights})")
    row = next((row for row in rows if row.get("tokens") == 32 and "choosing us" in row), {})
    yield Line(f"experts of {shape}, 32 tokens, choosing", row.get("choosing us"), " us")


def _quantized_lines(rows: list[Report]) -> Iterator[Line]:
    for weights in dict.fromkeys(row["weights"] for row in rows):
        shares = [row["of a copy"] for row in rows if row["weights"] == weights and row["rows"] == 1]
        yield Line(f"products of one row, {weights}, of a copy: worst", min(shares, default=None))


# In the table's order.
LINES = {
    "kvcacheio": _transfer_lines,
    "interference": _interference_lines,
    "gpu_engine": _engine_lines,
    "attention": partial(_attention_lines, "attention"),
    "gpu_engine_experts_fp8": partial(_shape_lines, "Qwen3-30B-A3B"),
    "gpu_engine_gpt_oss": partial(_shape_lines, "gpt-oss-20b"),
    "gpu_engine_latents": partial(_shape_lines, "DeepSeek-V2-Lite"),
    "experts_qwen3": partial(_expert_lines, "qwen3"),
    "experts_gpt-oss": partial(_expert_lines, "gpt-oss"),
    "experts_deepseek": partial(_expert_lines, "deepseek"),
    "quantized": _quantized_lines,
    "gpu_engine_fp8kv": partial(_shape_lines, "Llama-3.1-8B, fp8 KV"),
    "gpu_engine_transformers": partial(_shape_lines, "Llama-3.1-8B, transformers' code"),
    "attention_fp8_e4m3": partial(_attention_lines, "attention, fp8 KV"),
}


# -- the simulator's constants --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The profile's, of benchmark/simulator: the GPU's peaks and the shares of them that are assumed or fitted."""

    matrix_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    usable: float
    copy_s: float
    cta_bytes: float
    kernel_latency_s: float
    step_s: float
    prefill_per_cta: float
    decode_per_cta: float

    def kernel_bytes_per_s(self, ctas: int) -> float:
        under_way = ctas * self.cta_bytes
        return under_way / (self.kernel_latency_s + under_way / (self.link_bytes_per_s * self.usable))


def constants(outcomes: Sequence[Outcome], profile: Constants) -> list[dict[str, Any]]:
    """Each constant beside what was measured; None where that was not."""
    reports = {outcome.part: outcome.report or {} for outcome in outcomes}
    engine, transfers = reports.get("gpu_engine", {}), _rows(reports.get("kvcacheio", {}))
    beside, attention = _rows(reports.get("interference", {})), _rows(reports.get("attention", {}))
    page1 = _find(transfers, what="load", page_size=1, pages="scattered")
    page32 = _find(transfers, what="load", page_size=32, pages="scattered")
    wire = page32.get("memcpy GB/s", page1.get("memcpy GB/s"))
    prefill = _find(attention, requests=1, prefix=0, new=8192, page_size=1).get("GFLOP/s")
    decode: Report = next((r for r in _rows(engine) if r.get("part") == "decode" and "batch" in r), {})
    device = engine.get("device", {})
    two = kernel_row(beside, "load", 64)

    def share(value: float | None, of: float) -> float | None:
        return value / of if value is not None else None

    def rate(num_warps: int) -> float | None:
        return next((page1[n] for n in (f"cuda {num_warps} GB/s", f"triton {num_warps} GB/s") if n in page1), None)

    copy_us = None
    if wire and "direct GB/s" in page32:
        size = page32["run bytes"]
        copy_us = 1e6 * (size / (page32["direct GB/s"] * 1e9) - size / (wire * 1e9))
    step_ms = decode["step ms"] - decode["launch ms"] if "step ms" in decode else None
    p = profile
    found = (
        ("matrices, share of the peak", p.matmul_efficiency, share(device.get("matrix_flops"), p.matrix_flops)),
        ("attention, share of the peak", p.attention_efficiency, share(prefill, p.matrix_flops / 1e9)),
        (
            "memory, share of the peak",
            p.memory_efficiency,
            share(device.get("copy_bytes_per_s"), p.memory_bytes_per_s),
        ),
        ("link, share of the peak, endless", p.usable, share(wire, p.link_bytes_per_s / 1e9)),
        ("an asynchronous copy, µs (page 32)", 1e6 * p.copy_s, copy_us),
        ("kernel, 32 warps, GB/s", p.kernel_bytes_per_s(1) / 1e9, rate(32)),
        ("kernel, 64 warps, GB/s", p.kernel_bytes_per_s(2) / 1e9, rate(64)),
        ("loss per 32 warps, prefill, %", 100 * p.prefill_per_cta, share(two.get("prefill loss, %"), 2)),
        ("loss per 32 warps, decode, %", 100 * p.decode_per_cta, share(two.get("decode loss, %"), 2)),
        ("a step beside its launch, ms", 1e3 * p.step_s, step_ms),
    )
    return [{"constant": name, "simulator": mine, "measured": value} for name, mine, value in found]
