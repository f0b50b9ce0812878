"""`SimulatedLink`: a link that only takes time. Moves nothing; owns when its operations begin and end.

Every number that comes out of it is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.transfer import GateError, LoadFailedError, OpResult, Ticket, Tier, TransferOp


@dataclass(frozen=True)
class _Timing:
    """When the bytes move, in seconds; layers arrive evenly between."""

    start: float
    end: float
    ok: bool


class SimulatedGate:
    def __init__(self, timing: _Timing, num_layers: int, ticket: Ticket) -> None:
        self._timing = timing
        self._num_layers = num_layers
        self._ticket = ticket

    def ready_at(self, layer: int) -> float:
        """Seconds of virtual time at which the layer has arrived."""
        timing = self._timing
        return timing.start + (timing.end - timing.start) * (layer + 1) / self._num_layers

    def wait(self, layer: int, stream: Any) -> None:
        """Time passes in the executor's account, nothing blocks."""

    def check(self) -> None:
        if not self._timing.ok:
            raise LoadFailedError(f"{self._ticket}: failed in the simulation")


def at_bandwidth(bandwidth: float) -> Callable[[TransferOp], float]:
    """Seconds of an operation's bytes at so many bytes per second."""
    return lambda op: op.size_bytes / bandwidth


class SimulatedLink:
    """One operation after another: start when the link is free and the source is ready, then latency_s, then
    seconds(op) for the bytes.

    now: the virtual clock. launch_end: launch number -> when it completes, for backups. fails: decides which
    operations fail, at their end.
    """

    def __init__(
        self,
        name: str,
        now: Callable[[], float],
        seconds: Callable[[TransferOp], float],
        latency_s: float,
        num_layers: int,
        launch_end: Callable[[int], float],
        fails: Callable[[TransferOp], bool] = lambda op: False,
    ) -> None:
        self.name = name
        self.busy_s = 0.0
        self._now = now
        self._seconds = seconds
        self._latency_s = latency_s
        self._num_layers = num_layers
        self._launch_end = launch_end
        self._fails = fails
        self._free_at = 0.0
        self._next_seq = 0
        self._timings: dict[int, _Timing] = {}
        self._pending: deque[int] = deque()

    def submit(self, op: TransferOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        start = max(self._now(), self._free_at)
        if op.dst == Tier.HOST and op.after is not None:
            start = max(start, self._launch_end(op.after))
        start += self._latency_s
        end = start + self._seconds(op)
        self._timings[seq] = _Timing(start, end, not self._fails(op))
        self._free_at = end
        self.busy_s += end - start
        self._pending.append(seq)

    def cancel(self, ticket: Ticket) -> None:
        """A hint, not taken: the operation ends as planned."""

    def gate(self, ticket: Ticket) -> SimulatedGate:
        timing = self._timings.get(ticket.seq)
        if timing is None:
            raise GateError(f"{ticket} is awaited but was never submitted")
        return SimulatedGate(timing, self._num_layers, ticket)

    def poll(self) -> list[OpResult]:
        results = []
        while self._pending and self._timings[self._pending[0]].end <= self._now():
            seq = self._pending.popleft()
            timing = self._timings[seq]
            results.append(OpResult(seq, timing.ok, seconds=timing.end - timing.start))
        return results

    def busy_between(self, start: float, end: float) -> float:
        """Seconds of [start, end) in which bytes move, as far as operations are submitted."""
        busy = 0.0
        for seq in reversed(self._pending):
            timing = self._timings[seq]
            busy += max(0.0, min(end, timing.end) - max(start, timing.start))
            if timing.start <= start:
                break
        return busy

    def next_end(self) -> float | None:
        """When the next operation completes; None if none is under way."""
        return self._timings[self._pending[0]].end if self._pending else None
