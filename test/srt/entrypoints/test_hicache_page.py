"""The live page and the state that it shows: what is open, what it may do, and that docs, page and state agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.observability.history import StateHistory
from sglang.srt.observability.latency_sketch import LatencySketch
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, allocate_pool
from support.fake_pages import BLOCK_TOKENS, FakePages
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

ROOT = Path(__file__).parents[3]
SRT = ROOT / "python" / "sglang" / "srt"
PAGE = (SRT / "entrypoints" / "hicache_page.html").read_text()
REFERENCE, HISTORY = (ROOT / "docs" / "reference" / "state.md").read_text().split("## /hicache/history")
FIELDS, COUNTERS = (
    set(re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    for table in REFERENCE.split("Counters start at 0")
)

FILE_FIELDS = {
    f"tiers.disk.{name}"
    for name in (
        *("lock_timeouts", "refused_segments", "refused_blocks", "written_bytes", "copied_bytes"),
        *("read_bytes", "device_written_bytes", "last_day_written_bytes", "daily_limit_bytes"),
    )
}
PEER_FIELDS = {field for field in FIELDS if field.startswith("peers.")}

PLUGIN = '''
class Plugin:
    """A storage plugin over a dictionary."""

    def __init__(self, config, kwargs):
        self.kept = {}

    def register_mem_pool_host(self, pool):
        pass

    def batch_exists(self, keys, extra_info=None):
        return next((i for i, key in enumerate(keys) if key not in self.kept), len(keys))

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        return [self.kept.get(key) for key in keys]

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        self.kept.update((key, value.clone()) for key, value in zip(keys, values))
        return True

    def clear(self):
        self.kept.clear()
'''


def paths(value: Any, at: str = "") -> set[str]:
    """Every field below, as the reference writes it."""
    if isinstance(value, dict):
        return {p for key, inner in value.items() for p in paths(inner, f"{at}.{key}" if at else key)}
    if isinstance(value, list):
        return {at} | {p for inner in value for p in paths(inner, f"{at}[]")}
    at = re.sub(r"^(tiers\.)(device|host)\.|^(links\.|switches\.)\w+\.", lambda m: f"{m[1] or m[3]}*.", at)
    return {re.sub(r"^(counters|lost_hits|canary\.differences|admin\.policies)\.\w+", r"\1.*", at)}


# Storage has blocks of 64 tokens.
PLACES_OF_THE_FIRST = {"device": 150, "peer": 0, "host": 150, "storage": 128}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the real engine with all tiers, after requests."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "page_test_plugin.py").write_text(PLUGIN)
    config = {"backend_name": "kept", "module_path": "page_test_plugin", "class_name": "Plugin"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        flags = (
            "--hicache",
            "--max-total-tokens",
            "8192",
            "--layer-stream",
            "2",
            "--hicache-canary",
            "0.5",
            # `auto` leaves unsaved what a first slow copy makes seem better computed.
            "--hicache-write-policy",
            "write_through",
            "--hicache-storage-backend",
            "dynamic",
            "--admin-api-key",
            "root",
        )
        server = Server(*flags, "--hicache-storage-backend-extra-config", json.dumps(config))
    with server:
        for salt, last in (("", 300), ("a secret salt", 300), ("", 500)):
            prompt = [*range(100, 250), *range(last - 50, last)]
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
            assert server.post("/generate", body | ({"cache_salt": salt} if salt else {})).status_code == 200
        label = {"input_ids": list(range(100, 250))}
        labelled = httpx.put(
            server.url + "/hicache/labels/the%20system%20prompt",
            json=label,
            headers={"Authorization": "Bearer root"},
            timeout=PATIENCE_S,
            verify=NO_TLS,
        )
        assert labelled.status_code == 200, labelled.text
        # Between a copy to the host and one from there to storage, no operation may be in flight.
        wait_until(lambda: server.state()["hottest"][0]["tokens_on"] == PLACES_OF_THE_FIRST)
        wait_until(lambda: not any(link["operations_in_flight"] for link in server.state()["links"].values()))
        return server.state()


@pytest.mark.e2e
def test_the_reference_lists_what_the_state_has(state):
    own = {"tiers.disk.rewritten_blocks", "tiers.disk.staging_bytes"}  # the plugin store's
    of_two_stores = {"tiers.remote.left_alone"}
    of_windows = {f"tiers.*.windowed.{name}_tokens" for name in ("total", "free")}
    # Null without storage, without layer streaming, or without a canary.
    assert (
        paths(state) - own
        == FIELDS - {"storage", "layer_stream", "canary"} - PEER_FIELDS - FILE_FIELDS - of_two_stores - of_windows
    )
    assert state["counters"].keys() <= COUNTERS


def test_the_reference_lists_what_the_file_store_adds(tmp_path: Path):
    store = HiCacheFile(tmp_path, "model", FakePages(4), BLOCK_TOKENS)
    assert FIELDS >= FILE_FIELDS and {f"tiers.disk.{name}" for name in store.stats()} >= FILE_FIELDS
    store.close()


def test_the_reference_lists_what_masters_and_workers_say(tmp_path: Path):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    shape = (SlabsConfig(2, 1 << 16), PageLayout.kv(1, 8, 4, 32, torch.bfloat16))
    worker = LentMemory(endpoint, tmp_path, allocate_pool(*shape))
    master = BorrowedMemory([endpoint], "master", *shape)
    assert paths({"peers": worker.state()}) | paths({"peers": master.state()}) == PEER_FIELDS
    master.close()
    worker.close()


@pytest.mark.e2e
def test_the_state_says_which_prefixes_are_hot_and_not_what_they_are(state):
    first, *others = state["hottest"]
    assert (first["tokens"], first["hits"], first["namespace"], first["locks"]) == (150, 2, None, 0)
    assert first["tokens_on"] == PLACES_OF_THE_FIRST and first["stored"] is True
    assert {each["hits"] for each in others} == {1} and {each["tokens"] for each in others} == {201}
    assert (first["label"], first["label_tokens"], first["saved_tokens"]) == ("the system prompt", 150, 150)
    assert state["admin"]["labels"] == [{"name": "the system prompt", "tokens": 150}]
    assert [each["label"] for each in others if each["namespace"]] == [None], "of another namespace"
    (namespace,) = {each["namespace"] for each in others} - {None}
    assert re.fullmatch("[0-9a-f]{32}", namespace) and "salt" not in json.dumps(state)
    assert len({each["hash"] for each in state["hottest"]}) == 4
    for tier in ("device", "host"):
        shown = state["tiers"][tier]
        sum_of_parts = shown["used_tokens"] + shown["evictable_tokens"] + shown["free_pages"] * state["page_size"]
        assert sum_of_parts == shown["total_tokens"]


def test_the_reference_and_the_page_list_every_counter():
    counted = set()
    for file in (SRT / "managers").glob("*.py"):
        counted |= set(re.findall(r'counters\[f?"([^"]+)"\]', file.read_text()))
    counted -= {"hit_tokens_{name}", "evicted_tokens_{tier.name.lower()}"}
    counted |= {f"hit_tokens_{tier}" for tier in ("device", "peer", "host", "disk", "remote")}
    counted |= {f"evicted_tokens_{tier}" for tier in ("device", "peer", "host")}
    assert counted == COUNTERS
    (table,) = re.findall(r"const COUNTERS = \{(.*?)\n\};", PAGE, re.DOTALL)
    assert set(re.findall(r"(\w+): \"", table)) == counted


@pytest.mark.e2e
def test_reference_and_page_know_the_columns_of_the_history(state):
    """A column that never was other than 0 is left out, so that all numbers are made to grow."""
    latencies = {name: LatencySketch() for name in MetricsCollector("m").recent}
    for sketch in latencies.values():
        sketch.add(1.0)
    history, now = StateHistory(latencies), json.loads(json.dumps(state))
    history.note(0.0, state, None)
    for part in ("queues", "lost_hits"):
        now[part] = dict.fromkeys(now[part], 10**9)
    for link in now["links"].values():
        link["bytes_done"] += 1
    now["counters"] = dict.fromkeys(COUNTERS, 10**9)
    for tier in now["tiers"].values():
        tier |= {"size_bytes": 5, "limit_bytes": 10} if "size_bytes" in tier else {"free_pages": 0}
    history.note(5.0, now, None)
    columns = set(history.reply()["columns"])
    grouped = {re.sub(r"^(filled\.|links\.|lost_hits\.|hit_tokens_|evicted_tokens_)\w+", r"\1*", c) for c in columns}
    rows = " ".join(line.split("|")[1] for line in HISTORY.splitlines() if line.startswith("| `"))
    assert grouped == set(re.findall(r"`([^`]+)`", rows))
    columns |= {f"{name}_tokens_{tier}" for name in ("hit", "evicted") for tier in ("device", "peer", "host")}
    columns |= {"hit_tokens_disk", "hit_tokens_remote"}
    drawn = set(re.findall(r'column: "(\w+)"', PAGE)) - {"computed"}
    assert len(drawn) > 4 and drawn <= columns


def test_the_history_has_the_key_of_the_state(keyed_server):
    assert keyed_server.get("/hicache/history").status_code == 401

    def get(since: str) -> httpx.Response:
        return httpx.get(
            f"{keyed_server.url}/hicache/history?since={since}",
            headers={"Authorization": "Bearer user"},
            timeout=PATIENCE_S,
            verify=NO_TLS,
        )

    reply = get("0").json()
    assert reply.keys() == {"started", "interval_s", "num_points", "time", "columns"}
    assert reply["interval_s"] * reply["num_points"] == 900
    assert get("9e99").json()["time"] == []
    for wrong in ("yesterday", "nan", ""):
        assert get(wrong).status_code == 400 and "Unix time" in get(wrong).text


def test_a_label_needs_the_administrators_key(keyed_server):
    body = {"input_ids": [1, 2, 3]}
    url = keyed_server.url + "/hicache/labels/x"
    for key in ("user", "wrong"):
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.put(url, json=body, headers=headers, timeout=PATIENCE_S, verify=NO_TLS)
        assert reply.status_code == 401


def test_the_page_is_open_where_the_state_is_not(keyed_server):
    page = keyed_server.get("/hicache")
    assert page.status_code == 200 and page.text == PAGE
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert keyed_server.get("/hicache/state").status_code == keyed_server.get("/hicache/").status_code == 401
    key = {"Authorization": "Bearer user"}
    state = httpx.get(keyed_server.url + "/hicache/state", headers=key, timeout=PATIENCE_S, verify=NO_TLS).json()
    assert state["model_name"] == "embedded"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


class Parser(HTMLParser):
    """What a browser would run or load, the identifiers, and whether every element is closed."""

    VOID = ("meta", "input", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_writes_text_only():
    parser = Parser()
    parser.feed(PAGE)
    assert not parser.open and len(set(parser.ids)) == len(parser.ids)
    for tag, name, value in parser.attributes:
        assert name not in ("src", "style", "srcset") and not name.startswith("on"), f"the policy forbids {name}"
        assert name != "href" or (tag == "a" and ":" not in (value or ""))
    assert "//" not in re.sub(r"(?m)^ *// .*$", "", PAGE), "it loads something, or a comment is not at a line's start"
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "@import",
    ):
        assert word not in PAGE
    # So its titles and drawings need no namespace of their own.
    assert "createElement(" in PAGE and "createElementNS(" in PAGE and "xmlns" not in PAGE
    used = set(re.findall(r'(?:at|show|showShares)\("([\w-]+)"', PAGE))
    assert used and used <= set(parser.ids)


CHECKS = """
const assert = require("node:assert"), { readFileSync } = require("node:fs");
const html = readFileSync(process.argv[1], "utf8");
const run = require("node:vm");
const names = ["bytes", "percent", "duration", "partsOf", "sharesOf", "growth", "withSample", "partOf", "rate",
  "slabsOf", "seconds", "shortened", "withHistory", "columnOf", "niceMax", "runsOf", "troublesOf", "wrapped",
  "placesOf", "nameOf", "flowsOf", "reasonSeries", "isNothing", "bytesOfTier", "bytesOfTokens"];
const script = html.split("<script>")[1].split("</script>")[0];
const page = run.runInNewContext(`${script}; ({${names}})`, {});
const same = (a, b) => assert.strictEqual(JSON.stringify(a), JSON.stringify(b));
same([0, 999, 1000, 99949, 123456, 2.5e9, 5e15].map(page.bytes),
  ["0 B", "999 B", "1.0 kB", "99.9 kB", "123 kB", "2.5 GB", "5000 TB"]);
same([[0, 0], [1, 5000], [1, 30], [999.9, 1000], [99999, 100000], [5, 5]].map(([a, b]) => page.percent(a, b)),
  ["0 %", "<0.1 %", "3.3 %", "99.9 %", "99.9 %", "100 %"]);
same([5.9, 61, 3700, 90000].map(page.duration), ["5 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]);
same([0, 0.25, 12.4, 1234.5].map(page.rate), ["0", "0.3", "12", "1,235"]);
same([page.partOf(5, 5), page.partOf(1200, 1300), page.partOf(0, 5)], ["all", "1,200", "none"]);
same(page.slabsOf({ lent: 2, home: 1200, offered: 0 }), "1,200 at home, 2 lent");
same(page.slabsOf({ held: 0, asked_back: 0 }), "none");
const tier = { used_tokens: 40, evictable_tokens: 30, free_pages: 15, pages: { filling: 2, pending_free: 3 } };
same(page.partsOf(tier, 2), { used: 30, moving: 10, cached: 30, free: 30 });
same(page.sharesOf({ prompt_tokens: 100, hit_tokens_host: 20 }, null),
  { total: 100, device: 0, peer: 0, host: 20, disk: 0, remote: 0, computed: 80 });
same(page.sharesOf({ prompt_tokens: 100, hit_tokens_disk: 20 }, { prompt_tokens: 70, hit_tokens_disk: 15 }),
  { total: 30, device: 0, peer: 0, host: 0, disk: 5, remote: 0, computed: 25 });
const pool = { total_tokens: 100, windowed: { total_tokens: 25, free_tokens: 5 } };
const sizes = { page_size: 2, page_bytes: 12, windowed_page_bytes: 8 };
same([page.bytesOfTier(sizes, pool), page.bytesOfTier(sizes, { total_tokens: 100 })], [100 * 2 + 25 * 4, 600]);
same([page.bytesOfTokens(sizes, 60, 20), page.bytesOfTokens({ page_size: 2, page_bytes: 12 }, 60)], [200, 360]);
let samples = [];
const add = (t, steps, bytes) => {
  samples = page.withSample(samples, { t, state: { steps, uptime_seconds: t, bytes } });
  return page.growth(samples, 5, (s) => s.bytes);
};
same(add(0, 0, 0), null);
same([1, 2, 3, 4, 5, 6, 7].map((t) => add(t, t, t * t)), [1, 2, 3, 4, 5, 7, 9]);
for (let t = 8; t < 100; t += 1) add(t, t, 0);
assert(samples.length >= 31 && samples.length <= 34);
same(add(100, 5, 9), null);
same([0.00018, 0.0312, 0.9999, 2.345, 33.3].map(page.seconds), ["0.2 ms", "31 ms", "1.00 s", "2.35 s", "33.3 s"]);
same(["2.50 s", "5.00 s", "200 ms", "1.0/s", "10,000/s"].map(page.shortened),
  ["2.5 s", "5 s", "200 ms", "1/s", "10,000/s"]);
same([0, 0.003, 1, 1.2, 99, 500].map(page.niceMax), [1, 0.005, 1, 2, 100, 500]);
same(["0", "0 B", "none", "–", "0.3", "10"].map(page.isNothing), [true, true, true, true, false, false]);
same(page.wrapped("one two three four", 9, 2), ["one two", "three…"]);
same(page.wrapped("one two", 9, 2), ["one two"]);
same([{ hash: "0123456789abcdef01" }, { label: "a", label_tokens: 5, tokens: 5 },
  { label: "a", label_tokens: 5, tokens: 1205 }].map(page.nameOf), ["0123456789abcdef", "a", "a + 1,200"]);
// A column that a reply lacks was 0 where there is a state, and latencies are unknown without requests.
const reply = (started, time, columns) => ({ started, interval_s: 5, num_points: 4, time, columns });
let history = page.withHistory(null, reply(1, [5, 10], { running: [1, null], ttft_p50: [2, null] }));
const more = { running: [0, 0], prompt_tokens: [9, 8], hit_tokens_disk: [4, 0] };
history = page.withHistory(history, reply(1, [15, 20], more));
same(history.columns, { running: [1, null, 0, 0], ttft_p50: [2, null, null, null],
  prompt_tokens: [0, null, 9, 8], hit_tokens_disk: [0, null, 4, 0] });
same(page.columnOf(history, "computed"), [0, null, 5, 8]);
same([page.columnOf(history, "waiting"), page.columnOf(history, "itl_p95")],
  [[0, null, 0, 0], [null, null, null, null]]);
history = page.withHistory(history, reply(1, [25], { running: [3] }));
same([history.time, history.columns.running], [[10, 15, 20, 25], [null, 0, 0, 3]]);
same(page.withHistory(history, reply(2, [30], { running: [7] })).columns, { running: [7] });
same(page.withHistory(null, reply(1, [], {})).time, []);
same(page.runsOf([0, 5, 10, 15, 60, 65], [1, 2, null, 3, 4, 5], 5), [[0, 1], [3], [4, 5]]);
const many = Object.fromEntries([...Array(9).keys()].map((i) => [`lost_hits.r${i}`, [i, null]]));
const series = page.reasonSeries({ columns: many });
same(series.map((s) => s.name), ["r8", "r7", "r6", "r5", "r4", "r3", "2 others"]);
same(series[6].columns, ["lost_hits.r2", "lost_hits.r1"]);
const well = { tiers: { device: {}, host: {}, disk: { read_errors: 3 }, remote: {} },
  switches: { host: { reads: true, writes: true } },
  storage: { tiers: ["disk", "remote"], reads: { off: false }, writes: { off: false } } };
same(page.troublesOf(well, well), {});
const sick = JSON.parse(JSON.stringify(well));
sick.switches.host.writes = false;
sick.links = { d2h: { left_alone: false }, d2p: { left_alone: true } };
sick.tiers.disk.read_errors = 5;
sick.tiers.remote.left_alone = 1;
sick.storage.writes = { off: true, reason: "it hangs" };
sick.peers = { lenders: [{ endpoint: "a", connected: false }], problems: ["another model"] };
same(Object.entries(page.troublesOf(sick, well)).map(([tier, texts]) => [tier, texts.length]).sort(),
  [["device", 1], ["disk", 2], ["host", 1], ["peer", 2], ["remote", 2]]);
assert(page.troublesOf(sick, well).disk[0].includes("it hangs"));
// Boxes lie in the picture, and none over another.
const all = ["device", "peer", "host", "disk", "remote"];
for (const width of [300, 639, 640, 1200]) for (let mask = 0; mask < 16; mask += 1) for (const lines of [0, 6]) {
  const tiers = all.filter((tier, i) => i === 0 || mask & 1 << i - 1);
  const { places, height } = page.placesOf(tiers, width, { disk: lines, peer: lines });
  const boxes = tiers.map((tier) => places[tier]);
  boxes.forEach((a, i) => {
    assert(a.x >= 0 && a.y >= 0 && a.x + a.w <= width + 0.01 && a.y + a.h <= height + 0.01, `${tiers} ${width}`);
    assert(a.h >= 84);
    for (const b of boxes.slice(0, i)) {
      assert(a.x >= b.x + b.w || b.x >= a.x + a.w || a.y >= b.y + b.h || b.y >= a.y + a.h,
        `${tiers} ${width}`);
    }
  });
}
const moving = (moved) => ({ page_bytes: 10, page_size: 1,
  links: { h2d: { bytes_done: moved }, store: { bytes_done: 7 * moved } },
  tiers: { device: {}, host: {}, disk: { written_bytes: moved, read_bytes: 3 * moved },
    remote: { read_bytes: 2 * moved } },
  storage: { tiers: ["disk", "remote"], block_tokens: 4 } });
const two = [0, 10].map((t) => ({ t, state: moving(100 * t) }));
same(page.flowsOf(two[1].state, two, null).map((f) => [f.from, f.to, f.speed]), [["host", "device", 100],
  ["host", "disk", 100], ["disk", "host", 300], ["host", "remote", 0], ["remote", "host", 200]]);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_numbers_of_the_page():
    command = ["node", "-e", CHECKS, str(SRT / "entrypoints" / "hicache_page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_the_page_is_part_of_the_package():
    assert '"sglang.srt.entrypoints" = ["*.html"]' in (ROOT / "pyproject.toml").read_text()


def test_page_and_guide_know_every_reason():
    (table,) = re.findall(r"const REASONS = \{(.*?)\n\};", PAGE, re.DOTALL)
    assert re.findall(r"^  (\w+): ", table, re.MULTILINE) == list(REASONS)
    guide = (ROOT / "docs" / "guides" / "hicache.md").read_text()
    for reason, meaning in REASONS.items():
        assert f"| `{reason}` | {meaning} |" in guide
