"""Parses the pages of the documentation: fenced blocks with their markers, links, anchors. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Pages for users. The records are neither among them nor among those for contributors.
USER_PAGES = [
    ROOT / "README.md",
    DOCS / "README.md",
    DOCS / "quickstart.md",
    *sorted((DOCS / "guides").glob("*.md")),
    *sorted((DOCS / "reference").glob("*.md")),
    DOCS / "glossary.md",
    DOCS / "evidence.md",
]
CONTRIBUTOR_PAGES = [
    DOCS / "architecture.md",
    DOCS / "contributing.md",
    DOCS / "rebase.md",
    *sorted((DOCS / "design").glob("*.md")),
]
# Pages at the root that have commands as well.
PAGES_WITH_COMMANDS = [*USER_PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]

_NOT_RUN = "not run: "
_FENCE = re.compile(r"(?:^<!-- (?P<marker>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.M)


@dataclass(frozen=True)
class Block:
    """marker: the HTML comment on the line before the block, or empty. before: the page's text up to the block."""

    page: Path
    line: int
    language: str
    text: str
    marker: str
    before: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason_not_to_run(self) -> str | None:
        return self.marker.removeprefix(_NOT_RUN) if self.marker.startswith(_NOT_RUN) else None


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        yield Block(
            page=page,
            line=text.count("\n", 0, match.start("language")) + 1,
            language=match["language"],
            text=match["text"],
            marker=match["marker"] or "",
            before=text[: match.start()],
        )


def all_pages() -> list[Path]:
    """Every Markdown file of the repository."""
    return [
        path
        for path in sorted(ROOT.rglob("*.md"))
        if not any(part.startswith(".") or part in ("build", "bench-out") for part in path.relative_to(ROOT).parts)
    ]


def dead_links(page: Path) -> list[str]:
    """Relative links whose file or anchor does not exist."""
    found = []
    for link in _LINK.findall(_without_blocks(page.read_text())):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, hyphens for spaces, numbers behind repeated ones."""
    seen: dict[str, int] = {}
    for heading in _HEADING.findall(_without_blocks(page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        seen[anchor] = seen.get(anchor, 0) + 1
    return {a if i == 0 else f"{a}-{i}" for a, count in seen.items() for i in range(count)}


def _without_blocks(text: str) -> str:
    return _FENCE.sub("", text)
