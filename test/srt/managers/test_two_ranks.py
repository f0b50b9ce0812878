"""Two ranks in this process, each with its part of a real model: what fails on one of them alone disturbs neither.

The ranks' streams are threads that meet in every collective. A rank that skipped one, or took part in another, would
break the meeting: it has a time limit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.sampling.sampling_params import SamplingParams
from support.two_ranks import TwoRanks

MARGIN = 1e-4
VOCAB = 211
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=60,
    intermediate_size=100,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=14,
    max_position_embeddings=512,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    model.path = str(tmp_path_factory.mktemp("llama"))
    model.save_pretrained(model.path)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize(
    "fail_rates",
    [(0.0, 0.5), (0.5, 0.0), pytest.param((0.4, 0.4), marks=pytest.mark.slow)],
    ids=["rank 1", "rank 0", "both"],
)
def test_loads_that_fail_on_one_rank(hf, fail_rates, model_impl):
    engine = TwoRanks(
        ModelConfig.from_pretrained(hf.path, dtype="float32", model_impl=model_impl),
        fail_rates,
        num_device_pages=230,
        num_host_pages=900,
        late_rate=0.2,
        seed=4,
        chunked_prefill_size=48,
    )
    rng = np.random.default_rng(8)
    shared = rng.integers(3, VOCAB, 20)
    batch = [np.concatenate([shared, rng.integers(3, VOCAB, n)]).astype(np.int32) for n in (80, 60, 70)]
    params = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True, sampling_seed=0)
    host = 0
    for _ in range(6):
        for pair in (batch[:2], batch[1:], batch[::2]):
            for prompt, answer in zip(pair, engine.generate(pair, params)):
                assert answer.finish_reason == "length" and len(answer.tokens) == 5
                host += answer.cached_tokens_details["host"]
                with torch.inference_mode():
                    whole = torch.tensor(np.concatenate([prompt, answer.tokens]))[None].long()
                    logits = hf(whole).logits[0, len(prompt) - 1 : -1]
                gap = logits.max(-1).values - logits[torch.arange(5), torch.tensor(answer.tokens)]
                assert gap.max() < MARGIN
    engine.settle()
    for rank in (engine, engine.other):
        counters = rank.scheduler.state()["counters"]
        assert counters["failed_ops"] > 0 and counters["failed_launches"] > 0, "nothing failed"
        for table in rank.scheduler.cache.tables.values():
            assert table.counts[FrameState.FREE] + table.counts[FrameState.CACHED] == table.num_pages
    assert host > 0, "nothing came from the host"
    engine.close()
