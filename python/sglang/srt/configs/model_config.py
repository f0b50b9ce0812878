"""`ModelConfig`: what the engine needs to know about a model, read from a Hugging Face directory.

Refuses what cannot be served, with a sentence that names the remedy; model_files.py has what needs no torch for that.
Reads no weights beyond what the fingerprint samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sgl_kernel.quantized import MatrixFormat
from sglang.srt.configs.experts import ExpertsConfig, experts_of
from sglang.srt.configs.gguf_model import gguf_file_of
from sglang.srt.configs.kv_cache_dtype import KVScales
from sglang.srt.configs.latent import LATENT_FAMILIES, LatentConfig, latent_config
from sglang.srt.configs.model_families import GEMMA_FAMILIES, NATIVE, TRANSFORMERS, pick_model_impl
from sglang.srt.configs.model_files import (
    ModelConfigError,
    check_activation,
    check_tensor_parallel,
    pick_architecture,
    pick_context_length,
    quantization_of,
    read_config_json,
    resolve_model_path,
    resolve_tokenizer_path,
    rope_parameters_by_kind,
    tokenizer_end,
    unsupported_dtype,
    yarn_mscale,
)
from sglang.srt.configs.quantization import Packing, WeightQuantization
from sglang.srt.configs.transformers_config import check_context, check_transformers_config, max_context, shape_of
from sglang.srt.configs.weights_digest import FileStamp, digest_weights, stamp_files

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
DTYPE_CHOICES = ("auto", *_DTYPES)
# Those that layers/rotary_embedding.py knows; this file must not import layers.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs to know about a model."""

    # As the user gave it.
    model_path: str
    # The directory with config.json.
    local_path: Path
    # Of transformers.
    hf_config: Any
    # One of `MODEL_FAMILIES`, or any that transformers computes.
    architecture: str
    # NATIVE or TRANSFORMERS.
    model_impl: str
    # Of weights and activations.
    dtype: torch.dtype
    # Tokens that a sequence may have.
    context_length: int
    num_layers: int
    # Query heads of a layer, over all ranks.
    num_heads: int
    # KV heads of a layer, over all ranks.
    num_kv_heads: int
    # Values of a key in the cache.
    head_dim: int
    vocab_size: int
    # From config.json, generation_config.json and the tokenizer's files, in that order, each once.
    eos_token_ids: tuple[int, ...]
    # Of latent attention, which has one KV head for all query heads; None where keys and values are cached.
    latent: LatentConfig | None = None
    # Of the KV cache; None for dtype.
    kv_cache_dtype: torch.dtype | None = None
    # Of what is stored. All ranks', so that they agree about the fingerprint.
    kv_scales: KVScales = ()

    # The rest is for native models only; transformers reads hf_config itself.
    # Width of the residual stream.
    hidden_size: int = 0
    # Width inside the MLP, where that is dense.
    intermediate_size: int = 0
    # The other layers' mixtures; None for a dense model.
    experts: ExpertsConfig | None = None
    rms_norm_eps: float = 0.0
    # Always with "rope_type", "rope_theta" and "original_max_position_embeddings", and with "factor" where the type
    # has one.
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    # The same of layers with a window, where these rotate otherwise; None where they do not.
    windowed_rope_parameters: dict[str, Any] | None = None
    # Of queries, keys and values.
    attention_bias: bool = False
    # Of each layer: the tokens that a query sees, itself included; None where that is all of the context.
    windows: tuple[int | None, ...] = ()
    mlp_bias: bool = False
    # Of gates in dense feed-forward layers, see `GatedLinear`.
    activation: str = "silu"
    # Norms' weights in the checkpoint are what is added to 1.
    norms_from_one: bool = False
    # Scores are divided by its square root; None for head_dim.
    query_scalar: float | None = None
    # The head uses the embedding's weights.
    tie_word_embeddings: bool = False
    # How the checkpoint stores its matrices; None as they are.
    quantization: WeightQuantization | None = None
    # How decoder layers keep their matrices in memory; None in dtype. See `with_weight_format`.
    weight_format: MatrixFormat | None = None
    # The same for experts, but not for the one that computes every token.
    expert_format: MatrixFormat | None = None
    # Of the files of config and weights, before any of them was read; none for a config that is no file's.
    file_stamps: tuple[FileStamp, ...] = ()

    @classmethod
    def from_pretrained(
        cls,
        model_path: str,
        dtype: str = "auto",
        context_length: int | None = None,
        model_impl: str = "auto",
    ) -> ModelConfig:
        """model_path: as --model-path. dtype: one of `DTYPE_CHOICES`. context_length: None takes the model's own;
        more than its positions reach is refused. model_impl: as --model-impl takes it."""
        local_path = resolve_model_path(model_path)
        stamps = stamp_files(local_path)
        raw = read_config_json(local_path)
        architecture = pick_architecture(model_path, raw, model_impl)
        hf_config = _auto_config(local_path)
        if getattr(hf_config, "is_causal", True) is False:
            raise ModelConfigError(
                f"{model_path!r} cannot be served: its tokens see those behind them (is_causal is false in its "
                "config); use a model whose tokens do not."
            )
        if pick_model_impl(architecture, model_impl) == TRANSFORMERS:
            found = cls._of_transformers(model_path, local_path, architecture, hf_config, dtype, context_length)
            return replace(found, file_stamps=stamps)
        hf_config = _text_config(raw, hf_config)
        _check_config_class(architecture, hf_config)
        num_heads = hf_config.num_attention_heads
        try:
            latent = latent_config(hf_config) if architecture in LATENT_FAMILIES else None
            experts = experts_of(architecture, hf_config)
        except ValueError as error:
            raise ModelConfigError(f"{model_path!r} cannot be served: {error}.") from error
        quantization = quantization_of(model_path, raw, NATIVE)
        rope_parameters, windowed_rope = rope_parameters_by_kind(hf_config)
        context = pick_context_length(context_length, hf_config.max_position_embeddings, rope_parameters)
        config = cls(
            model_path=model_path,
            local_path=local_path,
            hf_config=hf_config,
            architecture=architecture,
            model_impl=NATIVE,
            file_stamps=stamps,
            dtype=_pick_dtype(dtype, hf_config, quantization),
            context_length=context,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            experts=experts,
            num_layers=hf_config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=1 if latent else getattr(hf_config, "num_key_value_heads", None) or num_heads,
            head_dim=latent.cached_dim if latent else _head_dim(hf_config),
            latent=latent,
            vocab_size=hf_config.vocab_size,
            rms_norm_eps=hf_config.rms_norm_eps,
            rope_parameters=rope_parameters,
            windowed_rope_parameters=windowed_rope,
            attention_bias=bool(getattr(hf_config, "attention_bias", False)),
            windows=_windows(hf_config, context),
            mlp_bias=bool(hf_config.mlp_bias) if hasattr(type(hf_config), "mlp_bias") else False,
            activation="gelu_tanh" if architecture in GEMMA_FAMILIES else "silu",
            norms_from_one=architecture in GEMMA_FAMILIES,
            query_scalar=_query_scalar(hf_config) if architecture in GEMMA_FAMILIES else None,
            tie_word_embeddings=bool(hf_config.tie_word_embeddings),
            quantization=quantization,
            eos_token_ids=_eos_token_ids(local_path, hf_config),
        )
        _refuse_unsupported(config)
        return config

    @classmethod
    def _of_transformers(
        cls,
        model_path: str,
        local_path: Path,
        architecture: str,
        hf_config: Any,
        dtype: str,
        context_length: int | None,
    ) -> ModelConfig:
        quantization_of(model_path, vars(hf_config), TRANSFORMERS)
        # What is left is of the KV cache alone, and transformers would look for a library for it.
        vars(hf_config).pop("quantization_config", None)
        check_transformers_config(model_path, architecture, hf_config)
        shape = shape_of(model_path, hf_config)
        context = pick_context_length(context_length, max_context(model_path, hf_config), {"rope_type": "default"})
        check_context(hf_config, context)
        return cls(
            model_path=model_path,
            local_path=local_path,
            hf_config=hf_config,
            architecture=architecture,
            model_impl=TRANSFORMERS,
            dtype=_pick_dtype(dtype, hf_config),
            context_length=context,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            latent=shape.latent,
            vocab_size=hf_config.vocab_size,
            eos_token_ids=_eos_token_ids(local_path, hf_config),
        )

    def with_tokenizer(self, tokenizer_path: str) -> ModelConfig:
        """With the end of an answer by a tokenizer that is not in the model's directory. tokenizer_path: as
        --tokenizer-path."""
        end = tokenizer_end(resolve_tokenizer_path(tokenizer_path))
        if end is None or end in self.eos_token_ids or not 0 <= end < self.vocab_size:
            return self
        return replace(self, eos_token_ids=(*self.eos_token_ids, end))

    def kv_heads_per_rank(self, num_ranks: int) -> int:
        """A KV head is never cut: where there are fewer than ranks, several ranks keep the same one."""
        return max(1, self.num_kv_heads // num_ranks)

    def check_tensor_parallel(self, num_ranks: int) -> None:
        """Raises ModelConfigError if the model cannot be divided over so many ranks."""
        # What transformers computes has widths of its own, see `divide_layers`.
        widths = () if self.model_impl == TRANSFORMERS else self._widths
        check_tensor_parallel(num_ranks, self.num_heads, widths, self.num_kv_heads)

    @property
    def _widths(self) -> tuple[int, ...]:
        """Inside the feed-forward layers, each once."""
        experts = self.experts
        if experts is None:
            return (self.intermediate_size,)
        widths = (experts.intermediate_size, experts.shared_size) if any(experts.layers) else ()
        return tuple(filter(None, (*widths, 0 if all(experts.layers) else self.intermediate_size)))

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.kv_cache_dtype or self.dtype

    @property
    def rotary_dim(self) -> int:
        """Values of a key that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def attn_scale(self) -> float:
        """The factor on q.k, for `AttentionMetadata.scale`. Layers that transformers computes bring their own."""
        if self.latent is None:
            return float((self.query_scalar or self.head_dim) ** -0.5)
        scale = float((self.latent.key_dim + self.latent.rotary_dim) ** -0.5)
        rope = self.rope_parameters
        mscale = rope.get("mscale_all_dim")
        if not mscale or rope["rope_type"] == "default":
            return scale
        # What rotated keys leave to others, which are not rotated.
        return scale * yarn_mscale(rope.get("factor", 1.0), mscale) ** 2

    def fingerprint(self, load_format: str = "auto", seed: int = 0) -> str:
        """32 hex digits that name config and weights: equal on every machine that holds the same files, and part
        of the key of cached KV. The KV's dtype is not in it, nor that of weights unless it is another, and of the
        context's length only what it changes in the KV. load_format, seed: as given to `load_model`.

        All bytes of all tensors are read: a checkpoint in which a few rows were trained has other KV. Raises
        ModelConfigError if a file is another than when this was made: the weights in memory may be of the one before.
        """
        try:
            # Before and after: what is being written may not be readable.
            self._check_files()
            found = self._fingerprint(load_format, seed)
            self._check_files()
        except ModelConfigError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelConfigError(f"the files of the model in {self.local_path} cannot be read: {error}") from error
        return found

    def _check_files(self) -> None:
        if self.file_stamps and stamp_files(self.local_path) != self.file_stamps:
            raise ModelConfigError(
                f"the files of the model in {self.local_path} have changed since this server read them: start it anew"
            )

    def _fingerprint(self, load_format: str, seed: int) -> str:
        digest = hashlib.sha256()
        config_json = read_config_json(self.local_path)
        # Written by the library that saved it last; not a property of the model.
        for key in ("transformers_version", "_name_or_path"):
            config_json.pop(key, None)
        digest.update(json.dumps(config_json, sort_keys=True).encode())
        if self.model_impl == TRANSFORMERS:
            # Its keys and values differ from a native model's in the last bits.
            digest.update(b"transformers")
        elif self.rope_parameters["rope_type"] == "longrope":
            # Its long and its short factors rotate keys differently; the server's context decides which are used.
            original = self.rope_parameters["original_max_position_embeddings"]
            digest.update(f"long factors {self.context_length > original}".encode())
        if any(window is not None for window in self.windows):
            # Where the context is longer than the window, which the server's decides.
            digest.update(f"windows {self.windows}".encode())
        if self.kv_dtype != self.dtype:
            digest.update(f"computed in {self.dtype}, scales {self.kv_scales}".encode())
        # A checkpoint that is quantised means the same numbers wherever it is dequantised.
        if self.quantization is None or load_format == "dummy":
            for of, format in (("weights", self.weight_format), ("experts", self.expert_format)):
                if format is not None:
                    digest.update(f"{of} in {format.dtype}".encode())
        if load_format == "dummy":
            digest.update(f"dummy {seed}".encode())
        else:
            digest.update(digest_weights(self.local_path, load_format))
        return digest.hexdigest()[:32]


def _import_auto_config() -> Any:
    """transformers' `AutoConfig`. Its configs check names of activations, for which they import its activation
    functions, and these torch's compiler and distributed tensors: two seconds of processor time at each start of each
    rank. They get the empty table that they have without torch: the model checks the name."""
    activations = "transformers.activations"
    if activations not in sys.modules:
        empty = ModuleType(activations)
        empty.ACT2FN = {}  # type: ignore[attr-defined]
        sys.modules[activations] = empty
        try:
            with contextlib.suppress(ImportError):
                import transformers.utils.type_validators  # noqa: F401
        finally:
            # Models of transformers import the real one.
            if sys.modules.get(activations) is empty:
                del sys.modules[activations]
    from transformers import AutoConfig

    return AutoConfig


def _auto_config(local_path: Path) -> Any:
    try:
        return _import_auto_config().from_pretrained(local_path, local_files_only=True)
    except Exception as e:
        reason = " ".join(str(e).split())
        gguf_file = gguf_file_of(local_path)
        what = f"{str(local_path / 'config.json')!r}" if gguf_file is None else f"the config of {str(gguf_file)!r}"
        raise ModelConfigError(f"transformers cannot read {what}: {reason}") from e


def _pick_dtype(dtype: str, hf_config: Any, quantization: WeightQuantization | None = None) -> torch.dtype:
    """gpt-oss's published configs name none: what is beside mxfp4 is bfloat16."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise ModelConfigError(f"dtype {dtype!r} is not supported; choose from {', '.join(DTYPE_CHOICES)}.")
    is_mxfp4 = quantization is not None and quantization.packing == Packing.MXFP4
    usual = torch.bfloat16 if is_mxfp4 else torch.float32
    stored = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None) or usual
    if isinstance(stored, str):
        stored = getattr(torch, stored.removeprefix("torch."), None)
    if isinstance(stored, torch.dtype) and stored in _DTYPES.values():
        return stored
    raise unsupported_dtype(stored)


def _head_dim(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


# Config classes of families whose own have another name, and of others that mean the same by their entries.
_OWN_CONFIG = {"Gemma3ForCausalLM": "Gemma3TextConfig", "Gemma3ForConditionalGeneration": "Gemma3TextConfig"}
_ALSO_READ = {"LlamaForCausalLM": "MistralConfig", "MistralForCausalLM": "MinistralConfig"}


def _text_config(raw: Mapping[str, Any], hf_config: Any) -> Any:
    """The part that is about text of a config for text and images, with what the whole has for both. raw:
    config.json."""
    if "text_config" not in raw:
        return hf_config
    text = hf_config.get_text_config()
    for name in ("tie_word_embeddings", "eos_token_id", "dtype", "quantization_config"):
        is_own = name == "tie_word_embeddings" and name in raw["text_config"]
        if not is_own and getattr(hf_config, name, None) is not None:
            setattr(text, name, getattr(hf_config, name))
    return text


def _check_config_class(architecture: str, hf_config: Any) -> None:
    """transformers picks the class by `model_type`, which tells what entries mean. A family that transformers does
    not know may read any. Raises ModelConfigError."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    own = _OWN_CONFIG.get(architecture, architecture.removesuffix("ForCausalLM") + "Config")
    found = type(hf_config).__name__
    if found not in (own, _ALSO_READ.get(architecture)) and own in CONFIG_MAPPING_NAMES.values():
        raise ModelConfigError(
            f"architectures in its config names {architecture}, but model_type {hf_config.model_type!r} is of "
            f"{found}; correct one of them."
        )


def _query_scalar(hf_config: Any) -> float:
    """Of Gemma. Raises ModelConfigError, also for its caps of scores and logits."""
    for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        value: Any = getattr(hf_config, name, None)
        if value is None and name != "query_pre_attn_scalar":
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelConfigError(f"{name} in its config is {value!r}, but it has to be a number above 0.")
    return float(hf_config.query_pre_attn_scalar)


def _windows(hf_config: Any, context_length: int) -> tuple[int | None, ...]:
    """See `ModelConfig.windows`."""
    num_layers = hf_config.num_hidden_layers
    # Only where transformers' model of this family has them: other configs may carry the names without a reader.
    window, kinds = (
        getattr(hf_config, name) if hasattr(type(hf_config), name) else None
        for name in ("sliding_window", "layer_types")
    )
    if others := sorted(set(kinds or ()) - {"sliding_attention", "full_attention"}):
        raise ModelConfigError(f"Layers of the kinds {', '.join(others)} (layer_types) are not supported natively.")
    if window is None and "sliding_attention" in (kinds or ()):
        raise ModelConfigError("layer_types in its config has layers with a window, but there is no sliding_window.")
    kinds = kinds or ["sliding_attention"] * num_layers
    if window is None or window >= context_length or "sliding_attention" not in kinds:
        return (None,) * num_layers
    if window < 1:
        raise ModelConfigError(f"A sliding_window of {window} hides a token from itself; it has to be 1 or more.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(local_path: Path, hf_config: Any) -> tuple[int, ...]:
    """Without those that the model cannot draw, as of tokens that a tokenizer was given and the model was not."""
    found: list[Any] = [getattr(hf_config, "eos_token_id", None)]
    path = local_path / "generation_config.json"
    ids: dict[int, None] = {}
    try:
        if path.is_file():
            values = json.loads(path.read_text())
            if not isinstance(values, dict):
                raise ValueError("it is no JSON object")
            found.append(values.get("eos_token_id"))
        # A model that was tuned to another end may have it there alone.
        found.append(tokenizer_end(local_path))
        for entry in found:
            for token in entry if isinstance(entry, list) else [entry]:
                if token is not None and 0 <= int(token) < hf_config.vocab_size:
                    ids[int(token)] = None
    except (ValueError, AttributeError, TypeError) as e:
        raise ModelConfigError(f"{str(path)!r} is not a valid generation config: {e}.") from e
    return tuple(ids)


def _refuse_unsupported(config: ModelConfig) -> None:
    hf = config.hf_config
    check_activation(config.architecture, vars(hf))
    if getattr(hf, "use_bidirectional_attention", False):
        raise ModelConfigError(
            "use_bidirectional_attention in its config: a model whose tokens see those behind them cannot be served; "
            "use another."
        )
    rope_type = config.rope_parameters["rope_type"]
    ropes = (config.rope_parameters, config.windowed_rope_parameters or config.rope_parameters)
    for rope in ropes:
        if rope["rope_type"] not in ROPE_TYPES:
            raise ModelConfigError(
                f"The rope type {rope['rope_type']!r} is not supported; supported are {', '.join(ROPE_TYPES)}."
            )
    if any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes) or config.rotary_dim % 2 != 0:
        raise ModelConfigError(
            "Rotary embeddings over a part of the head, or over an odd head_dim, are not supported natively; "
            f"{_use_transformers(config)}."
        )
    if rope_type == "longrope":
        lengths = {len(config.rope_parameters.get(f"{name}_factor") or ()) for name in ("short", "long")}
        wanted = config.rotary_dim // 2
        if lengths != {wanted}:
            raise ModelConfigError(
                f"The rope type 'longrope' needs {wanted} factors in both short_factor and long_factor."
            )
    if config.latent is not None and config.attention_bias and hf.q_lora_rank is None:
        raise ModelConfigError(
            f"Latent attention with biases and without q_lora_rank is not supported natively; "
            f"{_use_transformers(config)}."
        )
    if config.num_heads % config.num_kv_heads != 0:
        raise ModelConfigError(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly."
        )


def _use_transformers(config: ModelConfig) -> str:
    """The remedy where there is no native implementation."""
    if gguf_file_of(config.local_path) is not None:
        return "give the model as a directory in Hugging Face's format and use --model-impl transformers"
    return "use --model-impl transformers"
