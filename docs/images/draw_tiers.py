"""Draws the tiers of the cache, for light and for dark pages: `python docs/images/draw_tiers.py`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "line": "#818b98", "box": "#f6f8fa", "edge": "#d1d9e0"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "line": "#9198a1", "box": "#151b23", "edge": "#3d444d"},
}
# Name, what it is, what moves it, colour of its bar. The colours are those of the live page.
TIERS = (
    ("device", "the engine's own pool: attention reads here", "", "#3b82f6"),
    ("peer", "memory lent by idle models on this machine", "NVLink or shared memory", "#8b5cf6"),
    ("host", "a large pool in main memory", "kernel or copy engine", "#10b981"),
    ("disk", "files on a local disk, or a storage plugin", "whole checksummed blocks", "#f59e0b"),
    ("remote", "a Redis store on the network, compressed", "an offload proxy", "#ef4444"),
)
WIDTH, HEIGHT, STEP, LEFT, TOP = 860, 360, 62, 178, 30


def draw(colours: dict[str, str]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img" '
        'aria-label="One radix tree and one scheduler over five tiers: device, peer, host, disk and remote">',
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{colours["line"]}"/></marker></defs>',
    ]

    def text(x: float, y: float, content: str, size: int, kind: str = "text", more: str = "") -> None:
        parts.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{colours[kind]}" {more}>{content}</text>')

    def arrow(x: float, y: float, to: float) -> None:
        parts.append(f'<path d="M{x} {y}V{to}" stroke="{colours["line"]}" stroke-width="2" marker-end="url(#tip)"/>')

    bottom = TOP + STEP * len(TIERS) - 12
    parts.append(
        f'<rect x="14" y="{TOP}" width="142" height="{bottom - TOP}" rx="8" fill="{colours["box"]}" '
        f'stroke="{colours["edge"]}"/>'
    )
    for line, (content, size) in enumerate(
        (("one radix tree", 15), ("knows where each", 13), ("cached page lies", 13))
    ):
        text(85, TOP + 62 + 22 * line, content, size, "text" if line == 0 else "faint", 'text-anchor="middle"')
    for line, (content, size) in enumerate(
        (("one scheduler", 15), ("decides what is", 13), ("computed, loaded,", 13), ("evicted, stored", 13))
    ):
        text(85, TOP + 172 + 22 * line, content, size, "text" if line == 0 else "faint", 'text-anchor="middle"')
    text(LEFT, 18, "tier", 13, "faint")
    text(LEFT + 108, 18, "memory", 13, "faint")
    text(LEFT + 468, 18, "moved by", 13, "faint")
    for at, (name, memory, moved_by, colour) in enumerate(TIERS):
        y = TOP + STEP * at
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 14}" height="50" rx="8" fill="{colours["box"]}" '
            f'stroke="{colours["edge"]}"/><rect x="{LEFT}" y="{y}" width="8" height="50" rx="4" fill="{colour}"/>'
        )
        text(LEFT + 22, y + 31, name, 17, more='font-weight="600"')
        text(LEFT + 108, y + 31, memory, 14)
        text(LEFT + 468, y + 31, moved_by, 13, "faint")
        if at:
            arrow(LEFT + 52, y - 12, y - 1)
            arrow(LEFT + 72, y, y - 11)
    text(LEFT, bottom + 26, "↓ evicted or written ahead", 13, "faint")
    text(LEFT + 200, bottom + 26, "↑ loaded or fetched, while the request waits or computes", 13, "faint")
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, colours in COLOURS.items():
        (FOLDER / f"tiers-{name}.svg").write_text(draw(colours))
