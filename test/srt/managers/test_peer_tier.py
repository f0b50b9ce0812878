"""Memory of peers, on a virtual clock: what comes from there takes that link's time, and nothing of the host's."""

from __future__ import annotations

import numpy as np
import pytest
from managers.test_scheduler import Driver

from sglang.simulator.simulation import RequestTimes, SimulatedHardware, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.transfer import D2H, D2P, H2D, P2D, P2H, P2P, Tier
from sglang.srt.model_executor.launch import Launch
from sglang.srt.sampling.sampling_params import SamplingParams

TOKEN_BYTES, LAYERS, TOKEN_S = 100, 4, 1e-3
# Per token: a host load takes as long as computing, one from a peer a tenth of that.
HOST_S, PEER_S = 1e-3, 1e-4


def request(rid: str, tokens: np.ndarray) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(tokens), sampling_params=params)


class Rig:
    def __init__(self, **changes: object) -> None:
        def launch_seconds(launch: Launch) -> float:
            return TOKEN_S * int(launch.lens.sum())

        hardware = SimulatedHardware(
            LAYERS, launch_seconds, h2d_bandwidth=TOKEN_BYTES / HOST_S, p2d_bandwidth=TOKEN_BYTES / PEER_S
        )
        settings = {"page_size": 1, "num_device_pages": 500, "num_host_pages": 2000, "context_len": 450}
        settings |= {"page_bytes": TOKEN_BYTES, "num_peer_pages": 2000, "load_or_recompute": False}
        settings |= {"write_policy": "write_through", **changes}
        self.sim = Simulation(SchedulerConfig(**settings), hardware)  # type: ignore[arg-type]
        self.scheduler = self.sim.core.scheduler

    def run(self, *requests: TokenizedGenerateReqInput) -> dict[str, RequestTimes]:
        times = self.sim.run([(self.sim.now, each) for each in requests])
        self.scheduler.check_invariants()
        return times

    def evict(self, tier: Tier) -> None:
        self.scheduler.cache.controller.evict(tier, 10**6)
        self.run(request(f"after {tier.name} {self.sim.now}", np.array([1, 2], np.int32)))
        self.scheduler.check_invariants()


def document(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 10_000, n).astype(np.int32)


@pytest.mark.parametrize(("num_peer_pages", "wanted_s"), [(2000, 400 * PEER_S), (0, 400 * HOST_S)])
def test_the_nearest_tier_decides_when_the_first_token_comes(num_peer_pages: int, wanted_s: float) -> None:
    rig = Rig(num_peer_pages=num_peer_pages)
    text = document(1, 400)
    rig.run(request("first", text))
    rig.evict(Tier.DEVICE)
    rig.scheduler.counters.clear()
    again = rig.run(request("again", np.concatenate((text, document(2, 4)))))["again"]
    # Four new tokens in four layers: all but the last layer's hide behind the load.
    assert again.ttft == pytest.approx(wanted_s + TOKEN_S, rel=0.05)
    name = "peer" if num_peer_pages else "host"
    assert again.cached_tokens_details[name] == 400 == rig.scheduler.counters[f"hit_tokens_{name}"]
    done = {link: state["operations_done"] for link, state in rig.scheduler.state()["links"].items()}
    assert (done.get(P2D, 0) > 0, done[H2D] > 0) == (name == "peer", name == "host")
    assert set(done) == {H2D, D2H} | ({P2D, D2P, P2H, P2P} if num_peer_pages else set())


def test_what_the_host_had_no_room_for_comes_from_the_peer_behind_nothing() -> None:
    rig = Rig(num_host_pages=100)
    first, second = document(3, 300), document(4, 300)
    rig.run(request("first", first))
    rig.run(request("second", second))
    rig.evict(Tier.DEVICE)
    rig.evict(Tier.HOST)
    times = rig.run(*(request(f"again{i}", np.append(each, 7)) for i, each in enumerate((first, second))))
    assert [times[f"again{i}"].cached_tokens_details["peer"] for i in range(2)] == [300, 300]


def test_loads_from_peers_do_not_make_a_batch_bound_by_loading() -> None:
    """Both questions load 100 times what they compute. The one whose document lies on the host is put off, behind
    what computes; the other is not."""
    order = {}
    for tier in (Tier.PEER, Tier.HOST):
        rig = Rig(load_ratio=1.0, bubble_filling=False, num_device_pages=1000, max_prefill_tokens=40)
        text = document(5, 400)
        rig.run(request("first", text))
        rig.evict(Tier.DEVICE)
        if tier == Tier.HOST:
            rig.evict(Tier.PEER)
        batch = (
            request("old", document(6, 20)),
            request("asks", np.append(text, 7)),
            request("new", document(7, 40)),
        )
        times = rig.run(*batch)
        order[tier] = times["asks"].ttft < times["new"].ttft
        assert rig.scheduler.counters["deprioritised"] == (tier == Tier.HOST)
    assert order == {Tier.PEER: True, Tier.HOST: False}


@pytest.mark.parametrize(("peer_s", "order"), [(1.0, (Tier.PEER, Tier.HOST)), (2.0, (Tier.HOST, Tier.PEER))])
def test_peers_that_are_much_slower_come_after_the_host(peer_s: float, order: tuple[Tier, ...]) -> None:
    driver = Driver(num_host_pages=64, num_peer_pages=64)
    costs = driver.scheduler.planner.expected.costs
    for _ in range(2):
        costs.add_copy(1 << 20, 1e-3, H2D)
        costs.add_copy(1 << 20, 1e-3 * peer_s, P2D)
    driver.step()
    assert driver.scheduler.cache.tree.order.load_order == order


def test_the_order_of_loads_stays_while_a_peer_is_neither_much_slower_nor_nearly_as_fast() -> None:
    driver = Driver(num_host_pages=64, num_peer_pages=64)
    costs = driver.scheduler.planner.expected.costs
    peer_s = {}
    costs.usual_load_seconds = lambda link: peer_s["now"] if link == P2D else 1.0  # type: ignore[method-assign]
    orders = []
    for peer_s["now"] in (None, 1.4, 1.6, 1.4, 1.2, 1.4):
        driver.step()
        orders.append(driver.scheduler.cache.tree.order.load_order[0])
    # Peers of which nothing is known come after the host, which says nothing of how slow they are.
    assert orders == [Tier.HOST, Tier.PEER, Tier.HOST, Tier.HOST, Tier.PEER, Tier.PEER]


@pytest.mark.parametrize(("first", "doubted"), [(Tier.HOST, P2D), (Tier.PEER, H2D)])
def test_what_comes_before_a_link_in_doubt_is_loaded(first: Tier, doubted: str) -> None:
    """A document's first half lies on one tier, and its other one on the other."""
    rig = Rig(load_or_recompute=True)
    text = document(5, 400)
    rig.run(request("first", text))
    rig.evict(Tier.DEVICE)
    cache = rig.scheduler.cache
    end = max(cache.tree.walk(), key=lambda node: len(node.key))
    front = cache.tree.split(end, 200)
    cache.controller.drop(front, Tier.PEER if first == Tier.HOST else Tier.HOST)
    cache.controller.drop(end, first)
    rig.scheduler.planner.expected.note_failed_load(doubted)
    again = rig.run(request("again", np.append(text, 7)))["again"]
    names = {Tier.HOST: "host", Tier.PEER: "peer"}
    assert {name: again.cached_tokens_details[name] for name in names.values()} == {
        name: 200 if tier == first else 0 for tier, name in names.items()
    }
