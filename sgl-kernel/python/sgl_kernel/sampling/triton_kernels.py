"""Top-k and top-p by a search for the least probability that is kept, and penalties, in Triton.

Positive floats are ordered as their bits are, so that 30 halvings find it among all floats up to 1. Each looks at a
row once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_launch import launch

# Probabilities that a program looks at at once; counts of generated tokens.
_BLOCK = 8192
_COUNTS = 4096


def keep_top(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> None:
    """See `sgl_kernel.sampling.keep_top`."""
    launch(
        _keep_top_kernel,
        (probs.shape[0],),
        probs,
        top_ks,
        top_ps,
        probs.stride(0),
        probs.shape[1],
        BLOCK=_BLOCK,
        num_warps=16,
    )


def penalize(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor
) -> None:
    """See `sgl_kernel.sampling.penalize`."""
    vocab_size = logits.shape[1]
    launch(
        _penalize_kernel,
        (len(rows), triton.cdiv(vocab_size, _COUNTS)),
        logits,
        rows,
        slots,
        counts,
        penalties,
        penalties.stride(0),
        logits.stride(0),
        counts.stride(0),
        vocab_size,
        BLOCK=_COUNTS,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    penalties_ptr,
    num_rows,
    stride,
    count_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (i, b): block b of rows[i]. Only logits of tokens that were generated are read."""
    i = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = counts_ptr + tl.load(slots_ptr + i).to(tl.int64) * count_stride + tokens
    count = tl.load(counts, mask=tokens < vocab_size, other=0).to(tl.float32)
    was_generated = count > 0
    logits = logits_ptr + tl.load(rows_ptr + i).to(tl.int64) * stride + tokens
    x = tl.load(logits, mask=was_generated, other=0.0)
    frequency, presence = tl.load(penalties_ptr + i), tl.load(penalties_ptr + num_rows + i)
    repetition = tl.load(penalties_ptr + 2 * num_rows + i)
    x = tl.where(x > 0, x / repetition, x * repetition)
    x -= count * frequency + presence
    tl.store(logits, x, mask=was_generated)


@triton.jit
def _keep_top_kernel(probs_ptr, top_ks_ptr, top_ps_ptr, stride, vocab_size, BLOCK: tl.constexpr):
    """Program r: row r. Of both bounds, lower holds and upper does not: at `lower` top_k tokens or more are at least
    as likely, or their probabilities sum to top_p or more."""
    row = tl.program_id(0).to(tl.int64)
    # A top-p that rounds to 0 still keeps the likeliest token.
    top_k, top_p = tl.load(top_ks_ptr + row), tl.maximum(tl.load(top_ps_ptr + row), 1e-20)
    probs = probs_ptr + row * stride
    lower_k = tl.zeros((), tl.int32)
    lower_p = tl.zeros((), tl.int32)
    # The bits of 1, and one more for each side of the interval.
    upper_k = tl.full((), 0x3F800001, tl.int32)
    # A top-p of 1 cuts nothing off; sums in float32 may end below it.
    upper_p = tl.where(top_p < 1.0, upper_k, 1)
    for _ in range(30):
        middle_k, middle_p = (lower_k + upper_k) // 2, (lower_p + upper_p) // 2
        # Summed up once per search step, because that takes all threads of the block.
        counts = tl.zeros((BLOCK,), tl.int32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, vocab_size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            p = tl.load(probs + i, mask=i < vocab_size, other=-1.0)
            bits = p.to(tl.int32, bitcast=True)
            counts += (bits >= middle_k).to(tl.int32)
            sums += tl.where(bits >= middle_p, p, 0.0)
        holds_k, holds_p = tl.sum(counts, 0) >= top_k, tl.sum(sums, 0) >= top_p
        lower_k, upper_k = tl.where(holds_k, middle_k, lower_k), tl.where(holds_k, upper_k, middle_k)
        lower_p, upper_p = tl.where(holds_p, middle_p, lower_p), tl.where(holds_p, upper_p, middle_p)
    least = tl.maximum(lower_k, lower_p)
    for start in tl.range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        p = tl.load(probs + i, mask=i < vocab_size, other=0.0)
        tl.store(probs + i, tl.where(p.to(tl.int32, bitcast=True) >= least, p, 0.0), mask=i < vocab_size)
