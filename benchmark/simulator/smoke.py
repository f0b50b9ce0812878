"""Runs LooGLE, scaled down, through the simulation, checks that nothing is lost, and prints how fast that went.

    python -m benchmark.simulator.smoke [--counts 0.05] [--lengths 1] [--rate 4] [--method kernel] [--page-size 1]

Times of requests are simulated; tokens per wall second are measured, and are the simulator's own speed.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass

import numpy as np
from benchmark.common import print_table, write_json
from benchmark.simulator.cost_models import Method
from benchmark.simulator.hardware import scheduler_config, simulated_hardware
from benchmark.simulator.profiles import HARDWARE, MODELS
from benchmark.simulator.workloads import LOOGLE, Workload

from sglang.simulator.simulation import RequestTimes, Simulation


@dataclass(frozen=True)
class Outcome:
    """Simulated seconds, and measured wall_s. tokens: prompt tokens by where they came from."""

    num_requests: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    computed_tokens: int
    retracted: int
    mean_ttft_s: float
    p90_ttft_s: float
    simulated_s: float
    stall_s: float
    busy_s: float
    interference_s: float
    num_steps: int
    wall_s: float


def run(sim: Simulation, workload: Workload) -> Outcome:
    """Run to the end and check what must hold: all answered in full, and every prompt token found or computed."""
    begin = time.perf_counter()
    times = sim.run(workload.source())
    wall_s = time.perf_counter() - begin
    check_answers(times, workload)
    counters = sim.core.scheduler.counters
    hits = {tier: counters[f"hit_tokens_{tier}"] for tier in ("device", "host")}
    prompt, computed, retracted = (counters[n] for n in ("prompt_tokens", "prefill_tokens", "retracted_reqs"))
    assert prompt == round(workload.stats().mean_in * len(times))
    # A retracted request computes again what it has lost since.
    assert sum(hits.values()) + computed == prompt or (retracted and sum(hits.values()) + computed > prompt)
    assert sum(sum(t.cached_tokens_details.values()) for t in times.values()) <= sum(hits.values())
    ttft = np.array([t.ttft for t in times.values()])
    return Outcome(
        num_requests=len(times),
        prompt_tokens=prompt,
        hit_tokens=hits,
        computed_tokens=computed,
        retracted=retracted,
        mean_ttft_s=float(ttft.mean()),
        p90_ttft_s=float(np.percentile(ttft, 90)),
        simulated_s=sim.now,
        stall_s=sim.executor.stall_s,
        busy_s=sim.executor.busy_s,
        interference_s=sim.executor.interference_s,
        num_steps=sim.core.num_steps,
        wall_s=wall_s,
    )


def check_answers(times: dict[str, RequestTimes], workload: Workload) -> None:
    """Every query of the workload, and nothing else, was answered in full."""
    outputs = {f"{i}-{t}": turn for i, c in enumerate(workload.conversations) for t, turn in enumerate(c.turns)}
    assert times.keys() == outputs.keys(), "a request is missing"
    for rid, turn in outputs.items():
        assert times[rid].finish_reason == "length" and len(times[rid].tokens) == turn.output_len, rid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-3.1-8B", choices=MODELS)
    parser.add_argument("--hardware", default="h200", choices=HARDWARE)
    parser.add_argument("--method", default="kernel", choices=("kernel", "direct", "dma", "infinite"))
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--counts", type=float, default=0.05, help="share of LooGLE's contexts and queries")
    parser.add_argument("--lengths", type=float, default=1.0, help="share of their lengths")
    parser.add_argument("--rate", type=float, default=4.0, help="queries per second")
    parser.add_argument("--device-tokens", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model, hardware = MODELS[args.model], HARDWARE[args.hardware]
    workload = LOOGLE.scaled(args.lengths, args.counts).generate(args.seed, args.rate)
    longest = workload.stats().max_total
    config = scheduler_config(
        model,
        hardware,
        args.page_size,
        context_len=longest + 1,
        num_device_tokens=max(args.device_tokens, 2 * longest),
        chunked_prefill_size=8192,
    )
    sim = Simulation(config, simulated_hardware(model, hardware, args.page_size, Method(args.method)))
    gc.freeze()
    outcome = run(sim, workload)
    rows = [{"": name, "value": value} for name, value in vars(outcome).items()]
    rows.append({"": "queued tokens per wall second", "value": outcome.prompt_tokens / outcome.wall_s})
    print_table(f"Simulated: {model.name} on {hardware.gpu.name}, {args.method}", rows)
    write_json("simulator_smoke", vars(args), [vars(outcome)])


if __name__ == "__main__":
    main()
