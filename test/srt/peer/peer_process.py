"""An engine of one kind, as a process of its own: says on stdout, a JSON list per line, what happens to it.

python peer_process.py borrower NAME WANT_BYTES ENDPOINT
    maps what it is lent, fills it with the first letter of its name, gives back what it is asked for
python peer_process.py lender DIRECTORY NUM_SLABS ENDPOINT
    offers what it has
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

from sglang.srt.peer.borrower import AskedBack, Lent
from sglang.srt.peer.coordinator import BorrowerCoordinator, LenderCoordinator
from sglang.srt.peer.lender import Demand, LenderTiming
from sglang.srt.peer.messages import LeaseId
from sglang.srt.utils.shared_memory import SharedMemory

HEARTBEAT_S = 0.05
SLAB_BYTES = 8192


def say(*what: Any) -> None:
    print(json.dumps(what), flush=True)


def borrow(name: str, want_bytes: int, endpoint: str) -> None:
    is_news = threading.Event()
    coordinator = BorrowerCoordinator([endpoint], name, 4096, notify=is_news.set, heartbeat_s=HEARTBEAT_S)
    coordinator.want(endpoint, want_bytes)
    mapped: dict[LeaseId, mmap.mmap] = {}
    while True:
        is_news.wait()
        is_news.clear()
        for event in coordinator.poll():
            if isinstance(event, Lent):
                assert event.fd is not None
                memory = mapped[event.lease] = mmap.mmap(event.fd, event.size_bytes)
                os.close(event.fd)
                foreign = len(memory[:].strip(b"\0"))
                memory[:] = name[0].encode() * event.size_bytes
                say("lent", event.slab, foreign)
            elif isinstance(event, AskedBack):
                mapped.pop(event.lease).close()
                say("unmapped")
                coordinator.unmapped(endpoint, event.lease)
            else:
                mapped.pop(event.lease).close()
                say("lost")


def lend(directory: str, num_slabs: int, endpoint: str) -> None:
    is_news = threading.Event()
    slabs = [SharedMemory.allocate(SLAB_BYTES, "slab") for _ in range(num_slabs)]
    coordinator = LenderCoordinator(
        endpoint,
        Path(directory),
        num_slabs,
        SLAB_BYTES,
        lambda slab: slabs[slab].fd,
        notify=is_news.set,
        timing=LenderTiming(heartbeat_s=HEARTBEAT_S),
    )
    say("ready", coordinator.endpoint)
    while True:
        is_news.wait()
        is_news.clear()
        for event in coordinator.poll():
            if isinstance(event, Demand) and event.unmet_bytes:
                coordinator.offer(range(num_slabs))


def end_with_the_test() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_test, daemon=True).start()
    role, first, number, where = sys.argv[1:]
    {"borrower": borrow, "lender": lend}[role](first, int(number), where)
