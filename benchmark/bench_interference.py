"""The cost of a load or a backup for concurrent computation, by backend, quota and page size (Strata, Fig. 5).

    python benchmark/bench_interference.py [--device cpu] [--window-s 0.1] [--pairs 3] [--budget-s N]

Three streams of kernels: *prefill*, the matrix products of Llama-8B's layers for two prompts of 4,096; *decode*, the
same layers for 16 requests that read 4,096 tokens of KV each, with the small kernels in between; *decode, eager*, the
same kernels launched one by one from Python. The other two are CUDA graphs. The eager one also loses the time that
Python needs to issue transfers. Beside each stream a thread keeps transfers under way. A sample is a window without
and one with transfers, one after the other. The loss is the median of their ratios, so that clocks and other work on
the machine cancel. Rates count transfers that completed within a window. A memcpy of 16 MiB per call is the yardstick
of both.

On the CPU everything is tiny, the reference copies, and threads share the cores: that shows that the script runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench_kvcacheio import Bench, Variant, variants_on
from common import print_table, write_json
from yardsticks import settle

from sglang.srt.mem_cache.copy_parts import LAYERS_AT_ONCE

DIRECTIONS = ("load", "back up")
# Transfers that are issued and not completed.
DEPTH = 4
RAMP_UP_S = 1.0


@dataclass(frozen=True)
class Sizes:
    """A model's layers, and a cache of num_tokens to transfer; backups take backup_tokens at a time."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    prefill_tokens: int = 2 * 4096
    batch: int = 16
    context: int = 4096
    num_layers: int = 4
    num_tokens: int = 4096
    cache_layers: int = 32
    backup_tokens: int = 512


TINY = Sizes(
    hidden=64,
    ffn=192,
    heads=4,
    kv_heads=2,
    head_dim=16,
    prefill_tokens=128,
    batch=4,
    context=64,
    num_layers=2,
    num_tokens=256,
    cache_layers=2,
    backup_tokens=64,
)


@dataclass(frozen=True)
class Case:
    """variant: None for the memcpy. urgent: loads are on a stream of high priority."""

    variant: Variant | None
    page_size: int = 0
    order: str = ""
    urgent: bool = False
    # Loads from a pool of the same device, as slabs of a peer on it are.
    from_peer: bool = False

    def can(self, direction: str) -> bool:
        return self.variant is None or (self.variant.can(direction) and (direction == "load" or not self.from_peer))

    def is_urgent(self, direction: str) -> bool:
        return self.urgent and direction == "load"

    def columns(self, direction: str) -> dict[str, Any]:
        name = self.variant.name if self.variant is not None else "memcpy"
        stream = {"stream": "urgent" if self.is_urgent(direction) else "normal"}
        where = {"from": "peer" if self.from_peer else "host"}
        return {"variant": name, "page size": self.page_size or None, "pages": self.order, **stream, **where}


def cases_on(device: str) -> list[Case]:
    """The most important first."""
    by_name = {variant.name: variant for variant in variants_on(device)}
    cases = [Case(None)]
    if device == "cpu":
        cases += [Case(by_name["reference"], page, "scattered") for page in (1, 16)]
        cases += [Case(by_name["dma"], 1, "in runs"), Case(by_name["direct"], 16, "scattered")]
        return [*cases, Case(by_name["dma"], 16, "scattered", from_peer=True)]
    kernel = "cuda" if "cuda 64" in by_name else "triton"
    # As the engine's loads, whose stream is urgent.
    quotas = [name for name in by_name if name.startswith((f"{kernel} ", "bulk "))]
    cases += [Case(by_name[name], 1, "scattered", urgent=True) for name in quotas]
    in_groups = replace(
        by_name[f"{kernel} 64"], name=f"{kernel} 64, {LAYERS_AT_ONCE} layers", layers_at_once=LAYERS_AT_ONCE
    )
    cases += [Case(in_groups, 1, "scattered", urgent=True)]
    cases += [Case(by_name[name], 1, "scattered", urgent=True) for name in by_name if name.startswith("persistent ")]
    if "dma" in by_name:
        cases += [Case(by_name["dma"], page, "scattered") for page in (16, 64, 1, 256)]
        cases += [Case(by_name["dma"], 64, "scattered", urgent=True, from_peer=True)]
        cases += [Case(by_name["dma"], page, "in runs") for page in (1, 16)]
    cases += [Case(in_groups, 64, "scattered", urgent=True, from_peer=True)]
    cases += [Case(by_name[f"{kernel} 64"], page, "scattered", urgent=True) for page in (16, 64)]
    cases += [Case(by_name[f"{kernel} 64"], 1, "scattered")]
    if "dma" in by_name:
        cases += [Case(by_name["direct"], 16, "scattered")]
    if kernel == "cuda" and "triton 64" in by_name:
        cases += [Case(by_name["triton 64"], 1, "scattered", urgent=True)]
    return cases


# -- who computes ---------------------------------------------------------------------------------------------------


class Layers:
    """Random weights and KV, each layer its own, so that no cache holds them. bfloat16 on a GPU, float32 on the
    CPU."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes = s = sizes
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device=device).mul_(shape[-2] ** -0.5)

        self.width = s.heads * s.head_dim
        qkv = self.width + 2 * s.kv_heads * s.head_dim
        shapes = ((s.hidden, qkv), (self.width, s.hidden), (s.hidden, 2 * s.ffn), (s.ffn, s.hidden))
        self.weights = [[draw(*shape) for shape in shapes] for _ in range(s.num_layers)]
        kv = (s.batch * s.kv_heads, s.context, s.head_dim)
        self.kv = [(draw(*kv), draw(*kv)) for _ in range(s.num_layers)]
        self.prompts = torch.randn(s.prefill_tokens, s.hidden, dtype=dtype, device=device)
        self.tokens = torch.randn(s.batch, s.hidden, dtype=dtype, device=device)

    def prefill(self) -> None:
        x = self.prompts
        for qkv, out, up, down in self.weights:
            x = ((x @ qkv)[:, : self.width] @ out @ up)[:, : self.sizes.ffn] @ down

    def decode(self) -> None:
        s, x = self.sizes, self.tokens
        for (qkv, out, up, down), (k, v) in zip(self.weights, self.kv):
            q = (_norm(x) @ qkv)[:, : self.width].reshape(s.batch * s.kv_heads, -1, s.head_dim)
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(s.head_dim**-0.5)
            x = x + torch.bmm(scores.softmax(-1), v).reshape(s.batch, self.width) @ out
            gate, value = (_norm(x) @ up).split(s.ffn, dim=1)
            x = x + (torch.nn.functional.silu(gate) * value) @ down


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Work:
    """One stream of kernels. As a CUDA graph, it takes the host no time to launch."""

    def __init__(self, name: str, step: Callable[[], None], device: str, as_graph: bool, window_s: float) -> None:
        self.name, self.device = name, device
        self._step = step
        if device == "cuda":
            self._stream = torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                for _ in range(3):
                    step()
            settle(device)
            if as_graph:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    step()
                self._step = self._graph.replay
        self._num_steps = 1
        self.seconds()
        one = min(self.seconds() for _ in range(3))
        self._num_steps = max(1, round(window_s / one))
        self.step_s = self.seconds() / self._num_steps

    def seconds(self) -> float:
        """Seconds of a window. Waits for this stream alone."""
        if self.device != "cuda":
            start = time.perf_counter()
            for _ in range(self._num_steps):
                self._step()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(self._num_steps):
                self._step()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


# -- who transfers --------------------------------------------------------------------------------------------------


class Traffic:
    """A thread that keeps transfers under way while it is entered. operation: issues one and returns its bytes."""

    def __init__(self, operation: Callable[[], int], device: str, urgent: bool = False) -> None:
        self._operation, self._cuda = operation, device == "cuda"
        self._stream = torch.cuda.Stream(priority=-1 if urgent else 0) if self._cuda else None
        self._stop = threading.Event()
        self._under_way = threading.Event()
        self._error: Exception | None = None
        # Seconds and bytes of completed transfers.
        self.completed: list[tuple[float, int]] = []

    def __enter__(self) -> Traffic:
        self._stop.clear()
        self._under_way.clear()
        self.completed = []
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()
        self._under_way.wait(RAMP_UP_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def bytes_per_s(self, since: float, until: float) -> float:
        """Bytes per second from the first to the last transfer that completed in the window."""
        done = [each for each in self.completed if since <= each[0] <= until]
        if len(done) < 2:
            return sum(size for _, size in done) / (until - since)
        return sum(size for _, size in done[1:]) / max(done[-1][0] - done[0][0], 1e-9)

    def _run(self) -> None:
        waiting: deque[tuple[Any, int]] = deque()
        try:
            with torch.cuda.stream(self._stream) if self._cuda else contextlib.nullcontext():
                while not self._stop.is_set():
                    size = self._operation()
                    event = torch.cuda.Event() if self._cuda else None
                    if event is not None:
                        event.record()
                    waiting.append((event, size))
                    if len(waiting) >= DEPTH or event is None:
                        self._complete(*waiting.popleft())
                while waiting:
                    self._complete(*waiting.popleft())
        except Exception as error:
            self._error = error
            self._under_way.set()

    def _complete(self, event: Any, size: int) -> None:
        if event is not None:
            event.synchronize()
        self.completed.append((time.perf_counter(), size))
        self._under_way.set()


def operation_of(bench: Bench, case: Case, direction: str, sizes: Sizes) -> Callable[[], int]:
    """A load is of all pages, and of one layer or as many as one launch copies; a backup is of all layers and of some
    pages, each time of others."""
    if case.variant is None:
        turn = 0
        host, device = (m.view(bench.num_layers, -1) for m in (bench.host_memory, bench.device_memory))
        src, dst = (host, device) if direction == "load" else (device, host)

        def memcpy() -> int:
            nonlocal turn
            turn += 1
            layer = turn % bench.num_layers
            dst[layer].copy_(src[layer], non_blocking=True)
            return bench.layer_bytes

        return memcpy
    variant = case.variant
    pools, pages = bench.pools(case.page_size, "page_first"), bench.indices(case.page_size, case.order)
    few = min(len(pages[0]), max(1, sizes.backup_tokens // case.page_size))
    units: int | None = variant.layers_at_once if direction == "load" else few
    if variant.backend == "persistent":
        units = None
    return lambda: bench.transfer(variant, direction, pools, pages, units)


# -- both -----------------------------------------------------------------------------------------------------------


def measure(
    bench: Bench, sizes: Sizes, works: list[Work], case: Case, direction: str, window_s: float, pairs: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"what": direction, **case.columns(direction)}
    operation = operation_of(bench, case, direction, sizes)
    operation()  # compiles
    settle(bench.device)
    traffic = Traffic(operation, bench.device, case.is_urgent(direction))
    with traffic:
        start = time.perf_counter()
        time.sleep(window_s)
        end = time.perf_counter()
    row["GB/s alone"] = traffic.bytes_per_s(start, end) / 1e9
    for work in works:
        losses, rates = [], []
        for _ in range(pairs):
            alone = work.seconds()
            with traffic:
                start = time.perf_counter()
                together = work.seconds()
                end = time.perf_counter()
            losses.append(100 * (together / alone - 1))
            rates.append(traffic.bytes_per_s(start, end) / 1e9)
        row[f"{work.name} loss, %"] = statistics.median(losses)
        row[f"{work.name} GB/s"] = statistics.median(rates)
    return row


def rows_of(
    of_host: Bench, of_peer: Bench, sizes: Sizes, works: list[Work], window_s: float, pairs: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Ends early at the deadline. A case that fails is a row with its error."""
    for case in cases_on(of_host.device):
        bench = of_peer if case.from_peer else of_host
        for direction in DIRECTIONS:
            if not case.can(direction):
                continue
            if time.monotonic() > deadline:
                return
            try:
                yield measure(bench, sizes, works, case, direction, window_s, pairs)
            except Exception as error:
                print(f"{case} failed: {error!r}", flush=True)
                yield {"what": direction, **case.columns(direction), "error": repr(error)}
                settle(bench.device)  # raises again, and ends the run, where the device is lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--window-s", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1e9, help="no case begins after so many seconds")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_s
    cuda = args.device == "cuda"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = Sizes() if cuda else TINY
    window_s = args.window_s if cuda else min(args.window_s, 0.01)
    of_host, of_peer = (
        Bench(sizes.num_tokens, sizes.cache_layers, sizes.kv_heads, sizes.head_dim, args.device, memory)
        for memory in ("registered", "device")
    )
    layers = Layers(sizes, args.device)
    with torch.inference_mode():
        works = [
            Work("prefill", layers.prefill, args.device, True, window_s),
            Work("decode", layers.decode, args.device, True, window_s),
            Work("decode, eager", layers.decode, args.device, False, window_s),
        ]
        alone = {work.name: 1e3 * work.step_s / sizes.num_layers for work in works}
        rows: list[dict[str, Any]] = []
        settings = {**vars(args), "sizes": vars(sizes)}
        for row in rows_of(of_host, of_peer, sizes, works, window_s, args.pairs, deadline):
            rows.append(row)
            write_json(f"interference_{args.device}", settings, rows, complete=False, layer_ms=alone)
    print("A layer alone, ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in alone.items()))
    print_table("Loss by transfers beside, and their rates", rows)
    if time.monotonic() > deadline:
        print(f"\nstopped after {args.budget_s:.0f} s")
    write_json(f"interference_{args.device}", settings, rows, time.monotonic() <= deadline, layer_ms=alone)
    if failed := [row for row in rows if "error" in row]:
        sys.exit(f"{len(failed)} cases failed")


if __name__ == "__main__":
    main()
