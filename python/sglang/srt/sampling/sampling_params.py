"""How a request wants its tokens chosen. Travels on the wire; validated once, in the HTTP process."""

from __future__ import annotations

import msgspec


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like."""

    # json_schema, regex, ebnf or structural_tag.
    kind: str
    # A schema or a structural tag as JSON text, a regular expression, or rules of which `root` is the first.
    source: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Field names are SGLang's. The penalties look at what was generated, not at the prompt; see penalties.py."""

    max_new_tokens: int = 128
    # 0: greedy.
    temperature: float = 1.0
    # The likeliest tokens that make up this probability are kept.
    top_p: float = 1.0
    # The number of likeliest tokens that are kept; -1: the whole vocabulary.
    top_k: int = -1
    # Tokens less likely than this share of the likeliest are cut.
    min_p: float = 0.0
    # Subtracted from a token's logit for each time that it was generated.
    frequency_penalty: float = 0.0
    # Subtracted once from the logit of a token that was generated.
    presence_penalty: float = 0.0
    # Divides positive logits of tokens that were generated, and multiplies negative ones.
    repetition_penalty: float = 1.0
    # No stop token is drawn before.
    min_new_tokens: int = 0
    # Token id -> what is added to its logit.
    logit_bias: dict[int, float] = {}
    # Matched on text by the detokenizer.
    stop: tuple[str, ...] = ()
    # Matched by the scheduler, beside the model's end-of-sequence ids.
    stop_token_ids: tuple[int, ...] = ()
    # The model's end-of-sequence ids do not end the request.
    ignore_eos: bool = False
    # Of the text.
    skip_special_tokens: bool = True
    # The text keeps its stop string.
    no_stop_trim: bool = False
    # None lets the server draw one. Token i of a request is drawn from (seed, i) alone, and a retracted request
    # therefore resumes exactly.
    sampling_seed: int | None = None
    # None: the answer is free. With one, the end-of-sequence ids end the request even if they are to be ignored,
    # because nothing may follow a complete answer.
    grammar: GrammarSpec | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
