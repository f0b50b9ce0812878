"""`ExpertsConfig`: the mixture of experts of a native model, as its config tells. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.latent import LATENT_FAMILIES, whole_number

# Architectures whose feed-forward layers are mixtures, all or some.
HAVE_SHARED_EXPERTS = ("Qwen2MoeForCausalLM", *LATENT_FAMILIES)
GPT_OSS = "GptOssForCausalLM"
# Those whose config has a width of experts apart from that of dense layers.
NAME_WIDTH_OF_EXPERTS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", *LATENT_FAMILIES)
MIXTURES = ("MixtralForCausalLM", GPT_OSS, *NAME_WIDTH_OF_EXPERTS)


@dataclass(frozen=True)
class ExpertGroups:
    """How DeepSeek's models choose experts, see `ExpertRouter`."""

    # Groups of a layer's experts, of as many neighbours each.
    total: int
    # Those whose experts a token can have.
    kept: int
    # Experts are chosen by the sigmoid of a score with a correction; else by the softmax.
    has_correction: bool
    # A factor on the weights of a token's experts.
    scale: float


@dataclass(frozen=True)
class ClampedExperts:
    """gpt-oss's experts. They and their router have biases. The weights of a token's experts are the softmax over
    their logits, without the other experts'. The activation is `elementwise.clamped_swish_and_mul`."""

    # A factor inside the sigmoid.
    alpha: float
    # The gate's outputs are at most so large, and up's lie between this and its negative.
    limit: float


@dataclass(frozen=True)
class ExpertsConfig:
    # Of a layer.
    num_experts: int
    # Experts that compute a token.
    top_k: int
    # Width inside an expert.
    intermediate_size: int
    # The weights of a token's experts add up to 1.
    is_normalized: bool
    # Width inside the expert that computes every token besides; 0 where there is none.
    shared_size: int
    # Of each decoder layer, whether it is a mixture; the others are dense.
    layers: tuple[bool, ...]
    # None: a token can have any expert.
    groups: ExpertGroups | None = None
    # None: no biases, and silu(gate) * up.
    clamped: ClampedExperts | None = None


def experts_of(architecture: str, hf_config: Any) -> ExpertsConfig | None:
    """None for a dense model. hf_config: of transformers. Raises ValueError for numbers that make no mixture."""
    if architecture not in MIXTURES:
        return None
    num_layers = hf_config.num_hidden_layers
    if architecture in LATENT_FAMILIES:
        found = _deepseek_experts(architecture, hf_config)
    elif architecture == "MixtralForCausalLM":
        found = ExpertsConfig(
            num_experts=hf_config.num_local_experts,
            top_k=hf_config.num_experts_per_tok,
            intermediate_size=hf_config.intermediate_size,
            is_normalized=True,
            shared_size=0,
            layers=(True,) * num_layers,
        )
    elif architecture == GPT_OSS:
        found = ExpertsConfig(
            num_experts=whole_number(hf_config, "num_local_experts"),
            top_k=whole_number(hf_config, "num_experts_per_tok"),
            intermediate_size=whole_number(hf_config, "intermediate_size"),
            is_normalized=True,
            shared_size=0,
            layers=(True,) * num_layers,
            clamped=ClampedExperts(
                _above_zero(hf_config, "swiglu_alpha", 1.702), _above_zero(hf_config, "swiglu_limit", 7.0)
            ),
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
    groups = found.groups
    if any(found.layers) and groups is not None:
        can_divide = groups.total > 0 and found.num_experts % groups.total == 0
        if not (can_divide and 1 <= groups.kept <= groups.total):
            raise ValueError(
                f"each token has {groups.kept} of {groups.total} groups of {found.num_experts} experts (topk_group, "
                "n_group)"
            )
        if found.top_k > groups.kept * (found.num_experts // groups.total):
            raise ValueError(f"{groups.kept} groups (topk_group) have too few experts for {found.top_k} each token")
    return found


def _above_zero(hf_config: Any, name: str, default: float) -> float:
    value = getattr(hf_config, name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} in its config is {value!r}, but it has to be a number above 0")
    return float(value)


def _deepseek_experts(architecture: str, hf_config: Any) -> ExpertsConfig:
    is_v2 = architecture == "DeepseekV2ForCausalLM"
    has_groups = True
    if is_v2:
        if hf_config.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"experts are chosen by {hf_config.topk_method!r} (topk_method)")
        has_groups = hf_config.topk_method == "group_limited_greedy"
    num_shared = 0 if hf_config.n_shared_experts is None else whole_number(hf_config, "n_shared_experts", 0)
    width = whole_number(hf_config, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=whole_number(hf_config, "n_routed_experts"),
        top_k=whole_number(hf_config, "num_experts_per_tok"),
        intermediate_size=width,
        # transformers has no other for DeepSeek-V2 either.
        is_normalized=not is_v2 and bool(hf_config.norm_topk_prob),
        shared_size=width * num_shared,
        layers=_deepseek_mixtures(hf_config),
        groups=ExpertGroups(
            total=whole_number(hf_config, "n_group") if has_groups else 1,
            kept=whole_number(hf_config, "topk_group") if has_groups else 1,
            has_correction=not is_v2,
            scale=float(hf_config.routed_scaling_factor),
        ),
    )


def _deepseek_mixtures(hf_config: Any) -> tuple[bool, ...]:
    """Of each layer, whether it is a mixture."""
    num_layers = hf_config.num_hidden_layers
    # Other configs may carry the name without a reader.
    if not hasattr(type(hf_config), "mlp_layer_types"):
        num_dense = whole_number(hf_config, "first_k_dense_replace", 0)
        return tuple(layer >= num_dense for layer in range(num_layers))
    kinds = hf_config.mlp_layer_types
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        named = ", ".join(sorted(set(map(str, kinds))))
        raise ValueError(
            f"mlp_layer_types in its config has {len(kinds)} entries ({named}), but each of {num_layers} layers has "
            "to be 'dense' or 'sparse'"
        )
    return tuple(kind == "sparse" for kind in kinds)
