"""Attention over paged KV, beside the machine's limits: prefill against a large product of matrices, decode against a
large copy in memory.

    python benchmark/bench_attention.py [--backends triton,flashinfer] [--heads N] [--kv-heads N] [--head-dim N]
                                        [--page-sizes 1,16,64] [--rounds N] [--kv-dtype fp8_e4m3]

On the CPU: its backends, small batches, float32. On a GPU: the installed backends, bfloat16. Pages are a
random permutation of the pool's, in one table. The backends take turns. A turn goes through all layers once, so that
no cache still holds the KV. Plans are made once, before. Prefill counts the multiplications and additions that causal
attention needs, decode the bytes of K and V.

Then windows, capped scores and sinks, by backends that compute them and by torch, beside none of them. Then latents,
one KV head of 512 values and 64 rotated ones: their bytes are read once for K and V.

At the end long extends of latents, in the absorbed form and by keys and values that are made for each head. Both take
a head's queries and leave its values, projections included. TFLOP/s counts the products that a way needs. The error
is the largest difference, of the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from common import print_table, write_json

from sglang.srt.configs.kv_cache_dtype import KV_CACHE_DTYPE_CHOICES, pick_kv_cache_dtype
from sglang.srt.configs.latent import LatentConfig
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, make_attention_backend, why_not
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.latent_expansion import LONG_EXTEND
from sglang.srt.layers.attention.masked_attention import masked_attention
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.layers.latent_attention import LatentAttention
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.mem_cache.kv_view import KVView, PagedSegments

# `AttentionBackend.forward`, or as it.
Attend = Callable[[torch.Tensor, KVView, PagedSegments, AttentionMetadata], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """num_reqs requests with num_new tokens each behind a prefix. With one new token it is a decode. beside: others
    in the same launch."""

    num_reqs: int
    prefix: int
    num_new: int
    beside: Batch | None = None

    @property
    def name(self) -> str:
        return f"{self.num_reqs} x {self.prefix} + {self.num_new}"

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Of each request: the tokens before the new ones, and the new ones."""
        others = self.beside.lengths if self.beside else []
        return [(self.prefix, self.num_new)] * self.num_reqs + others


GPU_BATCHES = (
    Batch(1, 0, 8192),
    Batch(1, 8192, 2048),
    Batch(1, 65536, 2048),
    Batch(8, 4096, 512),
    # Few tokens behind a prefix that was found.
    Batch(1, 12288, 48),
    Batch(1, 65536, 16),
    Batch(1, 12288, 48, Batch(32, 4096, 1)),
    Batch(1, 32768, 1),
    Batch(32, 4096, 1),
    Batch(128, 4096, 1),
    # One long request among short ones.
    Batch(40, 512, 1, Batch(1, 131072, 1)),
)
# With windows, capped scores and sinks.
MASKED_GPU_BATCHES = (Batch(1, 12288, 2048), Batch(32, 4096, 1))
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "window 1,024": {"window": 1024},
    "window 128": {"window": 128},
    "cap 50": {"softcap": 50.0},
}
# Of latents, by 16 and by 128 query heads.
LATENT_GPU_BATCHES = (
    Batch(1, 4096, 1),
    Batch(32, 4096, 1),
    Batch(1, 32768, 1),
    Batch(32, 32768, 1),
    Batch(1, 65536, 1),
    Batch(1, 12288, 48),
    Batch(1, 0, 2048),
)
LATENT_CPU_BATCHES = (Batch(1, 512, 1), Batch(1, 64, 8))
# By keys and values of the heads, too.
EXPANDED_GPU_BATCHES = (
    Batch(1, 0, 2048),
    Batch(1, 0, 8192),
    Batch(1, 65536, 256),
    Batch(1, 65536, 2048),
    Batch(8, 0, 2048),
    Batch(8, 0, 256, Batch(32, 4096, 1)),
)
LATENT_HEADS = (16, 128)
DEEPSEEK = LatentConfig(rank=512, rotary_dim=64, key_dim=128, value_dim=128)
LATENT_DIM, LATENT_VALUE_DIM = DEEPSEEK.cached_dim, DEEPSEEK.rank
CPU_BATCHES = (Batch(1, 0, 512), Batch(1, 2048, 256), Batch(8, 1024, 1), Batch(7, 128, 1, Batch(1, 4096, 16)))


@dataclass(frozen=True)
class Shape:
    """Of queries and KV. value_dim: of latents, whose values are the first ones of their keys; None for others."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None


class Bench:
    def __init__(
        self,
        shape: Shape,
        device: str,
        rounds: int,
        kv_dtype: torch.dtype | None = None,
        batches: Sequence[Batch] | None = None,
    ) -> None:
        self.shape, self.device = shape, device
        self._rounds = rounds
        # The CPU's own type: products of bfloat16 matrices may be slow where instructions are missing.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.num_layers = 4
        batches = batches or (GPU_BATCHES if device == "cuda" else CPU_BATCHES)
        self.num_tokens = max(sum(-(-sum(each) // 64) * 64 for each in batch.lengths) for batch in batches)
        num_components = 2 if shape.value_dim is None else 1
        size = (num_components, self.num_layers, self.num_tokens, shape.kv_heads, shape.head_dim)
        # In its own dtype from the start: many long requests fill half of a GPU.
        self._memory = torch.empty(size, dtype=kv_dtype or self.dtype, device=device)
        for layer in self._memory.unbind(1):
            layer.copy_(torch.randn(layer.shape, dtype=self.dtype, device=device))

    def seconds(self, *works: Callable[[], object]) -> list[float]:
        """Medians of each work, with the operations that it enqueued. The works take turns."""
        samples: list[list[float]] = [[] for _ in works]
        for _ in range(self._rounds + 1):
            for work, mine in zip(works, samples):
                self._settle()
                start = time.perf_counter()
                work()
                self._settle()
                mine.append(time.perf_counter() - start)
        return [statistics.median(mine[1:]) for mine in samples]

    def matrix_flops(self) -> float:
        n = 8192 if self.device == "cuda" else 1024
        a = torch.randn(n, n, dtype=self.dtype, device=self.device)
        return 2 * n**3 / self.seconds(lambda: a @ a)[0]

    def memory_bytes_per_s(self) -> float:
        """Read and written by a copy."""
        size = (1 << 30) if self.device == "cuda" else (1 << 26)
        a, b = (torch.ones(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * size / self.seconds(lambda: b.copy_(a))[0]

    def segments(self, batch: Batch, page_size: int) -> PagedSegments:
        prefixes, q_lens = np.array(batch.lengths, np.int64).T
        kv_lens = prefixes + q_lens
        num_pages = -(-kv_lens // page_size)
        starts = np.cumsum(num_pages) - num_pages
        table = torch.randperm(self.num_tokens // page_size)[: num_pages.sum()].to(self.device, torch.int32)
        on_device = (torch.from_numpy(starts).to(self.device), torch.from_numpy(kv_lens).to(self.device))
        return PagedSegments(table, page_size, starts, kv_lens, q_lens.copy(), *on_device)

    def attend(self, ways: list[Attend], batch: Batch, page_size: int, mask: Mapping[str, Any] = {}) -> list[float]:
        """Seconds of one layer, each way."""
        views = [self.view(layer, page_size) for layer in range(self.num_layers)]
        segments = self.segments(batch, page_size)
        q_lens, heads, head_dim = segments.q_lens, self.shape.heads, self.shape.head_dim
        q = torch.randn(q_lens.sum(), heads, head_dim, dtype=self.dtype, device=self.device)
        meta = AttentionMetadata(tuple(q_lens.tolist()), head_dim**-0.5, **mask)

        def layers(attend: Attend) -> None:
            for view in views:
                attend(q, view, segments, meta)

        return [each / self.num_layers for each in self.seconds(*(partial(layers, attend) for attend in ways))]

    def flops(self, batch: Batch) -> float:
        pairs = sum(new * prefix + new * (new + 1) // 2 for prefix, new in batch.lengths)
        value_dim = self.shape.value_dim or self.shape.head_dim
        return 2.0 * pairs * self.shape.heads * (self.shape.head_dim + value_dim)

    def kv_bytes(self, batch: Batch) -> int:
        per_token = len(self._memory) * self.shape.kv_heads * self.shape.head_dim * self._memory.itemsize
        return sum(map(sum, batch.lengths)) * per_token

    def view(self, layer: int, page_size: int) -> KVView:
        kv = self._memory[:, layer].view(-1, self.num_tokens // page_size, page_size, *self._memory.shape[3:])
        return KVView(*kv) if self.shape.value_dim is None else KVView(kv[0], kv[0, ..., : self.shape.value_dim])

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", help=f"of {', '.join(ATTENTION_BACKENDS)}; those that can be used here")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-sizes", default="1,16,64", help="powers of two up to 64")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kv-dtype", choices=KV_CACHE_DTYPE_CHOICES, default="auto")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kv_dtype = pick_kv_cache_dtype(args.kv_dtype)
    bench = Bench(Shape(args.heads, args.kv_heads, args.head_dim), device, args.rounds, kv_dtype)
    report = f"attention_{device}" if kv_dtype is None else f"attention_{args.kv_dtype}_{device}"
    usable = [name for name in ATTENTION_BACKENDS if why_not(name, device) is None]
    names = args.backends.split(",") if args.backends else usable
    for name in names:
        if reason := why_not(name, device):
            parser.error(reason)
    rows: list[dict[str, object]] = []
    for batch in GPU_BATCHES if device == "cuda" else CPU_BATCHES:
        for page_size in (int(each) for each in args.page_sizes.split(",")):
            rows += measured(bench, names, batch, page_size)
            write_json(report, vars(args), rows, complete=False)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print_table(f"One layer of attention, {args.heads} heads on {args.kv_heads} of {args.head_dim}, {where}", rows)

    def add(title: str, found: Iterable[dict[str, object]]) -> None:
        """Written as they come, in case the time runs out."""
        begin = len(rows)
        for row in found:
            rows.append(row)
            write_json(report, vars(args), rows, complete=False)
        print_table(title, rows[begin:])

    add("With windows and capped scores, pages of 1", masked_rows(bench, names))
    del bench
    add(f"Latents of {LATENT_DIM}, pages of 64 and 1", latent_rows(device, args.rounds, kv_dtype, names))
    if device == "cuda" and "triton" in names:
        expanded = expanded_rows(args.rounds, kv_dtype, EXPANDED_GPU_BATCHES)
        add("Long extends, as queries of latents and by keys and values of the heads", expanded)
    write_json(report, vars(args), rows)


def measured(bench: Bench, names: list[str], batch: Batch, page_size: int) -> list[dict[str, object]]:
    """Of each backend, beside the least that a layer takes."""
    # Measured beside every batch, because the machine may have other work.
    flops, bandwidth = bench.matrix_flops(), bench.memory_bytes_per_s()
    # New ones, as they may choose their tiles by their first pages.
    backends = [make_attention_backend(name, bench.device) for name in names]
    return [
        {
            "backend": name,
            "requests": batch.num_reqs,
            "prefix": batch.prefix,
            "new": batch.num_new,
            "beside": batch.beside.name if batch.beside else "",
            "page size": page_size,
            "ms": seconds * 1e3,
            "GFLOP/s": bench.flops(batch) / seconds / 1e9,
            "of a matrix product": bench.flops(batch) / seconds / flops,
            "GB/s of KV": bench.kv_bytes(batch) / seconds / 1e9,
            "of a copy": bench.kv_bytes(batch) / seconds / bandwidth,
        }
        for name, seconds in zip(names, bench.attend([b.forward for b in backends], batch, page_size))
    ]


def latent_rows(
    device: str, rounds: int, kv_dtype: torch.dtype | None, names: list[str]
) -> Iterator[dict[str, object]]:
    batches = LATENT_GPU_BATCHES if device == "cuda" else LATENT_CPU_BATCHES
    # FlashInfer's refuses latents.
    names = [name for name in names if name != "flashinfer"]
    for heads in LATENT_HEADS:
        bench = Bench(Shape(heads, 1, LATENT_DIM, LATENT_VALUE_DIM), device, rounds, kv_dtype, batches)
        for batch in batches:
            for page_size in (64, 1):
                yield from ({"heads": heads, **row} for row in measured(bench, names, batch, page_size))


@dataclass(frozen=True)
class _Pool:
    """See `KVPool`: one layer, which has its latents."""

    only: KVView

    def view(self, layer_id: int) -> KVView:
        return self.only

    def store(self, layer_id: int, loc: torch.Tensor, *values: torch.Tensor) -> None:
        raise AssertionError("attention stores nothing")


@dataclass(frozen=True)
class _Given:
    """See `AttentionBatch`."""

    segments: PagedSegments
    attn: AttentionMetadata

    @property
    def windowed_segments(self) -> PagedSegments:
        return self.segments


def expanded_rows(
    rounds: int, kv_dtype: torch.dtype | None, batches: Sequence[Batch], device: str = "cuda"
) -> Iterator[dict[str, object]]:
    """Of a layer of DeepSeek's attention, between its projections of queries and of its output. Without a scale of
    latents."""
    latent = DEEPSEEK
    for heads in LATENT_HEADS:
        bench = Bench(Shape(heads, 1, LATENT_DIM, LATENT_VALUE_DIM), device, rounds, kv_dtype, batches)
        scale = (latent.key_dim + latent.rotary_dim) ** -0.5
        attention = LatentAttention(0, make_attention_backend("triton", device), KVScale(), None, latent)
        weight = torch.randn(heads, latent.key_dim + latent.value_dim, latent.rank, device=device)
        attention.projections = LatentProjections(latent, (weight * latent.rank**-0.5).to(bench.dtype))
        for batch in batches:
            segments, q_lens = bench.segments(batch, 64), tuple(new for _, new in batch.lengths)
            given = _Given(segments, AttentionMetadata(q_lens, scale))
            q = torch.randn(sum(q_lens), heads, latent.key_dim + latent.rotary_dim, device=device).to(bench.dtype)
            assert attention.expands(given), "the batch has a long extend"
            ways: dict[str, Callable[[KVView], torch.Tensor]] = {
                "absorbed": lambda view: absorbed(attention, q, given, view),  # noqa: B023
                "keys and values": lambda view: attention(q, given, _Pool(view)),  # noqa: B023
            }
            views = [bench.view(layer, 64) for layer in range(bench.num_layers)]
            right, got = (way(views[0]).float() for way in ways.values())
            error = ((got - right).abs().max() / right.abs().max()).item()
            works = [partial(_each, way, views) for way in ways.values()]
            products = products_of(batch, heads)
            for way, seconds, flops in zip(ways, bench.seconds(*works), products, strict=True):
                seconds /= bench.num_layers
                row = {"heads": heads, "batch": batch.name, "beside": batch.beside.name if batch.beside else ""}
                yield row | {"way": way, "ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12, "error": error}


def _each(way: Callable[[KVView], torch.Tensor], views: Sequence[KVView]) -> None:
    for view in views:
        way(view)


def absorbed(attention: LatentAttention, q: torch.Tensor, given: _Given, view: KVView) -> torch.Tensor:
    """As a model computes it where nothing is expanded: (num_tokens, heads, value_dim)."""
    projections, latent = attention.projections, attention.latent
    assert projections is not None
    queries = q.new_empty(*q.shape[:2], latent.cached_dim)
    queries[..., : latent.rank] = projections.queries(q[..., : latent.key_dim])
    queries[..., latent.rank :] = q[..., latent.key_dim :]
    return projections.values(attention(queries, given, _Pool(view)))


def products_of(batch: Batch, heads: int) -> tuple[float, float]:
    """Multiplications and additions of a layer, in the absorbed form and by keys and values of requests that are
    long, projections included."""
    latent, of_absorbed, of_expanded = DEEPSEEK, 0, 0
    of_token = latent.rank * (latent.key_dim + latent.value_dim)
    for prefix, new in batch.lengths:
        pairs = new * prefix + new * (new + 1) // 2
        in_latents = pairs * (LATENT_DIM + latent.rank) + new * of_token
        by_heads = pairs * (latent.key_dim + latent.rotary_dim + latent.value_dim) + (prefix + new) * of_token
        of_absorbed += in_latents
        of_expanded += by_heads if new >= LONG_EXTEND else in_latents
    return 2.0 * heads * of_absorbed, 2.0 * heads * of_expanded


def masked_rows(bench: Bench, names: list[str]) -> Iterator[dict[str, object]]:
    for batch in MASKED_GPU_BATCHES if bench.device == "cuda" else CPU_BATCHES[1:3]:
        for mask, options in MASKS.items():
            ways: dict[str, Attend] = {"torch": masked_attention}
            for name in names:
                backend = make_attention_backend(name, bench.device)
                if backend.computes_masked or not options:
                    ways[name] = backend.forward
            for name, seconds in zip(ways, bench.attend([*ways.values()], batch, 1, options)):
                yield {"batch": batch.name, "mask": mask, "backend": name, "ms": seconds * 1e3}


if __name__ == "__main__":
    main()
