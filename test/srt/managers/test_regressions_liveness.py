"""Steps after which a request waited and nothing was on its way that would have caused another step."""

from __future__ import annotations

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision, EndReason, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.transfer import D2H, EXEC, H2D, Tier
from sglang.srt.sampling.sampling_params import SamplingParams


def request(rid: str, prompt: list[int], max_new_tokens: int) -> TokenizedGenerateReqInput:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, sampling_seed=0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(prompt), sampling_params=sampling)


class Driver:
    """A scheduler without a host tier, whose launches complete when a test says so."""

    def __init__(self, **changes: int) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                **{  # type: ignore[arg-type]
                    "page_size": 1,
                    "num_device_pages": 24,
                    "num_host_pages": 0,
                    "page_bytes": 8,
                    "context_len": 24,
                    "new_token_ratio": 0.0,
                    "max_ahead": 1,
                    **changes,
                }
            )
        )
        self.num_steps = 0
        self.decision = BatchDecision(step=-1)

    def step(self, *new: TokenizedGenerateReqInput, aborts: tuple[str, ...] = ()) -> BatchDecision:
        """Completes every launch so far; each request samples token 1."""
        launch = self.decision.launch
        results = {}
        if launch is not None:
            results = {launch.seq: ids_to_bytes([1] * int(launch.samples.sum()))}
        done = {EXEC: self.scheduler.clock.next, H2D: 0, D2H: 0}
        self.decision = self.scheduler.step(
            StepInputs(step=self.num_steps, now=0.0, new=new, aborts=aborts, done=done, results=results)
        )
        self.num_steps += 1
        self.scheduler.check_invariants()
        waits = self.scheduler.num_reqs and self.scheduler.clock.done == self.scheduler.clock.next
        assert not waits, "requests wait and nothing is on its way"
        return self.decision


def test_memory_of_an_aborted_request_is_there_for_the_next_one_at_once() -> None:
    driver = Driver(enable_radix_cache=False)
    driver.step(request("a", list(range(10, 25)), max_new_tokens=8))
    driver.step(request("b", list(range(30, 52)), max_new_tokens=1))
    assert [r.rid for r in driver.scheduler.queues.active()] == ["a"]
    # The last launch has completed, so that nothing else will cause a step.
    driver.step(aborts=("a",))
    assert [r.rid for r in driver.scheduler.queues.active()] == ["b"]


def test_a_prompt_goes_on_when_all_younger_requests_have_been_retracted() -> None:
    driver = Driver(chunked_prefill_size=2)
    scheduler = driver.scheduler
    driver.step(request("old", list(range(10, 27)), max_new_tokens=4), request("young", [40], max_new_tokens=22))
    while not any(req.rid == "young" for req in scheduler.queues.running):
        driver.step()
    # As after a failed load: the older request starts again, behind the younger one, and nothing of it is cached.
    old = scheduler.queues.active()[0]
    scheduler.end_hold(old, EndReason.LOST)
    first = next(node for node in scheduler.cache.tree.walk() if node.key[0] == 10)
    scheduler.cache.controller.drop(first, Tier.DEVICE)
    scheduler._requeue(old)
    while scheduler.num_reqs:
        driver.step()
    assert scheduler.counters["retracted_reqs"] == 1


def test_a_retracted_request_computes_again_neither_its_prompt_nor_its_answer() -> None:
    driver = Driver()
    scheduler = driver.scheduler
    driver.step(request("a", list(range(10, 15)), max_new_tokens=16))
    for _ in range(8):
        driver.step()
    (req,) = scheduler.queues.active()
    assert req.num_known == 5 + 8
    scheduler.end_hold(req, EndReason.RETRACT)
    scheduler._requeue(req)
    launch = driver.step().launch
    assert launch is not None and launch.starts.tolist() == [req.num_known - 1]
