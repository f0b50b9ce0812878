"""The pages are true: their commands run, their links lead somewhere, their tables are the code's."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang.rebase.ours import our_metrics
from sglang.srt.entrypoints import request_fields
from support.doc_names import missing_names
from support.doc_pages import (
    CONTRIBUTOR_PAGES,
    DOCS,
    PAGES_WITH_COMMANDS,
    ROOT,
    USER_PAGES,
    all_pages,
    blocks_of,
    dead_links,
)
from support.doc_reader import MARKERS, Reader

COMMANDS = ("bash", "python", "console")
# What is shown, not run; "" is output and drawings.
SHOWN = ("", "json", "ini", "nginx", "yaml")
# Why blocks are not run, and how many of them.
NOT_RUN = {
    "has a test of its own": 4,
    "installs packages": 5,
    "is the test suite": 1,
    "needs a GPU": 2,
    "needs a model of your own": 2,
    "needs another machine": 3,
    "needs root": 1,
}
API = DOCS / "reference" / "api.md"
# When the commands of a page run, if not in `make test-all`. Each page starts a server.
WHEN_RUN: dict[Path, Any] = {DOCS / "guides" / "clients.md": pytest.mark.clients}
MAX_USER_WORDS = 31_800
MAX_CONTRIBUTOR_WORDS = 17_000


def runnable(page: Path) -> list:
    blocks = [block for block in blocks_of(page) if block.language in COMMANDS]
    return [block for block in blocks if block.reason_not_to_run is None]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=WHEN_RUN.get(page, pytest.mark.slow))
        for page in PAGES_WITH_COMMANDS
        if runnable(page)
    ],
)
def test_the_commands_of_a_page_run(page: Path) -> None:
    with Reader() as reader:
        for block in runnable(page):
            reader.follow(block)
        reader.stop_servers()


def test_every_block_is_run_or_has_a_known_reason() -> None:
    blocks = [block for page in PAGES_WITH_COMMANDS for block in blocks_of(page)]
    assert [block.name for block in blocks if block.language not in (*COMMANDS, *SHOWN)] == []
    assert Counter(block.reason_not_to_run for block in blocks if block.reason_not_to_run) == NOT_RUN
    markers = {block.marker for block in blocks if block.marker and not block.reason_not_to_run}
    assert markers <= set(MARKERS)


def test_no_command_stands_outside_of_a_block() -> None:
    for page in USER_PAGES:
        for line in page.read_text().splitlines():
            assert not re.match(r" {4}(make|python|curl|\.venv)\b", line), f"{page}: {line}"


def test_no_page_has_a_merge_to_resolve() -> None:
    assert not [page for page in all_pages() if re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert dead_links(page) == []


def test_pages_that_the_code_names_exist() -> None:
    folders = [ROOT / name for name in ("python", "sgl-kernel", "benchmark", "test")]
    files = [ROOT / "Makefile", *(path for folder in folders for path in folder.rglob("*"))]
    named = {
        (file, page)
        for file in files
        if file.name == "Makefile" or file.suffix in (".py", ".c", ".cu", ".html")
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", file.read_text())
    }
    assert named
    assert [(file, page) for file, page in named if not (ROOT / page).exists()] == []


@pytest.mark.parametrize(
    ("pages", "limit"),
    [
        pytest.param(USER_PAGES, MAX_USER_WORDS, id="user"),
        pytest.param(CONTRIBUTOR_PAGES, MAX_CONTRIBUTOR_WORDS, id="contributor"),
    ],
)
def test_pages_stay_short(pages: list[Path], limit: int) -> None:
    texts = [re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in pages]
    words = [word for text in texts for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= limit, len(words)


@pytest.mark.parametrize("page", CONTRIBUTOR_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_contributor_page_names_exists(page: Path) -> None:
    assert missing_names(page) == []


def test_a_name_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`mem_cache/no_such_file.py`, `HiRadixTree.no_such_method`, `NoSuchClass`, `no_such_function()`\n"
        "```\nNoSuchClassInAPicture (link.py)\n```\n"
        "`mem_cache/link.py`, `HiRadixTree.match`, `LayerStreaming.max_total_len`, `Link`, `make_room()`\n"
    )
    assert set(missing_names(page)) == {
        "mem_cache/no_such_file.py",
        "HiRadixTree.no_such_method",
        "no_such_method",
        "NoSuchClass",
        "no_such_function",
        "NoSuchClassInAPicture",
    }


@pytest.mark.parametrize(
    "refused",
    [
        request_fields.UNSUPPORTED_CHAT,
        request_fields.UNSUPPORTED_COMPLETION,
        request_fields.UNSUPPORTED_EMBEDDING,
        request_fields.UNSUPPORTED_GENERATE,
        request_fields.UNSUPPORTED_NATIVE_SAMPLING,
    ],
)
def test_every_refused_field_is_in_the_table(refused) -> None:
    table = API.read_text().split("## What is refused")[1]
    assert set(refused) <= set(re.findall(r"\w+", table))


def test_every_metric_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == our_metrics()


def test_the_hooks_before_a_commit_are_the_parts_of_make_check() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    recipe = (ROOT / "Makefile").read_text().split("\ncheck: setup\n")[1].split("\n\n")[0]
    assert entries == [line.strip().replace("$(PY)", ".venv/bin/python") for line in recipe.splitlines()]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
