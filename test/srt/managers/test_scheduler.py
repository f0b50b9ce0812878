"""The scheduler by hand: inputs in, decisions out, with exact numbers. No executor, no links."""

from __future__ import annotations

import numpy as np
import pytest

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, bytes_to_ids, ids_to_bytes
from sglang.srt.managers.schedule_batch import FAILURE_LIMIT, BatchDecision, Span, SpanSource, StepInputs
from sglang.srt.managers.scheduler import FAILURE_WITHOUT_LOADS, Scheduler, SchedulerConfig
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.transfer import D2H, EXEC, FRAME_TIERS, H2D, Ticket, Tier
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.sampling.sampling_params import SamplingParams

CONFIG = SchedulerConfig(
    write_policy="write_through",
    page_size=1,
    num_device_pages=64,
    num_host_pages=0,
    page_bytes=8,
    context_len=60,
    eos_token_ids=(2,),
)


def config(**changes: object) -> SchedulerConfig:
    return SchedulerConfig(**{**CONFIG.__dict__, **changes})  # type: ignore[arg-type]


def request(rid: str, prompt: list[int], max_new_tokens: int = 8, **params: object) -> TokenizedGenerateReqInput:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, sampling_seed=0, **params)  # type: ignore[arg-type]
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(prompt), sampling_params=sampling, stream=True)


class Driver:
    """Counts completions, so that a test only says what completes."""

    def __init__(self, **changes: object) -> None:
        self.scheduler = Scheduler(config(**changes))
        self.done = {EXEC: 0, H2D: 0, D2H: 0}
        self.num_steps = 0

    def step(
        self,
        *new: TokenizedGenerateReqInput,
        results: dict[int, list[int]] | None = None,
        fail: dict[str, int] | None = None,
        ops: dict[str, int] | None = None,
        aborts: tuple[str, ...] = (),
        flush: tuple[str, ...] = (),
    ) -> BatchDecision:
        """results: launch -> tokens; ops: link -> how many operations end; fail: link -> the number that failed."""
        results = results or {}
        self.done[EXEC] = max([self.done[EXEC], *(seq + 1 for seq in results)])
        for link, n in (ops or {}).items():
            self.done[link] += n
        for link, seq in (fail or {}).items():
            self.done[link] = seq + 1
        decision = self.scheduler.step(
            StepInputs(
                step=self.num_steps,
                now=0.0,
                new=new,
                aborts=aborts,
                done=dict(self.done),
                failed=fail or {},
                results={seq: ids_to_bytes(tokens) for seq, tokens in results.items()},
                flush=flush,
            )
        )
        self.num_steps += 1
        self.scheduler.check_invariants()
        return decision


def test_launches_that_are_over_are_forgotten_without_any_tier() -> None:
    driver = Driver()
    driver.step(request("a", [5, 6, 7], max_new_tokens=40, ignore_eos=True))
    for seq in range(30):
        driver.step(results={seq: [7]})
    assert driver.scheduler.clock.done == 30
    assert len(driver.scheduler.planner.expected.launches._issued) == 1


def test_a_request_from_prompt_to_end() -> None:
    driver = Driver()
    first = driver.step(request("a", [5, 6, 7], max_new_tokens=3)).launch
    assert first is not None and first.seq == 0 and first.mode == LaunchMode.EXTEND
    assert first.input_ids.tolist() == [5, 6, 7] and first.starts.tolist() == [0] and first.samples.tolist() == [True]
    assert [(r.slot, r.first_page, r.frames.tolist(), r.fresh) for r in first.page_runs] == [
        (0, 0, [], True),
        (0, 0, [0, 1, 2], False),
    ]
    # One step ahead: the token that launch 0 samples is not known yet.
    second = driver.step().launch
    assert second is not None and second.mode == LaunchMode.DECODE
    assert second.input_ids.tolist() == [-1] and second.starts.tolist() == [3]
    # Two launches are out: no third.
    assert driver.step().launch is None
    third = driver.step(results={0: [9]})
    assert third.launch is not None and third.launch.input_ids.tolist() == [-1]
    assert bytes_to_ids(third.outputs[0].output_ids).tolist() == [9]
    # Three tokens are asked for and on their way: nothing more to launch.
    assert driver.step(results={1: [10]}).launch is None
    last = driver.step(results={2: [11]})
    assert bytes_to_ids(last.outputs[0].output_ids).tolist() == [11]
    reason = last.outputs[0].finish_reason
    assert reason is not None and reason.type == "length" and reason.length == 3
    # The last token's KV was never computed; the other five are cached.
    assert driver.scheduler.cache.tree.resident_pages(Tier.DEVICE) == 5
    assert driver.scheduler.num_reqs == 0


def test_end_of_sequence_ends_a_request_and_the_step_ahead_is_ignored() -> None:
    driver = Driver()
    driver.step(request("a", [5, 6], max_new_tokens=8))
    driver.step()
    ended = driver.step(results={0: [2]})
    reason = ended.outputs[0].finish_reason
    assert reason is not None and (reason.type, reason.matched) == ("stop", 2)
    assert driver.scheduler.num_reqs == 0
    assert driver.step(results={1: [7]}).outputs == ()
    assert (
        driver.scheduler.cache.device.counts[FrameState.HELD]
        == driver.scheduler.cache.device.counts[FrameState.PENDING_FREE]
        == 0
    )


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"stop_token_ids": (4,)}])
def test_stop_token_ids_and_ignore_eos(params: dict[str, object]) -> None:
    driver = Driver()
    driver.step(request("a", [5, 6], max_new_tokens=4, **params))
    driver.step()
    token = 4 if "stop_token_ids" in params else 2
    reason = driver.step(results={0: [token]}).outputs[0].finish_reason
    assert (reason is None) == ("ignore_eos" in params)


def test_long_prompts_come_in_chunks_with_decode_steps_between() -> None:
    driver = Driver(chunked_prefill_size=4, page_size=2, num_device_pages=32)
    driver.step(request("short", [1, 2, 3], max_new_tokens=20, ignore_eos=True))
    driver.step(request("long", list(range(3, 14)), ignore_eos=True))
    launches = []
    tokens: dict[int, list[int]] = {0: [1], 1: []}
    for _ in range(8):
        decision = driver.step(results=tokens)
        tokens = {}
        launch = decision.launch
        if launch is not None:
            launches.append((launch.mode.name, launch.starts.tolist(), launch.lens.tolist()))
            tokens = {launch.seq: [1] * int(launch.samples.sum())}
    assert [kind for kind, _, _ in launches[:5]] == ["DECODE", "EXTEND", "DECODE", "EXTEND", "DECODE"]
    assert [(s, n) for kind, s, n in launches if kind == "EXTEND"] == [([4], [4]), ([8], [3])]


def test_a_prefix_on_the_device_is_not_computed_again() -> None:
    driver = Driver()
    driver.step(request("a", [5, 6, 7, 8], max_new_tokens=1))
    driver.step(results={0: [9]})
    launch = driver.step(request("b", [5, 6, 7, 1, 1], max_new_tokens=1)).launch
    assert launch is not None and launch.starts.tolist() == [3] and launch.input_ids.tolist() == [1, 1]
    assert launch.page_runs[0].frames.tolist() == [0, 1, 2]
    assert driver.scheduler.queues.active()[0].plan == (
        Span(0, 3, SpanSource.DEVICE),
        Span(3, 5, SpanSource.COMPUTE),
    )


def test_requests_in_one_batch_share_what_the_first_of_them_computes() -> None:
    driver = Driver()
    launch = driver.step(request("a", [5, 6, 7, 8]), request("b", [5, 6, 7, 9])).launch
    assert launch is not None and launch.lens.tolist() == [4, 1]
    assert launch.page_runs[2].frames.tolist() == [0, 1, 2]


def test_namespaces_do_not_share() -> None:
    driver = Driver()
    driver.step(request("a", [5, 6, 7, 8], max_new_tokens=1))
    driver.step(results={0: [9]})
    tenant = TokenizedGenerateReqInput(
        rid="b", input_ids=ids_to_bytes([5, 6, 7, 8]), sampling_params=SamplingParams(), extra_key="tenant"
    )
    launch = driver.step(tenant).launch
    assert launch is not None and launch.starts.tolist() == [0]


def evicted_to_host() -> Driver:
    """[5..14] was computed, backed up and evicted from a device of 16 pages."""
    driver = Driver(num_device_pages=16, num_host_pages=40, context_len=16)
    first = driver.step(request("a", list(range(5, 15)), max_new_tokens=1, ignore_eos=True))
    (backup,) = first.ops
    assert backup.ticket == Ticket(D2H, 0) and backup.after == 0
    driver.step(results={0: [1]}, ops={D2H: 1})
    driver.step(request("b", list(range(30, 43)), max_new_tokens=1, ignore_eos=True))
    driver.step(results={1: [1]}, ops={D2H: 1})
    return driver


def test_a_prefix_on_the_host_is_loaded_while_the_rest_is_computed() -> None:
    driver = evicted_to_host()
    decision = driver.step(request("c", list(range(5, 15)) + [1], max_new_tokens=1))
    load, launch = decision.ops[0], decision.launch
    assert load.ticket == Ticket(H2D, 0) and load.after is None
    assert launch is not None and launch.gates == (Ticket(H2D, 0),)
    (req,) = driver.scheduler.queues.active()
    assert [(s.source, s.ticket) for s in req.plan][-2:] == [
        (SpanSource.LOAD, Ticket(H2D, 0)),
        (SpanSource.COMPUTE, None),
    ]
    done = driver.step(results={2: [1]}, ops={H2D: 1})
    details = done.outputs[0].cached_tokens_details
    assert details["host"] > 0 and sum(details.values()) == 10


def test_a_failed_load_requeues_its_readers_and_forgets_the_source() -> None:
    driver = evicted_to_host()
    driver.step(request("c", list(range(5, 15)) + [1], max_new_tokens=1))
    # The pool is small: what the request held comes back only when the launch that waits for the load is over.
    assert driver.step(fail={H2D: 0}).launch is None
    assert driver.scheduler.counters["failed_ops"] == 1
    # That launch fails too. Nothing of the load is left on either tier, and the next launch computes it.
    after = driver.step(fail={EXEC: 2}, ops={D2H: 1})
    assert after.reset == 3 and after.launch is not None and after.launch.seq == 3
    assert after.launch.gates == () and after.launch.lens.tolist() == [after.launch.input_ids.size]
    assert not [op for op in after.ops if op.ticket.link == H2D]
    done = driver.step(results={3: [1]})
    assert [o.finish_reason.type for o in done.outputs if o.finish_reason] == ["length"]


def test_a_launch_that_fails_again_and_again_ends_its_requests() -> None:
    driver = Driver(max_ahead=1)
    driver.step(request("a", [5, 6, 7]))
    outputs = []
    for seq in range(FAILURE_LIMIT // FAILURE_WITHOUT_LOADS):
        outputs += driver.step(fail={EXEC: seq}).outputs
    (output,) = outputs
    assert output.finish_reason is not None
    assert (output.finish_reason.type, output.finish_reason.status_code) == ("abort", 500)
    assert driver.scheduler.num_reqs == 0


def test_a_failed_launch_takes_what_it_published_out_of_the_tree() -> None:
    driver = Driver()
    driver.step(request("a", [5, 6, 7, 8], max_new_tokens=1))
    assert driver.scheduler.cache.tree.resident_pages(Tier.DEVICE) == 4
    driver.step(fail={EXEC: 0}, aborts=("a",))
    assert driver.scheduler.cache.tree.resident_pages(Tier.DEVICE) == 0


def test_the_youngest_is_retracted_and_waits_until_its_worst_case_fits() -> None:
    driver = Driver(num_device_pages=24, context_len=23, new_token_ratio=0.0, max_ahead=1)
    driver.step(
        request("old", [5, 6, 7, 8], max_new_tokens=16, ignore_eos=True),
        request("young", [9, 10, 11, 12], max_new_tokens=16, ignore_eos=True),
    )
    results = {0: [1, 1]}
    for _ in range(200):
        decision = driver.step(results=results)
        results = {}
        if decision.launch is not None:
            results = {decision.launch.seq: [1] * int(decision.launch.samples.sum())}
        if not driver.scheduler.num_reqs:
            break
    assert driver.scheduler.num_reqs == 0
    assert driver.scheduler.counters["retracted_reqs"] == 1


def test_aborts_wherever_the_request_is() -> None:
    driver = Driver(max_running_requests=1, chunked_prefill_size=2)
    driver.step(request("running", [5, 6]), request("waiting", [7, 8]))
    decision = driver.step(request("new", [1]), aborts=("waiting", "running", "new", "unknown"))
    assert {o.rid: o.finish_reason.type for o in decision.outputs if o.finish_reason} == {
        "waiting": "abort",
        "running": "abort",
        "new": "abort",
    }
    assert driver.scheduler.num_reqs == 0
    driver.step(results={0: [1]})
    assert driver.scheduler.cache.device.counts[FrameState.PENDING_FREE] == 0


@pytest.mark.parametrize("prompt", [[], list(range(60))])
def test_prompts_that_never_fit_are_refused_with_numbers(prompt: list[int]) -> None:
    decision = Driver().step(request("a", prompt))
    reason = decision.outputs[0].finish_reason
    assert reason is not None and reason.status_code == 400
    assert str(len(prompt)) in str(reason.message) and "59" in str(reason.message)


def test_flush_empties_an_idle_cache_and_refuses_otherwise() -> None:
    driver = Driver(num_host_pages=100)
    driver.step(request("a", [5, 6, 7, 8], max_new_tokens=1))
    (reply,) = driver.step(flush=("f",)).replies
    assert not reply.success and "1 request" in reply.message
    driver.step(results={0: [1]}, ops={D2H: 1})
    (reply,) = driver.step(flush=("f",)).replies
    assert reply.success
    for tier in FRAME_TIERS:
        assert driver.scheduler.cache.tree.resident_pages(tier) == 0
    for table in driver.scheduler.cache.tables.values():
        assert table.counts[FrameState.FREE] == table.num_pages


def test_equal_inputs_give_equal_bytes() -> None:
    def run() -> list[bytes]:
        driver = Driver(num_host_pages=40)
        decisions = [driver.step(request("a", [5, 6, 7, 8]), request("b", [5, 6, 1]))]
        decisions += [driver.step(), driver.step(results={0: [1, 3]}), driver.step(results={1: [4, 2]})]
        return [decision.encode() for decision in decisions]

    assert run() == run()


def test_chunks_below_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="--chunked-prefill-size"):
        Scheduler(config(page_size=16, chunked_prefill_size=8))


def test_token_outputs_of_a_quiet_request_come_in_groups() -> None:
    driver = Driver(num_device_pages=400, context_len=300, max_ahead=1)
    quiet = TokenizedGenerateReqInput(
        rid="a",
        input_ids=ids_to_bytes([5]),
        sampling_params=SamplingParams(max_new_tokens=150, temperature=0.0, ignore_eos=True),
    )
    decision = driver.step(quiet)
    sizes = []
    while driver.scheduler.num_reqs:
        assert decision.launch is not None
        decision = driver.step(results={decision.launch.seq: [7]})
        sizes += [len(bytes_to_ids(o.output_ids)) for o in decision.outputs]
    assert sizes == [64, 64, 22]
    assert np.sum(sizes) == 150


def test_failures_between_which_a_request_moves_on_do_not_add_up() -> None:
    driver = Driver(max_ahead=1)
    decision = driver.step(request("a", [5, 6, 7], max_new_tokens=6, ignore_eos=True))
    ends = []
    for turn in range(20):
        assert decision.launch is not None
        seq = decision.launch.seq
        decision = driver.step(fail={EXEC: seq}) if turn % 2 else driver.step(results={seq: [4]})
        ends += [o.finish_reason.type for o in decision.outputs if o.finish_reason]
        if ends:
            break
    assert (
        ends == ["length"] and driver.scheduler.counters["failed_launches"] > FAILURE_LIMIT // FAILURE_WITHOUT_LOADS
    )


def test_a_request_counts_once_for_what_it_uses_however_often_it_starts() -> None:
    driver = Driver(num_device_pages=24, context_len=40, new_token_ratio=0.0)
    driver.step(request("first", [5, 6, 7, 8], max_new_tokens=1))
    driver.step(results={0: [9]})
    (node,) = driver.scheduler.cache.tree.match("", np.array([5, 6, 7, 8], np.int32)).path
    assert node.hits == 1
    # It waits for memory, step after step.
    driver.step(request("long", list(range(20, 38)), max_new_tokens=1))
    driver.step(request("again", [5, 6, 7, 8, 9, 10, 11], max_new_tokens=2))
    driver.step()
    assert node.hits == 1
    driver.step(results={1: [9]})
    assert driver.scheduler.cache.tree.match("", np.array([5, 6, 7, 8], np.int32)).path[0].hits == 2
