"""Time to the first token of a warm prompt: recomputed, from the device, from the host, by prompt length.

    python benchmark/bench_ttft.py [--rounds N]

In process, the embedded model, real copies between real pools. In each round the three variants take turns, so that
the ratios hold on a noisy machine.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import print_table, write_json

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.local_engine import LocalEngine

NEW_TOKENS = 16
ONE = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)


def measure(page_size: int, length: int, rounds: int) -> dict[str, object]:
    pages = 4 * (length + 64) // page_size
    engine = LocalEngine(
        ModelConfig.from_pretrained("embedded"),
        num_device_pages=pages,
        num_host_pages=4 * pages,
        page_size=page_size,
        debug=False,
        chunked_prefill_size=2048,
    )
    rng = np.random.default_rng(0)

    def first_token(prompt: np.ndarray, tier: str | None) -> float:
        (answer,) = engine.generate([prompt], ONE)
        engine.settle()
        found = answer.cached_tokens_details
        expected = length // page_size * page_size
        assert tier is None or found[tier] >= expected, f"{found} of {length} found"
        return answer.first_token_s * 1e3

    times: dict[str, list[float]] = {"recompute": [], "device": [], "host": []}
    for i in range(rounds + 1):
        base = rng.integers(3, 2000, length)
        tails = rng.integers(3, 2000, (3, NEW_TOKENS))
        sample = {"recompute": first_token(np.concatenate([base, tails[0]]), None)}
        sample["device"] = first_token(np.concatenate([base, tails[1]]), "device")
        engine.scheduler.controller.evict(Tier.DEVICE, pages, engine.scheduler.exec_done)
        sample["host"] = first_token(np.concatenate([base, tails[2]]), "host")
        if i:  # the first round warms up
            for name, value in sample.items():
                times[name].append(value)
    engine.close()
    recompute, device, host = (np.array(times[name]) for name in ("recompute", "device", "host"))
    return {
        "prompt tokens": length,
        "page size": page_size,
        "recompute ms": float(np.median(recompute)),
        "device hit ms": float(np.median(device)),
        "host hit ms": float(np.median(host)),
        "recompute / host": float(np.median(recompute / host)),
        "host / device": float(np.median(host / device)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = [measure(page, length, args.rounds) for page in (1, 16) for length in (256, 1024, 4096, 16384)]
    print_table("Time to first token, medians, 16 new tokens", rows)
    write_json("ttft", {"rounds": args.rounds, "new_tokens": NEW_TOKENS, "model": "embedded, float32"}, rows)


if __name__ == "__main__":
    main()
