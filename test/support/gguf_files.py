"""GGUF files for tests, written with the package `gguf` as converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

# Hugging Face's names -> GGUF's, of dense decoders.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    file: Path,
    arch: str,
    config: Any,
    weights: dict[str, torch.Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
) -> None:
    """weights: of a transformers model with this config. kind: of matrices; vectors are float32. fields: metadata
    that stands beside or in place of what is written anyway; None leaves a key out."""
    writer = gguf.GGUFWriter(file, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
        **tokenizer_fields(config.vocab_size),
        **(fields or {}),
    }
    for key, value in metadata.items():
        add_field(writer, key, value)
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.detach().float().numpy()
        if arch in ("llama", "mistral"):
            if ".q_proj." in name:
                values = _interleave(values, config.num_attention_heads)
            elif ".k_proj." in name:
                values = _interleave(values, config.num_key_value_heads)
        of = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, of), raw_dtype=of)
    finish(writer)


def tokenizer_fields(vocab_size: int) -> dict[str, Any]:
    """A byte-level tokenizer: single bytes, one pair, unused tokens, then <s> and </s>. vocab_size: 259 or more."""
    chars = sorted(_byte_chars())
    unused = [f"<unused{i}>" for i in range(vocab_size - 3 - len(chars))]
    tokens = [*chars, chars[0] + chars[1], *unused, "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (vocab_size - 2) + [3, 3],
        "tokenizer.ggml.merges": [f"{chars[0]} {chars[1]}"],
        "tokenizer.ggml.bos_token_id": vocab_size - 2,
        "tokenizer.ggml.eos_token_id": vocab_size - 1,
    }


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if not base.startswith("model.layers."):
        return f"{_TOP.get(base, base)}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{kind}"


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows that are rotated together side by side."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _byte_chars() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()
