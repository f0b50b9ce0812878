"""Embeddings are transformers' last hidden states, however the prompt's KV came about."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_equality import MODELS, Model, prompts

from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from support.device_emulator import emulated_device
from support.local_engine import LocalEngine
from support.two_ranks import TwoRanks

ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, sampling_seed=0)


@pytest.fixture(scope="module", params=["llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(MODELS[request.param], str(tmp_path_factory.mktemp(request.param)))


def check(model: Model, engine: LocalEngine, batch: list[np.ndarray]) -> dict[str, int]:
    """Returns the cached tokens by tier."""
    cached: dict[str, int] = {}
    for prompt, answer in zip(batch, engine.generate(batch, ONE_TOKEN, is_embedding=True)):
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
