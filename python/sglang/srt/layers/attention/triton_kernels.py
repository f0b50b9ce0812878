"""Attention over paged KV in Triton: many queries of a request (`extend_kernel`), and one (`decode_kernel`). Flash
attention's online softmax, in base 2. Programs may work at a part of a request's keys, a split, each;
`merge_extends_kernel` and `merge_decodes_kernel` merge what they leave.

Own no memory. Key n of a request is token (skip + n) % PAGE_SIZE of page table[start + (skip + n) // PAGE_SIZE].
Nothing else of a pool is read, so that other frames may hold NaN. A query sees the keys before its own, or all of
them according to `num_before`. Exact to rounding under Triton's interpreter, and on an H200.

The query heads of a KV head, GROUP of them, are packed into one matrix with the tokens: row r of a request is head
r % GROUP of token r // GROUP. So 48 tokens fill 192 rows at 4 heads, and keys are read once for all of them.

Pointers are to: q, out (num_tokens, num_heads, HEAD_DIM), lse (num_tokens, num_heads) float32 or None; k, v as in
`KVView`, strides in elements, of any dtype, which becomes q's when it is read (see `_as_multiplied`). int32 or int64:
table, of pages, or with BY_SLOT of slots (page * PAGE_SIZE + offset), one per key; and per request starts, its first
entry in the table, and kv_lens. int32, per request: row_starts (its first token in q), q_lens, num_before (keys in
front of its first query's own; kv_lens where every query sees all). scale, above 0, is the factor on q.k times
log2(e). window: tokens that a query sees, its own included; None for all. cap: scores become cap * tanh(score / cap),
times log2(e), too; None for no cap. sinks (num_heads,), of any dtype: see `_beside_sinks`; None for none. They change
out alone. out and lse are contiguous. parts, part_lses: float32, what splits leave, part_lses of base 2; where a
split has no keys, 0 and -inf.

With IN_TOKENS, K and V have the same strides of pages and tokens, and a page's is page_tokens times a token's. With
TILE_IN_PAGE, the table has pages, skip is 0, and PAGE_SIZE is a multiple of BLOCK_N, so that a block of keys, which
begins at a multiple of BLOCK_N, lies in one page.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ln(2), because the returned lse is of base e.
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Arguments that differ from batch to batch, and for which no kernel may be compiled again: numbers, and the alignment
# of the arrays.
_NUMBERS = ["skip", "window", "num_decodes", "num_more"]
_ARRAYS = ["table_ptr", "starts_ptr", "kv_lens_ptr", "block_reqs_ptr", "block_firsts_ptr", "block_keys_ptr"]
_ARRAYS += ["block_ends_ptr", "block_slots_ptr", "row_starts_ptr", "q_lens_ptr", "num_before_ptr", "reqs_ptr"]
_ARRAYS += ["merge_reqs_ptr", "merge_firsts_ptr", "merge_slots_ptr", "merge_counts_ptr"]


@triton.jit
def _rows_of(table_ptr, n, mask, strides, PAGE_SIZE: tl.constexpr, BY_SLOT: tl.constexpr, IN_TOKENS: tl.constexpr):
    """Where keys n, skip included, begin in K and in V, in elements, int64; in page 0 where masked. mask: None for
    none."""
    k_page_stride, k_token_stride, v_page_stride, v_token_stride, page_tokens = strides
    # Divisions of signed numbers would also have to round those below zero.
    n = n.to(tl.uint32)
    entry = n if BY_SLOT else n // PAGE_SIZE
    if mask is None:
        found = tl.load(table_ptr + entry)
    else:
        found = tl.load(table_ptr + entry, mask=mask, other=0)
    if BY_SLOT:
        # A slot is below 2**31.
        slot = found.to(tl.uint32)
        page = slot // PAGE_SIZE
        offset = (slot - page * PAGE_SIZE).to(tl.int32)
        page = page.to(tl.int32)
    else:
        page = found.to(tl.int32)
        offset = (n - entry * PAGE_SIZE).to(tl.int32)
    if IN_TOKENS:
        # One 32-bit multiplication serves K and V. Products of 64 bits take several instructions for each key.
        row = (page * page_tokens + offset).to(tl.int64) * k_token_stride
        return row, row
    page, offset = page.to(tl.int64), offset.to(tl.int64)
    return page * k_page_stride + offset * k_token_stride, page * v_page_stride + offset * v_token_stride


@triton.jit
def _as_multiplied(q, KV: tl.constexpr):
    """Queries in the data type of both products: float16 for K and V of 8 bits, all of which it has, and gets by one
    instruction; bfloat16 takes three. Queries beyond its range, which models do not have, become its largest."""
    if KV.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        # NaN stays NaN, by which damage is found.
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def _tanh(x):
    """Exact to rounding: near 0 by its series, where the difference of two numbers near 1 would lose digits."""
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _attend(
    q,
    state,
    keys,
    visible,
    first,
    end,
    scale,
    window,
    cap,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    IN_TOKENS: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
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
    table_ptr, k_ptr, v_ptr, strides, skip = keys
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    for start in tl.range(first, end, BLOCK_N):
        of_block = tl.arange(0, BLOCK_N)
        n = start + of_block
        n_mask = n < end
        if TILE_IN_PAGE:
            # One page for all keys, so that their addresses differ from those before by one number.
            k_page_stride, k_token_stride, v_page_stride, v_token_stride, _ = strides
            entry = start // PAGE_SIZE
            page = tl.load(table_ptr + entry).to(tl.int64)
            offset = start - entry * PAGE_SIZE
            k_tile = k_ptr + (page * k_page_stride + offset * k_token_stride)
            v_tile = v_ptr + (page * v_page_stride + offset * v_token_stride)
            k_row, v_row = of_block * k_token_stride, of_block * v_token_stride
        else:
            k_tile, v_tile = k_ptr, v_ptr
            k_row, v_row = _rows_of(
                table_ptr, skip + n, n_mask if MASKED else None, strides, PAGE_SIZE, BY_SLOT, IN_TOKENS
            )
        k_ptrs = k_tile + k_row[None, :] + d[:, None]
        v_ptrs = v_tile + v_row[:, None] + d[None, :]
        if MASKED:
            k = tl.load(k_ptrs, mask=n_mask[None, :] & d_mask[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=n_mask[:, None] & d_mask[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_ptrs, mask=tl.broadcast_to(d_mask[:, None], (BLOCK_D, BLOCK_N)), other=0.0)
            v = tl.load(v_ptrs, mask=tl.broadcast_to(d_mask[None, :], (BLOCK_N, BLOCK_D)), other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        factor = scale
        if cap is not None:
            scores = cap * _tanh(scores * (scale / cap))
            factor = 1.0
        if MASKED:
            is_seen = n_mask[None, :] & (n[None, :] < visible[:, None])
            if window is not None:
                is_seen &= n[None, :] >= visible[:, None] - window
            scores = tl.where(is_seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        # For a query that has seen no keys yet: -inf - -inf would be NaN. Without a mask each sees some.
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest) if MASKED else new_highest
        # Scaled and shifted by one instruction.
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
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
    window,
    cap,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    IN_TOKENS: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys first..end, of which all queries see those before unmasked_end, whole blocks. Returns out (BLOCK_M,
    BLOCK_D) and lse (BLOCK_M,) of base 2, float32; 0 and -inf where there are no keys."""
    state = (
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    state = _attend(
        q,
        state,
        keys,
        visible,
        first,
        unmasked_end,
        scale,
        window,
        cap,
        PAGE_SIZE,
        BY_SLOT,
        IN_TOKENS,
        TILE_IN_PAGE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        False,
    )
    state = _attend(
        q,
        state,
        keys,
        visible,
        unmasked_end,
        end,
        scale,
        window,
        cap,
        PAGE_SIZE,
        BY_SLOT,
        IN_TOKENS,
        TILE_IN_PAGE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
    )
    acc, highest, total = state
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], highest + tl.log2(total)


@triton.jit
def _beside_sinks(out, lse, sinks_ptr, heads, mask):
    """out where a score of the query head, which has no value, takes part in the softmax. lse: of base 2."""
    if sinks_ptr is None:
        return out
    else:
        sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2_E
        # A query without keys has nothing to divide.
        return out / (1.0 + tl.where(lse == -float("inf"), 0.0, tl.exp2(sinks - lse)))[:, None]


@triton.jit
def _merge(
    parts_ptr,
    part_lses_ptr,
    place,
    stride,
    num_splits,
    mask,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges num_splits results of ROWS queries. place (ROWS,): of the first in part_lses; stride: to the next split.
    Returns out (ROWS, BLOCK_D) and lse (ROWS,) of base 2."""
    d = tl.arange(0, BLOCK_D)
    d_mask = (d < HEAD_DIM)[None, :]
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in tl.range(0, num_splits):
        at = place + split * stride
        lse = tl.load(part_lses_ptr + at, mask=mask, other=-float("inf"))
        part = tl.load(parts_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=mask[:, None] & d_mask, other=0.0)
        new_highest = tl.maximum(highest, lse)
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        shrink, weight = tl.exp2(highest - base), tl.exp2(lse - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        highest = new_highest
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], highest + tl.log2(total)


# -- many queries of a request --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    parts_ptr,
    part_lses_ptr,
    table_ptr,
    starts_ptr,
    kv_lens_ptr,
    block_reqs_ptr,
    block_firsts_ptr,
    block_keys_ptr,
    block_ends_ptr,
    block_slots_ptr,
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
    page_tokens,
    scale,
    skip,
    window,
    cap,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    IN_TOKENS: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (b, h): rows block_firsts[b].. of request block_reqs[b], of KV head h, and keys block_keys[b] to
    block_ends[b], as far as its queries see them: all that they see where block_slots[b] is -1. Else the result
    is left in parts (slots, num_kv_heads, BLOCK_M, HEAD_DIM) and part_lses (slots, num_kv_heads, BLOCK_M)."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    req = tl.load(block_reqs_ptr + block)
    first_row = tl.load(block_firsts_ptr + block)
    first_key = tl.load(block_keys_ptr + block)
    last_key = tl.load(block_ends_ptr + block)
    slot = tl.load(block_slots_ptr + block).to(tl.int64)
    row_start = tl.load(row_starts_ptr + req).to(tl.int64)
    q_len = tl.load(q_lens_ptr + req)
    kv_len = tl.load(kv_lens_ptr + req).to(tl.int32)
    before = tl.load(num_before_ptr + req)
    table = table_ptr + tl.load(starts_ptr + req)

    r = first_row + tl.arange(0, BLOCK_M)
    m = r // GROUP
    head = kv_head * GROUP + r % GROUP
    r_mask = m < q_len
    d = tl.arange(0, BLOCK_D)
    mask = r_mask[:, None] & (d < HEAD_DIM)[None, :]
    tokens = row_start + m
    q_places = tokens * q_row_stride + head * q_head_stride
    q = _as_multiplied(tl.load(q_ptr + q_places[:, None] + d[None, :], mask=mask, other=0.0), k_ptr.dtype.element_ty)
    keys = (
        table,
        k_ptr + kv_head * k_head_stride,
        v_ptr + kv_head * v_head_stride,
        (k_page_stride, k_token_stride, v_page_stride, v_token_stride, page_tokens),
        skip,
    )
    visible = before + m + 1
    end = tl.minimum(kv_len, before + (first_row + BLOCK_M - 1) // GROUP + 1)
    end = tl.minimum(end, last_key)
    # Whole blocks that all queries of the program see, then the rest.
    seen_by_all = tl.minimum(end, before + first_row // GROUP + 1) // BLOCK_N * BLOCK_N
    if window is not None:
        # No query of the program sees the blocks before.
        lowest = tl.maximum(before + first_row // GROUP + 1 - window, 0)
        first_key = tl.maximum(first_key, lowest // BLOCK_N * BLOCK_N)
        seen_by_all = first_key
    seen_by_all = tl.maximum(seen_by_all, first_key)
    out, lse = _attend_all(
        q,
        keys,
        visible,
        first_key,
        seen_by_all,
        end,
        scale,
        window,
        cap,
        PAGE_SIZE,
        BY_SLOT,
        IN_TOKENS,
        TILE_IN_PAGE,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_D,
        BLOCK_N,
    )
    if slot < 0:
        out = _beside_sinks(out, lse, sinks_ptr, head, r_mask)
        places = tokens * (num_kv_heads * GROUP) + head
        tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + places, lse * _LN_2, mask=r_mask)
    else:
        places = (slot * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(parts_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        tl.store(part_lses_ptr + places, lse, mask=r_mask)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def merge_extends_kernel(
    parts_ptr,
    part_lses_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    merge_reqs_ptr,
    merge_firsts_ptr,
    merge_slots_ptr,
    merge_counts_ptr,
    row_starts_ptr,
    q_lens_ptr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (b, h, c): the c-th ROWS of the BLOCK_M rows from merge_firsts[b] of request merge_reqs[b], of KV head
    h, whose splits lie in merge_counts[b] slots from merge_slots[b] on."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    req = tl.load(merge_reqs_ptr + block)
    of_block = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    r = tl.load(merge_firsts_ptr + block) + of_block
    mask = r // GROUP < tl.load(q_lens_ptr + req)
    place = (tl.load(merge_slots_ptr + block).to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + of_block
    count = tl.load(merge_counts_ptr + block)
    out, lse = _merge(parts_ptr, part_lses_ptr, place, num_kv_heads * BLOCK_M, count, mask, HEAD_DIM, BLOCK_D, ROWS)
    tokens = tl.load(row_starts_ptr + req).to(tl.int64) + r // GROUP
    head = kv_head * GROUP + r % GROUP
    out = _beside_sinks(out, lse, sinks_ptr, head, mask)
    places = tokens * (num_kv_heads * GROUP) + head
    d = tl.arange(0, BLOCK_D)
    out_mask = mask[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=out_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + places, lse * _LN_2, mask=mask)


# -- one query of a request -----------------------------------------------------------------------------------------
# The host may not know the lengths (a CUDA graph is replayed with others), so the device divides the keys. All
# decodes together have num_more splits at most beyond one each, of equally many keys. Each program finds its own.


@triton.jit
def _decode_lens(kv_lens_ptr, reqs_ptr, i, mask):
    """Of decodes i; 0 where masked. reqs is None where all requests have one query."""
    if reqs_ptr is None:
        req = i
    else:
        req = tl.load(reqs_ptr + i, mask=mask, other=0)
    return tl.load(kv_lens_ptr + req, mask=mask, other=0).to(tl.int32)


@triton.jit
def _decode_split_tokens(kv_lens_ptr, reqs_ptr, num_decodes, num_more, LEAST: tl.constexpr, AT_ONCE: tl.constexpr):
    """Keys of a split: LEAST, or a multiple of it. The number of splits of n keys is n over it, rounded up, so that
    those after the first are at most n over it, and of all decodes num_more."""
    total = tl.zeros((AT_ONCE,), tl.int32)
    for start in tl.range(0, num_decodes, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        total += _decode_lens(kv_lens_ptr, reqs_ptr, i, i < num_decodes)
    size = tl.cdiv(tl.cdiv(tl.sum(total, 0), tl.maximum(num_more, 1)), LEAST)
    # Without more, one split has everything.
    return tl.where(num_more == 0, 1 << 30, tl.maximum(size, 1) * LEAST)


@triton.jit
def _num_splits(kv_lens_ptr, reqs_ptr, i, num_decodes, split_tokens):
    """Of decodes i; 0 where there is no such decode, else 1 at least, so that its row is written."""
    mask = i < num_decodes
    lens = _decode_lens(kv_lens_ptr, reqs_ptr, i, mask)
    return tl.where(mask, tl.maximum((lens + split_tokens - 1) // split_tokens, 1), 0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    parts_ptr,
    part_lses_ptr,
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
    page_tokens,
    scale,
    skip,
    window,
    cap,
    num_decodes,
    num_more,
    head_blocks,
    PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    IN_TOKENS: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (s, b): split s of all splits of all decodes, in their order, and block b of the query heads, BLOCK_H
    at a time, head_blocks per KV head. Programs beyond the last split do nothing. A decode with one split is written
    to out; else splits leave parts (num_decodes + num_more, num_heads, HEAD_DIM) and part_lses. LEAST: keys of a
    split, a multiple of BLOCK_N. AT_ONCE: decodes whose lengths are read at once."""
    program = tl.program_id(0)
    head_block = tl.program_id(1)
    num_heads = tl.num_programs(1) // head_blocks * GROUP
    split_tokens = _decode_split_tokens(kv_lens_ptr, reqs_ptr, num_decodes, num_more, LEAST, AT_ONCE)
    # The decode of this program is the first one whose splits end after it.
    index = tl.zeros((), tl.int32)
    first_program = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for start in tl.range(0, num_decodes, AT_ONCE):
        counts = _num_splits(kv_lens_ptr, reqs_ptr, start + tl.arange(0, AT_ONCE), num_decodes, split_tokens)
        ends = before + tl.cumsum(counts, 0)
        is_over = (ends <= program) & (counts > 0)
        index += tl.sum(is_over.to(tl.int32), 0)
        first_program = tl.maximum(first_program, tl.max(tl.where(is_over, ends, 0), 0))
        before += tl.sum(counts, 0)
    # Programs without a split have no keys and store nothing. (After a `return`, loads of the loop would not
    # overlap.)
    has_split = index < num_decodes
    index = tl.minimum(index, num_decodes - 1)
    if reqs_ptr is None:
        req = index
        row = index.to(tl.int64)
    else:
        req = tl.load(reqs_ptr + index)
        row = tl.load(row_starts_ptr + req).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + req).to(tl.int32)
    table = table_ptr + tl.load(starts_ptr + req)
    kv_head = (head_block // head_blocks).to(tl.int64)

    of_group = head_block % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    h_mask = (of_group < GROUP) & has_split
    heads = kv_head * GROUP + of_group
    d = tl.arange(0, BLOCK_D)
    mask = h_mask[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * q_row_stride + heads[:, None] * q_head_stride + d[None, :], mask=mask, other=0.0)
    q = _as_multiplied(q, k_ptr.dtype.element_ty)
    keys = (
        table,
        k_ptr + kv_head * k_head_stride,
        v_ptr + kv_head * v_head_stride,
        (k_page_stride, k_token_stride, v_page_stride, v_token_stride, page_tokens),
        skip,
    )
    first = (program - first_program) * split_tokens
    # Written so that the sum of a first key and the keys of an endless split does not overflow.
    end = tl.where(has_split, first + tl.minimum(kv_len - first, split_tokens), first)
    visible = tl.zeros((BLOCK_H,), tl.int32) + kv_len
    whole = first + (end - first) // BLOCK_N * BLOCK_N
    if window is not None:
        first = tl.maximum(first, tl.maximum(kv_len - window, 0) // BLOCK_N * BLOCK_N)
        whole = first
    out, lse = _attend_all(
        q,
        keys,
        visible,
        first,
        whole,
        end,
        scale,
        window,
        cap,
        PAGE_SIZE,
        BY_SLOT,
        IN_TOKENS,
        TILE_IN_PAGE,
        HEAD_DIM,
        BLOCK_H,
        BLOCK_D,
        BLOCK_N,
    )
    if kv_len <= split_tokens:
        out = _beside_sinks(out, lse, sinks_ptr, heads, h_mask)
        places = row * num_heads + heads
        tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + places, lse * _LN_2, mask=h_mask)
    else:
        places = program.to(tl.int64) * num_heads + heads
        tl.store(parts_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        tl.store(part_lses_ptr + places, lse, mask=h_mask)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def merge_decodes_kernel(
    parts_ptr,
    part_lses_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    kv_lens_ptr,
    reqs_ptr,
    row_starts_ptr,
    num_decodes,
    num_more,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, c): the c-th ROWS of the query heads of the i-th decode, if it has more than one split."""
    index = tl.program_id(0)
    split_tokens = _decode_split_tokens(kv_lens_ptr, reqs_ptr, num_decodes, num_more, LEAST, AT_ONCE)
    count = tl.zeros((), tl.int32)
    first_program = tl.zeros((), tl.int32)
    for start in tl.range(0, index + 1, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        counts = _num_splits(kv_lens_ptr, reqs_ptr, i, num_decodes, split_tokens)
        first_program += tl.sum(tl.where(i < index, counts, 0), 0)
        count += tl.sum(tl.where(i == index, counts, 0), 0)
    if count == 1:
        return
    if reqs_ptr is None:
        row = index.to(tl.int64)
    else:
        row = tl.load(row_starts_ptr + tl.load(reqs_ptr + index)).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = heads < num_heads
    place = first_program.to(tl.int64) * num_heads + heads
    out, lse = _merge(parts_ptr, part_lses_ptr, place, num_heads, count, mask, HEAD_DIM, BLOCK_D, ROWS)
    out = _beside_sinks(out, lse, sinks_ptr, heads, mask)
    d = tl.arange(0, BLOCK_D)
    places = row * num_heads + heads
    tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask[:, None] & (d < HEAD_DIM)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + places, lse * _LN_2, mask=mask)
