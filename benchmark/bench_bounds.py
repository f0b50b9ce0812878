"""Hits and time to first token against bounds: documents that are asked about uniformly, over mixes of tiers.

    python -m benchmark.bench_bounds [--mix device+host] [--policy write_back] [--sets 0.9,2] [--quick]
    python -m benchmark.bench_bounds --live [--mix device+host+disk]

Without --live the real scheduler runs on the virtual clock, and every number is simulated. With it a server process
answers, see live_bounds.py. The yardsticks are those of simulator/bounds.py. docs/records/bounds.md has the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from typing import Any

from benchmark.common import print_table, write_json
from benchmark.live_bounds import LIVE_MIXES, measure_live
from benchmark.simulator.bounds import (
    BoundsOutcome,
    Documents,
    hindsight_share,
    run_documents,
    usable_share,
    with_unlimited_device,
)
from benchmark.simulator.small_machine import SmallMachine

from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier

SIZES = {Tier.DEVICE: 8192, Tier.PEER: 8192, Tier.HOST: 16384, Tier.DISK: 32768}
MIXES: dict[str, tuple[Tier, ...]] = {
    "device+host": (Tier.DEVICE, Tier.HOST),
    "device+host+peer": (Tier.DEVICE, Tier.HOST, Tier.PEER),
    "device+host+disk": (Tier.DEVICE, Tier.HOST, Tier.DISK),
    "device+host+peer+disk": (Tier.DEVICE, Tier.HOST, Tier.PEER, Tier.DISK),
}
# Of the sum of the tiers.
WORKING_SETS = (0.5, 0.9, 1.0, 1.5, 2.0, 4.0)
# Questions beyond the first ones: so many per document, and at least so many.
QUESTIONS_PER_DOCUMENT, LEAST_QUESTIONS = 2, 300
POLICIES = tuple(policy for policy in WRITE_POLICIES if policy != "write_through_selective")


def documents_for(machine: SmallMachine, working_set: float, most_questions: int | None = None) -> Documents:
    """working_set: a share of the machine's tiers."""
    number = round(working_set * machine.sum_tokens / Documents.document_tokens)
    questions = max(LEAST_QUESTIONS, QUESTIONS_PER_DOCUMENT * number)
    return Documents(number, min(questions, most_questions or questions))


def measure(mix: str, working_set: float, policy: str, most_questions: int | None = None) -> dict[str, Any]:
    """One row of the table. All of it is simulated."""
    machine = SmallMachine({tier: SIZES[tier] for tier in MIXES[mix]}, write_policy=policy)
    documents = documents_for(machine, working_set, most_questions)
    outcome, prompts = run_documents(machine, documents)
    formula = usable_share(machine, documents.working_set, outcome.held_tokens, outcome.peak_running)
    hindsight = hindsight_share(prompts, machine, documents)
    unlimited = _unlimited(documents)
    hits = {f"{name} %": 100 * outcome.hits.get(name, 0.0) for name in TIER_NAMES[: Tier.DISK + 1]}
    return {
        "mix": mix,
        "set / sum": working_set,
        "policy": policy,
        **hits,
        "hits %": 100 * outcome.hit_rate,
        "formula %": 100 * formula,
        "of formula": outcome.hit_rate / formula,
        "hindsight %": 100 * hindsight,
        "of hindsight": outcome.hit_rate / hindsight if hindsight else 1.0,
        "mean TTFT ms": 1e3 * outcome.mean_ttft_s,
        "P99 TTFT ms": 1e3 * outcome.p99_ttft_s,
        "unlimited mean ms": 1e3 * unlimited.mean_ttft_s,
        "unlimited P99 ms": 1e3 * unlimited.p99_ttft_s,
        "held tokens": outcome.held_tokens,
        "kind": "simulated",
    }


@cache
def _unlimited(documents: Documents) -> BoundsOutcome:
    machine = SmallMachine({Tier.DEVICE: SIZES[Tier.DEVICE]})
    return run_documents(with_unlimited_device(machine, documents), documents)[0]


def simulate(mixes: Sequence[str], sets: Sequence[float], policies: Sequence[str], quick: bool) -> None:
    rows = []
    settings = {"mixes": list(mixes), "sets": list(sets), "policies": list(policies), "quick": quick}
    for mix in mixes:
        for working_set in sets:
            for policy in policies:
                rows.append(measure(mix, working_set, policy, LEAST_QUESTIONS // 5 if quick else None))
                write_json("bounds", settings, rows, complete=False)
        shown = [{k: v for k, v in row.items() if k not in ("mix", "kind")} for row in rows if row["mix"] == mix]
        print_table(f"Simulated: {mix}, default policy {SchedulerConfig.write_policy}", shown)
    write_json("bounds", settings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", action="append", choices=MIXES, help="may be given several times; default: all")
    parser.add_argument("--policy", action="append", choices=WRITE_POLICIES, help="simulated only; default: most")
    parser.add_argument("--sets", default=",".join(map(str, WORKING_SETS)), help="working sets, over the tiers' sum")
    parser.add_argument("--quick", action="store_true", help="fewer questions")
    parser.add_argument("--live", action="store_true", help="measure a server process with default flags")
    args = parser.parse_args()
    sets = [float(each) for each in args.sets.split(",")]
    if not args.live:
        simulate(args.mix or tuple(MIXES), sets, args.policy or POLICIES, args.quick)
        return
    rows = [measure_live(mix, each) for mix in args.mix or LIVE_MIXES for each in sets]
    print_table("Measured: one server with the embedded model, default flags", rows)
    write_json("bounds_live", {"sets": sets}, rows)


if __name__ == "__main__":
    main()
