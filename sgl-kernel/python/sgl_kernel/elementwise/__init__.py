"""A decoder's work between its matrix products: norms, activation, rotation.

Each function runs flashinfer's fused kernel for float16 and bfloat16 on a GPU, where flashinfer is installed and
supports the shape, else `triton_kernels` there. For float32 on the CPU it runs `sgl_kernel.cpu`, where there is a C
compiler. Otherwise it runs torch; `reference` defines the result. The kernels round less often in between, so that
their results differ from torch's by a rounding. Names are SGLang's; the arguments are this package's own.

No function waits for the device or looks at the values of `positions`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sgl_kernel.cpu import elementwise as cpu
from sgl_kernel.cpu.library import takes
from sgl_kernel.elementwise import reference
from sgl_kernel.elementwise.reference import saturating_cast
from sgl_kernel.flashinfer_kernels import flashinfer_function, is_on_gpu
from sgl_kernel.triton_modules import triton_module

__all__ = [
    "apply_rope_and_store",
    "apply_rope_with_cos_sin_cache_inplace",
    "clamped_swish_and_mul",
    "fused_add_rmsnorm",
    "gelu_tanh_and_mul",
    "has_rope_and_store_kernel",
    "has_rope_kernel",
    "has_store_kernel",
    "has_store_latent_kernel",
    "qk_rmsnorm",
    "rmsnorm",
    "saturating_cast",
    "silu_and_mul",
    "store_kv",
    "store_latent",
]

# Head dimensions for which flashinfer's rotation kernel is always built.
_ROPE_HEAD_DIMS = (64, 128, 256, 512)
# The kernels read 16 bytes at once.
_VECTOR = 8


def _kernel(name: str, x: torch.Tensor) -> Callable[..., Any] | None:
    # Without rows there is no launch. This happens in the last layer of a batch that samples nothing.
    if not is_on_gpu(x) or x.dtype not in (torch.float16, torch.bfloat16) or not x.shape[0]:
        return None
    return flashinfer_function(name, x.device)


def _norm_kernel(name: str, x: torch.Tensor, weight: torch.Tensor) -> Callable[..., Any] | None:
    """It reads the weight as x's dtype."""
    return _kernel(name, x) if weight.dtype == x.dtype else None


def _triton(x: torch.Tensor) -> ModuleType | None:
    """`triton_kernels`, where x is on a GPU and has rows."""
    return triton_module(f"{__name__}.triton_kernels") if x.is_cuda and x.shape[0] else None


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: (num_tokens, d); weight: (d,), of x's dtype or
    float32. Returns a new tensor."""
    if takes(x) and x.is_contiguous():
        return cpu.rmsnorm(x, None, weight, eps)
    kernel = _norm_kernel("rmsnorm", x, weight)
    if kernel is not None and x.shape[-1] % _VECTOR == 0:
        return kernel(x, weight, eps)
    return (_triton(x) or reference).rmsnorm(x, weight, eps)


def qk_rmsnorm(qk: torch.Tensor, weight: torch.Tensor, num_q_heads: int, eps: float) -> torch.Tensor:
    """Each head of queries and keys by itself. qk: (num_tokens, num_heads, head_dim), any strides of tokens and
    heads, queries first; weight: (num_heads, head_dim), the same for all heads of the queries, and of the keys.
    Returns a new tensor."""
    kernel = _norm_kernel("rmsnorm", qk, weight)
    if kernel is None or qk.shape[-1] % _VECTOR:
        ours = _triton(qk)
        return reference.rmsnorm(qk, weight, eps) if ours is None else ours.qk_rmsnorm(qk, weight, eps)
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    for heads in (slice(0, num_q_heads), slice(num_q_heads, None)):
        kernel(qk[:, heads], weight[heads][0], eps, out=out[:, heads])
    return out


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and x + residual. x, residual: (num_tokens, d), contiguous. Both are overwritten, and
    may hold the results."""
    if takes(x):
        return cpu.rmsnorm(residual, x, weight, eps), residual
    kernel = _norm_kernel("fused_add_rmsnorm", x, weight)
    if kernel is None or x.shape[-1] % _VECTOR:
        return (_triton(x) or reference).fused_add_rmsnorm(x, residual, weight, eps)
    kernel(x, residual, weight, eps)
    return x, residual


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (num_tokens, 2 * d), gate and up side by side. Returns silu(gate) * up, (num_tokens, d)."""
    kernel = _kernel("silu_and_mul", x)
    if kernel is not None and x.shape[-1] % (2 * _VECTOR) == 0:
        return kernel(x)
    return (_triton(x) or reference).silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gemma's activation. x: (num_tokens, 2 * d), gate and up side by side. Returns gelu(gate) * up, (num_tokens, d),
    by the approximation with tanh (Hendrycks and Gimpel, 2016)."""
    return (_triton(x) or reference).gelu_tanh_and_mul(x)


def clamped_swish_and_mul(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss's activation. x: (num_tokens, 2 * d), gate and up side by side. Returns (up + 1) * gate *
    sigmoid(alpha * gate), (num_tokens, d), where gate is at most limit and up between -limit and limit."""
    return (_triton(x) or reference).clamped_swish_and_mul(x, alpha, limit)


def has_rope_kernel(x: torch.Tensor) -> bool:
    """Whether `apply_rope_with_cos_sin_cache_inplace` takes x: (num_tokens, num_heads, head_dim). If not, the caller
    looks cosines and sines up, once for all layers, and calls `reference.apply_rope`."""
    if takes(x):
        return x.stride(-1) == 1
    return _flashinfer_rope(x) is not None or _triton(x) is not None


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor, qk: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Rotate the first half of each head with its second half. positions: (num_tokens,) int64. qk: (num_tokens,
    heads, head_dim), at least two heads, any strides of tokens and heads. cos_sin_cache: (num_positions, head_dim)
    float32, cosines, then sines."""
    if takes(qk):
        cpu.apply_rope(positions, qk, cos_sin_cache)
        return
    kernel = _flashinfer_rope(qk)
    if kernel is not None:
        # It takes queries and keys as two tensors, and rotates both alike.
        kernel(positions, qk[:, :1], qk[:, 1:], qk.shape[-1], cos_sin_cache, is_neox=True)
        return
    ours = _triton(qk)
    assert ours is not None, "no kernel takes it: ask has_rope_kernel"
    ours.apply_rope(positions, qk, cos_sin_cache)


def _flashinfer_rope(x: torch.Tensor) -> Callable[..., Any] | None:
    return _kernel("apply_rope_with_cos_sin_cache_inplace", x) if x.shape[-1] in _ROPE_HEAD_DIMS else None


def has_rope_and_store_kernel(qk: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `apply_rope_and_store` takes these: on a GPU, with values of heads side by side."""
    return qk.stride(2) == v.stride(2) == 1 and _triton(qk) is not None


def apply_rope_and_store(
    positions: torch.Tensor,
    qk: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    loc: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """`apply_rope_with_cos_sin_cache_inplace` of the queries, and of the keys into their slots, and `store_kv` of the
    values, in one launch. qk: as many keys as v has, behind the queries; they are not overwritten. scales:
    (2, num_kv_heads) float32, contiguous, what keys and values are divided by when they are stored; None for 1. Only
    where `has_rope_and_store_kernel`."""
    ours = _triton(qk)
    assert ours is not None, "no kernel takes it: ask has_rope_and_store_kernel"
    ours.apply_rope_and_store(positions, qk, v, cos_sin_cache, k_pages, v_pages, loc, scales)


def has_store_kernel(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `store_kv` takes these: on a GPU, and of one shape with three dimensions."""
    return k.dim() == 3 and k.shape == v.shape and k.stride(2) == v.stride(2) == 1 and _triton(k) is not None


def store_kv(
    k_pages: torch.Tensor, v_pages: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write tokens into slots loc of both at once, as `saturating_cast` gives them in the pages' dtype; slot
    page * page_size + i is token i of that page. k_pages, v_pages: (num_pages, page_size, num_kv_heads, head_dim),
    contiguous but for the first two dimensions; loc: (num_tokens,) int64; k, v: (num_tokens, num_kv_heads, head_dim),
    any strides of tokens and heads. Only where `has_store_kernel`."""
    ours = _triton(k)
    assert ours is not None, "no kernel takes it: ask has_store_kernel"
    ours.store_kv(k_pages, v_pages, loc, k, v)


def has_store_latent_kernel(q_rope: torch.Tensor, latent: torch.Tensor, pages: torch.Tensor) -> bool:
    """Whether one kernel does `store_latent`: on a GPU, of 16 bits, with values side by side, into pages of
    the same dtype or of 8 bits."""
    if latent.dtype not in (torch.float16, torch.bfloat16) or q_rope.dtype != latent.dtype:
        return False
    if pages.dtype != latent.dtype and pages.dtype.itemsize != 1:
        return False
    return q_rope.stride(2) == latent.stride(1) == pages.stride(3) == 1 and _triton(latent) is not None


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
    interleaved: bool = True,
) -> None:
    """Of multi-head latent attention, before its scores: the norm of each token's latent, and its rotated key, into
    slot loc, as `saturating_cast` gives them in the pages' dtype, and the queries' rotation. One launch where
    `has_store_latent_kernel`.

    positions, loc: (num_tokens,) int64. latent: (num_tokens, rank + rotary_dim), any stride of tokens. norm_weight:
    (rank,), see `rmsnorm`. q_rope: (num_tokens, num_heads, rotary_dim), any strides of tokens and heads. q_out:
    (num_tokens, num_heads, rotary_dim or more), any strides of tokens and heads; its last rotary_dim values are
    written. cos_sin_cache: (num_positions, rotary_dim) float32, cosines, then sines. pages: (num_pages, page_size, 1,
    rank + rotary_dim), any strides of pages and tokens. interleaved: value 2i is rotated with value 2i + 1, as
    DeepSeek's models have it, else value i with value i + rotary_dim / 2. The results lie at i and i + rotary_dim / 2
    either way, as transformers' `apply_rotary_pos_emb_interleave` leaves them.
    """
    ours = _triton(latent) if has_store_latent_kernel(q_rope, latent, pages) else None
    (ours or reference).store_latent(
        positions, q_rope, q_out, latent, norm_weight, eps, cos_sin_cache, pages, loc, interleaved
    )
