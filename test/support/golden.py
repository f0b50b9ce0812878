"""Golden answers of a trained model: the form of their file, the comparison with them, how transformers gives them.

An answer is compared by its tokens and by the log-probability of each. A wrong page of KV changes every
log-probability, and few tokens. `golden_smollm2.py` writes the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard

from sglang.srt.configs.model_config import ModelConfig
from support.local_engine import Generation

GOLDEN = Path(__file__).parent / "golden_smollm2.msgpack.zst"
# Tokens of a golden answer.
NUM_TOKENS = 8
# Where the greedy token is not the golden one, transformers' logits of the two are no further apart.
MARGIN = 1e-3
# Between log-probabilities of one token: float32, sums in another order. 2e-5 was measured, and 2e-3 where the
# positions of one page of 16 in 440 tokens are off by one.
TOLERANCE = 2e-4


class GateError(AssertionError):
    """The engine's answer is not the model's."""


class GoldenAnswer(msgspec.Struct, frozen=True):
    """What transformers answers to a prompt, greedily and beyond the end of the text."""

    name: str
    prompt: list[int]
    tokens: list[int]
    # Of each token.
    logprobs: list[float]
    # The second likeliest token of each step, and how far its logit is below the best.
    second: list[int]
    gaps: list[float]

    @property
    def ids(self) -> np.ndarray:
        return np.array(self.prompt, np.int32)


class GoldenPage(msgspec.Struct, frozen=True):
    """The beginning of a page. logprobs: of its tokens but the first, as transformers has them."""

    name: str
    tokens: list[int]
    logprobs: list[float]

    @property
    def ids(self) -> np.ndarray:
        return np.array(self.tokens, np.int32)


class Golden(msgspec.Struct, frozen=True):
    answers: list[GoldenAnswer]
    pages: list[GoldenPage]


def read_golden() -> Golden:
    return msgspec.msgpack.decode(zstandard.decompress(GOLDEN.read_bytes()), type=Golden)


def write_golden(golden: Golden) -> None:
    GOLDEN.write_bytes(zstandard.compress(msgspec.msgpack.encode(golden), 19))


def check_answer(golden: GoldenAnswer, answer: Generation, where: str = "") -> float:
    """The largest difference between log-probabilities of the two. Raises GateError. Behind a token that is as good
    as the golden one, the answers cannot be compared."""
    title = f"{golden.name} {where}".strip()
    if answer.finish_reason != "length" or len(answer.tokens) != len(golden.tokens):
        raise GateError(f"{title}: {len(answer.tokens)} tokens, ended by {answer.finish_reason!r}")
    differences = [0.0]
    for i, (token, found) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        if token != golden.tokens[i]:
            if token == golden.second[i] and golden.gaps[i] < MARGIN:
                break
            raise GateError(f"{title}: token {i} is {token}, golden is {golden.tokens[i]}, gap {golden.gaps[i]:.4f}")
        assert found.logprob is not None
        differences.append(abs(found.logprob - golden.logprobs[i]))
    return _within(differences, f"{title}: an answer's log-probability")


def check_logprobs(wanted: Sequence[float], found: Sequence[float], title: str) -> float:
    """The largest difference between log-probabilities of a prompt. Raises GateError."""
    assert len(wanted) == len(found) > 0, f"{title}: {len(found)} log-probabilities, not {len(wanted)}"
    return _within([abs(a - b) for a, b in zip(wanted, found)], f"{title}: a prompt's log-probability")


def _within(differences: Sequence[float], what: str) -> float:
    # NaN is in no range.
    if not all(difference <= TOLERANCE for difference in differences):
        raise GateError(f"{what} is off by up to {np.max(differences):.2g}, more than {TOLERANCE}")
    return max(differences)


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def reference_model(config: ModelConfig) -> Any:
    """transformers' model with the same dequantised weights."""
    from transformers import AutoModelForCausalLM

    from sglang.srt.model_loader.gguf_weights import GGUFWeights

    model = AutoModelForCausalLM.from_config(config.hf_config, dtype=torch.float32)
    with GGUFWeights(config.local_path) as weights:
        state: Mapping[str, torch.Tensor] = {name: weights.get_tensor(name) for name in list(weights.keys())}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def greedy_answer(model: Any, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> GoldenAnswer:
    """transformers' answer, as golden. Nothing ends it."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack([each[0] for each in found.logits])
    top = logits.topk(2)
    tokens = found.sequences[0, len(prompt) :]
    assert len(tokens) == num_tokens and torch.equal(tokens, top.indices[:, 0])
    return GoldenAnswer(
        name="",
        prompt=list(prompt),
        tokens=tokens.tolist(),
        logprobs=logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist(),
        second=top.indices[:, 1].tolist(),
        gaps=(top.values[:, 0] - top.values[:, 1]).tolist(),
    )


def page_logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first."""
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    found: list[float] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    return found
