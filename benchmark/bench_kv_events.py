"""What KV events cost the scheduler: hashing pages, collecting events, and encoding them, which holds Python's lock.

    python -m benchmark.bench_kv_events

The tree is real, without a model. Each operation is timed with and without a recorder, by turns. Its cost is compared
with the time that the launch takes on an H200 with Llama-3.1-8B (simulated).
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import msgspec
import numpy as np
from benchmark.common import print_table, write_json
from benchmark.simulator.cost_models import pass_cost
from benchmark.simulator.profiles import HARDWARE, MODELS

from sglang.srt.disaggregation.kv_events import EventBatch
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.page_watcher import PageWatcher
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.time_units import LaunchSeq

PREFILL_TOKENS = 8192
# Requests that decode, the tokens that they have, and how many each has generated when it enters them.
NUM_DECODING, CONTEXT, INSERT_EVERY = 32, 4096, 64
VOCAB = 128_000


def run(page_size: int, watcher: PageWatcher, rng: np.random.Generator) -> dict[str, float]:
    """Seconds of the processor: of a prefill launch, of what a decode step enters, and of giving all up."""
    tree = HiRadixTree(page_size)
    tree.pages = watcher
    encoder = msgspec.msgpack.Encoder()

    def publish() -> None:
        if isinstance(watcher, KVCacheEventRecorder) and (events := watcher.take()):
            encoder.encode(EventBatch(0.0, events, 0))

    def frames(num_tokens: int) -> np.ndarray:
        return np.arange(num_tokens // page_size, dtype=np.int32)

    found = {}
    prompts = rng.integers(0, VOCAB, (NUM_DECODING, PREFILL_TOKENS), dtype=np.int32)
    began = time.thread_time()
    ends = []
    for prompt in prompts:
        ends.append(tree.insert_prefix("", None, prompt, frames(PREFILL_TOKENS), LaunchSeq(0), LaunchSeq(0)).node)
        publish()
    found["prefill"] = (time.thread_time() - began) / NUM_DECODING
    answers = rng.integers(0, VOCAB, (NUM_DECODING, INSERT_EVERY), dtype=np.int32)
    began = time.thread_time()
    for end, answer in zip(ends, answers):
        tree.insert_prefix("", end, answer, frames(INSERT_EVERY), LaunchSeq(1), LaunchSeq(1))
        publish()
    found["decode"] = (time.thread_time() - began) / INSERT_EVERY
    began = time.thread_time()
    tree.give_up(tree.victims(Tier.DEVICE, 1 << 30, stay=False), Tier.DEVICE)
    publish()
    found["evict"] = (time.thread_time() - began) / NUM_DECODING
    return found


def launch_s() -> dict[str, float]:
    model, gpu = MODELS["Llama-3.1-8B"], HARDWARE["h200"].gpu
    zero, whole = np.array([0]), np.array([PREFILL_TOKENS])
    contexts, one = np.full(NUM_DECODING, CONTEXT), np.ones(NUM_DECODING, np.int64)
    prefill = pass_cost(model, gpu, zero, whole, 1, False).seconds
    decode = pass_cost(model, gpu, contexts, one, NUM_DECODING, True).seconds
    return {"prefill": prefill, "decode": decode, "evict": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    steps, rows = launch_s(), []
    for page_size in (1, 16, 64):
        rng = np.random.default_rng(page_size)
        pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        for _ in range(args.rounds):
            pairs.append((run(page_size, PageWatcher(), rng), run(page_size, KVCacheEventRecorder(page_size), rng)))
        for what, step_s in steps.items():
            cost = median(with_[what] - without[what] for without, with_ in pairs)
            row: dict[str, Any] = {
                "page size": page_size,
                "what": what,
                "without, ms (measured)": 1e3 * median(without[what] for without, _ in pairs),
                "events, ms (measured)": 1e3 * cost,
                "launch, ms (simulated)": 1e3 * step_s,
                "events / launch, %": 100 * cost / step_s,
            }
            rows.append(row)
    print_table(f"KV events, {PREFILL_TOKENS} tokens of a prefill, {NUM_DECODING} requests that decode", rows)
    write_json("bench_kv_events", vars(args), rows)


if __name__ == "__main__":
    main()
