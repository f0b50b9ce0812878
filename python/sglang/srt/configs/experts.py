"""`ExpertsConfig`: the mixture of experts of a native model, as its config tells. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Architectures whose feed-forward layers are mixtures, all or some.
MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class ExpertsConfig:
    """num_experts: of a layer. top_k: those that compute a token. intermediate_size: width inside one.
    is_normalized: the weights of a token's experts add up to 1. shared_size: width inside the expert that computes
    every token besides; 0 where there is none. layers: of each decoder layer, whether it is a mixture; the others are
    dense."""

    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalized: bool
    shared_size: int
    layers: tuple[bool, ...]


def experts_of(architecture: str, hf_config: Any) -> ExpertsConfig | None:
    """None for a dense model. hf_config: of transformers. Raises ValueError for numbers that make no mixture."""
    if architecture not in MIXTURES:
        return None
    num_layers = hf_config.num_hidden_layers
    if architecture == "MixtralForCausalLM":
        found = ExpertsConfig(
            num_experts=hf_config.num_local_experts,
            top_k=hf_config.num_experts_per_tok,
            intermediate_size=hf_config.intermediate_size,
            is_normalized=True,
            shared_size=0,
            layers=(True,) * num_layers,
        )
    else:
        dense, step = hf_config.mlp_only_layers or (), hf_config.decoder_sparse_step
        if step < 1:
            raise ValueError(f"one in {step} layers is a mixture of experts (decoder_sparse_step)")
        found = ExpertsConfig(
            num_experts=hf_config.num_experts,
            top_k=hf_config.num_experts_per_tok,
            intermediate_size=hf_config.moe_intermediate_size,
            is_normalized=hf_config.norm_topk_prob,
            # A config of Qwen3 may carry the name without a reader.
            shared_size=hf_config.shared_expert_intermediate_size if architecture == "Qwen2MoeForCausalLM" else 0,
            layers=tuple(
                layer not in dense and hf_config.num_experts > 0 and (layer + 1) % step == 0
                for layer in range(num_layers)
            ),
        )
    if any(found.layers) and (found.intermediate_size < 1 or found.shared_size < 0):
        raise ValueError(
            f"an expert is {found.intermediate_size} wide, and the one of every token {found.shared_size} "
            "(moe_intermediate_size, shared_expert_intermediate_size)"
        )
    if any(found.layers) and not 1 <= found.top_k <= found.num_experts:
        raise ValueError(f"each token has {found.top_k} of {found.num_experts} experts (num_experts_per_tok)")
    return found
