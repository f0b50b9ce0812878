"""What a request of the soak asks for, and whether its answer is right: tokens, log-probabilities, reasons."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, TokenOutput, bytes_to_ids
from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from support.hash_model import HashModel
from support.soak_config import SoakConfig


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
        wanted = model.generate(self.prompt, self.max_new_tokens, self.stop)
        is_aborted = last.finish_reason is not None and last.finish_reason.type == "abort"
        is_cut = is_aborted or self.needs_peers
        if self.got != (wanted[: len(self.got)] if is_cut else wanted):
            raise WrongTokensError(f"{last.rid}: got {self.got}, expected {wanted}")
        self._check_logprobs(last.rid, is_aborted, model)

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
        # Of its own, so that prompts are the same with and without.
        self._random = random.Random(f"other requests {config.seed}")

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
        return request
