"""What a rebase has to look at, between two small versions; and where this engine stands on the one it has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang.rebase import ours
from sglang.rebase.__main__ import main
from sglang.rebase.absences import ABSENT_MEMBERS, ABSENT_METRICS
from sglang.rebase.report import compare
from sglang.rebase.stands import stand_of, table
from sglang.rebase.upstream_names import RECORDED, FlagFacts, UpstreamNames, load_names
from sglang.srt.missing_flags import MISSING_FLAGS, missing_flag

STANDS = Path(__file__).parents[1] / "support" / "upstream_stands.json"
OLD = UpstreamNames(version="1")


def findings(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str, str, bool]]:
    found = compare(replace(OLD, **old), replace(OLD, version="2", **new))
    return [(each.change, each.name, each.standing, each.note, each.needs_decision) for each in found]


def test_new_names_by_where_we_stand() -> None:
    flags = {name: FlagFacts() for name in ("--page-size", "--speculative-new", "--never-seen")}
    found = findings({}, {"flags": flags, "endpoints": {"/health": ["GET"], "/encode": ["POST"], "/new": ["GET"]}})
    assert [each[1:3] for each in found] == [
        ("--never-seen", "unknown"),
        ("/new", "unknown"),
        ("--page-size", "served"),
        ("--speculative-new", "refused"),
        ("/encode", "refused"),
        ("/health", "served"),
    ], "what needs a decision comes first"
    assert [each[4] for each in found] == [True, True, False, False, False, False]
    assert "it decodes without drafts" in found[3][3]

    fields = {"ChatCompletionRequest": ["model", "watermark", "no_logs", "never_seen"]}
    metrics = ["sglang:num_requests_total", "sglang:spec_new", "sglang:never_seen"]
    members = {"HiCacheStorage": {"get": "(self, key)", "new": "(self)"}, "BasePrefixCache": {"new": "(self)"}}
    found = findings({}, {"fields": fields, "metrics": metrics, "members": members})
    assert {name: standing for _, name, standing, _, _ in found} == {
        "ChatCompletionRequest.model": "served",
        "ChatCompletionRequest.watermark": "refused",
        "ChatCompletionRequest.no_logs": "no effect",
        "ChatCompletionRequest.never_seen": "unknown",
        "sglang:num_requests_total": "served",
        "sglang:spec_new": "absent",
        "sglang:never_seen": "unknown",
        "HiCacheStorage.get": "served",
        "HiCacheStorage.new": "unknown",
        "BasePrefixCache.new": "absent",
    }


def test_a_changed_flag_names_ours_beside_theirs() -> None:
    before = {
        "--page-size": FlagFacts("1"),
        "--load-format": FlagFacts("auto", ["auto", "pt"]),
        "--ep": FlagFacts("1"),
    }
    after = {
        "--page-size": FlagFacts("64"),
        "--load-format": FlagFacts("auto", ["auto", "gguf", "new"]),
        "--ep": FlagFacts("1"),
    }
    assert findings({"flags": before}, {"flags": after}) == [
        (
            "changed",
            "--load-format",
            "served",
            "added: gguf, new; gone: pt; refused here with the list of our values: new",
            False,
        ),
        ("changed", "--page-size", "served", "default 1 -> 64; ours is None", False),
    ]


def test_a_changed_method_needs_a_decision_if_ours_lacks_a_parameter() -> None:
    def change(was: str, now: str) -> list[bool]:
        members = [{"members": {"HiCacheStorage": {"exists": each}}} for each in (was, now)]
        return [each[4] for each in findings(*members)]

    assert change("(self, key: str)", "(self, key: str) -> bool") == [False]
    assert change("(self, key: str)", "(self, key: str, prefix: str)") == [True]
    endpoints = [{"endpoints": {"/tokenize": methods}} for methods in (["POST"], ["POST", "PUT"])]
    assert findings(*endpoints) == [("changed", "/tokenize", "served", "POST -> POST, PUT", True)]
    assert findings({"endpoints": {"/tokenize": []}}, endpoints[1]) == [], "of a list of names no methods are known"


def test_what_is_gone() -> None:
    flags = {name: FlagFacts() for name in ("--page-size", "--ep", "--never-seen")}
    assert {name: note for _, name, _, note, _ in findings({"flags": flags}, {})} == {
        "--page-size": "still here: keep it for older clients, or drop it",
        "--ep": "it may leave our table",
        "--never-seen": "it was in no table",
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = load_names(str(RECORDED))
    newer = tmp_path / "newer.json"
    newer.write_text(replace(recorded, version="9", flags={**recorded.flags, "--new": FlagFacts("1")}).as_json())
    assert main([str(newer)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"upstream {recorded.version} -> 9\n  flags      1 new, 0 changed, 0 gone\n")
    assert "\nTo decide: 1\n  flags: serve it (srt/server_args.py), or refuse it (srt/missing_flags.py)\n" in text
    assert main([str(newer), str(RECORDED), "--json"]) == 0, "what is gone needs no decision"
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["findings"]] == ["--new"]
    assert main(["nothing.whl"]) == 2 and "nothing.whl is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "is no file of names"),
        ("{}", "is no file of names"),
        ('{"a": 1}', "is no file of names"),
        ('{"version": "1"}', "is no file of names"),
        ('{"version": "1", "flags": [], "new": 1}', "is no file of names"),
        ('{"0.5.23": {"flags": []}}', "holds several versions: name one"),
        ("{", "is no JSON"),
    ],
)
def test_a_file_without_names(
    content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "names.json"
    path.write_text(content)
    assert main([str(path)]) == 2 and sentence in capsys.readouterr().err


# -- the version that this engine stands on ----------------------------------------------------------------------


def test_the_table_of_served_refused_and_ours_alone() -> None:
    held = table(load_names(str(RECORDED)))
    assert held == json.loads(STANDS.read_text()), "run `make docs`, and look at what changed"
    assert [kind for kind, stands in held.items() if "unknown" in stands] == []


def test_no_rule_is_stale_and_nothing_that_is_served_is_called_missing() -> None:
    names = load_names(str(RECORDED))

    def used(rules: Any, theirs: list[str], end: str) -> list[str]:
        return [
            rule for rule in rules if not any(n == rule or (rule[-1] == end and n.startswith(rule)) for n in theirs)
        ]

    elsewhere = [flag for flag in names.flags if flag not in ours.our_flags()]
    assert used(MISSING_FLAGS, elsewhere, "-") == []
    assert [flag for flag in ours.our_flags() if flag in MISSING_FLAGS] == []
    metrics = [
        each.removeprefix("sglang:") for each in names.metrics if stand_of("metric", each).standing == "absent"
    ]
    assert used(ABSENT_METRICS, metrics, "_") == []
    for owner, reasons in ABSENT_MEMBERS.items():
        theirs = list(names.members[owner])
        assert reasons.keys() == {"*"} or used(reasons, theirs, "_") == []
        assert owner not in ours.INTERFACES or not set(reasons) & set(ours.our_members(owner))


def test_the_longest_rule_has_the_sentence() -> None:
    assert missing_flag("--cuda-graph-bs-decode") == (
        "this engine does not have the flag --cuda-graph-bs-decode: --disable-cuda-graph, "
        "--disable-prefill-cuda-graph, --cuda-graph-max-bs-decode and --cuda-graph-max-bs-prefill are its settings "
        "of graphs"
    )
    assert missing_flag("--page-size") is missing_flag("--epoch") is None


def test_flags_and_pages_that_the_sentences_name_exist() -> None:
    root = Path(__file__).parents[2]
    for flag, hint in MISSING_FLAGS.items():
        for word in hint.replace(",", " ").replace(":", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in ours.our_flags(), f"{flag}: {hint}"
            assert not word.startswith("docs/") or (root / word).exists(), f"{flag}: {hint}"
