"""The cost of one step of the scheduler: decoding with 1, 32 and 256 running requests, alone and with 2,000 queued;
the cost of ordering a queue of long prompts whose documents lie on the host; and that of what storage answers, beside
such a queue.

    python benchmark/bench_scheduler.py [--steps N] [--only-storage]

No model and no links: every launch completes at once with made-up tokens, so that only the state machine is timed.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import numpy as np
from common import print_table, summary, write_json

from sglang.srt.managers.io_struct import PromptKeys, TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.transfer import D2H, EXEC, FETCH, H2D, PROBE, STORE, Tier
from sglang.srt.model_executor.launch import Launch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import Seconds

PROMPT_LEN = 256
MAX_NEW = 3000


def requests(prefix: str, n: int, length: int, rng: np.random.Generator) -> tuple[TokenizedGenerateReqInput, ...]:
    params = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0, ignore_eos=True)
    return tuple(
        TokenizedGenerateReqInput(
            rid=f"{prefix}{i}",
            input_ids=ids_to_bytes(rng.integers(0, 30_000, length)),
            sampling_params=params,
            stream=True,
        )
        for i in range(n)
    )


def measure(running: int, queued: int, queue_waits_for: str, page_size: int, steps: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    room = (PROMPT_LEN + steps + 200) * running // page_size
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=page_size,
            num_device_pages=room,
            num_host_pages=0,
            page_bytes=1,
            context_len=room * page_size,
            # The queue waits for a slot, or finds slots and no memory.
            max_running_requests=running if queue_waits_for == "slot" else running + 8,
            chunked_prefill_size=1 << 30,
            max_prefill_tokens=1 << 30,
            new_token_ratio=0.0,
        )
    )
    done = {EXEC: 0, H2D: 0, D2H: 0}
    out: list[Launch] = []
    samples = []
    gc.collect()
    gc.freeze()
    for step in range(steps + 50):
        results = {}
        if len(out) == 2:
            launch = out.pop(0)
            done[EXEC] = launch.seq + 1
            results = {launch.seq: np.full(int(launch.samples.sum()), 5, np.int32).tobytes()}
        new: tuple[TokenizedGenerateReqInput, ...] = ()
        if step == 0:
            new = requests("run", running, PROMPT_LEN, rng)
        elif step == 10:
            # First come, first served: a request that does not fit keeps all behind it waiting.
            head = PROMPT_LEN if queue_waits_for == "slot" else (room - 4) * page_size
            new = requests("head", min(queued, 1), head, rng) + requests("wait", queued - 1, PROMPT_LEN, rng)
        inputs = StepInputs(step=step, now=0.0, new=new, done=dict(done), results=results)
        start = time.perf_counter()
        decision = scheduler.step(inputs)
        samples.append(time.perf_counter() - start)
        if decision.launch is not None:
            out.append(decision.launch)
    assert len(scheduler.queues.running) == running and len(scheduler.queues.waiting) == queued
    gc.unfreeze()
    return {
        "running": running,
        "queued": queued,
        "queue waits for": queue_waits_for if queued else "-",
        "page size": page_size,
        **summary(samples[50:]),
    }


def on_the_host(scheduler: Scheduler, tokens: np.ndarray) -> None:
    """Enter a document that was computed, backed up and evicted from the device."""
    tree, controller, device = scheduler.cache.tree, scheduler.cache.controller, scheduler.cache.device
    frames = device.allocate(len(tokens) // scheduler.page_size)
    assert frames is not None
    node = tree.insert_prefix("", None, tokens, frames, -1, 0).node
    device.transition(frames, FrameState.HELD, FrameState.CACHED)
    ticket = controller.begin_backup(node)
    assert ticket is not None
    controller.commit(ticket)
    controller.evict(Tier.DEVICE, len(frames))


def measure_formation(queued: int, page_size: int) -> list[dict[str, object]]:
    """A queue over 100 documents of 20 K tokens each, of which the device holds ten. Loads never arrive."""
    rng = np.random.default_rng(0)
    length, num_documents = 20_480, 100
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=page_size,
            num_device_pages=10 * (length + 200) // page_size,
            num_host_pages=(num_documents + 1) * length // page_size,
            page_bytes=1,
            context_len=2 * length,
            max_running_requests=256,
            max_filling_ratio=1.0,
            new_token_ratio=0.0,
        )
    )
    documents = [rng.integers(0, 30_000, length).astype(np.int32) for _ in range(num_documents)]
    for document in documents:
        on_the_host(scheduler, document)
    scheduler.cache.ledger.take_ops()
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    new = []
    for i in range(queued):
        document = documents[rng.integers(num_documents)]
        ids = ids_to_bytes(np.concatenate((document, rng.integers(0, 30_000, 64).astype(np.int32))))
        new.append(TokenizedGenerateReqInput(rid=f"r{i}", input_ids=ids, sampling_params=params))
    first_of: dict[str, list[float]] = {}
    clock = time.perf_counter

    def timed(name: str, work: Callable[[], object]) -> object:
        start = clock()
        result = work()
        first_of.setdefault(name, []).append(clock() - start)
        return result

    done = {EXEC: 0, H2D: 0, D2H: num_documents}

    def step(new: tuple[TokenizedGenerateReqInput, ...] = ()) -> object:
        return scheduler.step(StepInputs(step=0, now=0.0, new=new, done=dict(done)))

    scheduler.queues._free_slots, slots = [], scheduler.queues._free_slots
    step(tuple(new))
    gc.collect()
    gc.freeze()

    def order() -> int:
        return sum(1 for _ in scheduler.admission.iter_admissible())

    timed("order the queue, every prompt matched", order)
    for _ in range(50):
        timed("order the queue, cursors known", order)
    scheduler.queues._free_slots = slots
    # Each launch counts as done at once, so that the next may follow; its loads never arrive.
    while scheduler.queues.active() == [] or len(first_of.get("a step that starts requests", ())) < 20:
        before = scheduler.clock.next
        timed("a step that starts requests", step)
        if scheduler.clock.next == before:
            first_of["a step that starts requests"].pop()
            break
        scheduler._launches.pop(before)
        done[EXEC] = scheduler.clock.next
    for _ in range(50):
        timed("a step that can start no request", step)
    gc.unfreeze()
    return [{"what": name, "queued": queued, "page size": page_size, **summary(of)} for name, of in first_of.items()]


def measure_storage(queued: int, fetch_order: str, with_keys: bool) -> list[dict[str, object]]:
    """Steps that take in what storage answers, beside a queue of prompts of 20 K tokens, each on disk."""
    rng = np.random.default_rng(0)
    length, page_size, block_tokens = 20_480, 64, 64
    num_blocks = length // block_tokens
    names = BlockKeys(b"bench", block_tokens)
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=page_size,
            num_device_pages=10 * num_blocks,
            num_host_pages=200 * num_blocks,
            page_bytes=1,
            context_len=2 * length,
            storage=StorageSetup(
                backend="file",
                setup="",
                secret=b"bench",
                block_tokens=block_tokens,
                limits=StorageLimits.of_host(200 * num_blocks, 1, 256),
                prefetch=PrefetchConfig("wait_complete", fetch_order=fetch_order),
                write_policy="auto",
            ),
        )
    )
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    done = dict.fromkeys((EXEC, H2D, D2H, PROBE, FETCH, STORE), 0)
    samples: dict[str, list[float]] = {}

    def step(name: str, new: tuple[TokenizedGenerateReqInput, ...] = (), **counts: tuple[int, ...]) -> BatchDecision:
        for link, of_link in counts.items():
            done[link] += len(of_link)
        num_probes = len(counts.get(PROBE, ()))
        inputs = StepInputs(
            step=0, now=Seconds(0.0), new=new, done=dict(done), counts=counts, far_counts=(0,) * num_probes
        )
        start = time.perf_counter()
        decision = scheduler.step(inputs)
        samples.setdefault(name, []).append(time.perf_counter() - start)
        return decision

    gc.collect()
    gc.freeze()
    for i in range(queued):
        prompt = rng.integers(0, 30_000, length + 1).astype(np.int32)
        keys = PromptKeys.make(names, "", prompt) if with_keys else None
        msg = TokenizedGenerateReqInput(
            rid=f"r{i}", input_ids=ids_to_bytes(prompt), sampling_params=params, prompt_keys=keys
        )
        step("a new prompt", (msg,))
    fetches = []
    for _ in range(queued // 16):
        decision = step("16 probe answers", probe=(num_blocks,) * 16)
        fetches += [len(op.keys) for op in decision.ops if op.ticket.link == FETCH]
    for _ in range(200):
        decision = step("a fetch ends", fetch=(fetches.pop(0),))
        fetches += [len(op.keys) for op in decision.ops if op.ticket.link == FETCH]
    gc.unfreeze()
    what = {"queued": queued, "fetch order": fetch_order, "keys came with the prompt": with_keys}
    # The queue is as long as it gets.
    return [{"what": name, **what, **summary(of[-len(of) // 4 :])} for name, of in samples.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only-storage", action="store_true")
    args = parser.parse_args()
    storage = [
        row for each in (("fifo", True), ("sjf", True), ("fifo", False)) for row in measure_storage(2000, *each)
    ]
    print_table("A step with news of storage, a queue of 20 K tokens each", storage)
    if args.only_storage:
        return
    rows = []
    for page_size in (1, 16):
        for running in (1, 32, 256):
            rows.append(measure(running, 0, "slot", page_size, args.steps))
            for reason in ("slot", "memory"):
                rows.append(measure(running, 2000, reason, page_size, args.steps))
    print_table("Scheduler step, steady decoding", rows)
    formation = [row for page_size in (1, 16) for row in measure_formation(2000, page_size)]
    print_table("A batch of a queue of 20 K tokens each", formation)
    write_json("scheduler", {"steps": args.steps, "prompt_len": PROMPT_LEN}, rows + formation + storage)


if __name__ == "__main__":
    main()
