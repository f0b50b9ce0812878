"""The names of crash records in the folder of `--crash-dump-folder`. Stateless. Imports nothing heavy."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

# Records of processes that have ended.
MAX_KEPT = 4
_SUFFIX = ".rec"


def new_record_path(folder: Path, pid: int) -> Path:
    return folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{pid}{_SUFFIX}"


def record_of(folder: Path, pid: int) -> Path | None:
    """The newest record of a process of this number, if there is one."""
    return max(folder.glob(f"crash-*-{pid}{_SUFFIX}"), key=lambda path: path.name, default=None)


def replay_hint(path: Path) -> str:
    return f"to replay the crash: python -m sglang.srt.managers.replay {path}"


def remove_old_records(folder: Path) -> None:
    """All but the newest records whose processes have ended, as their locks tell."""
    ended = []
    for path in sorted((*folder.glob(f"crash-*{_SUFFIX}"), *folder.glob("crash-*.new")), key=lambda path: path.name):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # in use, or removed by another server
            continue
        ended.append(path)
    for path in ended[: max(0, len(ended) - MAX_KEPT + 1)]:
        path.unlink(missing_ok=True)
