"""`SampleSpec`: how one request's tokens are chosen. Plain data; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class SampleSpec:
    """Made once per request."""

    params: SamplingParams
    # Tokens that end the request.
    stop_ids: tuple[int, ...]
    # Tokens of the prompt.
    num_prompt: int
    # None: the request wants no log-probabilities.
    logprobs: LogprobSpec | None = None
    # The hidden state behind the first sampled token is wanted.
    wants_embedding: bool = False
