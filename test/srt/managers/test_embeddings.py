"""Embeddings are transformers' last hidden states, however the prompt's KV came about."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_equality import MODELS, Model, prompts

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import SamplingParams
from support.device_emulator import emulated_device
from support.local_engine import LocalEngine
from support.two_ranks import TwoRanks

NO_ANSWER = SamplingParams(max_new_tokens=0, temperature=0.0, sampling_seed=0)


@pytest.fixture(scope="module", params=["llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(MODELS[request.param], str(tmp_path_factory.mktemp(request.param)))


def check(model: Model, engine: LocalEngine, batch: list[np.ndarray]) -> dict[str, int]:
    """Returns the cached tokens by tier."""
    cached: dict[str, int] = {}
    for prompt, answer in zip(batch, engine.generate(batch, NO_ANSWER, is_embedding=True)):
        with torch.inference_mode():
            wanted = model.hf.base_model(torch.tensor(prompt)[None].long()).last_hidden_state[0, -1]
        wanted = torch.nn.functional.normalize(wanted, dim=-1)
        found = torch.from_numpy(np.frombuffer(answer.embedding, np.float32).copy())
        assert torch.allclose(found, wanted, atol=1e-4)
        for tier, number in answer.cached_tokens_details.items():
            cached[tier] = cached.get(tier, 0) + number
    engine.settle()
    return cached


def test_computed_in_chunks_found_on_the_device_and_loaded_from_the_host(model: Model):
    engine = model.engine(num_device_pages=150, num_host_pages=600, chunked_prefill_size=32)
    batch = prompts(31, [100, 7, 1])
    assert sum(check(model, engine, batch).values()) == 0
    assert check(model, engine, batch)["device"] > 0
    check(model, engine, prompts(32, [140]))
    assert check(model, engine, batch)["host"] > 0
    engine.close()


def test_beside_answers_with_tokens(model: Model):
    engine = model.engine()
    (prompt,) = prompts(33, [40])
    (answer,) = engine.generate([prompt], SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
    model.check(prompt, answer, 8)
    assert answer.embedding == b""
    check(model, engine, [prompt])
    engine.close()


def test_on_a_device_the_host_waits_for_nothing(tmp_path_factory: pytest.TempPathFactory):
    llama = Model(MODELS["llama"], str(tmp_path_factory.mktemp("llama")))
    with emulated_device(6) as device:
        engine = llama.engine(device="cuda", debug=False, chunked_prefill_size=32)
        device.syncs.clear()
        check(llama, engine, prompts(34, [50, 7, 40]))
        engine.close()
        assert not device.syncs


def test_two_ranks_and_a_prompt_that_streams(tmp_path_factory: pytest.TempPathFactory):
    llama = Model(MODELS["llama"], str(tmp_path_factory.mktemp("llama")))
    engine = TwoRanks(llama.config, (0.0, 0.0), num_device_pages=200)
    check(llama, engine, prompts(34, [60, 30]))
    engine.close()
    streaming = llama.engine(
        page_size=4,
        num_device_pages=16,
        num_host_pages=120,
        layer_stream=LayerStreamConfig(2, 5),
        chunked_prefill_size=16,
        new_token_ratio=0.0,
    )
    check(llama, streaming, prompts(35, [200]))
    assert streaming.scheduler.state()["counters"]["spilled_tokens"] > 100
    streaming.close()


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        # As long as the context, which is as long as what the device takes of one request, or shorter.
        ({"context_length": 60, "page_size": 4, "num_device_pages": 16}, 60),
        ({"context_length": 61, "page_size": 4, "num_device_pages": 40}, 61),
        ({"context_length": 60, "page_size": 1, "num_device_pages": 61}, 60),
        # As long as what the device takes of one request.
        ({"page_size": 4, "num_device_pages": 16}, 60),
        ({"page_size": 1, "num_device_pages": 61}, 60),
    ],
)
@pytest.mark.parametrize("insert_at", ["launch", "completion"])
def test_a_prompt_without_an_answer_may_take_all_the_room(
    options: dict[str, int], limit: int, insert_at: str, tmp_path_factory: pytest.TempPathFactory
):
    llama = Model(MODELS["llama"], str(tmp_path_factory.mktemp("llama")))
    options = dict(options)
    if (context := options.pop("context_length", None)) is not None:
        llama.config = ModelConfig.from_pretrained(llama.config.model_path, dtype="float32", context_length=context)
    engine = llama.engine(**options, num_host_pages=200, chunked_prefill_size=16, insert_at=insert_at)
    scheduler = engine.scheduler
    assert (scheduler.accepted_len, scheduler.max_unanswered_len) == (limit, limit)
    whole, other, short, too_long = prompts(36, [limit, limit, 20, limit + 1])
    # Beside answers, which lose their memory to it and it to them, and again from the cache.
    for _ in range(2):
        check(llama, engine, [whole, other])
        params = [NO_ANSWER, SamplingParams(max_new_tokens=limit - 20, temperature=0.0, ignore_eos=True), NO_ANSWER]
        spec = LogprobSpec(prompt_from=0)
        scored, answered, _ = engine.generate([whole, short, other], params, logprobs=[spec, None, None])
        llama.check(short, answered, limit - 20)
        assert (scored.finish_reason, len(scored.tokens), len(scored.prompt_logprobs)) == ("length", 0, limit)
        with torch.inference_mode():
            rows = llama.hf(torch.tensor(whole)[None].long()).logits[0].log_softmax(-1)
        found = torch.tensor([entry.logprob for entry in scored.prompt_logprobs[1:]])
        assert torch.allclose(found, rows[range(limit - 1), whole[1:]], atol=1e-4)
    for prompt, params in ((whole, SamplingParams(max_new_tokens=1)), (too_long, NO_ANSWER)):
        (refused,) = engine.generate([prompt], params)
        assert refused.finish_reason == "abort"
    engine.close()


def test_a_prompt_that_streams_may_not_take_all_the_room(tmp_path_factory: pytest.TempPathFactory):
    llama = Model(MODELS["llama"], str(tmp_path_factory.mktemp("llama")))
    engine = llama.engine(
        page_size=4,
        num_device_pages=16,
        num_host_pages=60,
        layer_stream=LayerStreamConfig(2, 5),
        chunked_prefill_size=16,
        new_token_ratio=0.0,
    )
    limit = engine.scheduler.max_unanswered_len
    assert limit == engine.scheduler.accepted_len - 1
    whole, too_long = prompts(37, [limit, limit + 1])
    check(llama, engine, [whole])
    (refused,) = engine.generate([too_long], NO_ANSWER)
    assert refused.finish_reason == "abort"
    engine.close()
