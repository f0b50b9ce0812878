"""A decoder's work between its matrix products, in Triton: norms, activation, rotation, and rows into pages.

The functions are those of `sgl_kernel.elementwise`, for float32, float16 and bfloat16 of any size. Each is one
launch. They compute in float32 and round once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sgl_kernel.elementwise.reference import largest_cast
from sgl_kernel.triton_launch import launch

# Values of an activation that a program computes.
_ACTIVATION_BLOCK = 1024
# Values of heads that a program rotates or normalises.
_HEADS_BLOCK = 2048
_LARGEST_E5M2 = tl.constexpr(torch.finfo(torch.float8_e5m2).max)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    d = x.shape[1]
    block = triton.next_power_of_2(d)
    launch(
        _rmsnorm_kernel,
        (x.shape[0],),
        x,
        None,
        weight,
        out,
        x.stride(0),
        d,
        eps,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    d = x.shape[1]
    block = triton.next_power_of_2(d)
    launch(_rmsnorm_kernel, (x.shape[0],), x, residual, weight, x, d, d, eps, BLOCK=block, num_warps=_warps(block))
    return x, residual


def qk_rmsnorm(qk: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_tokens, num_heads, head_dim = qk.shape
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    block_d = triton.next_power_of_2(head_dim)
    rows = max(1, _HEADS_BLOCK // block_d)
    launch(
        _qk_rmsnorm_kernel,
        (num_tokens, triton.cdiv(num_heads, rows)),
        qk,
        weight,
        out,
        qk.stride(0),
        qk.stride(1),
        weight.stride(0),
        num_heads,
        head_dim,
        eps,
        ROWS=rows,
        BLOCK_D=block_d,
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _activate(x, 1.0, None)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _activate(x, 2 * math.sqrt(2 / math.pi), None, cubic=0.044715)


def clamped_swish_and_mul(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _activate(x, alpha, limit)


def _activate(x: torch.Tensor, alpha: float, limit: float | None, cubic: float = 0.0) -> torch.Tensor:
    num_tokens, d = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, d), dtype=x.dtype, device=x.device)
    grid = (num_tokens, triton.cdiv(d, _ACTIVATION_BLOCK))
    of_gate = dict(ALPHA=alpha, LIMIT=limit, CUBIC=cubic)
    launch(_activation_kernel, grid, x, out, x.stride(0), d, **of_gate, BLOCK=_ACTIVATION_BLOCK)
    return out


def apply_rope(positions: torch.Tensor, qk: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """In place."""
    num_tokens, num_heads, head_dim = qk.shape
    half = head_dim // 2
    block_d = triton.next_power_of_2(half)
    rows = max(1, _HEADS_BLOCK // 2 // block_d)
    launch(
        _rope_kernel,
        (num_tokens, triton.cdiv(num_heads, rows)),
        positions,
        qk,
        cos_sin_cache,
        qk.stride(0),
        qk.stride(1),
        num_heads,
        half,
        ROWS=rows,
        BLOCK_D=block_d,
    )


def apply_rope_and_store(
    positions: torch.Tensor,
    qk: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    loc: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    num_tokens, num_heads, head_dim = qk.shape
    num_kv_heads = v.shape[1]
    block_d = triton.next_power_of_2(head_dim // 2)
    rows = max(1, _HEADS_BLOCK // 2 // block_d)
    launch(
        _rope_and_store_kernel,
        (num_tokens, triton.cdiv(num_heads + num_kv_heads, rows)),
        positions,
        qk,
        v,
        cos_sin_cache,
        k_pages,
        v_pages,
        loc,
        *(qk.stride(0), qk.stride(1), v.stride(0), v.stride(1)),
        *(*k_pages.stride()[:2], *v_pages.stride()[:2]),
        num_heads - num_kv_heads,
        num_kv_heads,
        head_dim // 2,
        scales,
        PAGE_SIZE=k_pages.shape[1],
        MOST=None if k_pages.dtype == qk.dtype else largest_cast(qk.dtype, k_pages.dtype),
        ROWS=rows,
        BLOCK_D=block_d,
    )


def store_kv(
    k_pages: torch.Tensor, v_pages: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    num_tokens, num_heads, head_dim = k.shape
    block_d = triton.next_power_of_2(head_dim)
    rows = max(1, min(triton.next_power_of_2(num_heads), _HEADS_BLOCK // block_d))
    launch(
        _store_kv_kernel,
        (num_tokens, triton.cdiv(num_heads, rows), 2),
        k_pages,
        v_pages,
        loc,
        k,
        v,
        *(*k_pages.stride()[:2], *v_pages.stride()[:2]),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        num_heads,
        head_dim,
        PAGE_SIZE=k_pages.shape[1],
        MOST=None if k_pages.dtype == k.dtype else largest_cast(k.dtype, k_pages.dtype),
        ROWS=rows,
        BLOCK_D=block_d,
    )


def store_latent(
    positions: torch.Tensor,
    q_rope: torch.Tensor,
    q_out: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    pages: torch.Tensor,
    loc: torch.Tensor,
    interleaved: bool,
) -> None:
    num_tokens, num_heads, rotary_dim = q_rope.shape
    rank, half = norm_weight.shape[0], rotary_dim // 2
    assert latent.shape[1] == pages.shape[3] == rank + rotary_dim, f"{rank} + {rotary_dim} values"
    block_d = triton.next_power_of_2(half)
    rows = max(1, _HEADS_BLOCK // 2 // block_d)
    launch(
        _store_latent_kernel,
        (num_tokens, 1 + triton.cdiv(num_heads, rows)),
        positions,
        q_rope,
        q_out[..., -rotary_dim:],
        latent,
        norm_weight,
        cos_sin_cache,
        pages,
        loc,
        *(q_rope.stride(0), q_rope.stride(1), q_out.stride(0), q_out.stride(1)),
        *(latent.stride(0), pages.stride(0), pages.stride(1)),
        num_heads,
        rank,
        half,
        eps,
        PAGE_SIZE=pages.shape[1],
        MOST=None if pages.dtype == latent.dtype else largest_cast(latent.dtype, pages.dtype),
        INTERLEAVED=interleaved,
        ROWS=rows,
        BLOCK_D=block_d,
        BLOCK_R=triton.next_power_of_2(rank),
    )


def _warps(block: int) -> int:
    """Eight values for each thread, and 16 warps at most."""
    return min(16, max(1, block // 256))


@triton.jit
def _rmsnorm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, d, eps, BLOCK: tl.constexpr):
    """Program t: row t. residual is None or is added, and then holds the sum. out may be x."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < d
    x = tl.load(x_ptr + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + row * d + i
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual, x, mask=mask)
    factor = tl.rsqrt(tl.sum(x * x, 0) / d + eps)
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * d + i, x * factor * weight, mask=mask)


@triton.jit
def _tile(num_heads, head_dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The heads of program (t, b), the places in them, and a mask of those that exist."""
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    return heads, d, (heads < num_heads)[:, None] & (d < head_dim)[None, :]


@triton.jit
def _qk_rmsnorm_kernel(
    qk_ptr,
    weight_ptr,
    out_ptr,
    token_stride,
    head_stride,
    weight_stride,
    num_heads,
    head_dim,
    eps,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (t, b): ROWS heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    heads, d, mask = _tile(num_heads, head_dim, ROWS, BLOCK_D)
    x = tl.load(qk_ptr + token * token_stride + heads[:, None] * head_stride + d[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / head_dim + eps)
    weight = tl.load(weight_ptr + heads[:, None] * weight_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
    places = (token * num_heads + heads)[:, None] * head_dim + d[None, :]
    tl.store(out_ptr + places, x * factor[:, None] * weight, mask=mask)


@triton.jit
def _activation_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    d,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gate * sigmoid(ALPHA * (gate + CUBIC * gate^3)) * up: gelu's tanh(y) is 2 * sigmoid(2 * y) - 1. CUBIC: 0 for
    others. LIMIT: see `clamped_swish_and_mul`, else None."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < d
    gate = tl.load(x_ptr + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + d + i, mask=mask, other=0.0).to(tl.float32)
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    inner = gate
    if CUBIC != 0.0:
        inner = gate + CUBIC * gate * gate * gate
    tl.store(out_ptr + row * d + i, gate / (1.0 + tl.exp(-ALPHA * inner)) * up, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rope_kernel(
    positions_ptr,
    qk_ptr,
    table_ptr,
    token_stride,
    head_stride,
    num_heads,
    half,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (t, b): ROWS heads of token t. table: cosines, then sines, half of each per position."""
    token = tl.program_id(0).to(tl.int64)
    heads, d, mask = _tile(num_heads, half, ROWS, BLOCK_D)
    d_mask = d < half
    angle = table_ptr + tl.load(positions_ptr + token) * 2 * half + d
    cos = tl.load(angle, mask=d_mask, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=d_mask, other=0.0)[None, :]
    place = qk_ptr + token * token_stride + heads[:, None] * head_stride + d[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, first * cos - second * sin, mask=mask)
    tl.store(place + half, second * cos + first * sin, mask=mask)


@triton.jit
def _saturated(x, MOST: tl.constexpr):
    if MOST is None:
        return x
    else:
        wide = tl.clamp(x.to(tl.float32), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        if MOST == _LARGEST_E5M2:
            return _to_e5m2(wide)
        else:
            return wide


@triton.jit
def _to_e5m2(x):
    """x, float32 and not too large, rounded to the nearest, ties to even. NaN stays. Triton's own conversion rounds
    ties away from zero on GPUs before compute capability 8.9, and makes NaN 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Two bits of the mantissa stay, and 15 stands for 0 in an exponent, not 127.
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - ((127 - 15) << 2)
    # Below the least exponent: a whole number of steps of 2 ** -16, which is the last bit of numbers from 128 on.
    small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    found = tl.where(size < 0x38800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(x != x, 0x7F, found).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def _divided(x, scale):
    wide = x.to(tl.float32)
    return tl.div_rn(wide, tl.zeros_like(wide) + scale).to(x.dtype)


@triton.jit
def _place(slot, page_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """Where a slot lies: pages of some pools lie apart."""
    page = slot // PAGE_SIZE
    return page * page_stride + (slot - page * PAGE_SIZE) * slot_stride


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "loc_ptr"])
def _rope_and_store_kernel(
    positions_ptr,
    qk_ptr,
    v_ptr,
    table_ptr,
    k_pages_ptr,
    v_pages_ptr,
    loc_ptr,
    qk_token_stride,
    qk_head_stride,
    v_token_stride,
    v_head_stride,
    k_page_stride,
    k_slot_stride,
    v_page_stride,
    v_slot_stride,
    num_q_heads,
    num_kv_heads,
    half,
    scales_ptr,
    PAGE_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (t, b): ROWS heads of token t. Of its queries, keys and values, one behind the other, queries are
    rotated in place, keys are rotated into their slot, values copied into theirs, divided by their head's scale.
    scales are None where all are 1: a division takes longer than the rest."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < half
    num_qk_heads = num_q_heads + num_kv_heads
    is_q, is_v = heads < num_q_heads, heads >= num_qk_heads
    is_k = (heads >= num_q_heads) & (heads < num_qk_heads)
    exists = (heads < num_qk_heads + num_kv_heads)[:, None] & d_mask[None, :]
    angle = table_ptr + tl.load(positions_ptr + token) * 2 * half + d
    cos = tl.load(angle, mask=d_mask, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=d_mask, other=0.0)[None, :]
    of_qk = qk_ptr + token * qk_token_stride + heads[:, None] * qk_head_stride + d[None, :]
    of_v = v_ptr + token * v_token_stride + (heads - num_qk_heads)[:, None] * v_head_stride + d[None, :]
    place = tl.where(is_v[:, None], of_v, of_qk)
    first = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=exists, other=0.0).to(tl.float32)
    rotated_first = tl.where(is_v[:, None], first, first * cos - second * sin)
    rotated_second = tl.where(is_v[:, None], second, second * cos + first * sin)
    tl.store(of_qk, rotated_first, mask=exists & is_q[:, None])
    tl.store(of_qk + half, rotated_second, mask=exists & is_q[:, None])
    slot = tl.load(loc_ptr + token)
    k_slot = k_pages_ptr + _place(slot, k_page_stride, k_slot_stride, PAGE_SIZE)
    v_slot = v_pages_ptr + _place(slot, v_page_stride, v_slot_stride, PAGE_SIZE)
    of_k_slot = k_slot + (heads - num_q_heads)[:, None] * (2 * half) + d[None, :]
    of_v_slot = v_slot + (heads - num_qk_heads)[:, None] * (2 * half) + d[None, :]
    # Rounded as without this kernel, when rotated and when divided, so that all pools store the same bytes.
    stored_first, stored_second = (
        rotated_first.to(qk_ptr.dtype.element_ty),
        rotated_second.to(qk_ptr.dtype.element_ty),
    )
    if scales_ptr is not None:
        has_scale = (heads >= num_q_heads) & (heads < num_qk_heads + num_kv_heads)
        scale = tl.load(scales_ptr + heads - num_q_heads, mask=has_scale, other=1.0)[:, None]
        stored_first, stored_second = _divided(stored_first, scale), _divided(stored_second, scale)
    stored_first, stored_second = _saturated(stored_first, MOST), _saturated(stored_second, MOST)
    tl.store(of_k_slot, stored_first, mask=exists & is_k[:, None])
    tl.store(of_k_slot + half, stored_second, mask=exists & is_k[:, None])
    tl.store(of_v_slot, stored_first, mask=exists & is_v[:, None])
    tl.store(of_v_slot + half, stored_second, mask=exists & is_v[:, None])


@triton.jit(do_not_specialize_on_alignment=["loc_ptr"])
def _store_kv_kernel(
    k_pages_ptr,
    v_pages_ptr,
    loc_ptr,
    k_ptr,
    v_ptr,
    k_page_stride,
    k_slot_stride,
    v_page_stride,
    v_slot_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_heads,
    head_dim,
    PAGE_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (t, b, 0) stores K of ROWS heads of token t, program (t, b, 1) V. MOST: of what is
    stored, see `largest_cast`."""
    token = tl.program_id(0).to(tl.int64)
    heads, d, mask = _tile(num_heads, head_dim, ROWS, BLOCK_D)
    slot = tl.load(loc_ptr + token)
    inside = heads[:, None] * head_dim + d[None, :]
    if tl.program_id(2) == 0:
        x = tl.load(k_ptr + token * k_token_stride + heads[:, None] * k_head_stride + d[None, :], mask=mask)
        k_slot = k_pages_ptr + _place(slot, k_page_stride, k_slot_stride, PAGE_SIZE)
        tl.store(k_slot + inside, _saturated(x, MOST), mask=mask)
    else:
        x = tl.load(v_ptr + token * v_token_stride + heads[:, None] * v_head_stride + d[None, :], mask=mask)
        v_slot = v_pages_ptr + _place(slot, v_page_stride, v_slot_stride, PAGE_SIZE)
        tl.store(v_slot + inside, _saturated(x, MOST), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "loc_ptr"])
def _store_latent_kernel(
    positions_ptr,
    q_ptr,
    q_out_ptr,
    latent_ptr,
    weight_ptr,
    table_ptr,
    pages_ptr,
    loc_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    latent_stride,
    page_stride,
    slot_stride,
    num_heads,
    rank,
    half,
    eps,
    PAGE_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (t, 0) stores the latent of token t, program (t, 1 + b) rotates ROWS heads of its queries. q_out: where
    the rotated values of the first head begin."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < half
    angle = table_ptr + tl.load(positions_ptr + token) * 2 * half + d
    cos = tl.load(angle, mask=d_mask, other=0.0)
    sin = tl.load(angle + half, mask=d_mask, other=0.0)
    first_d = 2 * d if INTERLEAVED else d
    second_d = first_d + (1 if INTERLEAVED else half)
    if block == 0:
        row = latent_ptr + token * latent_stride
        slot = pages_ptr + _place(tl.load(loc_ptr + token), page_stride, slot_stride, PAGE_SIZE)
        # Rounded as without this kernel, so that all pools store the same bytes.
        dtype = latent_ptr.dtype.element_ty
        i = tl.arange(0, BLOCK_R)
        i_mask = i < rank
        x = tl.load(row + i, mask=i_mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + i, mask=i_mask, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / rank + eps) * weight
        tl.store(slot + i, _saturated(normed.to(dtype), MOST), mask=i_mask)
        first = tl.load(row + rank + first_d, mask=d_mask, other=0.0).to(tl.float32)
        second = tl.load(row + rank + second_d, mask=d_mask, other=0.0).to(tl.float32)
        of_rotated = slot + rank + d
        tl.store(of_rotated, _saturated((first * cos - second * sin).to(dtype), MOST), mask=d_mask)
        tl.store(of_rotated + half, _saturated((second * cos + first * sin).to(dtype), MOST), mask=d_mask)
    else:
        heads = (block - 1) * ROWS + tl.arange(0, ROWS)
        mask = (heads < num_heads)[:, None] & d_mask[None, :]
        of_head = q_ptr + token * q_token_stride + heads[:, None] * q_head_stride
        ahead = tl.load(of_head + first_d[None, :], mask=mask, other=0.0).to(tl.float32)
        behind = tl.load(of_head + second_d[None, :], mask=mask, other=0.0).to(tl.float32)
        place = q_out_ptr + token * out_token_stride + heads[:, None] * out_head_stride + d[None, :]
        tl.store(place, ahead * cos[None, :] - behind * sin[None, :], mask=mask)
        tl.store(place + half, behind * cos[None, :] + ahead * sin[None, :], mask=mask)
