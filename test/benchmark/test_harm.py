"""The gate "do no harm": that it can fail, and its short form, healthy links at all speeds on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from benchmark.harm import (
    ADDITIONS,
    CONDITIONS,
    SPEEDS,
    TIMEOUTS,
    WORKLOADS,
    Case,
    ServerRun,
    all_cases,
    hangs_of,
    health_of,
    judge,
    row_of,
    run_case,
    run_server,
    workload_of,
)

from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.peer.memory.copy_session import COPY_TIMEOUT_S

CASE = Case((Tier.DEVICE, Tier.HOST), Tier.DISK, 1.0, "healthy", "documents")
BASE = ServerRun(
    ttft_s=tuple([0.050] * 100),
    tpot_s=tuple([0.010] * 100),
    arrivals_s=tuple(0.5 * n for n in range(100)),
    hit_rate=0.5,
    written={Tier.HOST: 1000},
    computed=1000,
    loaded=500,
    stall_s=0.0,
    counters={},
)


def failing(case: Case, tier: ServerRun, base: ServerRun = BASE) -> set[str]:
    return {verdict.metric for verdict in judge(case, base, tier) if verdict.does_harm}


def test_the_gate_fails_above_five_percent_and_not_below() -> None:
    assert failing(CASE, BASE) == set()
    assert failing(CASE, replace(BASE, ttft_s=tuple([0.0524] * 100))) == set()
    assert failing(CASE, replace(BASE, ttft_s=tuple([0.0526] * 100))) == {"mean TTFT ms", "P99 TTFT ms"}
    assert failing(CASE, replace(BASE, tpot_s=tuple([0.0106] * 100))) == {"mean TPOT ms", "P99 TPOT ms"}
    # Two slow requests of a hundred are the P99, one is not; the mean counts both.
    assert failing(CASE, replace(BASE, ttft_s=(*[0.050] * 98, 0.1, 0.1))) == {"P99 TTFT ms"}
    assert failing(CASE, replace(BASE, ttft_s=(*[0.050] * 99, 0.1))) == set()


def test_an_unanswered_request_fails_the_gate() -> None:
    lost = replace(BASE, ttft_s=(*[0.050] * 99, float("inf")))
    assert failing(CASE, lost) == {"mean TTFT ms"}


def test_a_hang_may_cost_one_timeout_and_no_more() -> None:
    case = replace(CASE, condition="hung", num_requests=100)
    (hang,) = hangs_of(case)
    assert hang.seconds == TIMEOUTS[Tier.DISK] == pytest.approx(1.25)
    # Requests at 10, 10.5, 11, 11.5 and 12 seconds come within twice the timeout.
    assert hang.begin == 10.0
    allowed = 1.05 * 0.050 + 1.25
    for waited, harm in (((allowed,) * 5, set()), ((allowed,) * 6, {"mean TTFT ms"})):
        tier = replace(BASE, ttft_s=(*[0.050] * (100 - len(waited)), *waited))
        assert failing(case, tier) == harm
    assert failing(case, replace(BASE, ttft_s=(*[0.050] * 98, allowed + 0.1, allowed + 0.1))) == {"P99 TTFT ms"}


def test_writes_are_bounded_by_what_is_new_and_by_what_memory_gave_back() -> None:
    writes = {tier: replace(BASE, written={tier: 2400}) for tier in (Tier.HOST, Tier.DISK)}
    assert failing(CASE, writes[Tier.HOST]) == set()
    assert failing(CASE, writes[Tier.DISK]) == {"disk writes per new token"}
    assert failing(CASE, replace(BASE, written={Tier.HOST: 2600})) == {"host writes per new token"}
    assert failing(CASE, replace(BASE, written={Tier.HOST: 2400}, loaded=0)) == {"host writes per new token"}


def test_conditions_of_a_link() -> None:
    outcomes = {c: [health_of(c, Tier.DISK, 10.0).outcome(at, 1.0) for at in (5.0, 10.0)] for c in CONDITIONS}
    assert outcomes == {
        "healthy": [(6.0, True), (11.0, True)],
        "slow": [(6.0, True), (20.0, True)],
        "hung": [(6.0, True), (float("inf"), True)],
        "flapping hangs": [(6.0, True), (11.5, True)],
        "flapping fails": [(6.0, True), (11.0, False)],
    }
    until = 10.0 + COPY_TIMEOUT_S
    assert health_of("hung", Tier.PEER, 10.0).outcome(10.0, 1.0) == (until, False)
    assert health_of("hung", Tier.PEER, 10.0).outcome(until, 1.0) == (until + 1.0, True)


def test_all_cases_are_different_and_cover_every_combination() -> None:
    cases = list(all_cases())
    combinations = len(ADDITIONS) * len(SPEEDS) * len(CONDITIONS) * len(WORKLOADS)
    assert len(cases) == len({case.name for case in cases}) == combinations + len(ADDITIONS)
    assert {case.page_size for case in cases} == {16, 1}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_both_servers_get_the_same_requests(workload: str) -> None:
    case = short(CASE.base, CASE.added, 1.0, workload)
    others = replace(case, speed=100.0, condition="slow").requests()
    for requests, same in zip(case.requests(), others, strict=True):
        assert requests is same
        prompts = {each.context.tobytes() for each in requests.conversations}
        assert (len(prompts) == len(requests.conversations)) == (workload != "documents")


def test_a_case_is_judged_by_all_its_workloads() -> None:
    case = replace(CASE, num_requests=20, workload="chats")
    together = run_server(case.machine, case.requests())
    apart = [run_server(case.machine, [workload]) for workload in case.requests()]
    assert len(apart) == case.num_workloads > 1 and len({run.arrivals_s for run in apart}) == len(apart)
    assert together.ttft_s == sum((run.ttft_s for run in apart), ())
    assert together.computed == sum(run.computed for run in apart) and together.computed > 0
    assert together.written == {tier: sum(run.written[tier] for run in apart) for tier in together.written}


def test_writes_are_counted_by_the_tier_that_takes_them() -> None:
    """Four prompts of 33 whole pages, of which storage takes the whole blocks of 64 tokens."""
    run = run_server(CASE.machine, [workload_of("unique", CASE.machine.sum_tokens, 4, seed=3)])
    assert run.written == {Tier.HOST: 4 * 33 * 16, Tier.DISK: 4 * 8 * 64}
    assert run.computed == 4 * (520 + 15)


# -- the short form -------------------------------------------------------------------------------------------------


def short(base: tuple[Tier, ...], added: Tier, speed: float, workload: str) -> Case:
    num_requests = 100 if workload == "documents" else 50
    return Case(base, added, speed, "healthy", workload, num_requests=num_requests, num_workloads=1, scale=2)


# Those of `make test`; the others are in `make test-all`.
QUICK = {"documents": (100.0, 1.0, 0.01), "chats": (0.01,), "unique": (100.0, 0.01)}
# What does harm today, by workload: base and added tier -> speeds. A repair takes its cases from here. With one seed
# much of it is the order of things: of those beside peers, a host and a disk, none with `unique` and none with
# `documents` at 0.1 and 0.01 exceeds its limits of time to first token in the whole gate, which has three seeds and
# six times the requests. Of peers alone at 10 with `unique`, five seeds had -22 to +36 % of the mean time per token.
# Of those beside a disk, three seeds exceed a limit with `documents` at 0.1 and with `unique` at 0.01.
KNOWN_HARM: dict[str, dict[str, tuple[float, ...]]] = {
    "documents": {"device+host+peer": (0.1, 0.01), "device+host+disk+peer": (1.0, 0.1)},
    "chats": {},
    "unique": {
        "device+host": (100.0, 10.0),
        "device+peer": (10.0,),
        "device+host+peer": (0.1, 0.01),
        "device+host+disk": (1.0,),
        "device+host+remote+disk": (1.0,),
        "device+host+disk+peer": (1.0, 0.1, 0.01),
    },
}


def short_cases() -> Iterator[Any]:
    for workload in WORKLOADS:
        for base, added in ADDITIONS:
            tiers = "+".join(tier.name.lower() for tier in (*base, added))
            for speed in SPEEDS:
                marks = [] if speed in QUICK[workload] else [pytest.mark.slow]
                if speed in KNOWN_HARM[workload].get(tiers, ()):
                    marks.append(pytest.mark.xfail(strict=True, raises=AssertionError, reason="does harm today"))
                case = short(base, added, speed, workload)
                yield pytest.param(case, id=f"{workload}, {tiers}, {speed:g}", marks=marks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", list(short_cases()))
def test_a_healthy_tier_does_no_harm(case: Case) -> None:
    verdicts, base, tier = run_case(case)
    assert [verdict for verdict in verdicts if verdict.does_harm] == []
    assert not row_of(verdicts, base, tier)["does harm"]
