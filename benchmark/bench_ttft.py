"""Time to the first token of a warm prompt: recomputed, from the device, the host and the disk, by prompt length. And
from the host over a slow link, with native code and with transformers'.

    python benchmark/bench_ttft.py [--rounds N] [--folder DIR]

In process, the embedded model, real copies between real pools, files in a temporary folder. In each round the four
variants take turns, so that the ratios hold on a noisy machine. The data that is read from disk has just been
written: the store's reads and writes are real, but the system may have the data in memory.

The slow link takes a given share of the time that the same prompt computes for when the device has its prefix. With
loads that overlap layer by layer, the first token then comes after little more than the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import numpy as np
import torch
from common import print_table, write_json
from transformers import LlamaConfig

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.mem_cache.transfer import StorageAction, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.local_engine import LocalEngine

NEW_TOKENS = 16
ONE = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)
# Of the slow link.
PREFIX, SUFFIX, LAYERS = 2048, 512, 12


def measure(page_size: int, length: int, rounds: int, folder: str) -> dict[str, object]:
    pages = 4 * (length + 64) // page_size
    engine = LocalEngine(
        ModelConfig.from_pretrained("embedded"),
        num_device_pages=pages,
        num_host_pages=4 * pages,
        page_size=page_size,
        debug=False,
        chunked_prefill_size=2048,
        open_store=lambda pool: opener.open(setup.setup),
    )
    assert engine.host_pool is not None
    opener = StorageOpener(lambda: f"bench {page_size} {length}", "embedded", engine.host_pool, 0, 1)
    setup = opener.setup("file", json.dumps({"path": folder}), "wait_complete", "write_through")
    engine.administer(StorageAction.ATTACH, setup)
    rng = np.random.default_rng(0)

    def first_token(prompt: np.ndarray, tier: str | None) -> float:
        (answer,) = engine.generate([prompt], ONE)
        engine.settle()
        found = answer.cached_tokens_details
        expected = length // 64 * 64
        assert tier is None or found[tier] >= expected, f"{found} of {length} found"
        return answer.first_token_s * 1e3

    times: dict[str, list[float]] = {"recompute": [], "device": [], "host": [], "disk": []}
    for i in range(rounds + 1):
        base = rng.integers(3, 2000, length)
        tails = rng.integers(3, 2000, (4, NEW_TOKENS))
        sample = {"recompute": first_token(np.concatenate([base, tails[0]]), None)}
        sample["device"] = first_token(np.concatenate([base, tails[1]]), "device")
        engine.scheduler.cache.controller.evict(Tier.DEVICE, pages)
        sample["host"] = first_token(np.concatenate([base, tails[2]]), "host")
        engine.forget()
        sample["disk"] = first_token(np.concatenate([base, tails[3]]), "disk")
        engine.forget()
        if i:  # the first round warms up
            for name, value in sample.items():
                times[name].append(value)
    engine.close()
    recompute, device, host, disk = (np.array(times[name]) for name in ("recompute", "device", "host", "disk"))
    return {
        "prompt tokens": length,
        "page size": page_size,
        "recompute ms": float(np.median(recompute)),
        "device hit ms": float(np.median(device)),
        "host hit ms": float(np.median(host)),
        "disk hit ms": float(np.median(disk)),
        "recompute / host": float(np.median(recompute / host)),
        "recompute / disk": float(np.median(recompute / disk)),
        "host / device": float(np.median(host / device)),
        "disk / host": float(np.median(disk / host)),
    }


def measure_slow_link(impl: str, shares: tuple[float, ...], rounds: int) -> list[dict[str, object]]:
    """impl: whose code computes, as --model-impl. shares: of a load, in the time that the suffix computes."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = ModelConfig.from_pretrained(folder, "float32", model_impl=impl)
    rng = np.random.default_rng(0)

    def medians(load_bytes_per_s: float | None, tier: str) -> float:
        pages = 3 * (PREFIX + SUFFIX) // 16
        engine = LocalEngine(
            model,
            num_device_pages=pages,
            num_host_pages=4 * pages,
            page_size=16,
            debug=False,
            chunked_prefill_size=2048,
            load_format="dummy",
            load_bytes_per_s=load_bytes_per_s,
        )
        times = []
        for _ in range(rounds + 1):
            prefix = rng.integers(3, 2000, PREFIX)
            engine.generate([prefix], ONE)
            engine.settle()
            if tier == "host":
                engine.scheduler.cache.controller.evict(Tier.DEVICE, pages)
            (answer,) = engine.generate([np.concatenate([prefix, rng.integers(3, 2000, SUFFIX)])], ONE)
            assert answer.cached_tokens_details[tier] >= PREFIX - 16, answer.cached_tokens_details
            times.append(answer.first_token_s)
            engine.forget()
        engine.close()
        return float(np.median(times[1:]))

    loaded_bytes = 2 * LAYERS * PREFIX * config.num_key_value_heads * config.head_dim * torch.float32.itemsize
    computed_s = medians(None, "device")
    rows: list[dict[str, object]] = []
    for share in shares:
        load_s = share * computed_s
        first_s = medians(loaded_bytes / load_s, "host")
        rows.append(
            {
                "code": impl,
                "load / computation": share,
                "computation ms": computed_s * 1e3,
                "load ms": load_s * 1e3,
                "first token ms": first_s * 1e3,
                "first token / computation": first_s / computed_s,
                "first token / longer": first_s / max(computed_s, load_s),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="where the files go (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        shapes = [(page, length) for page in (1, 16) for length in (256, 1024, 4096, 16384)]
        rows = [measure(page, length, args.rounds, folder) for page, length in shapes]
        slow = []
        for impl in ("native", "transformers"):
            slow += measure_slow_link(impl, (0.5, 1.0, 2.0), args.rounds)
    print_table("Time to first token, medians, 16 new tokens", rows)
    print_table(f"Over a slow link: {SUFFIX} new tokens behind {PREFIX}, {LAYERS} layers, medians", slow)
    write_json("ttft", {"rounds": args.rounds, "new_tokens": NEW_TOKENS, "model": "embedded, float32"}, rows)
    write_json("ttft_slow_link", {"rounds": args.rounds, "model": "Llama at random, float32"}, slow)


if __name__ == "__main__":
    main()
