"""Draws docs/records/results/load_*.json, for light and for dark pages: `python docs/images/draw_load.py`.

`make bench-load` writes such files to bench-out/; copy them to docs/records/results and run `make docs` to show them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from draw_peers import COLOURS
from matplotlib.ticker import FuncFormatter

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "records" / "results"
LOADS = ("documents", "conversations", "agents")
# Lines, in the order of the report.
STYLES = {
    "no cache": {"color": "#9ca3af", "linestyle": "--"},
    "device": {"color": "#a855f7"},
    "+ host": {"color": "#3b82f6"},
    "+ disk": {"color": "#16a34a", "linewidth": 2.4},
    "+ remote": {"color": "#14b8a6", "linestyle": ":"},
    "remote, no disk": {"color": "#f59e0b"},
    "vLLM": {"color": "#ef4444"},
}


def draw(reports: list[dict[str, Any]], colours: dict[str, str], file: Path, digest: str) -> None:
    """A panel for each report. digest: of their files; a test looks for it in the drawing."""
    settings = reports[0]["settings"]
    runs = sorted({f"{report['hardware']} ({report['date'][:10]})" for report in reports})
    plt.rcParams.update({"svg.hashsalt": "load", "font.family": "DejaVu Sans", "svg.fonttype": "none"})
    figure, panels = plt.subplots(1, len(reports), figsize=(9.2, 3.3), sharey=True, layout="constrained")
    for axes, report in zip(panels, reports):
        for system, style in STYLES.items():
            points = [row for row in report["rows"] if row["system"] == system]
            shown = [(row["rate"], row["median TTFT s"]) for row in points if row["median TTFT s"] is not None]
            if shown:
                axes.plot(*zip(*shown), marker="o", markersize=3.5, label=system, **style)
        axes.set_title(report["rows"][0]["load"], fontsize=10, color=colours["text"])
        axes.set_xlabel("requests per second, offered", fontsize=9, color=colours["faint"])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.tick_params(colors=colours["text"], labelsize=8, which="both")
        for spine in axes.spines.values():
            spine.set_color(colours["faint"])
    panels[0].set_ylabel("median time to first token", fontsize=9, color=colours["faint"])
    handles, labels = panels[0].get_legend_handles_labels()
    style = {"ncols": len(labels), "fontsize": 9, "frameon": False, "labelcolor": colours["text"]}
    figure.legend(handles, labels, loc="outside lower center", **style)
    figure.suptitle(
        f"{settings['model']}, {settings['threads']} cores, device pool of {settings['device tokens']:,} tokens, "
        f"host tier of {settings['host tokens']:,};\nvLLM {settings['vLLM']} (CPU) has the sum. A line ends where "
        f"the system is overloaded. Measured on {' and '.join(runs)}",
        fontsize=8.5,
        color=colours["faint"],
    )
    figure.savefig(
        file,
        transparent=True,
        bbox_inches="tight",
        metadata={"Date": None, "Description": f"sha256 of the results: {digest}"},
    )
    plt.close(figure)


if __name__ == "__main__":
    contents = [(RESULTS / f"load_{load}.json").read_bytes() for load in LOADS]
    reports = [json.loads(content) for content in contents]
    assert all(report["complete"] for report in reports), "a run that was broken off is not shown"
    for name, colours in COLOURS.items():
        draw(reports, colours, FOLDER / f"load-{name}.svg", hashlib.sha256(b"".join(contents)).hexdigest())
