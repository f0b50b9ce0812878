"""`SimulatedExecutor`: an executor that only takes time. Computes nothing; owns when its launches begin and end.

Every number that comes out of it is simulated.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.simulator.links import SimulatedLink, SimulatedStorageLink
from sglang.simulator.streams import PieceCost, SimulatedStream
from sglang.srt.mem_cache.transfer import LOAD_LINKS, LoadFailedError, Tier
from sglang.srt.model_executor.executor import StepResult
from sglang.srt.model_executor.launch import Launch, LaunchMode

# Every request samples this token.
_TOKEN = 1


@dataclass(frozen=True)
class LaunchCosts:
    """How long launches take on a simulated machine."""

    num_layers: int
    # Seconds of a launch without loads.
    launch_seconds: Callable[[Launch], float]
    # (mode, link) -> the share by which an operation of the link slows a launch while both run. Operations that are
    # submitted after the launch slow only the next one.
    interference: Callable[[LaunchMode, str], float] | None = None
    # No launch begins while the current operation of this link is under way.
    blocked_by: str | None = None
    # The part of launch_seconds in which a launch attends to what it streams; None: attention takes no time of its
    # own.
    attention_seconds: Callable[[Launch], float] | None = None
    # (launch, when it starts, its seconds) -> by how many seconds others that use the device's memory make it longer.
    contention_s: Callable[[Launch, float, float], float] | None = None


class SimulatedExecutor:
    """Launches run one after the other, layer by layer. A layer starts when the one before has ended and its loads
    have arrived.

    now: the virtual clock. stream: carries what launches stream.
    """

    def __init__(
        self,
        now: Callable[[], float],
        costs: LaunchCosts,
        links: Mapping[str, SimulatedLink | SimulatedStorageLink],
        stream: SimulatedStream | None = None,
    ) -> None:
        self.stall_s = 0.0
        self.stream_s = 0.0
        self.busy_s = 0.0
        self.interference_s = 0.0
        self._now = now
        self._costs = costs
        self._links = links
        self._stream = stream
        self._next_seq = 0
        self._free_at = 0.0
        self._ends: dict[int, float] = {}
        self._pending: deque[StepResult] = deque()
        # Of the latest launches that streamed: when they begin and end, and the seconds of their copies.
        self._streamed: deque[tuple[float, float, dict[Tier, float]]] = deque(maxlen=8)
        self._void = False

    def launch(self, launch: Launch) -> None:
        assert launch.seq == self._next_seq, f"launch {launch.seq} out of order, {self._next_seq} expected"
        self._next_seq += 1
        gates = [self._links[ticket.link].gate(ticket) for ticket in launch.gates]
        start = time = max(self._now(), self._free_at, self._blocked_till())
        cost = stall = stream_s = 0.0
        failed = False
        if not self._void:
            cost = self._costs.launch_seconds(launch)
            pieces = self._begin_stream(launch, start)
            slower = self._slow_down(launch.mode, start, cost, pieces)
            if self._costs.contention_s is not None:
                slower += self._costs.contention_s(launch, start, cost)
            self.interference_s += slower
            cost += slower
            if pieces:
                time, stream_s = self._stream_layers(pieces, gates, cost, time)
                self.stream_s += stream_s
            elif not gates:
                time += cost
            else:
                time, cost = self._compute_behind(gates, time, cost)
            self._note_stream(start, time, pieces)
            self.busy_s += cost
            stall = max(0.0, time - start - cost)
            self.stall_s += stall
            for gate in gates:
                try:
                    gate.check()
                except LoadFailedError:
                    failed = True
        tokens = b""
        if not (failed or self._void):
            tokens = np.full(int(launch.samples.sum()), _TOKEN, np.int32).tobytes()
        self._void = self._void or failed
        self._free_at = self._ends[launch.seq] = time
        self._pending.append(StepResult(launch.seq, tokens, failed, None, cost, stall, stream_s))

    def _compute_behind(self, gates: list[Any], time: float, cost: float) -> tuple[float, float]:
        """Do all layers of a launch, up to one at which a load is known to have failed. Returns when the last one
        ends, and the seconds that they took."""
        num_layers = self._costs.num_layers
        for layer in range(num_layers):
            time = max([time, *(gate.ready_at(layer) for gate in gates)])
            if any(gate.has_failed(time) for gate in gates):
                return time, cost * layer / num_layers
            time += cost / num_layers
        return time, cost

    def _begin_stream(self, launch: Launch, start: float) -> list[PieceCost]:
        """Seconds that each piece costs which the launch reads in each layer."""
        if not launch.streams:
            return []
        assert self._stream is not None, "a launch streams, and there is no layer stream cache"
        loads_s = {
            tier: self._links[name].busy_between(start, float("inf"))
            for tier, name in LOAD_LINKS.items()
            if name in self._links
        }
        self._stream.begin(self._now(), loads_s)
        attend_s = self._costs.attention_seconds(launch) if self._costs.attention_seconds is not None else 0.0
        attend_s /= self._costs.num_layers * len(launch.streams)
        return [piece for prefix in launch.streams for piece in self._stream.pieces(prefix.parts, attend_s)]

    def streamed_between(self, tier: Tier, start: float, end: float) -> float:
        """Seconds of [start, end) in which launches copy from a tier what they stream, as far as they are issued:
        evenly over each launch. The latest launches are known."""
        return sum(
            seconds.get(tier, 0.0) * max(0.0, min(end, until) - max(start, since)) / max(until - since, 1e-12)
            for since, until, seconds in self._streamed
        )

    def _note_stream(self, start: float, end: float, pieces: list[PieceCost]) -> None:
        if not pieces:
            return
        seconds: defaultdict[Tier, float] = defaultdict(float)
        for tier, copy_s in (copy for piece in pieces for copy in piece.copy_s):
            seconds[tier] += copy_s * self._costs.num_layers
        self._streamed.append((start, end, seconds))

    def _stream_layers(
        self, pieces: list[PieceCost], gates: list[Any], cost: float, time: float
    ) -> tuple[float, float]:
        """Do all layers of a launch that streams. Returns when the last one ends, and the seconds of the copies."""
        assert self._stream is not None
        rest = cost / self._costs.num_layers - sum(piece.attend_s for piece in pieces)
        if not gates:
            return self._stream.layers(pieces, self._costs.num_layers, rest, time)
        stream_s = 0.0
        for layer in range(self._costs.num_layers):
            time = max([time, *(gate.ready_at(layer) for gate in gates)])
            if any(gate.has_failed(time) for gate in gates):
                break
            time, copied_s = self._stream.layer(pieces, time)
            stream_s += copied_s
            time += rest
        return time, stream_s

    def _slow_down(self, mode: LaunchMode, start: float, cost: float, pieces: list[PieceCost]) -> float:
        """Seconds by which transfers, the launch's own copies among them, make a launch longer. Reads of the disk do
        not."""
        if self._costs.interference is None:
            return 0.0
        streamed_s: defaultdict[str, float] = defaultdict(float)
        for tier, seconds in (copy for piece in pieces for copy in piece.copy_s):
            streamed_s[LOAD_LINKS.get(tier, "")] += seconds * self._costs.num_layers
        return sum(
            self._costs.interference(mode, name)
            * min(cost, link.busy_between(start, start + cost) + streamed_s[name])
            for name, link in self._links.items()
        )

    def _blocked_till(self) -> float:
        link = self._links.get(self._costs.blocked_by or "")
        return (link.next_end() or 0.0) if link is not None else 0.0

    def reset(self, mark: int) -> None:
        self._void = False

    def poll(self) -> list[StepResult]:
        results = []
        while self._pending and self._ends[self._pending[0].seq] <= self._now():
            results.append(self._pending.popleft())
        return results

    @property
    def free_at(self) -> float:
        """When all launches so far will be over."""
        return self._free_at

    def launch_end(self, seq: int) -> float:
        """When a launch completes, in seconds of virtual time; 0 for -1, the fence of pages that no launch wrote."""
        return self._ends[seq] if seq >= 0 else 0.0

    def next_end(self) -> float | None:
        return self._ends[self._pending[0].seq] if self._pending else None
