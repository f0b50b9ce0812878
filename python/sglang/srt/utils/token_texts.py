"""Text and bytes of single tokens. Owns a cache over a tokenizer; never decodes more than one token at a time.

A token may hold part of a character: its bytes are exact, its text then has replacement marks. What a tokenizer drops
at the start of a text (sentencepiece's space) is kept, so that the texts of an answer's tokens join to the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"  # sentencepiece's


class TokenTexts:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._to_bytes = _bytes_of_vocabulary_entry(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._added = {token: str(entry) for token, entry in added.items()}
        self._special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        self._special_texts = {self._added[token] for token in self._special if token in self._added}
        self._cache: dict[int, tuple[bytes, str]] = {}

    def is_special(self, token: int) -> bool:
        return token in self._special

    def is_special_text(self, text: str) -> bool:
        """Whether the text is that of a special token."""
        return text in self._special_texts

    def data(self, token: int) -> bytes:
        return self._entry(token)[0]

    def text(self, token: int) -> str:
        return self._entry(token)[1]

    def _entry(self, token: int) -> tuple[bytes, str]:
        entry = self._cache.get(token)
        if entry is None:
            data = self._find(token)
            entry = self._cache[token] = data, data.decode(errors="replace")
        return entry

    def _find(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # models have more rows than tokenizers have words
            return b""
        if self._to_bytes is None:
            return self._tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()
        return self._to_bytes(piece)


def _bytes_of_vocabulary_entry(tokenizer: Any) -> Callable[[str], bytes] | None:
    """How this tokenizer writes bytes in its vocabulary; None if it does so in neither of the two usual ways."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    kinds = {step["type"] for step in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in kinds:
        table = _byte_level_alphabet()
        return lambda piece: b"".join(table.get(char, char.encode()) for char in piece)
    if "ByteFallback" in kinds:

        def from_sentencepiece(piece: str) -> bytes:
            byte = _BYTE_TOKEN.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE_MARK, " ").encode()

        return from_sentencepiece
    return None


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's: printable characters of Latin-1 stand for themselves, the other bytes for 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {char: bytes([byte]) for char, byte in chars.items()}
