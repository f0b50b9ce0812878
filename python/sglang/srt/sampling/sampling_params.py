"""How a request wants its tokens chosen. Travels on the wire; validated once, in the HTTP process."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Field names are SGLang's. temperature 0 means greedy; top_k -1 means the whole vocabulary. min_p: tokens less
    likely than this share of the likeliest are cut. The penalties look at what was generated, not at the prompt; see
    penalties.py. min_new_tokens: no stop token before. logit_bias: token id -> what is added to its logit.

    stop: strings, matched on text by the detokenizer. stop_token_ids: matched by the scheduler, beside the model's
    end-of-sequence ids unless ignore_eos. sampling_seed: None lets the server draw one; token i of a request is
    drawn from (seed, i) alone, so a retracted request resumes exactly.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
