"""Answers with a grammar through the whole core: each token is the likeliest that some text of the grammar has next,
by transformers' logits, however the request was scheduled.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from support.device_emulator import emulated_device
from support.grammars import EOS, TEXTS, VOCAB_SIZE, Language, write_vocabulary
from support.local_engine import Generation, LocalEngine
from support.tiny_model import tiny_llama
from support.two_ranks import TwoRanks

pytest.importorskip("xgrammar")

MARGIN = 1e-4


class Model:
    def __init__(self, path: Path) -> None:
        self.config = tiny_llama(path, eos_token_id=EOS)
        assert self.config.vocab_size == VOCAB_SIZE
        self.hf = AutoModelForCausalLM.from_pretrained(path).eval()
        self.vocabulary_file = write_vocabulary(path / "vocabulary.json")

    def engine(self, kind: type[LocalEngine] = LocalEngine, *args: object, **options: object) -> LocalEngine:
        options = {"num_device_pages": 600, "vocabulary_file": self.vocabulary_file, **options}
        return kind(self.config, *args, **options)  # type: ignore[arg-type]

    def check(self, prompt: np.ndarray, answer: Generation, language: Language) -> None:
        assert answer.finish_reason == "stop" and answer.tokens[-1] == EOS
        whole = torch.tensor(np.concatenate([prompt, answer.tokens]))[None].long()
        with torch.inference_mode():
            logits = self.hf(whole).logits[0, len(prompt) - 1 : -1]
        for at, token in enumerate(answer.tokens):
            shaped = language.shape(logits[at], answer.tokens[:at])
            assert shaped.max() - shaped[token] < MARGIN, f"token {at} of {answer.tokens}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def language(seed: int, length: int = 24) -> Language:
    """Texts that share their fronts, so that a choice lies behind many tokens."""
    rng = random.Random(seed)
    fronts = ["".join(rng.choices("abc xyz", k=length // 3)) for _ in range(3)]
    return Language.of(
        *(front + "".join(rng.choices("abc123", k=rng.randrange(length))) for front in fronts for _ in range(4))
    )


def params(of: Language | None, **changes: object) -> SamplingParams:
    defaults = {"max_new_tokens": 60, "temperature": 0.0, "sampling_seed": 0, "grammar": of and of.grammar}
    return SamplingParams(**{**defaults, **changes})  # type: ignore[arg-type]


def prompts(seed: int, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, n).astype(np.int32) for n in lengths]


LANGUAGES = [language(seed) for seed in range(5)]


def generate_and_check(model: Model, engine: LocalEngine, seed: int, lengths: list[int]) -> None:
    """Requests with grammars beside one without."""
    batch = prompts(seed, [*lengths, 20])
    mine = [LANGUAGES[at % len(LANGUAGES)] for at in range(len(lengths))]
    free = params(None, max_new_tokens=12, ignore_eos=True)
    answers = engine.generate(batch, [*map(params, mine), free])
    for prompt, answer, each in zip(batch, answers, mine):
        model.check(prompt, answer, each)
    assert answers[-1].finish_reason == "length" and len(answers[-1].tokens) == 12
    engine.settle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_several_requests_and_one_without_grammar(model: Model, page_size: int):
    engine = model.engine(page_size=page_size, num_device_pages=640 // page_size)
    for seed in range(2):
        generate_and_check(model, engine, seed, [30, 7, 50, 11, 40])
    engine.close()


def test_retracted_requests_go_on_where_they_were(model: Model):
    engine = model.engine(num_device_pages=130, num_host_pages=400, new_token_ratio=0.0)
    generate_and_check(model, engine, 3, [30, 25, 28, 20])
    assert engine.scheduler.state()["counters"]["retracted_reqs"] > 0, "nothing was retracted"
    engine.close()


def test_loads_that_fail_and_start_requests_again(model: Model):
    engine = model.engine(num_device_pages=150, num_host_pages=500, load_fail_rate=0.5, seed=3)
    for _ in range(2):
        for seed in (4, 5, 4):
            generate_and_check(model, engine, seed, [60, 50])
    assert engine.scheduler.state()["counters"]["failed_ops"] > 0, "nothing failed"
    engine.close()


@pytest.mark.slow
def test_two_ranks_with_loads_that_fail_on_one(model: Model):
    engine = model.engine(
        TwoRanks, (0.0, 0.5), num_device_pages=150, num_host_pages=500, late_rate=0.2, chunked_prefill_size=48
    )
    for seed in (4, 5, 4):
        generate_and_check(model, engine, seed, [60, 50])
    for rank in (engine, engine.other):  # type: ignore[attr-defined]
        assert rank.scheduler.state()["counters"]["failed_launches"] > 0, "nothing failed"
    engine.close()


def test_a_request_that_streams_layers(model: Model):
    engine = model.engine(
        page_size=4,
        num_device_pages=16,
        num_host_pages=120,
        layer_stream=LayerStreamConfig(2, 5),
        chunked_prefill_size=16,
        new_token_ratio=0.0,
    )
    (prompt,) = prompts(8, [200])
    (answer,) = engine.generate([prompt], params(LANGUAGES[0]))
    model.check(prompt, answer, LANGUAGES[0])
    assert engine.scheduler.state()["counters"]["spilled_tokens"] > 100
    engine.close()


def test_no_other_parameter_leaves_the_grammar(model: Model):
    """Drawn tokens, penalties and biases: what the grammar does not allow stays impossible. Log-probabilities are the
    model's own."""
    engine = model.engine()
    batch = prompts(9, [20] * 6)
    each = LANGUAGES[1]
    changes: list[dict[str, object]] = [
        {"temperature": 5.0, "sampling_seed": 1},
        {"temperature": 5.0, "sampling_seed": 2, "top_k": 3},
        {"temperature": 2.0, "sampling_seed": 3, "top_p": 0.3, "min_p": 0.1},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"logit_bias": {5: 100.0, TEXTS.index("q"): 100.0, EOS: 100.0}},
        {"ignore_eos": True},
    ]
    answers = engine.generate(batch, [params(each, **change) for change in changes], logprobs=LogprobSpec(top=1))
    for prompt, answer in zip(batch, answers):
        assert answer.finish_reason == "stop" and answer.tokens[-1] == EOS
        for at, token in enumerate(answer.tokens):
            assert token in each.allowed(answer.tokens[:at])
        with torch.inference_mode():
            logits = model.hf(torch.tensor(np.concatenate([prompt, answer.tokens]))[None].long()).logits[0]
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found = torch.tensor([entry.logprob for entry in answer.logprobs])
        assert torch.allclose(found, wanted[torch.arange(len(found)), torch.tensor(answer.tokens)], atol=1e-4)
    engine.close()


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(model: Model):
    engine = model.engine()
    batch = prompts(10, [20, 30])
    dead_end = params(None, grammar=GrammarSpec("ebnf", 'root ::= "abc" "ü"'))
    ended, answer = engine.generate(batch, [dead_end, params(LANGUAGES[2])])
    assert ended.finish_reason == "abort" and 0 < len(ended.tokens) <= 3
    model.check(batch[1], answer, LANGUAGES[2])
    engine.settle()
    engine.close()


def test_an_abort_in_the_middle_leaves_the_slot_to_others(model: Model):
    engine = model.engine(max_running_requests=2)
    batch = prompts(11, [20, 30, 25, 15])
    mine = [LANGUAGES[at] for at in (0, 1, 2, 3)]
    answers = engine.generate(batch, [*map(params, mine)], abort_after={0: 3})
    assert answers[0].finish_reason == "abort"
    for prompt, answer, each in list(zip(batch, answers, mine))[1:]:
        model.check(prompt, answer, each)
    engine.close()


def test_on_a_device_the_host_waits_for_drawn_tokens_alone(model: Model):
    """One request with a grammar beside a free one, then requests with grammars only."""
    batch, of = prompts(41, [30, 50, 20]), [language(41, 6), None, language(42, 6)]
    with emulated_device(5) as device:
        engine = model.engine(device="cuda", debug=False, chunked_prefill_size=32)
        device.syncs.clear()
        found = engine.generate(batch, [params(each, max_new_tokens=12) for each in of])
        found += engine.generate([batch[0], batch[2]], [params(of[0]), params(of[2])])
        engine.close()
        assert not device.syncs
    for at, answer in zip((0, 2, 0, 2), [found[0], *found[2:]]):
        grammar = of[at]
        assert grammar is not None
        model.check(batch[at], answer, grammar)
    engine = model.engine(chunked_prefill_size=32)
    assert found[1].tokens == engine.generate([batch[1]], params(None, max_new_tokens=12))[0].tokens
    engine.close()
