"""What a request of the soak asks for, and whether its answer is right: tokens, log-probabilities, reasons."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, TokenOutput, bytes_to_ids
from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from support.hash_model import HashModel
from support.soak_config import EOS, SoakConfig


class WrongTokensError(AssertionError):
    pass


class WrongLogprobsError(AssertionError):
    pass


@dataclass
class Expected:
    """A request that is not over, and what has come of it."""

    prompt: np.ndarray
    max_new_tokens: int
    stop: frozenset[int]
    refused: bool
    extra_key: str
    # It has room only while peers lend enough: then it may be refused, cut or ended.
    needs_peers: bool
    spec: LogprobSpec | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    # Of its grammar: what each token may be, and then the end.
    grammar: Sequence[Sequence[int]] = ()
    is_embedding: bool = False
    got: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, output: TokenOutput) -> None:
        self.got += bytes_to_ids(output.output_ids).tolist()
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        assert output.cached_tokens < max(1, output.prompt_tokens), (
            f"{output.rid}: the last prompt token is never cached"
        )

    def check_answer(self, last: TokenOutput, model: HashModel) -> None:
        """All that `take` has got, after the last output of a request that was not refused."""
        wanted = self._wanted(model)
        is_aborted = last.finish_reason is not None and last.finish_reason.type == "abort"
        is_cut = is_aborted or self.needs_peers
        if self.got != (wanted[: len(self.got)] if is_cut else wanted):
            raise WrongTokensError(f"{last.rid}: got {self.got}, expected {wanted}")
        self._check_logprobs(last.rid, is_aborted, model)
        if self.is_embedding and not is_aborted:
            found = torch.frombuffer(bytearray(last.embedding), dtype=torch.float32)
            torch.testing.assert_close(found, model.embedding(self.prompt), msg=f"{last.rid}: another embedding")

    def _wanted(self, model: HashModel) -> list[int]:
        answer: list[int] = []
        while len(answer) < self.max_new_tokens and not self.stop.intersection(answer[-1:]):
            row = model.all_logits(np.array([*self.prompt.tolist(), *answer]))[-1]
            answer.append(int(self._shaped(row, answer).argmax()))
        return answer

    def _shaped(self, row: torch.Tensor, answer: list[int]) -> torch.Tensor:
        """row: (vocab_size,) logits behind an answer so far. What its parameters make of them."""
        params, counts = self.params, torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=len(row))
        row = torch.where(counts > 0, row * params.repetition_penalty, row)  # none is above 0
        row = row - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty
        for token, bias in params.logit_bias.items():
            row[token] += bias
        if len(answer) < params.min_new_tokens:
            row[list(self.stop)] = -torch.inf
        if self.grammar:
            allowed = self.grammar[len(answer)] if len(answer) < len(self.grammar) else [EOS]
            row[[token for token in range(len(row)) if token not in allowed]] = -torch.inf
        return row

    def _check_logprobs(self, rid: str, is_aborted: bool, model: HashModel) -> None:
        n = len(self.prompt)
        tokens = [*self.prompt.tolist(), *self.got]
        first, end = n, n
        if self.spec is not None:
            first, end = n if self.spec.prompt_from is None else self.spec.prompt_from, len(tokens)
        found = [*self.prompt_logprobs, *self.logprobs]
        if is_aborted and not self.got:
            end = first + len(found)
        if [each.token for each in found] != tokens[first:end]:
            raise WrongLogprobsError(f"{rid}: of {[each.token for each in found]}, expected {tokens[first:end]}")
        rows = torch.log_softmax(model.all_logits(np.array(tokens)), -1)
        for at, each in enumerate(found, start=first):
            if at == 0:
                assert each.logprob is None and not each.top, f"{rid}: nothing predicts the first token: {each}"
                continue
            self._check_one(rid, each, rows[at - 1])

    def _check_one(self, rid: str, found: TokenLogprob, row: torch.Tensor) -> None:
        """row: (vocab_size,) log-probabilities, of which those that are equally far from the likeliest are equal."""
        assert self.spec is not None and found.logprob is not None
        got = [(found.logprob, found.token), *found.top, *found.token_ids]
        wanted = [found.token, *(token for _, token in found.top), *self.spec.token_ids]
        if [token for _, token in got] != wanted:
            raise WrongLogprobsError(f"{rid}: of {got}, expected of {wanted}")
        values = [*row[wanted].tolist(), *row.sort(descending=True).values[: self.spec.top].tolist()]
        if not np.allclose([each for each, _ in (*got, *found.top)], values, atol=1e-4):
            raise WrongLogprobsError(f"{rid}: {got}, expected {values}")


def check_reasons(output: TokenOutput) -> None:
    """Each prompt token of a request that has started was found, or has a reason why not."""
    reasons = output.computed_tokens_details
    assert reasons.keys() <= REASONS.keys() and all(n > 0 for n in reasons.values()), reasons
    if output.cached_tokens_details:
        num_found = sum(output.cached_tokens_details.values())
        assert num_found + sum(reasons.values()) == output.prompt_tokens, f"{output.rid}: {reasons}"


class OtherRequests:
    """Makes requests of the soak differ in what they ask for beside their prompt."""

    def __init__(self, config: SoakConfig) -> None:
        self._config = config
        # Of their own, so that prompts are the same with and without.
        self._random = random.Random(f"other requests {config.seed}")
        self._shapes = random.Random(f"shapes {config.seed}")

    def vary(self, request: TokenizedGenerateReqInput, expected: Expected) -> TokenizedGenerateReqInput:
        config, rng = self._config, self._random
        if rng.random() < config.score_rate:
            expected.max_new_tokens = 0
            params = msgspec.structs.replace(request.sampling_params, max_new_tokens=0)
            request = msgspec.structs.replace(request, sampling_params=params)
        if rng.random() < config.session_rate:
            request = msgspec.structs.replace(request, session_id=f"s{rng.randrange(5)}")
        if rng.random() < config.logprob_rate:
            n = len(expected.prompt)
            expected.spec = LogprobSpec(
                top=rng.choice((0, 2)),
                token_ids=rng.choice(((), (1,))),
                prompt_from=rng.choice((None, 0, 1, n - 1, n, rng.randrange(n))),
            )
            request = msgspec.structs.replace(request, logprobs=expected.spec)
        if expected.max_new_tokens > 0 and self._shapes.random() < config.shape_rate:
            request = self._shape(request, expected)
        return request

    def _shape(self, request: TokenizedGenerateReqInput, expected: Expected) -> TokenizedGenerateReqInput:
        rng, kind = self._shapes, self._shapes.randrange(4)
        if kind == 0:
            expected.is_embedding, expected.max_new_tokens = True, 1
            params = msgspec.structs.replace(request.sampling_params, max_new_tokens=1)
            return msgspec.structs.replace(request, sampling_params=params, is_embedding=True)
        if kind == 1:
            expected.grammar = [rng.sample(range(1, 7), rng.randrange(1, 4)) for _ in range(rng.randrange(1, 9))]
            expected.stop |= {EOS}
            regex = "".join(f"[{''.join(map(str, each))}]" for each in expected.grammar)
            changes: dict[str, Any] = {"grammar": GrammarSpec("regex", regex)}
        elif kind == 2:
            # No two sums of these are equal.
            changes = {"frequency_penalty": 0.3141, "presence_penalty": rng.choice((0.0, 0.2718))}
            changes |= {"repetition_penalty": rng.choice((1.0, 1.1)), "logit_bias": rng.choice(({}, {5: 1.618}))}
        else:
            stop = (rng.randrange(1, 7),)
            expected.stop |= set(stop)
            changes = {"min_new_tokens": rng.randrange(expected.max_new_tokens + 1), "stop_token_ids": stop}
        expected.params = msgspec.structs.replace(request.sampling_params, **changes)
        return msgspec.structs.replace(request, sampling_params=expected.params)


@lru_cache(maxsize=1)
def grammars() -> GrammarCache:
    """Of `HashModel`'s vocabulary, in which each token but the end is a digit."""
    import xgrammar

    info = xgrammar.TokenizerInfo(["</s>", *"123456"], vocab_size=7, stop_token_ids=[EOS])
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        file = Path(folder) / "vocabulary.json"
        file.write_text(info.serialize_json())
        cache = GrammarCache(file, None)
        # The first grammar reads the file.
        cache.get(GrammarSpec("regex", "1"))
    return cache
