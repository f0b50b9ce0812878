"""The alert rules: their queries, what they tell an operator, and a case for and against each in alerts_test.yml."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.deploy_queries import DEPLOY, RULES, exported_samples, rule_queries
from support.doc_pages import ROOT, anchors

CASES = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())


def expected(alert: str) -> list[list[dict[str, Any]]]:
    tests = (test for case in CASES["tests"] for test in case["alert_rule_test"])
    return [test["exp_alerts"] for test in tests if test["alertname"] == alert]


def test_every_query_names_what_the_server_exports() -> None:
    known = exported_samples()
    assert [(query.where, problem) for query in rule_queries() for problem in query.problems(known)] == []


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_tells_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    texts = rule["annotations"]
    assert set(texts) == {"summary", "description", "runbook"}
    page, _, anchor = texts["runbook"].partition("#")
    assert anchor in anchors(ROOT / page)
    flags = set(re.findall(r"--[a-z-]+", texts["description"]))
    assert all(f"`{flag}`" in (ROOT / "docs/reference/flags.md").read_text() for flag in flags)
    fired = [alert["exp_labels"] for alerts in expected(rule["alert"]) for alert in alerts]
    named = set(re.findall(r"\$labels\.(\w+)", texts["summary"] + texts["description"]))
    assert fired and all(named <= set(labels) for labels in fired)


def test_every_rule_has_a_case_for_and_one_against_it() -> None:
    cases = defaultdict(set)
    for rule in RULES:
        cases[rule["alert"]] |= {bool(alerts) for alerts in expected(rule["alert"])}
    assert len(cases) == len(RULES)
    assert all(outcomes == {True, False} for outcomes in cases.values())


@pytest.mark.clients
def test_promtool_finds_the_rules_right(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    done = subprocess.run([promtool, "check", "rules", DEPLOY / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(RULES)} rules found" in done.stdout, done.stdout + done.stderr
    # What annotations become is not compared.
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "sglang", "rules": bare}]}))
    (tmp_path / "cases.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], **CASES}))
    done = subprocess.run([promtool, "test", "rules", tmp_path / "cases.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
