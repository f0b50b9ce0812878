"""Draws docs/records/results/peers.json, for light and for dark pages: `python docs/images/draw_peers.py`.

`make bench-peers` writes such a file to bench-out/; copy it to docs/records/results to show it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "records" / "results" / "peers.json"
COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "bar": "#3b82f6", "slower": "#ef4444", "aim": "#16a34a"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "bar": "#60a5fa", "slower": "#f87171", "aim": "#4ade80"},
}


# What the project aims at, by a part of a row's name; the first that fits. The last is for all others.
AIMS = (("again", 10), ("restart", 10), ("step of 16, contexts of 32", 1.5), ("", 0.95))


def draw(report: dict[str, Any], colours: dict[str, str], file: Path) -> None:
    rows = [row for row in report["rows"] if row["peer"] == "vLLM"]
    right = 1.7 * max(row["highest"] for row in rows)
    others = {row["what"]: row["ratio"] for row in report["rows"] if row["peer"] == "llama.cpp"}
    shown = {what: ratio for what, ratio in others.items() if ratio < 0.9 * right}
    plt.rcParams.update({"svg.hashsalt": "peers", "font.family": "DejaVu Sans", "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(9.2, 0.34 * len(rows) + 1.3))
    places = range(len(rows), 0, -1)
    for place, row in zip(places, rows):
        ratio = row["ratio"]
        colour = colours["bar"] if ratio >= 1 else colours["slower"]
        axes.barh(place, ratio - 1, left=1, height=0.62, color=colour)
        axes.plot([row["lowest"], row["highest"]], [place, place], color=colours["faint"], linewidth=1.2)
        aim = next(aim for part, aim in AIMS if part in row["what"])
        axes.plot([aim, aim], [place - 0.42, place + 0.42], color=colours["aim"], linewidth=1.8)
        if row["what"] in shown:
            style = {"marker": "D", "markersize": 5, "markerfacecolor": "none", "color": colours["text"]}
            axes.plot([shown[row["what"]]], [place], linestyle="none", **style)
        axes.annotate(
            f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
            (max(ratio, row["highest"], 1), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=colours["text"],
            fontsize=9,
        )
    axes.set_xscale("log")
    axes.axvline(1, color=colours["text"], linewidth=1)
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50) if tick <= 2 * max(row["highest"] for row in rows)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(0.5, *(0.8 * row["lowest"] for row in rows), *(0.9 * n for n in shown.values())), right)
    axes.set_yticks(list(places), [row["what"] for row in rows], fontsize=9)
    axes.tick_params(colors=colours["text"], length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    settings = report["settings"]
    versions = settings["peers"]
    axes.set_title(
        f"Bars: time of vLLM {versions['vLLM']} (CPU) over ours, median of {rows[0]['rounds']} rounds; above 1 ours "
        "is faster. Lines: least and greatest.\n"
        f"Diamonds: llama.cpp {versions['llama.cpp']}, one request at a time; "
        f"{len(others) - len(shown)} beyond the edge are left out. "
        "Upright marks: our aims.\n"
        f"{settings['model']}, {settings['threads']} threads, memory for {settings['memory_tokens']:,} tokens each; "
        f"measured on {report['hardware']}, {report['date'][:10]}",
        fontsize=9,
        color=colours["faint"],
        loc="left",
        x=-0.55,
    )
    figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text())
    for name, colours in COLOURS.items():
        draw(found, colours, FOLDER / f"peers-{name}.svg")
