"""Prompts from a remote store over a slow network, on real servers: first tokens, and the cost for a decoding
request.

    PYTHONPATH=test python benchmark/bench_remote.py [--rates 1,10] [--rounds N] [--tokens N]

SmolLM2-135M in float32, one server per variant. All servers are up, and one is asked at a time, so that ratios hold
on a noisy machine. In each round a client streams one long answer from a server. Meanwhile it sends prompts, one by
one, whose KV (46 KB per token) only the store has (--hicache-bypass-local). Measured are the time to first token of
the prompts, and the time per output token of the long answer while they are on their way. *alone*: without prompts.

    raw             fetched without compression, by a proxy
    lossless        compressed, by a proxy of its own, fetched while others decode
      in the engine   the same, with the proxy's stages on threads of the scheduler process
      synchronous     a proxy, but the scheduler waits for each fetch ("no AF" in ShadowServe 6.4)
    binned          compressed with loss, by a proxy; and in the engine
    recompute       no cache at all; one prompt, once

The store is a Redis server in another network namespace, behind a link that tc shapes. The scheduler process computes
with one thread on core 0. Where a proxy is a process of its own, its threads are on core 1, with store, client and
the server's other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from common import print_table, write_json

from sglang.srt.configs.smollm2_model import ensure_smollm2
from sglang.srt.managers.startup.storage import DEFAULT_BLOCK_TOKENS
from support.network import elsewhere
from support.store_servers import redis_elsewhere

VARIANTS: dict[str, dict[str, Any]] = {
    "raw": {"codec": "raw"},
    "lossless": {},
    "lossless, in the engine": {"in_process": True},
    "lossless, synchronous": {"synchronous": True},
    "binned": {"codec": "binned"},
    "binned, in the engine": {"codec": "binned", "in_process": True},
}
NUM_PROMPTS = 2
LONG_ANSWER = 2000
ENGINE_CORE, OTHER_CORE = 0, 1


class Server:
    def __init__(self, config: dict[str, Any] | None, log: Path, context: int) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        flags = ["--max-total-tokens", str(context), "--dtype", "float32", "--random-seed", "1"]
        if config is None:
            flags += ["--disable-radix-cache"]
        else:
            # Fetches fill at most half of the host.
            flags += ["--hicache", "--hicache-ratio", "2"]
            flags += ["--hicache-bypass-local", "--hicache-storage-prefetch-policy", "wait_complete"]
            flags += ["--hicache-load-or-recompute", "off", "--hicache-storage-backend", "remote"]
            flags += ["--hicache-storage-backend-extra-config", json.dumps(config)]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "smollm2", "--port", str(self.port)]
        self.log = open(log, "w")  # noqa: SIM115
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, *flags], stdout=self.log, stderr=self.log, env=env)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=600)
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                if self.http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        for process in (parent := psutil.Process(self.process.pid), *parent.children(recursive=True)):
            core = ENGINE_CORE if "sglang.srt.managers.scheduler_process" in process.cmdline() else OTHER_CORE
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})

    def first_token(self, ids: list[int]) -> tuple[float, int]:
        """Seconds, and tokens that came from the store."""
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        began = time.perf_counter()
        reply = self.http.post("/generate", json={"input_ids": ids, "sampling_params": params}).json()
        return time.perf_counter() - began, reply["meta_info"]["cached_tokens_details"].get("remote", 0)

    def stored(self) -> int:
        return self.http.get("/hicache/state").json()["counters"].get("backuped_tokens", 0)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


class LongAnswer:
    """A stream whose tokens' times are noted, until `stop`."""

    def __init__(self, server: Server) -> None:
        self.times: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server.port,))
        self._thread.start()

    def _read(self, port: int) -> None:
        params = {"temperature": 0, "max_new_tokens": LONG_ANSWER, "ignore_eos": True}
        body = {"input_ids": list(range(300, 364)), "sampling_params": params, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/generate", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                if self._stopped.is_set():
                    return

    def per_token(self, begin: float, end: float) -> np.ndarray:
        """Seconds between tokens, from the last one before begin to the first one after end."""
        while self.times[-1] < end:
            time.sleep(0.01)
        times = np.array(self.times)
        return np.diff(times[np.searchsorted(times, begin, "right") - 1 : np.searchsorted(times, end) + 1])

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def measure(server: Server, prompts: list[list[int]], hits: int) -> dict[str, float]:
    answer = LongAnswer(server)
    while len(answer.times) < 8:
        time.sleep(0.01)
    begin = time.perf_counter()
    while len(answer.times) < 40:
        time.sleep(0.01)
    alone = answer.per_token(begin, time.perf_counter())
    begin, ttft = time.perf_counter(), []
    for ids in prompts:
        seconds, found = server.first_token(ids)
        assert found >= hits, f"only {found} of {hits} tokens came from the store"
        ttft.append(seconds)
    busy = answer.per_token(begin, time.perf_counter())
    answer.stop()
    return {
        "ttft": float(np.mean(ttft)),
        "tpot alone": float(np.mean(alone)),
        "tpot": float(np.mean(busy)),
        "longest": float(np.max(busy)),
    }


def fill(server: Server, prompts: list[list[int]], num_tokens: int) -> None:
    """Compute the prompts, one after another, until the store has them."""
    for ids in prompts:
        before = server.stored()
        server.first_token(ids)
        deadline = time.monotonic() + 120
        while server.stored() < before + num_tokens:
            assert time.monotonic() < deadline, "the store does not get the prompt"
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1,10", help="of the link, in 10^9 bits per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6145, help="per prompt")
    args = parser.parse_args()
    ensure_smollm2()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(300, 40_000, args.tokens).tolist() for _ in range(NUM_PROMPTS)]
    # The last token is always computed, and a part of a block is not stored.
    hits = (args.tokens - 1) // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS
    context = args.tokens + LONG_ANSWER + 128
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(elsewhere(10_000))
        address = stack.enter_context(redis_elsewhere(there))
        url = f"redis://{address.endpoints[0]}"
        for codec in ("raw", "lossless", "binned"):
            server = Server({"url": url, "codec": codec}, folder / f"fill-{codec}", context)
            fill(server, prompts, hits)
            server.stop()
        servers = {
            what: Server({"url": url, **config}, folder / f"log-{i}", context)
            for i, (what, config) in enumerate(VARIANTS.items())
        }
        for server in servers.values():
            stack.callback(server.stop)
        for rate in [float(r) for r in args.rates.split(",")]:
            there.limit(1000 * rate)
            samples: dict[str, list[dict[str, float]]] = {what: [] for what in servers}
            for i in range(args.rounds + 1):
                for what, server in servers.items():
                    sample = measure(server, prompts, hits)
                    if i:  # the first round warms up
                        samples[what].append(sample)
            rows += rows_of(rate, samples)
            print_table(f"At {rate:g} Gbit/s", rows_of(rate, samples))
        server = Server(None, folder / "log-recompute", context)
        stack.callback(server.stop)
        recomputed = {"lossless": [measure(server, prompts[:1], 0)]}
        rows += [{**row, "variant": "recompute"} for row in rows_of(0, recomputed)]
    print_table(f"Prompts of {args.tokens} tokens from a remote store, beside one answer", rows)
    write_json("remote", vars(args), rows)


def rows_of(rate: float, samples: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    def column(what: str, key: str) -> np.ndarray:
        return np.array([s[key] for s in samples[what]])

    return [
        {
            "Gbit/s": rate,
            "variant": what,
            "TTFT ms": 1e3 * float(np.median(column(what, "ttft"))),
            "times lossless": float(np.median(column(what, "ttft") / column("lossless", "ttft"))),
            "TPOT alone ms": 1e3 * float(np.median(column(what, "tpot alone"))),
            "TPOT ms": 1e3 * float(np.median(column(what, "tpot"))),
            "of alone": float(np.median(column(what, "tpot") / column(what, "tpot alone"))),
            "longest gap ms": 1e3 * float(np.median(column(what, "longest"))),
        }
        for what in samples
    ]


if __name__ == "__main__":
    main()
