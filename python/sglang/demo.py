"""`make demo`: conversations with a real server, once with the hierarchical cache and once with none, side by side.

It starts two servers of the embedded model as a user would and talks to both with the `openai` client. It prints for
each turn what the cache saved, and fails unless every answer is the same. The device pool holds about one
conversation, so that the others wait in host memory for their next turn. Then the cached server is stopped and
started anew, and finds the conversations on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time

from sglang.demo_common import Talk, Tiers, connect, header, run, server, summarise, system_prompt, wait_ready

TIERS: Tiers = ("device", "host", "disk")
NAMES = ("Ada", "Ben", "Cho", "Dan")
TURNS = 3
DEVICE_TOKENS = 4096


def main() -> int:
    began = time.perf_counter()
    print(
        "Starting two servers of the embedded model: one with --hicache and storage on disk, one with "
        "--disable-radix-cache ...",
        flush=True,
    )
    talk = Talk(TIERS, dict.fromkeys(NAMES, system_prompt()))
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder, contextlib.ExitStack() as stack:
        embedded = ("--model-path", "embedded")
        hicache = [*embedded, "--hicache", "--max-total-tokens", str(DEVICE_TOKENS), "--hicache-ratio", "8"]
        hicache += ["--hicache-storage-backend", "file"]
        hicache += ["--hicache-storage-backend-extra-config", json.dumps({"path": folder})]
        cold, cold_url = stack.enter_context(server(*embedded, "--disable-radix-cache"))
        with server(*hicache) as (warm, warm_url):
            wait_ready(warm, warm_url)
            wait_ready(cold, cold_url)
            print(f"ready after {time.perf_counter() - began:.1f} s at {warm_url} and {cold_url}")
            print(f"watch the cache at {warm_url}/hicache")
            print(f"device pool {DEVICE_TOKENS} tokens, host pool 8 times that; {os.cpu_count()} CPU cores\n")
            cold_client, warm_client = connect(cold_url), connect(warm_url)
            print(header(TIERS))
            for number in range(1, TURNS + 1):
                talk.turn(number, warm_client, cold_client)
            talk.turn_together(TURNS + 1, warm_client, cold_client)
        print("the cached server stops and starts anew: device and host are empty, the disk is not", flush=True)
        with server(*hicache) as (warm, warm_url):
            wait_ready(warm, warm_url)
            warm_client = connect(warm_url)
            print(header(TIERS))
            talk.turn(TURNS + 2, warm_client, cold_client)
        print()
        good = summarise(talk.pairs, TIERS, TIERS)
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    run(main)
