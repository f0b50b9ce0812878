"""Reads the dashboard and the alert rules of docs/deploy, and what their queries may name. Runs no query."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from sglang.srt.observability import metrics_collector
from sglang.srt.observability.metrics_collector import MetricsCollector
from support.doc_pages import DOCS

DEPLOY = DOCS / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
# Prometheus adds the first two to each sample that it scrapes.
SCRAPED_LABELS = frozenset({"job", "instance", "model_name"})
_SELECTOR = re.compile(r"(?P<name>sglang:\w+|\bup\b)(?P<matchers>\{[^}]*\})?")
_MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")
_FUNCTION = re.compile(r"\b(rate|increase|resets|deriv|delta)\((sglang:\w+)")
_OF_COUNTERS = ("rate", "increase", "resets")


@dataclass(frozen=True)
class Sample:
    """type: the metric's, as Prometheus has it."""

    type: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Query:
    """where: the panel or the alert."""

    where: str
    expr: str
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(match["name"] for match in _SELECTOR.finditer(self.expr)))

    def problems(self, known: dict[str, Sample]) -> Iterator[str]:
        """What the server does not export, labels that a metric does not have, functions of another type."""
        for match in _SELECTOR.finditer(self.expr):
            name = match["name"]
            if name == "up":
                continue
            if name not in known:
                yield f"{name} is not exported"
                continue
            foreign = set(_MATCHER.findall(match["matchers"] or "")) - known[name].labels
            if foreign:
                yield f"{name} has no label {', '.join(sorted(foreign))}"
        exported = [known[name] for name in self.names if name in known]
        for labels in _GROUPING.findall(self.expr):
            for label in re.split(r",\s*", labels):
                if exported and not all(label in sample.labels for sample in exported):
                    yield f"a metric of the query has no label {label}"
        for function, name in _FUNCTION.findall(self.expr):
            if name in known and (known[name].type == "gauge") == (function in _OF_COUNTERS):
                yield f"{function}() of {name}, a {known[name].type}"
        if "histogram_quantile" in self.expr and not re.search(r"by \(le\b", self.expr):
            yield "histogram_quantile() without buckets"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[Query]:
    return [Query(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def rule_queries() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in RULES]


def selectors(query: Query) -> list[str]:
    """Each metric of a query with its matchers, without what is computed from it."""
    return [match[0] for match in _SELECTOR.finditer(query.expr)]


def exported_samples() -> dict[str, Sample]:
    """Sample name -> its form, of a server all of whose parts are turned on."""
    collector = MetricsCollector("m")
    collector.first_token(1.0, 2, {"device": 1})
    collector.http.began()
    collector.http.ended("/generate", "POST", 200)
    collector.set_scheduler_state(_full_state())
    return {
        sample.name: Sample(family.type, frozenset(sample.labels) | SCRAPED_LABELS)
        for family in text_string_to_metric_families(collector.render().decode())
        for sample in family.samples
    }


def _full_state() -> dict[str, Any]:
    state: dict[str, Any] = {"counters": {}, "stall_seconds": 0.0}
    for _, _, path in metrics_collector._GAUGES:
        *folders, last = ("tiers", "remote", *path[1:]) if path[0] == "storage_tier" else path
        place = state
        for each in folders:
            place = place.setdefault(each, {})
        place[last] = 1
    for *_, parts, _ in metrics_collector._PROXY:
        state["tiers"]["remote"].update(dict.fromkeys(parts.values(), 1))
    for tier in ("device", "host"):
        state["tiers"][tier]["free_pages"] = 1
    lender = {
        "endpoint": "ipc:///a",
        "connected": True,
        "left_alone": False,
        "times_left_alone": 0,
        "slabs": {"held": 1},
    }
    state["links"] = {"h2d": {"bytes_done": 1}}
    state["lost_hits"] = {"never_cached": 1}
    state["switches"] = {"host": {"reads": True}}
    state["canary"] = {"equal_tokens": 1, "different_tokens": 0, "differences": {"host": 0}}
    state["peers"] |= {"slabs": {"home": 1}, "copies": {"bytes": 1, "refused": 0}, "lenders": [lender]}
    return state
