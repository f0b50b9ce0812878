"""`python -m sglang.cli hicache <command>`: looks at a server's cache and changes it.

Owns the parser. A command's `run` returns what is printed, or raises `CommandError`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sglang.cli.commands import HICACHE
from sglang.cli.server import CommandError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang.cli", description="Commands for people who run servers.")
    groups = parser.add_subparsers(dest="group", required=True, metavar="GROUP")
    hicache = groups.add_parser("hicache", help="the hierarchical cache of a running server")
    commands = hicache.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in HICACHE.items():
        doc = (command.run.__doc__ or "").strip()
        made = commands.add_parser(name, help=doc.partition("\n")[0], description=doc)
        command.add_arguments(made)
        made.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        _print(args.run(args))
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print(text: str) -> None:
    """Raises CommandError. A reader that wants no more, such as head, is no error."""
    try:
        print(text, flush=True)
    except OSError as error:
        # Python writes what is left in the buffer once more, at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise CommandError(f"the answer cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
