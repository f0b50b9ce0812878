"""`LatentConfig`: the sizes of multi-head latent attention. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Architectures with a native model that have it.
LATENT_FAMILIES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")


@dataclass(frozen=True)
class LatentConfig:
    """DeepSeek-V2 (2024), section 2.1: the keys and values of all heads are linear in one vector of a token, its
    latent, but for a rotated key that all heads share. Latent and rotated key are cached in their place."""

    # Values of the latent.
    rank: int
    # Values of the rotated key.
    rotary_dim: int
    # Values of a head's key that come from the latent.
    key_dim: int
    # Values of a head's value.
    value_dim: int

    @property
    def cached_dim(self) -> int:
        """Values that are cached of a token and layer: the latent, then the rotated key."""
        return self.rank + self.rotary_dim


def latent_config(hf_config: Any) -> LatentConfig:
    """hf_config: of transformers, of a model with latent attention. Raises ValueError."""
    return LatentConfig(
        rank=whole_number(hf_config, "kv_lora_rank"),
        rotary_dim=whole_number(hf_config, "qk_rope_head_dim"),
        key_dim=whole_number(hf_config, "qk_nope_head_dim"),
        value_dim=whole_number(hf_config, "v_head_dim"),
    )


def whole_number(hf_config: Any, name: str, least: int = 1) -> int:
    """Raises ValueError, which follows "cannot be served:"."""
    value = getattr(hf_config, name, None)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} in its config is {value!r}, but it has to be a whole number of {least} or more")
    return value
