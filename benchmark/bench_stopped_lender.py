"""What a strict lender that stops costs the requests of a master.

A worker, a process of its own, copies for a server (the embedded model) whose device and host have room for less
than two of the prompts. The prompts take turns, so that each comes from the worker. Then the worker is stopped
(SIGSTOP), and the same prompts come again, at once or after a while. Then it goes on. Times are those of whole
requests of one token.

    python benchmark/bench_stopped_lender.py [--quick] [--apart SECONDS]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import print_table, write_json

from support.all_tiers import Lender, borrowed_tokens
from support.server_fixture import Server

FLAGS = (
    "--hicache --max-total-tokens 600 --page-size 1 --hicache-ratio 0.1 "
    "--peer-role master --peer-slab-size 1 --peer-size 0.05"
)
NUM_SLABS, NUM_PROMPTS, DEADLINE_S = 8, 3, 120.0


def prompt(seed: int) -> list[int]:
    return [300 + (seed * 1000 + i * 7) % 1500 for i in range(400)]


def ask(server: Server, number: int) -> tuple[float, int]:
    """Seconds, and how many tokens came from the worker."""
    body = {
        "input_ids": prompt(number % NUM_PROMPTS),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_cached_tokens_details": True,
    }
    start = time.perf_counter()
    reply = server.post("/generate", body).json()
    return time.perf_counter() - start, reply["meta_info"]["cached_tokens_details"].get("peer", 0)


def borrows(server: Server) -> bool:
    """Whether the server has borrowed room for most of the prompts, after it was asked for them: it borrows what it
    lacks."""
    for number in range(NUM_PROMPTS):
        ask(server, number)
    return borrowed_tokens(server) >= 700


def wait_until(holds: Callable[[], bool], what: str) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() < start + DEADLINE_S, f"waited in vain for {what}"
        time.sleep(0.02)
    return time.monotonic() - start


def row(what: str, asked: list[tuple[float, int]]) -> dict[str, Any]:
    seconds = [each for each, _ in asked]
    return {
        "what": what,
        "requests": len(asked),
        "first, ms": seconds[0] * 1e3,
        "slowest of the others, ms": max(seconds[1:]) * 1e3,
        "tokens from the worker": sum(found for _, found in asked),
    }


def measure(requests: int, stopped_s: float, apart_s: float) -> list[dict[str, Any]]:
    """stopped_s: how long the worker is stopped before the first request. apart_s: the pause between requests."""

    def ask_all() -> list[tuple[float, int]]:
        asked = []
        for i in range(requests):
            asked.append(ask(server, i))
            time.sleep(apart_s)
        return asked

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        lender = Lender(Path(folder) / "lender", NUM_SLABS, strict=True)
        try:
            with Server(*FLAGS.split(), "--peer-endpoint", lender.endpoint) as server:
                wait_until(lambda: borrows(server), "slabs")
                wait_until(lambda: min(ask(server, i)[1] for i in range(NUM_PROMPTS)) > 200, "prompts of the worker")
                rows.append(row("healthy", ask_all()))
                lender.pause()
                time.sleep(stopped_s)
                rows.append(row(f"stopped {stopped_s:g} s before", ask_all()))
                lender.resume()
                seconds = wait_until(lambda: borrows(server), "slabs")
                wait_until(lambda: min(ask(server, i)[1] for i in range(NUM_PROMPTS)) > 200, "prompts of the worker")
                again = row(f"goes on: slabs are used after {seconds:.1f} s", ask_all())
                rows.append(again)
        finally:
            lender.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few requests")
    parser.add_argument("--apart", type=float, default=0.0, help="seconds between requests")
    args = parser.parse_args()
    requests = 6 if args.quick else 20
    rows = [each for stopped_s in (0.0, 4.0) for each in measure(requests, stopped_s, args.apart)]
    print_table("A strict lender that stops", rows)
    write_json("bench_stopped_lender", vars(args), rows)


if __name__ == "__main__":
    main()
