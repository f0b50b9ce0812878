"""A model's vocabulary as a client needs it: texts of a known number of tokens, counts, and the chat template.

Owns the tokenizer. Reads its files; asks no server, imports torch never and transformers for chat templates alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sglang.srt.configs.model_files import ModelConfigError, resolve_tokenizer_path
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

# A space as byte-level and as SentencePiece vocabularies write it, and letters.
_WORD = re.compile(r"[Ġ▁]([A-Za-z]{2,})")
# More words would make loading slower and texts no better.
_MAX_WORDS = 4096
_MIN_WORDS = 16


class VocabularyError(Exception):
    """There is no usable tokenizer; the message is one sentence for the user."""


class Vocabulary:
    """words: texts of one token each, in any order: a text of n of them has n tokens. If the tokenizer has too few
    such words, is_exact is False, and the lengths of made-up texts are near what was asked for."""

    def __init__(self, tokenizer: Tokenizer, path: str | None = None) -> None:
        """path: of its directory, for the chat template."""
        self._tokenizer = tokenizer
        self._path = path
        self._templates: Any = None
        ids, words = _whole_words(tokenizer)
        self.is_exact = len(ids) >= _MIN_WORDS
        if not self.is_exact:
            ids, words = _any_tokens(tokenizer)
        self._ids = np.array(ids, np.int64)
        self._words = words
        self.num_special_tokens = len(tokenizer.encode("").ids)

    @classmethod
    def load(cls, name: str) -> Vocabulary:
        """name: a directory, a name on the hub, or `embedded`. Raises `VocabularyError`."""
        try:
            path = resolve_tokenizer_path(name)
            file = path / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file)) if file.exists() else _converted(path)
        except (ModelConfigError, StartupError) as error:
            raise VocabularyError(f"{str(error).rstrip('.')}. Name the model's tokenizer with --tokenizer.") from None
        except Exception as error:  # the library raises plain Exceptions for a broken file
            raise VocabularyError(f"{name} holds no usable tokenizer.json ({error}).") from None
        return cls(tokenizer, str(path))

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def pick(self, numbers: np.ndarray) -> np.ndarray:
        """uint64 to places in the list of words, for `ids_at` and `text_at`."""
        return (numbers % np.uint64(len(self._words))).astype(np.int64)

    def ids_at(self, places: np.ndarray) -> list[int]:
        return self._ids[places].tolist()

    def text_at(self, places: np.ndarray) -> str:
        return "".join(map(self._words.__getitem__, places.tolist()))

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        """Up to where the assistant answers; without the token that a server puts before any text. Raises
        `VocabularyError`."""
        if self._templates is None:
            try:
                self._templates = get_tokenizer(self._path or "")
            except StartupError as error:
                raise VocabularyError(f"{str(error).rstrip('.')}.") from None
        if not self._templates.chat_template:
            raise VocabularyError(f"{self._path} has no chat template: leave out --apply-chat-template.")
        text = self._templates.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text.removeprefix(self._templates.bos_token or "")


def _converted(path: Path) -> Tokenizer:
    """The tokenizer of a directory without tokenizer.json, as transformers converts it."""
    backend = getattr(get_tokenizer(str(path)), "backend_tokenizer", None)
    if backend is None:
        raise StartupError(f"{path} has no fast tokenizer")
    return backend


def _whole_words(tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """Tokens that stay themselves whatever whole words stand around them: (ids, their texts with the space)."""
    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items())
    found = [(number, " " + match[1]) for number, token in vocabulary if (match := _WORD.fullmatch(token))]
    found = found[:: -(-len(found) // _MAX_WORDS) or 1]
    # Some tokenizers put a space of their own before a text: a word is one token more wherever it is added.
    texts = ([text * times for _, text in found] for times in (1, 2))
    once, twice = (tokenizer.encode_batch_fast(each, add_special_tokens=False) for each in texts)
    kept = [
        each
        for each, one, two in zip(found, once, twice, strict=True)
        if one.ids[-1:] == [each[0]] == two.ids[len(one.ids) :]
    ]
    return [number for number, _ in kept], [text for _, text in kept]


def _any_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    numbers = sorted(tokenizer.get_vocab(with_added_tokens=False).values())[:_MAX_WORDS]
    texts = [tokenizer.decode([number]) for number in numbers]
    kept = [(number, text) for number, text in zip(numbers, texts, strict=True) if text]
    if not kept:
        raise VocabularyError("The tokenizer has no tokens that are texts: name another with --tokenizer.")
    return [number for number, _ in kept], [text for _, text in kept]
