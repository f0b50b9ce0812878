"""One request that the engine cannot compute must not take the engine, or its neighbours, with it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from sglang.srt.managers.io_struct import FinishReason, TokenizedGenerateReqInput, bytes_to_ids, ids_to_bytes
from sglang.srt.managers.schedule_batch import EndReason
from sglang.srt.sampling.sampling_params import SamplingParams
from support.hash_model import HashModel
from support.soak_config import SoakConfig
from support.soak_rank import build_rank

CONFIG = SoakConfig(
    seed=1,
    steps=0,
    page_size=1,
    num_device_pages=400,
    num_host_pages=0,
    max_running_requests=8,
    chunked_prefill_size=64,
    max_ahead=2,
    num_ranks=1,
    arrival_rate=0.0,
    abort_rate=0.0,
    link_fail_rate=0.0,
    launch_fail_rate=0.0,
    late_rate=0.0,
)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def request(rid: str, prompt: list[int], seed: int = 0) -> TokenizedGenerateReqInput:
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, sampling_seed=seed, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(prompt), sampling_params=sampling)


def run(*requests: TokenizedGenerateReqInput) -> dict[str, tuple[FinishReason, list[int]]]:
    rank = build_rank(CONFIG, HashModel(), 0, None)
    ends: dict[str, tuple[FinishReason, list[int]]] = {}
    tokens: dict[str, list[int]] = {req.rid: [] for req in requests}
    new = requests
    for _ in range(300):
        rank.emulator.run(1 << 20)
        decision = rank.core.step(0.0, rank.core.progress(), new)
        rank.core.scheduler.check_invariants()
        new = ()
        for output in decision.outputs:
            tokens[output.rid] += bytes_to_ids(output.output_ids).tolist()
            if output.finish_reason is not None:
                ends[output.rid] = output.finish_reason, tokens[output.rid]
        if len(ends) == len(requests):
            return ends
    raise AssertionError(f"only {list(ends)} have ended")


def test_a_request_of_which_no_batch_can_be_made_ends_alone() -> None:
    # A seed that no tensor can hold; the front refuses it, but the engine must not trust that.
    ends = run(request("good", [1, 2, 3]), request("bad", [2, 2, 1], seed=1 << 70), request("late", [1, 1]))
    reason, _ = ends.pop("bad")
    assert (reason.type, reason.status_code) == ("abort", 500)
    model = HashModel()
    for rid, prompt in (("good", [1, 2, 3]), ("late", [1, 1])):
        reason, got = ends[rid]
        assert reason.type == "length" and got == model.generate(np.array(prompt), 6)


def test_what_a_request_had_computed_itself_does_not_count_as_cached() -> None:
    rank = build_rank(CONFIG, HashModel(), 0, None)
    scheduler = rank.core.scheduler
    new = [request("a", [1, 2, 3, 4, 5])]
    outputs = []
    for i in range(100):
        rank.emulator.run(1 << 20)
        outputs += rank.core.step(0.0, rank.core.progress(), new).outputs
        new = []
        if i == 4:
            # As after the failure of a launch that did not write these pages.
            (req,) = scheduler.queues.active()
            scheduler.end_hold(req, EndReason.LOST)
            scheduler._requeue(req)
    assert outputs[-1].finish_reason is not None and outputs[-1].cached_tokens == 0
