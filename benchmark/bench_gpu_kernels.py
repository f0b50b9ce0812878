"""What a launch consists of: the kernels on a GPU by the profiler, and the host's time to enqueue them.

    python benchmark/bench_gpu_kernels.py [--device cpu] [--profile-host]

*Kernels*: of a decode as a CUDA graph and of a prefill, per launch: how many, and their time on the device. *Host*: a
prompt of few new tokens behind a document that is on the device, kernel by kernel, with a graph of each layer but for
its attention ("layers"), and as one graph ("yes"), and by how often Python's lock changes hands: the time to first
token, and what the compute thread takes to enqueue the launch, by the clock and of its CPU. --profile-host prints
what is called meanwhile, from Python 3.12 on by any thread.

Model and engine are those of bench_gpu_engine.py. On the CPU everything is tiny, and no kernels are seen.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from bench_gpu_engine import Model, Rig, rig_of
from common import percentiles, print_table, write_json
from torch.profiler import ProfilerActivity, profile

from sglang.srt.model_executor.launch import LaunchMode

# Of a decode's launches, so many are profiled.
PROFILED = 16
SWITCH_INTERVALS_S = (5e-3, 1e-4)


def kernels_of(profiled: profile, num_launches: int) -> list[tuple[str, float, float]]:
    """Name, number per launch, µs per launch; the longest first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            of_name = found[event.name]
            of_name[0] += 1
            of_name[1] += event.device_time_total
    rows = [(name, count / num_launches, us / num_launches) for name, (count, us) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def decode_kernels(rig: Rig, batch: int, context: int, output: int) -> list[tuple[str, float, float]]:
    """Of full batches in the middle of the answers."""
    profiled = profile(activities=[ProfilerActivity.CUDA])
    seen, on_gpu = 0, rig.model.device != "cpu"
    go_on = rig.engine.core.executor.launch

    def launch(of: Any) -> None:
        nonlocal seen
        if of.mode == LaunchMode.DECODE and len(of.slots) == batch:
            seen += 1
            if seen in (8, 8 + PROFILED) and on_gpu:
                torch.cuda.synchronize()
                profiled.start() if seen == 8 else profiled.stop()
        go_on(of)

    rig.engine.core.executor.launch = launch  # type: ignore[method-assign]
    rig.serve(rig.prompts(np.random.default_rng(2), *[context] * batch), output)
    rig.engine.settle()
    return kernels_of(profiled, PROFILED) if seen >= 8 + PROFILED and on_gpu else []


def prefill_kernels(rig: Rig, length: int) -> list[tuple[str, float, float]]:
    rng = np.random.default_rng(3)
    rig.serve(rig.prompts(rng, length), 1)  # compiles
    rig.engine.settle()
    if rig.model.device == "cpu":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        rig.serve(rig.prompts(rng, length), 1)
        rig.engine.settle()
        torch.cuda.synchronize()
    return kernels_of(profiled, 1)


class HostTime:
    """Of the compute thread in one launch's parts: seconds by the clock and of its CPU, and the profile."""

    def __init__(self, rig: Rig) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.profile = cProfile.Profile()
        self.is_profiled = False
        executor: Any = rig.engine.core.executor
        for name in ("_prepare", "_layer", "_sample"):
            setattr(executor, name, self._timed(getattr(executor, name)))

    def _timed(self, work: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            wall, cpu = time.perf_counter(), time.thread_time()
            if self.is_profiled:
                self.profile.enable()
            work(*args)
            if self.is_profiled:
                self.profile.disable()
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.thread_time() - cpu

        return timed


def host_rows(model: Model, document: int, lengths: tuple[int, ...], profile_host: bool) -> Iterator[dict[str, Any]]:
    rounds = 5
    for graphs in ("no", "layers", "yes") if model.device != "cpu" else ("no",):
        options: dict[str, Any] = {"graph_prefill_tokens": 0} if graphs == "no" else {}
        with rig_of(model, 1, 2 * document, chunked_prefill_size=8192, **options) as rig:
            if graphs == "layers":
                rig.engine.core.executor._prefill_graphs._attention = None
            rng = np.random.default_rng(4)
            (text,) = rig.prompts(rng, document)
            rig.serve([text], 1)
            host = HostTime(rig)
            for length in lengths:
                for interval in SWITCH_INTERVALS_S:
                    sys.setswitchinterval(interval)
                    samples: list[tuple[float, float, float]] = []
                    for turn in range(rounds + 1):
                        host.wall_s = host.cpu_s = 0.0
                        host.is_profiled = profile_host and turn == rounds and interval == SWITCH_INTERVALS_S[0]
                        served = rig.serve([np.concatenate((text, *rig.prompts(rng, length)))], 1)
                        rig.engine.settle()
                        if turn and not host.is_profiled:
                            samples.append((*served.first_token_s.values(), host.wall_s, host.cpu_s))
                    ttft, wall, cpu = (percentiles(each, 50)[0] * 1e3 for each in zip(*samples))
                    yield {
                        "new": length,
                        "behind": document,
                        "graphs": graphs,
                        "switch interval ms": 1e3 * interval,
                        "TTFT ms": ttft,
                        "enqueuing ms": wall,
                        "of its CPU, ms": cpu,
                    }
                    sys.setswitchinterval(SWITCH_INTERVALS_S[0])
                if profile_host:
                    print(f"\n{length} new tokens, graphs: {graphs}")
                    pstats.Stats(host.profile).sort_stats("tottime").print_stats(40)
                    host.profile = cProfile.Profile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile-host", action="store_true")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    model = Model(args.device)
    rows: list[dict[str, Any]] = []

    def add(launch: str, found: list[tuple[str, float, float]]) -> None:
        total = sum(us for _, _, us in found)
        mine = [
            {"launch": launch, "kernel": name[:90], "number": number, "µs": us, "share": us / total}
            for name, number, us in found
        ]
        rows.extend({"part": "kernels", **row} for row in mine)
        print_table(f"{launch}: {sum(n for _, n, _ in found):.0f} kernels, {total / 1e3:.2f} ms", mine[:30])
        write_json(f"gpu_kernels_{args.device}", vars(args), rows, complete=False)

    decodes = ((32, 2048), (128, 1024)) if cuda else ((4, 16),)
    for batch, context in decodes:
        room = batch * (context + 64) * 5 // 4 + 64
        with rig_of(model, 1, room, graph_batch_size=batch if cuda else 0, chunked_prefill_size=8192) as rig:
            add(f"decode of {batch} at {context}", decode_kernels(rig, batch, context, 8 + PROFILED + 8))
    prompt = 8192 if cuda else 64
    with rig_of(model, 1, 3 * prompt + 512, chunked_prefill_size=prompt, max_prefill_tokens=prompt) as rig:
        add(f"prefill of {prompt}", prefill_kernels(rig, prompt))
    document, lengths = (12288, (48, 512, 2048)) if cuda else (64, (8,))
    found: list[dict[str, Any]] = []
    for row in host_rows(model, document, lengths, args.profile_host):
        found.append(row)
        rows.append({"part": "host", **row})
        write_json(f"gpu_kernels_{args.device}", vars(args), rows, complete=False)
    print_table("A short prompt behind a document on the device", found)
    write_json(f"gpu_kernels_{args.device}", vars(args), rows)


if __name__ == "__main__":
    main()
