"""The live side of bench_bounds.py: documents that are asked about uniformly, put to a server process as a user would
start it, with the embedded model and default flags but for sizes.

Owns the server and a temporary folder while it measures. Requests go one after another, so that the tiers' sum is all
that counts. Numbers are measured.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.common import percentiles
from benchmark.simulator.bounds import Documents

from sglang.demo_common import get_json, server, wait_ready
from sglang.srt.configs.embedded_model import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS
from sglang.srt.mem_cache.transfer import TIER_NAMES

# 16 chunks of the default size, so that little of the sum is what one chunk needs.
DEVICE_TOKENS = 32768
# --hicache-ratio of the default flags is 2.
HOST_TOKENS, DISK_TOKENS, PEER_TOKENS = 2 * DEVICE_TOKENS, 4 * DEVICE_TOKENS, DEVICE_TOKENS
LIVE_MIXES = ("device+host", "device+host+disk", "device+host+peer")
# Of the server that lends, which keeps some for itself.
WORKER_TOKENS = PEER_TOKENS + 8192
# Questions per document beyond the first, and the least of them.
QUESTIONS_PER_DOCUMENT, LEAST_QUESTIONS = 2, 150
# The default --chunked-prefill-size.
CHUNK_TOKENS = 2048
PEER_WAIT_S = 60.0
VOCABULARY = (300, 2000)


def measure_live(mix: str, working_set: float) -> dict[str, Any]:
    """One row. working_set: of documents, over the sum of the tiers."""
    tiers = mix.split("+")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bounds-")))
        url = _start(stack, folder, tiers)
        state = get_json(url + "/hicache/state")
        sizes = {tier: int(state["tiers"][tier]["total_tokens"]) for tier in tiers if tier != "disk"}
        if "disk" in tiers:
            sizes["disk"] = DISK_TOKENS
        total = sum(sizes.values())
        number = round(working_set * total / Documents.document_tokens)
        questions = max(LEAST_QUESTIONS, QUESTIONS_PER_DOCUMENT * number)
        # With pages of one token questions are cached, too: the shortest ones, so that the formula holds.
        documents = Documents(number, questions, question_tokens=1, output_tokens=1)
        answers = _ask_all(url, documents)
        policy = get_json(url + "/server_info").get("hicache_write_policy", "")
        counters = get_json(url + "/hicache/state")["counters"]
    found = {t: sum(a[1].get(t, 0) for a in answers) for t in tiers}
    asked = documents.document_tokens * len(answers)
    hits = sum(found.values()) / asked
    formula = min(1.0, (total - CHUNK_TOKENS - 2) / documents.working_set)
    ttft = [seconds for seconds, _ in answers]
    return {
        "mix": mix,
        "set / sum": working_set,
        "policy": policy,
        **{f"{name} %": 100 * found.get(name, 0) / asked for name in TIER_NAMES[:4]},
        "hits %": 100 * hits,
        "formula %": 100 * formula,
        "of formula": hits / formula,
        "mean TTFT ms": 1e3 * float(np.mean(ttft)),
        "P99 TTFT ms": 1e3 * percentiles(ttft, 99)[0],
        # Of what the cache had, the engine computed so much anew because it expected the load to take longer.
        "computed instead of loaded": counters.get("recomputed_instead_tokens", 0),
        "sum of tokens": total,
        "kind": "measured",
    }


def _start(stack: contextlib.ExitStack, folder: Path, tiers: list[str]) -> str:
    flags = ["--model-path", "embedded", "--hicache", "--page-size", "1", "--max-total-tokens", str(DEVICE_TOKENS)]
    started = []
    if "disk" in tiers:
        # A file holds a sixteenth of the disk.
        limit_gb = DISK_TOKENS * _bytes_per_token() / 1e9
        config = {"path": str(folder / "disk"), "limit_gb": limit_gb, "segment_mb": limit_gb * 1e3 / 16}
        flags += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", json.dumps(config)]
    if "peer" in tiers:
        endpoint = f"ipc://{folder}/worker.peers"
        size_gb = PEER_TOKENS * _bytes_per_token() / 1e9
        peer = ["--peer-endpoint", endpoint, "--peer-slab-size", "1"]
        flags += ["--peer-role", "master", "--peer-size", str(size_gb), *peer]
        worker = ["--model-path", "embedded", "--context-length", "1024", "--max-total-tokens", str(WORKER_TOKENS)]
        worker += ["--peer-role", "worker", "--peer-window", "1", *peer]
        started.append(stack.enter_context(server(*worker, name="worker")))
    process, url = stack.enter_context(server(*flags))
    for each, at in (*started, (process, url)):
        wait_ready(each, at)
    if "peer" in tiers:
        _wait_for_worker(url)
    return url


def _bytes_per_token() -> int:
    """K and V in float32."""
    return 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4


def _wait_for_worker(url: str) -> None:
    """Until the master has found the worker, which lends what the first questions lack."""
    deadline = time.monotonic() + PEER_WAIT_S
    while not get_json(url + "/hicache/state")["peers"]["lenders"][0]["connected"]:
        if time.monotonic() > deadline:
            raise SystemExit("the worker is not found")
        time.sleep(0.1)


def _ask_all(url: str, documents: Documents) -> list[tuple[float, dict[str, int]]]:
    """Seconds to the only token, and tokens found by tier, of each measured question."""
    rng = np.random.default_rng(documents.seed + 1)
    texts = [rng.integers(*VOCABULARY, documents.document_tokens).tolist() for _ in range(documents.num_documents)]
    answers = []
    for number, document in enumerate(documents.about().tolist()):
        prompt = texts[document] + rng.integers(*VOCABULARY, documents.question_tokens).tolist()
        answer = _ask(url, prompt)
        if number >= documents.num_documents:
            answers.append(answer)
    return answers


def _ask(url: str, prompt: list[int]) -> tuple[float, dict[str, int]]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as response:
        meta = json.load(response)["meta_info"]
    return time.perf_counter() - begin, meta["cached_tokens_details"]
