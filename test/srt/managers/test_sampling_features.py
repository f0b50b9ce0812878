"""Penalties, biases, minimum lengths and log-probabilities through the whole core, against transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.penalties import PenaltyTable
from sglang.srt.sampling.sampling_params import SamplingParams
from support.local_engine import Generation, LocalEngine

VOCAB, EOS = 97, 2


class Model:
    def __init__(self, path: Path) -> None:
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.4,
            eos_token_id=EOS,
        )
        self.hf = AutoModelForCausalLM.from_config(config).eval()
        self.hf.save_pretrained(path)
        self.config = ModelConfig.from_pretrained(str(path))

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.hf(torch.tensor([tokens])).logits[0]

    def greedy(
        self, prompt: list[int], n: int, shape: Callable[[torch.Tensor, list[int]], torch.Tensor]
    ) -> list[int]:
        """The plain way: whole forward passes, logits reshaped by hand. shape: (logits, said so far) -> logits."""
        said: list[int] = []
        for _ in range(n):
            said.append(int(shape(self.logits(prompt + said)[-1].clone(), said).argmax()))
        return said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def params(**changes: object) -> SamplingParams:
    defaults = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True, "sampling_seed": 0}
    return SamplingParams(**{**defaults, **changes})  # type: ignore[arg-type]


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def penalise(
    frequency: float, presence: float, repetition: float
) -> Callable[[torch.Tensor, list[int]], torch.Tensor]:
    def shape(logits: torch.Tensor, said: list[int]) -> torch.Tensor:
        for token in set(said):
            value = float(logits[token])
            value = value / repetition if value > 0 else value * repetition
            logits[token] = value - frequency * said.count(token) - presence
        return logits

    return shape


@pytest.mark.sampled(1)
@pytest.mark.parametrize("penalties", [(0.7, 0.0, 1.0), (0.0, 1.1, 1.0), (0.0, 0.0, 1.4), (0.5, -0.4, 0.8)])
@pytest.mark.parametrize("pages", [2000, 90])
def test_penalties_in_a_batch_and_through_retraction(model: Model, penalties: tuple[float, ...], pages: int) -> None:
    """Neighbours without penalties are not touched, and a request that resumes knows what it has said."""
    engine = LocalEngine(model.config, num_device_pages=pages, new_token_ratio=0.01)
    batch = prompts(1, [12, 7, 15])
    frequency, presence, repetition = penalties
    special = params(frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition)
    answers = engine.generate(batch, [special, params(), special])
    assert (engine.scheduler.counters["retracted_reqs"] > 0) == (pages == 90)
    for prompt, answer, shape in zip(batch, answers, [penalise(*penalties), lambda x, _: x, penalise(*penalties)]):
        assert answer.tokens == model.greedy(prompt, 30, shape)
    engine.close()


def test_no_memory_for_penalties_fails_the_launch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request with a penalty takes it. The stream goes on."""
    start, tries = PenaltyTable.start, []

    def fails_at_first(table: PenaltyTable, slot: int, tokens: torch.Tensor) -> None:
        tries.append(slot)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("no memory for penalties")
        start(table, slot, tokens)

    monkeypatch.setattr(PenaltyTable, "start", fails_at_first)
    engine = LocalEngine(model.config, num_device_pages=500)
    batch = prompts(4, [9, 20])
    answers = engine.generate(batch, [params(frequency_penalty=0.7), params()])
    for prompt, answer, shape in zip(batch, answers, [penalise(0.7, 0.0, 1.0), lambda x, _: x]):
        assert answer.tokens == model.greedy(prompt, 30, shape)
    assert len(tries) == 2
    engine.close()


def test_logit_bias(model: Model) -> None:
    engine = LocalEngine(model.config, num_device_pages=500)
    (prompt,) = prompts(2, [9])
    (plain,) = engine.generate([prompt], params())
    banned = plain.tokens[0]
    (answer,) = engine.generate([prompt], params(logit_bias={banned: -100.0, 50: 2.5}))

    def shape(logits: torch.Tensor, said: list[int]) -> torch.Tensor:
        logits[banned] -= 100
        logits[50] += 2.5
        return logits

    assert banned not in answer.tokens
    assert answer.tokens == model.greedy(prompt, 30, shape)
    engine.close()


def test_min_new_tokens_puts_off_the_end(model: Model) -> None:
    engine = LocalEngine(model.config, num_device_pages=500)
    (prompt,) = prompts(3, [9])
    eager = {EOS: 100.0}
    (short,) = engine.generate([prompt], params(ignore_eos=False, logit_bias=eager))
    assert short.tokens == [EOS] and short.finish_reason == "stop"
    (longer,) = engine.generate([prompt], params(ignore_eos=False, logit_bias=eager, min_new_tokens=7))
    assert len(longer.tokens) == 8 and longer.tokens[-1] == EOS and EOS not in longer.tokens[:-1]
    engine.close()


def test_min_p_cuts_what_is_unlikely(model: Model) -> None:
    """Every drawn token is at least half as likely as the likeliest; without the cut some are not."""
    engine = LocalEngine(model.config, num_device_pages=2000)
    (prompt,) = prompts(4, [9])

    def ratios(min_p: float) -> list[float]:
        each = [params(temperature=1.0, min_p=min_p, sampling_seed=seed, max_new_tokens=12) for seed in range(12)]
        found = []
        for answer in engine.generate([prompt] * 12, each):
            logits = model.logits(prompt + answer.tokens)[len(prompt) - 1 : -1]
            probs = logits.softmax(-1)
            chosen = probs[torch.arange(12), torch.tensor(answer.tokens)]
            found += (chosen / probs.max(-1).values).tolist()
        return found

    assert min(ratios(0.5)) >= 0.5 - 1e-5
    assert min(ratios(0.0)) < 0.3
    engine.close()


def check_logprobs(model: Model, prompt: list[int], answer: Generation, spec: LogprobSpec) -> None:
    whole = prompt + answer.tokens
    expected = model.logits(whole).log_softmax(-1)
    found = {len(prompt) + i: entry for i, entry in enumerate(answer.logprobs)}
    assert len(found) == len(answer.tokens)
    if spec.prompt_from is not None:
        assert len(answer.prompt_logprobs) == len(prompt) - spec.prompt_from
        found |= {spec.prompt_from + i: entry for i, entry in enumerate(answer.prompt_logprobs)}
    else:
        assert answer.prompt_logprobs == []
    for at, entry in found.items():
        assert entry.token == whole[at]
        if at == 0:
            assert entry.logprob is None
            continue
        row = expected[at - 1]
        assert entry.logprob == pytest.approx(float(row[whole[at]]), abs=1e-4)
        assert [v for v, _ in entry.top] == pytest.approx(
            row.topk(spec.top).values.tolist() if spec.top else [], abs=1e-4
        )
        assert all(float(row[t]) == pytest.approx(v, abs=1e-4) for v, t in [*entry.top, *entry.token_ids])
        assert [t for _, t in entry.token_ids] == list(spec.token_ids)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    "spec",
    [
        LogprobSpec(),
        LogprobSpec(top=3),
        LogprobSpec(top=2, token_ids=(5, 9), prompt_from=0),
        LogprobSpec(prompt_from=17),
        LogprobSpec(top=1, prompt_from=1),
    ],
)
def test_logprobs(model: Model, spec: LogprobSpec, page_size: int) -> None:
    """Cold, and with the prompt in the cache; in chunks that do not match pages; beside others that ask for none."""
    engine = LocalEngine(
        model.config, num_device_pages=400 // page_size, page_size=page_size, chunked_prefill_size=12
    )
    batch = prompts(5, [40, 25])
    engine.generate(batch, params(max_new_tokens=3))
    for _ in range(2):
        answers = engine.generate(batch, params(max_new_tokens=9), logprobs=spec)
        for prompt, answer in zip(batch, answers):
            check_logprobs(model, prompt, answer, spec)
    engine.close()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_launch_holds_few_logits_of_prompts(model: Model, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a launch may be: prompts are cut into chunks where their log-probabilities begin."""
    monkeypatch.setattr("sglang.srt.managers.batch_builder.MAX_PROMPT_LOGPROBS", 7)
    engine = LocalEngine(
        model.config, num_device_pages=400 // page_size, page_size=page_size, chunked_prefill_size=120
    )
    launches, issue = [], engine.core.executor.launch
    monkeypatch.setattr(engine.core.executor, "launch", lambda launch: (launches.append(launch), issue(launch)))
    specs = [LogprobSpec(prompt_from=0), LogprobSpec(prompt_from=30), LogprobSpec(), None]
    batch = prompts(7, [40, 52, 8, 9])
    answers = engine.generate(batch, params(max_new_tokens=4), logprobs=specs)
    for prompt, answer, spec in zip(batch, answers, specs):
        if spec is not None:
            check_logprobs(model, prompt, answer, spec)
    rows = [sum(len(each.targets) for each in launch.prompt_logprobs) for launch in launches]
    assert sum(rows) == 39 + 22 and max(rows) <= max(7, page_size)
    # What nobody asked about is not cut.
    assert any(launch.mode == LaunchMode.EXTEND and max(launch.lens) >= 24 for launch in launches)
    engine.close()


def test_logprobs_survive_retraction(model: Model) -> None:
    spec = LogprobSpec(top=1, prompt_from=0)
    engine = LocalEngine(model.config, num_device_pages=100, new_token_ratio=0.01, chunked_prefill_size=8)
    batch = prompts(6, [14] * 5)
    for prompt, answer in zip(batch, engine.generate(batch, params(max_new_tokens=30), logprobs=spec)):
        check_logprobs(model, prompt, answer, spec)
    assert engine.scheduler.counters["retracted_reqs"] > 0
    engine.close()
