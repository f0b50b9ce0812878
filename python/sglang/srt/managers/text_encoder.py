"""Text to token ids and back, without Python's interpreter lock. Owns the tokenizer's settings and a table of reuse.

    text --cut at special tokens--> segments --found in TokenReuse, else tokenised--> ids of each --> ids

The ids always equal those of the tokenizer's own `encode`: a text is cut only where `tokenizer_parts` has proven that
the cut changes nothing. Methods are called on helper threads, several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.srt.managers.token_reuse import TokenReuse
from sglang.srt.utils.chat_template import all_chat_templates
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.tokenizer_parts import cut_tokens, ids_around, longest_token
from sglang.srt.utils.unicode import is_unicode

REUSE_BYTES = 64 << 20
# Characters. Shorter segments are not worth an entry of the table.
_MIN_SEGMENT = 256
# The most segments of one text. The rest of the text is part of the last one.
_MAX_SEGMENTS = 2048


@dataclass(frozen=True)
class EncodedText:
    """ids: int32; None if there are more than requested. reused: tokens that came from the table."""

    num_tokens: int
    ids: np.ndarray | None
    reused: int = 0


class TextEncoder:
    def __init__(self, tokenizer: Any, reuse_bytes: int = REUSE_BYTES) -> None:
        """tokenizer: a transformers tokenizer. One that is not fast is used as it is."""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._longest: int | None = None
        self._cuts: tuple[str, ...] = ()
        self._before: list[int] = []
        self._behind: list[int] = []
        self._reuse = TokenReuse(reuse_bytes)
        if self._backend is None:
            return
        # A tokenizer file may ask for truncation or padding, which are for training. Transformers' own encode turns
        # them off too.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._longest = longest_token(self._backend)
        if (around := ids_around(self._backend)) is not None:
            self._before, self._behind = around
            self._cuts = cut_tokens(self._backend, all_chat_templates(tokenizer))

    def min_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, computed at once; 0 where none is known."""
        return -(-len(text) // self._longest) if self._longest else 0

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        namespace: str | None = None,
        max_tokens: int | None = None,
    ) -> EncodedText:
        """namespace: separates the requests of tenants; None neither reuses nor keeps anything. max_tokens: for a
        text with more tokens, only their number is returned. Raises RequestError for a text that is no valid
        Unicode."""
        try:
            return self._encode(text, add_special_tokens, namespace, max_tokens)
        except (TypeError, UnicodeEncodeError):
            if is_unicode(text):
                raise
            raise RequestError("the text holds half of a surrogate pair, which is no character") from None

    def _encode(
        self, text: str, add_special_tokens: bool, namespace: str | None, max_tokens: int | None
    ) -> EncodedText:
        if self._backend is None:
            return _encoded(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), max_tokens)
        *closed, last = [text] if namespace is None else self._segments(text)
        if namespace is None or not closed:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return _encoded(encoding, max_tokens)
        found = self._reuse.find(namespace, closed)
        missing = [at for at, ids in enumerate(found) if ids is None]
        texts = [closed[at] for at in missing] + [last]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        before, behind = (self._before, self._behind) if add_special_tokens else ([], [])
        reused = sum(len(ids) for ids in found if ids is not None)
        num_tokens = len(before) + reused + sum(map(len, encodings)) + len(behind)
        if max_tokens is not None and num_tokens > max_tokens:
            return EncodedText(num_tokens, None, reused)
        *new, end = map(_ids, encodings)
        self._reuse.keep(namespace, zip(texts, new))
        for at, ids in zip(missing, new):
            found[at] = ids
        parts = [np.array(before, np.int32), *(ids for ids in found if ids is not None), end]
        return EncodedText(num_tokens, np.concatenate([*parts, np.array(behind, np.int32)]), reused)

    def _segments(self, text: str) -> list[str]:
        """The text in pieces, each but the first beginning with a special token. Two texts with the same beginning
        have the same pieces there. The last piece may grow in a conversation's next turn; the others are complete."""
        segments: list[str] = []
        start = 0
        # The next place of each token. Every stretch of the text is searched once per token.
        places = dict.fromkeys(self._cuts, -1)
        while len(segments) < _MAX_SEGMENTS - 1:
            for token, place in places.items():
                if place < start + _MIN_SEGMENT:
                    place = text.find(token, start + _MIN_SEGMENT)
                    places[token] = place if place >= 0 else len(text)
            cut = min(places.values(), default=len(text))
            if cut == len(text):
                break
            segments.append(text[start:cut])
            start = cut
        return [*segments, text[start:]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._backend is not None:
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]] | None:
        """Where each token begins and ends in the text, in characters. A token that the tokenizer adds has an empty
        span, and tokens of one character all have that of the character. None where the tokenizer does not know."""
        if self._backend is None:
            return None
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        spans = []
        covered = 0
        for start, end in encoding.offsets:
            # A tokenizer may leave the space before a word out of the word's span, but not out of its token.
            start = min(start, covered) if start < end else covered
            covered = max(end, covered)
            spans.append((start, covered))
        return spans

    def forget(self) -> None:
        """Drop the texts of all earlier requests."""
        self._reuse.clear()


def _ids(encoding: Any) -> np.ndarray:
    """encoding: the library's, or a list of ids."""
    ids = encoding if isinstance(encoding, list) else encoding.ids
    return np.fromiter(ids, np.int32, len(ids))


def _encoded(encoding: Any, max_tokens: int | None) -> EncodedText:
    """Counts first, because turning millions of ids into Python's integers takes the interpreter lock."""
    fits = max_tokens is None or len(encoding) <= max_tokens
    return EncodedText(len(encoding), _ids(encoding) if fits else None)
