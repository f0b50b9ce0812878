"""A GGUF file as a directory in Hugging Face's format: config.json, the tokenizer, and a list of its tensors.

Owns these directories in the user's cache; it removes the least recently used ones. Weights stay in the file: the
directory links to it, and model_loader/gguf_weights.py reads them there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang.srt.configs.gguf_tokenizer import GGUFTokenizer, SpecialIds, UnknownTokenizerError
from sglang.srt.utils.cache_folder import ensure_folder, hold_folder, trim_folders, user_cache

logger = logging.getLogger(__name__)

# In the directory: the link to the file, and the list of its tensors.
GGUF_LINK = "model.gguf"
GGUF_TENSORS = "gguf_tensors.json"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", GGUF_TENSORS, GGUF_LINK)
# In tokenizer.json, in place of a tokenizer: why there is none.
NO_TOKENIZER = "gguf_has_no_tokenizer"
# Part of the directory's name: change it when equal files give other directories.
_VERSION = 3
# Directories that are kept, of up to some 20 MB, beside those that a process uses.
_MAX_MODELS = 16

# general.architecture -> (architecture, model_type) of config.json. Converters write Mistral's models as "llama".
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Whose converters store rows of queries and keys in the order of interleaved rotation.
_INTERLEAVED = ("llama", "mistral")
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Factors of the rotation's frequencies, for a longer context.
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFError(ValueError):
    """The file cannot be served; the message has the reason and the remedy."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a GGUF file."""

    # Of GGML, such as "Q4_1".
    type: str
    # Of the values, outermost dimension first.
    shape: tuple[int, ...]
    # In bytes, from the file's beginning.
    offset: int
    size_bytes: int
    # Heads whose rows lie in the order of interleaved rotation; 0 where rows lie as they are used.
    interleaved_heads: int = 0


def ensure_gguf_model(file: Path) -> Path:
    """The directory of a GGUF file's model, written at first use: seconds, a few MB. No process removes it while
    this one runs. Raises GGUFError, OSError."""
    file = file.resolve()
    stat = file.stat()
    made_of = f"{_VERSION} {file} {stat.st_size} {stat.st_mtime_ns}"
    name = f"{file.stem[:60]}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    final = user_cache() / "sglang-gguf" / name
    is_new = not final.is_dir()
    what = f"what {str(file)!r} holds beside weights"
    while True:
        ensure_folder(final, _FILES, lambda folder: _write(folder, file), what)
        if hold_folder(final):  # another process may have removed it meanwhile
            break
    if is_new:
        trim_folders(final.parent, _MAX_MODELS)
    return final


def gguf_file_of(folder: Path) -> Path | None:
    """The user's file that a directory was made of, for sentences about it; None: it was made of none."""
    link = folder / GGUF_LINK
    return link.readlink() if (folder / GGUF_TENSORS).is_file() and link.is_symlink() else None


def read_tensor_list(folder: Path) -> dict[str, TensorEntry]:
    """Name of a tensor in Hugging Face's checkpoints -> its place in `folder`'s GGUF file."""
    entries = json.loads((folder / GGUF_TENSORS).read_text())
    return {name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in entries.items()}


def _write(folder: Path, file: Path) -> None:
    logger.info("reading the header of %s, once", file)
    reader = _open(file)
    try:
        _write_from(folder, file, reader)
    except GGUFError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as e:
        raise GGUFError(f"{str(file)!r} cannot be served: its metadata does not fit together ({e}).") from e


def _write_from(folder: Path, file: Path, reader: Any) -> None:
    fields = _Fields(file, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tensors)
    ends = SpecialIds.of(fields)
    config |= ends.of_config
    generation = {"eos_token_id": ends.eos_ids} if ends.eos_ids else {}
    try:
        tokenizer = GGUFTokenizer.of(fields)
        tokenizer_config = tokenizer.config | {"model_max_length": config["max_position_embeddings"]}
        tokenizer.save(folder / "tokenizer.json")
    except UnknownTokenizerError as e:
        # The model can be served with another's tokenizer.
        tokenizer_config = {}
        _write_json(folder / "tokenizer.json", {NO_TOKENIZER: f"{str(file)!r}: {e}"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / GGUF_TENSORS, {name: asdict(entry) for name, entry in _entries(fields, tensors, config)})
    (folder / GGUF_LINK).symlink_to(file)


def _open(file: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(file)
    except Exception as e:  # the package raises whatever numpy or struct did
        raise GGUFError(
            f"{str(file)!r} cannot be read as GGUF (incomplete download?): {type(e).__name__}: {e}"
        ) from e


class _Fields:
    """The file's metadata by key; keys of the architecture without its name."""

    def __init__(self, file: Path, reader: Any) -> None:
        self.file = file
        self._fields: Mapping[str, Any] = reader.fields
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> Any:
        """Of the architecture; the same for all layers."""
        value = self.own(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            return value[0]
        if isinstance(value, (int, float)):
            return value
        what = "is missing" if value is None else "differs between layers"
        raise GGUFError(f"{str(self.file)!r} cannot be served: {self.architecture}.{key} {what}.")


def _config(fields: _Fields, tensors: Mapping[str, Any]) -> dict[str, Any]:
    known = _ARCHITECTURES.get(fields.architecture)
    file = str(fields.file)
    if known is None:
        raise GGUFError(
            f"{file!r} has the architecture {fields.architecture!r}, which is not read from GGUF; "
            f"{', '.join(_ARCHITECTURES)} are. Give the model as a directory in Hugging Face's format."
        )
    if fields.get("split.count", 1) > 1:
        raise GGUFError(f"{file!r} is one part of several; join them (llama-gguf-split --merge) and give the whole.")
    if fields.own("expert_count", 0):
        raise GGUFError(f"{file!r} is a mixture of experts, which is not read from GGUF.")
    if "token_embd.weight" not in tensors:
        raise GGUFError(f"{file!r} holds no weights of a language model: token_embd.weight is missing.")
    architecture, model_type = known
    window = fields.own("attention.sliding_window")
    if window and model_type == "llama":
        architecture, model_type = _ARCHITECTURES["mistral"]
    if window and model_type != "mistral" and window < fields.number("context_length"):
        raise GGUFError(
            f"{file!r} has a sliding window of {window} tokens, and does not name its layers; give the model as a "
            "directory in Hugging Face's format."
        )
    num_heads = fields.number("attention.head_count")
    hidden_size = fields.number("embedding_length")
    head_dim = fields.own("attention.key_length") or hidden_size // num_heads
    if fields.own("attention.value_length", head_dim) != head_dim:
        raise GGUFError(f"{file!r} cannot be served: its keys and values differ in length.")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": _dtype(tensors),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.number("attention.head_count_kv")
        if fields.own("attention.head_count_kv")
        else num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.number("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(fields, tensors, head_dim),
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config


def _dtype(tensors: Mapping[str, Any]) -> str:
    """The type in which most of the matrices lie, float16 for quantised ones: their scales are of that type."""
    types = Counter[str]()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            types[tensor.tensor_type.name] += int(tensor.n_elements)
    ((most, _),) = types.most_common(1)
    return {"F32": "float32", "BF16": "bfloat16"}.get(most, "float16")


def _rope_parameters(fields: _Fields, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": "default", "rope_theta": _positive(fields, "rope.freq_base", 10000.0)}
    rotated = fields.own("rope.dimension_count", head_dim)
    if rotated != head_dim:
        params["partial_rotary_factor"] = rotated / head_dim
    original = fields.own("rope.scaling.original_context_length")
    if _ROPE_FACTORS in tensors:
        # Each frequency is divided by its own factor, at every length: the type that can express it takes two lists.
        factors = tensors[_ROPE_FACTORS].data.astype(np.float64).tolist()
        params |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        params["original_max_position_embeddings"] = original or fields.number("context_length")
        return params
    # A file may have the factor alone, older ones under another name: then it is linear.
    factor = _positive(fields, "rope.scaling.factor", _positive(fields, "rope.scale_linear", 1.0))
    scaling = fields.own("rope.scaling.type") or ("linear" if factor != 1 else "none")
    if scaling == "none":
        return params
    if scaling not in ("linear", "yarn"):
        raise GGUFError(f"{str(fields.file)!r} scales its positions by {scaling!r}, which is not read from GGUF.")
    params |= {"rope_type": scaling, "factor": factor}
    if original:
        params["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if (value := fields.own(f"rope.scaling.yarn_{name}")) is not None:
            params[name] = value
    if scaling == "yarn" and (more := fields.own("rope.scaling.attn_factor")) is not None:
        # A factor on YaRN's own; the config's stands in its place.
        params["attention_factor"] = more * (1 + 0.1 * math.log(max(factor, 1)))
    return params


def _positive(fields: _Fields, key: str, default: float) -> Any:
    value = fields.own(key, default)
    if isinstance(value, (int, float)) and 0 < value < float("inf"):
        return value
    raise GGUFError(
        f"{str(fields.file)!r} cannot be served: {fields.architecture}.{key} is {value!r}, but has to be above 0."
    )


def _entries(fields: _Fields, tensors: Mapping[str, Any], config: dict[str, Any]) -> list[tuple[str, TensorEntry]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    entries = []
    for name, tensor in tensors.items():
        if name == _ROPE_FACTORS:
            continue
        _check_type(fields.file, name, tensor.tensor_type)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if layer and layer[2] in _LAYER_TENSORS:
            full_name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{layer[3]}"
        else:
            base, _, kind = name.rpartition(".")
            full_name = f"{_TENSORS[base]}.{kind}" if base in _TENSORS else name
        interleaved = heads.get(layer[2], 0) if layer and fields.architecture in _INTERLEAVED else 0
        shape = tuple(reversed([int(size) for size in tensor.shape]))
        place = (int(tensor.data_offset), int(tensor.n_bytes))
        entries.append((full_name, TensorEntry(tensor.tensor_type.name, shape, *place, interleaved)))
    return entries


def _check_type(file: Path, name: str, tensor_type: Any) -> None:
    """Raises GGUFError unless the package dequantises tensors of this type."""
    from gguf import constants, quants

    _, block_bytes = constants.GGML_QUANT_SIZES[tensor_type]
    try:
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor_type)
    except NotImplementedError as e:
        raise GGUFError(
            f"{str(file)!r} holds {name} as {tensor_type.name}, which the package gguf does not dequantise; convert "
            "the model to another type."
        ) from e


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
