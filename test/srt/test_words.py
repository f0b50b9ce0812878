"""Words that the house style forbids, in every source file of the packages: comments, messages and the live page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("python", "sgl-kernel")
KINDS = (".py", ".html")
# A phrase may be broken over two lines of a docstring or a comment.
GAP = r"(?: |\s*\n\s*(?:#|//)?\s*)"
FORBIDDEN = re.compile(rf"\b(?:nobody|whoever|somebody|anybody|says|said|so,{GAP}and|of{GAP}these)\b", re.IGNORECASE)
# Places where a word is right: a file, and a part of the line with the word.
ALLOWED = {
    # Training text of the embedded model.
    ("python/sglang/srt/configs/embedded_model.py", "and nobody could {w} it"),
}


def forbidden_words(path: str, text: str) -> list[str]:
    """Each forbidden word with its place: "path:line: word"."""
    lines = text.split("\n")
    found = []
    for match in FORBIDDEN.finditer(text):
        line = text.count("\n", 0, match.start())
        if not any(path == where and part in lines[line] for where, part in ALLOWED):
            found.append(f"{path}:{line + 1}: {' '.join(match[0].split())}")
    return found


def sources() -> dict[str, str]:
    """Path below the root -> text."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS)
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}


def test_no_file_has_a_forbidden_word() -> None:
    texts = sources()
    assert len(texts) > 200, "the packages moved: this test must look elsewhere"
    assert [word for path, text in texts.items() for word in forbidden_words(path, text)] == []


@pytest.mark.parametrize(
    "text",
    ["# Nobody reads it.", '"""What it says."""', "# one of these", "# one of\n# these", "    It ran, so,\n    and"],
)
def test_a_forbidden_word_is_found(text: str) -> None:
    assert len(forbidden_words("x.py", text)) == 1


@pytest.mark.parametrize("text", ["essays = 1", "# of the seconds", "nobody_reads = 1", "# so that, and so on"])
def test_other_words_pass(text: str) -> None:
    assert forbidden_words("x.py", text) == []


def test_each_allowed_place_exists() -> None:
    texts = sources()
    assert all(part in texts[path] for path, part in ALLOWED)
