"""How much memory this process may still take. Asks the system; owns nothing."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes: the machine's free memory, or what a container's limit leaves of it. Caches of files count as free."""
    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" where there is none
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):  # no limit, or no cgroup of version 2
        return available
    return max(0, min(available, limit - used + files))
