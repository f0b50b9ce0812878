"""`PrefixLabels`: names that an administrator gives to beginnings of prompts, for the eyes of people alone.

Owns the names. Of a prefix it keeps a keyed hash and a length: neither tokens nor the namespace can be read from it.
No decision depends on a label, so that ranks need not agree about them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_LABELS = 256
# Tokens at the end of a prompt that its label does not need to match: how a text ends in tokens depends on what comes
# after it, and a conversation's template closes with the turn of the model.
_TAIL_TOKENS = 16
_TAIL_SHARE = 8


@dataclass(frozen=True)
class _Label:
    # Of the prompt that was named, and of the part that has to match.
    num_tokens: int
    num_matched: int
    digest: bytes


class PrefixLabels:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._secret = secrets.token_bytes(32)
        self._labels: dict[str, _Label] = {}
        # Grows with each change, so that a reader knows when what it has found is old.
        self.version = 0

    def put(self, name: str, namespace: str, tokens: np.ndarray) -> str:
        """In place of what had the name. Returns why that cannot be, "" if it is done."""
        num_matched = len(tokens) - min(_TAIL_TOKENS, len(tokens) // _TAIL_SHARE)
        num_matched -= num_matched % self._page_size
        if not num_matched:
            return f"the prompt is shorter than a page of {self._page_size} tokens, and only whole pages are cached"
        if name not in self._labels and len(self._labels) >= MAX_LABELS:
            return f"there are {MAX_LABELS} labels, which is the most: remove one"
        hasher = self._hasher(namespace)
        hasher.update(tokens[:num_matched].astype(np.int32).tobytes())
        self._labels[name] = _Label(len(tokens), num_matched, hasher.digest())
        self.version += 1
        return ""

    def remove(self, name: str) -> bool:
        """False: there was no such label."""
        self.version += 1
        return self._labels.pop(name, None) is not None

    def find(self, namespace: str, pieces: Iterable[np.ndarray]) -> tuple[int, str] | None:
        """The longest label that a prefix begins with: the tokens of what was named, and the name. pieces: the
        prefix's tokens (int32)."""
        lengths = sorted({label.num_matched for label in self._labels.values()})
        hasher, pos = self._hasher(namespace), 0
        found: tuple[int, str] | None = None
        for piece in pieces:
            start = 0
            while lengths and lengths[0] <= pos + len(piece):
                length = lengths.pop(0)
                hasher.update(piece[start : length - pos].tobytes())
                start = length - pos
                digest = hasher.digest()
                for name, label in self._labels.items():
                    if (label.num_matched, label.digest) == (length, digest):
                        found = label.num_tokens, name
            if not lengths:
                break
            hasher.update(piece[start:].tobytes())
            pos += len(piece)
        return found

    def state(self) -> list[dict[str, Any]]:
        return [{"name": name, "tokens": label.num_tokens} for name, label in sorted(self._labels.items())]

    def _hasher(self, namespace: str) -> hashlib.blake2b:
        where = namespace.encode(errors="surrogatepass")
        return hashlib.blake2b(len(where).to_bytes(8, "little") + where, key=self._secret, digest_size=16)

    def check_invariants(self) -> None:
        assert len(self._labels) <= MAX_LABELS
        for name, label in self._labels.items():
            assert 0 < label.num_matched <= label.num_tokens, name
            assert label.num_matched % self._page_size == 0, name
