"""A real server whose model transformers computes: over HTTP, with host and disk, and started again, on one and on
two ranks. Mixtures of experts also by native code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Gemma2Config,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from sglang.srt.configs.embedded_model import ensure_embedded_model
from support.server_fixture import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--hicache --max-total-tokens 1024 --page-size 16 --hicache-storage-prefetch-policy wait_complete "
    "--hicache-load-or-recompute off --chunked-prefill-size 100 --hicache-storage-backend file"
)
TEXT = "A cache keeps what was computed once, and the next request finds it there. " * 6


def generate(server: Server, text: str) -> dict:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    response = server.post("/generate", {"text": text, "sampling_params": params})
    assert response.status_code == 200, response.text
    return response.json()


EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
SHAPE = dict(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    initializer_range=0.3,
)


LATENT = dict(
    head_dim=16,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
DEEPSEEK = DeepseekV3Config(**SHAPE | LATENT)


def made(model: Path, config: PretrainedConfig) -> Any:
    """A model with weights at random, with the embedded model's tokenizer, in a new folder."""
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(model)
    for file in ensure_embedded_model().glob("tokenizer*"):
        shutil.copy(file, model)
    return theirs


def continued(theirs: Any, text: str) -> list[int]:
    """What transformers generates: 12 tokens."""
    prompt = torch.tensor([AutoTokenizer.from_pretrained(ensure_embedded_model())(text)["input_ids"]])
    with torch.inference_mode():
        mask = torch.ones_like(prompt)
        found = theirs.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    return found[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("config", "num_ranks", "model_impl"),
    [
        (OlmoeConfig(**SHAPE, **EXPERTS), 1, "auto"),
        (OlmoeConfig(**SHAPE, **EXPERTS), 2, "auto"),
        (Qwen3MoeConfig(**SHAPE, **EXPERTS, moe_intermediate_size=32), 2, "auto"),
        (DEEPSEEK, 2, "auto"),
        (DEEPSEEK, 2, "transformers"),
    ],
    ids=["transformers", "transformers on two ranks", "native", "latents", "latents by transformers"],
)
def test_a_mixture_of_experts(tmp_path: Path, config: PretrainedConfig, num_ranks: int, model_impl: str) -> None:
    model = tmp_path / "model"
    want = continued(made(model, config), TEXT)
    extra = json.dumps({"path": str(tmp_path / "store"), "prefetch_threshold": 64, "block_tokens": 64})
    for start in (1, 2):
        flags = [*FLAGS.split(), "--tp-size", str(num_ranks), "--model-impl", model_impl]
        flags += ["--hicache-storage-backend-extra-config", extra]
        with Server(*flags, model=str(model)) as server:
            for turn in range(2):
                reply = generate(server, TEXT)
                assert reply["output_ids"] == want
                hits = reply["meta_info"]["cached_tokens_details"]
                assert (hits["device"] > 64) == (turn == 1)
                assert (hits["disk"] >= 64) == (turn == 0 and start == 2), (turn, start, hits)
            chat = server.post(
                "/v1/chat/completions",
                {"model": str(model), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
            )
            assert chat.status_code == 200 and chat.json()["usage"]["completion_tokens"] <= 4
            assert server.get("/get_server_info").json()["model_impl"] == model_impl
            server.stop()


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [(OlmoeConfig(**SHAPE, **EXPERTS), 1), (Gemma2Config(**SHAPE, sliding_window=100), 2), (DEEPSEEK, 2)],
    ids=["moe", "masked, on two ranks", "latents, on two ranks"],
)
def test_a_prompt_longer_than_the_device(tmp_path: Path, config: PretrainedConfig, num_ranks: int) -> None:
    model = tmp_path / "model"
    theirs = made(model, config)
    text = " ".join(f"{TEXT} Part {part}." for part in range(6))
    flags = (
        "--hicache --max-total-tokens 400 --page-size 16 --hicache-ratio 5 --chunked-prefill-size 64 --layer-stream 2"
    )
    with Server(
        *flags.split(), "--layer-stream-tokens", "64", "--tp-size", str(num_ranks), model=str(model)
    ) as server:
        reply = generate(server, text)
        assert reply["meta_info"]["prompt_tokens"] > 600
        assert reply["output_ids"] == continued(theirs, text)
        assert server.get("/hicache/state").json()["counters"]["streamed_reqs"] == 1


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [
        (Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=64, max_window_layers=1), 1),
        (Gemma2Config(**SHAPE, sliding_window=64), 2),
    ],
    ids=["native", "transformers, on two ranks"],
)
@pytest.mark.parametrize("pools", ["seen", "whole", "two pools"])
def test_loads_leave_out_what_windows_hide(
    tmp_path: Path, config: PretrainedConfig, num_ranks: int, pools: str
) -> None:
    """Two texts that the device has no room for together, continued at their ends and in their middles."""
    model = tmp_path / "model"
    theirs = made(model, config)
    texts = [" ".join(f"{TEXT} {name} {part}." for part in range(4)) for name in ("Part", "Chapter")]
    prompts = [text[: len(text) // share] + " So?" for share in (1, 2) for text in texts]
    want = [continued(theirs, prompt) for prompt in prompts]
    flags = (
        "--hicache --max-total-tokens 1100 --page-size 16 --hicache-ratio 5 --hicache-load-or-recompute off "
        f"--tp-size {num_ranks}"
    )
    more = {
        "seen": "",
        "whole": "--disable-hybrid-swa-memory",
        "two pools": "--swa-full-tokens-ratio 0.1 --chunked-prefill-size 64",
    }
    with Server(*flags.split(), *more[pools].split(), model=str(model)) as server:
        for _ in range(2):
            for prompt, right in zip(prompts, want):
                assert generate(server, prompt)["output_ids"] == right
        state = server.get("/hicache/state").json()
        counters = state["counters"]
        assert counters["hit_tokens_host"] > 400
        assert ("load_full_only_tokens" not in counters) == (pools == "whole"), counters
        assert ("windowed" in state["tiers"]["device"]) == (pools == "two pools")
        assert ("windowed" in state["tiers"]["host"]) == (pools != "whole")
        assert (counters.get("evicted_tokens_windowed", 0) > 0) == (pools == "two pools"), counters


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("MambaForCausalLM", "neither native here nor a causal language model of transformers"),
        ("LlamaForSequenceClassification", "neither native here nor a causal language model of transformers"),
    ],
)
def test_what_is_refused_once_a_process_runs(tmp_path: Path, architecture: str, sentence: str) -> None:
    for file in ensure_embedded_model().iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    with Server("--max-total-tokens", "512", model=str(tmp_path), wait=False) as server:
        assert server.wait() != 0
        assert sentence in server.output() and "Traceback" not in server.output()
