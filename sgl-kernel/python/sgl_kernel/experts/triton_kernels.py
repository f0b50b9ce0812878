"""Choosing experts, and products of rows with their matrices, in Triton.

A program of a product computes a tile: some outputs of some rows of one expert. It finds its expert and rows from the
experts' ends. The grid depends on the number of rows alone, so that a CUDA graph can hold it. Programs of the same
rows run together: their tokens are read once, and the matrix of an expert with several tiles stays in the GPU's
cache. Which tiles are fastest was worked out, not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from sgl_kernel.quantized import QuantizedMatrix
from sgl_kernel.quantized.triton_kernels import product, stored_constants
from sgl_kernel.triton_launch import launch

if TYPE_CHECKING:
    from sgl_kernel.experts import Choice, Groups, Weights

# Numbers that a program looks through at once for those of its expert, and warps that do.
_CHUNK, _CHUNK_WARPS = 1024, 4
# Numbers of a row that a program adds up.
_COLUMNS = 1024


def choose(
    logits: torch.Tensor, choice: Choice, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    num_members = num_experts // choice.num_groups
    assert logits.stride(1) == 1 and num_members * choice.num_groups == num_experts
    weights = torch.empty(num_tokens, choice.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, choice.top_k, dtype=torch.int64, device=logits.device)
    launch(
        _choose_kernel,
        (num_tokens,),
        logits,
        correction,
        weights,
        chosen,
        logits.stride(0),
        num_members,
        choice.scale,
        SCORES=choice.scores,
        IS_NORMALIZED=choice.is_normalized,
        TOP_K=choice.top_k,
        NUM_GROUPS=choice.num_groups,
        KEPT_GROUPS=choice.kept_groups,
        GROUPS=triton.next_power_of_2(choice.num_groups),
        MEMBERS=triton.next_power_of_2(num_members),
        PLACES=triton.next_power_of_2(choice.top_k),
        num_warps=1,
    )
    return weights, chosen


def group_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert chosen.is_contiguous()
    places = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    launch(_group_kernel, (num_experts,), chosen, places, ends, chosen.numel(), CHUNK=_CHUNK, num_warps=_CHUNK_WARPS)
    return places, ends


def product_of_tokens(x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(x, weights, groups, bias, READS_PLACES=True)


def product_to_places(x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(x, weights, groups, bias, READS_PLACES=False).unflatten(0, (-1, groups.top_k))


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_tokens, top_k, hidden_size = outputs.shape
    assert outputs.is_contiguous()
    weights = weights.contiguous()
    out = torch.empty(num_tokens, hidden_size, dtype=outputs.dtype, device=outputs.device)
    grid = (num_tokens, triton.cdiv(hidden_size, _COLUMNS))
    launch(_sum_kernel, grid, outputs, weights, out, hidden_size, TOP_K=top_k, COLUMNS=_COLUMNS, num_warps=4)
    return out


class Tile(NamedTuple):
    """What a program of a product works on at once, and how."""

    rows: int
    outputs: int
    step: int
    warps: int
    stages: int


# A decode's few rows of an expert, a short prefill's, and a long one's.
_TILES = (Tile(16, 64, 128, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4))
# For float32 two products of a tile's size fill the registers.
_TILE_OF_FLOAT32 = Tile(16, 64, 32, 4, 2)


def row_limits() -> tuple[int, ...]:
    return tuple(tile.rows for tile in _TILES[:-1])


def tile_for(num_rows: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """For as many rows as an expert has in the mean: a tile that is half empty costs less than one more, which reads
    the matrix again."""
    if dtype == torch.float32:
        return _TILE_OF_FLOAT32
    mean = num_rows / num_experts
    return next((tile for tile in _TILES[:-1] if mean <= tile.rows), _TILES[-1])


def _product(
    x: torch.Tensor, weights: Weights, groups: Groups, bias: torch.Tensor | None, READS_PLACES: bool
) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_experts, inputs = len(groups.places), len(groups.ends), x.shape[1]
    if isinstance(weights, QuantizedMatrix):
        values, scales, zeros, group = weights.values, weights.scales, weights.zeros, weights.group
        outputs = weights.shape[0] // num_experts
    else:
        assert weights.is_contiguous()
        values, scales, zeros, group = weights, None, None, inputs
        outputs = weights.shape[1]
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    tile = tile_for(num_rows, num_experts, x.dtype)
    # Each expert has rows that fill no tile, but there are no more experts than rows.
    most_tiles = num_rows // tile.rows + min(num_experts, num_rows)
    launch(
        _product_kernel,
        # Of one dimension: the second one of a grid has 65,535 at most.
        (triton.cdiv(outputs, tile.outputs) * most_tiles,),
        x,
        values,
        scales,
        zeros,
        bias,
        groups.places,
        groups.ends,
        out,
        x.stride(0),
        num_experts,
        outputs,
        inputs,
        group,
        groups.top_k,
        **stored_constants(weights, inputs, tile.step, many=tile.rows > _TILES[0].rows),
        EXPERTS=triton.next_power_of_2(num_experts),
        READS_PLACES=READS_PLACES,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _keys(ranks, places):
    """Numbers of 64 bits in the order of ranks, of equal ones the first place highest. The lower 31 bits are the last
    place that there can be, less the rank's. A rank and a place by themselves take twice the instructions."""
    bits = ranks.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _choose_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    chosen_ptr,
    logits_stride,
    num_members,
    scale,
    SCORES: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Program t: token t. num_members: experts of a group. GROUPS, MEMBERS, PLACES: powers of two, NUM_GROUPS,
    num_members and TOP_K at least. See `Choice`."""
    logits_ptr += tl.program_id(0).to(tl.int64) * logits_stride
    none, least = -float("inf"), -(1 << 63)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, MEMBERS)[None, :]
    experts = group[:, None] * num_members + member
    is_expert = (group < NUM_GROUPS)[:, None] & (member < num_members)
    scores = tl.load(logits_ptr + experts, mask=is_expert, other=none).to(tl.float32)
    highest, total = 0.0, 1.0
    if SCORES == "softmax":
        highest = tl.max(tl.max(scores, 1), 0)
        total = tl.sum(tl.sum(tl.exp(scores - highest), 1), 0)
    ranks = _scores(scores, highest, total, SCORES)
    if correction_ptr is not None:
        ranks += tl.load(correction_ptr + experts, mask=is_expert, other=0.0)
    ranks = tl.where(is_expert, ranks, none)
    if KEPT_GROUPS < NUM_GROUPS:
        of_groups, first = tl.max(ranks, 1, return_indices=True)
        if correction_ptr is not None:
            second = tl.max(tl.where(member == first[:, None], none, ranks), 1)
            of_groups += tl.where(second == none, 0.0, second)
        is_kept = group < 0
        keys = _keys(of_groups, group)
        for _ in tl.static_range(KEPT_GROUPS):
            best = tl.max(keys, 0)
            is_kept = is_kept | (keys == best)
            keys = tl.where(keys == best, least, keys)
        ranks = tl.where(is_kept[:, None], ranks, none)
    keys = _keys(tl.reshape(ranks, (GROUPS * MEMBERS,)), tl.arange(0, GROUPS * MEMBERS))
    places = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(places == place, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        keys = tl.where(keys == best, least, keys)
    # Padding is chosen where all is NaN.
    chosen = chosen // MEMBERS * num_members + chosen % MEMBERS
    chosen = tl.minimum(chosen, NUM_GROUPS * num_members - 1)
    some = places < TOP_K
    weights = tl.load(logits_ptr + chosen, mask=some, other=none).to(tl.float32)
    if SCORES == "softmax_of_chosen":
        highest = tl.max(weights, 0)
        total = tl.sum(tl.exp(weights - highest), 0)
    weights = tl.where(some, _scores(weights, highest, total, "softmax" if SCORES != "sigmoid" else SCORES), 0.0)
    if IS_NORMALIZED:
        weights = weights / tl.sum(weights, 0)
    at = tl.program_id(0).to(tl.int64) * TOP_K + places
    tl.store(weights_ptr + at, weights * scale, mask=some)
    tl.store(chosen_ptr + at, chosen.to(tl.int64), mask=some)


@triton.jit
def _scores(logits, highest, total, SCORES: tl.constexpr):
    if SCORES == "softmax":
        logits = tl.exp(logits - highest) / total
    elif SCORES == "sigmoid":
        logits = 1.0 / (1.0 + tl.exp(-logits))
    return logits


@triton.jit(do_not_specialize=["num_chosen"])
def _group_kernel(chosen_ptr, places_ptr, ends_ptr, num_chosen, CHUNK: tl.constexpr):
    """Program e finds the places of expert e, which lie behind those of all experts before it."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), dtype=tl.int32)
    own = tl.zeros((CHUNK,), dtype=tl.int32)
    for begin in range(0, num_chosen, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        found = tl.load(chosen_ptr + index, mask=index < num_chosen, other=1 << 30)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    begin_own = tl.sum(before, 0)
    tl.store(ends_ptr + expert, begin_own + tl.sum(own, 0))
    for begin in range(0, num_chosen, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        found = tl.load(chosen_ptr + index, mask=index < num_chosen, other=1 << 30)
        is_own = (found == expert).to(tl.int32)
        tl.store(places_ptr + begin_own + tl.cumsum(is_own, 0) - 1, index, mask=is_own > 0)
        begin_own += tl.sum(is_own, 0)


@triton.jit
def _product_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    places_ptr,
    ends_ptr,
    out_ptr,
    x_stride,
    num_experts,
    num_outputs,
    inputs,
    group,
    top_k,
    EXPERTS: tl.constexpr,
    READS_PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    MAY_END: tl.constexpr,
):
    """Program t * (blocks of OUTPUTS outputs) + n: the n-th such block of tile t, ROWS rows of one expert at most.
    READS_PLACES: x has a row for each token, and the result a row for each place in order; else it is the other way
    round. EXPERTS: a power of two."""
    num_blocks = tl.cdiv(num_outputs, OUTPUTS)
    tile = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - tile * num_blocks
    every = tl.arange(0, EXPERTS)
    is_expert = every < num_experts
    ends = tl.load(ends_ptr + every, mask=is_expert, other=0)
    begins = tl.load(ends_ptr + every - 1, mask=is_expert & (every > 0), other=0)
    num_tiles = tl.where(is_expert, (ends - begins + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert >= num_experts:
        return
    is_own = every == expert
    first_tile = tl.sum(tl.where(is_own, tile_ends - num_tiles, 0), 0)
    first = tl.sum(tl.where(is_own, begins, 0), 0) + (tile - first_tile) * ROWS
    rows = first + tl.arange(0, ROWS)
    some_rows = rows < tl.sum(tl.where(is_own, ends, 0), 0)
    places = tl.load(places_ptr + rows, mask=some_rows, other=0)
    if READS_PLACES:
        x_rows, out_rows = places // top_k, rows
    else:
        x_rows, out_rows = rows, places
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    some_outputs = outputs < num_outputs
    total = product(
        x_ptr + x_rows.to(tl.int64)[:, None] * x_stride,
        some_rows,
        values_ptr,
        scales_ptr,
        zeros_ptr,
        expert.to(tl.int64) * num_outputs + outputs,
        some_outputs,
        inputs,
        group,
        ROWS,
        OUTPUTS,
        STEP,
        GROUP,
        FORMAT,
        SCALES,
        MAY_END,
    )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * num_outputs + outputs, mask=some_outputs, other=0.0)
        total += bias.to(tl.float32)[:, None]
    out = out_ptr + out_rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out, tl.trans(total), mask=some_rows[:, None] & some_outputs[None, :])


@triton.jit
def _sum_kernel(outputs_ptr, weights_ptr, out_ptr, hidden_size, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (t, n): COLUMNS numbers of token t."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < hidden_size
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + place)
        found = tl.load(outputs_ptr + (token * TOP_K + place) * hidden_size + columns, mask=mask, other=0.0)
        total += found.to(tl.float32) * weight
    tl.store(out_ptr + token * hidden_size + columns, total, mask=mask)
