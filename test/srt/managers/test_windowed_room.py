"""A pool for layers with a window that is full: who starts, what gives way, and that all requests end.

The scheduler alone is driven: launches and copies are over when the next step begins, tokens are drawn by a counter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.snapshot import restored, snapshot
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.transfer import EXEC, LINKS
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import NO_LAUNCH, Seconds

REACH = 40


class Driver:
    """num_windowed_pages: 0 for as few as may be."""

    def __init__(self, num_windowed_pages: int = 0, **fields: object) -> None:
        config = SchedulerConfig(
            **{  # type: ignore[arg-type]
                "page_size": 1,
                "num_device_pages": 3000,
                "num_host_pages": 0,
                "page_bytes": 300,
                "context_len": 3000,
                "num_layers": 3,
                "num_windowed_layers": 2,
                "window_reach": REACH,
                "chunked_prefill_size": 20,
                "insert_every_tokens": 8,
                "deferral_threshold": 0,
                **fields,
            }
        )
        num_pages = num_windowed_pages or config.least_windowed_pages
        self.scheduler = Scheduler(replace(config, num_windowed_pages=num_pages))
        self.config = self.scheduler.config
        self.rng = np.random.default_rng(1)
        self.answered: dict[str, int] = {}
        self.most_running = 0
        self._done = dict.fromkeys((*LINKS, EXEC), 0)
        self._results: dict[int, bytes] = {}
        self._num_steps = self._num_reqs = 0

    def prompt(self, length: int) -> np.ndarray:
        return self.rng.integers(1, 1000, length, dtype=np.int32)

    def request(self, prompt: np.ndarray, num_tokens: int, cache: str = "") -> TokenizedGenerateReqInput:
        self._num_reqs += 1
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)
        return TokenizedGenerateReqInput(
            rid=f"r{self._num_reqs}", input_ids=ids_to_bytes(prompt), sampling_params=params, cache=cache
        )

    def step(self, *new: TokenizedGenerateReqInput) -> bool:
        """Whether anything was begun, or another step is due: else there is none."""
        scheduler, self._num_steps = self.scheduler, self._num_steps + 1
        results, self._results = self._results, {}
        decision = scheduler.step(
            StepInputs(
                step=self._num_steps,
                now=Seconds(self._num_steps / 1000),
                new=new,
                done=dict(self._done),
                results=results,
            )
        )
        scheduler.check_invariants()
        for op in decision.ops:
            self._done[op.ticket.link] += 1
        if (launch := decision.launch) is not None:
            self._done[EXEC] += 1
            num_sampled = int(launch.samples.sum())
            self._results[launch.seq] = np.full(num_sampled, 1000 + self._num_steps, np.int32).tobytes()
        for output in decision.outputs:
            if output.finish_reason is not None:
                assert output.finish_reason.type == "length", output
                self.answered[output.rid] = output.completion_tokens
        self.most_running = max(self.most_running, len(scheduler.queues.active()))
        return bool(decision.ops or decision.launch) or scheduler.wake_at is not None

    def run(self, *new: TokenizedGenerateReqInput) -> None:
        """Until all are answered."""
        self.step(*new)
        while self.scheduler.num_reqs:
            goes_on = self.step()
            assert goes_on or not self.scheduler.num_reqs, f"{self.scheduler.queues.active()} do not go on"
            assert self._num_steps < 20_000, "they take each other's memory again and again"


@pytest.mark.parametrize("insert_at", ["launch", "completion"])
@pytest.mark.parametrize("cache", ["", "no_store", "bypass"])
def test_one_request_of_any_length_ends_in_the_smallest_pool(cache: str, insert_at: str) -> None:
    driver = Driver(insert_at=insert_at)
    prefix = driver.prompt(150)
    driver.run(driver.request(prefix, 1))
    driver.run(driver.request(np.concatenate((prefix, driver.prompt(1500))), 900, cache))
    assert driver.answered == {"r1": 1, "r2": 900}
    assert driver.scheduler.counters["evicted_tokens_windowed"] > 0


def test_a_prompt_that_may_not_enter_the_tree_goes_on() -> None:
    """It leaves a document in the middle that another request locks, and which is partial there."""
    driver = Driver(510, chunked_prefill_size=200)
    document = driver.prompt(900)
    driver.step(driver.request(document, 200))
    for _ in range(40):
        driver.step()
    driver.run(driver.request(np.concatenate((document[:100], driver.prompt(1300))), 5))
    assert driver.answered == {"r1": 200, "r2": 5}


def test_frames_of_pages_that_the_device_has_given_up_come_back_at_once() -> None:
    cache = Driver().scheduler.cache
    assert cache.windowed.pool is not None
    pages = cache.take_free(cache.windowed.pool.table.num_pages)
    assert not cache.windowed.make_room(1)
    cache.device.free_after(pages, FrameState.HELD, NO_LAUNCH)
    assert cache.windowed.make_room(1)


def test_a_scheduler_that_is_restored_goes_on_with_its_pool() -> None:
    driver = Driver(num_host_pages=200)
    driver.step(driver.request(driver.prompt(400), 100))
    for _ in range(60):
        driver.step()
    driver.scheduler = restored(snapshot(driver.scheduler))
    driver.run()
    assert driver.answered == {"r1": 100}


@pytest.mark.parametrize("max_ahead", [1, 2])
@pytest.mark.parametrize("cache", ["", "no_store"])
def test_many_that_do_not_fit_end_all_the_same(cache: str, max_ahead: int) -> None:
    driver = Driver(330, max_ahead=max_ahead)
    document = driver.prompt(400)
    driver.step(driver.request(document, 600))
    for _ in range(60):
        driver.step()
    branches = [np.concatenate((document[: 30 + 10 * i], driver.prompt(50))) for i in range(6)]
    driver.run(*(driver.request(branch, 150, cache) for branch in branches))
    assert set(driver.answered.values()) == {600, 150} and len(driver.answered) == 7


def test_as_many_run_as_share_what_windows_see() -> None:
    """Each has 20 tokens of its own behind a prefix that all see, and not a window each."""
    driver = Driver(REACH + 2 * 20 + 12 * 30)
    prefix = driver.prompt(200)
    driver.run(driver.request(prefix, 1))
    driver.run(*(driver.request(np.concatenate((prefix, driver.prompt(10))), 10) for _ in range(12)))
    assert driver.most_running == 12 and not driver.scheduler.counters["retracted_reqs"]


def test_requests_wait_where_each_needs_a_window_of_its_own() -> None:
    driver = Driver(2 * 60 + 2 * 20)
    driver.run(*(driver.request(driver.prompt(200), 100) for _ in range(6)))
    assert driver.most_running == 2 and not driver.scheduler.counters["retracted_reqs"]
