"""Prompts from a remote store over a slow network, on real servers: first tokens, and the cost for a decoding
request.

    python benchmark/bench_remote.py [--rates 0.05,0.2,1] [--rounds N] [--tokens N]

The embedded model, one server per variant. All servers are up, and one is asked at a time, so that ratios hold on a
noisy machine. In each round a client streams one long answer from a server. Meanwhile it sends prompts, one by one,
whose KV only the store has (--hicache-bypass-local). Measured are the time to first token of the prompts, and the
time per output token of the long answer while they are on their way. *alone*: without prompts.

    recompute       no cache at all
    raw             fetched without compression
    in the engine   compressed without loss, the proxy's stages on threads of the scheduler process
    synchronous     compressed, a proxy, but the scheduler waits for each fetch ("no AF" in ShadowServe 6.4)
    proxy           compressed, a proxy of its own, fetched while others decode

The network is a token bucket in the proxy's receiving stage (the emulated engine), the store a Redis server on this
machine. Server, proxy, store and client share its cores. A proxy on cores of its own would cost the decoder less.
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
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import print_table, write_json

from sglang.srt.offload.store.embedded import EmbeddedStore

VARIANTS: dict[str, dict[str, Any] | None] = {
    "recompute": None,
    "raw": {"codec": "raw"},
    "in the engine": {"in_process": True},
    "synchronous": {"synchronous": True},
    "proxy": {},
}
NUM_PROMPTS = 3
LONG_ANSWER = 4000


class Server:
    def __init__(self, config: dict[str, Any] | None, log: Path, context: int) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        flags = ["--max-total-tokens", str(4 * context), "--random-seed", "1"]
        if config is None:
            flags += ["--disable-radix-cache"]
        else:
            flags += ["--hicache", "--hicache-bypass-local", "--hicache-storage-prefetch-policy", "wait_complete"]
            flags += ["--hicache-load-or-recompute", "off", "--hicache-storage-backend", "remote"]
            flags += ["--hicache-storage-backend-extra-config", json.dumps(config)]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "embedded", "--port", str(self.port)]
        self.log = open(log, "w")  # noqa: SIM115
        # One core computes; the other one serves everything else.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, *flags], stdout=self.log, stderr=self.log, env=env)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)

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
        times = np.array([t for t in self.times if begin <= t <= end])
        return np.diff(times)

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
        "tpot": float(np.mean(busy)) if len(busy) else float("nan"),
        "longest": float(np.max(busy)) if len(busy) else float("nan"),
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
    parser.add_argument("--rates", default="0.05,0.2,1", help="of the network, in 10^9 bits per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=3072, help="per prompt")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 2000, args.tokens).tolist() for _ in range(NUM_PROMPTS)]
    # The last token is always computed, and a part of a block is not stored.
    hits = (args.tokens - 1) // 256 * 256
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = EmbeddedStore.start(folder / "store", 8 << 30)
        url = f"unix://{store.address.endpoints[0].path}"
        try:
            for codec in ("raw", "lossless"):
                server = Server(
                    {"url": url, "codec": codec}, folder / f"fill-{codec}", args.tokens + LONG_ANSWER + 128
                )
                fill(server, prompts, hits)
                server.stop()
            for rate in [float(r) for r in args.rates.split(",")]:
                shaped = {"engine": "emulated", "rates_gbps": {"receive": rate}}
                servers = {
                    what: Server(
                        None if config is None else {"url": url, "proxy": shaped, **config},
                        folder / f"log-{rate}-{what.replace(' ', '-')}",
                        args.tokens + LONG_ANSWER + 128,
                    )
                    for what, config in VARIANTS.items()
                }
                samples: dict[str, list[dict[str, float]]] = {what: [] for what in servers}
                for i in range(args.rounds + 1):
                    for what, server in servers.items():
                        sample = measure(server, prompts, 0 if what == "recompute" else hits)
                        if i:  # the first round warms up
                            samples[what].append(sample)
                for server in servers.values():
                    server.stop()
                rows += rows_of(rate, samples)
        finally:
            store.stop()
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
            "times proxy's": float(np.median(column(what, "ttft") / column("proxy", "ttft"))),
            "TPOT alone ms": 1e3 * float(np.median(column(what, "tpot alone"))),
            "TPOT ms": 1e3 * float(np.median(column(what, "tpot"))),
            "of alone": float(np.median(column(what, "tpot") / column(what, "tpot alone"))),
            "longest gap ms": 1e3 * float(np.median(column(what, "longest"))),
        }
        for what in samples
    ]


if __name__ == "__main__":
    main()
