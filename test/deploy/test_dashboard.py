"""The dashboard: its queries name what the server exports, and Grafana can lay it out."""

from __future__ import annotations

import itertools
import re

import pytest

from support.deploy_queries import DASHBOARD, Query, dashboard_queries, exported_samples, panels


def test_every_query_names_what_the_server_exports() -> None:
    known = exported_samples()
    assert [(query.where, problem) for query in dashboard_queries() for problem in query.problems(known)] == []


@pytest.mark.parametrize(
    "expr",
    [
        "sglang:no_such_metric",
        "sglang:prompt_tokens",
        "sglang:time_to_first_token_seconds",
        'sglang:num_queue_reqs{tier="host"}',
        "sum by (tier) (rate(sglang:prompt_tokens_total[1m]))",
        "rate(sglang:num_queue_reqs[1m])",
        "deriv(sglang:prompt_tokens_total[1m])",
        "histogram_quantile(0.5, sum by (instance) (rate(sglang:queue_time_seconds_bucket[1m])))",
    ],
)
def test_a_wrong_query_is_found(expr: str) -> None:
    assert len(list(Query("", expr).problems(exported_samples()))) == 1


def test_every_query_follows_the_variables() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance", "model"}
    for query in dashboard_queries():
        for matchers in re.findall(r"sglang:\w+(\{[^}]*\})?", query.expr):
            assert 'instance=~"$instance",model_name=~"$model"' in matchers, query
        assert set(re.findall(r"\$(\w+)", query.expr)) <= {*variables, "__rate_interval"}
    for panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_no_panels_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)
