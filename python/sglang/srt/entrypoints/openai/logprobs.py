"""Log-probabilities in the two shapes of OpenAI's API. Pure functions of what the engine found and of token texts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from sglang.srt.sampling.logprob_types import TokenLogprob
from sglang.srt.utils.token_texts import TokenTexts

Event = dict[str, Any]


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> Event:
    """A chat choice's `logprobs`: one item per token, bytes exact also where a token is part of a character."""

    def item(token: int, logprob: float | None) -> Event:
        return {"token": texts.text(token), "logprob": logprob, "bytes": list(texts.data(token))}

    content = [
        {
            **item(entry.token, entry.logprob),
            "top_logprobs": [item(token, logprob) for logprob, token in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """A completion choice's `logprobs`, piece by piece. Owns how far into the choice's text its tokens have come."""

    def __init__(self, texts: TokenTexts, top: int, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._top = top
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprob]) -> Event:
        """text_offset: characters of the text before the token; a token that only goes on with a character stands
        where the character does."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if not (self._skip_special_tokens and self._texts.is_special(entry.token)):
                self._offset += len(self._decoder.decode(self._texts.data(entry.token)))
        return {
            "tokens": [self._texts.text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._likeliest(entry) for entry in entries] if self._top else None,
            "text_offset": offsets,
        }

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float] | None:
        """The likeliest tokens and the one that stands there. Of several with one text, the likeliest."""
        if entry.logprob is None:
            return None
        found: dict[str, float] = {}
        for logprob, token in [*entry.top, (entry.logprob, entry.token)]:
            found.setdefault(self._texts.text(token), logprob)
        return found
