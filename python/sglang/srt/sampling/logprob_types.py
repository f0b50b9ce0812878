"""What a request may ask about log-probabilities, and what it is told. Plain data; no torch.

They are the model's own: of the logits before penalties, biases and temperature.
"""

from __future__ import annotations

import msgspec


class LogprobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probabilities a request wants beside those of the chosen tokens."""

    # How many of the likeliest tokens.
    top: int = 0
    # Tokens whose log-probabilities are wanted wherever they rank.
    token_ids: tuple[int, ...] = ()
    # The first prompt token that wants one; None: no prompt token does.
    prompt_from: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """logprob: of the token that stands there, None for a prompt's first, which nothing predicts. top, token_ids:
    (log-probability, token id), likeliest first, and as asked."""

    token: int
    logprob: float | None
    top: list[tuple[float, int]] = []
    token_ids: list[tuple[float, int]] = []


class LaunchFindings(msgspec.Struct, frozen=True):
    """What one launch found. sampled: place among the launch's sampled requests -> its token. prompt: place among the
    launch's requests -> its prompt tokens in order. embeddings: place among the sampled requests -> float32 bytes."""

    sampled: dict[int, TokenLogprob] = {}
    prompt: dict[int, list[TokenLogprob]] = {}
    embeddings: dict[int, bytes] = {}
