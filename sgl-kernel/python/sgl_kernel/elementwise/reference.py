"""The functions of `sgl_kernel.elementwise` in torch, for any device. They define the results, and run on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32, and rounded to x's dtype before the weight is multiplied on, as transformers does; where the weight
    is float32, after that."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), eps=eps).mul_(weight)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    if weight.dtype == torch.float32:
        return wide.mul_(weight).to(x.dtype)
    return wide.to(x.dtype).mul_(weight)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.add_(residual)
    return rmsnorm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swish_and_mul(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """In float32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(alpha * gate)).mul_(up.clamp(-limit, limit).add_(1)).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: (num_tokens, num_heads, head_dim). The first half of a head is rotated with its second half. cos, sin:
    (num_tokens, 1, head_dim) in x's dtype, the cosines twice and the sines after their negatives. The sign of the
    rotation is in sin, so that a roll stands for rotate-half."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


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
    """See `sgl_kernel.elementwise.store_latent`."""
    rank, page_size = norm_weight.shape[0], pages.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).to(latent.dtype)[:, None].chunk(2, dim=-1)
    rotation = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) if interleaved else x
        return apply_rope(halves, *rotation)

    q_out[..., -q_rope.shape[2] :] = rotated(q_rope)
    normed = rmsnorm(latent[:, :rank], norm_weight, eps)
    stored = saturating_cast(torch.cat((normed, rotated(latent[:, None, rank:])[:, 0]), dim=-1), pages.dtype)
    if pages.dtype.itemsize == 1:
        # Torch does not index all types of 8 bits.
        pages, stored = pages.view(torch.uint8), stored.view(torch.uint8)
    pages[loc // page_size, loc % page_size, 0] = stored


def saturating_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype, or itself in its own. What would become infinity or NaN there, or when it is cast back,
    becomes the largest value instead. NaN stays."""
    if x.dtype == dtype:
        return x
    most = largest_cast(x.dtype, dtype)
    return (x if most is None else x.clamp(-most, most)).to(dtype)


def largest_cast(source: torch.dtype, dtype: torch.dtype) -> float | None:
    """The largest value that `saturating_cast` leaves as it is; None where that is every number."""
    if dtype.itemsize == 1:
        return torch.finfo(dtype).max
    # The largest of bfloat16 that float16 has, too.
    return 65280.0 if (source, dtype) == (torch.float16, torch.bfloat16) else None
