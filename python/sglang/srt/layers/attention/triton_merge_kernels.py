"""Kernels that merge what the programs of a request's keys leave, see triton_kernels.py, and how the device divides
the keys of decodes among programs.

Own no memory. Arguments are named in triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ln(2), because the returned lse is of base e.
LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Arguments that differ from batch to batch, and for which no kernel may be compiled again: numbers, and the alignment
# of the arrays.
NUMBERS = ["skip", "window", "num_decodes", "num_more"]
ARRAYS = ["table_ptr", "starts_ptr", "kv_lens_ptr", "block_reqs_ptr", "block_firsts_ptr", "block_keys_ptr"]
ARRAYS += ["block_ends_ptr", "block_slots_ptr", "row_starts_ptr", "q_lens_ptr", "num_before_ptr", "reqs_ptr"]
ARRAYS += ["merge_reqs_ptr", "merge_firsts_ptr", "merge_slots_ptr", "merge_counts_ptr"]


@triton.jit
def beside_sinks(out, lse, sinks_ptr, heads, mask):
    """out where a score of the query head, which has no value, takes part in the softmax. lse: of base 2."""
    if sinks_ptr is None:
        return out
    else:
        sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2_E
        # A query without keys has nothing to divide.
        return out / (1.0 + tl.where(lse == -float("inf"), 0.0, tl.exp2(sinks - lse)))[:, None]


@triton.jit
def _values_from(first_d, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    if first_d is None:
        return d
    else:
        return first_d + d


@triton.jit
def _merge(
    parts_ptr,
    part_lses_ptr,
    place,
    stride,
    num_splits,
    mask,
    first_d,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merges num_splits results of ROWS queries, SPLITS at once. place (ROWS,): of the first in part_lses; stride: to
    the next split. first_d: of BLOCK_D values; None for 0. Returns out (ROWS, BLOCK_D) and lse (ROWS,) of base 2."""
    d = _values_from(first_d, BLOCK_D)
    d_mask = (d < HEAD_DIM)[None, :]
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SPLITS == 1:
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
    else:
        # A latent has one KV head: a request has as many splits as a GPU has multiprocessors. The next ones come
        # while these are added.
        for first in tl.range(0, num_splits, SPLITS, num_stages=3):
            split = first + tl.arange(0, SPLITS)
            at = place[None, :] + split[:, None] * stride
            exists = (split < num_splits)[:, None] & mask[None, :]
            lse = tl.load(part_lses_ptr + at, mask=exists, other=-float("inf"))
            places = at[:, :, None] * HEAD_DIM + d[None, None, :]
            part = tl.load(parts_ptr + places, mask=exists[:, :, None] & d_mask[None, :, :], other=0.0)
            new_highest = tl.maximum(highest, tl.max(lse, 0))
            base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            shrink, weight = tl.exp2(highest - base), tl.exp2(lse - base[None, :])
            acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            highest = new_highest
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], highest + tl.log2(total)


# -- many queries of a request --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ARRAYS)
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
    SPLITS: tl.constexpr,
):
    """Program (b, h, c): the c-th ROWS of the BLOCK_M rows from merge_firsts[b] of request merge_reqs[b], of KV head
    h, whose splits lie in merge_counts[b] slots from merge_slots[b] on. If BLOCK_D is less than HEAD_DIM, c counts
    the rows' first BLOCK_D values, then the next ones."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    req = tl.load(merge_reqs_ptr + block)
    chunk = tl.program_id(2)
    if BLOCK_D < HEAD_DIM:
        first_d = chunk // (BLOCK_M // ROWS) * BLOCK_D
        chunk = chunk % (BLOCK_M // ROWS)
    else:
        first_d = None
    of_block = chunk * ROWS + tl.arange(0, ROWS)
    r = tl.load(merge_firsts_ptr + block) + of_block
    mask = r // GROUP < tl.load(q_lens_ptr + req)
    place = (tl.load(merge_slots_ptr + block).to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + of_block
    count = tl.load(merge_counts_ptr + block)
    stride = num_kv_heads * BLOCK_M
    out, lse = _merge(parts_ptr, part_lses_ptr, place, stride, count, mask, first_d, HEAD_DIM, BLOCK_D, ROWS, SPLITS)
    tokens = tl.load(row_starts_ptr + req).to(tl.int64) + r // GROUP
    head = kv_head * GROUP + r % GROUP
    out = beside_sinks(out, lse, sinks_ptr, head, mask)
    places = tokens * (num_kv_heads * GROUP) + head
    d = _values_from(first_d, BLOCK_D)
    out_mask = mask[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=out_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + places, lse * LN_2, mask=mask)


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
def decode_split_tokens(kv_lens_ptr, reqs_ptr, num_decodes, num_more, LEAST: tl.constexpr, AT_ONCE: tl.constexpr):
    """Keys of a split: LEAST, or a multiple of it. The number of splits of n keys is n over it, rounded up, so that
    those after the first are at most n over it, and of all decodes num_more."""
    total = tl.zeros((AT_ONCE,), tl.int32)
    for start in tl.range(0, num_decodes, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        # By 16 keys: all together may be more than 32 bits hold, as requests share prefixes.
        total += (_decode_lens(kv_lens_ptr, reqs_ptr, i, i < num_decodes) + 15) // 16
    size = tl.cdiv(tl.cdiv(tl.sum(total, 0), tl.maximum(num_more, 1)), LEAST // 16)
    # Without more, one split has everything.
    return tl.where(num_more == 0, 1 << 30, tl.maximum(size, 1) * LEAST)


@triton.jit
def num_splits_of(kv_lens_ptr, reqs_ptr, i, num_decodes, split_tokens):
    """Of decodes i; 0 where there is no such decode, else 1 at least, so that its row is written."""
    mask = i < num_decodes
    lens = _decode_lens(kv_lens_ptr, reqs_ptr, i, mask)
    return tl.where(mask, tl.maximum((lens + split_tokens - 1) // split_tokens, 1), 0)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ARRAYS)
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
    SPLITS: tl.constexpr,
):
    """Program (i, c, e): the c-th ROWS of the query heads of the i-th decode, if it has more than one split, and the
    e-th BLOCK_D of their values."""
    index = tl.program_id(0)
    split_tokens = decode_split_tokens(kv_lens_ptr, reqs_ptr, num_decodes, num_more, LEAST, AT_ONCE)
    count = tl.zeros((), tl.int32)
    first_program = tl.zeros((), tl.int32)
    for start in tl.range(0, index + 1, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        counts = num_splits_of(kv_lens_ptr, reqs_ptr, i, num_decodes, split_tokens)
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
    first_d = tl.program_id(2) * BLOCK_D if BLOCK_D < HEAD_DIM else None
    out, lse = _merge(
        parts_ptr, part_lses_ptr, place, num_heads, count, mask, first_d, HEAD_DIM, BLOCK_D, ROWS, SPLITS
    )
    out = beside_sinks(out, lse, sinks_ptr, heads, mask)
    d = _values_from(first_d, BLOCK_D)
    places = row * num_heads + heads
    tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask[:, None] & (d < HEAD_DIM)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + places, lse * LN_2, mask=mask)
