"""Drawing tokens, cuts of probabilities by top-k and top-p, and penalties, in Triton.

A row is drawn from in three launches, by blocks of the vocabulary: the largest logit of each block, the sum of each
block's probabilities, and, by one program a row, the block and the token at which sums exceed a random number. Where
rows have a top-k or top-p, a fourth writes probabilities after the first, and what cuts them off follows.

Cuts search for the least probability that is kept. Positive floats are ordered as their bits are, so that 30 halvings
find it among all floats up to 1. Each looks at a row once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_launch import launch

# Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)

# Probabilities that a program looks at at once; counts of generated tokens.
_BLOCK = 8192
_COUNTS = 4096
# Tokens of a row that a program of `draw` has; their sums are in float64.
_DRAWN = 2048


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


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cut: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor:
    """See `sgl_kernel.sampling.draw`."""
    n, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _DRAWN)
    columns = triton.next_power_of_2(num_blocks)
    peaks, masses = torch.empty((2, n, num_blocks), dtype=torch.float32, device=logits.device)
    places = torch.empty((n, num_blocks), dtype=torch.int32, device=logits.device)
    sums = torch.empty((n, num_blocks), dtype=torch.float64, device=logits.device)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    by_blocks = (num_blocks, n)
    launch(
        _peaks_kernel,
        by_blocks,
        logits,
        temperatures,
        peaks,
        masses,
        places,
        logits.stride(0),
        vocab_size,
        BLOCK=_DRAWN,
    )
    values = logits
    if cut is not None:
        values = torch.empty((n, vocab_size), dtype=torch.float32, device=logits.device)
        launch(
            _probs_kernel,
            by_blocks,
            logits,
            temperatures,
            peaks,
            masses,
            values,
            logits.stride(0),
            vocab_size,
            BLOCK=_DRAWN,
            COLUMNS=columns,
        )
        cut(values)
    inputs = (values, temperatures, min_ps, peaks, masses)
    options = {"BLOCK": _DRAWN, "COLUMNS": columns, "IS_PROBS": cut is not None}
    launch(_sums_kernel, by_blocks, *inputs, sums, values.stride(0), vocab_size, **options)
    launch(
        _draw_kernel, (n,), *inputs, places, sums, seeds, positions, tokens, values.stride(0), vocab_size, **options
    )
    return tokens


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


@triton.jit
def _temperature(temperatures_ptr, row):
    """Rows that draw nothing have some, too."""
    temperature = tl.load(temperatures_ptr + row)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _peak_and_mass(peaks_ptr, masses_ptr, row, temperature, vocab_size, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a whole row: the largest logit, and the sum of e ** ((logit - it) / temperature)."""
    num_blocks = tl.cdiv(vocab_size, BLOCK)
    blocks = tl.arange(0, COLUMNS)
    peaks = tl.load(peaks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    masses = tl.load(masses_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    peak = tl.max(peaks, 0)
    # A block may have no logit above -inf.
    return peak, tl.sum(tl.where(masses > 0, masses * tl.exp((peaks - peak) / temperature), 0.0), 0)


@triton.jit
def _probabilities(
    values_ptr,
    temperatures_ptr,
    min_ps_ptr,
    peaks_ptr,
    masses_ptr,
    row,
    tokens,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_PROBS: tl.constexpr,
):
    """Of some tokens, in float64; 0 for those that min-p cuts off. values: logits, or with IS_PROBS what top-k and
    top-p have left of `_probs_kernel`'s, which are computed alike: a row's token does not depend on whether another
    row is cut."""
    x = tl.load(values_ptr + row * stride + tokens, mask=tokens < vocab_size, other=0.0)
    temperature = _temperature(temperatures_ptr, row)
    peak, mass = _peak_and_mass(peaks_ptr, masses_ptr, row, temperature, vocab_size, BLOCK, COLUMNS)
    probs = x if IS_PROBS else tl.exp((x - peak) / temperature) / mass
    # The likeliest token has 1 / mass.
    is_cut = (probs < 1.0 / mass * tl.load(min_ps_ptr + row)) | (tokens >= vocab_size)
    return tl.where(is_cut, 0.0, probs).to(tl.float64)


@triton.jit
def _shift_mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _random(seed, position):
    """As `random_uniform` of sglang.srt.layers.sampler."""
    one = tl.full((), 1, tl.uint64)
    golden = one * _GOLDEN
    mixed = _shift_mix((seed.to(tl.uint64) + one) * golden)
    bits = _shift_mix(mixed + (position.to(tl.uint64) + one) * golden)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _peaks_kernel(
    logits_ptr, temperatures_ptr, peaks_ptr, masses_ptr, places_ptr, stride, vocab_size, BLOCK: tl.constexpr
):
    """Program (b, r): of block b of row r the largest logit, its first place, and the sum of
    e ** ((logit - it) / temperature)."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    peak, place = tl.max(x, 0, return_indices=True)
    out = row * tl.num_programs(0) + block
    tl.store(peaks_ptr + out, peak)
    # NaN has no place.
    tl.store(places_ptr + out, tl.minimum(block * BLOCK + tl.maximum(place, 0), vocab_size - 1))
    weights = tl.exp((x - peak) / _temperature(temperatures_ptr, row))
    tl.store(masses_ptr + out, tl.where(peak > float("-inf"), tl.sum(weights, 0), 0.0))


@triton.jit
def _probs_kernel(
    logits_ptr,
    temperatures_ptr,
    peaks_ptr,
    masses_ptr,
    probs_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (b, r): the probabilities of block b of row r."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    temperature = _temperature(temperatures_ptr, row)
    peak, mass = _peak_and_mass(peaks_ptr, masses_ptr, row, temperature, vocab_size, BLOCK, COLUMNS)
    probs = tl.exp((x - peak) / temperature) / mass
    tl.store(probs_ptr + row * vocab_size + tokens, probs, mask=tokens < vocab_size)


@triton.jit
def _sums_kernel(
    values_ptr,
    temperatures_ptr,
    min_ps_ptr,
    peaks_ptr,
    masses_ptr,
    sums_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_PROBS: tl.constexpr,
):
    """Program (b, r): the sum of the probabilities of block b of row r."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    probs = _probabilities(
        values_ptr,
        temperatures_ptr,
        min_ps_ptr,
        peaks_ptr,
        masses_ptr,
        row,
        tokens,
        stride,
        vocab_size,
        BLOCK,
        COLUMNS,
        IS_PROBS,
    )
    tl.store(sums_ptr + row * tl.num_programs(0) + block, tl.sum(probs, 0))


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _draw_kernel(
    values_ptr,
    temperatures_ptr,
    min_ps_ptr,
    peaks_ptr,
    masses_ptr,
    places_ptr,
    sums_ptr,
    seeds_ptr,
    positions_ptr,
    tokens_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_PROBS: tl.constexpr,
):
    """Program r: the first token of row r up to which the probabilities exceed a random share of all. The last one
    where they are NaN."""
    row = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(vocab_size, BLOCK)
    blocks = tl.arange(0, COLUMNS)
    if tl.load(temperatures_ptr + row) > 0:
        sums = tl.load(sums_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
        upto = tl.cumsum(sums, 0)
        total = tl.sum(tl.where(blocks == num_blocks - 1, upto, 0.0), 0)
        drawn = _random(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)) * total
        # Sums in another order differ in the last bit, so that a block of probability 0 may exceed the one before it.
        last_block = tl.maximum(tl.max(tl.where(sums > 0, blocks, -1), 0), 0)
        block = tl.min(tl.where((upto > drawn) & (sums > 0), blocks, last_block), 0)
        before = tl.sum(tl.where(blocks == block - 1, upto, 0.0), 0)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        probs = _probabilities(
            values_ptr,
            temperatures_ptr,
            min_ps_ptr,
            peaks_ptr,
            masses_ptr,
            row,
            tokens,
            stride,
            vocab_size,
            BLOCK,
            COLUMNS,
            IS_PROBS,
        )
        inside = before + tl.cumsum(probs, 0)
        # So may a token of probability 0, and none may exceed it.
        last = tl.max(tl.where(probs > 0, tokens, -1), 0)
        last = tl.where(last < 0, vocab_size - 1, last)
        token = tl.min(tl.where((inside > drawn) & (probs > 0), tokens, last), 0)
        token = tl.where(total == total, token, vocab_size - 1)
    else:
        peaks = tl.load(peaks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
        _, block = tl.max(peaks, 0, return_indices=True)
        token = tl.load(places_ptr + row * num_blocks + tl.minimum(tl.maximum(block, 0), num_blocks - 1))
    tl.store(tokens_ptr + row, token.to(tl.int64))


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
