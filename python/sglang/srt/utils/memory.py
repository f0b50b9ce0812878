"""How much memory this process may still take. Asks the system; owns nothing."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
# Of a NUMA node's meminfo, what the kernel counts as available for the most part.
_AVAILABLE = ("MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:")


def available_memory(cgroup: Path = _CGROUP, nodes: Path = _NODES) -> int:
    """Bytes: the machine's free memory, or what a container's limit leaves of it. Caches of files count as free. An
    accelerator's memory does not, which the kernel counts too where it is a NUMA node, as on a Grace Hopper."""
    available = max(0, psutil.virtual_memory().available - _accelerators_available(nodes))
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" where there is none
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):  # no limit, or no cgroup of version 2
        return available
    return max(0, min(available, limit - used + files))


def _accelerators_available(nodes: Path) -> int:
    """Bytes in NUMA nodes that are an accelerator's: ACPI's Generic Initiator Affinity names their device, and they
    have no processor. A node of memory alone, as of CXL memory, has no initiator, and is the host's."""
    try:
        numbers = _numbers(nodes / "has_generic_initiator") & _numbers(nodes / "has_memory")
        return sum(_available(nodes / f"node{number}") for number in numbers - _numbers(nodes / "has_cpu"))
    except (OSError, ValueError):  # no NUMA, or a kernel before 5.10
        return 0


def _numbers(path: Path) -> set[int]:
    """Of a list such as "0,2-9"."""
    ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _available(node: Path) -> int:
    """Bytes."""
    lines = [line.split() for line in (node / "meminfo").read_text().splitlines()]
    return sum(int(line[3]) * 1024 for line in lines if line[2] in _AVAILABLE)
