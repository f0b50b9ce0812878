"""A lender lends slabs of its device pool and recalls them: the policy alone, on a virtual clock, with pools."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, bytes_to_ids, ids_to_bytes
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport, SlabState
from sglang.srt.mem_cache.slab_use import SlabUse
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.peer.lending import DeviceLending, LendingConfig, OwnCache, why_nothing_is_lent
from sglang.srt.sampling.sampling_params import SamplingParams
from support.coming_and_going import LentOut
from support.hash_model import HashModel
from support.reduction import reduce_progress
from support.soak_config import SoakConfig
from support.soak_rank import build_rank
from support.storage_rig import StorageRig, tokens

TEN_SLABS = tuple((first, first + 10) for first in range(0, 100, 10))


def request(rid: str, prompt: np.ndarray, max_new_tokens: int = 4) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(prompt), sampling_params=params, stream=True)


def text(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 3, n).astype(np.int32)


# -- the policy --------------------------------------------------------------------------------------------------


def lending(num_slabs: int = 5, keep_pages: int = 4, cache_pages: int = 0) -> tuple[DeviceLending, FrameTable]:
    """Slabs of four pages, a window of 10 s."""
    table = FrameTable(4 * num_slabs, lowest_first=True)
    frames = [(4 * i, 4 * i + 4) for i in range(num_slabs)]
    ledger, use = SlabLedger(table, frames, mapped=True), SlabUse(frames, table.num_pages)
    made = DeviceLending(LendingConfig(window_s=10.0), ledger, keep_pages, cache_pages, use)
    made.update(SlabReport(b"\1" * num_slabs, num_borrowable=255))
    return made, table


def test_what_a_request_finds_is_noted_and_what_it_lacks_is_not():
    rig = StorageRig("aaaabbbb")
    on_device = rig.insert("aaaa")
    rig.begin("r", "aaaabbbb")
    rig.finish_all()
    (_, below) = rig.tree.match("", tokens("aaaabbbb")).path
    cache, req = KVCache.__new__(KVCache), SimpleNamespace(priority=0, epoch=0, session=None)
    cache.tree, cache.storage, cache._found, cache._filled = rig.tree, SimpleNamespace(is_open=False), [], []
    cache.ledger = SimpleNamespace(lends_device=True)
    cache.count_use(SimpleNamespace(node=below), req)
    filled, (found,) = cache.take_device_use()
    assert not filled and found is on_device.frames[Tier.DEVICE] and cache.take_device_use() == ([], [])


def test_what_a_window_did_not_need_is_drained_from_the_end():
    each, _ = lending()
    assert each.adjust(0.0, 9) == [] and each.wake_at == 10.0
    assert each.adjust(9.9, 1) == []
    # Nine pages were needed until 9.9: three slabs.
    assert each.adjust(10.0, 1) == [3, 4] and each.wake_at == 19.9
    assert each.ledger.take_drained() == (3, 4)
    assert each.adjust(19.9, 1) == [1, 2] and each.wake_at is None


def test_only_slabs_that_borrowers_would_take_are_drained():
    each, _ = lending()
    each.update(SlabReport(b"\1\1\1\1\1", 0))
    each.adjust(0.0, 1)
    assert each.adjust(10.0, 1) == [] and each.wake_at is None, "no borrower is there: nothing to wake for"
    each.update(SlabReport(b"\1\1\1\1\1", 2))
    assert each.adjust(11.0, 1) == [3, 4]
    # No borrower has them yet: the two that are borrowable are draining.
    assert each.adjust(12.5, 1) == []
    assert each.ledger.take_drained() == (3, 4)
    each.update(SlabReport(b"\1\1\1\0\0", 1))
    assert each.adjust(13.0, 1) == [2]


def test_a_late_slab_that_is_not_waited_for_recalls_no_other():
    each, _ = lending()
    each.adjust(0.0, 1)
    assert each.adjust(10.0, 1) == [1, 2, 3, 4] and each.ledger.take_drained() == (1, 2, 3, 4)
    # A borrower's next life has begun, and the last one has not given its slab back: nothing was recalled here.
    each.update(SlabReport(b"\1\0\0\0\0", 0, num_late=1))
    each.adjust(11.0, 1)
    assert each.take_num_recalled() == 0 and not each.awaits_slabs
    each.adjust(12.0, 8)
    assert each.take_num_recalled() == 1
    each.check_invariants()


def test_before_the_first_launch_nothing_counts_as_used():
    each, _ = lending()
    each.adjust(0.0, 1)
    assert each.adjust(10.0, 1) == [1, 2, 3, 4] and each.ledger.take_drained() == (1, 2, 3, 4)
    each.update(SlabReport(b"\1\0\0\0\0", 0))
    each.adjust(20.0, 1, OwnCache(num_evicted=6, next_victim=0, launch=0))
    assert each.take_num_recalled() == 0


def test_another_slab_is_recalled_in_place_of_a_late_one():
    each, _ = lending()
    each.adjust(0.0, 1)
    assert each.adjust(10.0, 1) == [1, 2, 3, 4] and each.ledger.take_drained() == (1, 2, 3, 4)
    each.update(SlabReport(b"\1\0\0\0\0", 0))
    each.adjust(11.0, 8)
    assert each.take_num_recalled() == 1
    each.adjust(12.0, 8)
    assert each.take_num_recalled() == 0, "it was recalled"
    each.update(SlabReport(b"\1\0\0\0\0", 0, 1))
    each.adjust(13.0, 8)
    assert each.take_num_recalled() == 1, "it is late"
    each.adjust(14.0, 8)
    assert each.take_num_recalled() == 0
    each.update(SlabReport(b"\1\0\1\0\0", 0, 1))
    assert each.awaits_slabs and each.adjust(15.0, 8) == [] and each.take_num_recalled() == 0
    each.update(SlabReport(b"\1\1\1\0\0", 0))
    assert not each.awaits_slabs


@pytest.mark.parametrize(("keep_pages", "cache_pages", "stay"), [(4, 0, 1), (5, 0, 2), (4, 4, 2), (4, 100, 5)])
def test_room_that_is_kept(keep_pages: int, cache_pages: int, stay: int):
    each, _ = lending(keep_pages=keep_pages, cache_pages=cache_pages)
    each.adjust(0.0, 0)
    assert each.adjust(10.0, 0) == list(range(stay, 5))


def test_slabs_are_recalled_once_the_lowest_first():
    each, _ = lending()
    each.adjust(0.0, 0)
    each.adjust(10.0, 0)
    each.ledger.take_drained()
    for demand, recalled in ((9, 2), (9, 0), (12, 0), (13, 1), (100, 1), (100, 0), (0, 0)):
        each.adjust(11.0, demand)
        assert each.take_num_recalled() == recalled, f"demand {demand}"
    assert each.awaits_slabs
    each.update(SlabReport(b"\1\1\0\0\0", 255))
    each.adjust(11.5, 9)
    # The other three are still to come.
    assert each.take_num_recalled() == 0 and each.awaits_slabs
    each.update(SlabReport(b"\1\1\1\1\1", 255))
    each.adjust(12.0, 100)
    assert each.take_num_recalled() == 0 and not each.awaits_slabs
    each.check_invariants()


def test_draining_is_cancelled_before_anything_is_recalled():
    each, table = lending()
    frames = table.allocate(20)
    assert frames is not None
    # A page of the first slab is held, and two of the last one.
    table.free_after(frames[1:18], FrameState.HELD, -1)
    table.reap(0)
    each.adjust(0.0, 2)
    assert each.adjust(10.0, 2) == [1, 2, 3, 4]
    # Two pages of the last slab are held: it goes on draining.
    assert each.ledger.take_drained() == (1, 2, 3) and each.draining == [4]
    each.adjust(10.5, 9)
    assert each.ledger.states[4] == SlabState.MAPPED and each.take_num_recalled() == 1
    assert table.num_free == 5
    table.free_after(frames[18:], FrameState.HELD, -1)
    table.reap(0)
    assert table.num_free == 7, "a slab whose draining was cancelled is not lent when it becomes free"
    each.check_invariants()
    table.check_invariants()


def test_slabs_begin_to_drain_once_in_an_interval_and_the_next_time_is_known():
    each, _ = lending()
    each.adjust(0.0, 6)
    each.adjust(0.1, 2)
    assert each.adjust(10.0, 2) == [2, 3, 4] and each.wake_at == 10.1
    assert each.adjust(10.1, 2) == [] and each.wake_at == 11.0
    assert each.adjust(11.0, 2) == [1] and each.wake_at is None


def test_an_engine_does_not_lend_and_borrow():
    config = SchedulerConfig(
        page_size=1,
        num_device_pages=100,
        num_host_pages=100,
        page_bytes=8,
        context_len=50,
        num_peer_pages=10,
        slabs=TEN_SLABS,
        lending=LendingConfig(),
    )
    with pytest.raises(ValueError, match="cannot borrow"):
        Scheduler(config)
    for slabs in ((), ((0, 10), (10, 30))):
        with pytest.raises(ValueError, match="same length"):
            Scheduler(replace(config, num_peer_pages=0, slabs=slabs))


# -- on a virtual clock ------------------------------------------------------------------------------------------


class SimulatedLender:
    """100 pages of one token in ten slabs, which come back as soon as they are recalled; the longest request has 25
    tokens. lent: when slabs were lent, and which."""

    def __init__(self, **changes: object) -> None:
        config = SchedulerConfig(
            page_size=1,
            num_device_pages=100,
            num_host_pages=0,
            page_bytes=8,
            context_len=25,
            slabs=TEN_SLABS,
            lending=LendingConfig(),
        )
        self.sim = Simulation(replace(config, **changes), SimulatedHardware(1, lambda launch: 1.0))  # type: ignore[arg-type]
        self.scheduler = self.sim.core.scheduler
        self.sim.core.slabs = LentOut(TEN_SLABS, 1.0, 0, self._went)
        self.lent: list[tuple[float, tuple[int, ...]]] = []

    def run(self, *arrivals: tuple[float, TokenizedGenerateReqInput]) -> None:
        times = self.sim.run(arrivals, self._after_step)
        assert all(times[each.rid].finish_reason == "length" for _, each in arrivals)

    def _went(self, frames: np.ndarray) -> None:
        assert (self.scheduler.cache.device.state[frames] == FrameState.LENT).all()

    def _after_step(self, decision: BatchDecision) -> None:
        self.scheduler.check_invariants()
        if decision.slabs_drained:
            self.lent.append((self.sim.now, decision.slabs_drained))


def test_an_idle_lender_lends_all_but_room_for_one_request():
    lender = SimulatedLender()
    lender.run((0.0, request("a", text(1, 20))))
    # 25 tokens and a page that stays free.
    assert lender.lent == [(60.0, tuple(range(3, 10)))]
    state = lender.scheduler.state()
    assert state["counters"]["slabs_lent"] == 7 and "slabs_asked_back" not in state["counters"]
    assert state["tiers"]["device"]["num_pages"] == 30


def test_what_requests_need_at_the_same_time_is_not_lent():
    lender = SimulatedLender()
    lender.run(*((30.0, request(f"r{i}", text(i, 15), 5)) for i in range(3)))
    # Three times 20 tokens: six slabs, and what one that waits has in reserve.
    (first, slabs), *rest = lender.lent
    assert first == 60.0 and 6 <= slabs[0] <= 7 and slabs[-1] == 9
    assert rest and rest[-1][0] > 90.0
    assert sum(len(each) for _, each in lender.lent) == 7 == lender.scheduler.counters["slabs_lent"]


def test_a_burst_recalls_slabs_and_they_are_lent_again():
    lender = SimulatedLender()
    lender.run((0.0, request("a", text(1, 5))))
    assert len(lender.scheduler.lending.ledger.states) == 10
    before = lender.scheduler.counters["slabs_lent"]
    lender.run(*((100.0, request(f"r{i}", text(i, 20), 5)) for i in range(2)))
    recalled = lender.scheduler.counters["slabs_asked_back"]
    assert before == 7 and 2 <= recalled <= 3
    # As many as came back, the coldest.
    assert len(lender.lent[-1][1]) == recalled and lender.lent[-1][0] > 160.0
    assert lender.scheduler.counters["retracted_reqs"] == 0


def test_slabs_that_a_load_filled_are_in_use():
    lender = SimulatedLender(num_host_pages=400)
    scheduler, used = lender.scheduler, []

    def after_step(decision: BatchDecision) -> None:
        lender._after_step(decision)
        if 55.0 < lender.sim.now < 65.0 and not scheduler.num_reqs:
            path = scheduler.cache.tree.match("", prompts[0][:19]).path
            frames = np.concatenate([node.frames[Tier.DEVICE] for node in path])
            used.append((len(frames), scheduler.lending.use.used_at[np.unique(frames // 10)].min()))

    prompts = np.arange(200, dtype=np.int32).reshape(10, 20)
    others = ((5.0 * i, request(f"r{i}", prompt)) for i, prompt in enumerate(prompts))
    arrivals = *others, (55.0, request("again", prompts[0]))
    lender.sim.run(arrivals, after_step)
    assert scheduler.counters["load_back_tokens"] == 19
    assert used and all(found == 19 and used_at >= 55.0 for found, used_at in used), used


# -- with pools --------------------------------------------------------------------------------------------------

CONFIG = SoakConfig(
    seed=1,
    steps=0,
    page_size=1,
    num_device_pages=64,
    num_host_pages=0,
    max_running_requests=4,
    chunked_prefill_size=16,
    max_ahead=2,
    num_ranks=1,
    arrival_rate=0.0,
    abort_rate=0.0,
    link_fail_rate=0.0,
    launch_fail_rate=0.0,
    late_rate=0.0,
    lend_rate=1.0,
)


class Rig:
    """A rank of the soak with exact KV and poisoned memory. recalled: how many slabs, each time that some were."""

    def __init__(self, lend_window_s: float = 0.05) -> None:
        self.model = HashModel(seed=1)
        self.rank = build_rank(replace(CONFIG, lend_window_s=lend_window_s), self.model, 0, None)
        self.scheduler = self.rank.core.scheduler
        assert isinstance(self.rank.slabs, LentOut)
        self.source = self.rank.slabs
        self.now = 0.0
        self.num_steps = 0
        self.recalled: list[int] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    @property
    def lent(self) -> int:
        assert self.scheduler.lending is not None
        return self.scheduler.lending.ledger.states.count(SlabState.UNMAPPED)

    def tick(self, *new: TokenizedGenerateReqInput, aborts: tuple[str, ...] = ()) -> None:
        self.now += 1e-3
        self.rank.emulator.run(20)
        progress = reduce_progress([self.rank.core.progress()])
        if not (new or aborts or self.rank.core.has_work(self.now)):
            return
        decision = self.rank.core.step(self.now, progress, new, aborts)
        self.num_steps += 1
        self.scheduler.check_invariants()
        self.recalled += [decision.num_slabs_recalled] if decision.num_slabs_recalled else []
        for output in decision.outputs:
            self.tokens.setdefault(output.rid, []).extend(bytes_to_ids(output.output_ids).tolist())
            if output.finish_reason is not None:
                self.ended[output.rid] = output.finish_reason.type

    def lend_all(self) -> None:
        """All but one slab of four pages."""
        for _ in range(200):
            self.tick()
        assert self.lent == len(self.scheduler.config.slabs) - 1 == 12
        self.source.rate = 0.0

    def end(self, rid: str) -> None:
        for _ in range(500):
            if rid in self.ended:
                return
            self.tick()
        raise AssertionError(f"{rid} does not end")


def test_a_long_request_waits_for_slabs_and_answers_as_ever():
    rig, prompt = Rig(), text(3, 30)
    rig.lend_all()
    rig.tick(request("long", prompt, 8))
    for _ in range(100):
        rig.tick()
    # 38 tokens and a page, in slabs of four, recalled once; nothing was lost, and nothing goes round in circles.
    assert rig.recalled == [9] and not rig.ended and rig.num_steps < 20
    rig.source.rate = 0.2
    rig.end("long")
    assert rig.tokens["long"] == rig.model.generate(prompt, 8, frozenset())
    assert rig.recalled == [9] and rig.scheduler.counters["slabs_asked_back"] == 9
    assert rig.scheduler.counters["retracted_reqs"] == 0
    rig.source.rate = 1.0
    for _ in range(200):
        rig.tick()
    assert rig.lent == 12 and rig.scheduler.counters["slabs_lent"] == 21


def test_what_a_launch_leaves_too_little_of_is_asked_for_while_it_runs() -> None:
    rig = Rig()
    rig.lend_all()
    core = rig.rank.core
    decisions = [core.step(rig.now, reduce_progress([core.progress()]), [request("a", text(1, 2), 2)])]
    # No launch ends.
    while core.has_work(rig.now):
        decisions.append(core.step(rig.now, reduce_progress([core.progress()])))
    assert [decision.launch is not None for decision in decisions] == [True, True, False]


def test_a_request_that_outgrows_the_mapped_slabs_waits_in_the_middle():
    rig, prompt = Rig(), text(4, 2)
    rig.lend_all()
    rig.tick(request("grows", prompt, 20))
    for _ in range(100):
        rig.tick()
    # Four pages are mapped: it has begun, and keeps what it has.
    assert not rig.ended and len(rig.scheduler.queues.running) == 1 and len(rig.tokens["grows"]) >= 2
    rig.source.rate = 0.2
    rig.end("grows")
    assert rig.tokens["grows"] == rig.model.generate(prompt, 20, frozenset())
    assert rig.scheduler.counters["retracted_reqs"] == 0


def test_slabs_that_come_back_when_they_are_not_needed_are_lent_again():
    rig = Rig()
    rig.lend_all()
    rig.tick(request("gone", text(5, 30), 8))
    rig.tick()
    rig.tick(aborts=("gone",))
    assert rig.ended == {"gone": "abort"}
    rig.source.rate = 1.0
    for _ in range(300):
        rig.tick()
    assert rig.lent == 12 and rig.scheduler.counters["slabs_lent"] == 21
    rig.tick(request("next", text(6, 30), 8))
    rig.end("next")
    assert rig.tokens["next"] == rig.model.generate(text(6, 30), 8, frozenset())


def test_slabs_in_use_stay_until_their_request_ends():
    rig = Rig(lend_window_s=0.0)
    rig.tick(request("first", text(7, 30), 2), request("second", text(8, 4), 23))
    rig.end("first")
    lending = rig.scheduler.lending
    assert lending is not None and "second" not in rig.ended
    draining = []
    while "second" not in rig.ended:
        draining.append(lending.draining)
        rig.tick()
    # Slabs 7 and 8 have pages of the second one.
    assert not any({7, 8} & set(each) for each in draining) and rig.lent >= 6
    assert rig.tokens["second"] == rig.model.generate(text(8, 4), 23, frozenset())
    for _ in range(200):
        rig.tick()
    assert rig.lent == 12


# -- by value ----------------------------------------------------------------------------------------------------


def cached_lender() -> DeviceLending:
    """Five slabs, full of what is cached, of which room for four pages is kept. Slab i was used at i seconds."""
    each, table = lending()
    frames = table.allocate(20)
    assert frames is not None
    table.transition(frames, FrameState.HELD, FrameState.CACHED)
    for slab in range(5):
        each.use.note(float(slab), each.ledger.frames_of(slab))
    each.adjust(0.0, 1)
    return each


def report(mapped: bytes = b"\1\1\1\1\1", wanted: int = 5, value_us: int = 0, lent_value_us: int = 0) -> SlabReport:
    return SlabReport(mapped, wanted, 0, value_us, lent_value_us)


def test_an_idle_master_gets_what_was_not_used_in_the_window():
    each = cached_lender()
    each.update(report())
    assert each.adjust(12.5, 1) == [0, 1, 2] and each.wake_at == 13.5
    assert each.adjust(13.5, 1) == [3] and each.wake_at is None, "room for a request is kept"


def test_only_far_more_value_takes_what_was_used_in_the_window():
    each = cached_lender()
    each.use.note(4.0, each.ledger.frames_of(4), 0.25)
    each.update(report(wanted=1, value_us=1 << 30))
    own_s = each._value(11.0)
    for factor, began in ((1.9, []), (2.1, [3])):
        each.update(report(wanted=1, value_us=int(1e6 * factor * own_s)))
        each.use.used_at[:3] = 4.0
        each._drain_at = 11.0
        assert each.adjust(11.0, 1) == began, f"{factor} times as much"


def test_an_unknown_value_keeps_what_was_used_in_the_window():
    each = cached_lender()
    each.update(report(value_us=1 << 30))
    each.use.used_at[:] = 9.0
    assert each.adjust(11.0, 1) == [], "no hit was seen here yet"
    assert each.wake_at == 19.0, "then it is old"
    assert each.adjust(19.0, 1) == [1, 2, 3, 4]


def lent_out() -> DeviceLending:
    each = cached_lender()
    each.update(report())
    each.use.used_at[:] = -100.0
    assert each.adjust(10.0, 1) == [1, 2, 3, 4]
    each.ledger.table.free_after(np.arange(4, 20, dtype=np.int32), FrameState.CACHED, -1)
    each.ledger.table.reap(0)
    assert each.ledger.take_drained() == (1, 2, 3, 4)
    each.update(report(b"\1\0\0\0\0"))
    return each


def test_what_is_evicted_though_it_was_used_lately_recalls_slabs():
    each = lent_out()
    each.adjust(20.0, 1, OwnCache(num_evicted=0, next_victim=5, launch=10))
    each.adjust(21.0, 1, OwnCache(num_evicted=6, next_victim=8, launch=12))
    assert each.take_num_recalled() == 2
    each.adjust(21.5, 1, OwnCache(num_evicted=6, next_victim=8, launch=12))
    assert each.take_num_recalled() == 0, "they are on their way"
    each.update(report(b"\1\0\0\1\1"))
    assert each.adjust(22.0, 1, OwnCache(num_evicted=6, next_victim=8, launch=13)) == [3, 4], "they were enough"
    each.check_invariants()


def test_what_is_old_is_evicted_and_recalls_nothing():
    each = lent_out()
    each.adjust(20.0, 1, OwnCache(num_evicted=0, next_victim=5, launch=10))
    each.adjust(40.0, 1, OwnCache(num_evicted=0, next_victim=5, launch=30))
    each.adjust(51.0, 1, OwnCache(num_evicted=6, next_victim=5, launch=31))
    assert each.take_num_recalled() == 0


def test_slabs_that_are_worth_more_to_a_master_stay_with_it():
    each = lent_out()
    each.adjust(20.0, 1, OwnCache(num_evicted=0, next_victim=5, launch=10))
    each.update(report(b"\1\0\0\0\0", lent_value_us=1000))
    each.adjust(21.0, 1, OwnCache(num_evicted=6, next_victim=8, launch=12))
    assert each.take_num_recalled() == 0
    # Prompts are computed again for lack of room: now it is known what a slab is worth here.
    each.adjust(22.0, 1, OwnCache(num_evicted=6, next_victim=8, launch=13, lost_tokens=100, token_s=1.0))
    assert each.take_num_recalled() == 2


def test_a_slab_that_comes_back_by_itself_counts():
    each = lent_out()
    each.adjust(20.0, 9)
    assert each.take_num_recalled() == 2
    each.update(report(b"\1\0\0\0\1"))
    each.adjust(21.0, 9)
    assert each.take_num_recalled() == 0 and each.awaits_slabs
    each.update(report(b"\1\1\1\0\1"))
    assert not each.awaits_slabs
    each.check_invariants()


@pytest.mark.parametrize(
    ("pages", "keep", "says"),
    [
        (20, 16, ""),
        (20, 17, "Raise --max-total-tokens to 48, or lower --context-length to 30"),
        (20, 40, "Raise --max-total-tokens to 88"),
    ],
)
def test_a_worker_that_can_lend_nothing_is_told_which_flag_to_change(pages: int, keep: int, says: str):
    """In slabs of four pages of two tokens."""
    found = why_nothing_is_lent(pages, keep, 4, 2)
    assert says in found and bool(found) == bool(says)


def test_a_worker_whose_context_is_longer_than_its_pool_is_told_a_pool_that_has_room_for_both():
    # A pool that is one slab larger would be kept as a whole, too.
    found = why_nothing_is_lent(20, 21, 4, 2, most_kept_pages=51)
    assert "Raise --max-total-tokens to 112," in found and "lower --context-length to 30" in found
    assert not why_nothing_is_lent(56, 51, 4, 2, most_kept_pages=51)
    assert why_nothing_is_lent(52, 51, 4, 2, most_kept_pages=51)


def test_a_worker_whose_larger_pool_is_divided_is_told_a_pool_with_room_for_its_larger_slabs():
    found = why_nothing_is_lent(20, 21, 4, 2, most_kept_pages=51, most_slab_pages=24)
    assert "Raise --max-total-tokens to 152," in found and "lower --context-length to 30" in found
    assert not why_nothing_is_lent(96, 51, 24, 2, most_kept_pages=51), "76 pages are four slabs of 24"
