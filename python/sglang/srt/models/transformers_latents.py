"""Latents in models of transformers, kept as they are.

Owns nothing. Attention there calls `expand_kv` with what a cache of transformers holds, and attends to the keys and
values that it gives. Here it gives the latents themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.configs.latent import LatentConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.models.transformers_ranks import OwnHeads

# Of the largest value: numbers that differ by less are the same but for rounding.
_SAME = 0.02


def keep_latents(model: Any, config: ModelConfig, heads: OwnHeads) -> list[LatentProjections]:
    """Of each layer, in order. From now on the layers attend with keys (1, 1, num_tokens, rank + rotary_dim) and the
    values in them, and cannot make a head's of them any more. Raises ModelConfigError where they make others than
    `LatentProjections` does."""
    assert config.latent is not None
    found: list[LatentProjections] = []
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        linear = module.kv_b_proj
        weight = linear.weight if isinstance(linear, nn.Linear) and linear.bias is None else None
        if weight is None or not _expands_as(module.expand_kv, config.latent, weight):
            raise ModelConfigError(
                f"{config.model_path!r} ({config.architecture}) cannot be served: its attention makes other keys and "
                "values of latents than the products with kv_b_proj."
            )
        of_heads = weight.detach().unflatten(0, (-1, config.latent.key_dim + config.latent.value_dim))
        found.append(LatentProjections(config.latent, heads.of(of_heads, heads.query, 0)))
        module.expand_kv = _latents
        # `LatentProjections` has what is needed of it.
        module.kv_b_proj = None
    return found


def _latents(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, 1, num_tokens, rank) and (1, 1, num_tokens, rotary_dim)."""
    return torch.cat((latent, rotated), dim=-1), latent


def _expands_as(expand: Any, config: LatentConfig, weight: torch.Tensor) -> bool:
    """Whether a head's key is the product of the latent with its first rows of weight and the rotated key behind it,
    and its value the product with the other rows."""
    latent, rotated = (
        torch.linspace(-1, 1, 3 * dim).view(1, 1, 3, dim).to(weight) for dim in (config.rank, config.rotary_dim)
    )
    keys, values = expand(latent, rotated)
    product = (latent @ weight.T).view(3, -1, config.key_dim + config.value_dim).transpose(0, 1)[None]
    of_latent, wanted = product.split((config.key_dim, config.value_dim), dim=3)
    rotated = rotated.expand(-1, of_latent.shape[1], -1, -1)
    return _are_same(keys, torch.cat((of_latent, rotated), dim=3)) and _are_same(values, wanted)


def _are_same(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    return given.shape == wanted.shape and bool((given - wanted).abs().max() <= _SAME * wanted.abs().max())
