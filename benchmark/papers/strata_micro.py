"""Strata's microbenchmarks: figure 3 from the cost model, figure 12 measured by bench_disk.py. No engine runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmark.common import OUT
from benchmark.papers.figures import Claim, Result
from benchmark.papers.plots import Panel
from benchmark.simulator.cost_models import DIRECT, KERNEL_LOAD, load_seconds, throughput
from benchmark.simulator.profiles import GH200, H200, MODELS

TOKENS = 8192
PAGE_SIZES = tuple(2**i for i in range(11))


def figure3() -> Result:
    """Loading 8,192 tokens of Llama-3.1-8B (Strata 3.1). Its numbers are what the constants were fitted to."""
    model = MODELS["Llama-3.1-8B"]
    rows = []
    for machine in (H200, GH200):
        for method in (DIRECT, KERNEL_LOAD):
            for page in PAGE_SIZES:
                seconds = load_seconds(model, machine.link, method, TOKENS, page)
                rate = TOKENS * model.kv_bytes_per_token / seconds
                rows.append(
                    {
                        "machine": machine.name,
                        "method": method.kind,
                        "page size": page,
                        "piece KiB": page * model.row_bytes / 1024,
                        "ms": seconds * 1e3,
                        "GB/s": rate / 1e9,
                        "% of peak": 100 * rate / machine.link.peak,
                    }
                )
    share = {(r["machine"], r["method"], r["page size"]): r["% of peak"] for r in rows}
    link = H200.link
    megabytes = [100 * throughput(n * 1e6, 1, link.copy_s, link.wire) / link.peak for n in (1, 2)]
    fitted = "3.1; the constants are fitted to it"
    claims = [
        Claim("PCIe 5, copies of page 32, % of peak", "22", share["h200", "direct", 32], fitted),
        Claim("GH200, copies of page 32, % of peak", "5", share["gh200", "direct", 32], fitted),
        Claim("PCIe 5, copies of 1 and 2 MB, % of peak", "75-80", "{:.0f} and {:.0f}".format(*megabytes), fitted),
        Claim("PCIe 5, kernel of two CTAs, page 1, % of peak", "75", share["h200", "kernel", 1], "3.2; fitted"),
    ]
    panels = [_panel(rows, machine.name, model.name) for machine in (H200, GH200)]
    return Result("papers_strata_fig3", "Fig. 3, loading 8,192 tokens", "cost model", claims, rows, panels, rows)


def _panel(rows: Sequence[dict[str, Any]], machine: str, model: str) -> Panel:
    series = {}
    for method in ("direct", "kernel"):
        some = [r for r in rows if r["machine"] == machine and r["method"] == method]
        series[method] = ([r["page size"] for r in some], [r["% of peak"] for r in some])
    return Panel(f"{model}, {machine}", "page size, tokens", "% of the link's peak", series, log_x=True)


def figure12(quick: bool) -> Result:
    """Runs bench_disk.py, which writes and reads some gigabytes under bench-out/."""
    script = OUT.parent / "benchmark" / "bench_disk.py"
    sizes = ["--tokens", "1024", "--rounds", "1"] if quick else ["--tokens", str(TOKENS), "--rounds", "3"]
    subprocess.run([sys.executable, str(script), "--page-sizes", "1,32", *sizes], check=True)
    return disk_result(json.loads((OUT / "disk.json").read_text())["rows"])


def disk_result(rows: Sequence[dict[str, Any]]) -> Result:
    """rows: of bench_disk.py. Its *piece by piece* is what a layer-first host gives a store; the measure of the disk
    itself stands in its first row."""

    def rate(host: str, page: int, what: str) -> float:
        (row,) = [r for r in rows if (r["host"], r["page size"], r["pages"]) == (host, page, "scattered")]
        return float(row[f"{what} GB/s"])

    states = ("read cold", "read warm")
    claims = [
        Claim(
            f"page-first over layer-first, page {page}, {what}",
            "up to 4 (on their disk)" if page == 32 else "-",
            rate("page_first", page, what) / rate("layer_first, piece by piece", page, what),
            "5.3.4",
        )
        for page in (32, 1)
        for what in states
    ]
    series = {
        what: (
            [f"{host.split(', ')[0]}, page {page}" for page in (1, 32) for host in _HOSTS],
            [rate(host, page, what) for page in (1, 32) for host in _HOSTS],
        )
        for what in states
    }
    return Result(
        "papers_strata_fig12",
        "Fig. 12, from disk to host memory",
        "measured",
        claims,
        list(rows),
        [Panel("Llama-3.1-8B's shape, pages scattered", "", "GB/s", series, kind="bars")],
        notes="This machine's disk. Pieces of 64 KiB (page 32, layer-first) already fill a disk of 1 GB/s; "
        "layer-first without checksums, page-first with them.",
    )


_HOSTS = ("page_first", "layer_first, piece by piece")
