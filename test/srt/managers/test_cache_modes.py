"""Requests that leave nothing in the cache, and those that do not read it either."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from test_storage import PAGE, SETUP, Engine, computed, prompt

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints import native
from sglang.srt.entrypoints.native import GenerateReqInput
from sglang.srt.entrypoints.openai import serving_chat, serving_completions
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.request_fields import RequestError, cache_mode
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.sampling.sampling_params import SamplingParams
from support.tiny_model import tiny_llama

PARAMS = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, sampling_seed=0)
MODES = ("no_store", "bypass")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


def ask(engine: Engine, text: np.ndarray, cache: str = "") -> int:
    """The tokens found, of an answer that is right."""
    (answer,) = engine.generate([text], PARAMS, cache=cache)
    assert answer.tokens == computed(engine.model_config, text)
    engine.assert_nothing_left()
    return sum(answer.cached_tokens_details.values())


def names(engine: Engine, text: np.ndarray) -> set[bytes]:
    keys = engine.scheduler.cache.tree.names.keys
    assert keys is not None
    return set(to_bytes(keys.of_prompt("", text)))


@pytest.mark.parametrize("cache", MODES)
def test_nothing_is_left_in_memory_or_storage(model_config: ModelConfig, cache: str):
    text = prompt(1, 100)
    engine = Engine(model_config)
    for _ in range(2):
        assert ask(engine, text, cache) == 0
    assert engine.scheduler.cache.tree.num_nodes == 0 and not engine.store.blocks
    assert engine.counter("storage_probes") == (2 if cache == "no_store" else 0)
    assert ask(engine, text) == 0 and ask(engine, text) == 99 // PAGE * PAGE
    engine.close()


def test_what_others_left_is_read_or_not(model_config: ModelConfig):
    shared, mine = prompt(2, 64), prompt(3, 36)
    text = np.concatenate([shared, mine])
    engine = Engine(model_config)
    ask(engine, shared)
    before = set(engine.store.blocks)
    assert ask(engine, text, "bypass") == 0
    assert ask(engine, text, "no_store") == 64
    assert set(engine.store.blocks) == before
    assert ask(engine, text) == 64, "none has left more"
    assert names(engine, text) <= set(engine.store.blocks)
    engine.close()
    # Another server finds it in storage.
    engine = Engine(model_config, store=engine.store)
    assert ask(engine, text, "bypass") == 0 and ask(engine, text, "no_store") == 96
    engine.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cache", MODES)
def test_many_at_once_in_little_memory(model_config: ModelConfig, cache: str):
    """Some are retracted, and compute everything anew."""
    texts = [prompt(10 + i, 60 + i) for i in range(6)]
    engine = Engine(model_config, storage=None, num_device_pages=40, new_token_ratio=0.0)
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True, sampling_seed=0)
    wanted = engine.generate(texts, params)
    retracted = engine.counter("retracted_reqs")
    for _ in range(2):
        answers = engine.generate(texts, params, cache=cache)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
    assert engine.counter("retracted_reqs") > retracted > 0
    engine.assert_nothing_left()
    engine.close()


@pytest.mark.parametrize("cache", MODES)
def test_what_is_longer_than_the_device_is_alone(model_config: ModelConfig, cache: str):
    text = prompt(5, 230)
    engine = Engine(
        model_config,
        storage=SETUP,
        num_device_pages=32,
        num_host_pages=120,
        layer_stream=LayerStreamConfig(2, 8),
        chunked_prefill_size=16,
        new_token_ratio=0.0,
    )
    for _ in range(2):
        assert ask(engine, text, cache) == 0
        assert engine.scheduler.cache.tree.num_nodes == 0, "on no tier"
    assert engine.counter("spilled_tokens") > 0
    assert engine.counter("storage_probes") == 0 and not engine.store.blocks
    assert engine.scheduler.cache.tree.match("", text).total_len == 0
    assert ask(engine, text) == 0
    engine.close()


async def render(*args: object) -> str:
    return "a"


def test_the_field_of_each_request():
    chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], cache="no_store")
    manager = SimpleNamespace(render_chat=render, chat_format=ChatFormat(), sampling_defaults={}, token_texts=None)
    requests = [
        *native._generate_requests(GenerateReqInput(text=["a", "b"], cache="no_store"), 10),
        *serving_completions._generate_requests(CompletionRequest(model="m", prompt="a", cache="no_store")),
        asyncio.run(serving_chat.chat_request(chat, manager))[0],  # type: ignore[arg-type]
    ]
    assert [each.cache for each in requests] == ["no_store"] * 4
    for value in (None, ""):
        assert cache_mode(value) == ""
    with pytest.raises(RequestError, match="cache is 'off', but it must be bypass or no_store"):
        native._generate_requests(GenerateReqInput(text="a", cache="off"), 10)
