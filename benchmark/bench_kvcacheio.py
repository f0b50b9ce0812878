"""Transfers between pools beside one large memcpy of as many bytes, by page size.

    python benchmark/bench_kvcacheio.py [--tokens N] [--layers N] [--heads N] [--head-dim N] [--rounds N]
                                        [--page-sizes 1,16,64,256]

On the CPU: the reference, and the plans of `dma` and `direct` executed in numpy, in one thread; what the torch code
did before the reference was made to copy once stands beside it. On a GPU: every backend at every quota of blocks,
between a pinned host pool and the device, page sizes 1 to 1024.

Pages: in runs (page i to page i), random (a permutation of all pages on both sides: some allocator's free list) or
scattered (random halves of both pools, where no order makes a run). A round takes every layer once, so a layer has
left the CPU's cache before it comes again.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from common import percentiles, print_table, write_json

from sgl_kernel import kvcacheio
from sgl_kernel.kvcacheio import KVPages, dma

DTYPE = torch.bfloat16
GPU_PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GPU_QUOTAS = (1, 2, 4, 8)
SHAPES = {"Llama-8B": (32, 8, 128), "Qwen-14B": (48, 8, 128), "Llama-70B": (80, 8, 128)}

Indices = tuple[torch.Tensor, torch.Tensor]


class Bench:
    """A host pool and a device pool of num_tokens tokens, at any page size: the same memory, seen differently."""

    def __init__(self, num_tokens: int, num_layers: int, heads: int, dim: int, device: str) -> None:
        self.num_tokens, self.num_layers, self.inner, self.device = num_tokens, num_layers, (heads, dim), device
        size = num_tokens * 2 * num_layers * heads * dim
        cuda = device == "cuda"
        # Written once, so that every page of memory exists.
        self.host_memory = torch.empty(size, dtype=DTYPE, pin_memory=cuda).fill_(1)
        self.device_memory = torch.empty(size, dtype=DTYPE, device=device).fill_(2)
        self.layer_bytes = num_tokens * 2 * heads * dim * DTYPE.itemsize

    def pools(self, page_size: int, host_layout: str) -> tuple[KVPages, KVPages]:
        """Host and device pool."""
        n = self.num_tokens // page_size
        layer_first = (2, self.num_layers, n, page_size, *self.inner)
        device = KVPages.layer_first(self.device_memory.view(layer_first))
        if host_layout == "layer_first":
            return KVPages.layer_first(self.host_memory.view(layer_first)), device
        page_first = (n, 2, self.num_layers, page_size, *self.inner)
        return KVPages.page_first(self.host_memory.view(page_first)), device

    def indices(self, page_size: int, order: str) -> Indices:
        n = self.num_tokens // page_size
        if order == "in runs":
            return torch.arange(n), torch.arange(n)
        rng = np.random.default_rng(0)
        if order == "scattered":
            n = max(1, n // 2)
            return tuple(torch.from_numpy(rng.permutation(2 * n)[:n]) for _ in range(2))  # type: ignore[return-value]
        return torch.from_numpy(rng.permutation(n)), torch.from_numpy(rng.permutation(n))

    def seconds(self, work: Callable[[], None], rounds: int) -> float:
        """Median."""
        work()
        samples = []
        for _ in range(rounds):
            self.settle()
            start = time.perf_counter()
            work()
            self.settle()
            samples.append(time.perf_counter() - start)
        return percentiles(samples, 50)[0]

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memcpy(self, direction: str, num_layers: int, rounds: int) -> float:
        """GB/s of copying as many bytes as num_layers layers hold, a different place each time."""
        host, device = (m.view(self.num_layers, -1) for m in (self.host_memory, self.device_memory))
        src, dst = (host, device) if direction == "load" else (device, host)

        def work() -> None:
            for first in range(0, self.num_layers, num_layers):
                dst[first : first + num_layers].copy_(src[first : first + num_layers], non_blocking=True)

        return self.layer_bytes * self.num_layers / self.seconds(work, rounds) / 1e9

    def load(self, host: KVPages, device: KVPages, pages: Indices, **options: object) -> None:
        """Layer by layer, as a forward pass needs it."""
        for layer in range(self.num_layers):
            kvcacheio.copy_pages(host.layer(layer), device.layer(layer), *pages, **options)  # type: ignore[arg-type]

    def back_up(self, host: KVPages, device: KVPages, pages: Indices, **options: object) -> None:
        kvcacheio.copy_pages(device, host, *pages, **options)  # type: ignore[arg-type]

    def load_twice_copied(self, host: KVPages, device: KVPages, pages: Indices) -> None:
        """What the reference was: a gather into a temporary, then `index_copy_`."""
        for layer in range(self.num_layers):
            for h, d in ((host.k, device.k), (host.v, device.v)):
                d[layer].index_copy_(0, pages[1], h[layer].index_select(0, pages[0]))

    def back_up_twice_copied(self, host: KVPages, device: KVPages, pages: Indices) -> None:
        both = torch.stack((device.k.index_select(1, pages[0]), device.v.index_select(1, pages[0])))
        for kv, h in enumerate((host.k, host.v)):
            h.transpose(0, 1).index_copy_(0, pages[1], both[kv].transpose(0, 1))


def variants(bench: Bench) -> Iterator[tuple[str, dict[str, object] | None]]:
    """Backend and its options; None for the old reference."""
    if bench.device == "cpu":
        yield "reference", {"backend": "reference"}
        yield "copied twice", None
        yield "dma", {"backend": "dma"}
        yield "direct", {"backend": "direct"}
        return
    for name, package in (("cuda", "cupy"), ("triton", "triton")):
        if importlib.util.find_spec(package) is not None:
            for quota in GPU_QUOTAS:
                yield f"{name} {quota}", {"backend": name, "num_ctas": quota}
    if importlib.util.find_spec("cupy") is not None:
        yield "dma", {"backend": "dma"}
        yield "direct", {"backend": "direct"}


def measure(bench: Bench, page_sizes: list[int], rounds: int, shape: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for direction, num_layers in (("load", 1), ("back up", bench.num_layers)):
        for page_size in page_sizes:
            for host_layout in ("page_first", "layer_first"):
                host, device = bench.pools(page_size, host_layout)
                for order in ("in runs", "random", "scattered"):
                    pages = bench.indices(page_size, order)
                    # Beside every variant, as the machine may have others at work.
                    limit = bench.memcpy(direction, num_layers, rounds)
                    row: dict[str, object] = {
                        "shape": shape,
                        "what": direction,
                        "page size": page_size,
                        "host": host_layout,
                        "pages": order,
                        "memcpy GB/s": limit,
                    }
                    for name, options in variants(bench):
                        if options is not None:
                            call = bench.load if direction == "load" else bench.back_up
                            work = lambda c=call, a=(host, device, pages), o=options: c(*a, **o)  # noqa: E731
                        else:
                            old = bench.load_twice_copied if direction == "load" else bench.back_up_twice_copied
                            work = lambda c=old, a=(host, device, pages): c(*a)  # noqa: E731
                        size = bench.layer_bytes * bench.num_layers * len(pages[0]) / host.num_pages
                        rate = size / bench.seconds(work, rounds) / 1e9
                        row[f"{name} GB/s"], row[f"{name} ratio"] = rate, rate / limit
                    rows.append(row)
    return rows


def plan_rows(bench: Bench, page_sizes: list[int], rounds: int) -> list[dict[str, object]]:
    """What the CPU spends before the first copy of one layer is issued."""
    rows: list[dict[str, object]] = []
    for page_size in page_sizes:
        host, device = bench.pools(page_size, "page_first")
        for order in ("in runs", "random"):
            pages = bench.indices(page_size, order)
            row: dict[str, object] = {"page size": page_size, "pages": order, "num pages": len(pages[0])}
            for name, merge in (("dma", True), ("direct", False)):
                one = host.layer(0), device.layer(0)
                row[f"{name} copies"] = len(dma.plan(*one, *pages, merge))
                seconds = bench.seconds(lambda a=one, p=pages, m=merge: dma.plan(*a, *p, m), 20 * rounds)  # type: ignore[misc]
                row[f"{name} µs"] = seconds * 1e6
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page-sizes", default="")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    default = GPU_PAGE_SIZES if device == "cuda" else (1, 16, 64, 256)
    page_sizes = [int(p) for p in args.page_sizes.split(",")] if args.page_sizes else list(default)
    given = {f"{args.layers} layers": (args.layers, args.heads, args.head_dim)}
    rows: list[dict[str, object]] = []
    for shape, (layers, heads, dim) in (SHAPES if device == "cuda" else given).items():
        bench = Bench(args.tokens, layers, heads, dim, device)
        rows += measure(bench, page_sizes, args.rounds, shape)
    print_table(f"Transfers of {args.tokens:,} tokens, {device}", rows)
    plans = plan_rows(bench, page_sizes, args.rounds)
    print_table("Planning one layer", plans)
    write_json(f"kvcacheio_{device}", vars(args), [*rows, *plans])


if __name__ == "__main__":
    main()
