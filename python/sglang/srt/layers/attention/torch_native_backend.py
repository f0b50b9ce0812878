"""`TorchNativeAttnBackend`: attention on the CPU with torch's own flash kernel.

Owns the gather plans of the last forward batches. Writes no KV and reads only the slots that the segments
name: free frames and frames of other requests may hold NaN.

Per layer the keys and values of a request are gathered into one contiguous buffer. The bits of the result therefore
depend on the values and the batch alone, never on the frames that held them. The kernel wants heads of keys and of
values of one size. The smaller ones are filled up with zeros, or read on where keys begin with the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import pad

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, BatchKey, PartialMask, RecentPlans
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments, segment_slots
from sglang.srt.mem_cache.page_memory import indexable
from sglang.srt.utils.device import to_device

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# A decode group holds requests whose padded length is at most this much above its shortest member's.
_PAD_FACTOR = 1.25
_PAD_TOKENS = 64
# ... and the most padded tokens of a group, so that gathered KV is still in the CPU's cache when it is read.
_MAX_GROUP_TOKENS = 32768


@dataclass
class _TokenIndex:
    """Slots (page * page_size + offset) of a run of tokens, translated to the row numbers of a pool's memory.

    slots: (num_tokens,) int64.
    """

    slots: torch.Tensor
    page_size: int
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def gather(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """pages: (num_pages, page_size, num_kv_heads, head_dim), any outer strides. Returns the tokens' rows,
        (num_tokens, num_kv_heads, head_dim) in dtype, contiguous and freshly allocated."""
        return self._rows_of(indexable(pages)).view(pages.dtype).to(dtype)

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        num_pages, page_size, num_heads, head_dim = x.shape
        page_stride, token_stride = x.stride(0), x.stride(1)
        if page_size == 1:
            token_stride = page_stride
        if token_stride <= 0 or page_stride % token_stride != 0:
            return x[self.slots // page_size, self.slots % page_size]
        # Pages lie a whole number of tokens apart (1 page in layer-first pools, all layers in block-major ones). One
        # index_select over the pool as a long array of tokens is 3 to 4 times faster than a 2-D index.
        tokens_per_page = page_stride // token_stride
        num_rows = (num_pages - 1) * tokens_per_page + page_size
        flat = x.as_strided((num_rows, num_heads, head_dim), (token_stride, x.stride(2), x.stride(3)))
        return flat.index_select(0, self._rows_for(tokens_per_page))

    def _rows_for(self, tokens_per_page: int) -> torch.Tensor:
        if tokens_per_page == self.page_size:
            return self.slots
        rows = self._rows.get(tokens_per_page)
        if rows is None:
            rows = self.slots + (self.slots // self.page_size) * (tokens_per_page - self.page_size)
            self._rows[tokens_per_page] = rows
        return rows


@dataclass(frozen=True)
class _DecodeGroup:
    """Requests with one query each, padded to a common length.

    rows: (num_reqs,) int64 rows of q, None when the group is the whole batch in order. index: num_reqs * length
    tokens. padding: (num_reqs, length) bool, None without padding.
    """

    rows: torch.Tensor | None
    num_reqs: int
    length: int
    index: _TokenIndex
    padding: torch.Tensor | None


@dataclass(frozen=True)
class _Extend:
    """A request with several queries: rows start..end of q, its earlier tokens, and its own where causal."""

    start: int
    end: int
    prefix: _TokenIndex | None
    own: _TokenIndex | None


@dataclass
class _Plan:
    """The part of a batch's work that is the same in every layer."""

    batch: BatchKey
    groups: list[_DecodeGroup]
    extends: list[_Extend]
    # Rows of requests without any key; their output is zero.
    empty: list[tuple[int, int]]
    masks: dict[torch.dtype, list[torch.Tensor | None]] = field(default_factory=dict)

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        return self.batch.matches(segments, page_size, q_lens)

    def masks_for(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """One additive mask (num_reqs, 1, 1, length) per group."""
        masks = self.masks.get(dtype)
        if masks is None:
            masks = []
            for group in self.groups:
                if group.padding is None:
                    masks.append(None)
                    continue
                mask = torch.zeros(group.padding.shape, dtype=dtype, device=group.padding.device)
                masks.append(mask.masked_fill_(group.padding, -math.inf)[:, None, None, :])
            self.masks[dtype] = masks
        return masks


class TorchNativeAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap.

    The gather plan of a batch is built in its first layer and kept until two others have come. A segment is
    immutable, its pages included: other pages need another `KVSegment`.
    """

    captures_extends = False
    computes_masked = False
    long_extend_len = None
    expansion = None

    def __init__(self) -> None:
        self.capturing = False
        self._recent: RecentPlans[_Plan] = RecentPlans()

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim). Returns (num_tokens, num_q_heads, value_dim) in q's dtype,
        contiguous."""
        plan = self._recent.find(segments, view.page_size, meta.q_lens)
        if plan is None:
            plan = self._recent.keep(_build_plan(segments, view.page_size, meta.q_lens))
        assert sum(meta.q_lens) == q.shape[0], f"{q.shape[0]} rows of q for q_lens {meta.q_lens}"

        out = q.new_empty(*q.shape[:2], view.v.shape[3])
        for group, mask in zip(plan.groups, plan.masks_for(q.dtype)):
            result = _decode(q, view, group, mask, meta.scale)
            if group.rows is None:
                return result
            out.index_copy_(0, group.rows, result)
        for extend in plan.extends:
            rows = slice(extend.start, extend.end)
            out[rows] = _extend(q[rows], view, extend, meta.scale)
        for start, end in plan.empty:
            out[start:end] = 0
        return out

    def before_replay(self, segments: PagedSegments) -> None:
        """There are no CUDA graphs on the CPU."""

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out (q_len, num_q_heads, value_dim) and lse (q_len,
        num_q_heads), float32."""
        assert mask is None, "see computes_masked"
        q_len, num_heads, _ = q.shape
        if q_len == 0 or segment.length == 0:
            lse = q.new_full((q_len, num_heads), -math.inf, dtype=torch.float32)
            return q.new_zeros((q_len, num_heads, view.v.shape[3]), dtype=torch.float32), lse
        assert not segment.causal or segment.length == q_len, "a causal segment's tokens are the queries"
        index = _TokenIndex(segment_slots([segment], view.page_size)[0], view.page_size)
        out, lse = _attend(q, *_gather(index, view, q.dtype), segment.causal, scale)
        return out[:, :, : view.v.shape[3]].float(), lse


def _gather(index: _TokenIndex, view: KVView, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tokens, (num_tokens, num_kv_heads, size) each, where size is the larger one of head_dim
    and value_dim. The values are the first value_dim numbers. Behind a smaller head_dim are zeros."""
    k, v = view.k, view.v
    head_dim, value_dim = k.shape[3], v.shape[3]
    keys = index.gather(k, dtype)
    if value_dim < head_dim and v.data_ptr() == k.data_ptr() and v.stride() == k.stride():
        return keys, keys
    values = index.gather(v, dtype)
    if head_dim == value_dim:
        return keys, values
    size = max(head_dim, value_dim)
    return _fill_up(keys, size), _fill_up(values, size)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (q_len, num_q_heads, head_dim); k, v: (length, num_kv_heads, size) of `_gather`, length > 0 (the kernel dies
    on no keys). Returns out (q_len, num_q_heads, size) in q's dtype and lse (q_len, num_q_heads) float32."""
    q = _fill_up(q, k.shape[2])
    out, lse = _flash_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        0.0,
        causal and q.shape[0] > 1,
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _fill_up(x: torch.Tensor, size: int) -> torch.Tensor:
    """x: (n, num_heads, d). Its heads with zeros behind them up to that size."""
    return x if x.shape[2] == size else pad(x, (0, size - x.shape[2]))


def _decode(
    q: torch.Tensor, view: KVView, group: _DecodeGroup, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Returns (num_reqs, num_q_heads, value_dim), contiguous."""
    num_heads, num_kv_heads, value_dim = q.shape[1], view.k.shape[2], view.v.shape[3]
    k, v = _gather(group.index, view, q.dtype)
    size = k.shape[2]
    rows = _fill_up(q if group.rows is None else q.index_select(0, group.rows), size)
    kv_shape = (group.num_reqs, group.length, num_kv_heads, size)
    # The query heads that share a KV head stand as rows of one query matrix. Each key is then read once, not once per
    # query head (2 times faster in float32, 8 times in bfloat16).
    out, _ = _flash_attention(
        rows.reshape(group.num_reqs, num_kv_heads, num_heads // num_kv_heads, size),
        k.view(kv_shape).transpose(1, 2),
        v.view(kv_shape).transpose(1, 2),
        0.0,
        False,
        attn_mask=mask,
        scale=scale,
    )
    return out.reshape(group.num_reqs, num_heads, size)[:, :, :value_dim].contiguous()


def _extend(q: torch.Tensor, view: KVView, extend: _Extend, scale: float) -> torch.Tensor:
    """q: (q_len, num_q_heads, head_dim), the rows of one request. Returns (q_len, num_q_heads, value_dim)."""
    states = [
        _attend(q, *_gather(index, view, q.dtype), causal, scale)
        for index, causal in ((extend.prefix, False), (extend.own, True))
        if index is not None
    ]
    out = states[0][0] if len(states) == 1 else merge_state(*states[0], *states[1])[0]
    return out[:, :, : view.v.shape[3]]


def _build_plan(segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> _Plan:
    plan = _Plan(BatchKey.of(segments, page_size, q_lens), [], [], [])
    flat = [segment for of_req in segments for segment in of_req if segment.length > 0]
    runs = iter(segment_slots(flat, page_size)) if flat else iter(())

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    decodes: list[tuple[int, torch.Tensor]] = []
    row = 0
    for q_len, of_req in zip(q_lens, segments):
        prefix: list[torch.Tensor] = []
        own: torch.Tensor | None = None
        for segment in of_req:
            if segment.length == 0:
                continue
            # Segments of one view need no merging: their tokens are gathered side by side. This holds for a causal
            # segment with one query too, because that query sees all of it.
            if segment.causal and q_len > 1:
                own = next(runs)
            else:
                prefix.append(next(runs))
        if q_len > 0:
            if not prefix and own is None:
                plan.empty.append((row, row + q_len))
            elif q_len == 1:
                decodes.append((row, join(prefix)))
            else:
                prefix_index = _TokenIndex(join(prefix), page_size) if prefix else None
                own_index = _TokenIndex(own, page_size) if own is not None else None
                plan.extends.append(_Extend(row, row + q_len, prefix_index, own_index))
        row += q_len

    for members in _group_by_length([slots.shape[0] for _, slots in decodes]):
        plan.groups.append(_decode_group([decodes[i] for i in members], row, page_size))
    return plan


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of `lengths` in groups of similar length, each in ascending order of index."""
    groups: list[list[int]] = []
    shortest = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[i]
        if (
            groups
            and length <= shortest * _PAD_FACTOR + _PAD_TOKENS
            and (len(groups[-1]) + 1) * length <= _MAX_GROUP_TOKENS
        ):
            groups[-1].append(i)
        else:
            groups.append([i])
            shortest = length
    return [sorted(group) for group in groups]


def _decode_group(members: list[tuple[int, torch.Tensor]], num_rows: int, page_size: int) -> _DecodeGroup:
    runs = [slots for _, slots in members]
    length = max(slots.shape[0] for slots in runs)
    padding = None
    if all(slots.shape[0] == length for slots in runs):
        slots = torch.cat(runs) if len(runs) > 1 else runs[0]
    else:
        padded = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True, padding_value=-1)
        padding = padded < 0
        # The kernel multiplies masked values by 0, and 0 * NaN is NaN. Padding therefore repeats a token of the
        # request.
        slots = torch.where(padding, padded[:, :1], padded).view(-1)
    rows = None
    if len(members) < num_rows:
        rows = to_device(np.array([row for row, _ in members], np.int64), slots.device)
    return _DecodeGroup(rows, len(members), length, _TokenIndex(slots, page_size), padding)
