"""Where a model lies, and its tokenizer. Reads files; loads no weights."""

from __future__ import annotations

import json
import os
from typing import Any

from sglang.srt.server_args import EMBEDDED_MODEL
from sglang.srt.utils.child_process import StartupError, one_sentence


def resolve_model_path(model_path: str) -> str:
    """The directory of a model: the embedded one is made at first use, a hub name is downloaded. Raises a typed error
    with one sentence. Two ways need no torch, which takes seconds to import; the rest is model_config's."""
    if model_path == EMBEDDED_MODEL:
        from sglang.srt.model_loader.embedded_model import ensure_embedded_model

        return str(ensure_embedded_model())
    if os.path.isdir(model_path):
        return model_path
    from sglang.srt.configs.model_config import resolve_model_path as resolve

    return str(resolve(model_path))


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


def get_context_and_vocab(model_dir: str) -> tuple[int | None, int | None]:
    """(max_position_embeddings, vocab_size) of the model's config, as far as it says. Raises StartupError."""
    try:
        with open(os.path.join(model_dir, "config.json")) as file:
            config = json.load(file)
        config = {**config.get("text_config", {}), **config}
    except (OSError, ValueError, AttributeError, TypeError):
        raise StartupError(
            f"{model_dir} has no readable config.json: give a directory in Hugging Face's format"
        ) from None
    return config.get("max_position_embeddings"), config.get("vocab_size")
