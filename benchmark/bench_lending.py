"""What a master costs a worker that has work of its own: time to first token and cached tokens of second turns.

Real servers on the CPU with the embedded model. Workers are alike and take turns, round by round: one alone, one with
an idle master, one with two, and one whose master has borrowed before and is idle now. A round is twelve
conversations that are new to it: all first turns, then all second ones, whose prompts are found in the cache if it
was kept. All twelve fit the worker's device. Ratios are to the worker that is alone, in the same round.

    PYTHONPATH=. python benchmark/bench_lending.py [--rounds N] [--window S]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.common import print_table, write_json

from sglang.demo_common import get_json, server, wait_ready

CONVERSATIONS, PROMPT, MORE = 12, 800, 64
# In slabs of 1 MiB, which hold 256 tokens each; the conversations of a round are about 10,600 tokens.
WORKER = "--model-path embedded --max-total-tokens 16384 --context-length 1024 --page-size 4 --peer-slab-size 1"
MASTER = (
    "--model-path embedded --max-total-tokens 2048 --context-length 1024 --page-size 1 --hicache --hicache-ratio 0.1 "
    "--peer-role master --peer-slab-size 1 --peer-size 0.06"
)
# What a master does that has been busy: more than its device has room for, twice.
BUSY_PROMPTS = 10


@dataclass(frozen=True)
class Arm:
    name: str
    num_masters: int
    # Whether the masters have had requests before.
    were_busy: bool = False


ARMS = (Arm("alone", 0), Arm("an idle master", 1), Arm("two idle masters", 2), Arm("a master that was busy", 1, True))


def generate(url: str, ids: list[int], max_new_tokens: int) -> tuple[list[int], int, float]:
    """The answer, the cached tokens of the prompt, and the seconds until all of it was there."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    data = json.dumps({"input_ids": ids, "sampling_params": params}).encode()
    request = urllib.request.Request(url + "/generate", data, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        reply = json.load(response)
    return reply["output_ids"], reply["meta_info"]["cached_tokens"], time.perf_counter() - begin


def prompt(rng: np.random.Generator, n: int) -> list[int]:
    return rng.integers(300, 1800, n).tolist()


def round_of(workers: dict[str, str], seed: int) -> dict[str, tuple[list[int], list[float]]]:
    """workers: arm -> URL. Of the second turns of each: the cached tokens, and the seconds to the first token. Each
    turn is asked of all workers one after the other, so that what else the machine does hits all alike."""
    histories: dict[str, list[list[int]]] = {name: [] for name in workers}
    found: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in workers}
    rngs = {name: np.random.default_rng([seed, i]) for i, name in enumerate(workers)}
    for _ in range(CONVERSATIONS):
        for name, url in workers.items():
            first = prompt(rngs[name], PROMPT)
            histories[name].append(first + generate(url, first, 16)[0])
    for i in range(CONVERSATIONS):
        names = list(workers)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            second = histories[name][i] + prompt(rngs[name], MORE)
            _, cached, seconds = generate(workers[name], second, 1)
            found[name][0].append(cached)
            found[name][1].append(seconds)
    return found


def slabs_of(url: str) -> dict[str, int]:
    return get_json(url + "/hicache/state")["peers"]["slabs"]


def start(stack: contextlib.ExitStack, folder: Path, window_s: float) -> dict[str, tuple[str, list[str]]]:
    """Arm -> URLs of its worker and its masters."""
    parts, urls = [], {}
    for i, arm in enumerate(ARMS):
        endpoint = f"ipc://{folder}/w{i}"
        lends = f"--peer-role worker --peer-window {window_s:g} --peer-endpoint {endpoint}"
        worker = stack.enter_context(server(*WORKER.split(), *lends.split(), name=f"worker {arm.name}"))
        masters = [
            stack.enter_context(
                server(*MASTER.split(), "--peer-endpoint", endpoint, name=f"master {j} of {arm.name}")
            )
            for j in range(arm.num_masters)
        ]
        parts += [worker, *masters]
        urls[arm.name] = (worker[1], [url for _, url in masters])
    for part, url in parts:
        wait_ready(part, url)
    return urls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=10.0, help="--peer-window of the workers, in seconds")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lending-") as folder, contextlib.ExitStack() as stack:
        urls = start(stack, Path(folder), args.window)
        # At first a worker keeps its whole pool for the window.
        time.sleep(args.window + 5)
        for arm in ARMS:
            for master in urls[arm.name][1] if arm.were_busy else ():
                rng = np.random.default_rng(0)
                prompts = [prompt(rng, PROMPT) for _ in range(BUSY_PROMPTS)]
                for _ in range(4):
                    for each in prompts:
                        generate(master, each, 1)
        workers = {name: worker for name, (worker, _) in urls.items()}
        for number in range(args.rounds):
            home = {name: slabs_of(url)["home"] for name, url in workers.items()}
            found = round_of(workers, number)
            for name, (cached, seconds) in found.items():
                ratios = [mine / alone for mine, alone in zip(seconds, found["alone"][1])]
                rows.append(
                    {
                        "round": number,
                        "worker": name,
                        "slabs at home before": home[name],
                        "after": slabs_of(workers[name])["home"],
                        "cached tokens": statistics.median(cached),
                        "of alone": round(sum(cached) / sum(found["alone"][0]), 3),
                        "ms to first token": round(1e3 * statistics.median(seconds), 2),
                        "over alone": round(statistics.median(ratios), 3),
                    }
                )
    print_table("Second turns, medians of twelve conversations", rows)
    summary = [
        {
            "worker": arm.name,
            "cached, of alone": statistics.median(row["of alone"] for row in rows if row["worker"] == arm.name),
            "time, over alone": statistics.median(row["over alone"] for row in rows if row["worker"] == arm.name),
        }
        for arm in ARMS
    ]
    print_table("Medians over rounds", summary)
    write_json("bench_lending", vars(args), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
