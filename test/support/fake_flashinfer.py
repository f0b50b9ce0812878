"""The functions of flashinfer that `sgl_kernel` calls, in torch: their signatures, and what they demand of arguments.

It stands for the package where there is no GPU: `installed` puts it in its place and has every tensor pass for one of
a GPU. Arithmetic is in float32 and rounded once, as in the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch

HALVES = (torch.float16, torch.bfloat16)


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    _check(x.dtype in HALVES and weight.dtype == x.dtype, "half precision")
    _check(weight.shape == x.shape[-1:] and weight.stride(-1) == x.stride(-1) == 1, "a weight for a contiguous row")
    _check(x.shape[0] > 0, "rows to launch blocks for")


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    _check_norm(input, weight)
    _check(input.dim() in (2, 3), "2 or 3 dimensions")
    if out is None:
        out = torch.empty_like(input)
    _check(out.shape == input.shape and out.stride(-1) == 1, "an output of the input's shape")
    out.copy_(_norm(input.float(), weight, eps))
    return out


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    _check_norm(input, weight)
    _check_norm(residual, weight)
    _check(input.dim() == 2 and residual.shape == input.shape, "two matrices of one shape")
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_norm(total, weight, eps))


def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    _check(input.dtype in HALVES and input.is_contiguous() and input.shape[0] > 0, "rows in half precision")
    _check(input.shape[-1] // 2 * input.dtype.itemsize % 16 == 0, "halves of whole vectors")
    assert out is None
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    _check(cos_sin_cache.dtype == torch.float32, "cos_sin_cache should be float32")
    _check(cos_sin_cache.is_contiguous() and cos_sin_cache.shape[1] == head_size, "a table for whole heads")
    _check(positions.is_contiguous() and positions.dtype in (torch.int32, torch.int64), "positions side by side")
    assert is_neox
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for each in (query, key):
        _check(each.dtype in HALVES and each.shape[0] == len(positions) > 0, "rows in half precision")
        heads = each.view(each.shape[0], -1, head_size)
        _check(heads.shape[1] > 0 and heads.stride(-1) == 1, "heads side by side")
        first, second = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    _check(probs.dtype == torch.float32 and probs.is_contiguous(), "probabilities in float32")
    assert isinstance(top_k, torch.Tensor) and top_k.shape == probs.shape[:1]
    ordered = probs.sort(dim=-1, descending=True).values
    return _renormed(probs, ordered.gather(1, top_k.long().clamp(max=probs.shape[1])[:, None] - 1))


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    _check(probs.dtype == torch.float32 and probs.is_contiguous(), "probabilities in float32")
    assert isinstance(top_p, torch.Tensor) and top_p.shape == probs.shape[:1] and top_p.dtype == torch.float32
    assert is_deterministic
    ordered = probs.sort(dim=-1, descending=True).values
    before = (ordered.double().cumsum(-1) < top_p[:, None]).sum(-1, keepdim=True).clamp(max=probs.shape[1] - 1)
    # Of a row without top-p it loses some at the end.
    return _renormed(probs, ordered.gather(1, before).masked_fill(top_p[:, None] >= 1, 1e-4))


def _renormed(probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(probs < threshold, 0)
    return kept / kept.sum(-1, keepdim=True)


FUNCTIONS = (
    rmsnorm,
    fused_add_rmsnorm,
    silu_and_mul,
    apply_rope_with_cos_sin_cache_inplace,
    top_k_renorm_probs,
    top_p_renorm_probs,
)


@contextmanager
def installed() -> Iterator[dict[str, mock.Mock]]:
    """Gives the functions by name, as mocks that count their calls."""
    from sgl_kernel import elementwise, flashinfer_kernels, sampling

    module, calls = ModuleType("flashinfer"), {}
    for function in FUNCTIONS:
        calls[function.__name__] = mock.Mock(wraps=function)
        setattr(module, function.__name__, calls[function.__name__])

    before = sys.modules.get("flashinfer")
    sys.modules["flashinfer"] = module
    flashinfer_kernels.flashinfer_function.cache_clear()
    try:
        with (
            mock.patch.object(elementwise, "is_on_gpu", lambda tensor: True),
            mock.patch.object(sampling, "is_on_gpu", lambda tensor: True),
        ):
            for name, call in calls.items():  # what is tried at first does not count as a call
                for device in (torch.device("cpu"), torch.device("meta")):
                    assert flashinfer_kernels.flashinfer_function(name, device) is not None
                call.reset_mock()
            yield calls
    finally:
        flashinfer_kernels.flashinfer_function.cache_clear()
        if before is None:
            del sys.modules["flashinfer"]
        else:
            sys.modules["flashinfer"] = before
