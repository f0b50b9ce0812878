"""Replays a run that `--record-steps` or `--crash-dump-folder` has written, and reports whether every decision is the
same.

    python -m sglang.srt.managers.replay FILE

It needs no model: the record holds the scheduler's configuration, or a snapshot of the scheduler, and every step's
inputs. An error that a step raises
is raised here too, with its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import zstandard

from sglang.srt.managers.step_record import ReplayMismatchError, replay


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 if all steps agree, 1 at the first that differs or if there is no whole step, 2 if FILE is no
    record."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m sglang.srt.managers.replay FILE", file=sys.stderr)
        return 2
    path = argv[0]
    try:
        with open(path, "rb") as file:
            num_steps = replay(file)
    except ReplayMismatchError as error:
        print(f"{path}: {error}")
        return 1
    except OSError as error:
        print(f"error: {path} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, msgspec.MsgspecError, zstandard.ZstdError) as error:
        print(f"error: {path} cannot be replayed: {error}", file=sys.stderr)
        return 2
    if num_steps == 0:
        print(f"{path}: there is no whole step, so nothing was compared: the record was cut off, or has only begun")
        return 1
    print(f"{path}: {num_steps} steps, all recorded decisions the same")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
