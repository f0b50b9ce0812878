"""The real scheduler, tree and frame tables on a virtual clock, with executor and links that only take time.

Owns the clock and the order of arrivals. Several engines on one clock are in cluster.py. Every number that comes out
of it is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from sglang.simulator.executor import LaunchCosts, SimulatedExecutor
from sglang.simulator.health import HEALTHY, LinkHealth
from sglang.simulator.links import (
    Outcome,
    SimulatedLink,
    SimulatedStorage,
    SimulatedStorageLink,
    at_bandwidth,
)
from sglang.simulator.streams import CopySeconds, SimulatedStream
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.slab_ledger import SlabSource
from sglang.srt.mem_cache.transfer import (
    D2H,
    D2P,
    D2S,
    FETCH,
    FETCH_LINKS,
    H2D,
    LOAD_LINKS,
    P2D,
    P2H,
    P2P,
    PROBE,
    STORAGE_LINKS,
    STORE_LINKS,
    StorageOp,
    Tier,
    TransferOp,
)
from sglang.srt.model_executor.launch import Launch, LaunchMode
from sglang.srt.utils.time_units import Seconds

# (operation, when it was submitted, whether the device computes) -> when it ends. It may remember earlier calls.
FetchTimes = Callable[[StorageOp, float, bool], float]


@dataclass(frozen=True)
class SimulatedStore:
    """One store of blocks."""

    # Makes the model of how long reads take; None: they take no time.
    fetch: Callable[[], FetchTimes] | None = None
    # Bandwidth of writes.
    store_bandwidth: float = float("inf")
    # Blocks that it holds, see `SimulatedStorage`; None for no limit.
    num_blocks: int | None = None
    # Seconds of a probe.
    probe_s: float = 0.0


@dataclass(frozen=True)
class SimulatedHardware:
    """What a simulated machine does, and how fast. Bandwidths are in bytes per second."""

    num_layers: int
    # Seconds of a launch without loads.
    launch_seconds: Callable[[Launch], float]
    # Bandwidths of the links between device and host, and device and peer.
    h2d_bandwidth: float = float("inf")
    d2h_bandwidth: float = float("inf")
    p2d_bandwidth: float = float("inf")
    d2p_bandwidth: float = float("inf")
    # Seconds before an operation's bytes move.
    link_latency_s: float = 0.0
    # Which loads fail, at their end.
    load_fails: Callable[[TransferOp], bool] = lambda op: False
    # Seconds of an operation's bytes, where they depend on more than their number; replaces the bandwidths.
    op_seconds: Callable[[TransferOp], float] | None = None
    # (mode, link) -> the share by which an operation of the link slows a launch while both run.
    interference: Callable[[LaunchMode, str], float] | None = None
    # The stores, the nearest first, as many as are attached.
    stores: tuple[SimulatedStore, ...] = (SimulatedStore(),)
    # Reads of storage and launches take turns, as where the engine reads storage itself.
    fetch_blocks: bool = False
    # Seconds to copy one layer of some pages to a stream buffer, where they depend on more than the pages' number.
    copy_seconds: CopySeconds | None = None
    # The part of launch_seconds in which a launch attends to what it streams; None: attention takes no time of its
    # own.
    attention_seconds: Callable[[Launch], float] | None = None
    # Bandwidth of the swap file, each way.
    swap_bandwidth: float = float("inf")
    # By link, those that are not healthy all the time.
    health: Mapping[str, LinkHealth] = field(default_factory=dict)


@runtime_checkable
class RequestSource(Protocol):
    """A source of requests whose times may depend on how other requests went."""

    def next_at(self) -> float | None:
        """When the next request is due; None: no request comes before another one ends."""
        ...

    def take(self, now: Seconds) -> list[TokenizedGenerateReqInput]:
        """The requests that are sent now, each given out once. They arrive at `now`."""
        ...

    def finished(self, rid: str, now: Seconds) -> None:
        """The request has its last token."""
        ...


class TimedRequests:
    """A `RequestSource` whose times are given beforehand. arrivals: (seconds, request)."""

    def __init__(self, arrivals: Iterable[tuple[float, TokenizedGenerateReqInput]]) -> None:
        self._waiting = deque(sorted(arrivals, key=lambda pair: pair[0]))

    def next_at(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def take(self, now: Seconds) -> list[TokenizedGenerateReqInput]:
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(self._waiting.popleft()[1])
        return due

    def finished(self, rid: str, now: Seconds) -> None:
        """No later request depends on it."""


@dataclass
class RequestTimes:
    """Seconds of virtual time."""

    arrival: float
    # When each output token was ready.
    tokens: list[float] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens_details: dict[str, int] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival


class Clock:
    """Virtual time, which everything that is simulated together shares."""

    def __init__(self) -> None:
        self.now = Seconds(0.0)


class SimulatedEngine:
    """One engine on a clock that others may share.

    storage: the stored blocks, if the config has a storage tier. It may be filled before the run, and requests write
    to it. slabs: memory that it lends or borrows. contention_s: see `LaunchCosts`."""

    def __init__(
        self,
        config: SchedulerConfig,
        hardware: SimulatedHardware,
        clock: Clock,
        slabs: SlabSource | None = None,
        contention_s: Callable[[Launch, float, float], float] | None = None,
    ) -> None:
        self.clock = clock
        now = lambda: clock.now  # noqa: E731
        links: dict[str, SimulatedLink | SimulatedStorageLink] = {}
        self.executor = SimulatedExecutor(
            now,
            LaunchCosts(
                hardware.num_layers,
                hardware.launch_seconds,
                hardware.interference,
                blocked_by=FETCH if hardware.fetch_blocks else None,
                attention_seconds=hardware.attention_seconds,
                contention_s=contention_s,
            ),
            links,
            _open_stream(config, hardware),
        )
        bandwidths: dict[str, float] = {}
        if config.num_host_pages:
            bandwidths |= {H2D: hardware.h2d_bandwidth, D2H: hardware.d2h_bandwidth}
        if config.num_peer_pages:
            bandwidths |= dict.fromkeys((P2D, P2H, P2P), hardware.p2d_bandwidth) | {D2P: hardware.d2p_bandwidth}
        if config.num_swap_pages:
            bandwidths[D2S] = hardware.swap_bandwidth
        for name, bandwidth in bandwidths.items():
            links[name] = SimulatedLink(
                name,
                now,
                hardware.op_seconds or at_bandwidth(bandwidth),
                hardware.link_latency_s,
                hardware.num_layers,
                self.executor.launch_end,
                _outcome(name, hardware),
            )
        num_stores = len(config.storage.tiers) if config.storage is not None else 0
        assert len(hardware.stores) >= num_stores, "each store has its own hardware"
        self.stores = tuple(
            SimulatedStorage(store.num_blocks, config.storage is not None and config.storage.is_exclusive(place))
            for place, store in enumerate(hardware.stores[:num_stores])
        )
        for name in STORAGE_LINKS if config.storage is not None else ():
            links[name] = SimulatedStorageLink(name, now, self.stores, self._storage_ends(name, hardware))
        self.links = links
        scheduler = Scheduler(replace(config, num_layers=hardware.num_layers))
        self.core = EngineCore(scheduler, self.executor, dict(links), slabs=slabs)
        self.times: dict[str, RequestTimes] = {}
        self.begin(())

    @property
    def now(self) -> Seconds:
        return self.clock.now

    @now.setter
    def now(self, now: Seconds) -> None:
        self.clock.now = now

    def begin(
        self,
        arrivals: RequestSource | Iterable[tuple[float, TokenizedGenerateReqInput]],
        after_step: Callable[[BatchDecision], None] = lambda decision: None,
    ) -> None:
        """Take requests from here from now on. arrivals: a source, or (seconds, request)."""
        self._source = arrivals if isinstance(arrivals, RequestSource) else TimedRequests(arrivals)
        self._after_step = after_step

    def advance(self) -> bool:
        """Take a step, if there is anything to do now. Whether there was."""
        due = self._source.take(self.now)
        for request in due:
            self.times[request.rid] = RequestTimes(self.now)
        progress = self.core.progress()
        if not (due or self.core.has_work(self.now)):
            return False
        decision = self.core.step(self.now, progress, due)
        self._take_outputs(decision)
        self._after_step(decision)
        return True

    def next_at(self) -> float | None:
        """When there will be something to do, if nothing comes from other engines; None: never. Infinite: a link
        hangs."""
        upcoming = [self.executor.next_end(), *(link.next_end() for link in self.links.values())]
        upcoming += [self._source.next_at(), self.core.scheduler.wake_at]
        return min((t for t in upcoming if t is not None), default=None)

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        return not self.core.scheduler.num_reqs and self._source.next_at() is None

    def _storage_ends(
        self, name: str, hardware: SimulatedHardware
    ) -> Callable[[StorageOp, float], tuple[float, bool]]:
        health, ends = hardware.health.get(name, HEALTHY), self._healthy_storage_ends(name, hardware)
        return lambda op, submitted: health.outcome(self.now, ends(op, submitted) - self.now)

    def _healthy_storage_ends(self, name: str, hardware: SimulatedHardware) -> Callable[[StorageOp, float], float]:
        if name == PROBE:
            return lambda op, submitted: self.now + self._probe_seconds(op, hardware)
        links = FETCH_LINKS if name in FETCH_LINKS else STORE_LINKS
        place = links.index(name)
        store = hardware.stores[place] if place < len(hardware.stores) else SimulatedStore()
        if name in FETCH_LINKS and store.fetch is not None:
            return partial(self._fetch_ends, store.fetch(), hardware.fetch_blocks)
        rate = store.store_bandwidth if name in STORE_LINKS else float("inf")
        return lambda op, submitted: self.now + op.size_bytes / rate

    def _probe_seconds(self, op: StorageOp, hardware: SimulatedHardware) -> float:
        """The second store is asked for what the first one lacks."""
        seconds, keys = 0.0, op.keys
        for place, store in enumerate(self.stores):
            if place not in op.skips and len(keys):
                seconds += hardware.stores[place].probe_s
                keys = keys[store.count(keys) :]
        return seconds

    def _fetch_ends(self, times: FetchTimes, takes_turns: bool, op: StorageOp, submitted: float) -> float:
        begin = max(submitted, self.executor.free_at) if takes_turns else submitted
        return times(op, begin, self.executor.next_end() is not None)

    def _take_outputs(self, decision: BatchDecision) -> None:
        for output in decision.outputs:
            times = self.times[output.rid]
            times.tokens += [self.now] * (len(output.output_ids) // 4)
            times.cached_tokens_details = output.cached_tokens_details
            if output.finish_reason is not None:
                times.finish_reason = output.finish_reason.type
                self._source.finished(output.rid, self.now)


class Simulation(SimulatedEngine):
    """One engine, and the clock."""

    def __init__(self, config: SchedulerConfig, hardware: SimulatedHardware) -> None:
        super().__init__(config, hardware, Clock())

    def run(
        self,
        arrivals: RequestSource | Iterable[tuple[float, TokenizedGenerateReqInput]],
        after_step: Callable[[BatchDecision], None] = lambda decision: None,
    ) -> dict[str, RequestTimes]:
        """Run until all requests have ended and nothing is under way, or nothing else will ever end because a link
        hangs. arrivals: a source, or (seconds, request)."""
        self.begin(arrivals, after_step)
        while True:
            while self.advance():
                pass
            upcoming_s = self.next_at()
            if upcoming_s is None:
                assert self.core.scheduler.num_reqs == 0, "requests wait and nothing is under way"
                return self.times
            if upcoming_s == float("inf"):
                return self.times
            self.now = Seconds(upcoming_s)


def _outcome(link: str, hardware: SimulatedHardware) -> Outcome:
    health = hardware.health.get(link, HEALTHY)
    loads = link in LOAD_LINKS.values()

    def outcome(op: TransferOp, begin: float, seconds: float) -> tuple[float, bool]:
        end, succeeds = health.outcome(begin, seconds)
        return end, succeeds and not (loads and hardware.load_fails(op))

    return outcome


def _open_stream(config: SchedulerConfig, hardware: SimulatedHardware) -> SimulatedStream | None:
    if config.layer_stream is None:
        return None
    bandwidths = {
        # No link is needed.
        Tier.DEVICE: float("inf"),
        Tier.HOST: hardware.h2d_bandwidth,
        Tier.PEER: hardware.p2d_bandwidth,
        Tier.DISK: hardware.swap_bandwidth,
    }
    layer_bytes = config.page_bytes / hardware.num_layers

    def copy_seconds(tier: Tier, frames: np.ndarray) -> float:
        return len(frames) * layer_bytes / bandwidths[tier]

    return SimulatedStream(
        config.layer_stream.num_buffers, config.layer_stream.buffer_pages, hardware.copy_seconds or copy_seconds
    )
