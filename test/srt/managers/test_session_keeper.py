"""Sessions in the whole scheduler: what stays for them, what they may not take; no answer depends on them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.soak import Soak
from support.soak_config import SoakConfig

TURN = 30
SINGLES_BETWEEN = 12


def request(rid: str, first: int, num_tokens: int, session: str = "", **fields: str) -> TokenizedGenerateReqInput:
    """Tokens that count up from `first`."""
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=ids_to_bytes(range(first, first + num_tokens)),
        sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        session_id=session,
        **fields,
    )


def simulation(num_host_pages: int = 0) -> Simulation:
    config = SchedulerConfig(
        page_size=1, num_device_pages=300, num_host_pages=num_host_pages, page_bytes=1, context_len=290
    )
    return Simulation(config, SimulatedHardware(4, lambda launch: 1e-3 * int(launch.lens.sum())))


def turns_and_singles(
    num_turns: int, session: str, singles: str = ""
) -> list[tuple[float, TokenizedGenerateReqInput]]:
    """A prompt that returns, and between its turns so many single ones that plain LRU has lost it. singles: begins
    the name of the session that each of them claims."""
    sent = []
    for turn in range(num_turns):
        sent.append(request(f"turn {turn}", 0, TURN, session))
        for i in range(SINGLES_BETWEEN):
            number = turn * SINGLES_BETWEEN + i
            claimed = f"{singles}{number}" if singles else ""
            sent.append(request(f"single {number}", 1000 + 100 * number, TURN, claimed))
    return [(float(i), each) for i, each in enumerate(sent)]


def hits(sim: Simulation) -> int:
    counters = sim.core.scheduler.counters
    return counters["hit_tokens_device"] + counters["hit_tokens_host"]


def run(sim: Simulation, arrivals: list[tuple[float, TokenizedGenerateReqInput]]) -> Simulation:
    def check(decision: BatchDecision) -> None:
        if decision.step % 64 == 0:
            sim.core.scheduler.check_invariants()

    sim.run(arrivals, after_step=check)
    return sim


def test_a_session_is_found_where_plain_lru_has_lost_it() -> None:
    assert hits(run(simulation(), turns_and_singles(12, ""))) == 0
    sim = run(simulation(), turns_and_singles(12, "agent"))
    assert hits(sim) > 8 * (TURN - 1)
    assert sim.core.scheduler.counters["session_kept_tokens"] > 0


def test_a_session_is_found_on_the_host() -> None:
    """Device and host together lose it too, without a name."""
    longer = [
        (at, each)
        for at, each in turns_and_singles(16, "agent")
        if not each.rid.startswith("turn") or int(each.rid[5:]) % 2 == 0
    ]
    unnamed = [(at, msgspec.structs.replace(each, session_id="")) for at, each in longer]
    assert hits(run(simulation(300), unnamed)) == 0
    assert hits(run(simulation(300), longer)) > 3 * (TURN - 1)


def test_an_abandoned_session_leaves() -> None:
    """No later than twice the age at which others do: a weight is no pin."""
    sim = run(simulation(), turns_and_singles(12, "agent"))
    tree = sim.core.scheduler.cache.tree
    kept = next(node for node in tree.walk() if node.key[0] == 0)
    age = sim.core.scheduler.cache.sessions.ages[Tier.DEVICE].launches
    assert kept.weighted_until is not None and age > 0
    assert kept.weighted_until[Tier.DEVICE] - kept.last_access <= age
    more = [request(f"more {i}", 50_000 + 100 * i, TURN) for i in range(SINGLES_BETWEEN * 3)]
    sim.run([(sim.now + i, each) for i, each in enumerate(more)])
    assert all(node.key[0] != 0 for node in tree.walk())


def test_everything_can_be_evicted_under_pressure() -> None:
    sim = run(simulation(), turns_and_singles(12, "agent"))
    times = sim.run([(sim.now, request("all", 70_000, 289))])
    assert times["all"].finish_reason == "length"


@pytest.mark.slow
def test_sessions_that_never_return_displace_nothing() -> None:
    """Each single prompt claims a session of its own: the one that returns stays as well as without the claims."""
    honest = hits(run(simulation(), turns_and_singles(40, "agent")))
    claimed = run(simulation(), turns_and_singles(40, "agent", singles="claimed "))
    assert hits(claimed) >= 0.8 * honest > 0


def test_a_session_is_a_hint_and_shares_nothing() -> None:
    """Equal names with different salts share no tokens, and different names share what they have in common."""
    sim = simulation()
    apart = [request("a", 0, 20, "one", extra_key="x"), request("b", 0, 20, "one", extra_key="y")]
    sim.run([(float(i), each) for i, each in enumerate(apart)])
    assert hits(sim) == 0
    sim.run([(sim.now, request("c", 0, 20, "two", extra_key="x"))])
    assert hits(sim) == 19


def test_requests_that_leave_nothing_in_the_cache_are_no_turns() -> None:
    sim = simulation()
    sim.run([(0.0, request("a", 0, 20, "one", cache="no_store")), (1.0, request("b", 0, 20, "one", cache="bypass"))])
    assert sim.core.scheduler.state()["sessions"]["known"] == 0


def test_forks_share_the_largest_weight() -> None:
    """Two sessions with a common front: its nodes weigh as much as the heavier of them."""
    sim = simulation()
    tree = sim.core.scheduler.cache.tree
    sim.run([(0.0, request("a", 0, 30)), (1.0, request("b", 0, 20))])
    fork = request("c", 0, 20)
    fork = msgspec.structs.replace(fork, input_ids=fork.input_ids + ids_to_bytes([900, 901, 902]))
    sim.run([(sim.now, fork)])
    front = next(node for node in tree.walk() if node.start == 0)
    short, long = sorted(front.children.values(), key=lambda node: len(node.key))
    tree.weight(long, (50, 50, 50))
    tree.weight(short, (40, 60, 40))
    tree.check_invariants()
    assert front.weighted_until == (50, 60, 50)
    tree.split(front, 10)
    tree.check_invariants()


class NamingSoak(Soak):
    """Requests name one of three sessions, or none."""

    num_named = 0

    def _new_request(self) -> TokenizedGenerateReqInput:
        self.num_named += 1
        name = ("", "a", "b", "c")[self.num_named % 4]
        return msgspec.structs.replace(super()._new_request(), session_id=name)


@pytest.mark.parametrize("seed", [201, *(pytest.param(n, marks=pytest.mark.slow) for n in range(300, 330))])
def test_no_token_depends_on_sessions_and_ranks_decide_alike(seed: int) -> None:
    """The soak compares every token, all ranks' decisions and the bytes of all pages."""
    print(f"seed {seed}")
    soak = NamingSoak(replace(SoakConfig.draw(seed, 60), arrival_rate=0.2))
    soak.run()
    assert soak.num_named


def test_a_turn_that_starts_with_the_next_launch_has_waited_for_one() -> None:
    sim = simulation()
    sim.run([(float(i), request(f"{i}", 100 * i, 20, "one")) for i in range(3)])
    assert list(sim.core.scheduler.cache.sessions.table._waits) == [1, 1, 1]
