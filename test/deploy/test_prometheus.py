"""Every query of the dashboard and of the alert rules, run by a real Prometheus that scrapes a real server.

Needs Prometheus, which is no Python package: `make test-clients` runs it where Debian's package is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.deploy_queries import DASHBOARD, DEPLOY, RULES, Query, dashboard_queries, rule_queries, selectors
from support.server_fixture import NO_TLS, PATIENCE_S, Server, free_port, wait_until

pytestmark = pytest.mark.clients

# What this server does not export, and why. All else has to return data.
NEEDS_A_PEER = "no peer lends or borrows"
NEEDS_A_STORE = "there is no remote tier"
ABSENT = {
    "sglang:hicache_peer_total_tokens": NEEDS_A_PEER,
    "sglang:hicache_peer_slabs": NEEDS_A_PEER,
    "sglang:hicache_peer_borrowed_slabs": NEEDS_A_PEER,
    "sglang:hicache_peer_connected": NEEDS_A_PEER,
    "sglang:hicache_peer_left_alone": NEEDS_A_PEER,
    "sglang:hicache_remote_left_alone": NEEDS_A_STORE,
    "sglang:hicache_remote_stage_bytes": NEEDS_A_STORE,
    "sglang:hicache_remote_stage_seconds": NEEDS_A_STORE,
    "sglang:hicache_remote_buffer_slots": NEEDS_A_STORE,
    "sglang:hicache_remote_buffer_slots_used": NEEDS_A_STORE,
}
# A server without faults has no such replies.
NO_SUCH_REPLIES = ('status_code=~"500|504"', 'status_code="503"')
VARIABLES = {"$instance": ".*", "$model": ".*", "$__rate_interval": "30s"}


class Prometheus:
    """Scrapes one server every second, with the rules of docs/deploy."""

    def __init__(self, program: str, target: Server, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "alerts.yml")],
            "scrape_configs": [
                {"job_name": "sglang", "static_configs": [{"targets": [target.url.removeprefix("http://")]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = open(folder / "log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self.log,
            stderr=self.log,
        )

    def ask(self, path: str, **params: str) -> Any:
        """The data of an answer, or an error in Prometheus's words."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=PATIENCE_S, verify=NO_TLS).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        return self.ask("query", query=expr)["result"]

    def value(self, expr: str) -> float:
        try:
            result = self.query(expr)
        except (httpx.TransportError, json.JSONDecodeError):  # it starts
            assert self.process.poll() is None, Path(self.log.name).read_text()
            return 0.0
        return float(result[0]["value"][1]) if result else 0.0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.log.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    extra = json.dumps({"path": str(folder / "kv"), "limit_gb": 1})
    flags = "--hicache --hicache-ratio 8 --max-total-tokens 1024 --hicache-canary 1 --hicache-storage-backend file"
    with Server(*flags.split(), "--hicache-storage-backend-extra-config", extra) as server:
        running = Prometheus(program, server, folder)
        try:
            # A rate needs two samples with what happened between them.
            wait_until(lambda: running.value('count_over_time(up{job="sglang"}[1m])') >= 2)
            text = "The owl sat in the tree and looked at the river below. " * 8
            for _ in range(3):
                server.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 8}}).raise_for_status()
            wait_until(lambda: running.value("sglang:num_requests_total") == 3)
            # Series that have begun with the first request.
            wait_until(lambda: running.value("min(count_over_time(sglang:cached_tokens_total[30s]))") >= 2)
            yield running
        finally:
            running.close()


def filled_in(query: Query) -> str:
    expr = query.expr
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus) -> None:
    assert set(VARIABLES) - {"$__rate_interval"} == {
        f"${variable['name']}" for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    }
    for query in dashboard_queries():
        found = bool(prometheus.query(filled_in(query)))
        assert found == (not query.names & set(ABSENT)), query


def test_the_variables_have_values(prometheus: Prometheus) -> None:
    for label in ("instance", "model_name"):
        assert prometheus.ask(f"label/{label}/values", **{"match[]": "sglang:num_running_reqs"})


def test_every_metric_of_a_rule_returns_data(prometheus: Prometheus) -> None:
    for query in rule_queries():
        prometheus.query(query.expr)
        for selector in selectors(query):
            name, _, matchers = selector.partition("{")
            may_be_empty = name in ABSENT or any(no_such in matchers for no_such in NO_SUCH_REPLIES)
            assert bool(prometheus.query(selector)) != may_be_empty, (query.where, selector)


def test_prometheus_evaluates_every_rule_and_none_fires(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert [rule["name"] for rule in rules()] == [rule["alert"] for rule in RULES]
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules()} == {("ok", "")}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
