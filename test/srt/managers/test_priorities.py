"""Priority scheduling: who goes first, who loses memory to whom, and that all end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from managers.test_load_scheduling import DOCUMENT, Rig, fresh
from managers.test_load_scheduling import request as simulated
from managers.test_scheduler import Driver, request

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig, PriorityConfig
from support.soak import Soak
from support.soak_config import SoakConfig

STRICT = PriorityConfig(preemption_threshold=10)


def req(rid: str, priority: int, prompt: list[int] | None = None, **fields: int) -> TokenizedGenerateReqInput:
    first = 3 + 10 * (ord(rid[0]) - ord("a"))
    return msgspec.structs.replace(request(rid, prompt or [first, first + 1], **fields), priority=priority)


def order_of(driver: Driver, *reqs: TokenizedGenerateReqInput) -> list[str]:
    """In which order waiting requests start, each in a launch of its own; the slots are numbered that way."""
    driver.step(*reqs)
    active = driver.scheduler.queues.active()
    return [r.rid for r in sorted(active, key=lambda r: r.slot)]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        (None, ["a", "b", "c", "d"]),
        (PriorityConfig(), ["b", "d", "c", "a"]),
        (PriorityConfig(low_values_first=True), ["a", "c", "b", "d"]),
    ],
)
def test_higher_priorities_start_first_and_equals_by_age(priorities, order) -> None:
    driver = Driver(priorities=priorities)
    assert order_of(driver, req("a", -1), req("b", 5), req("c", 0), req("d", 5)) == order


def running(driver: Driver) -> set[str]:
    return {r.rid for r in driver.scheduler.queues.active()}


def busy(priorities: PriorityConfig | None, *low: TokenizedGenerateReqInput, slots: int = 2) -> tuple[Driver, int]:
    """A driver in which these requests decode; and its next launch."""
    driver = Driver(priorities=priorities, max_running_requests=slots)
    driver.step(*low)
    driver.step(results={0: [9] * len(low)})
    assert running(driver) == {each.rid for each in low}
    return driver, 1


@pytest.mark.parametrize(
    ("priorities", "priority", "expected"),
    [
        (STRICT, 11, {"a", "c"}),
        (STRICT, 10, {"a", "b"}),  # not by more than the threshold
        (PriorityConfig(), 1000, {"a", "b"}),
        (None, 1000, {"a", "b"}),
        (PriorityConfig(True, 10), -12, {"a", "c"}),
    ],
)
def test_a_waiting_request_takes_the_place_of_one_whose_priority_is_much_lower(
    priorities, priority, expected
) -> None:
    """Of equals the youngest loses its place."""
    driver, seq = busy(priorities, req("a", 0), req("b", 0))
    driver.step(req("c", priority), results={seq: [9, 9]})
    assert running(driver) == expected
    assert driver.scheduler.counters["preempted_reqs"] == ("b" not in expected)


def test_the_lowest_priority_loses_first_and_comes_back_with_what_it_had() -> None:
    driver, seq = busy(STRICT, req("a", -50), req("b", 0))
    decision = driver.step(req("c", 20, max_new_tokens=1), results={seq: [9, 9]})
    assert running(driver) == {"b", "c"} and decision.launch is not None
    # c has its only token: a starts again, behind the tokens that are known.
    assert driver.step(results={decision.launch.seq: [9]}).outputs[-1].finish_reason is not None
    decision = driver.step()
    assert running(driver) == {"a", "b"}
    (a,) = (r for r in driver.scheduler.queues.active() if r.rid == "a")
    assert a.num_known == 2 + 2 and a.num_retractions == 1


def test_a_prompt_in_chunks_gives_way() -> None:
    driver = Driver(priorities=STRICT, chunked_prefill_size=4)
    driver.step(req("a", 0, list(range(3, 33))))
    assert driver.scheduler.queues.prefilling is not None
    decision = driver.step(req("b", 50))
    # What the launch has room for beside it is the next of the other's tokens, of which 4 are in the cache.
    assert decision.launch is not None and decision.launch.input_ids.tolist() == [13, 14, 7, 8]
    assert driver.scheduler.counters["preempted_reqs"] == 1


def test_only_as_many_as_needed_lose_their_memory() -> None:
    """Each of four requests has 10 of 64 pages and may use 4 more."""
    low = [
        req(rid, 0, list(range(start, start + 10)), max_new_tokens=4) for rid, start in zip("abcd", range(3, 99, 20))
    ]
    driver, seq = busy(STRICT, *low, slots=8)
    driver.step(req("e", 99, list(range(100, 130)), max_new_tokens=4), results={seq: [9] * 4})
    while "e" not in running(driver):
        driver.step()
    assert {"a", "b", "e"} <= running(driver)


@pytest.mark.slow
def test_a_soak_with_priorities_ends_with_the_tokens_of_one_without() -> None:
    """The soak compares every token with the oracle's, and all requests end. Memory is short, so some lose it."""
    preempted = []

    class Counting(Soak):
        def _take_outputs(self, decision: BatchDecision) -> None:
            super()._take_outputs(decision)
            preempted.append(self.ranks[0].core.scheduler.counters["preempted_reqs"])

    drawn = replace(SoakConfig.draw(3, 25), max_running_requests=2, arrival_rate=0.9, insert_at="launch")
    Counting(replace(drawn, priorities=PriorityConfig(preemption_threshold=0))).run()
    assert preempted[-1] > 0


@pytest.mark.parametrize("cache", ["", "no_store"])
@pytest.mark.parametrize("lacks", ["slot", "turn"])
def test_others_keep_their_memory_while_a_request_of_higher_priority_loads(cache: str, lacks: str) -> None:
    """They were preempted step after step, and no request made a token meanwhile."""
    has_slot = lacks == "turn"
    rig = Rig(
        bubble_filling=True,
        priorities=PriorityConfig(preemption_threshold=0),
        max_running_requests=4 if has_slot else 2,
        chunked_prefill_size=20 if has_slot else 200,
    )
    rig.remember(DOCUMENT)

    def of(priority: int, at: float, each: TokenizedGenerateReqInput, **fields: str) -> tuple[float, Any]:
        return at, msgspec.structs.replace(each, priority=priority, **fields)

    if has_slot:
        low = [
            of(5, 0.0, simulated("runner", fresh(10, 1), 100)),
            of(0, 0.2, simulated("low", fresh(300, 2), 5), cache=cache),
        ]
    else:
        low = [of(0, 0.0, simulated(f"low{i}", fresh(40, i), 60), cache=cache) for i in range(2)]
    times = rig.run([*low, of(5, 0.21, simulated("high", DOCUMENT + fresh(5, 3)))])
    assert rig.counter("preempted_reqs") <= 2 and len(times) == len(low) + 1


def test_a_request_that_streams_gives_its_slot_up() -> None:
    stream = LayerStreamConfig(2, 8, max_resident_tokens=16)
    driver = Driver(
        priorities=STRICT, max_running_requests=1, num_host_pages=64, layer_stream=stream, chunked_prefill_size=8
    )
    driver.step(req("a", 0, list(range(3, 25))))
    driver.step(results={0: []})
    assert driver.scheduler.streaming.reqs and not driver.scheduler.queues.has_free_slot
    driver.step(req("b", 11))
    assert running(driver) == {"b"}


def test_memory_that_no_launch_uses_any_more_is_there_in_the_same_step() -> None:
    """Nothing else is under way, so that no other step would come."""
    driver = Driver(priorities=STRICT, num_device_pages=14, chunked_prefill_size=8, enable_radix_cache=False)
    driver.step(req("a", 0, list(range(3, 15))))
    decision = driver.step(req("b", 20, list(range(40, 52))), results={0: []})
    assert decision.launch is not None and running(driver) == {"b"}


def test_the_first_in_turn_is_launched_with_its_load_once_it_lost_a_preload() -> None:
    """Older requests of lower priority pass it while it loads, grow, and take the memory of its preload. It was
    deferred for the load again as soon as there was room, and started after all of them."""
    rig = Rig(
        0.01,
        bubble_filling=True,
        num_device_pages=160,
        context_len=159,
        max_running_requests=2,
        new_token_ratio=0.0,
        priorities=PriorityConfig(),
    )
    rig.remember(DOCUMENT)
    older = [(0.0, simulated(f"low{i}", fresh(20, i + 1), 100)) for i in range(6)]
    high = msgspec.structs.replace(simulated("high", DOCUMENT + fresh(5)), priority=5)
    times = rig.run([*older, (0.1, high)])
    assert rig.preloads["high"].preload_cancelled
    assert rig.first(times, "low3") < rig.first(times, "high") < rig.first(times, "low4")
