"""The time of operations of the radix tree and the frame table: match, insert, lock and evict in a full cache.

Owns nothing outside the process; no model, thread or tensor. Prompts take turns, so that their keys come from memory
and not from the CPU's cache of the last repetition. Aims: 10.5 K tokens matched in 20 µs, 20 K inserted in 0.3 ms.

    python benchmark/bench_tree.py [--quick]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import print_table, summary, time_each, write_json

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_batch import ReqHold
from sglang.srt.managers.transfer_ledger import Pools, TransferLedger
from sglang.srt.mem_cache.block_history import BlockHistory
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node, Receipt
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.time_units import LaunchClock

VOCAB = 128_000
LENGTHS = {"128": 128, "1 K": 1024, "10.5 K": 10_752, "20 K": 20_480, "128 K": 131_072}
# Prompts of each length that take turns.
NUM_PROMPTS = {"128": 8, "1 K": 8, "10.5 K": 4, "20 K": 4, "128 K": 1}
PATH_NODES = 25
FILLER_PREFIX, FILLER_TAIL, TAILS_PER_PREFIX = 2048, 1024, 64


@dataclass
class Prompt:
    tokens: np.ndarray
    end: Node


class Cache:
    """A tree with its frame table, filled with num_tokens tokens: prompts to measure on, then other conversations."""

    def __init__(self, num_tokens: int, page_size: int, seed: int) -> None:
        self.page_size = page_size
        self.rng = np.random.default_rng(seed)
        spare = 2 * LENGTHS["128 K"]
        self.table = FrameTable((num_tokens + spare) // page_size)
        self.tree = HiRadixTree(page_size)
        launches = LaunchClock()
        launches.issue()
        launches.complete(1)
        ledger = TransferLedger(self.tree, Pools(self.table), launches, page_bytes=1)
        self.controller = HiCacheController(ledger)
        self.now = 0
        self.inside = {name: [self.prompt(n, 1) for _ in range(NUM_PROMPTS[name])] for name, n in LENGTHS.items()}
        self.paths = {
            name: [self.prompt(n, PATH_NODES) for _ in range(NUM_PROMPTS[name])]
            for name, n in LENGTHS.items()
            if n >= PATH_NODES * page_size
        }
        prefix = None
        count = 0
        while self.tree.resident_pages(Tier.DEVICE) < num_tokens // page_size:
            if count % TAILS_PER_PREFIX == 0:
                prefix = self.insert(None, self.tokens(FILLER_PREFIX))
            self.insert(prefix, self.tokens(FILLER_TAIL))
            count += 1
        # The prompts are in use, so that eviction meets the other conversations first.
        for prompts in [*self.inside.values(), *self.paths.values()]:
            for prompt in prompts:
                self.tree.unlock(self.tree.lock_node(prompt.end, self.now + 1), self.now + 1, -1)

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, VOCAB, n, dtype=np.int32)

    def insert(self, below: Node | None, tokens: np.ndarray) -> Node:
        self.now += 1
        frames = self.table.allocate(len(tokens) // self.page_size)
        assert frames is not None
        result = self.tree.insert_prefix("", below, tokens, frames, -1, self.now)
        self.table.transition(frames, FrameState.HELD, FrameState.CACHED)
        return result.node

    def prompt(self, n: int, num_nodes: int) -> Prompt:
        tokens = self.tokens(n)
        step = n // num_nodes // self.page_size * self.page_size
        ends = [step * i for i in range(1, num_nodes)] + [n]
        node, start = None, 0
        for end in ends:
            node = self.insert(node, tokens[start:end])
            start = end
        assert node is not None
        return Prompt(tokens, node)

    def scatter(self) -> None:
        """Bring the free list into the state of a long-running pool's: no runs."""
        frames = self.table.allocate(self.table.num_free)
        assert frames is not None
        self.rng.shuffle(frames)
        self.table.free_after(frames, FrameState.HELD, -1)
        self.table.reap(0)
        self.table.take_freed()


def match_rows(cache: Cache, rounds: int) -> list[dict[str, Any]]:
    rows = []
    match = cache.tree.match

    def measure(what: str, name: str, queries: list[np.ndarray], expected: list[int]) -> None:
        for query, total in zip(queries, expected):
            assert match("", query).total_len == total, "the benchmark measures something else"
        repeat = max(1, rounds // len(queries))
        samples = time_each(lambda tokens: match("", tokens), queries, repeat)
        rows.append({"what": what, "prompt": name, **summary(samples)})

    # As a request's: a copy, whose bytes differ in address from the key's.
    for name, prompts in cache.inside.items():
        queries = [p.tokens.copy() for p in prompts]
        measure("match in one node", name, queries, [len(q) for q in queries])
    for name, prompts in cache.paths.items():
        queries = [p.tokens.copy() for p in prompts]
        measure(f"match over {PATH_NODES} nodes", name, queries, [len(q) for q in queries])
    num_nodes = cache.tree.num_nodes
    for name, prompts in cache.inside.items():
        half = LENGTHS[name] // 2
        queries = [np.concatenate([p.tokens[:half], p.tokens[:half] ^ 1]) for p in prompts]
        measure("match that ends inside a node", name, queries, [half] * len(queries))
    assert cache.tree.num_nodes == num_nodes
    return rows


def queue_row(cache: Cache, rounds: int) -> list[dict[str, Any]]:
    """Match all of a long queue, each request ending at a place of its own inside some node."""
    long = [p for name in ("10.5 K", "20 K") for p in cache.inside[name]]
    queue = [
        np.concatenate([p.tokens[: int(cut)], cache.tokens(64)])
        for p, cut in zip(long * 250, cache.rng.integers(1024, 10_000, 2000))
    ]

    def match_all(_: Any) -> None:
        for tokens in queue:
            cache.tree.match("", tokens)

    return [{"what": "match a queue of 2,000", "prompt": "1-10 K", **summary(time_each(match_all, [0], rounds))}]


def insert_as_scheduler(
    cache: Cache, tokens: np.ndarray, receipt: Receipt, inserted_len: int
) -> tuple[ReqHold, np.ndarray]:
    """The part of `Admission` and `KVCache.insert_prefix` that works on tree and frame table, for one prompt, on top
    of a locked match."""
    tree, table = cache.tree, cache.table
    frames = table.allocate((len(tokens) - inserted_len) // cache.page_size, FrameState.HELD)
    assert frames is not None
    hold = ReqHold(1, receipt, inserted_len)
    hold.extend(frames)
    result = tree.insert_prefix("", receipt.node, tokens[inserted_len:], hold.frames, 0, cache.now)
    hold.receipt = tree.lock_node(result.node, cache.now)
    tree.unlock(receipt, cache.now, -1)
    for node in result.created:
        created = node.frames[Tier.DEVICE]
        assert created is not None
        table.transition(created, FrameState.HELD, FrameState.CACHED)
    hold.pass_on(result.end // cache.page_size, result.end)
    return hold, frames


def insert_rows(cache: Cache, rounds: int, what: str) -> list[dict[str, Any]]:
    rows = []
    clock = time.perf_counter

    def measure(label: str, name: str, make: Callable[[], np.ndarray]) -> None:
        samples = []
        for _ in range(rounds):
            tokens = make()
            cache.now += 1
            match = cache.tree.match("", tokens)
            receipt = cache.tree.lock(match, cache.now)
            start = clock()
            hold, _frames = insert_as_scheduler(cache, tokens, receipt, match.total_len)
            samples.append(clock() - start)
            end = hold.receipt.node
            cache.tree.unlock(hold.receipt, cache.now, -1)
            cache.controller.drop(end, Tier.DEVICE)
            cache.table.reap(1)
            cache.table.take_freed()
        rows.append({"what": label, "prompt": name, **summary(samples)})

    for name, n in LENGTHS.items():
        measure(f"insert a new prompt, {what}", name, lambda n=n: cache.tokens(n))  # type: ignore[misc]
    shared = cache.inside["20 K"][0].tokens[:10_240]
    measure(f"insert with 10 K shared, {what}", "10.5 K", lambda: np.concatenate([shared, cache.tokens(512)]))
    return rows


def lock_rows(cache: Cache, rounds: int) -> list[dict[str, Any]]:
    def lock_and_unlock(prompt: Prompt) -> None:
        cache.tree.unlock(cache.tree.lock_node(prompt.end, cache.now), cache.now, -1)

    prompts = cache.paths["10.5 K"]
    samples = time_each(lock_and_unlock, prompts, max(1, rounds // len(prompts)))
    return [{"what": f"lock and unlock {PATH_NODES} nodes", "prompt": "10.5 K", **summary(samples)}]


def evict_rows(cache: Cache) -> list[dict[str, Any]]:
    """Evict 1,000 pages at a time until a quarter of the cache is gone; every second time remember the blocks that
    go, as a server does. It comes last, because it changes the cache."""
    clock = time.perf_counter
    ways = {"evict 1,000 pages": cache.tree.lost, "evict 1,000 pages, remembered": BlockHistory(cache.page_size).note}
    samples: dict[str, list[float]] = {what: [] for what in ways}
    start_pages = cache.tree.resident_pages(Tier.DEVICE)
    while cache.tree.resident_pages(Tier.DEVICE) > start_pages * 3 // 4:
        for what, lost in ways.items():
            cache.tree.lost = lost
            start = clock()
            cache.controller.evict(Tier.DEVICE, 1000)
            samples[what].append(clock() - start)
            cache.table.take_freed()
    return [{"what": what, "prompt": "", **summary(times)} for what, times in samples.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 M tokens, few repetitions")
    parser.add_argument("--tokens", type=int, nargs="*", help="cached tokens, default 1 and 10 million")
    parser.add_argument("--page-sizes", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sizes = args.tokens or ([1_000_000] if args.quick else [1_000_000, 10_000_000])
    rounds = 40 if args.quick else 400
    report = []
    for num_tokens in sizes:
        for page_size in args.page_sizes:
            cache = Cache(num_tokens, page_size, args.seed)
            # Otherwise a garbage collection of the whole tree would fall into some sample.
            gc.collect()
            gc.freeze()
            rows = match_rows(cache, rounds) + queue_row(cache, max(3, rounds // 40)) + lock_rows(cache, rounds)
            rows += insert_rows(cache, rounds // 2, "free frames in runs")
            cache.scatter()
            rows += insert_rows(cache, rounds // 2, "free frames scattered")
            num_nodes = cache.tree.num_nodes
            rows += evict_rows(cache)
            cache.tree.check_invariants()
            title = f"{num_tokens / 1e6:g} M cached tokens, page size {page_size}, {num_nodes:,} nodes"
            print_table(title, rows)
            report += [{"cached_tokens": num_tokens, "page_size": page_size, "nodes": num_nodes, **r} for r in rows]
            gc.unfreeze()
    write_json("bench_tree", {"seed": args.seed, "rounds": rounds, "path_nodes": PATH_NODES}, report)


if __name__ == "__main__":
    main()
