"""Tables that are filled from results: each kind of cell, what is refused, and that the pages are up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark.result_tables import ROOT, ResultError, filled, lookup, pages, stale

from benchmark import result_tables

POINTS = [
    {"system": "a", "rate": 1.0, "requests/s": 3.456, "stall %": 12.3},
    {"system": "a", "rate": 2.0, "requests/s": 4.5, "stall %": 50.0},
    {"system": "b", "rate": 1.0, "requests/s": 7.0, "stall %": 0.0},
    {"system": "a", "rate": 1000, "requests/s": 9.0, "stall %": 1.0},
]
CLAIMS = [{"what": "a, or: b", "ours": 2.214}, {"what": "hits at 1.5", "ours": "12 / 13"}]
# On each page, of tables that come from results.
NUM_TABLES = {
    "docs/evidence.md": 5,
    "docs/records/experiments.md": 8,
    "docs/records/measurements.md": 9,
    "docs/records/papers.md": 45,
}
TABLE = """
# A page

<!-- results: {"file": "one", "columns": {
  "here": "{claims[what=<row>].ours}"}} -->
| | paper | here | |
|---|--:|--:|---|
| hits at 1.5 | 14 | 0 | a remark stays |
"""


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "one.json").write_text(json.dumps({"claims": CLAIMS, "points": POINTS}))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"n": 12345}], "nulls": [{"a": None, "b": 1.5}]}))
    monkeypatch.setattr(result_tables, "ROOT", tmp_path)
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    result_tables._loaded.cache_clear()
    return tmp_path


def fill(binding: dict, *lines: str) -> list[str]:
    text = f"<!-- results: {json.dumps(binding)} -->\n" + "\n".join(lines) + "\n\nText | with | bars\n"
    new = filled(text)
    assert new.endswith("\n\nText | with | bars\n") and filled(new) == new
    return new.splitlines()[3 : 1 + len(lines)]


def test_a_column_by_row() -> None:
    binding = {"file": "one", "columns": {"requests/s": "{points[system=<row> & rate=1.0].requests/s:.2f}"}}
    rows = fill(binding, "| | requests/s | |", "|---|--:|---|", "| **a** | 1 | ours |", "| b | | |")
    assert rows == ["| **a** | 3.46 | ours |", "| b | 7.00 | |"]


def test_names_may_have_colons_and_rows_commas_in_numbers(results: Path) -> None:
    rows = [{"with": "chunks of 2,048 tokens", "h20: TTFT": 1.25}, {"with": "usual: all", "h20: TTFT": 3}]
    (results / "colons.json").write_text(json.dumps({"rows": rows}))
    binding = {
        "file": "colons",
        "columns": {"here": "{rows[with=<row>].h20: TTFT:.1f} = {rows[with=<row>].h20: TTFT}"},
    }
    found = fill(binding, "| | here |", "|---|--:|", "| chunks of 2,048 tokens | 0 |", "| usual: all | 0 |")
    assert found == ["| chunks of 2,048 tokens | 1.2 = 1.25 |", "| usual: all | 3.0 = 3 |"]


def test_a_column_by_the_number_of_the_row() -> None:
    rate = "{points[<number>].rate:.0f}"
    binding = {"file": "one", "columns": {"system": "{points[<number>].system}", "rate": rate}}
    rows = fill(binding, "| | system | rate |", "|---|---|--:|", "| x | b | |", "| | a | 7 |", "| | a | |")
    assert rows == ["| x | a | 1 |", "| | a | 2 |", "| | b | 1 |"]
    with pytest.raises(ResultError, match="which tells the rows apart"):
        fill({"file": "one", "columns": {"rate": rate}}, "| | rate |", "|---|--:|", "| b | 1 |")


def test_a_value_that_is_null_is_what_the_author_calls_it() -> None:
    binding = {"file": "other", "none": "overloaded", "rows": {"x": "{nulls[0].<column>:.2f} s"}}
    assert fill(binding, "| | a | b |", "|--|--|--|", "| x | 7 | |") == ["| x | overloaded | 1.50 s |"]
    del binding["none"]
    with pytest.raises(ResultError, match=r"nulls\[0\]\.a:\.2f is None"):
        fill(binding, "| | a | b |", "|--|--|--|", "| x | 7 | |")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("}} -->", "}} --> "),
        ("}} -->", "}}-->"),
        ("<!-- results", "  <!-- results"),
        ("<!-- results", "<!--  results"),
        ("<!-- results", "<!-- Results"),
        ("<!-- results:", "<!-- result:"),
        ("-->\n", "-->\n\n"),
        ("-->\n", "-->\ntext\n"),
        ('"columns"', '"column"'),
        ("{claims[what=<row>].ours}", "12 / 13"),
        ("{claims[what=<row>].ours}", "{claims[7].ours}"),
        ("\n|---|--:|--:|---|", "\n\n|---|--:|--:|---|"),
        ("| | paper", " | | paper"),
    ],
)
def test_a_comment_that_would_fill_nothing_is_refused(old: str, new: str) -> None:
    filled(TABLE)
    assert old in TABLE
    with pytest.raises(ResultError, match="line"):
        filled(TABLE.replace(old, new))


def test_a_row_by_column_and_one_by_cell() -> None:
    place = "{points[system=a & rate=<column>].stall %:.0f} %"
    heads = ["rate", "1.0", "`1,000`"]
    binding = {"file": "one", "heads": heads, "rows": {"stalled": place, "else": ["", "{other/rows[0].n:,}"]}}
    rows = fill(
        binding, "| rate | 1.0 | `1,000` |", "|---|--:|--:|", "| stalled | | |", "| else | 7 | |", "| no | 1 | 2 |"
    )
    assert rows == ["| stalled | 12 % | 1 % |", "| else | 7 | 12,345 |", "| no | 1 | 2 |"]


def test_several_values_in_a_cell_and_text_as_it_is() -> None:
    assert "| hits at 1.5 | 14 | 12 / 13 | a remark stays |" in filled(TABLE)
    cell = "{claims[what=a, or: b].ours:.2f} ({points[2].requests/s:.0f})"
    assert fill({"file": "one", "rows": {"x": cell}}, "| | y |", "|--|--|", "| x | |") == ["| x | 2.21 (7) |"]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("points[system=a].stall %", "3 elements have system=a"),
        ("points[system=c].stall %", "0 elements"),
        ("points[0].hits", "there is no 'hits' in 'system', 'rate'"),
        ("claims.ours", "there is no 'ours'"),
        ("points[0].rate[0]", "is no list"),
        ("nothing/rows[0]:.1f", "there is no 'nothing/rows'"),
        ("points[0].system:.2f", "cannot be shown as '.2f'"),
    ],
)
def test_what_a_file_does_not_have_is_refused(place: str, why: str) -> None:
    with pytest.raises(ResultError, match=why):
        fill({"file": "one", "rows": {"x": f"{{{place}}}"}}, "| | y |", "|--|--|", "| x | |")


def test_rows_and_columns_and_files_that_are_not_there() -> None:
    with pytest.raises(ResultError, match="below line 4: there is no row hits at 3"):
        filled(
            "\n\n\n" + '<!-- results: {"file": "one", "rows": {"hits at 3": "{x}"}} -->\n| | y |\n|--|--|\n| x | |\n'
        )
    with pytest.raises(ResultError, match=r"there is no column there; there are , paper, here, "):
        filled(TABLE.replace('"here"', '"there"'))
    with pytest.raises(ResultError, match=r"there is no two\.json"):
        filled(TABLE.replace('"one"', '"two"'))


def test_positions_are_those_of_the_headings() -> None:
    row = "{claims[what=a, or: b].ours:.2f}"
    table = ("| | x | y |", "|--|--|--|", "| a | | |")
    assert fill({"file": "one", "rows": {"a": [row, ""]}, "heads": ["", "x", "y"]}, *table) == ["| a | 2.21 | |"]
    for binding, why in (
        ({"rows": {"a": [row, ""]}}, r'heads must be \["", "x", "y"\]'),
        ({"rows": {"a": [row, ""]}, "heads": ["", "y", "x"]}, "heads must be"),
        ({"rows": {"a": [row]}, "heads": ["", "x", "y"]}, "row a has 1 templates for 2 cells"),
        ({"rows": {"a": [row, "2.21"]}, "heads": ["", "x", "y"]}, "the template '2.21' has no value"),
    ):
        with pytest.raises(ResultError, match=why):
            fill({"file": "one", **binding}, *table)


def test_names_with_dots() -> None:
    assert lookup({"Llama-3.1-8B": {"a": [{"b": 1}]}}, "Llama-3.1-8B.a[b=1].b") == 1


def test_a_number_that_was_changed_is_found_and_filled_anew(results: Path) -> None:
    page = results / "README.md"
    (results / "docs").mkdir()
    page.write_text(TABLE)
    assert stale(pages()) == [page]
    result_tables.main()
    assert stale(pages()) == [] and "12 / 13" in page.read_text()


def test_tables_of_the_docs_are_as_their_results_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    result_tables._loaded.cache_clear()
    assert stale(pages()) == [], "run: make docs"
    # A comment that is removed leaves numbers without a source.
    counts = {str(path.relative_to(ROOT)): path.read_text().count("<!-- results: ") for path in pages()}
    assert {name: count for name, count in counts.items() if count} == NUM_TABLES
