"""Run the evaluation of a paper again, simulated.

    python -m benchmark.papers strata --figure 1|2|3|8|9|10|11|12|13|14|all [--jobs 2] [--quick] [--no-sensitivity]
    python -m benchmark.papers shadowserve --figure 9|10|11|12|13|14|15|size|ours|all [the same]
    python -m benchmark.papers swiftcache --figure 1|7|8|9|10|11|table1|table2|ours|all [the same]
    python -m benchmark.papers union --figure union|ratio|all [the same]
    python -m benchmark.papers traces --trace FILE|all [--trace-folder DIR] [--systems NAME,…] [--first N] [the same]

Prints the paper's numbers beside the simulated ones, and writes bench-out/papers_<paper>_fig<n>.json and .png. Every
headline is run with three seeds. Several figures share their runs: --figure 8 9 11.
Strata's figure 3, ShadowServe's 13 and SwiftCache's 1, 9 and tables are cost models alone, and quick anyway.
Strata's 12 is measured; all else is simulated. Traces are files that are not in the repository. --quick: a tenth of
the queries and less, for Strata and traces with pools that are as much smaller. That shows that everything runs; its
numbers mean nothing. --headlines: headlines and ranges alone, without curves; of Strata's figures 8, 9, 11 and 13,
ShadowServe's 9 and SwiftCache's 7.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.papers.figures import Result, report
from benchmark.papers.runs import Runs
from benchmark.papers.strata import FIGURES, reproduce
from benchmark.papers.systems import SYSTEMS

from benchmark.papers import (
    load_ratio,
    shadowserve,
    shadowserve_runs,
    shadowserve_systems,
    strata_headlines,
    swiftcache,
    swiftcache_runs,
    swiftcache_serving,
    traces,
    traces_runs,
    union,
    union_runs,
)
from sglang.cli.server import CommandError

# By data set, what replaces fields of all settings. A decode step per output token makes ShareGPT slow.
FULL: dict[str, dict[str, Any]] = {"ShareGPT": {"counts": 0.01}}
QUICK: dict[str, dict[str, Any]] = {
    "LooGLE": {"counts": 0.1},
    "NarrativeQA": {"counts": 0.1},
    "ReviewMT": {"counts": 0.02},
    "ShareGPT": {"counts": 0.0003},
}
SWIFTCACHE_QUICK: dict[str, dict[str, Any]] = {
    name: {"requests": 12, "answers": 0.1} for name in swiftcache_runs.DATASETS
}
UNION_FIGURES = ("union", "ratio")
UNION_QUICK: dict[str, dict[str, Any]] = QUICK | {"L-Eval": {"share": 0.25, "turns": 2}}
SHADOWSERVE_QUICK: dict[str, dict[str, Any]] = {name: {"queries": 20} for name in shadowserve_runs.DATASETS}
# By paper, the figures whose headlines can be run without their curves.
HEADLINES: dict[str, dict[str, Callable[..., Result]]] = {
    "strata": dict.fromkeys(strata_headlines.FIGURES, strata_headlines.headlines_only),
    "shadowserve": {"9": shadowserve.headlines_only},
    "swiftcache": {"7": swiftcache_serving.headlines_only},
    "union": {},
    "traces": {},
}


def notes_of(systems: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    return {s.name: {"modelled": s.models, "not modelled": s.lacks} for s in systems.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    papers = parser.add_subparsers(dest="paper", required=True)
    strata = papers.add_parser("strata", help="Strata: hierarchical context caching")
    strata.add_argument("--figure", nargs="+", default=["all"], choices=[*FIGURES, "all"])
    remote = papers.add_parser("shadowserve", help="ShadowServe: KV fetched over a network, through a SmartNIC")
    remote.add_argument("--figure", nargs="+", default=["all"], choices=[*shadowserve.FIGURES, "all"])
    peers = papers.add_parser("swiftcache", help="SwiftCache: KV on other models' GPUs")
    peers.add_argument("--figure", nargs="+", default=["all"], choices=[*swiftcache.FIGURES, "all"])
    together = papers.add_parser("union", help="the three papers' tiers together, and each part of them")
    together.add_argument("--figure", nargs="+", default=["all"], choices=[*UNION_FIGURES, "all"])
    whole = papers.add_parser("traces", help="whole traces of requests, system by system")
    whole.add_argument("--trace", default="all", help="a file, or all of the three that are known")
    whole.add_argument("--trace-folder", type=Path, default=traces.FOLDER, help="where all of them are looked for")
    whole.add_argument("--first", type=_count, help="requests, or sessions of agents; without it the whole trace")
    whole.add_argument("--systems", type=_systems, default=traces.SYSTEM_NAMES, help="without it all of them")
    for each in (strata, remote, peers, together, whole):
        each.add_argument("--jobs", type=int, default=1, help="processes")
        each.add_argument("--quick", action="store_true", help="a tenth of the queries or less, with smaller pools")
        each.add_argument("--no-sensitivity", action="store_true")
        each.add_argument("--headlines", action="store_true", help="headlines and ranges alone, without curves")
        each.add_argument(
            "--only", default="", metavar="WORDS", help="only the headlines whose names have these words"
        )
        each.add_argument("--record", action="store_true", help="write docs/records/results/, too, without points")
    args = parser.parse_args()
    if args.record and args.quick:
        parser.error("--record is for whole runs: leave --quick out")
    figures: Mapping[str, Callable[[Runs], Result]]
    if args.paper == "strata":
        scale, notes = QUICK if args.quick else FULL, notes_of(SYSTEMS)
        runs = Runs(args.jobs, scale)
        figures = {number: partial(_strata, number, args.quick) for number in FIGURES}
    elif args.paper == "shadowserve":
        scale, notes = SHADOWSERVE_QUICK if args.quick else {}, notes_of(shadowserve_systems.SYSTEMS)
        runs = Runs(args.jobs, scale, run=shadowserve_runs.simulate)
        figures = shadowserve.FIGURES
    elif args.paper == "union":
        scale = UNION_QUICK if args.quick else {}
        notes = {
            t.name: {"modelled": t.describe(), "not modelled": union_runs.LACKS} for t in union_runs.TIERS.values()
        }
        runs = Runs(args.jobs, scale, run=load_ratio.simulate)
        sizes = union.QUICK_SETS if args.quick else union.WORKING_SETS
        functions = (partial(union.figure, sizes=sizes), load_ratio.figure)
        figures = dict(zip(UNION_FIGURES, functions, strict=True))
    elif args.paper == "traces":
        if args.record and args.systems != traces.SYSTEM_NAMES and args.first is None:
            parser.error("--record is for all systems of a whole trace: leave --systems out, or give --first")
        paths = {traces_runs.trace_name(path): path for path in traces.paths_of(args.trace, args.trace_folder)}
        if not paths:
            parser.error("there is no trace to run")
        scale = dict.fromkeys(paths, traces.QUICK) if args.quick else {}
        notes = notes_of({name: traces_runs.system_of(name) for name in args.systems})
        runs = Runs(args.jobs, scale, run=traces_runs.simulate)
        figures = {
            name: partial(traces.figure, path=path, systems=args.systems, first=args.first)
            for name, path in paths.items()
        }
        args.figure = ["all"]
    else:
        scale = SWIFTCACHE_QUICK if args.quick else {}
        notes = {f"figure 9, {name}": said for name, said in notes_of(swiftcache.SYSTEMS).items()}
        notes |= notes_of(swiftcache_runs.SERVING)
        runs = Runs(args.jobs, scale, run=swiftcache.run)
        figures = swiftcache.FIGURES
    if args.headlines:
        # Strata's have a table of their runs, of which only these are wanted.
        only = {"only": args.only} if args.paper == "strata" else {}
        figures = {number: partial(run, number, **only) for number, run in HEADLINES[args.paper].items()}
    print("Systems:")
    for name, said in notes.items():
        print(f"  {name}: {said['modelled']} Not modelled: {said['not modelled']}")
    numbers = list(figures) if "all" in args.figure else args.figure
    if missing := [number for number in numbers if number not in figures]:
        parser.error(f"figure {', '.join(missing)} has no headlines by itself: {', '.join(figures)} have")
    for number in numbers:
        begin = time.perf_counter()
        settings = {"quick": args.quick, "scale": scale, "only": args.only, "systems": notes}
        try:
            result = figures[number](runs).with_only(args.only)
        except CommandError as error:
            parser.error(str(error))
        report(result, runs, settings, not args.no_sensitivity, args.record)
        print(f"figure {number}: {time.perf_counter() - begin:.0f} s of wall, {len(runs.outcomes)} runs so far")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in traces.SYSTEM_NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(traces.SYSTEM_NAMES)}")
    return names


def _strata(number: str, quick: bool, runs: Runs) -> Result:
    return reproduce(number, runs, quick)


if __name__ == "__main__":
    main()
