"""Where a request's time goes: by hand, and out of a scheduler's steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from managers.test_scheduler import config, request

from sglang.srt.managers.io_struct import ReqTimes, ids_to_bytes
from sglang.srt.managers.launch_batches import LaunchRecord
from sglang.srt.managers.request_times import RequestTimes
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.managers.schedule_policy import PrefillWork
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.transfer import EXEC, H2D, P2D, STALL, Ticket
from sglang.srt.utils.time_units import Seconds


def launch_of(*rids: str, is_prefill: bool = True) -> LaunchRecord:
    reqs: Any = [(SimpleNamespace(rid=rid), 0) for rid in rids]
    return LaunchRecord(reqs, [], work=PrefillWork() if is_prefill else None)


def test_each_wait_is_told_apart() -> None:
    times = RequestTimes()
    times.begin_step(Seconds(10.0))
    times.arrived("a", waits_for_storage=True)
    times.arrived("b", waits_for_storage=False)
    times.begin_step(Seconds(12.0))
    times.note_storage([])
    times.begin_step(Seconds(13.0))
    times.note_storage(["a", "unknown"])
    times.begin_step(Seconds(15.0))
    times.started("a")
    times.note_loads("a", [Ticket(H2D, 3), Ticket(P2D, 0)])
    times.note_loads("unknown", [Ticket(H2D, 4)])
    times.begin_step(Seconds(16.0))
    times.started("a")  # retracted, and started again
    costs = {EXEC: {5: 0.25, 6: 0.5, 7: 1.0}, STALL: {5: 0.125}, H2D: {3: 0.75, 4: 9.0}, P2D: {0: 0.0625}}
    # It computes two parts of its prompt in launch 6.
    launches = {
        5: launch_of("a"),
        6: launch_of("a", "b", "a"),
        7: launch_of("a", is_prefill=False),
        8: launch_of("a"),
    }
    costs[EXEC][8] = 100.0
    done = {EXEC: 9, H2D: 5, P2D: 1}
    times.take_costs(StepInputs(step=0, now=Seconds(16.0), done=done, failed={EXEC: 8}, cost=costs), launches)
    times.begin_step(Seconds(18.0))
    times.first_token("a")
    assert times.known == {
        "a": ReqTimes(
            queue_s=5.0,
            storage_s=3.0,
            loads_s={"host": 0.75, "peer": 0.0625},
            stall_s=0.125,
            compute_s=0.75,
            prefill_s=3.0,
        )
    }
    times.check_invariants(["b"], {"b"}.__contains__)
    times.begin_step(Seconds(19.0))
    times.first_token("a")  # its second token
    times.ended("b")
    assert times.known == {}
    times.check_invariants([], set().__contains__)


def test_a_scheduler_tells_the_times_with_the_first_token() -> None:
    scheduler = Scheduler(config(max_running_requests=1))
    known = {}
    results = {
        2: {0: ids_to_bytes([9])},
        3: {1: ids_to_bytes([9])},
        5: {2: ids_to_bytes([9])},
    }
    for step in range(6):
        new = (request("a", [5, 6], max_new_tokens=2), request("b", [7, 8], max_new_tokens=1)) if step == 0 else ()
        found = results.get(step, {})
        done = {EXEC: max([0, *(seq + 1 for at, each in results.items() if at <= step for seq in each)])}
        cost = {EXEC: {seq: 0.5 for seq in found}}
        scheduler.step(StepInputs(step=step, now=Seconds(step), new=new, done=done, results=found, cost=cost))
        scheduler.check_invariants()
        known |= {
            rid: (times.queue_s, times.prefill_s, times.compute_s) for rid, times in scheduler.times.known.items()
        }
    assert known == {"a": (0.0, 2.0, 0.5), "b": (3.0, 2.0, 0.5)}
