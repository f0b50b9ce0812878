"""`StateHistory`: what the live page draws of the last fifteen minutes, for `GET /hicache/history`.

Owns the columns: one value per interval each, in bounded memory. They begin anew with the server. Latencies come from
the requests of the HTTP process; everything else from the scheduler's state, which is asked for once per interval. An
idle scheduler is left asleep: what nothing has changed is not asked for again.

    each interval ──► nothing happened, and nothing is under way ──► the last state again
                  ├─► the scheduler answers in time              ──► its state
                  └─► it does not                                ──► a gap; the next rates are means across it
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

from sglang.srt.observability.latency_sketch import LatencySketch
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.errors import RequestError

INTERVAL_S = 5.0
NUM_POINTS = 180
# A state that is later is a gap.
ANSWER_S = 2.0
# How often an idle scheduler is asked: peers and other users of a disk may change what it has.
IDLE_INTERVAL_S = 60.0

_QUANTILES = {"p50": 0.5, "p95": 0.95}
_QUEUES = ("running", "waiting", "waiting_for_storage")
# Counters that are shown as rates, under their own names.
_COUNTERS = (
    *("prompt_tokens", "prefill_tokens", "generation_tokens"),
    *(f"hit_tokens_{tier}" for tier in ("device", "peer", "host", "disk", "remote")),
    *(f"evicted_tokens_{tier}" for tier in ("device", "peer", "host")),
)


class StateHistory:
    """latencies: by name; those since the last point are taken with each. wall: Unix time."""

    def __init__(self, latencies: Mapping[str, LatencySketch], wall: Callable[[], float] = time.time) -> None:
        self._latencies = latencies
        self._wall = wall
        self._started = round(wall(), 3)
        self._times = array("d")
        # By name; `running` tells which points are gaps.
        self._columns = {"running": array("d")}
        # The last state, and when it was asked for.
        self._state: Mapping[str, Any] = {}
        self._state_at = -math.inf
        # What rates grow from, and since when.
        self._totals: dict[str, float] = {}
        self._totals_at = -math.inf
        self._is_settled = False
        self._activity: Hashable = None

    def needs_state(self, now: float, activity: Hashable) -> bool:
        """activity: differs from the last one if anything was asked of the scheduler since."""
        return (
            not self._is_settled
            or activity != self._activity
            or now - self._state_at >= IDLE_INTERVAL_S - INTERVAL_S / 2
        )

    def note_same(self, now: float) -> None:
        """Another interval in which nothing happened."""
        self._totals_at = now
        self._add(_rates_and_gauges(self._state, self._totals, self._totals, INTERVAL_S))

    def note(self, now: float, state: Mapping[str, Any] | None, activity: Hashable) -> None:
        """state: None for a scheduler that did not answer. activity: of the time when it was asked."""
        if state is None:
            self._add({})
            return
        totals, before = _totals(state), self._totals
        values = _rates_and_gauges(state, totals, before, now - self._totals_at)
        self._is_settled = totals == before and _is_idle(state)
        self._state, self._state_at, self._activity = state, now, activity
        self._totals, self._totals_at = totals, now
        self._add(values)

    def _add(self, values: dict[str, float]) -> None:
        """No values but latencies: a gap."""
        other = 0.0 if values else math.nan
        for name, sketch in self._latencies.items():
            found = sketch.take(tuple(_QUANTILES.values()))
            values |= {f"{name}_{part}": value for part, value in zip(_QUANTILES, found)}
        for name, value in values.items():
            # A column begins with its first value: links and reasons that never occur take no room.
            if name not in self._columns and value and not math.isnan(value):
                self._columns[name] = array("d", self._before_first(name))
        for name, column in self._columns.items():
            column.append(float(f"{values.get(name, other):.4g}"))
        # Ascending, even where the clock is set back.
        self._times.append(round(max(self._wall(), self._times[-1] + 0.001 if self._times else 0.0), 3))
        if len(self._times) > NUM_POINTS:
            for column in (self._times, *self._columns.values()):
                del column[0]

    def _before_first(self, name: str) -> list[float]:
        """What a column that begins now held so far: nothing, where the scheduler answered."""
        is_latency = name.endswith(tuple(_QUANTILES))
        return [math.nan if is_latency or math.isnan(each) else 0.0 for each in self._columns["running"]]

    def reply(self, since: float = 0.0) -> dict[str, Any]:
        """The points after a Unix time. Of the columns without any value but 0 only `running` is there."""
        first = bisect_right(self._times, since)
        columns = {name: column[first:].tolist() for name, column in sorted(self._columns.items())}
        return {
            "started": self._started,
            "interval_s": INTERVAL_S,
            "num_points": NUM_POINTS,
            "time": self._times[first:].tolist(),
            "columns": {
                name: values
                for name, values in columns.items()
                if name == "running" or any(value and not math.isnan(value) for value in values)
            },
        }

    async def sample_forever(
        self,
        ask: Callable[[], Awaitable[Mapping[str, Any]]],
        activity: Callable[[], Hashable],
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """ask: the scheduler for its state; raises RequestError if there is none."""
        due = self._totals_at = clock()
        while True:
            due = max(due + INTERVAL_S, clock())
            await sleep(due - clock())
            before = activity()
            if not self.needs_state(clock(), before):
                self.note_same(clock())
                continue
            try:
                state = await asyncio.wait_for(ask(), ANSWER_S)
            except (TimeoutError, RequestError):  # too busy, or ending
                self.note(clock(), None, before)
            else:
                self.note(clock(), state, before)


def _rates_and_gauges(
    state: Mapping[str, Any], totals: Mapping[str, float], before: Mapping[str, float], seconds: float
) -> dict[str, float]:
    rates = {name: max(0.0, total - before.get(name, 0.0)) / seconds for name, total in totals.items()}
    return rates | _gauges(state)


def _totals(state: Mapping[str, Any]) -> dict[str, float]:
    """What only grows, by its column's name."""
    counters, links, reasons = (state.get(part) or {} for part in ("counters", "links", "lost_hits"))
    return {
        **{name: float(counters.get(name, 0)) for name in _COUNTERS},
        **{f"lost_hits.{reason}": float(count) for reason, count in reasons.items()},
        **{f"links.{link}": float(numbers["bytes_done"]) for link, numbers in links.items()},
    }


def _gauges(state: Mapping[str, Any]) -> dict[str, float]:
    queues, tiers = state.get("queues") or {}, state.get("tiers") or {}
    found = {name: float(queues.get(name, 0)) for name in _QUEUES}
    for tier, numbers in tiers.items():
        filled, most = numbers.get("size_bytes"), numbers.get("limit_bytes")
        if "total_tokens" in numbers:
            most = numbers["total_tokens"]
            filled = most - numbers["free_pages"] * state["page_size"]
        if most:
            found[f"filled.{tier}"] = (filled or 0) / most
    return found


def _is_idle(state: Mapping[str, Any]) -> bool:
    """Whether the scheduler has nothing to do that would change its state."""
    queues, links, storage = (state.get(part) or {} for part in ("queues", "links", "storage"))
    is_off = any((storage.get(way) or {}).get("off") for way in ("reads", "writes"))
    return (
        not is_off and not any(queues.values()) and not any(link["operations_in_flight"] for link in links.values())
    )
