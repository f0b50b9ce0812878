"""Transfers between pools beside one large memcpy of as many bytes, by page size.

    python benchmark/bench_kvcacheio.py [--tokens N] [--shapes Llama-8B] [--layers N] [--heads N] [--head-dim N]
                                        [--page-sizes 1,16,64,256] [--layouts page_first] [--orders scattered]
                                        [--host-memory registered] [--rounds N] [--budget-s N]

On the CPU: the kernel in C, the reference, and the plans of `dma` and `direct` executed in numpy, in one thread. The
torch code that was the reference before it copied only once stands beside it. On a GPU: every backend at every quota
of blocks, between a host pool and the device, page sizes 1 to 1024. The host pool is memory as the engine's, which
CUDA registers, or CUDA's own pinned memory. A memcpy is one call for all bytes.
Times are those of CUDA events around everything that a variant issues, with the upload of indices; *issuing* is the
part of that time that the host's thread spent. Every variant's bytes are checked once. A wrong or failing variant
gives an exit code of 1 and does not affect the numbers of the others.

Pages: in runs (page i to page i), random (a permutation of all pages on both sides, as an allocator's free list may
have) or scattered (random halves of both pools, where no order makes a run). A round goes through every layer once,
so that a layer has left the caches of CPU and GPU before it comes again. A slow variant does as much as fits into its
time, each round another part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from common import percentiles, print_table, write_json
from yardsticks import median_seconds, seconds_of, settle

from sgl_kernel import kvcacheio
from sgl_kernel.kvcacheio import KVPages, dma, pick_backend, why_not
from sgl_kernel.kvcacheio.pick import available_kernel
from sglang.srt.mem_cache.copy_parts import LAYERS_AT_ONCE, layer_groups
from sglang.srt.mem_cache.memory_pool_host import cuda_register, pin_memory
from sglang.srt.utils.shared_memory import SharedMemory

DTYPE = torch.bfloat16
GPU_PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CPU_PAGE_SIZES = (1, 16, 64, 256)
# Of warps.
GPU_QUOTAS = {"cuda": (8, 16, 32, 64, 128), "persistent": (64,), "bulk": (32, 64, 128), "triton": (64,)}
SHAPES = {"Llama-8B": (32, 8, 128), "Qwen-14B": (48, 8, 128), "Llama-70B": (80, 8, 128)}
LAYOUTS = ("page_first", "layer_first")
ORDERS = ("in runs", "random", "scattered")
# On a GPU a round that would take longer takes a part of the layers or pages.
ROUND_S = 0.15

Indices = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """backend: None for the former reference."""

    name: str
    backend: str | None = None
    num_warps: int = 64
    # Of a load, by one launch or plan.
    layers_at_once: int = 1

    @property
    def is_kernel(self) -> bool:
        return self.backend in GPU_QUOTAS

    def can(self, direction: str) -> bool:
        return direction == "load" or (self.layers_at_once == 1 and self.backend != "persistent")


def variants_on(device: str) -> list[Variant]:
    if device == "cpu":
        plain = [Variant(name, name) for name in ("cpu", "reference", "dma", "direct")]
        return [plain[0], Variant("copied twice"), *plain[1:]]
    found = []
    for name, quotas in GPU_QUOTAS.items():
        if why_not(name, "cuda") is None:
            found += [Variant(f"{name} {quota}", name, quota) for quota in quotas]
    if importlib.util.find_spec("cupy") is not None:
        found += [Variant("dma", "dma"), Variant("direct", "direct")]
    return found


@dataclass(frozen=True)
class Pools:
    """The same memory, seen as pages of one size."""

    host: KVPages
    device: KVPages

    @property
    def page_bytes(self) -> int:
        return sum(self.host.run_bytes) * self.host.num_layers


class Bench:
    """A host pool and a device pool of num_tokens tokens, at any page size: the same memory, seen differently.
    host_memory: registered, pinned by CUDA, or on the device, as a peer's."""

    def __init__(
        self, num_tokens: int, num_layers: int, heads: int, dim: int, device: str, host_memory: str = "registered"
    ) -> None:
        self.num_tokens, self.num_layers, self.inner, self.device = num_tokens, num_layers, (heads, dim), device
        size = num_tokens * 2 * num_layers * heads * dim
        cuda = device == "cuda"
        # Written once, so that every page of memory exists.
        if cuda and host_memory == "registered":
            self._shared = SharedMemory.allocate(size * DTYPE.itemsize, "bench")
            memory = torch.from_numpy(self._shared.memory)
            pin_memory(memory, cuda_register)
            self.host_memory = memory.view(DTYPE).fill_(1)
        elif host_memory == "device":
            self.host_memory = torch.empty(size, dtype=DTYPE, device=device).fill_(1)
        else:
            self.host_memory = torch.empty(size, dtype=DTYPE, pin_memory=cuda).fill_(1)
        self.device_memory = torch.empty(size, dtype=DTYPE, device=device).fill_(2)
        if cuda:  # each byte tells its place
            self.device_memory.view(torch.int16).random_()
            self.host_memory.copy_(self.device_memory)
        self.layer_bytes = num_tokens * 2 * heads * dim * DTYPE.itemsize
        self._turn = 0
        # By number of layers.
        self._layer_flags: dict[int, kvcacheio.LayerFlags] = {}

    def pools(self, page_size: int, host_layout: str) -> Pools:
        n = self.num_tokens // page_size
        layer_first = (2, self.num_layers, n, page_size, *self.inner)
        device = KVPages.layer_first(self.device_memory.view(layer_first))
        if host_layout == "layer_first":
            return Pools(KVPages.layer_first(self.host_memory.view(layer_first)), device)
        page_first = self.host_memory.view(n, 2, self.num_layers, page_size, *self.inner)
        return Pools(KVPages.page_first(page_first), device)

    def indices(self, page_size: int, order: str) -> Indices:
        """Of the host and of the device; pinned where that is one."""
        n = self.num_tokens // page_size
        rng = np.random.default_rng(0)
        if order == "in runs":
            arrays = [np.arange(n), np.arange(n)]
        elif order == "scattered":
            n = max(1, n // 2)
            arrays = [rng.permutation(2 * n)[:n] for _ in range(2)]
        else:
            arrays = [rng.permutation(n) for _ in range(2)]
        host, device = (torch.from_numpy(array) for array in arrays)
        return (host.pin_memory(), device.pin_memory()) if self.device == "cuda" else (host, device)

    def memcpy(self, direction: str, rounds: int) -> float:
        """GB/s. On the CPU a load's is a copy of each layer, since larger ones are slower there."""
        part = 1 if direction == "load" and self.device == "cpu" else self.num_layers
        host, device = (m.view(self.num_layers, -1) for m in (self.host_memory, self.device_memory))
        src, dst = (host, device) if direction == "load" else (device, host)

        def work() -> None:
            for first in range(0, self.num_layers, part):
                dst[first : first + part].copy_(src[first : first + part], non_blocking=True)

        return self.layer_bytes * self.num_layers / median_seconds(work, self.device, rounds) / 1e9

    def transfer(
        self, variant: Variant, direction: str, pools: Pools, pages: Indices, units: int | None = None
    ) -> int:
        """Move `units` layers of all pages, as a forward pass needs them, or all layers of `units` pages where that
        is one operation (a backup). None: all of them. Returns the bytes."""
        by_layer = direction == "load"
        total = self.num_layers if by_layer else len(pages[0])
        units = total if units is None else units
        self._turn += 1
        first = self._turn * units % (total - units + 1)
        if not by_layer:
            pages = pages[0][first : first + units], pages[1][first : first + units]
        if variant.is_kernel and self.device == "cuda":
            pages = pages[0].to("cuda", non_blocking=True), pages[1].to("cuda", non_blocking=True)
        src, dst, of = pools.host, pools.device, pages
        if direction != "load":
            src, dst, of = dst, src, (pages[1], pages[0])
        if variant.backend == "persistent":
            layers, flags = range(first, first + units), self._flags(units)
            kvcacheio.load_layers(src.part(layers), dst.part(layers), *of, flags, num_warps=variant.num_warps)
        elif variant.backend is None:
            _copy_twice(src, dst, of, range(first, first + units) if by_layer else None)
        elif by_layer:
            for layer in range(first, first + units, variant.layers_at_once):
                options: dict[str, Any] = {"backend": variant.backend, "num_warps": variant.num_warps}
                layers = range(layer, min(layer + variant.layers_at_once, first + units))
                kvcacheio.copy_pages(src.part(layers), dst.part(layers), *of, **options)
        else:
            kvcacheio.copy_pages(src, dst, *of, backend=variant.backend, num_warps=variant.num_warps)
        return units * (len(pages[0]) * pools.page_bytes // self.num_layers if by_layer else pools.page_bytes)

    def _flags(self, num_layers: int) -> kvcacheio.LayerFlags:
        if num_layers not in self._layer_flags:
            ends = [group.stop for group in layer_groups(num_layers, LAYERS_AT_ONCE)]
            self._layer_flags[num_layers] = kvcacheio.LayerFlags(ends, self.device_memory.device)
        return self._layer_flags[num_layers]

    def measure(
        self, variant: Variant, direction: str, pools: Pools, pages: Indices, rounds: int
    ) -> tuple[float, float]:
        """GB/s, and the share of the time in which the host's thread was issuing."""
        total = self.num_layers if direction == "load" else len(pages[0])
        units = total
        if self.device == "cuda":
            units = max(1, total // 16)

            def part() -> None:
                self.transfer(variant, direction, pools, pages, units)

            part()  # compiles
            units = min(total, max(1, int(units * ROUND_S / seconds_of(part, self.device))))
        size = 0
        issuing: list[float] = []

        def work() -> None:
            nonlocal size
            start = time.perf_counter()
            size = self.transfer(variant, direction, pools, pages, units)
            issuing.append(time.perf_counter() - start)

        seconds = median_seconds(work, self.device, rounds, rounds * 2 * ROUND_S if self.device == "cuda" else 1e9)
        return size / seconds / 1e9, percentiles(issuing[1:], 50)[0] / seconds

    def is_exact(self, variant: Variant, direction: str, pools: Pools, pages: Indices) -> bool:
        """Check the first and the last page in the first and the last layer: clear, copy and compare them."""
        few = tuple(torch.stack((each[0], each[-1])).unique_consecutive() for each in pages)
        src, dst, of = pools.host, pools.device, few
        if direction != "load":
            src, dst, of = dst, src, few[::-1]
        ends = (0, self.num_layers - 1)
        for memory in (dst.k, dst.v):
            for layer in ends:
                memory[layer, of[1]] = 0
        self.transfer(variant, direction, pools, few)  # type: ignore[arg-type]
        settle(self.device)
        return all(
            torch.equal(_bits(a[layer, of[0]]), _bits(b[layer, of[1]]))
            for a, b in ((src.k, dst.k), (src.v, dst.v))
            for layer in ends
        )


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().view(torch.int16)


def _copy_twice(src: KVPages, dst: KVPages, pages: Indices, layers: range | None) -> None:
    """The former reference: a gather into a temporary, then `index_copy_`. layers: None for a backup of all."""
    if layers is not None:
        for layer in layers:
            for s, d in ((src.k, dst.k), (src.v, dst.v)):
                d[layer].index_copy_(0, pages[1], s[layer].index_select(0, pages[0]))
        return
    both = torch.stack((src.k.index_select(1, pages[0]), src.v.index_select(1, pages[0])))
    for kv, d in enumerate((dst.k, dst.v)):
        d.transpose(0, 1).index_copy_(0, pages[1], both[kv].transpose(0, 1))


@dataclass
class Run:
    """Rows so far, and the failed variants: variant -> why it is not measured any further."""

    device: str
    settings: dict[str, Any]
    deadline: float
    rows: list[dict[str, object]] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def save(self, complete: bool = False) -> None:
        write_json(f"kvcacheio_{self.device}", self.settings, self.rows, complete, wrong=self.wrong)

    def measure(self, bench: Bench, shape: str, page_size: int, layouts: list[str], orders: list[str]) -> None:
        rounds = self.settings["rounds"]
        for direction in ("load", "back up"):
            for host_layout in layouts:
                for order in orders:
                    if self.is_late:
                        return
                    pools, pages = bench.pools(page_size, host_layout), bench.indices(page_size, order)
                    # Measured beside every variant, because the machine may have other work.
                    limit = bench.memcpy(direction, rounds)
                    row: dict[str, object] = {
                        "shape": shape,
                        "what": direction,
                        "page size": page_size,
                        "host": host_layout,
                        "pages": order,
                        "run bytes": max(pools.host.run_bytes),
                        "auto": _auto(bench.device, direction, max(pools.host.run_bytes)),
                        "memcpy GB/s": limit,
                    }
                    self.rows.append(row)
                    for variant in variants_on(bench.device):
                        if variant.name not in self.wrong and variant.can(direction):
                            self._one(bench, variant, direction, pools, pages, row)
                    self.save()

    def _one(
        self, bench: Bench, variant: Variant, direction: str, pools: Pools, pages: Indices, row: dict[str, object]
    ) -> None:
        name = variant.name
        try:
            if not bench.is_exact(variant, direction, pools, pages):
                raise AssertionError("it copied other bytes")
            rate, issuing = bench.measure(variant, direction, pools, pages, self.settings["rounds"])
        except Exception as error:
            self.wrong[name] = f"{direction}, page size {row['page size']}, {row['pages']}: {error!r}"
            print(f"{name} is left out from here on: {self.wrong[name]}", flush=True)
            self.save()
            settle(bench.device)  # raises again, and ends the run, where the device is lost
            return
        row[f"{name} GB/s"], row[f"{name} ratio"] = rate, rate / float(row["memcpy GB/s"])  # type: ignore[arg-type]
        row[f"{name} issuing"] = issuing


def _auto(device: str, direction: str, run_bytes: int) -> str:
    """The variant that `auto` chooses."""
    chosen = pick_backend("auto", device, run_bytes, in_rows=direction != "load")
    if chosen != "kernel":
        return chosen
    quota = kvcacheio.default_warps(from_gpu=direction != "load", to_gpu=direction == "load")
    return f"{available_kernel(chosen)} {quota}"


def plan_rows(bench: Bench, page_sizes: list[int], rounds: int) -> list[dict[str, object]]:
    """The CPU time before the first copy of one layer is issued."""
    rows: list[dict[str, object]] = []
    for page_size in page_sizes:
        pools = bench.pools(page_size, "page_first")
        one = pools.host.layer(0), pools.device.layer(0)
        for order in ("in runs", "random"):
            pages = bench.indices(page_size, order)
            row: dict[str, object] = {"page size": page_size, "pages": order, "num pages": len(pages[0])}
            for name, merge in (("dma", True), ("direct", False)):
                plan = partial(dma.plan, *one, *pages, merge)
                row[f"{name} copies"] = len(plan())
                row[f"{name} µs"] = median_seconds(plan, "cpu", 20 * rounds) * 1e6
            rows.append(row)
    return rows


def printed(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Only the ratios, because all columns do not fit a terminal."""
    columns = list(dict.fromkeys(c for row in rows for c in row if not c.endswith(" issuing")))
    if any(c.startswith("cuda ") for c in columns):
        columns = [c for c in columns if not c.endswith(" GB/s") or c == "memcpy GB/s"]
    return [{c.removesuffix(" ratio"): row.get(c) for c in columns} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shapes", default="", help=f"of {', '.join(SHAPES)}; the first where there is a GPU")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--host-memory", choices=("registered", "pinned"), default="registered", help="on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page-sizes", default="")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--budget-s", type=float, default=1e9, help="no row begins after so many seconds")
    args = parser.parse_args()
    device = args.device
    run = Run(device, vars(args), time.monotonic() + args.budget_s)
    torch.set_num_threads(1)
    default = GPU_PAGE_SIZES if device == "cuda" else CPU_PAGE_SIZES
    page_sizes = [int(p) for p in args.page_sizes.split(",")] if args.page_sizes else list(default)
    names = args.shapes.split(",") if args.shapes else ["Llama-8B"] if device == "cuda" else []
    shapes = {name: SHAPES[name] for name in names}
    for shape, inner in (shapes or {f"{args.layers} layers": (args.layers, args.heads, args.head_dim)}).items():
        bench = Bench(args.tokens, *inner, device, args.host_memory)
        settle(device)
        # The driver takes no batches of copies on the default stream.
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
            for page_size in page_sizes:
                run.measure(bench, shape, page_size, args.layouts.split(","), args.orders.split(","))
    print_table(f"Transfers of {args.tokens:,} tokens, {device}, ratios to memcpy", printed(run.rows))
    plans = plan_rows(bench, page_sizes, args.rounds)
    print_table("Planning one layer", plans)
    if run.is_late:
        print(f"\nstopped after {args.budget_s:.0f} s")
    run.rows += plans
    run.save(complete=not run.is_late)
    if run.wrong:
        sys.exit("; ".join(f"{name}: {why}" for name, why in run.wrong.items()))


if __name__ == "__main__":
    main()
