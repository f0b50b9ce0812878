"""Rotary position embeddings. Owns one table of cosines and sines, shared by all layers.

Keys are cached after their rotation. A position's rotation must therefore not depend on the length of its sequence.
Where a scaling does depend on it, the context length of the server decides instead:

- dynamic (NTK, by the length beyond the model's own context): `ModelConfig` ends the context where the scaling would
  begin; up to there it is the default.
- longrope: in all sequences, its long factors if the server's context is longer than the original one, else its short
  ones.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sgl_kernel import elementwise
from sgl_kernel.elementwise import reference
from sglang.srt.configs.model_files import ModelConfigError, yarn_mscale
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.mem_cache.kv_view import KVView


def _usable_frequencies(
    head_dim: int, context_length: int, rope_parameters: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """`rope_frequencies`. Raises ModelConfigError where these are no numbers."""
    try:
        frequencies, factor = rope_frequencies(head_dim, context_length, rope_parameters)
        reason = "" if bool(frequencies.isfinite().all()) and 0 < factor < math.inf else "they are not finite"
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise ModelConfigError(
            f"The rope parameters of its config give no frequencies ({reason}): {rope_parameters}."
        )
    return frequencies, factor


def rope_frequencies(
    head_dim: int, context_length: int, rope_parameters: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """(head_dim / 2,) float32, radians per position, and the factor on cosines and sines. context_length: of the
    server, in tokens. rope_parameters: see `ModelConfig`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = rope_parameters["rope_theta"]
    frequencies = 1.0 / (base**exponents)
    rope_type = rope_parameters["rope_type"]
    if rope_type in ("default", "dynamic"):
        return frequencies, 1.0
    original = rope_parameters["original_max_position_embeddings"]
    if rope_type == "longrope":
        # LongRoPE (Ding et al. 2024): searched factors per frequency; section 3.3 for the short ones, and Phi-3's
        # report for the factor on cosines and sines.
        searched = rope_parameters["long_factor" if context_length > original else "short_factor"]
        attention_factor = rope_parameters.get("attention_factor")
        if attention_factor is None:
            factor = rope_parameters["factor"]
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return 1.0 / (torch.tensor(searched, dtype=torch.float32) * base**exponents), attention_factor
    factor = rope_parameters["factor"]
    if rope_type == "linear":
        return frequencies / factor, 1.0
    if rope_type == "llama3":
        # Llama 3.1: wavelengths that fit often into the original context stay, long ones are stretched by
        # `factor`, those between are blended.
        low, high = rope_parameters["low_freq_factor"], rope_parameters["high_freq_factor"]
        turns = original * frequencies / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequencies / factor + blend * frequencies, 1.0
    if rope_type == "yarn":
        blend = _yarn_blend(head_dim, original, rope_parameters)
        return (1 - blend) * frequencies / factor + blend * frequencies, _yarn_attention_factor(rope_parameters)
    raise ValueError(f"rope type {rope_type!r}")


def _yarn_blend(head_dim: int, original: int, rope_parameters: dict[str, Any]) -> torch.Tensor:
    """(head_dim / 2,): 1 where a frequency stays, 0 where it is stretched. YaRN (Peng et al. 2023), section 3.2: by
    the number of turns in the original context, with the ramp over the dimensions as its authors' code has it."""

    def dimension(num_turns: float) -> float:
        return (
            head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope_parameters["rope_theta"]))
        )

    low = dimension(rope_parameters.get("beta_fast") or 32)
    high = dimension(rope_parameters.get("beta_slow") or 1)
    if rope_parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_attention_factor(rope_parameters: dict[str, Any]) -> float:
    """`yarn_mscale`, once for queries and once for keys. mscale and mscale_all_dim are DeepSeek's way to set it."""
    if (given := rope_parameters.get("attention_factor")) is not None:
        return float(given)
    factor = rope_parameters["factor"]
    mscale, mscale_all_dim = rope_parameters.get("mscale"), rope_parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


class RotaryEmbedding(nn.Module):
    """context_length: positions 0 to context_length - 1 can be looked up.

    It is a table and no computation per batch, because a position must give the same bits wherever it stands in a
    batch. Torch's vectorised cos differs in the last bit between the vector body and the tail of a tensor. The table
    is made on the CPU for any device, because other devices compute another cos. It is rounded to `dtype`, in which
    transformers multiplies, and kept in float32, which the fused kernel reads.
    """

    table: torch.Tensor

    def __init__(
        self, head_dim: int, context_length: int, rope_parameters: dict[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype = dtype
        device = torch.get_default_device()
        with torch.device("cpu"):
            frequencies, factor = _usable_frequencies(head_dim, context_length, rope_parameters)
            angles = torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies)
            # (context_length, head_dim): cosines, then sines.
            table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor).to(dtype).float()
        self.register_buffer("table", table.to(device), persistent=False)

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions: (num_tokens,) int64."""
        return Rotation(self, positions)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (num_tokens,) int64. Returns cos and sin for `reference.apply_rope`, (num_tokens, 1, head_dim)
        in `dtype`."""
        cos, sin = self.table.index_select(0, positions).to(self.dtype).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class Rotation:
    """The rotation of a batch's rows, the same in all layers. A fused kernel reads the table itself. Without one, the
    rows' cosines and sines are looked up when the first layer rotates."""

    def __init__(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> None:
        self._rotary = rotary
        self._positions = positions

    @cached_property
    def _looked_up(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotary.lookup(self._positions)

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        """qk: (num_tokens, heads of queries and keys, head_dim), at least two heads, any strides of tokens and heads.
        Returns it rotated; the caller's tensor may be overwritten."""
        if elementwise.has_rope_kernel(qk):
            elementwise.apply_rope_with_cos_sin_cache_inplace(self._positions, qk, self._rotary.table)
            return qk
        return reference.apply_rope(qk, *self._looked_up)

    def store(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        view: KVView,
        loc: torch.Tensor,
        kv_scale: KVScale,
    ) -> bool:
        """Rotate qk's queries in place, and its keys and v into slots loc of the view, if one kernel does it. Returns
        whether it did."""
        if not elementwise.has_rope_and_store_kernel(qk, v):
            return False
        table, scales = self._rotary.table, kv_scale.of_heads
        elementwise.apply_rope_and_store(self._positions, qk, v, table, view.k, view.v, loc, scales)
        return True

    def store_latents(
        self,
        q: torch.Tensor,
        queries: torch.Tensor,
        cached: torch.Tensor,
        norm: RMSNorm,
        view: KVView,
        loc: torch.Tensor,
        is_interleaved: bool,
    ) -> bool:
        """As `store`, of latent attention: see `elementwise.store_latent`."""
        if not elementwise.has_store_latent_kernel(q, cached, view.k):
            return False
        elementwise.store_latent(
            self._positions,
            q,
            queries,
            cached,
            norm.weight,
            norm.eps,
            self._rotary.table,
            view.k,
            loc,
            is_interleaved,
        )
        return True
