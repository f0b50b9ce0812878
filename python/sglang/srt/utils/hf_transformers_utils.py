"""A model's tokenizer, and what the HTTP process knows of its config. Reads files; loads no weights."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from sglang.srt.utils.child_process import StartupError, one_sentence

# (tokenizer_class without "Fast", model_type) -> the class that AutoTokenizer would choose. Importing AutoTokenizer
# imports torch, seconds that a server's start would wait for; importing one class does not. A LlamaTokenizer of a
# Llama is not among them: there AutoTokenizer decides by what the file holds.
_TOKENIZER_CLASSES = {
    ("LlamaTokenizer", "mistral"): "TokenizersBackend",
    ("LlamaTokenizer", "phi3"): "TokenizersBackend",
    ("Qwen2Tokenizer", "qwen2"): "Qwen2Tokenizer",
    ("Qwen2Tokenizer", "qwen3"): "Qwen2Tokenizer",
}

# Transformers imports its parts when they are asked for, and two threads that do so disturb each other.
_IMPORTING = threading.Lock()


def get_tokenizer(path: str, named: str | None = None) -> Any:
    """A transformers tokenizer, the one of AutoTokenizer. named: what stands in the error in place of the path.
    Raises StartupError."""
    try:
        with _IMPORTING:
            import transformers

            name = _known_tokenizer_class(path)
            tokenizer_class = getattr(transformers, name) if name else transformers.AutoTokenizer
            return tokenizer_class.from_pretrained(path)
    except Exception as error:  # transformers raises anything from KeyError to its own errors for a broken file
        raise StartupError(f"{named or path} holds no usable tokenizer ({one_sentence(error)[:200]})") from None


def _known_tokenizer_class(path: str) -> str | None:
    def read(file_name: str) -> dict[str, Any]:
        try:
            with open(os.path.join(path, file_name)) as file:
                content = json.load(file)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    config = read("tokenizer_config.json")
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    files = set(os.listdir(path)) if os.path.isdir(path) else set()
    if "auto_map" in config or "tokenizer.json" not in files or "tekken.json" in files:
        return None
    if name in ("PreTrainedTokenizer", "TokenizersBackend"):
        return "TokenizersBackend"
    return _TOKENIZER_CLASSES.get((name, str(read("config.json").get("model_type"))))


def get_context_and_vocab(model_dir: str) -> tuple[int | None, int | None]:
    """(max_position_embeddings, vocab_size) of the model's config; None: it has none. Raises StartupError."""
    try:
        with open(os.path.join(model_dir, "config.json")) as file:
            config = json.load(file)
        text = config.get("text_config")
        config = {**(text if isinstance(text, dict) else {}), **config}
    except (OSError, ValueError, AttributeError, TypeError):
        raise StartupError(
            f"{model_dir} has no readable config.json: give a directory in Hugging Face's format"
        ) from None
    return config.get("max_position_embeddings"), config.get("vocab_size")
