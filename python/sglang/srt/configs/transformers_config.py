"""What a config of transformers tells about a model that transformers itself computes: the shape of its KV, and what
cannot be served.

Reads no weights and builds no model. `models/transformers_model.py` checks the facts of this file once the model is
there.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.latent import LatentConfig, latent_config
from sglang.srt.configs.model_families import MODEL_FAMILIES, TRANSFORMERS
from sglang.srt.configs.model_files import ModelConfigError

# Kinds of layers that keep nothing but keys and values of their own.
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "global", "local"}
# Reasons that follow "cannot be served:".
_NO_PAGED_ATTENTION = (
    "its modelling code in transformers does not call attention through AttentionInterface, which paged KV needs"
)
_STATE = "it keeps a state other than keys and values, which the cache has no pages for"


@dataclass(frozen=True)
class KVShape:
    """The part of a model's shape that is the same in all its layers."""

    num_layers: int
    # Query heads.
    num_heads: int
    num_kv_heads: int
    # Values of a key. Shorter values are padded to it. With `latent`, those that are cached of a token.
    head_dim: int
    # None where keys and values themselves are cached.
    latent: LatentConfig | None = None


def check_transformers_config(model_path: str, architecture: str, hf_config: Any) -> None:
    """Raises ModelConfigError for what the config or the class shows to be impossible."""
    from transformers import __version__

    found = [each for each in _model_classes(hf_config) if each.__name__ == architecture]
    if not found and architecture in MODEL_FAMILIES:
        raise ModelConfigError(
            f"{model_path!r} has the architecture {architecture}, and transformers {__version__} reads its config as "
            f"a {type(hf_config).__name__}, of another; use the native model, without --model-impl {TRANSFORMERS}."
        )
    if not found:
        raise ModelConfigError(
            f"{model_path!r} has the architecture {architecture}, which is neither native here nor a causal language "
            f"model of transformers {__version__}; use another model."
        )
    reason = _reason_against(found[0], hf_config)
    if reason is not None:
        raise ModelConfigError(f"{model_path!r} ({architecture}) cannot be served: {reason}.")


def _model_classes(hf_config: Any) -> tuple[Any, ...]:
    """Those of transformers for causal language models with such a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), ())
    return found if isinstance(found, tuple) else (found,)


def _reason_against(model_class: Any, config: Any) -> str | None:
    if config.get_text_config() is not config:
        return "it takes other input than text; use a checkpoint of its text model alone"
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it attends to an encoder, and only decoders are served"
    if model_class._is_stateful:
        return _STATE
    if not model_class._can_set_attn_implementation():
        return _NO_PAGED_ATTENTION
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return "its modelling code in transformers takes no position_ids, which chunks of a prompt need"
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        return f"it has layers of the kind {', '.join(sorted(map(str, kinds)))}; only full and sliding attention are"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers read the keys and values of other layers"
    return None


def shape_of(model_path: str, config: Any) -> KVShape:
    """Raises ModelConfigError where the config does not tell one shape for all layers."""
    try:
        latent = _latent_of(config)
    except ValueError as error:
        raise ModelConfigError(f"{model_path!r} cannot be served: {error}.") from error
    if latent is not None:
        return KVShape(config.num_hidden_layers, config.num_attention_heads, 1, latent.cached_dim, latent)
    try:
        sizes = _sizes(config)
    except Exception:
        # Some configs raise where an attribute differs from layer to layer.
        sizes = ()
    if len(sizes) != 4 or any(type(size) is not int for size in sizes):
        raise ModelConfigError(
            f"{model_path!r} cannot be served: its config does not tell one number of heads and one head size for "
            "all layers, and pages hold the same for every layer."
        )
    return KVShape(*sizes)


def _latent_of(config: Any) -> LatentConfig | None:
    """Of latent attention whose modelling code in transformers takes latents out of a cache, and makes keys and
    values of them in `expand_kv`."""
    if not getattr(config, "kv_lora_rank", None):
        return None
    modules = [vars(sys.modules[each.__module__]) for each in _model_classes(config)]
    has_seam = any(hasattr(each, "expand_kv") for module in modules for each in module.values())
    return latent_config(config) if has_seam else None


def _sizes(config: Any) -> tuple[int, ...]:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        # Latent attention of a transformers that expands latents too early: to a key and a value for each query head.
        kv_heads, head_dim = heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "multi_query", False):
        kv_heads = 1
    return config.num_hidden_layers, heads, kv_heads, head_dim


def max_context(model_path: str, config: Any) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if type(own) is not int:
        raise ModelConfigError(f"{model_path!r} cannot be served: its config names no max_position_embeddings.")
    return own


def check_context(config: Any, context_length: int) -> None:
    """Raises ModelConfigError where a cached key would depend on the length of its sequence."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if each.get("rope_type") != "longrope":
            continue
        # Beside the parameters it counts more than in them, where it may have been filled in.
        beside = getattr(config, "original_max_position_embeddings", None)
        original = beside or each["original_max_position_embeddings"]
        if context_length > original:
            raise ModelConfigError(
                f"In transformers' code the rope type 'longrope' rotates keys by the length of their sequence beyond "
                f"{original} tokens, which cached keys cannot follow; use --context-length {original} or less."
            )
