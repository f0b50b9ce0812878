"""What must not be left of a chaos: in an idle server, in its log, and after its end."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from support.all_tiers import ADMIN
from support.chaos_requests import PARAMS, random_ids
from support.server_fixture import PATIENCE_S, Server, wait_until


def what_is_left(state: dict[str, Any]) -> list[str]:
    """What an idle server holds on to and should not."""
    left = [f"{name} {number}" for name, number in (state["queues"] | state["transient"]).items() if number]
    for tier, numbers in state["tiers"].items():
        pages = numbers.get("pages", {})
        left += [f"{tier}: {pages[kind]} {kind}" for kind in ("held", "filling", "pending_free") if pages.get(kind)]
        left += [f"{tier}: {numbers['used_tokens']} used"] if numbers.get("used_tokens") else []
    left += [f"{link} in flight" for link, numbers in state["links"].items() if numbers["operations_in_flight"]]
    storage = state["storage"]
    left += [f"{name} {storage[name]}" for name in ("fetching_tokens", "storing_tokens") if storage[name]]
    left += [f"{name} off: {storage[name]['reason']}" for name in ("reads", "writes") if storage[name]["off"]]
    # Chaos damages nothing that the cache may not find by itself.
    left += [f"canary: {state['canary']['differences']}"] if (state["canary"] or {}).get("different_tokens") else []
    left += [
        f"{lender} not connected" for lender in (state["peers"] or {}).get("lenders", ()) if not lender["connected"]
    ]
    return left


def assert_nothing_is_left(server: Server) -> None:
    """Of requests, of transfers, of cached pages after a flush; and of the server after its end."""

    def is_nothing_left() -> bool:
        left = what_is_left(server.state())
        if any(" off: " in each for each in left):
            # Storage is tried with the block of a prompt, and no client asks any more.
            body = {"input_ids": random_ids(len(left), 300), "sampling_params": PARAMS}
            assert server.post("/generate", body).status_code == 200
        return not left

    with contextlib.suppress(AssertionError):
        wait_until(is_nothing_left)
    assert what_is_left(server.state()) == []
    assert server.post("/flush_cache", headers=ADMIN).status_code == 200
    tiers = server.state()["tiers"]
    assert [tier for tier in ("device", "peer", "host") if tier in tiers and tiers[tier]["cached_tokens"]] == []
    assert what_is_left(server.state()) == []
    print("\n".join(line for line in server.output().splitlines() if "WARNING" in line or "ERROR" in line))
    server.send()
    assert server.wait() == 0, server.output()
    assert "Traceback" not in server.output() and "terminate" not in server.output(), server.output()
    server.assert_nothing_left()


# ERROR lines that faults explain: a proxy that hangs is killed with such a line.
_EXPECTED_ERRORS = re.compile(r"proxy")


def unexpected_lines(log: str) -> list[str]:
    """Of a log: what no fault explains."""
    return [
        line
        for line in log.splitlines()
        if re.search(r"Traceback|terminate called|Exception|Segmentation", line)
        or (" ERROR" in line and not _EXPECTED_ERRORS.search(line))
    ]


# Streams that each may copy through a strict lender: loads, writes, to the host, between peers, and for streams.
_NUM_COPYING = 5


def with_slabs(held: Counter[str], num_slabs: int, strict: bool, num_ranks: int) -> Counter[str]:
    """What may be held later, of each rank: all slabs of the lender, which another master may have now; with a strict
    lender, each stream takes staging memory when it first copies."""
    name = "memfd:peer-slab (deleted)"
    later = max(0, (_NUM_COPYING if strict else num_slabs) * num_ranks - held[name])
    return held + Counter({name: later, "shared memory": later})


def assert_replays(record: Path) -> None:
    """The scheduler decides again as it did in its steps."""
    command = [sys.executable, "-m", "sglang.srt.managers.replay", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    print(done.stdout.strip(), flush=True)


def held_by(server: Server, disk: Path) -> Counter[str]:
    """Descriptors of all processes of the server by kind, and mappings of shared memory. Without connections and the
    disk tier's files, which come and go; of each folder that was deleted it keeps one file open (`SharedChanges`)."""
    held: Counter[str] = Counter()
    parent = psutil.Process(server.process.pid)
    for process in (parent, *parent.children(recursive=True)):
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if not target.startswith((str(disk), "socket:")) and not target.endswith("/changes (deleted)"):
                        held[re.sub(r"\d+", "", target.rsplit("/", 1)[-1])] += 1
            maps = (folder / "maps").read_text().splitlines()
            held["shared memory"] += sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
    return held
