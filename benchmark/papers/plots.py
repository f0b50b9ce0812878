"""Panels of lines, bars or points as one PNG. Knows nothing of what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    # Label -> x and y.
    series: Mapping[str, tuple[Sequence[float | str], Sequence[float]]]
    # `lines`, `points`, `bars` (x: names, the same in all series) or `ranges` (x: the two ends, no y).
    kind: str = "lines"
    log_x: bool = False
    log_y: bool = False
    # A dashed line across, at this y.
    level: float | None = None
    # A dotted line from top to bottom: its label, and its x.
    mark: tuple[str, float] | None = None


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """title: states whether the numbers are simulated. A label has the same color in all panels."""
    labels = dict.fromkeys(label for panel in panels if panel.kind != "ranges" for label in panel.series)
    colors = {label: f"C{i}" if len(labels) <= 10 else plt.get_cmap("tab20")(i) for i, label in enumerate(labels)}
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 4.0 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels):
        _draw_panel(axis, panel, colors)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axis: Axes, panel: Panel, colors: Mapping[str, Any]) -> None:
    if panel.kind == "ranges":
        _draw_ranges(axis, panel)
    for i, (label, (xs, ys)) in enumerate(panel.series.items()):
        if panel.kind == "ranges":
            continue
        if panel.kind == "bars":
            width = 0.8 / len(panel.series)
            axis.bar([x + i * width for x in range(len(xs))], ys, width, label=label, color=colors[label])
            axis.set_xticks([x + 0.4 - width / 2 for x in range(len(xs))], [str(x) for x in xs], rotation=30)
        else:
            marks = "o-" if panel.kind == "lines" else "."
            axis.plot(xs, ys, marks, label=label, markersize=4, color=colors[label])
    if panel.log_x:
        axis.set_xscale("log")
    if panel.log_y:
        axis.set_yscale("log")
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(alpha=0.3)
    if panel.level is not None:
        axis.axhline(panel.level, linestyle="--", linewidth=1, color="black")
    if panel.mark is not None:
        axis.axvline(panel.mark[1], linestyle=":", linewidth=1.2, color="black", label=panel.mark[0])
    if len(panel.series) > 1 and panel.kind != "ranges":
        if panel.kind == "bars":
            axis.margins(y=0.35)  # room for the legend
            axis.legend(fontsize=7, ncol=3, loc="upper center")
        else:
            axis.legend(fontsize=7)


def _draw_ranges(axis: Axes, panel: Panel) -> None:
    """A bar from end to end per series, the first on top, its label above it at the left."""
    for i, (label, (ends, _)) in enumerate(panel.series.items()):
        axis.plot(ends, (-i, -i), "|-", linewidth=4, markersize=9, color="C7")
        axis.text(0.02, 0.22 - i, label, fontsize=7, transform=axis.get_yaxis_transform())
    axis.set_yticks([])
    axis.set_ylim(0.6 - len(panel.series), 0.8)
