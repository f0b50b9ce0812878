"""flashinfer's functions, for modules that compute with torch where these cannot be used.

Owns the decision, made once per function and device. The function is imported and tried at first use, because
flashinfer compiles a function's kernels when it is first called. flashinfer is never required.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def flashinfer_function(name: str, device: torch.device) -> Callable[..., Any] | None:
    """`flashinfer.<name>`; None, with a line in the log, where it is not installed or does not build. The first call
    may take the minutes that compiling takes."""
    try:
        function = getattr(importlib.import_module("flashinfer"), name)
    except (ImportError, OSError, AttributeError) as error:
        logger.info("torch instead of flashinfer's %s: %s", name, error)
        return None
    try:
        _TRIALS[name](function, device)
    except Exception:
        logger.warning("torch instead of flashinfer's %s, which fails here:", name, exc_info=True)
        return None
    return function


def _try_rmsnorm(function: Callable[..., Any], device: torch.device) -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    function(x, x[0], 1e-6)


def _try_fused_add_rmsnorm(function: Callable[..., Any], device: torch.device) -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    function(x, x.clone(), x[0].clone(), 1e-6)


def _try_silu_and_mul(function: Callable[..., Any], device: torch.device) -> None:
    function(torch.ones(2, 64, dtype=torch.bfloat16, device=device))


def _try_rope(function: Callable[..., Any], device: torch.device) -> None:
    q, k = torch.ones(2, 2, 1, 64, dtype=torch.bfloat16, device=device)
    function(torch.zeros(2, dtype=torch.int64, device=device), q, k, 64, torch.ones(1, 64, device=device))


def _try_top_k(function: Callable[..., Any], device: torch.device) -> None:
    function(torch.full((2, 64), 1 / 64, device=device), torch.ones(2, dtype=torch.int32, device=device))


def _try_top_p(function: Callable[..., Any], device: torch.device) -> None:
    function(torch.full((2, 64), 1 / 64, device=device), torch.full((2,), 0.5, device=device), True)


_TRIALS: dict[str, Callable[[Callable[..., Any], torch.device], None]] = {
    "rmsnorm": _try_rmsnorm,
    "fused_add_rmsnorm": _try_fused_add_rmsnorm,
    "silu_and_mul": _try_silu_and_mul,
    "apply_rope_with_cos_sin_cache_inplace": _try_rope,
    "top_k_renorm_probs": _try_top_k,
    "top_p_renorm_probs": _try_top_p,
}
