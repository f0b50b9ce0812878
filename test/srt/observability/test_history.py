"""The history of the live page: what its lines are, where they have gaps, and when the scheduler is asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.observability import history as module
from sglang.srt.observability.history import IDLE_INTERVAL_S, INTERVAL_S, NUM_POINTS, StateHistory
from sglang.srt.observability.latency_sketch import LatencySketch
from sglang.srt.utils.errors import RequestError


def state(prompt_tokens: int = 0, running: int = 0, in_flight: int = 0, **counters: int) -> dict[str, Any]:
    return {
        "page_size": 2,
        "tiers": {
            "device": {"total_tokens": 100, "free_pages": 20},
            "disk": {"size_bytes": 30, "limit_bytes": 120},
            "remote": {"size_bytes": 5, "limit_bytes": 0},
        },
        "links": {"h2d": {"bytes_done": 10 * prompt_tokens, "operations_in_flight": in_flight}},
        "queues": {"running": running, "waiting": 0, "waiting_tokens": 0, "waiting_for_storage": 0},
        "storage": {"reads": {"off": False}, "writes": {"off": False}},
        "lost_hits": dict.fromkeys(REASONS, 0) | {"never_cached": prompt_tokens},
        "counters": {"prompt_tokens": prompt_tokens, **counters},
    }


class Rig:
    """A history whose time a test turns. wall: begins at 1000 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.latencies = {name: LatencySketch() for name in ("ttft", "itl", "queue")}
        self.history = StateHistory(self.latencies, wall=lambda: 1000.0 + self.now)
        self.activity = 0

    def point(self, found: dict[str, Any] | None) -> None:
        self.now += INTERVAL_S
        self.history.note(self.now, found, self.activity)

    def columns(self, since: float = 0.0) -> dict[str, list[float | None]]:
        """As a client reads them."""
        reply = msgspec.json.decode(msgspec.json.encode(self.history.reply(since)))
        assert all(len(column) == len(reply["time"]) for column in reply["columns"].values())
        return reply["columns"] | {"time": reply["time"]}


def test_counters_become_rates_and_columns_begin_where_they_begin() -> None:
    rig = Rig()
    for prompt_tokens in (0, 50, 150):
        rig.point(state(prompt_tokens, running=prompt_tokens // 50))
    columns = rig.columns()
    assert columns["time"] == [1005, 1010, 1015]
    assert columns["prompt_tokens"] == columns["lost_hits.never_cached"] == [0, 10, 20]
    assert columns["links.h2d"] == [0, 100, 200]
    assert columns["running"] == [0, 1, 3]
    assert columns["filled.device"] == [0.6] * 3 and columns["filled.disk"] == [0.25] * 3
    assert not {"filled.remote", "waiting", "lost_hits.erased", "ttft_p50"} & columns.keys(), "0 is left out"


def test_a_busy_scheduler_is_a_gap_and_no_peak_after_it() -> None:
    rig = Rig()
    rig.latencies["ttft"].add(2.0)
    for found in (state(0), state(50), None, None, state(200)):
        rig.point(found)
    columns = rig.columns()
    assert columns["prompt_tokens"] == [0, 10, None, None, 10], "the mean across the gap"
    assert columns["running"] == [0, 0, None, None, 0]
    first, *others = columns["ttft_p50"]
    assert first == pytest.approx(2, rel=0.05) and others == [None] * 4
    # A column that begins after a gap has it too.
    rig.latencies["itl"].add(0.01)
    rig.point(state(200, evicted_tokens_device=5))
    assert rig.columns()["evicted_tokens_device"] == [0, 0, None, None, 0, 1]
    assert rig.columns()["itl_p95"][:-1] == [None] * 5


def test_the_oldest_points_go_and_a_client_gets_what_is_new() -> None:
    rig = Rig()
    for i in range(NUM_POINTS + 30):
        rig.point(state(i))
    times = rig.columns()["time"]
    assert len(times) == NUM_POINTS and times[-1] - times[0] == INTERVAL_S * (NUM_POINTS - 1) == 895
    assert rig.columns(since=times[-3])["time"] == times[-2:]
    assert rig.columns(since=times[-1]) == {"time": [], "running": []}
    assert rig.columns(since=-math.inf)["time"] == rig.columns(since=1.0)["time"] == times


def test_a_line_that_is_0_in_what_is_new_is_left_out() -> None:
    rig = Rig()
    for prompt_tokens in (0, 50, 50):
        rig.point(state(prompt_tokens, running=1))
    rig.point(None)
    assert "prompt_tokens" in rig.columns()
    assert rig.columns(since=1010) == {
        **{"time": [1015, 1020], "running": [1, None]},
        **{f"filled.{tier}": [part, None] for tier, part in (("device", 0.6), ("disk", 0.25))},
    }


def test_a_history_of_all_that_can_happen_is_small() -> None:
    rig = Rig()
    everything = state(running=1)
    for i in range(NUM_POINTS + 5):
        everything["lost_hits"] = dict.fromkeys(REASONS, i * 1009)
        everything["links"] = {
            link: {"bytes_done": i * 10**12, "operations_in_flight": 1}
            for link in ("h2d", "d2h", "p2d", "d2p", "p2h", "d2s", "fetch", "store", "probe")
        }
        everything["counters"] = {name: i * 1009 for name in module._COUNTERS}
        for sketch in rig.latencies.values():
            sketch.add(0.001 * (i + 1))
        rig.point(everything)
    held = sum(column.itemsize * len(column) for column in rig.history._columns.values())
    assert held < 150_000 and len(msgspec.json.encode(rig.history.reply())) < 250_000


def test_a_clock_that_is_set_back_does_not_mix_up_the_points() -> None:
    rig = Rig()
    rig.point(state())
    rig.now -= 100
    rig.history.note(rig.now, state(), 0)
    first, second = rig.columns()["time"]
    assert first < second


def sampled(rig: Rig, ask: Callable[[], Awaitable[dict[str, Any]]], num_points: int) -> None:
    """Run the loop until it has so many points, with a clock that only its sleeps move."""

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        if len(rig.history._times) >= num_points:
            raise Enough
        rig.now += seconds

    async def main() -> None:
        with pytest.raises(Enough):
            await rig.history.sample_forever(ask, lambda: rig.activity, clock=lambda: rig.now, sleep=sleep)

    asyncio.run(main())


@pytest.mark.parametrize("storage", [state()["storage"], None])
def test_an_idle_scheduler_is_left_asleep(storage: Any) -> None:
    rig = Rig()
    asked: list[float] = []

    async def ask() -> dict[str, Any]:
        asked.append(rig.now)
        return state(in_flight=int(rig.now == 10)) | {"storage": storage}

    sampled(rig, ask, 30)
    # Until nothing is in flight and two states are equal; then once a minute.
    assert asked == [5, 10, 15, 15 + IDLE_INTERVAL_S, 15 + 2 * IDLE_INTERVAL_S]
    asked.clear()
    rig.activity += 1
    sampled(rig, ask, 33)
    assert asked == [155]
    assert len(rig.columns()["time"]) == 33 and None not in rig.columns()["running"]


def test_storage_that_is_left_alone_is_watched() -> None:
    rig = Rig()
    asked: list[float] = []

    async def ask() -> dict[str, Any]:
        asked.append(rig.now)
        return state() | {"storage": {"reads": {"off": True}, "writes": {"off": False}}}

    sampled(rig, ask, 6)
    assert len(asked) == 6


def test_a_rate_after_a_rest_is_of_its_own_interval() -> None:
    rig = Rig()

    async def ask() -> dict[str, Any]:
        return state(100 if rig.activity else 0)

    sampled(rig, ask, 6)
    rig.activity += 1
    sampled(rig, ask, 8)
    assert [rate for rate in rig.columns()["prompt_tokens"] if rate] == [20]


def test_a_scheduler_that_does_not_answer_is_asked_again() -> None:
    rig = Rig()

    async def ask() -> dict[str, Any]:
        if rig.now < 20:
            raise RequestError("the scheduler did not answer in time", 503)
        if rig.now == 20:
            raise TimeoutError
        return state(running=2)

    sampled(rig, ask, 5)
    assert rig.columns()["running"] == [None, None, None, None, 2]
    assert rig.columns()["time"] == [1005, 1010, 1015, 1020, 1025]
