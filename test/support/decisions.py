"""Whole decisions of the scheduler, recorded from the soak: proof that a change of structure changes no behaviour.

    python -m support.decisions              compare every decision with the recorded one
    python -m support.decisions --record     write the file anew, after an intended change of behaviour

The file has every field of every decision, not digests, so that a difference is shown by its name and step. `RENAMED`
is applied to the recorded side first: a field may change its name without a new recording. The counters at the end of
each run are compared as well.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard

from sglang.srt.managers.schedule_batch import BatchDecision
from support.mutations import configurations
from support.soak import Soak
from support.soak_config import SoakConfig
from support.tier_mixes import TIER_MIXES, tier_mix

FILE = Path(__file__).with_name("decisions.msgpack.zst")
# Old name of a field -> its name today.
RENAMED = {"full_only": "num_full_only_pages", "windowed_only": "num_windowed_only_pages"}
# A field by which a table is known -> fields of such tables that were added, with the values that recorded ones have.
ADDED: dict[str, dict[str, Any]] = {}
# Seeds of the soak, and steps in which requests may arrive.
SEEDS = range(200, 224)
STEPS = 120
MIX_STEPS = 160


class _RecordedSoak(Soak):
    """Keeps the decisions of the first rank."""

    def __init__(self, config: SoakConfig) -> None:
        super().__init__(config)
        self.decisions: list[bytes] = []

    def _take_outputs(self, decision: BatchDecision) -> None:
        self.decisions.append(decision.encode())
        super()._take_outputs(decision)


def runs() -> Iterator[tuple[str, SoakConfig]]:
    for config in configurations():
        yield f"hunt {config.seed}", config
    for seed in SEEDS:
        yield f"soak {seed}", SoakConfig.draw(seed, STEPS)
    for mix in TIER_MIXES:
        yield f"mix {'+'.join(mix)}", replace(tier_mix(mix, 0), steps=MIX_STEPS)


def decide(config: SoakConfig) -> list[Any]:
    """One entry per decision, then the counters."""
    soak = _RecordedSoak(config)
    soak.run()
    counters = soak.ranks[0].core.scheduler.state()["counters"]
    return [*(msgspec.msgpack.decode(data, strict=False) for data in soak.decisions), {"counters": counters}]


def record(path: Path = FILE) -> int:
    """Returns the number of decisions."""
    recorded = {name: decide(config) for name, config in runs()}
    path.write_bytes(zstandard.compress(msgspec.msgpack.encode(recorded), 19))
    return sum(len(entries) - 1 for entries in recorded.values())


def load(path: Path = FILE) -> dict[str, msgspec.Raw]:
    """The recorded runs, undecoded; see `entries_of`."""
    return msgspec.msgpack.decode(_unpacked(path), type=dict[str, msgspec.Raw])


def entries_of(run: msgspec.Raw) -> list[Any]:
    """One entry per decision, then the counters."""
    return _renamed(msgspec.msgpack.decode(run, strict=False))


def first_difference(recorded: list[Any], decided: list[Any]) -> str | None:
    """The first place in which two runs differ, with both values; None if they agree."""
    for place, (before, after) in enumerate(zip(recorded, decided)):
        if before != after:
            return f"decision {place}: {_difference(before, after)}"
    if len(recorded) != len(decided):
        return f"{len(decided)} entries, {len(recorded)} recorded"
    return None


def _unpacked(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        for known_by, added in ADDED.items():
            if known_by in value:
                value = added | value
        return {RENAMED.get(key, key): _renamed(each) for key, each in value.items()}
    return [_renamed(each) for each in value] if isinstance(value, list) else value


def _difference(before: Any, after: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        key = next(key for key in before if before[key] != after[key])
        return _difference(before[key], after[key], f"{path}.{key}" if path else str(key))
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        i = next(i for i, (a, b) in enumerate(zip(before, after)) if a != b)
        return _difference(before[i], after[i], f"{path}[{i}]")
    return f"{path or 'all'} was {before!r}, is {after!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the file anew")
    parser.add_argument("--only", default="", help="compare runs whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if args.record:
        print(f"{FILE.name}: {record()} decisions recorded")
        return 0
    recorded, num_decisions, num_runs = load(), 0, 0
    for name, config in runs():
        if args.only not in name:
            continue
        decided = decide(config)
        if difference := first_difference(entries_of(recorded[name]), decided):
            print(f"{name}, {difference}"[:2000], file=sys.stderr)
            return 1
        num_decisions, num_runs = num_decisions + len(decided) - 1, num_runs + 1
    print(f"{num_runs} runs, {num_decisions} decisions as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
