"""What pages for contributors name in the code: files, classes, members, functions; and which of them do not exist.

Reads the source as text and as syntax trees. Imports nothing of the engine.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.doc_pages import ROOT

_FOLDERS = ("python", "sgl-kernel", "benchmark", "test", "docs")
_SUFFIXES = (".py", ".c", ".cu", ".html", ".json", ".md", ".zst")
_SOURCES = (".py", ".c", ".cu", ".html")
_CODE = re.compile(r"^```\w*\n(?P<block>.*?)^```$|`(?P<span>[^`\n]+)`", re.M | re.S)
_PATH = re.compile(r"(?<![\w./<*-])[\w./-]*\w\.(?:py|cu|c|json|md|zst)\b(?![\w*])")
_MEMBER = re.compile(r"\b([A-Z]\w*[a-z]\w*)\.(\w+)")
_CAMEL_CASE = re.compile(r"(?<![\w.])[A-Z][a-z0-9]\w*[A-Z]\w*|(?<![\w.])[A-Z]{2,}[a-z]\w*")
_SNAKE_CASE = re.compile(r"(?<![\w-])[a-zA-Z_]\w*_\w+(?![\w-])")
# What looks like a name of ours: units, and a file of a model.
_OTHER_NAMES = ("KiB", "MiB", "config.json")


def missing_names(page: Path) -> list[str]:
    """Names in code spans and pictures of a page that stand for nothing in the repository."""
    missing = []
    for text, is_span in _code_of(page):
        for name in _OTHER_NAMES:
            text = text.replace(name, " ")
        paths = _PATH.findall(text)
        missing += [path for path in paths if not _is_file(path)]
        for path in paths:
            text = text.replace(path, " ")
        members = _MEMBER.findall(text)
        missing += [f"{name}.{member}" for name, member in members if name in _classes() and not _has(name, member)]
        missing += [name for name in _CAMEL_CASE.findall(text) if not _is_class(name)]
        if is_span:
            missing += [name for name in _SNAKE_CASE.findall(text) if name not in _words()]
    return missing


def _code_of(page: Path) -> Iterator[tuple[str, bool]]:
    """Each code block and code span, and whether it is a span."""
    for match in _CODE.finditer(page.read_text()):
        yield match["block"] or match["span"], match["block"] is None


@cache
def _files() -> tuple[str, ...]:
    found = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in _SUFFIXES]
    return tuple(f"/{path.relative_to(ROOT)}" for path in found)


@cache
def _is_file(name: str) -> bool:
    """name: a path, or the end of one."""
    return any(path.endswith(f"/{name}") for path in _files())


@cache
def _words() -> frozenset[str]:
    """Every identifier in the source, and every part of a file's name. Not those that only a test has."""
    words = {part for path in _files() for part in re.split(r"[/.]", path)}
    for path in _files():
        if path.endswith(_SOURCES) and "/test_" not in path:
            words.update(re.findall(r"\w+", (ROOT / path[1:]).read_text()))
    return frozenset(words)


def _is_class(name: str) -> bool:
    return name in _classes() or hasattr(builtins, name) or name in _assigned()


@cache
def _assigned() -> frozenset[str]:
    """Names of modules' own variables."""
    python = [(ROOT / path[1:]).read_text() for path in _files() if path.endswith(".py")]
    return frozenset(name for text in python for name in re.findall(r"^(\w+) = ", text, re.M))


@cache
def _classes() -> dict[str, tuple[set[str], list[str]]]:
    """Class -> its own members, and the names of its bases. Classes of one name are taken together."""
    classes: dict[str, tuple[set[str], list[str]]] = {}
    for path in _files():
        if path.endswith(".py") and "/test_" not in path:
            for node in ast.walk(ast.parse((ROOT / path[1:]).read_text())):
                if isinstance(node, ast.ClassDef):
                    members, bases = classes.setdefault(node.name, (set(), []))
                    members.update(_members(node))
                    bases += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return classes


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _has(name: str, member: str) -> bool:
    members, bases = _classes()[name]
    return member in members or any(_has(base, member) for base in bases if base in _classes() and base != name)
