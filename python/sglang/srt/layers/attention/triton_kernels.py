"""Attention over paged KV in Triton: many queries of a request (`extend_kernel`), and one (`decode_kernel`, its keys
split among programs, whose results `merge_splits_kernel` merges). Flash attention's online softmax, in base 2.

Own no memory. Key n of a request is token (skip + n) % PAGE_SIZE of page table[start + (skip + n) // PAGE_SIZE].
Nothing else of a pool is read, so that other frames may hold NaN. A query sees the keys before its own, or all of
them according to `num_before`. Exact to rounding under Triton's interpreter, compiled for sm_90 in the tests; have
not run on a GPU.

Pointers are to: q, out (num_tokens, num_heads, HEAD_DIM), lse (num_tokens, num_heads) float32 or None; k, v as in
`KVView`, strides in elements. int32 or int64: table, of pages, or with BY_SLOT of slots (page * PAGE_SIZE + offset),
one per key; and per request starts, its first entry in the table, and kv_lens. int32, per request: row_starts (its
first row in q), q_lens, num_before (keys in front of its first query's own; kv_lens where every query sees all).
scale is the factor on q.k times log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

# ln(2), because the returned lse is of base e.
_LN_2 = tl.constexpr(0.6931471805599453)
# Arguments that differ from batch to batch, and for which no kernel may be compiled again: numbers, and the alignment
# of the arrays.
_NUMBERS = ["skip", "num_splits"]
_ARRAYS = ["table_ptr", "starts_ptr", "kv_lens_ptr", "block_reqs_ptr", "block_firsts_ptr", "row_starts_ptr"]
_ARRAYS += ["q_lens_ptr", "num_before_ptr", "reqs_ptr"]


@triton.jit
def _place_of(table_ptr, n, mask, PAGE_SIZE: tl.constexpr, BY_SLOT: tl.constexpr):
    """Page and offset in it of keys n, skip included; page 0 where masked. mask: None for none."""
    entry = n if BY_SLOT else n // PAGE_SIZE
    if mask is None:
        found = tl.load(table_ptr + entry)
    else:
        found = tl.load(table_ptr + entry, mask=mask, other=0)
    if PAGE_SIZE == 1:
        return found.to(tl.int64), tl.zeros_like(n)
    if BY_SLOT:
        page = found // PAGE_SIZE
        return page.to(tl.int64), (found - page * PAGE_SIZE).to(tl.int32)
    return found.to(tl.int64), n - entry * PAGE_SIZE


@triton.jit
def _attend(
    q,
    state,
    keys,
    visible,
    first,
    end,
    scale,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds keys first..end of a request to the state of BLOCK_M queries: acc (BLOCK_M, BLOCK_D), highest and total
    (BLOCK_M,) float32. keys: pointers to its part of the table, K and V of its head, the strides of both, and skip.
    visible (BLOCK_M,): the number of keys that each query sees. Without MASKED each query sees all keys, and they are
    whole blocks."""
    acc, highest, total = state
    table_ptr, k_ptr, v_ptr, k_page_stride, k_token_stride, v_page_stride, v_token_stride, skip = keys
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    for start in tl.range(first, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            n_mask = n < end
            page, offset = _place_of(table_ptr, skip + n, n_mask, PAGE_SIZE, BY_SLOT)
            k_mask = n_mask[None, :] & d_mask[:, None]
            v_mask = n_mask[:, None] & d_mask[None, :]
        else:
            page, offset = _place_of(table_ptr, skip + n, None, PAGE_SIZE, BY_SLOT)
            k_mask = tl.broadcast_to(d_mask[:, None], (BLOCK_D, BLOCK_N))
            v_mask = tl.broadcast_to(d_mask[None, :], (BLOCK_N, BLOCK_D))
        k_row = page * k_page_stride + offset * k_token_stride
        k = tl.load(k_ptr + k_row[None, :] + d[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(n_mask[None, :] & (n[None, :] < visible[:, None]), scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # For a query that has seen no keys yet: -inf - -inf would be NaN.
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v_row = page * v_page_stride + offset * v_token_stride
        v = tl.load(v_ptr + v_row[:, None] + d[None, :], mask=v_mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit
def _attend_all(
    q,
    keys,
    visible,
    first,
    unmasked_end,
    end,
    scale,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys first..end, of which all queries see those before unmasked_end. Returns out (BLOCK_M, BLOCK_D) and lse
    (BLOCK_M,) of base 2, float32; 0 and -inf where there are no keys."""
    state = (
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    state = _attend(
        q, state, keys, visible, first, unmasked_end, scale, PAGE_SIZE, BY_SLOT, HEAD_DIM, BLOCK_D, BLOCK_N, False
    )
    state = _attend(
        q, state, keys, visible, unmasked_end, end, scale, PAGE_SIZE, BY_SLOT, HEAD_DIM, BLOCK_D, BLOCK_N, True
    )
    acc, highest, total = state
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], highest + tl.log2(total)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    starts_ptr,
    kv_lens_ptr,
    block_reqs_ptr,
    block_firsts_ptr,
    row_starts_ptr,
    q_lens_ptr,
    num_before_ptr,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    scale,
    skip,
    num_heads,
    heads_per_kv,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (b, h): queries block_firsts[b].. of request block_reqs[b], head h. out and lse are contiguous."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    req = tl.load(block_reqs_ptr + block)
    first = tl.load(block_firsts_ptr + block)
    row_start = tl.load(row_starts_ptr + req).to(tl.int64)
    q_len = tl.load(q_lens_ptr + req)
    kv_len = tl.load(kv_lens_ptr + req).to(tl.int32)
    before = tl.load(num_before_ptr + req)
    table = table_ptr + tl.load(starts_ptr + req)

    m = first + tl.arange(0, BLOCK_M)
    m_mask = m < q_len
    d = tl.arange(0, BLOCK_D)
    mask = m_mask[:, None] & (d < HEAD_DIM)[None, :]
    rows = row_start + m
    q = tl.load(q_ptr + rows[:, None] * q_row_stride + head * q_head_stride + d[None, :], mask=mask, other=0.0)
    kv_head = head // heads_per_kv
    keys = (
        table,
        k_ptr + kv_head * k_head_stride,
        v_ptr + kv_head * v_head_stride,
        k_page_stride,
        k_token_stride,
        v_page_stride,
        v_token_stride,
        skip,
    )
    visible = before + m + 1
    # Whole blocks that all queries of the program see, then the rest.
    seen_by_all = tl.maximum(tl.minimum(kv_len, before + first + 1), 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(kv_len, before + first + BLOCK_M)
    out, lse = _attend_all(
        q, keys, visible, 0, seen_by_all, end, scale, PAGE_SIZE, BY_SLOT, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N
    )
    out_rows = (rows * num_heads + head) * HEAD_DIM
    tl.store(out_ptr + out_rows[:, None] + d[None, :], out, mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows * num_heads + head, lse * _LN_2, mask=m_mask)


@triton.jit
def _decode_req(index, reqs_ptr, row_starts_ptr):
    """The decode's request and its row in q: reqs is None where all requests have one query."""
    if reqs_ptr is None:
        req = index
        row = index
    else:
        req = tl.load(reqs_ptr + index).to(tl.int64)
        row = tl.load(row_starts_ptr + req).to(tl.int64)
    return req, row


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    starts_ptr,
    kv_lens_ptr,
    reqs_ptr,
    row_starts_ptr,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    scale,
    skip,
    num_heads,
    heads_per_kv,
    head_blocks,
    num_splits,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, b, s): the one query of the i-th decode, block b of the query heads, split s of its keys. The
    kernel computes the borders of the split, because the host may not know kv_len. The heads that share a KV head are
    rows of one matrix, BLOCK_H at a time, head_blocks per KV head. out (decodes, heads, splits, HEAD_DIM) and lse
    (decodes, heads, splits), of base 2, float32: -inf where a split has no keys, and out is 0."""
    index = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    split = tl.program_id(2)
    req, row = _decode_req(index, reqs_ptr, row_starts_ptr)
    kv_len = tl.load(kv_lens_ptr + req).to(tl.int32)
    table = table_ptr + tl.load(starts_ptr + req)
    kv_head = (head_block // head_blocks).to(tl.int64)

    of_group = head_block % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    h_mask = of_group < heads_per_kv
    heads = kv_head * heads_per_kv + of_group
    d = tl.arange(0, BLOCK_D)
    mask = h_mask[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * q_row_stride + heads[:, None] * q_head_stride + d[None, :], mask=mask, other=0.0)

    per_split = tl.cdiv(tl.cdiv(kv_len, num_splits), BLOCK_N) * BLOCK_N
    first = split * per_split
    end = tl.minimum(kv_len, first + per_split)
    keys = (
        table,
        k_ptr + kv_head * k_head_stride,
        v_ptr + kv_head * v_head_stride,
        k_page_stride,
        k_token_stride,
        v_page_stride,
        v_token_stride,
        skip,
    )
    visible = tl.zeros((BLOCK_H,), tl.int32) + kv_len
    whole = tl.maximum(first, first + (end - first) // BLOCK_N * BLOCK_N)
    out, lse = _attend_all(
        q, keys, visible, first, whole, end, scale, PAGE_SIZE, BY_SLOT, HEAD_DIM, BLOCK_H, BLOCK_D, BLOCK_N
    )
    place = (index * num_heads + heads) * num_splits + split
    tl.store(out_ptr + place[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
    tl.store(lse_ptr + place, lse, mask=h_mask)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def merge_splits_kernel(
    parts_ptr,
    part_lses_ptr,
    out_ptr,
    lse_ptr,
    reqs_ptr,
    row_starts_ptr,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (i, h): merges the results of `decode_kernel` for the i-th decode and head h into a row of out and lse,
    which are contiguous. BLOCK_S: num_splits at least."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, row = _decode_req(index, reqs_ptr, row_starts_ptr)
    s = tl.arange(0, BLOCK_S)
    s_mask = s < num_splits
    place = (index * num_heads + head) * num_splits + s
    lse = tl.load(part_lses_ptr + place, mask=s_mask, other=-float("inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    if lse_ptr is not None:
        tl.store(lse_ptr + row * num_heads + head, (highest + tl.log2(total)) * _LN_2)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    parts = tl.load(
        parts_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=s_mask[:, None] & d_mask[None, :], other=0.0
    )
    out = tl.sum(parts * weights[:, None], 0)
    tl.store(out_ptr + (row * num_heads + head) * HEAD_DIM + d, out, mask=d_mask)
