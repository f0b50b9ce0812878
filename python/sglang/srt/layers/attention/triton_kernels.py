"""Attention over paged KV in Triton: many queries of a request (`extend_kernel`), and one (`decode_kernel`). Flash
attention's online softmax, in base 2. Programs may work at a part of a request's keys, a split, each; the kernels of
triton_merge_kernels.py merge what they leave.

Own no memory. Key n of a request is token (skip + n) % PAGE_SIZE of page table[start + (skip + n) // PAGE_SIZE].
Nothing else of a pool is read, so that other frames may hold NaN. A query sees the keys before its own, or all of
them according to `num_before`. Exact to rounding under Triton's interpreter, and on an H200.

The query heads of a KV head, GROUP of them, are packed into one matrix with the tokens: row r of a request is head
r % GROUP of token r // GROUP. So 48 tokens fill 192 rows at 4 heads, and keys are read once for all of them.

Pointers are to: q, out (num_tokens, num_heads, HEAD_DIM), lse (num_tokens, num_heads) float32 or None; k, v, rotary
as in `KVView`, strides in elements, of any dtype, which becomes q's when it is read (see `_as_multiplied`). int32 or
int64: table, of pages, or with BY_SLOT of slots (page * PAGE_SIZE + offset), one per key; and per request starts, its
first entry in the table, and kv_lens. int32, per request: row_starts (its first token in q), q_lens, num_before (keys
in front of its first query's own; kv_lens where every query sees all). scale, above 0, is the factor on q.k times
log2(e). window: tokens that a query sees, its own included; None for all. cap: scores become cap * tanh(score / cap),
times log2(e), too; None for no cap. sinks (num_heads,), of any dtype: see `beside_sinks`; None for none. They change
out alone. out and lse are contiguous. parts, part_lses: float32, what splits leave, part_lses of base 2; where a
split has no keys, 0 and -inf.

Where ROTARY_DIM is above 0, keys and queries have HEAD_DIM + ROTARY_DIM values, both powers of two. A score is the
sum of two products, of the first values and of the last. Two kinds of attention have such keys:

- Latents, of multi-head latent attention in its absorbed form. v is None: the first HEAD_DIM values of a key are its
  value, so that a tile is loaded once, for keys and for values.
- Keys and values that were made of latents, for each head. k has the first values, and the last ones are read from
  rotary: all heads have the same. Its pages are those of k and v. Needs TILE_IN_PAGE.

Otherwise ROTARY_DIM is 0, and rotary is None.

With IN_TOKENS, K and V have the same strides of pages and tokens, and a page's is page_tokens times a token's. With
TILE_IN_PAGE, the table has pages, skip is 0, and PAGE_SIZE is a multiple of BLOCK_N, so that a block of keys, which
begins at a multiple of BLOCK_N, lies in one page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_merge_kernels import (
    ARRAYS,
    LN_2,
    NUMBERS,
    beside_sinks,
    decode_split_tokens,
    num_splits_of,
)


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
def _as_multiplied(q, KV: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Queries in the data type of both products: float16 for K and V of 8 bits, all of which it has, and gets by one
    instruction; bfloat16 takes three. Queries beyond its range, which models do not have, become its largest. 64 rows
    of latents stay: they would be kept in registers, which there are too few of."""
    if KV.primitive_bitwidth == 8 and q.dtype == tl.bfloat16 and (ROTARY_DIM == 0 or q.shape[0] < 64):
        # NaN stays NaN, by which damage is found.
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def _rotary_of(q_ptr, places, mask, KV: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The last ROTARY_DIM values of queries that begin at places. There are some."""
    r = HEAD_DIM + tl.arange(0, ROTARY_DIM)
    return _as_multiplied(
        tl.load(q_ptr + places[:, None] + r[None, :], mask=mask[:, None], other=0.0), KV, ROTARY_DIM
    )


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    """EXACT: to rounding: near 0 by its series, where the difference of two numbers near 1 loses digits. Else within
    1e-7, with fewer instructions."""
    found = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    if EXACT:
        square = x * x
        series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        found = tl.where(tl.abs(x) < 0.25, x * series, found)
    return found


@triton.jit
def _attend(
    q,
    q_rotary,
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
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds keys first..end of a request to the state of BLOCK_M queries: acc (BLOCK_M, BLOCK_D), highest and total
    (BLOCK_M,) float32. q_rotary: (BLOCK_M, ROTARY_DIM), the queries' last values; None for none. keys: pointers to
    its part of the table, K and V of its head, rotary with its strides, the strides of K and V, and skip. visible
    (BLOCK_M,): the number of keys that each query sees. Without MASKED each query sees all keys, and they are whole
    blocks."""
    acc, highest, total = state
    table_ptr, k_ptr, v_ptr, rotary_keys, strides, skip = keys
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
            v_tile = None if v_ptr is None else v_ptr + (page * v_page_stride + offset * v_token_stride)
            k_row, v_row = of_block * k_token_stride, of_block * v_token_stride
            if rotary_keys is not None:
                rotary_ptr, r_page_stride, r_token_stride = rotary_keys
                r_tile = rotary_ptr + (page * r_page_stride + offset * r_token_stride)
        else:
            k_tile, v_tile = k_ptr, v_ptr
            k_row, v_row = _rows_of(
                table_ptr, skip + n, n_mask if MASKED else None, strides, PAGE_SIZE, BY_SLOT, IN_TOKENS
            )
        if v_ptr is None:
            # A tile of 8 bits becomes 16 bits in registers. Hopper's products of 64 rows get it from shared memory
            # again. For fewer rows it is loaded for each product, or Triton would not load it ahead.
            v_ptrs = k_tile + k_row[:, None] + d[None, :]
            r_ptrs = k_tile + k_row[None, :] + (HEAD_DIM + tl.arange(0, ROTARY_DIM))[:, None]
            v = tl.load(v_ptrs, mask=n_mask[:, None], other=0.0) if MASKED else tl.load(v_ptrs)
            rotary = tl.load(r_ptrs, mask=n_mask[None, :], other=0.0) if MASKED else tl.load(r_ptrs)
            v = v.to(q.dtype)
            if k_ptr.dtype.element_ty.primitive_bitwidth == 8 and q.shape[0] < 64:
                k_ptrs = k_tile + k_row[None, :] + d[:, None]
                k = tl.load(k_ptrs, mask=n_mask[None, :], other=0.0) if MASKED else tl.load(k_ptrs)
                k = k.to(q.dtype)
            else:
                k = tl.trans(v)
            scores = tl.dot(q, k, input_precision="ieee")
            scores = tl.dot(q_rotary, rotary.to(q.dtype), scores, input_precision="ieee")
        else:
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
            if ROTARY_DIM:
                tl.static_assert(TILE_IN_PAGE, "rotary is read by the page")
                r_ptrs = r_tile + of_block[None, :] * r_token_stride + tl.arange(0, ROTARY_DIM)[:, None]
                rotary = tl.load(r_ptrs, mask=n_mask[None, :], other=0.0) if MASKED else tl.load(r_ptrs)
                scores = tl.dot(q_rotary, rotary.to(q.dtype), scores, input_precision="ieee")
        factor = scale
        if cap is not None:
            scores = cap * _tanh(scores * (scale / cap), q.dtype == tl.float32)
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
    q_rotary,
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
    ROTARY_DIM: tl.constexpr,
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
        q_rotary,
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
        ROTARY_DIM,
        BLOCK_D,
        BLOCK_N,
        False,
    )
    state = _attend(
        q,
        q_rotary,
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
        ROTARY_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
    )
    acc, highest, total = state
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], highest + tl.log2(total)


# -- many queries of a request --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ARRAYS)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    rotary_ptr,
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
    r_page_stride,
    r_token_stride,
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
    ROTARY_DIM: tl.constexpr,
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
    q = _as_multiplied(
        tl.load(q_ptr + q_places[:, None] + d[None, :], mask=mask, other=0.0), k_ptr.dtype.element_ty, ROTARY_DIM
    )
    # A kernel of Triton 3.6 returns no None.
    q_rotary = None
    if ROTARY_DIM:
        q_rotary = _rotary_of(q_ptr, q_places, r_mask, k_ptr.dtype.element_ty, HEAD_DIM, ROTARY_DIM)
    keys = (
        table,
        k_ptr + kv_head * k_head_stride,
        None if v_ptr is None else v_ptr + kv_head * v_head_stride,
        None if rotary_ptr is None else (rotary_ptr, r_page_stride, r_token_stride),
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
        q_rotary,
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
        ROTARY_DIM,
        BLOCK_M,
        BLOCK_D,
        BLOCK_N,
    )
    if slot < 0:
        out = beside_sinks(out, lse, sinks_ptr, head, r_mask)
        places = tokens * (num_kv_heads * GROUP) + head
        tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + places, lse * LN_2, mask=r_mask)
    else:
        places = (slot * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(parts_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        tl.store(part_lses_ptr + places, lse, mask=r_mask)


# -- one query of a request -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ARRAYS)
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
    ROTARY_DIM: tl.constexpr,
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
    split_tokens = decode_split_tokens(kv_lens_ptr, reqs_ptr, num_decodes, num_more, LEAST, AT_ONCE)
    # The decode of this program is the first one whose splits end after it.
    index = tl.zeros((), tl.int32)
    first_program = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for start in tl.range(0, num_decodes, AT_ONCE):
        counts = num_splits_of(kv_lens_ptr, reqs_ptr, start + tl.arange(0, AT_ONCE), num_decodes, split_tokens)
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
    q = _as_multiplied(q, k_ptr.dtype.element_ty, ROTARY_DIM)
    q_places = row * q_row_stride + heads * q_head_stride
    # A kernel of Triton 3.6 returns no None.
    q_rotary = None
    if ROTARY_DIM:
        q_rotary = _rotary_of(q_ptr, q_places, h_mask, k_ptr.dtype.element_ty, HEAD_DIM, ROTARY_DIM)
    keys = (
        table,
        k_ptr + kv_head * k_head_stride,
        None if v_ptr is None else v_ptr + kv_head * v_head_stride,
        None,
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
        q_rotary,
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
        ROTARY_DIM,
        BLOCK_H,
        BLOCK_D,
        BLOCK_N,
    )
    if kv_len <= split_tokens:
        out = beside_sinks(out, lse, sinks_ptr, heads, h_mask)
        places = row * num_heads + heads
        tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + places, lse * LN_2, mask=h_mask)
    else:
        places = program.to(tl.int64) * num_heads + heads
        tl.store(parts_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        tl.store(part_lses_ptr + places, lse, mask=h_mask)
