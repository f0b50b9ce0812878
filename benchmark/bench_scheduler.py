"""What one step of the scheduler costs: decoding with 1, 32 and 256 running requests, alone and with 2,000 queued.

    python benchmark/bench_scheduler.py [--steps N]

No model and no links: every launch completes at once with made-up tokens, so that only the state machine is timed.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np
from common import print_table, summary, write_json

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.managers.scheduler import Scheduler, SchedulerConfig
from sglang.srt.mem_cache.transfer import D2H, EXEC, H2D
from sglang.srt.model_executor.launch import Launch
from sglang.srt.sampling.sampling_params import SamplingParams

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
            # First come, first served: what does not fit beside the running keeps all behind it waiting.
            head = PROMPT_LEN if queue_waits_for == "slot" else (room - 4) * page_size
            new = requests("head", min(queued, 1), head, rng) + requests("wait", queued - 1, PROMPT_LEN, rng)
        inputs = StepInputs(step=step, now=0.0, new=new, done=dict(done), results=results)
        start = time.perf_counter()
        decision = scheduler.step(inputs)
        samples.append(time.perf_counter() - start)
        if decision.launch is not None:
            out.append(decision.launch)
    assert len(scheduler.running) == running and len(scheduler.waiting) == queued
    gc.unfreeze()
    return {
        "running": running,
        "queued": queued,
        "queue waits for": queue_waits_for if queued else "-",
        "page size": page_size,
        **summary(samples[50:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    rows = []
    for page_size in (1, 16):
        for running in (1, 32, 256):
            rows.append(measure(running, 0, "slot", page_size, args.steps))
            for reason in ("slot", "memory"):
                rows.append(measure(running, 2000, reason, page_size, args.steps))
    print_table("Scheduler step, steady decoding", rows)
    write_json("scheduler", {"steps": args.steps, "prompt_len": PROMPT_LEN}, rows)


if __name__ == "__main__":
    main()
