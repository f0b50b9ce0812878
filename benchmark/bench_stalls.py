"""The benefit of the scheduler's mechanisms on a real engine whose link to the host is slow: stalls, first tokens.

    python benchmark/bench_stalls.py [--rounds N] [--slowdown 4]

In process, the embedded model, real copies over a link that is held to a rate. Questions about documents are all
asked at once. The device holds a third of the documents. The host has all of them (warm) or none yet (cold). The rate
is chosen so that loading a document takes `slowdown` times as long as answering one question from the device, as
measured at the start. In each round the settings take turns, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from common import print_table, write_json

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.local_engine import LocalEngine

NUM_DOCUMENTS, DOCUMENT_TOKENS = 12, 1024
NUM_QUESTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 72, 24, 8
DEVICE_TOKENS = NUM_DOCUMENTS // 3 * DOCUMENT_TOKENS + 24 * (QUESTION_TOKENS + ANSWER_TOKENS)
ASKED = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, sampling_seed=0)

# As upstream's cache: first come, first served, shared once complete.
NOTHING: dict[str, Any] = {
    "insert_at": "completion",
    "deferral_threshold": 0,
    "load_ratio": 0.0,
    "bubble_filling": False,
    "load_or_recompute": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": NOTHING,
    "deferral": {**NOTHING, "deferral_threshold": 100},
    "balance": {**NOTHING, "load_ratio": 100.0},
    "bubbles": {**NOTHING, "bubble_filling": True},
    "recompute": {**NOTHING, "insert_at": "launch", "load_or_recompute": True},
    "Strata": {**NOTHING, "deferral_threshold": 100, "load_ratio": 100.0, "bubble_filling": True},
    "all": {"load_or_recompute": True},
}


class Rig:
    """An engine whose device has no document at the start of a run."""

    def __init__(self, load_bytes_per_s: float | None, settings: dict[str, Any]) -> None:
        self.engine = LocalEngine(
            ModelConfig.from_pretrained("embedded"),
            num_device_pages=DEVICE_TOKENS,
            num_host_pages=4 * NUM_DOCUMENTS * DOCUMENT_TOKENS,
            debug=False,
            load_bytes_per_s=load_bytes_per_s,
            **settings,
        )

    def prepare(self, on_host: list[np.ndarray]) -> None:
        """Empty the device, and keep only these on the host."""
        self.engine.forget()
        one = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)
        for document in on_host:
            self.engine.generate([document], one)
            self.engine.settle()
        scheduler = self.engine.scheduler
        scheduler.cache.controller.evict(Tier.DEVICE, scheduler.cache.device.num_pages)

    def ask(self, prompts: list[np.ndarray]) -> tuple[dict[str, float], list[list[int]]]:
        """Ask all at once. Returns seconds and counts, and the answers."""
        scheduler = self.engine.scheduler
        stall_s, before = scheduler.planner.stall_s, scheduler.counters
        answers = self.engine.generate(prompts, ASKED)
        did = scheduler.counters
        did.subtract(before)
        return {
            "stall s": scheduler.planner.stall_s - stall_s,
            "first token s": float(np.mean([a.first_token_s for a in answers])),
            "all s": max(a.end_s for a in answers),
            "loaded": float(did["load_back_tokens"]),
            "computed": float(did["prefill_tokens"]),
        }, [a.tokens for a in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slowdown", type=float, default=4.0)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    documents = [rng.integers(3, 2000, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    rate = bytes_per_s(documents, args.slowdown)
    print(f"loads at {rate / 1e9:.3f} GB/s")
    rigs = {name: Rig(rate, settings) for name, settings in SETTINGS.items()}
    rows = []
    for state, on_host in (("warm", documents), ("cold", [])):
        rows += (table := compare(rigs, documents, on_host, args.rounds, rng, state))
        columns = ("setting", "stall s", "stall s / nothing", "first token s", "first token s / nothing", "all s")
        columns += ("all s / nothing", "loaded", "computed", "answers that differ")
        print_table(f"Questions about documents, {state}, medians", [{c: row[c] for c in columns} for row in table])
    for rig in rigs.values():
        rig.engine.close()
    write_json("stalls", {**vars(args), "load_bytes_per_s": rate, "model": "embedded, float32"}, rows)


def compare(
    rigs: dict[str, Rig],
    documents: list[np.ndarray],
    on_host: list[np.ndarray],
    num_rounds: int,
    rng: np.random.Generator,
    state: str,
) -> list[dict[str, Any]]:
    """A row per setting. Ratios are of the same round; answers are compared with those of the first setting."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rigs}
    differing = dict.fromkeys(rigs, 0)
    for i in range(num_rounds + 1):
        about = rng.integers(0, NUM_DOCUMENTS, NUM_QUESTIONS)
        prompts = [np.concatenate((documents[d], rng.integers(3, 2000, QUESTION_TOKENS))) for d in about]
        answers = {}
        for name, rig in rigs.items():
            rig.prepare(on_host)
            times, answers[name] = rig.ask(prompts)
            if i:  # the first round warms up
                found[name].append(times)
                differing[name] += sum(a != b for a, b in zip(answers[name], answers["nothing"]))
    rows = []
    for name, rounds in found.items():
        row: dict[str, Any] = {"state": state, "setting": name}
        for what in rounds[0]:
            ratio = np.median([mine[what] / max(base[what], 1e-9) for mine, base in zip(rounds, found["nothing"])])
            row |= {what: float(np.median([r[what] for r in rounds])), f"{what} / nothing": float(ratio)}
        row["answers that differ"] = differing[name]
        rows.append(row)
    return rows


def bytes_per_s(documents: list[np.ndarray], slowdown: float) -> float:
    """The rate at which a document loads `slowdown` times as long as a question takes that finds it on the device."""
    rig = Rig(None, NOTHING)
    rng = np.random.default_rng(2)
    seconds = []
    for _ in range(7):
        prompt = np.concatenate((documents[0], rng.integers(3, 2000, QUESTION_TOKENS)))
        seconds.append(rig.engine.generate([prompt], ASKED)[0].first_token_s)
    rig.engine.close()
    config = rig.engine.scheduler.config
    return DOCUMENT_TOKENS * config.page_bytes / config.page_size / (slowdown * float(np.median(seconds[2:])))


if __name__ == "__main__":
    main()
