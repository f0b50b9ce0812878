"""A lender or a borrower, as a `Child`, which reports what happens to it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from sglang.srt.peer.borrower_coordinator import BorrowerCoordinator
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.memory.slabs import SlabFiles
from sglang.srt.peer.protocol.borrower import SlabLent, SlabLost, SlabRecalled, SlabsWanted
from sglang.srt.peer.protocol.lender import DemandChanged, LenderTiming
from sglang.srt.peer.protocol.messages import LeaseId
from sglang.srt.utils.shared_memory import SharedMemory

HEARTBEAT_S = 0.05
SLAB_BYTES = 8192


Say = Callable[..., None]


def borrow(say: Say, name: str, demand_bytes: int, endpoint: str) -> None:
    """Maps what it is lent, fills it with the first letter of its name, and gives back recalled slabs."""
    is_news = threading.Event()
    coordinator = BorrowerCoordinator([endpoint], name, 4096, notify=is_news.set, heartbeat_s=HEARTBEAT_S)
    coordinator.set_demand(endpoint, demand_bytes)
    mapped: dict[LeaseId, mmap.mmap] = {}
    while True:
        is_news.wait()
        is_news.clear()
        for event in coordinator.poll():
            if isinstance(event, SlabLent):
                assert event.fd is not None
                memory = mapped[event.lease] = mmap.mmap(event.fd, event.size_bytes)
                os.close(event.fd)
                foreign = len(memory[:].strip(b"\0"))
                memory[:] = name[0].encode() * event.size_bytes
                say("lent", event.slab, foreign)
            elif isinstance(event, SlabRecalled):
                mapped.pop(event.lease).close()
                say("unmapped")
                coordinator.give_back(endpoint, event.lease)
            elif isinstance(event, SlabsWanted):
                for lease in list(mapped)[: event.num_slabs]:
                    mapped.pop(lease).close()
                    say("unmapped")
                    coordinator.give_back(endpoint, lease)
            elif isinstance(event, SlabLost):
                mapped.pop(event.lease).close()
                say("lost")


def lend(say: Say, directory: Path, num_slabs: int, endpoint: str) -> None:
    """Lends what it has."""
    is_news = threading.Event()
    slabs = [SharedMemory.allocate(SLAB_BYTES, "slab") for _ in range(num_slabs)]
    coordinator = LenderCoordinator(
        endpoint,
        directory,
        SlabFiles(num_slabs, SLAB_BYTES, lambda slab: slabs[slab].fd),
        notify=is_news.set,
        timing=LenderTiming(heartbeat_s=HEARTBEAT_S, offer_s=1e6),
    )
    say("ready", coordinator.endpoint)
    while True:
        is_news.wait()
        is_news.clear()
        for event in coordinator.poll():
            if isinstance(event, DemandChanged) and event.unmet_bytes:
                coordinator.lend(range(num_slabs))
