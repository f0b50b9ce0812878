"""How much a borrower asks for and what it gives back: the policy alone, with numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sglang.srt.managers.cost_model import USUAL_TOKENS
from sglang.srt.managers.slab_exchange import SlabBorrower
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport, SlabState, source_of
from sglang.srt.mem_cache.slab_use import VALUE_S, SlabUse
from sglang.srt.mem_cache.transfer import D2P, H2D, P2D, STORE, StorageAction, StorageOp, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import StreamedPrefix
from sglang.srt.peer.borrowing import Borrowing, BorrowingConfig, Shortage
from sglang.srt.utils.time_units import Seconds
from support.soak import Soak
from support.soak_config import SoakConfig

FRAMES = [(4 * i, 4 * i + 4) for i in range(6)]
NOTHING = Shortage()


class Rig:
    """Six slabs of four pages. What is lacking for 10 s is asked for; what is not used for 60 s goes."""

    def __init__(self) -> None:
        self.table = FrameTable(24)
        self.ledger = SlabLedger(self.table, FRAMES, mapped=False)
        self.use = SlabUse(FRAMES, 24)
        self.policy = Borrowing(BorrowingConfig(10.0, 60.0), self.ledger, self.use)

    def lend(self, *lenders: int | None, wanted: tuple[int, ...] = ()) -> None:
        """By slab: which lender's it is; None: it is not mapped."""
        sources = np.array([0 if lender is None else source_of(lender, i) for i, lender in enumerate(lenders)])
        report = SlabReport(bytes(sources > 0), sources=sources.tobytes(), num_wanted=wanted)
        self.ledger.update(report.mapped)
        self.policy.update(report)

    def adjust(self, now: float, shortage: Shortage = NOTHING) -> list[int]:
        given_up = self.policy.adjust(now, shortage)
        self.policy.check_invariants()
        return given_up


def test_slabs_are_worth_something_while_a_long_request_needs_them():
    values = []
    for has_long_reqs in (False, True):
        rig = Rig()
        rig.lend(0, 0, None, None, None, None)
        rig.adjust(0.0)
        rig.use.note(1.0, np.arange(4, dtype=np.int32), 1.0)
        rig.adjust(30.0, replace(NOTHING, has_long_reqs=has_long_reqs))
        demand = rig.policy.take_demand(Seconds(30.0))
        assert demand is not None
        values.append(demand[1])
    assert values[0] == 0 < values[1]


@pytest.mark.parametrize(
    ("num_free", "tiers", "has_room"),
    [
        (1, [Tier.HOST], True),
        (0, [Tier.HOST], False),
        (0, [Tier.HOST, Tier.DEVICE], True),
        (0, [Tier.HOST, Tier.PEER], True),
        (0, None, False),
    ],
)
def test_a_hit_counts_as_a_load_from_the_host_that_would_have_the_page(
    num_free: int, tiers: list[Tier] | None, has_room: bool
):
    """tiers: that have what the host gives up next; None: it has nothing."""
    victim = None if tiers is None else SimpleNamespace(frames={tier: tier in tiers or None for tier in Tier})
    borrower = SlabBorrower.__new__(SlabBorrower)
    borrower._cache = SimpleNamespace(  # type: ignore[assignment]
        host=SimpleNamespace(num_free=num_free),
        tree=SimpleNamespace(order=SimpleNamespace(next_of={Tier.HOST: victim}.__getitem__)),
    )
    seconds = {P2D: 1.0, H2D: 3.0}
    costs = SimpleNamespace(usual_load_seconds=seconds.__getitem__, recompute_seconds=lambda start, end: 10.0)
    saved = borrower._saved_seconds(costs) * USUAL_TOKENS  # type: ignore[arg-type]
    assert saved == pytest.approx(2.0 if has_room else 9.0)


def test_what_is_written_loaded_and_streamed_is_a_use_and_hits_have_a_value():
    rig = Rig()
    borrower = SlabBorrower.__new__(SlabBorrower)
    borrower.policy, borrower._page_size = rig.policy, 2
    borrower._saved_seconds = lambda costs: 0.5  # type: ignore[method-assign]
    pages = [np.arange(4 * slab, 4 * slab + 2, dtype=np.int32) for slab in range(6)]
    ops = [
        TransferOp(Ticket(D2P, 0), Tier.DEVICE, Tier.PEER, pages[5], pages[0], 8, 0),
        TransferOp(Ticket(P2D, 0), Tier.PEER, Tier.DEVICE, pages[1], pages[5], 8),
        TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, pages[5], pages[5], 8),
        StorageOp(Ticket(STORE, 0), StorageAction.CLEAR, np.empty((0, 16), np.uint8), pages[5], 0),
    ]
    costs = cast(Any, None)
    borrower.note_ops(Seconds(7.0), ops, costs)
    streamed = StreamedPrefix(0, 0, 8, ((Tier.PEER, pages[2]), (Tier.HOST, pages[5])))
    borrower.note_streams(Seconds(8.0), [streamed], costs)
    assert rig.use.used_at.tolist() == [7.0, 7.0, 8.0, *[-np.inf] * 3]
    assert rig.use.values(Seconds(8.0)) == pytest.approx([0, 2 * np.exp(-1 / VALUE_S), 2, 0, 0, 0])


def test_an_idle_borrower_asks_for_nothing():
    rig = Rig()
    rig.adjust(0.0)
    assert rig.policy.take_demand(0.0) == (0, 0) and rig.policy.take_demand(0.0) is None
    assert rig.policy.wake_at is None


def test_what_was_lacking_is_asked_for_until_it_is_lent_or_the_need_is_old():
    rig = Rig()
    rig.adjust(0.0, Shortage(num_pages=9))
    assert rig.policy.take_demand(0.0) == (3, 0) and rig.policy.wake_at == 10.0
    rig.lend(0, 0, None, None, None, None)
    rig.adjust(1.0, Shortage(num_pages=9))
    assert rig.policy.take_demand(1.0) is None, "two have come, and one is still lacking"
    rig.adjust(10.0, Shortage(num_pages=9))
    assert rig.policy.take_demand(10.0) == (2, 0)
    rig.adjust(11.0, Shortage(num_pages=1000))
    assert rig.policy.take_demand(11.0) == (6, 0), "no more than there are places"


def test_a_slab_that_was_not_used_for_long_is_given_back():
    rig = Rig()
    rig.lend(0, 0, None, None, None, None)
    assert rig.adjust(0.0) == [] and rig.policy.wake_at == 60.0
    rig.use.note(30.0, np.array([1], np.int32))
    assert rig.adjust(59.0) == []
    assert rig.adjust(60.0) == [1] and rig.policy.wake_at == 90.0
    assert rig.ledger.states[1] == SlabState.DRAINING
    drained = rig.ledger.take_drained()
    assert drained == (1,) and rig.policy.take_chosen(drained) == (1,) and rig.policy.take_chosen(drained) == ()
    assert rig.policy.take_demand(60.0) == (1, 0)
    # It may be lent again, as another memory.
    rig.lend(0, 0, None, None, None, None)
    assert rig.adjust(70.0) == [] and rig.use.used_at[1] == -np.inf


def test_slabs_that_are_kept_for_a_long_request_wake_nobody():
    """It may wait or run for longer than a slab is kept unused."""
    rig = Rig()
    rig.lend(0, 0, None, None, None, None)
    rig.adjust(0.0, replace(NOTHING, has_long_reqs=True))
    assert not rig.adjust(61.0, replace(NOTHING, has_long_reqs=True))
    assert rig.policy.wake_at is None or rig.policy.wake_at > 61.0, "it would wake at once, again and again"
    assert rig.adjust(62.0) == [0, 1]


def test_a_lender_gets_back_as_many_as_it_wants_the_coldest_first():
    rig = Rig()
    rig.lend(0, 0, 1, 0, 0, None)
    rig.adjust(0.0)
    frames = rig.table.allocate(20)
    assert frames is not None and sorted(frames) == list(range(20))
    rig.table.transition(frames[frames < 16].copy(), FrameState.HELD, FrameState.CACHED)
    rig.table.free_after(frames[frames >= 16].copy(), FrameState.HELD, -1)
    rig.table.reap(0)
    # Slab 4 is empty, 0 is worth most, 1 was used before 3.
    rig.use.note(1.0, np.arange(0, 4, dtype=np.int32), 1.0)
    rig.use.note(2.0, np.arange(4, 8, dtype=np.int32))
    rig.use.note(3.0, np.arange(12, 16, dtype=np.int32))
    rig.lend(0, 0, 1, 0, 0, None, wanted=(2, 0))
    assert rig.adjust(4.0) == [4, 1]
    rig.lend(0, 0, 1, 0, 0, None, wanted=(2, 0))
    assert rig.adjust(5.0) == [], "they are on their way"
    assert rig.policy.take_chosen(rig.ledger.take_drained()) == (4,), "pages of the other one are in use"
    rig.lend(0, 0, 1, 0, None, None, wanted=(1, 1))
    assert rig.adjust(6.0) == [2], "of the other lender its only one"
    rig.lend(0, 0, 1, 0, None, None, wanted=(3, 1))
    assert rig.adjust(7.0) == [3, 0]


def test_slabs_that_are_lost_while_they_go_were_not_chosen_twice():
    rig = Rig()
    rig.lend(0, 0, None, None, None, None, wanted=(1,))
    assert rig.adjust(0.0) == [1]
    rig.lend(None, None, None, None, None, None, wanted=(0,))
    drained = rig.ledger.take_drained()
    assert drained == (0, 1) and rig.policy.take_chosen(drained) == (1,)


def test_the_value_is_what_a_slab_saves_and_what_its_lack_costs():
    rig = Rig()
    rig.lend(0, 0, None, None, None, None)
    rig.adjust(0.0)
    rig.use.note(0.0, np.arange(8, dtype=np.int32), 0.5)
    # 4 s over two slabs, rounded down to a power of two of microseconds.
    assert rig.policy.take_demand(0.0) == (2, 1 << 20)
    rig.adjust(0.0, Shortage(num_pages=8, lost_tokens=100, token_s=0.04))
    assert rig.policy.take_demand(0.0) == (4, 1 << 20), "8 s over four"
    rig.use.note(VALUE_S, np.arange(1, dtype=np.int32))
    later = rig.policy.take_demand(VALUE_S)
    assert later is not None and later[1] == 1 << 19, "a third of it is left"


def test_to_an_idle_borrower_slabs_are_worth_nothing():
    rig = Rig()
    rig.lend(0, 0, None, None, None, None)
    rig.adjust(0.0)
    rig.use.note(5.0, np.arange(8, dtype=np.int32), 0.5)
    rig.adjust(5.0)
    assert rig.policy.take_demand(5.0) == (2, 1 << 20) and rig.policy.wake_at == 15.0
    rig.adjust(15.0)
    assert rig.policy.take_demand(15.0) == (2, 0) and rig.policy.wake_at == 65.0
    rig.use.note(20.0, np.arange(1, dtype=np.int32))
    demand = rig.policy.take_demand(20.0)
    assert demand is not None and demand[1] > 0


@pytest.mark.parametrize("seed", range(3))
def test_values_add_up_whatever_the_order_of_slabs(seed: int):
    rng, use = np.random.default_rng(seed), SlabUse(FRAMES, 24)
    now = 0.0
    for _ in range(50):
        now += rng.random() * 20
        use.note(now, rng.permutation(24)[: rng.integers(1, 24)].astype(np.int32), float(rng.random()))
    assert use.values(now + 5).sum() == pytest.approx(use.saved.at(now + 5))


# -- with pools --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_slabs_that_are_chosen_while_requests_run_change_no_answer(seed: int, num_ranks: int):
    """With all nets: pages of a slab that was given back are poisoned, ranks have to choose alike."""
    config = SoakConfig.draw(seed, 250)
    config = replace(
        config,
        num_ranks=num_ranks,
        num_host_pages=max(config.num_host_pages, 40),
        num_peer_pages=40,
        slab_rate=0.1,
        gives_back=True,
        lend_rate=0.0,
        stream_pages=0,
        bypass_local=False,
        enable_radix_cache=True,
        arrival_rate=0.3,
    )
    soak = Soak(config)
    soak.run()
    given_up = [rank.core.scheduler.cache.all_counters()["slabs_withdrawn"] for rank in soak.ranks]
    assert min(given_up) > 0
