"""Run the evaluation of a paper again, simulated.

    python -m benchmark.papers strata --figure 1|2|3|8|9|10|11|12|13|14|all [--jobs 2] [--quick] [--no-sensitivity]

Prints what the paper says beside what comes out here, and writes bench-out/papers_strata_fig<n>.json and .png. Figure
3 is the cost model alone and figure 12 is measured; everything else is simulated. --quick: a tenth of the queries and
less, with pools that are as much smaller: shows that everything runs, not what the figures say.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmark.papers.figures import report
from benchmark.papers.runs import Runs
from benchmark.papers.strata import FIGURES, reproduce
from benchmark.papers.systems import SYSTEMS

# By data set, what replaces fields of all settings. A decode step per output token makes ShareGPT slow.
FULL: dict[str, dict[str, Any]] = {"ShareGPT": {"counts": 0.01}}
QUICK: dict[str, dict[str, Any]] = {
    "LooGLE": {"counts": 0.1},
    "NarrativeQA": {"counts": 0.1},
    "ReviewMT": {"counts": 0.02},
    "ShareGPT": {"counts": 0.0003},
}
SYSTEM_NOTES = {s.name: {"modelled": s.models, "not modelled": s.lacks} for s in SYSTEMS.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    papers = parser.add_subparsers(dest="paper", required=True)
    strata = papers.add_parser("strata", help="Strata: hierarchical context caching")
    strata.add_argument("--figure", default="all", choices=[*FIGURES, "all"])
    strata.add_argument("--jobs", type=int, default=1, help="processes")
    strata.add_argument("--quick", action="store_true", help="a tenth of the queries or less, with smaller pools")
    strata.add_argument("--no-sensitivity", action="store_true")
    args = parser.parse_args()
    runs = Runs(args.jobs, QUICK if args.quick else FULL)
    print("Simulated systems:")
    for name, notes in SYSTEM_NOTES.items():
        print(f"  {name}: {notes['modelled']} Not modelled: {notes['not modelled']}")
    for number in FIGURES if args.figure == "all" else [args.figure]:
        begin = time.perf_counter()
        settings = {"quick": args.quick, "scale": QUICK if args.quick else FULL, "systems": SYSTEM_NOTES}
        report(reproduce(number, runs, args.quick), runs, settings, not args.no_sensitivity)
        print(f"figure {number}: {time.perf_counter() - begin:.0f} s of wall, {len(runs.outcomes)} runs so far")


if __name__ == "__main__":
    main()
