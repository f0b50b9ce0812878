"""What is measured of one request. Times come from the caller; reads no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """What one event, or a whole reply, tells. None: it does not."""

    # New text.
    text: str = ""
    # Tokens of the answer so far.
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    # All ids so far.
    output_ids: list[int] | None = None
    cached_tokens: int | None = None
    # Tier -> prompt tokens that were found there.
    cached_tokens_by_tier: dict[str, int] | None = None


@dataclass(slots=True)
class RequestRecord:
    # Of the prompt: as the client counts until the server tells.
    prompt_len: int
    # On the caller's clock, when the request was sent.
    start_s: float
    # From the start to the first text; None: none came, or the answer came whole.
    ttft_s: float | None = None
    # From the start to the reply's end.
    latency_s: float = 0.0
    # Seconds per token after the first text, one entry per token.
    itl_s: list[float] = field(default_factory=list)
    text: str = ""
    # Of the answer: as the server counts; else one per event with text.
    output_len: int = 0
    output_ids: list[int] | None = None
    cached_tokens: int | None = None
    cached_tokens_by_tier: dict[str, int] | None = None
    # A short reason; None: the answer came whole.
    error: str | None = None
    # When text came last, from the start, and how many tokens there were then.
    _last_s: float = 0.0
    _last_len: int = 0

    @property
    def has_succeeded(self) -> bool:
        return self.error is None

    def add(self, progress: Progress, now_s: float | None) -> None:
        """now_s: None for a reply that came whole, of which no token has a time."""
        if progress.prompt_tokens is not None:
            self.prompt_len = progress.prompt_tokens
        if progress.output_ids is not None:
            self.output_ids = progress.output_ids
        if progress.cached_tokens is not None:
            self.cached_tokens = progress.cached_tokens
        if progress.cached_tokens_by_tier is not None:
            self.cached_tokens_by_tier = progress.cached_tokens_by_tier
        if progress.num_tokens is not None:
            self.output_len = max(self.output_len, progress.num_tokens)
        elif progress.text:
            self.output_len += 1
        if progress.text:
            self.text += progress.text
            if now_s is not None:
                self._time_text(now_s - self.start_s)

    def _time_text(self, at_s: float) -> None:
        """Tokens that came together share the time since the text before."""
        if self.ttft_s is None:
            self.ttft_s = at_s
        else:
            num_new = max(1, self.output_len - self._last_len)
            self.itl_s += [(at_s - self._last_s) / num_new] * num_new
        self._last_s, self._last_len = at_s, self.output_len

    def finish(self, now_s: float) -> None:
        self.latency_s = now_s - self.start_s


def tiers_of(details: Any) -> dict[str, int] | None:
    """tier -> tokens, of what a server reports as `cached_tokens_details`; other fields of it have no number."""
    if not isinstance(details, dict):
        return None
    return {str(tier): n for tier, n in details.items() if isinstance(n, int) and not isinstance(n, bool)}
