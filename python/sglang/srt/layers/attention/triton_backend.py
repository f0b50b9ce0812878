"""`TritonAttnBackend`: attention on a GPU, straight from the pages, by the kernels in triton_kernels.py.

Owns the plan of the forward batch it is working on, on the queries' device. Writes no KV and reads none but the slots
that the segments name. Tested under Triton's interpreter, on the CPU; has not run on a GPU, and its tile sizes are
unmeasured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, BatchKey
from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel, merge_splits_kernel
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments, segment_slots

_LOG2_E = math.log2(math.e)
# Of a decode's keys; each is worth a program of its own.
_MIN_SPLIT_TOKENS = 256
_MAX_SPLITS = 64


@dataclass(frozen=True)
class Tiles:
    """Queries and keys that a program works on at once, powers of two, 16 at least; warps and stages as Triton has
    them."""

    extend_queries: int = 128
    extend_keys: int = 64
    extend_warps: int = 8
    decode_keys: int = 64
    decode_warps: int = 4
    num_stages: int = 3

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> Tiles:
        """What an SM's shared memory, 227 KiB on Hopper, has room for."""
        if triton.next_power_of_2(head_dim) * dtype.itemsize <= 256:
            return cls()
        return cls(extend_queries=64, extend_keys=32, decode_keys=32, num_stages=2)


@dataclass(frozen=True)
class _Plan:
    """Everything about a batch that is the same in every layer, int32 on the queries' device.

    slots: (num_keys,) of all requests, one after the other. Per request: rows, q_lens, kv_starts, kv_lens, before, as
    triton_kernels.py names them. Per program of an extend: block_reqs, block_firsts. decodes: requests of one query.
    """

    batch: BatchKey
    longest_decode: int
    slots: torch.Tensor
    rows: torch.Tensor
    q_lens: torch.Tensor
    kv_starts: torch.Tensor
    kv_lens: torch.Tensor
    before: torch.Tensor
    block_reqs: torch.Tensor
    block_firsts: torch.Tensor
    decodes: torch.Tensor


class TritonAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap.

    The plan of a batch is made in its first layer and kept until other segments arrive; segments are immutable.
    tiles, num_sms (how many programs run at once): None for what the first queries and their GPU ask for.
    """

    def __init__(self, tiles: Tiles | None = None, num_sms: int | None = None) -> None:
        self._tiles = tiles
        self._num_sms = num_sms
        self._plan: _Plan | None = None

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim). Returns the same shape and dtype, contiguous."""
        plan = self._plan
        if plan is None or not plan.batch.matches(segments, view.page_size, meta.q_lens):
            plan = self._plan = self._make_plan(BatchKey.of(segments, view.page_size, meta.q_lens), q)
        assert sum(meta.q_lens) == q.shape[0], f"{q.shape[0]} rows of q for q_lens {meta.q_lens}"
        out = q.new_empty(q.shape)
        self._attend(q, view, plan, meta.scale, out, None)
        return out

    def before_replay(self, segments: PagedSegments) -> None:
        """Nothing is planned on the host that a graph would need."""

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out, same shape, float32, and lse (q_len, num_q_heads)."""
        plan = self._make_plan(BatchKey.of([[segment]], view.page_size, (q.shape[0],)), q)
        out = q.new_empty(q.shape, dtype=torch.float32)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._attend(q, view, plan, scale, out, lse)
        return out, lse

    # -- inside -------------------------------------------------------------------------------------------------

    def _make_plan(self, batch: BatchKey, q: torch.Tensor) -> _Plan:
        device = q.device
        if self._tiles is None:
            self._tiles = Tiles.of(q.shape[2], q.dtype)
        flat = [segment for of_req in batch.segments for segment in of_req if segment.length > 0]
        slots = torch.cat(segment_slots(flat, batch.page_size)) if flat else torch.zeros(0, dtype=torch.int64)
        q_lens = np.array(batch.q_lens, np.int32)
        kv_lens = np.array([sum(segment.length for segment in of_req) for of_req in batch.segments], np.int32)
        is_causal = np.array([bool(of_req) and of_req[-1].causal for of_req in batch.segments], np.bool_)
        before = np.where(is_causal, kv_lens - q_lens, kv_lens)

        tile = self._tiles.extend_queries
        extends = np.flatnonzero(q_lens > 1)
        # The longest first: what begins last should not take long.
        extends = extends[np.argsort(-kv_lens[extends], kind="stable")]
        num_blocks = -(-q_lens[extends] // tile)
        block_reqs = np.repeat(extends, num_blocks)
        # Of each block, which of its request it is; later ones see more keys.
        block_firsts = tile * (np.repeat(np.cumsum(num_blocks), num_blocks) - np.arange(len(block_reqs)) - 1)
        decodes = np.flatnonzero(q_lens == 1)
        columns = [
            np.cumsum(q_lens) - q_lens,
            q_lens,
            np.cumsum(kv_lens) - kv_lens,
            kv_lens,
            before,
            block_reqs,
            block_firsts,
            decodes,
        ]
        # One copy to the device.
        packed = torch.from_numpy(np.concatenate(columns).astype(np.int32)).to(device)
        return _Plan(
            batch,
            int(kv_lens[decodes].max(initial=0)),
            slots.to(device, torch.int32),
            *packed.split([len(column) for column in columns]),
        )

    def _attend(
        self, q: torch.Tensor, view: KVView, plan: _Plan, scale: float, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Fills out, and lse unless it is None."""
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = view.k.shape[2]
        assert q.stride(2) == 1, "the values of a head lie side by side"
        page_size, strides = _strides(view)
        shape = {"PAGE_SIZE": page_size, "HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}
        memory = (*q.stride()[:2], *strides, scale * _LOG2_E, num_heads, num_heads // num_kv_heads)
        tiles = self._tiles
        assert tiles is not None
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            if num_blocks := len(plan.block_reqs):
                extend_kernel[(num_blocks, num_heads)](
                    q,
                    view.k,
                    view.v,
                    out,
                    lse,
                    plan.slots,
                    plan.block_reqs,
                    plan.block_firsts,
                    plan.rows,
                    plan.q_lens,
                    plan.kv_starts,
                    plan.kv_lens,
                    plan.before,
                    *memory,
                    **shape,
                    BLOCK_M=tiles.extend_queries,
                    BLOCK_N=tiles.extend_keys,
                    HAS_LSE=lse is not None,
                    num_warps=tiles.extend_warps,
                    num_stages=tiles.num_stages,
                )
            if num_decodes := len(plan.decodes):
                rows = min(64, max(16, triton.next_power_of_2(num_heads // num_kv_heads)))
                head_blocks = -(-(num_heads // num_kv_heads) // rows)
                num_splits = self._num_splits(num_decodes * num_kv_heads * head_blocks, plan.longest_decode, q.device)
                parts = q.new_empty((num_decodes, num_heads, num_splits, head_dim), dtype=torch.float32)
                part_lses = parts.new_empty(parts.shape[:3])
                decode_kernel[(num_decodes, num_kv_heads * head_blocks, num_splits)](
                    q,
                    view.k,
                    view.v,
                    parts,
                    part_lses,
                    plan.slots,
                    plan.decodes,
                    plan.rows,
                    plan.kv_starts,
                    plan.kv_lens,
                    *memory,
                    head_blocks,
                    num_splits,
                    **shape,
                    BLOCK_H=rows,
                    BLOCK_N=tiles.decode_keys,
                    num_warps=tiles.decode_warps,
                    num_stages=tiles.num_stages,
                )
                merge_splits_kernel[(num_decodes, num_heads)](
                    parts,
                    part_lses,
                    out,
                    lse,
                    plan.decodes,
                    plan.rows,
                    num_heads,
                    num_splits,
                    HEAD_DIM=head_dim,
                    BLOCK_D=shape["BLOCK_D"],
                    BLOCK_S=triton.next_power_of_2(num_splits),
                    HAS_LSE=lse is not None,
                )

    def _num_splits(self, num_programs: int, longest: int, device: torch.device) -> int:
        """So many that all SMs have work twice over, and each split some."""
        if self._num_sms is None:
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = -(-2 * self._num_sms // num_programs)
        return max(1, min(wanted, -(-longest // _MIN_SPLIT_TOKENS), _MAX_SPLITS))


def _strides(view: KVView) -> tuple[int, tuple[int, ...]]:
    """The page size that kernels need to know, 1 where slots count tokens of one long array; and the strides of
    pages, tokens and heads of K, then of V, in elements."""
    page_size = view.page_size
    strides = [x.stride()[:3] for x in (view.k, view.v)]
    if page_size == 1:
        return 1, tuple(stride for page, _, head in strides for stride in (page, page, head))
    flat = tuple(stride for of_one in strides for stride in of_one)
    is_flat = all(page == page_size * token for page, token, _ in strides)
    return (1 if is_flat else page_size), flat
