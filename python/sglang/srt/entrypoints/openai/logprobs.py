"""Log-probabilities in the two shapes of OpenAI's API, and their distribution over the pieces of a stream.

`LogprobStream` owns how far into a choice's text its tokens have come; the other functions are pure.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

from sglang.srt.sampling.logprob_types import TokenLogprob
from sglang.srt.utils.token_texts import TokenTexts

Event = dict[str, Any]


class LogprobStream:
    """The log-probabilities of one choice that are not sent yet. A token is held back while its text is: the text may
    be part of a character, or may become a stop string."""

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        self._num_sent = 0
        self._held: deque[tuple[int, int, TokenLogprob]] = deque()

    def begin_with_prompt(
        self, entries: Sequence[TokenLogprob], text: str, spans: Sequence[tuple[int, int]] | None
    ) -> None:
        """The choice begins with its prompt, whose text the next `take` sends. entries: of the prompt's tokens.
        spans: where each of them is in the text; None: the text is a decode of the tokens, or it is not known."""
        if spans is None or len(spans) != len(entries):
            spans = [self._next_span(entry) for entry in entries]
            # A decode may drop the space before the first word.
            dropped = max(0, self._num_chars - len(text))
            spans = [(max(0, start - dropped), min(max(0, end - dropped), len(text))) for start, end in spans]
        self._held.extend((start, end, entry) for (start, end), entry in zip(spans, entries, strict=True))
        self._num_chars = len(text)
        self._decoder.reset()

    def take(self, entries: Sequence[TokenLogprob], text: str, final: bool) -> list[tuple[int, TokenLogprob]]:
        """entries: new ones. text: the text that is sent now. Returns the entries that belong to it, each with its
        place: the number of characters of the choice's text before the token, or before the character that the token
        continues."""
        for entry in entries:
            self._held.append((*self._next_span(entry), entry))
        self._num_sent += len(text)
        taken = []
        # Entries are sent only with text, except at the end, because there is no event without text.
        while self._held and (final or (text and self._held[0][1] <= self._num_sent)):
            start, _, entry = self._held.popleft()
            taken.append((start, entry))
        return taken

    def _next_span(self, entry: TokenLogprob) -> tuple[int, int]:
        start = self._num_chars
        if not (self._skip_special_tokens and self._texts.is_special(entry.token)):
            self._num_chars += len(self._decoder.decode(self._texts.data(entry.token)))
        begun = int(bool(self._decoder.getstate()[0]))
        return start, self._num_chars + begun


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> Event:
    """A chat choice's `logprobs`: one item per token. `bytes` is exact even where a token is part of a character."""

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


def completion_logprobs(placed: Sequence[tuple[int, TokenLogprob]], texts: TokenTexts, top: int) -> Event:
    """A completion choice's `logprobs`. placed: as LogprobStream gives them."""

    def likeliest(entry: TokenLogprob) -> dict[str, float] | None:
        """The likeliest tokens and the sampled token. Of several tokens with one text, the likeliest is kept."""
        if entry.logprob is None:
            return None
        found: dict[str, float] = {}
        for logprob, token in [*entry.top, (entry.logprob, entry.token)]:
            found.setdefault(texts.text(token), logprob)
        return found

    return {
        "tokens": [texts.text(entry.token) for _, entry in placed],
        "token_logprobs": [entry.logprob for _, entry in placed],
        "top_logprobs": [likeliest(entry) for _, entry in placed] if top else None,
        "text_offset": [start for start, _ in placed],
    }
