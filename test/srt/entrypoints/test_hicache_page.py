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
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory
from support.fake_pages import BLOCK_TOKENS, FakePages
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

ROOT = Path(__file__).parents[3]
SRT = ROOT / "python" / "sglang" / "srt"
PAGE = (SRT / "entrypoints" / "hicache_page.html").read_text()
REFERENCE = (ROOT / "docs" / "reference" / "state.md").read_text()
FIELDS, COUNTERS = (
    set(re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    for table in REFERENCE.split("Counters start at 0")
)

FILE_FIELDS = {
    f"tiers.disk.{name}"
    for name in (
        *("lock_timeouts", "refused_segments", "refused_blocks", "written_bytes", "copied_bytes"),
        *("device_written_bytes", "last_day_written_bytes", "daily_limit_bytes"),
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
            "--hicache-storage-backend",
            "dynamic",
        )
        server = Server(*flags, "--hicache-storage-backend-extra-config", json.dumps(config))
    with server:
        for salt, last in (("", 300), ("a secret salt", 300), ("", 500)):
            prompt = [*range(100, 250), *range(last - 50, last)]
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
            assert server.post("/generate", body | ({"cache_salt": salt} if salt else {})).status_code == 200
        wait_until(lambda: not any(link["operations_in_flight"] for link in server.state()["links"].values()))
        return server.state()


@pytest.mark.e2e
def test_the_reference_lists_what_the_state_has(state):
    own = {"tiers.disk.rewritten_blocks", "tiers.disk.staging_bytes"}  # the plugin store's
    of_two_stores = {"tiers.remote.left_alone"}
    # Null without storage, without layer streaming, or without a canary.
    assert (
        paths(state) - own
        == FIELDS - {"storage", "layer_stream", "canary"} - PEER_FIELDS - FILE_FIELDS - of_two_stores
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
    worker = LentMemory(endpoint, tmp_path, *shape)
    master = BorrowedMemory([endpoint], "master", *shape)
    assert paths({"peers": worker.state()}) | paths({"peers": master.state()}) == PEER_FIELDS
    master.close()
    worker.close()


@pytest.mark.e2e
def test_the_state_says_which_prefixes_are_hot_and_not_what_they_are(state):
    first, *others = state["hottest"]
    assert (first["tokens"], first["hits"], first["namespace"], first["locks"]) == (150, 2, None, 0)
    assert first["tokens_on"] == {"device": 150, "peer": 0, "host": 150, "storage": 128} and first["stored"] is True
    assert {each["hits"] for each in others} == {1} and {each["tokens"] for each in others} == {201}
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
    used = set(re.findall(r'(?:at|show|showShares)\("([\w-]+)"', PAGE))
    assert used and used <= set(parser.ids)


CHECKS = """
const assert = require("node:assert"), { readFileSync } = require("node:fs");
const html = readFileSync(process.argv[1], "utf8");
const run = require("node:vm");
const names = ["bytes", "percent", "duration", "partsOf", "sharesOf", "growth", "withSample", "partOf", "rate",
  "slabsOf"];
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
