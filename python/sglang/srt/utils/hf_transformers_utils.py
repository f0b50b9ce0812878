"""Where a model lies, and its tokenizer. Reads files; loads no weights."""

from __future__ import annotations

import json
import os
from typing import Any

from sglang.srt.server_args import EMBEDDED_MODEL
from sglang.srt.utils.child_process import StartupError, one_sentence

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_model_path(model_path: str) -> str:
    """The directory of a model: the embedded one is made at first use, a hub name is downloaded with a progress bar.
    Raises StartupError."""
    if model_path == EMBEDDED_MODEL:
        from sglang.srt.model_loader.embedded_model import ensure_embedded_model

        return str(ensure_embedded_model())
    if os.path.isdir(model_path):
        if not os.path.isfile(os.path.join(model_path, "config.json")):
            raise StartupError(f"{model_path} holds no config.json: give the directory of a Hugging Face model")
        return model_path
    if os.path.exists(model_path):
        raise StartupError(f"{model_path} is a file: give the directory of a Hugging Face model")
    if model_path.startswith((".", "/", "~")) or model_path.count("/") != 1:
        raise StartupError(f"there is no model at {model_path}: give a directory, a hub name, or 'embedded'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return snapshot_download(model_path, allow_patterns=_MODEL_FILES)
    except RepositoryNotFoundError:
        raise StartupError(
            f"there is no model at {model_path}: it is no directory here and no public model on the Hugging Face hub"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise StartupError(
            f"there is no model at {model_path}: it is no directory here and cannot be fetched from the Hugging Face "
            f"hub ({one_sentence(error)[:200]})"
        ) from None


def get_tokenizer(path: str) -> Any:
    """A transformers tokenizer. Raises StartupError."""
    try:
        with open(os.path.join(path, "tokenizer_config.json")) as file:
            tokenizer_class = json.load(file).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        tokenizer_class = None
    try:
        if tokenizer_class == "PreTrainedTokenizerFast":
            # AutoTokenizer would choose the same, but importing it imports torch: seconds.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises anything from KeyError to its own errors for a broken file
        raise StartupError(f"{path} holds no usable tokenizer ({one_sentence(error)[:200]})") from None


def get_context_length(model_dir: str) -> int | None:
    """max_position_embeddings of the model's config, if it says."""
    with open(os.path.join(model_dir, "config.json")) as file:
        config = json.load(file)
    value = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(value) if value else None


def get_vocab_size(model_dir: str) -> int | None:
    with open(os.path.join(model_dir, "config.json")) as file:
        config = json.load(file)
    value = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(value) if value else None
