"""`python -m sglang.rebase [OLD] NEW`. Exit code 1: something needs a decision; 2: a version cannot be read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from sglang.rebase.reader import UnreadableError
from sglang.rebase.report import as_json, as_text, compare
from sglang.rebase.stands import same_paths, table
from sglang.rebase.upstream_names import RECORDED, UpstreamNames, load_names


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.rebase",
        description="What a rebase onto another version of upstream has to look at. The exit code is 1 where "
        "something needs a decision.",
    )
    parser.add_argument(
        "versions",
        nargs="+",
        metavar="VERSION",
        help="a wheel of upstream, its unpacked folder, or a JSON file of names (FILE.json:VERSION where it has "
        "several); one alone is compared with the version that this engine stands on",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--files", action="store_true", help="list our files that have a path of upstream's")
    parser.add_argument("--names", action="store_true", help="print the names of the last version, to record them")
    parser.add_argument("--table", action="store_true", help="print where this engine stands on each of its names")
    args = parser.parse_args(argv)
    if len(args.versions) > 2:
        parser.error("give one version or two")
    try:
        new = load_names(args.versions[-1])
        if args.names or args.table or args.files:
            print(_of_one_version(args, new), end="")
            return 0
        old = load_names(args.versions[0] if len(args.versions) == 2 else str(RECORDED))
    except UnreadableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    findings = compare(old, new)
    print(json.dumps(as_json(old, new, findings), indent=1) if args.json else as_text(old, new, findings))
    return int(any(each.needs_decision for each in findings))


def _of_one_version(args: argparse.Namespace, names: UpstreamNames) -> str:
    if args.names:
        return dataclasses.replace(names, files=same_paths(names)).as_json()
    if args.table:
        return json.dumps(table(names), indent=1) + "\n"
    return "".join(f"{path}\n" for path in same_paths(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
