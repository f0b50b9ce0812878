"""`ModelConfig`: what the engine needs to know about a model, read from a Hugging Face directory.

Owns finding the directory (local, hub, or the embedded model) and refusing what cannot be served, with a sentence
that says what to do. Reads no weights beyond what the fingerprint samples.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt.models.registry import supported_architectures

EMBEDDED_MODEL = "embedded"

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

# Weights and what belongs to the tokenizer; not the other frameworks' copies of the weights.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelConfigError(ValueError):
    """The model cannot be served as asked; the message says why and what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """model_path: as the user gave it. local_path: the directory with config.json. context_length: tokens that a
    sequence may have. rope_parameters: always with "rope_type", "rope_theta" and "original_max_position_embeddings",
    and with "factor" where the type has one. eos_token_ids: from config.json and generation_config.json, in that
    order, each once."""

    model_path: str
    local_path: Path
    hf_config: Any
    architecture: str
    dtype: torch.dtype
    context_length: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_pretrained(
        cls,
        model_path: str,
        dtype: str = "auto",
        context_length: int | None = None,
        revision: str | None = None,
    ) -> ModelConfig:
        """model_path: a directory, a name on the Hugging Face hub, or "embedded". dtype: one of `DTYPE_CHOICES`.
        context_length: None takes the model's own; more than its positions reach is refused. revision: of a hub name.
        """
        local_path = resolve_model_path(model_path, revision)
        raw = _read_config_json(local_path)
        architecture = _pick_architecture(model_path, raw)
        hf_config = _auto_config(local_path)
        num_heads = hf_config.num_attention_heads
        rope_parameters = _rope_parameters(hf_config)
        config = cls(
            model_path=model_path,
            local_path=local_path,
            hf_config=hf_config,
            architecture=architecture,
            dtype=_pick_dtype(dtype, hf_config),
            context_length=_pick_context_length(context_length, hf_config.max_position_embeddings, rope_parameters),
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads,
            vocab_size=hf_config.vocab_size,
            rms_norm_eps=hf_config.rms_norm_eps,
            rope_parameters=rope_parameters,
            attention_bias=bool(getattr(hf_config, "attention_bias", False)),
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            tie_word_embeddings=bool(hf_config.tie_word_embeddings),
            eos_token_ids=_eos_token_ids(local_path, hf_config),
        )
        _refuse_unsupported(config)
        return config

    def kv_heads_per_rank(self, num_ranks: int) -> int:
        """A KV head is never cut: where there are fewer than ranks, several ranks keep the same one."""
        return max(1, self.num_kv_heads // num_ranks)

    def check_tensor_parallel(self, num_ranks: int) -> None:
        """Raises ModelConfigError if the model cannot be divided over so many ranks."""
        for what, number in (("attention heads", self.num_heads), ("intermediate rows", self.intermediate_size)):
            if number % num_ranks:
                raise ModelConfigError(
                    f"The model's {number} {what} cannot be divided over {num_ranks} ranks; choose a --tp-size that "
                    f"divides {number}."
                )
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ModelConfigError(
                f"The model's {self.num_kv_heads} KV heads can neither be divided over {num_ranks} ranks nor evenly "
                f"repeated on them; choose a --tp-size that divides {self.num_kv_heads} or is a multiple of it."
            )

    @property
    def attn_scale(self) -> float:
        """The factor on q.k, for `AttentionMetadata.scale`."""
        return float(self.head_dim**-0.5)

    def fingerprint(self, load_format: str = "auto", seed: int = 0) -> str:
        """32 hex digits that name config and weights: equal on every machine that holds the same files, and part
        of the key of cached KV. dtype is not in it, and of the context's length only what it changes in the KV.
        load_format, seed: as given to `load_model`.

        Of each weights file it takes the header (names, shapes, dtypes) and 4 KiB from the middle of every tensor:
        hashing whole files would cost a minute per 100 GB, and whoever trains a model changes all of a tensor.
        """
        digest = hashlib.sha256()
        config_json = json.loads((self.local_path / "config.json").read_text())
        # Written by whichever library saved it last; says nothing about the model.
        for key in ("transformers_version", "_name_or_path"):
            config_json.pop(key, None)
        digest.update(json.dumps(config_json, sort_keys=True).encode())
        if self.rope_parameters["rope_type"] == "longrope":
            # Its long and its short factors rotate keys differently; the server's context says which are used.
            original = self.rope_parameters["original_max_position_embeddings"]
            digest.update(f"long factors {self.context_length > original}".encode())
        if load_format == "dummy":
            digest.update(f"dummy {seed}".encode())
        else:
            for path in sorted(self.local_path.glob("*.safetensors")):
                digest.update(path.name.encode())
                _digest_safetensors(path, digest)
        return digest.hexdigest()[:32]


def resolve_model_path(model_path: str, revision: str | None = None) -> Path:
    """The directory of a model, downloaded or written first where need be. Raises `ModelConfigError`."""
    if model_path == EMBEDDED_MODEL:
        from sglang.srt.model_loader.embedded_model import ensure_embedded_model

        try:
            return ensure_embedded_model()
        except OSError as e:
            raise ModelConfigError(f"{str(e)[:1].upper()}{str(e)[1:]}.") from e
    path = Path(model_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelConfigError(f"{model_path!r} is a file; give the directory that holds config.json.")
    if not _HUB_NAME.fullmatch(model_path):
        raise ModelConfigError(
            f"There is no directory {model_path!r}; give a model directory, a hub name such as "
            f"Qwen/Qwen3-0.6B, or {EMBEDDED_MODEL!r}."
        )
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(model_path, revision=revision, allow_patterns=list(_HUB_PATTERNS))
        )
    except Exception as e:
        # The hub's own errors span several lines; the first says what happened.
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ModelConfigError(
            f"{model_path!r} is not a directory here and could not be fetched from the Hugging Face hub ({reason})"
        ) from e


def _read_config_json(local_path: Path) -> dict[str, Any]:
    path = local_path / "config.json"
    if not path.is_file():
        raise ModelConfigError(f"{str(local_path)!r} has no config.json; give a directory in Hugging Face's format.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as e:
        raise ModelConfigError(f"{str(path)!r} is not valid JSON: {e}.") from e
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{str(path)!r} does not hold a JSON object.")
    return raw


def _pick_architecture(model_path: str, raw: dict[str, Any]) -> str:
    supported = supported_architectures()
    named = raw.get("architectures") or []
    for architecture in named:
        if architecture in supported:
            return str(architecture)
    raise ModelConfigError(
        f"{model_path!r} has the architecture {', '.join(map(str, named)) or 'unknown'}, which is not supported; "
        f"supported are {', '.join(supported)}."
    )


def _auto_config(local_path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(local_path, local_files_only=True)
    except Exception as e:
        reason = " ".join(str(e).split())
        raise ModelConfigError(f"transformers cannot read {str(local_path / 'config.json')!r}: {reason}") from e


def _pick_dtype(dtype: str, hf_config: Any) -> torch.dtype:
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise ModelConfigError(f"dtype {dtype!r} is not supported; choose from {', '.join(DTYPE_CHOICES)}.")
    stored = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None) or torch.float32
    if isinstance(stored, str):
        stored = getattr(torch, stored.removeprefix("torch."), None)
    if isinstance(stored, torch.dtype) and stored in _DTYPES.values():
        return stored
    raise ModelConfigError(
        f"The model's dtype {stored} is not supported; choose one with --dtype bfloat16, float16 or float32."
    )


def _pick_context_length(wanted: int | None, own: int, rope_parameters: dict[str, Any]) -> int:
    if wanted is None:
        return own
    if wanted <= 0:
        raise ModelConfigError(f"context_length {wanted} must be positive.")
    longest = own
    if rope_parameters["rope_type"] == "yarn":
        # A config may name the factor and leave max_position_embeddings at the original length, as Qwen's guides do.
        stretched = rope_parameters["factor"] * rope_parameters["original_max_position_embeddings"]
        longest = max(own, int(stretched))
    if wanted > longest:
        reason = f"{own} (max_position_embeddings)" if longest == own else f"{longest} (YaRN's factor of its context)"
        raise ModelConfigError(
            f"context_length {wanted} is more than the model's {reason}; "
            f"use at most {longest}, or a model whose config.json scales its positions further."
        )
    return wanted


def _rope_parameters(hf_config: Any) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, older configs have `rope_theta` and `rope_scaling`."""
    params = dict(getattr(hf_config, "rope_scaling", None) or {})
    params.update(getattr(hf_config, "rope_parameters", None) or {})
    params.setdefault("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    params["rope_type"] = params.get("rope_type") or params.get("type") or "default"
    params.setdefault("original_max_position_embeddings", hf_config.max_position_embeddings)
    if params["rope_type"] in ("yarn", "longrope") and params.get("factor") is None:
        params["factor"] = hf_config.max_position_embeddings / params["original_max_position_embeddings"]
    return params


def _sliding_window(hf_config: Any) -> int | None:
    """Tokens that some layer can look back on, itself included; None for all."""
    # Only where transformers' model of this family has one: other configs may carry the name and nobody reads it.
    if not hasattr(type(hf_config), "sliding_window") or not getattr(hf_config, "use_sliding_window", True):
        return None
    if "sliding_attention" not in (getattr(hf_config, "layer_types", None) or ["sliding_attention"]):
        return None
    return hf_config.sliding_window


def _eos_token_ids(local_path: Path, hf_config: Any) -> tuple[int, ...]:
    found: list[Any] = [getattr(hf_config, "eos_token_id", None)]
    path = local_path / "generation_config.json"
    if path.is_file():
        try:
            found.append(json.loads(path.read_text()).get("eos_token_id"))
        except (ValueError, AttributeError) as e:
            raise ModelConfigError(f"{str(path)!r} is not a valid generation config: {e}.") from e
    ids: dict[int, None] = {}
    for entry in found:
        for token in entry if isinstance(entry, list) else [entry]:
            if token is not None:
                ids[int(token)] = None
    return tuple(ids)


def _refuse_unsupported(config: ModelConfig) -> None:
    hf = config.hf_config
    if getattr(hf, "quantization_config", None):
        raise ModelConfigError(
            f"{config.model_path!r} is quantized, which is not supported; use unquantized weights."
        )
    activation = getattr(hf, "hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"The activation {activation!r} is not supported; only 'silu' is.")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ModelConfigError(
            f"The rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}."
        )
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0 or config.head_dim % 2 != 0:
        raise ModelConfigError(
            "Rotary embeddings over a part of the head, or over an odd head_dim, are not supported."
        )
    if rope_type == "longrope":
        lengths = {len(config.rope_parameters.get(f"{name}_factor") or ()) for name in ("short", "long")}
        if lengths != {config.head_dim // 2}:
            raise ModelConfigError(
                f"The rope type 'longrope' needs {config.head_dim // 2} factors in both short_factor and long_factor."
            )
    window = _sliding_window(hf)
    if window is not None and window < config.context_length:
        raise ModelConfigError(
            f"The model's attention looks back on {window} tokens only (sliding_window), which is not supported in a "
            f"context of {config.context_length}; use --context-length {window} or less, or a model with full "
            "attention."
        )
    if config.num_heads % config.num_kv_heads != 0:
        raise ModelConfigError(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly."
        )


def _digest_safetensors(path: Path, digest: Any) -> None:
    """Layout of the file: 8 bytes header length (little endian), JSON header, tensors at the header's offsets."""
    with path.open("rb") as f:
        header_len = int.from_bytes(f.read(8), "little")
        header_bytes = f.read(header_len)
        header = json.loads(header_bytes)
        # Parsed and sorted, since writers may order and pad the header at will; "__metadata__" is free text.
        tensors = {name: entry for name, entry in sorted(header.items()) if name != "__metadata__"}
        for name, entry in tensors.items():
            begin, end = entry["data_offsets"]
            digest.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
            f.seek(8 + header_len + max(begin, (begin + end) // 2 - 2048))
            digest.update(f.read(min(4096, end - begin)))
