"""A model's files: where they lie, and what can be checked of them without torch, before any process starts.

Owns finding the directory (local, hub, GGUF, or a model of our own). Reads JSON files, names of files and the headers
of weights; reads no weights.
What transformers knows of a config is in model_config.py.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.configs.experts import GPT_OSS, NAME_WIDTH_OF_EXPERTS
from sglang.srt.configs.gguf_model import GGUF_TENSORS, NO_TOKENIZER, GGUFError, ensure_gguf_model
from sglang.srt.configs.model_families import GEMMA_FAMILIES, MODEL_FAMILIES, NATIVE, TRANSFORMERS, pick_model_impl
from sglang.srt.configs.quantization import (
    MXFP4_GROUP,
    Packing,
    QuantizationError,
    WeightQuantization,
    read_quantization,
)
from sglang.srt.configs.smollm2_model import SMOLLM2, FetchError, ensure_smollm2

# What --model-path names the built-in model by.
EMBEDDED_MODEL = "embedded"

# Weights and what belongs to the tokenizer; not the other frameworks' copies of the weights.
_WEIGHTS = "*.safetensors"
_HUB_PATTERNS = ("*.json", _WEIGHTS, "*.jinja", "*.txt", "tokenizer.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_GGUF_SUFFIX, _GGUF_MAGIC = ".gguf", b"GGUF"
INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# Of which a tokenizer has at least one.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"),
    "tokenizer_config.json",
)
# Of config.json; early compressed-tensors have the second. Others wrote a file of their own at first.
_QUANTIZATION = ("quantization_config", "compression_config")
QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# Whole numbers of config.json.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok"),
)
_LARGEST = sys.float_info.max
# Numbers of rope parameters; the first two have to be there.
_ABOVE_ZERO = ("rope_theta", "original_max_position_embeddings", "factor")
_ROPE_NUMBERS = (
    *("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "partial_rotary_factor"),
)
_DTYPE_NAMES = ("float32", "float", "bfloat16", "float16", "half")


class ModelConfigError(ValueError):
    """The model cannot be served as asked; the message has the reason and the remedy."""


def resolve_model_path(model_path: str) -> Path:
    """The directory of a model, downloaded or written first where need be. Raises `ModelConfigError`."""
    return _resolve(model_path, "model", "config.json", _HUB_PATTERNS)


def resolve_tokenizer_path(tokenizer_path: str) -> Path:
    """As `resolve_model_path`, for a tokenizer: no weights are downloaded."""
    patterns = tuple(pattern for pattern in _HUB_PATTERNS if pattern != _WEIGHTS)
    return _resolve(tokenizer_path, "tokenizer", "the tokenizer's files", patterns)


def _resolve(name: str, what: str, files: str, patterns: Sequence[str]) -> Path:
    if name == EMBEDDED_MODEL:
        try:
            return ensure_embedded_model()
        except OSError as e:
            raise ModelConfigError(f"{str(e)[:1].upper()}{str(e)[1:]}.") from e
    if name == SMOLLM2:
        try:
            return _from_gguf(ensure_smollm2())
        except FetchError as e:
            raise ModelConfigError(
                f"The model smollm2 cannot be fetched: {e}. --model-path embedded needs no download."
            ) from e
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_gguf(path) if what == "model" else path
    if _is_gguf_file(path):
        return _from_gguf(path)
    if path.suffix.lower() == _GGUF_SUFFIX and not path.exists():
        raise ModelConfigError(f"There is no file {name!r}, or it is a link that leads nowhere.")
    if path.exists():
        raise ModelConfigError(f"{name!r} is a file; give the directory that holds {files}, or a .gguf file.")
    if not _HUB_NAME.fullmatch(name):
        raise ModelConfigError(
            f"There is no directory {name!r}; give a {what} directory, a hub name such as "
            f"Qwen/Qwen3-0.6B, {SMOLLM2!r} or {EMBEDDED_MODEL!r}."
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as e:
        # The hub's own errors span several lines; the first has the reason.
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ModelConfigError(
            f"{name!r} is not a directory here and could not be fetched from the Hugging Face hub ({reason})"
        ) from e


def _of_gguf(directory: Path) -> Path:
    """The directory, or of the one GGUF file in it where there are no other weights."""
    files = sorted(file for file in directory.iterdir() if file.suffix.lower() == _GGUF_SUFFIX and file.is_file())
    if not files or any(directory.glob(_WEIGHTS)) or (directory / GGUF_TENSORS).is_file():
        return directory
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelConfigError(f"{str(directory)!r} holds several GGUF files: give one itself ({names}).")
    return _from_gguf(files[0])


def _is_gguf_file(path: Path) -> bool:
    """By its name or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == _GGUF_SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False


def _from_gguf(file: Path) -> Path:
    try:
        return ensure_gguf_model(file)
    except GGUFError as e:
        raise ModelConfigError(str(e)) from e
    except OSError as e:
        raise ModelConfigError(f"{str(file)!r} cannot be read: {e}.") from e


def read_config_json(local_path: Path) -> dict[str, Any]:
    """With what a file of its own tells of quantised weights. Raises ModelConfigError."""
    path = local_path / "config.json"
    if not path.is_file():
        raise ModelConfigError(f"{str(local_path)!r} has no config.json; give a directory in Hugging Face's format.")
    raw = _read_object(path)
    if not any(raw.get(name) for name in _QUANTIZATION):
        for name, method in QUANTIZATION_FILES.items():
            if (file := local_path / name).is_file():
                found = _read_object(file)
                found = found.get("quantization", found)
                # What is no object is refused as such where it is read.
                raw[_QUANTIZATION[0]] = {"quant_method": method} | found if isinstance(found, dict) else found
                break
    return raw


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except OSError as e:
        raise ModelConfigError(f"{str(path)!r} cannot be read: {e.strerror}.") from e
    except (ValueError, RecursionError) as e:
        raise ModelConfigError(f"{str(path)!r} is not valid JSON: {e}.") from e
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{str(path)!r} does not hold a JSON object.")
    return raw


def pick_architecture(model_path: str, raw: dict[str, Any], model_impl: str = "auto") -> str:
    """Whether transformers can run an architecture that has no native model is checked later."""
    named = raw.get("architectures") or []
    for architecture in named:
        # A model for embeddings may have been saved without its head: MistralModel is MistralForCausalLM's rest.
        for name in (str(architecture), str(architecture).removesuffix("Model") + "ForCausalLM"):
            if name in MODEL_FAMILIES:
                return name
    if named and pick_model_impl(str(named[0]), model_impl) == TRANSFORMERS:
        return str(named[0])
    raise ModelConfigError(
        f"{model_path!r} has the architecture {', '.join(map(str, named)) or 'unknown'}, which is not supported; "
        f"supported are {', '.join(MODEL_FAMILIES)}, and others with --model-impl transformers."
    )


def check_tensor_parallel(num_ranks: int, num_heads: int, widths: Sequence[int], num_kv_heads: int) -> None:
    """widths: inside the feed-forward layers. Raises ModelConfigError if the model cannot be divided over so many
    ranks."""
    for what, number in (("attention heads", num_heads), *(("intermediate rows", width) for width in widths)):
        if number % num_ranks:
            raise ModelConfigError(
                f"The model's {number} {what} cannot be divided over {num_ranks} ranks; choose a --tp-size that "
                f"divides {number}."
            )
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ModelConfigError(
            f"The model's {num_kv_heads} KV heads can neither be divided over {num_ranks} ranks nor evenly repeated "
            f"on them; choose a --tp-size that divides {num_kv_heads} or is a multiple of it."
        )


def pick_context_length(wanted: int | None, own: int, rope_parameters: dict[str, Any]) -> int:
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


def rope_parameters_of(hf_config: Any, kind: str | None = None) -> dict[str, Any]:
    """hf_config: of transformers, or an object with config.json's entries. transformers 5 writes `rope_parameters`,
    older configs have `rope_theta` and `rope_scaling`. kind: of layers, as in `layer_types`, where each has its own;
    None where all have the same."""
    params: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = getattr(hf_config, name, None) or {}
        if not isinstance(found, Mapping):
            raise ModelConfigError(f"{name} in its config is {found!r}, but it has to be an object.")
        if kind is not None:
            found = found.get(kind) or {}
            if not isinstance(found, Mapping):
                raise ModelConfigError(f"{name}.{kind} in its config is {found!r}, but it has to be an object.")
        params.update(found)
    params.setdefault("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    named = params.get("rope_type") or params.get("type") or "default"
    # The first checkpoints of Phi-3 have the older name.
    params["rope_type"] = "longrope" if named == "su" else named
    # Beside them it counts more than in them, as in transformers: there it is filled in where it was left out.
    beside = getattr(hf_config, "original_max_position_embeddings", None)
    if beside is not None:
        params["original_max_position_embeddings"] = beside
    params.setdefault("original_max_position_embeddings", hf_config.max_position_embeddings)
    _check_rope(params)
    if params["rope_type"] in ("yarn", "longrope") and params.get("factor") is None:
        params["factor"] = hf_config.max_position_embeddings / params["original_max_position_embeddings"]
    return params


def rope_parameters_by_kind(hf_config: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`rope_parameters_of` all layers, and None; or of those with full attention, and of those with a window."""
    found = getattr(hf_config, "rope_parameters", None)
    if not isinstance(found, Mapping) or "sliding_attention" not in found:
        return rope_parameters_of(hf_config), None
    windowed = rope_parameters_of(hf_config, "sliding_attention")
    return rope_parameters_of(hf_config, "full_attention"), windowed


def _check_rope(params: Mapping[str, Any]) -> None:
    """Raises ModelConfigError for numbers that are none, or that give no positions."""
    if of_kinds := [name for name, value in params.items() if isinstance(value, Mapping)]:
        raise ModelConfigError(
            f"rope_parameters in its config are of kinds of layers ({', '.join(of_kinds)}), which is not supported "
            "natively; use --model-impl transformers."
        )
    for name, value in params.items():
        is_needed = name in _ABOVE_ZERO[:2]
        if name not in (*_ABOVE_ZERO, *_ROPE_NUMBERS) or (value is None and not is_needed):
            continue
        # Some whole numbers are too large for a float.
        is_number = type(value) in (int, float) and -_LARGEST < value < _LARGEST
        if not is_number or (value <= 0 and name in _ABOVE_ZERO):
            wanted = "a number above 0" if name in _ABOVE_ZERO else "a number"
            raise ModelConfigError(
                f"{name} in the rope parameters of its config is {value!r}, but it has to be {wanted}."
            )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN (Peng et al. 2023), Eq. 22: the square root of the softmax's temperature. mscale: DeepSeek's factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def check_config(
    model_path: str,
    raw: Mapping[str, Any],
    dtype: str,
    context_length: int | None,
    num_ranks: int,
    model_impl: str = "auto",
) -> str:
    """Refuses what config.json itself shows to be impossible. What it leaves to transformers' defaults is checked
    later. Returns NATIVE or TRANSFORMERS. Raises ModelConfigError."""
    architecture = pick_architecture(model_path, dict(raw), model_impl)
    impl = pick_model_impl(architecture, model_impl)
    if impl == NATIVE and "text_config" in raw:
        # Of text and images.
        raw = {**raw, **text_config_of(model_path, raw)}
    for name in _SIZES:
        value = raw.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelConfigError(
                f"{model_path!r} cannot be served: {name} in its config is {value!r}, but it has to be a whole "
                "number above 0."
            )
    quantization_of(model_path, raw, impl)
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype == "auto" and stored not in _DTYPE_NAMES:
        raise unsupported_dtype(stored)
    num_heads = raw.get("num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if impl == TRANSFORMERS:
        if isinstance(num_heads, int) and isinstance(num_kv_heads, int):
            check_tensor_parallel(num_ranks, num_heads, (), num_kv_heads)
        return impl
    check_activation(architecture, raw)
    own = raw.get("max_position_embeddings")
    if isinstance(own, int) and context_length is not None:
        pick_context_length(context_length, own, rope_parameters_by_kind(SimpleNamespace(**raw))[0])
    rows = raw.get("moe_intermediate_size" if architecture in NAME_WIDTH_OF_EXPERTS else "intermediate_size")
    if isinstance(num_heads, int) and isinstance(rows, int) and isinstance(num_kv_heads, int):
        check_tensor_parallel(num_ranks, num_heads, (rows,), num_kv_heads)
    return impl


def text_config_of(model_path: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """raw: config.json of a model for text and images. Raises ModelConfigError."""
    text = raw["text_config"]
    if not isinstance(text, Mapping):
        raise ModelConfigError(
            f"{model_path!r} cannot be served: text_config in its config is {text!r}, but it has to be an object."
        )
    return text


def quantization_of(model_path: str, raw: Mapping[str, Any], impl: str) -> WeightQuantization | None:
    """raw: config.json. impl: NATIVE or TRANSFORMERS."""
    try:
        found = read_quantization(next(filter(None, map(raw.get, _QUANTIZATION)), None))
    except QuantizationError as error:
        raise ModelConfigError(f"{model_path!r} cannot be served: {error}.") from error
    if found is not None and impl == TRANSFORMERS:
        raise ModelConfigError(
            f"{model_path!r} is quantized, which a model that transformers computes must not be; use unquantized "
            "weights."
        )
    if found is not None and found.packing == Packing.MXFP4:
        _check_mxfp4(model_path, raw)
    return found


def _check_mxfp4(model_path: str, raw: Mapping[str, Any]) -> None:
    architecture = pick_architecture(model_path, dict(raw))
    if architecture != GPT_OSS:
        raise ModelConfigError(
            f"{model_path!r} cannot be served: it is quantized as 'mxfp4', which is read of {GPT_OSS} and not of "
            f"{architecture}; use unquantized weights."
        )
    for name in ("hidden_size", "intermediate_size"):
        size = raw.get(name)
        if isinstance(size, int) and size % MXFP4_GROUP:
            raise ModelConfigError(
                f"{model_path!r} cannot be served: {name} in its config is {size}, and mxfp4 needs a multiple of "
                f"{MXFP4_GROUP}."
            )


def check_activation(architecture: str, config: Mapping[str, Any]) -> None:
    """config: its entries. Raises ModelConfigError."""
    if architecture in GEMMA_FAMILIES:
        # As in transformers, None is another word for it.
        found, supported = config.get("hidden_activation"), "gelu_pytorch_tanh"
    else:
        found, supported = config.get("hidden_act"), "silu"
    if found not in (None, supported):
        remedy = "--model-impl transformers"
        if architecture.endswith("ForConditionalGeneration"):
            # That refuses it.
            remedy = f"a checkpoint of its text model alone, with {remedy}"
        raise ModelConfigError(
            f"The activation {found!r} is not supported natively, only {supported!r} is; use {remedy}."
        )


def unsupported_dtype(stored: object) -> ModelConfigError:
    return ModelConfigError(
        f"The model's dtype {stored} is not supported; choose one with --dtype bfloat16, float16 or float32."
    )


def weight_file_names(path: Path) -> dict[str, str] | list[str]:
    """Tensor name -> file, of an index, else the files with weights. Raises ModelConfigError."""
    index, has_single_file = path / INDEX, (path / _SINGLE_FILE).is_file()
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            named = set(weight_map.values())
            absent = sorted(name for name in named if not (path / name).is_file())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelConfigError(f"{str(index)!r} is no index of weights: {error!r}.") from error
        if not has_single_file or _SINGLE_FILE in named:
            if absent:
                raise ModelConfigError(f"{INDEX} names files that are not there: {some(absent)}.")
            return weight_map
    if has_single_file:
        # It has all: an index that does not name it is of the shards it was made of. Other files are a copy in the
        # format of a trainer.
        return [_SINGLE_FILE]
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise ModelConfigError(
            f"{str(path)!r} has no *.safetensors; other formats are not read (convert with save_pretrained), "
            "and --load-format dummy runs without weights."
        )
    return files


def open_weight_file(file: Path, framework: Literal["np", "pt"]) -> Any:
    """An open safetensors file, whose header fits the size of the file. "np" needs no torch. Raises
    ModelConfigError."""
    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as e:
        raise ModelConfigError(f"{str(file)!r} cannot be read as safetensors (incomplete download?): {e}.") from e


def is_gguf(path: Path, load_format: str) -> bool:
    """Whether a model's weights, in its directory, are read from a GGUF file. Raises ModelConfigError if load_format
    asks for what is not there."""
    has = (path / GGUF_TENSORS).is_file()
    if load_format == "gguf" and not has:
        raise ModelConfigError(f"--load-format gguf: {str(path)!r} is not a GGUF file; give the .gguf file itself.")
    if load_format == "safetensors" and has:
        raise ModelConfigError("--load-format safetensors: the weights are a GGUF file; leave the flag out.")
    return has


def check_weight_files(path: Path, load_format: str, model_impl: str) -> None:
    """Reads the headers. model_impl: whose code computes, see `pick_model_impl`. Raises ModelConfigError."""
    if is_gguf(path, load_format):
        # Its header was read when the directory was made.
        if model_impl == TRANSFORMERS:
            raise ModelConfigError(
                "--model-impl transformers does not read GGUF files; leave the flag out, or give the model as a "
                "directory in Hugging Face's format."
            )
        return
    names = weight_file_names(path)
    for name in sorted(set(names.values() if isinstance(names, dict) else names)):
        with open_weight_file(path / name, "np"):
            pass


def check_tokenizer_files(path: Path) -> None:
    """path: a directory. Raises ModelConfigError."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelConfigError(
            f"{str(path)!r} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); name one with "
            "--tokenizer-path."
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file() and (problem := _read_object(path / name).get(NO_TOKENIZER)):
            raise ModelConfigError(problem)


def tokenizer_end(path: Path) -> int | None:
    """The token that ends an answer by the tokenizer's files. path: their directory. None where they do not tell, or
    cannot be read, which the tokenizer itself reports."""
    try:
        config = _read_object(path / "tokenizer_config.json")
        end = config.get("eos_token")
        text = end["content"] if isinstance(end, dict) else end
        added = {each["content"]: int(at) for at, each in config.get("added_tokens_decoder", {}).items()}
        if text is not None and text not in added:
            added = {
                each["content"]: int(each["id"]) for each in _read_object(path / "tokenizer.json")["added_tokens"]
            }
        return added.get(text)
    except (ModelConfigError, ValueError, KeyError, TypeError, AttributeError):
        return None


def some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
