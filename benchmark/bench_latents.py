"""What is gained where latent attention caches latents, and what it costs to compute with them.

    python benchmark/bench_latents.py [--rounds N] [--prefix TOKENS] [--layers N]

In process, a model with random weights whose attention has the shape of DeepSeek-V2-Lite's (16 heads, latents of 512,
rotated keys of 64), real copies. In each round three engines take turns, so that the ratios hold on a noisy machine:
transformers with a key and a value of each head in the cache, transformers with latents, and the native model.

`known` is a prompt of so many tokens that were asked before and a few new ones; `memory`: what is found where the
device has the same bytes, and documents are asked in turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import print_table, write_json

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.local_engine import LocalEngine

NEW_TOKENS, SOME_TOKENS, NUM_DOCUMENTS = 48, 32, 5
SLOW_LINK = 0.5e9
CHUNKS = {"chunked_prefill_size": 512}
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
PER_HEAD, LATENTS, NATIVE = "per head", "latents", "latents, native"


def models(folder: str) -> dict[str, ModelConfig]:
    theirs = ModelConfig.from_pretrained(folder, model_impl="transformers")
    latent = theirs.latent
    assert latent is not None, "this version of transformers hands no latents out"
    per_head = replace(
        theirs, latent=None, num_kv_heads=theirs.num_heads, head_dim=latent.key_dim + latent.rotary_dim
    )
    return {PER_HEAD: per_head, LATENTS: theirs, NATIVE: ModelConfig.from_pretrained(folder)}


class Rig:
    def __init__(self, model: ModelConfig, num_pages: int, **options: Any) -> None:
        self.engine = LocalEngine(
            model,
            num_device_pages=num_pages,
            debug=False,
            load_format="dummy",
            write_policy="write_through",
            **CHUNKS,
            **options,
        )
        self.page_bytes = self.engine.scheduler.config.page_bytes

    def ask(self, *prompts: np.ndarray, num_tokens: int = 1) -> list[Any]:
        answers = self.engine.generate(
            list(prompts), SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        )
        self.engine.settle()
        return answers

    def first_token_s(self, prompt: np.ndarray) -> float:
        return float(self.ask(prompt)[0].first_token_s)

    def decode_step_s(self, *prompts: np.ndarray) -> float:
        """Of prompts that are known."""
        times: list[float] = []
        for num_tokens in (1, SOME_TOKENS + 1):
            began = self.engine.clock()
            self.ask(*prompts, num_tokens=num_tokens)
            times.append(self.engine.clock() - began)
        return (times[1] - times[0]) / SOME_TOKENS

    def evict(self) -> None:
        cache = self.engine.scheduler.cache
        cache.controller.evict(Tier.DEVICE, cache.device.num_pages)


def tokens(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 512, num_tokens, dtype=np.int32)


def measure(configs: dict[str, ModelConfig], prefix: int, rounds: int) -> list[dict[str, object]]:
    room = 5 * (prefix + NEW_TOKENS + SOME_TOKENS)
    rigs = {name: Rig(model, room, num_host_pages=2 * room) for name, model in configs.items()}
    slow = {
        name: Rig(model, room, num_host_pages=2 * room, load_bytes_per_s=SLOW_LINK) for name, model in configs.items()
    }
    document = tokens(0, prefix)
    for rig in (*rigs.values(), *slow.values()):
        rig.ask(document)

    def known(rig: Rig, seed: int, is_evicted: bool = False) -> float:
        if is_evicted:
            rig.evict()
        return rig.first_token_s(np.concatenate((document, tokens(seed, NEW_TOKENS))))

    cases: dict[str, Callable[[str, int], float]] = {
        f"{prefix} new tokens, first token": lambda name, number: rigs[name].first_token_s(tokens(number, prefix)),
        "known, on the device, first token": lambda name, number: known(rigs[name], 1000 + number),
        "known, on the host, first token": lambda name, number: known(rigs[name], 3000 + number, True),
        "known, host at 0.5 GB/s, first token": lambda name, number: known(slow[name], 3000 + number, True),
        "decode step of 1": lambda name, number: rigs[name].decode_step_s(document),
        "decode step of 4, the same document": lambda name, number: rigs[name].decode_step_s(
            *(np.concatenate((document, tokens(2000 + i, 1))) for i in range(4))
        ),
    }
    rows: list[dict[str, object]] = []
    for what, run in cases.items():
        samples = {name: [] for name in configs}
        for number in range(1, rounds + 1):
            for name in configs:
                samples[name].append(run(name, number))
        rows.append(_row(what, samples, rounds))
    return rows


def measure_memory(configs: dict[str, ModelConfig], prefix: int) -> dict[str, object]:
    """The device has room for one document and a half of the largest pages. There is no host."""
    probes = {name: Rig(model, 16).page_bytes for name, model in configs.items()}
    num_bytes = max(probes.values()) * (prefix + NEW_TOKENS) * 3 // 2
    row: dict[str, object] = {"what": "memory: found of the prompts"}
    for name, model in configs.items():
        rig, found = Rig(model, num_bytes // probes[name]), 0
        for turn in range(2):
            for place in range(NUM_DOCUMENTS):
                (answer,) = rig.ask(np.concatenate((tokens(place, prefix), tokens(10 * turn + place, NEW_TOKENS))))
                found += turn * sum(answer.cached_tokens_details.values())
        row[name] = found / (NUM_DOCUMENTS * (prefix + NEW_TOKENS))
    return row


def _row(what: str, samples: dict[str, list[float]], rounds: int) -> dict[str, object]:
    row: dict[str, object] = {"what": what, f"{PER_HEAD}, s": float(np.median(samples[PER_HEAD]))}
    for name in (LATENTS, NATIVE):
        row[f"{name}, ratio"] = float(np.median([a / b for a, b in zip(samples[name], samples[PER_HEAD])]))
    return {**row, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = {"num_hidden_layers": args.layers, "first_k_dense_replace": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | shape))
        configs = models(folder)
        rows = measure(configs, args.prefix, args.rounds)
        memory = measure_memory(configs, args.prefix)
        sizes = {name: Rig(model, 16).page_bytes for name, model in configs.items()}
    print_table("Latents; a cache of keys and values per head is 1", rows)
    print_table("The same bytes of the device, documents asked again in turn", [memory])
    print_table("Bytes of a token", [sizes])
    write_json("latents", {**vars(args), "model": "random, float32"}, [*rows, memory, {"what": "bytes", **sizes}])


if __name__ == "__main__":
    main()
