"""Requests longer than the device that lie in memory of peers: it counts, it goes in mid-request, several stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from test_equality import MODELS, Model, check_memory, greedy, prompts

from sglang.srt.managers.io_struct import FinishReason, TokenizedGenerateReqInput, TokenOutput, ids_to_bytes
from sglang.srt.managers.late_copies import LateCopies
from sglang.srt.managers.launch_batches import ExtendBatch
from sglang.srt.managers.schedule_batch import BatchDecision, Req
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.scheduler_process import ready_message
from sglang.srt.mem_cache.slab_ledger import SlabReport, source_of
from sglang.srt.mem_cache.transfer import D2H, D2P, D2S, P2H, P2P, Ticket, Tier, TransferOp
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.utils.time_units import Seconds
from support.local_engine import Generation, LocalEngine

CHUNK, PAGE, SLAB = 16, 4, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(MODELS["llama"], str(tmp_path_factory.mktemp("llama")))


class Slabs:
    """`BorrowedSlabs` that a test lends and recalls. What is given back is another engine's: nothing may read it."""

    def __init__(self, engine: LocalEngine, num_slabs: int) -> None:
        self.mapped = [False] * num_slabs
        self.returned: list[int] = []
        self._pool = engine.peer_pool

    def poll_mapped(self) -> SlabReport:
        return SlabReport(bytes(self.mapped))

    def mark_in_use(self, mapped: bytes) -> None:
        pass

    def follow(self, sources: bytes) -> None:
        pass

    def set_demand(self, num_slabs: int, value_us: int) -> None:
        self.demand = num_slabs

    def give_back(self, slabs: Sequence[int], chosen: Sequence[int] = ()) -> None:
        assert self._pool is not None
        for slab in slabs:
            self._pool.kv[slab * SLAB : (slab + 1) * SLAB] = float("nan")
        self.returned += slabs


class Borrowing:
    """An engine with slabs of SLAB pages. tokens: of the device. host, swap: in pages."""

    def __init__(
        self, model: Model, num_slabs: int, tokens: int = 64, host: int = 10, swap: int = 0, **options: object
    ) -> None:
        num_pages = num_slabs * SLAB
        self.engine = model.engine(
            page_size=PAGE,
            num_device_pages=tokens // PAGE,
            num_host_pages=host,
            num_peer_pages=num_pages,
            slabs=tuple((first, first + SLAB) for first in range(0, num_pages, SLAB)),
            **{
                "num_swap_pages": swap,
                "layer_stream": LayerStreamConfig(2, 5),
                "chunked_prefill_size": CHUNK,
                "new_token_ratio": 0.0,
                **options,
            },
        )
        self.scheduler = self.engine.scheduler
        self.slabs = Slabs(self.engine, num_slabs)
        self.engine.core.slabs = self.engine.core._borrowed = self.slabs

    def lend(self, *slabs: int) -> None:
        for slab in slabs:
            self.slabs.mapped[slab] = True
        self.engine.settle()
        self.engine.core.step(self.engine.clock(), self.engine.core.progress())

    def recall(self, *slabs: int) -> None:
        for slab in slabs:
            self.slabs.mapped[slab] = False

    @property
    def counters(self) -> dict[str, int]:
        return self.scheduler.state()["counters"]

    def done(self, link: str) -> int:
        return self.scheduler.cache.num_done(link)

    @property
    def busy(self) -> list[int]:
        """Slabs that have pages of a request."""
        tree = self.scheduler.cache.tree
        frames = [n.frames[Tier.PEER] for n in tree.walk() if n.frames[Tier.PEER] is not None]
        return sorted(set((np.concatenate(frames) // SLAB).tolist())) if frames else []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "write_policy",
    ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("write_through", "write_back"))],
)
@pytest.mark.parametrize("swap", [0, 12])
def test_the_context_is_the_sum_of_the_tiers(model: Model, swap: int, write_policy: str) -> None:
    """Less two chunks and two pages. A longer prompt is refused, with the number."""
    rig = Borrowing(model, 10, swap=swap, write_policy=write_policy)
    limit = rig.scheduler.max_total_len
    assert limit == 64 + 4 * (10 + swap) - 2 * CHUNK - 2 * PAGE
    rig.lend(*range(10))
    most = rig.scheduler.max_total_len
    assert most == limit + 4 * 50 == rig.scheduler.streaming.longest_len
    prompt = prompts(1, [most - 9])[0]
    for turn in range(2):
        (answer,) = rig.engine.generate([prompt], greedy(9))
        model.check(prompt, answer, 9)
        rig.engine.settle()
        found = answer.cached_tokens_details
        # What was swapped is gone; the rest is found.
        if turn:
            assert found["peer"] >= 4 * 50 - 2 * CHUNK and sum(found.values()) >= most - 4 * swap - 2 * CHUNK
    assert rig.counters.get("retracted_reqs", 0) == 0
    (refused,) = rig.engine.generate([np.concatenate([prompt, prompt[:9]])], greedy(1))
    assert refused.finish_reason == "abort" and not refused.tokens
    check_memory(model, rig.engine)


def test_the_frontend_learns_how_long_a_prompt_may_be_before_anything_is_borrowed(model: Model) -> None:
    """It refuses longer prompts itself, so the number counts what may be borrowed."""
    rig = Borrowing(model, 10, borrowing=BorrowingConfig())
    most = 64 + 4 * 10 - 2 * CHUNK - 2 * PAGE + 4 * 50
    assert rig.scheduler.max_total_len == most - 4 * 50, "nothing is borrowed yet"
    assert ready_message(rig.engine.core.scheduler).max_req_input_len == most - 1
    rig.lend(*range(10))
    prompt = prompts(1, [most - 1])[0]
    (answer,) = rig.engine.generate([prompt], greedy(1))
    model.check(prompt, answer, 1)
    check_memory(model, rig.engine)


def test_peers_take_what_is_spilled_before_the_host_does(model: Model) -> None:
    rig = Borrowing(model, 10, host=40, write_policy="write_back")
    rig.lend(*range(10))
    (prompt,) = prompts(2, [200])
    tiers = set()

    def look(decision: BatchDecision) -> None:
        for stream in decision.launch.streams if decision.launch is not None else ():
            tiers.update(tier for tier, _ in stream.parts)

    (answer,) = rig.engine.generate([prompt], greedy(8), after_step=look)
    model.check(prompt, answer, 8)
    assert tiers == {Tier.PEER} and rig.counters["peer_backup_tokens"] > 100
    check_memory(model, rig.engine)


def recalled_at(rig: Borrowing, mode: LaunchMode, count: int, slabs: int) -> object:
    """An `after_step` that recalls so many busy slabs when so many launches of that mode have streamed."""
    seen = 0

    def look(decision: BatchDecision) -> None:
        nonlocal seen
        if decision.launch is None or decision.launch.mode != mode or not decision.launch.streams:
            return
        seen += 1
        if seen == count:
            busy = rig.busy[:slabs]
            assert len(busy) == slabs
            rig.recall(*busy)

    return look


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["auto", "write_back"])
@pytest.mark.parametrize("mode", [LaunchMode.EXTEND, LaunchMode.DECODE])
def test_what_a_recalled_slab_had_goes_to_the_host(model: Model, mode: LaunchMode, write_policy: str) -> None:
    rig = Borrowing(model, 8, host=60, write_policy=write_policy)
    rig.lend(*range(8))
    (prompt,) = prompts(3, [180])
    look = recalled_at(rig, mode, 6, 3)
    (answer,) = rig.engine.generate([prompt], greedy(24), after_step=look)
    model.check(prompt, answer, 24)
    rig.engine.settle()
    assert len(rig.slabs.returned) == 3
    # With `auto` the host may have it already.
    assert write_policy == "auto" or rig.counters["moved_to_host_tokens"] >= 3 * SLAB * PAGE
    assert rig.counters["prefill_tokens"] == 180, "nothing was computed twice"
    check_memory(model, rig.engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", [LaunchMode.EXTEND, LaunchMode.DECODE])
def test_or_to_another_slab(model: Model, mode: LaunchMode) -> None:
    rig = Borrowing(model, 16, host=1, write_policy="write_back")
    rig.lend(*range(16))
    (prompt,) = prompts(4, [180])
    look = recalled_at(rig, mode, 2, 3)
    (answer,) = rig.engine.generate([prompt], greedy(24), after_step=look)
    model.check(prompt, answer, 24)
    rig.engine.settle()
    assert len(rig.slabs.returned) == 3 and rig.done(P2P) > 0
    assert rig.counters["moved_to_peer_tokens"] >= 2 * SLAB * PAGE
    assert rig.counters["prefill_tokens"] == 180
    check_memory(model, rig.engine)


@pytest.mark.parametrize("swap", [0, 60])
def test_what_no_tier_has_room_for_is_computed_again(model: Model, swap: int) -> None:
    """With a swap file there is room for that; without one the request ends, and says why."""
    rig = Borrowing(model, 8, host=1, swap=swap, write_policy="write_back")
    rig.lend(*range(8))
    (prompt,) = prompts(5, [170])
    look = recalled_at(rig, LaunchMode.EXTEND, 4, 3)
    (answer,) = rig.engine.generate([prompt], greedy(8), after_step=look)
    rig.engine.settle()
    assert len(rig.slabs.returned) == 3
    if swap:
        model.check(prompt, answer, 8)
        assert rig.counters["prefill_tokens"] > 190
    else:
        assert answer.finish_reason == "abort" and not answer.tokens
    check_memory(model, rig.engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("link", [P2H, P2P])
def test_a_failed_move_has_the_request_compute_again(model: Model, link: str) -> None:
    rig = Borrowing(model, 20, host=60 if link == P2H else 1, write_policy="write_back")
    rig.lend(*range(20))
    rig.engine.core.links[link]._fail_rate = 1.0
    (prompt,) = prompts(6, [180])
    look = recalled_at(rig, LaunchMode.DECODE, 2, 2)
    (answer,) = rig.engine.generate([prompt], greedy(24), after_step=look)
    model.check(prompt, answer, 24)
    rig.engine.settle()
    assert len(rig.slabs.returned) == 2 and rig.counters["failed_ops"] > 0
    assert rig.counters["prefill_tokens"] > 180
    check_memory(model, rig.engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("link", [D2H, D2S])
def test_what_can_never_be_moved_down_ends_a_request(model: Model, link: str) -> None:
    """Copies to the only tier with room fail for ever: the request ends, says why, and the next one is served."""
    now = 0.0
    options = {"write_policy": "write_back", "clock": lambda: Seconds(now)}
    rig = Borrowing(model, 0, host=60 if link == D2H else 5, swap=60 if link == D2S else 0, **options)
    broken = rig.engine.core.links[link]
    broken._fail_rate = 1.0
    long, short = prompts(8, [180, 30])
    (answer,) = rig.engine.generate([long], greedy(24))
    assert answer.finish_reason == "abort" and not answer.tokens
    assert 30 <= rig.counters["failed_ops"] < 40
    (answer,) = rig.engine.generate([short], greedy(8))
    model.check(short, answer, 8)
    broken._fail_rate = 0.0
    now = 10.0
    (answer,) = rig.engine.generate([long], greedy(24))
    model.check(long, answer, 24)
    check_memory(model, rig.engine)


class Hanging(Borrowing):
    """One of its links does not say what has ended while it `hangs`. The clock is turned to when a step is due next,
    once nothing else is under way. reasons: why requests ended, by the order in which they came."""

    def __init__(self, model: Model, link: str, num_slabs: int = 0, **options: object) -> None:
        self.now = 0.0
        super().__init__(model, num_slabs, clock=lambda: Seconds(self.now), **options)
        self.hangs = True
        self.reasons: dict[str, FinishReason] = {}
        self._hung = self.engine.core.links[link]
        self._poll = self._hung.poll
        self._hung.poll = lambda: [] if self.hangs else self._poll()  # type: ignore[method-assign]
        self.engine.when_idle = self.turn

    @property
    def copies(self) -> list[TransferOp]:
        """Those that hang, or will."""
        return [op for op in self.scheduler.cache.in_flight.values() if op.ticket.link == self._hung.name]

    def turn(self) -> None:
        scheduler = self.scheduler
        if self.hangs and not scheduler.clock.is_running and len(self.copies) == len(scheduler.cache.in_flight):
            assert scheduler.wake_at is not None, "requests wait for what never ends"
            self.now = max(self.now, scheduler.wake_at)

    def answer(self, batch: list[np.ndarray], num_tokens: Sequence[int]) -> list[Generation]:
        return self.engine.generate(batch, [greedy(n) for n in num_tokens], after_step=self._look)

    def _look(self, decision: BatchDecision) -> None:
        ended = [each for each in decision.outputs if each.finish_reason is not None]
        self.reasons |= {each.rid: each.finish_reason for each in ended}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["auto", "write_back"])
def test_a_swap_file_that_hangs_ends_only_what_needs_it(model: Model, write_policy: str) -> None:
    """Once it answers it is used again."""
    rig = Hanging(model, D2S, host=5, swap=60, write_policy=write_policy)
    swap = rig.scheduler.cache.swap
    assert swap is not None
    long, *short = prompts(8, [180, 30, 30])
    ended, *answers = rig.answer([long, *short], [24, 40, 40])
    assert ended.finish_reason == "abort" and not ended.tokens
    assert rig.reasons["local-0"].status_code == 503 and "do not end (d2s)" in str(rig.reasons["local-0"].message)
    for prompt, answer in zip(short, answers):
        model.check(prompt, answer, 40)
    assert rig.now < 1.2, "one copy was waited for"
    # Another one does not wait at all, nor does one that needs the whole device.
    whole, long_too = prompts(9, [52, 170])
    ended, answer = rig.answer([long_too, whole], [24, 8])
    assert ended.finish_reason == "abort" and rig.reasons["local-3"].status_code == 503 and rig.now < 1.2
    model.check(whole, answer, 8)
    # The copy may still write there.
    (copy,) = rig.copies
    assert swap.num_free == swap.num_pages - len(copy.dst_frames) and (swap.pins[copy.dst_frames] == 1).all()
    rig.hangs = False
    rig.engine.settle()
    (answer,) = rig.answer([long], [24])
    model.check(long, answer, 24)
    rig.engine.settle()
    swap.reap(rig.scheduler.clock.done)
    assert swap.num_free == swap.num_pages and rig.counters["swapped_tokens"] > 100
    check_memory(model, rig.engine)


def test_what_hangs_is_forgotten_with_a_request_that_is_aborted(model: Model) -> None:
    """Others have the device as a whole, once its copy is late."""
    rig = Hanging(model, D2S, host=5, swap=60)
    long, whole = prompts(8, [180, 52])

    def abort() -> None:
        if rig.copies and not rig.scheduler.clock.is_running and rig.scheduler.num_reqs:
            core = rig.engine.core
            rig.engine._take_outputs(core.step(Seconds(rig.now), core.progress(), [], ["local-0"]), 0.0)

    rig.engine.when_idle = abort
    (ended,) = rig.answer([long], [24])
    assert ended.finish_reason == "abort" and rig.now == 0.0 and len(rig.copies) == 1
    rig.engine.when_idle = rig.turn
    (answer,) = rig.answer([whole], [8])
    model.check(whole, answer, 8)
    assert rig.now < 1.2
    rig.hangs = False
    (answer,) = rig.answer([long], [24])
    model.check(long, answer, 24)
    check_memory(model, rig.engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["auto", "write_back"])
def test_a_host_that_hangs_ends_what_needs_it(model: Model, write_policy: str) -> None:
    """Also an answer that outgrows the device meanwhile."""
    rig = Hanging(model, D2H, host=60, write_policy=write_policy)
    long, *short = prompts(8, [180, 30, 20])
    ended, outgrown, answer = rig.answer([long, *short], [24, 40, 20])
    assert ended.finish_reason == "abort" and not ended.tokens
    model.check(short[0], outgrown, 35, "abort")
    model.check(short[1], answer, 20)
    assert [rig.reasons[f"local-{i}"].status_code for i in range(2)] == [503, 503] and rig.now < 1.2
    rig.hangs = False
    rig.engine.settle()
    (answer,) = rig.answer([long], [24])
    model.check(long, answer, 24)
    check_memory(model, rig.engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["auto", "write_back"])
def test_peers_that_hang_leave_it_to_the_host(model: Model, write_policy: str) -> None:
    rig = Hanging(model, D2P, 20, host=60, write_policy=write_policy)
    rig.hangs = False
    rig.lend(*range(20))
    rig.hangs = True
    batch = prompts(8, [180, 30, 30])
    for prompt, answer in zip(batch, rig.answer(batch, [24, 40, 40])):
        model.check(prompt, answer, len(answer.tokens))
        assert len(answer.tokens) >= 24
    assert rig.now < 1.2 and len(rig.copies) > 0
    rig.hangs = False
    rig.engine.settle()
    check_memory(model, rig.engine)


def test_a_disk_at_work_is_not_taken_for_one_that_hangs(model: Model) -> None:
    """Writes that went to memory tell nothing of the disk: 5 GB may take 100 s. What has taken longer still may take
    so long again."""
    rig = Borrowing(model, 0, host=5, swap=60)
    planner = rig.scheduler.planner
    frames = np.empty(0, np.int32)
    op = TransferOp(Ticket(D2S, 0), Tier.DEVICE, Tier.DISK, frames, frames, 5_000_000_000, after=-1)

    def late_s() -> float:
        late = LateCopies(planner._copy_seconds)
        late.update(Seconds(0.0), {D2S: op}, rig.scheduler.clock.done)
        late.update(Seconds(max(late._oldest[D2S][1:])), {D2S: op}, rig.scheduler.clock.done)
        assert late.links == {D2S}
        return late._now

    assert late_s() == 100.0
    planner.expected.costs.add_copy(op.size_bytes, 1.0, D2S)
    assert late_s() == 100.0
    for _ in range(10):
        planner.expected.costs.add_copy(op.size_bytes, 40.0, D2S)
    assert late_s() > 300.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["auto", "write_back"])
def test_peers_that_fail_leave_it_to_the_host(model: Model, write_policy: str) -> None:
    rig = Borrowing(model, 20, host=60, write_policy=write_policy, clock=lambda: Seconds(0.0))
    rig.lend(*range(20))
    rig.engine.core.links[D2P]._fail_rate = 1.0
    (prompt,) = prompts(9, [180])
    (answer,) = rig.engine.generate([prompt], greedy(24))
    model.check(prompt, answer, 24)
    assert rig.counters["failed_ops"] == 3
    check_memory(model, rig.engine)


def test_two_requests_stream_at_once(model: Model) -> None:
    rig = Borrowing(model, 20, tokens=160, host=30)
    rig.lend(*range(20))
    batch = prompts(7, [200, 180])
    most = 0

    def look(decision: BatchDecision) -> None:
        nonlocal most
        most = max(most, len(decision.launch.streams) if decision.launch is not None else 0)

    answers = rig.engine.generate(batch, [greedy(20), greedy(24)], after_step=look)
    for prompt, answer, n in zip(batch, answers, (20, 24)):
        model.check(prompt, answer, n)
    assert most == 2 and rig.counters.get("retracted_reqs", 0) == 0
    check_memory(model, rig.engine)


def test_two_that_do_not_fit_together_stream_one_after_the_other(model: Model) -> None:
    rig = Borrowing(model, 10, tokens=160, host=10)
    rig.lend(*range(10))
    batch = prompts(8, [200, 180])
    for prompt, answer in zip(batch, rig.engine.generate(batch, greedy(8))):
        model.check(prompt, answer, 8)
    assert rig.counters["streamed_reqs"] == 2 and rig.counters.get("retracted_reqs", 0) == 0
    check_memory(model, rig.engine)


def test_the_peers_that_two_need_go_while_they_stream(model: Model) -> None:
    """One of them starts again when the other has ended."""
    rig = Borrowing(model, 20, tokens=160, host=10)
    rig.lend(*range(20))
    batch = prompts(9, [200, 180])
    look = recalled_at(rig, LaunchMode.EXTEND, 8, 8)
    for prompt, answer in zip(batch, rig.engine.generate(batch, greedy(8), after_step=look)):
        model.check(prompt, answer, 8)
    check_memory(model, rig.engine)


def test_a_prompt_that_is_retracted_for_another_has_no_chunk_in_that_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stream. The older one finds no room when it is its turn; the younger one's memory would do for itself."""
    rig = Borrowing(model, 20, tokens=160, host=10)
    rig.lend(*range(20))
    scheduler = rig.scheduler
    allocate, shrink, retract = scheduler.cache.allocate, scheduler.streaming.shrink, scheduler.retract
    next_chunk = scheduler.chooser._next_chunk
    retracted: list[int] = []
    asking: list[int] = []

    def is_short_of(slot: int) -> bool:
        front = scheduler.queues.streaming
        is_due = len(front) == 2 and front[0].order < front[1].order and front[0].computed > 60
        return is_due and front[0].slot == slot and not retracted and not scheduler.cache.has_outstanding

    def note_retracted(req: Req) -> None:
        retracted.append(req.order)
        retract(req)

    def note_asking(batch: ExtendBatch, req: Req, budget: int) -> int:
        asking[:] = [req.slot]
        chunk = next_chunk(batch, req, budget)
        asking.clear()
        return chunk

    monkeypatch.setattr(scheduler, "retract", note_retracted)
    monkeypatch.setattr(scheduler.chooser, "_next_chunk", note_asking)
    monkeypatch.setattr(scheduler.cache, "allocate", lambda n: None if any(map(is_short_of, asking)) else allocate(n))
    monkeypatch.setattr(
        scheduler.streaming,
        "shrink",
        lambda n, req=None: False if req is not None and is_short_of(req.slot) else shrink(n, req),
    )
    batch = prompts(8, [200, 180])
    for prompt, answer in zip(batch, rig.engine.generate(batch, greedy(8))):
        model.check(prompt, answer, 8)
    assert retracted == [1], "the younger one was not retracted: this tests nothing"
    check_memory(model, rig.engine)


class Beside:
    """A long request, and short ones that come at the launch come_at. launches: of each the mode, and whether one of
    the short ones is in it."""

    def __init__(self, model: Model, num_short: int, num_tokens: int, come_at: tuple[LaunchMode, int]) -> None:
        self.rig = Borrowing(model, 12, tokens=160, host=20)
        self.rig.lend(*range(12))
        long, *short = prompts(10, [240, *([num_tokens] * num_short)])
        self.names = [f"short {i}" for i in range(num_short)]
        self.launches: list[tuple[LaunchMode, str]] = []
        self._short, self._come_at = short, come_at
        self._num_before = 0
        (answer,) = self.rig.engine.generate([long], greedy(24), after_step=self._look)
        model.check(long, answer, 24)
        for name, prompt in zip(self.names, short):
            model.check(prompt, self.rig.engine._answers.pop(name), 4)
        check_memory(model, self.rig.engine)

    def after(self, mode: LaunchMode | None = None) -> list[str]:
        """Launches since the short ones have come, of one mode or of all."""
        return [name for each, name in self.launches[self._num_before :] if mode in (None, each)]

    def _note(self, decision: BatchDecision) -> None:
        if (launch := decision.launch) is not None:
            slots = {req.slot: req.rid for req in self.rig.scheduler.queues.active()}
            of = {slots.get(slot, "") for slot in launch.slots.tolist()}
            self.launches.append((launch.mode, "short" if of & {*self.names} else "long"))

    def _look(self, decision: BatchDecision) -> None:
        self._note(decision)
        engine, (mode, number) = self.rig.engine, self._come_at
        if self._num_before or [each for each, _ in self.launches].count(mode) < number:
            return
        self._num_before = len(self.launches)
        messages = []
        for name, prompt in zip(self.names, self._short):
            engine._answers[name] = Generation()
            messages.append(
                TokenizedGenerateReqInput(
                    rid=name, input_ids=ids_to_bytes(prompt), sampling_params=greedy(4), stream=True
                )
            )
        decision = engine.core.step(engine.clock(), engine.core.progress(), messages)
        engine._take_outputs(decision, 0.0)
        self._note(decision)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_tokens", [10, 40])
def test_a_short_request_waits_for_one_chunk_of_a_long_prompt(model: Model, num_tokens: int) -> None:
    """It comes while a chunk is computed. A prompt of several chunks waits once."""
    after = Beside(model, 1, num_tokens, (LaunchMode.EXTEND, 6)).after(LaunchMode.EXTEND)
    num_chunks = -(-num_tokens // CHUNK)
    assert after.count("short") == num_chunks and after.count("long") > num_chunks
    end = len(after) - after[::-1].index("short")
    assert after[:end].count("long") <= 1, f"the short one waits for more than a chunk: {after}"


def test_the_pages_of_a_prompts_next_chunk_are_not_taken_to_load_a_stream_back(model: Model) -> None:
    """It comes while the long request decodes, and gets pages of it: a decode step is between two of its chunks."""
    beside = Beside(model, 1, 44, (LaunchMode.DECODE, 4))
    launches = beside.launches[beside._num_before :]
    chunks = [i for i, (mode, name) in enumerate(launches) if (mode, name) == (LaunchMode.EXTEND, "short")]
    assert len(chunks) == 3 and chunks[2] - chunks[0] <= 4, launches


class LendingOnDemand(Slabs):
    """Lends what is asked for, `most` slabs at most, one with each poll."""

    most = 1 << 30

    def poll_mapped(self) -> SlabReport:
        if sum(self.mapped) < min(getattr(self, "demand", 0), self.most):
            self.mapped[self.mapped.index(False)] = True
        sources = [source_of(0, slab) if here else 0 for slab, here in enumerate(self.mapped)]
        num_lendable = getattr(self, "num_lendable", len(self.mapped))
        return SlabReport(
            bytes(self.mapped), sources=np.array(sources).tobytes(), num_wanted=(0,), num_lendable=num_lendable
        )

    def give_back(self, slabs: Sequence[int], chosen: Sequence[int] = ()) -> None:
        for slab in chosen:
            self.mapped[slab] = False
        super().give_back(slabs)


def on_demand(model: Model, most: int, **options: object) -> Borrowing:
    rig = Borrowing(model, 8, borrowing=BorrowingConfig(), **options)
    rig.slabs = rig.engine.core.slabs = rig.engine.core._borrowed = LendingOnDemand(rig.engine, 8)
    rig.slabs.most = most
    return rig


def test_a_long_request_waits_for_what_peers_lend_when_they_are_asked(model: Model) -> None:
    """Nothing is borrowed before."""
    rig = on_demand(model, most=8)
    (prompt,) = prompts(11, [180])
    assert rig.scheduler.max_total_len < len(prompt) < rig.scheduler.streaming.longest_len
    ready = ready_message(rig.scheduler)
    assert ready.max_unlent_len < len(prompt) < ready.max_req_input_len, "the HTTP server would refuse it"
    (answer,) = rig.engine.generate([prompt], greedy(12))
    model.check(prompt, answer, 12)
    assert sum(rig.slabs.mapped) > 4 and rig.counters.get("retracted_reqs", 0) == 0
    check_memory(model, rig.engine)


def test_what_goes_to_the_host_for_want_of_peers_is_asked_for(model: Model) -> None:
    """The host has room for the request. Peers, which are nearer, are given what comes once they lend."""
    rig = on_demand(model, most=8, host=60)
    (prompt,) = prompts(13, [220])
    assert len(prompt) + 12 < rig.scheduler.max_total_len
    (answer,) = rig.engine.generate([prompt], greedy(12))
    model.check(prompt, answer, 12)
    assert rig.slabs.demand > 0 and rig.busy, "nothing was asked for"
    check_memory(model, rig.engine)


def test_a_request_goes_without_peers_that_take_their_memory_back_again_and_again(model: Model) -> None:
    """They have it back, and lend it anew, whenever a launch has read it; the swap file has room for all."""
    rig = Borrowing(model, 8, host=10, swap=60)
    rig.lend(*range(8))
    num_recalls = 0

    def look(decision: BatchDecision) -> None:
        nonlocal num_recalls
        streams = decision.launch.streams if decision.launch is not None else ()
        if any(tier == Tier.PEER for stream in streams for tier, _ in stream.parts):
            num_recalls += 1
            rig.recall(*range(8))
        elif not any(rig.slabs.mapped):
            rig.slabs.mapped = [True] * 8
        assert num_recalls < 20, "it starts again for ever"

    (prompt,) = prompts(3, [180])
    (answer,) = rig.engine.generate([prompt], greedy(24), after_step=look)
    model.check(prompt, answer, 24)
    assert num_recalls >= 2 and rig.counters["swapped_tokens"] > 0
    rig.engine.settle()
    check_memory(model, rig.engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lends_again", [True, False])
# The last has room for a while.
@pytest.mark.parametrize(
    ("num_left", "num_prompt", "num_new"),
    [(0, 180, 40), pytest.param(4, 180, 40, marks=pytest.mark.slow), (5, 150, 60)],
)
@pytest.mark.parametrize("mode", [LaunchMode.EXTEND, LaunchMode.DECODE])
def test_a_long_request_waits_when_peers_take_their_memory_back(
    model: Model, mode: LaunchMode, num_left: int, num_prompt: int, num_new: int, lends_again: bool
) -> None:
    """No tier has room for what they had, or for what is to come. They lend again after a while, or it ends."""
    now, reclaimed_at, seen = 100.0, 0.0, 0
    rig = on_demand(model, most=8, clock=lambda: now)

    def look(decision: BatchDecision) -> None:
        nonlocal seen, reclaimed_at
        seen += decision.launch is not None and decision.launch.mode == mode
        if seen == 10 and not reclaimed_at:
            reclaimed_at, rig.slabs.most = now, num_left
            rig.recall(*range(num_left, 8))

    def turn() -> None:
        nonlocal now
        now += not rig.scheduler.cache.has_outstanding
        if lends_again and now > reclaimed_at + 20:
            rig.slabs.most = 8

    rig.engine.when_idle = turn
    (prompt,) = prompts(14, [num_prompt])
    (answer,) = rig.engine.generate([prompt], greedy(num_new), after_step=look)
    assert reclaimed_at
    if lends_again:
        model.check(prompt, answer, num_new)
    else:
        # There was room for all of it: no end at a limit.
        assert now >= reclaimed_at + 30 and (answer.tokens or mode == LaunchMode.EXTEND)
        assert answer.finish_reason == "abort"
        if answer.tokens:
            model.check(prompt, answer, len(answer.tokens), "abort")
    check_memory(model, rig.engine)


def test_it_ends_when_peers_do_not_lend(model: Model) -> None:
    """Others go on meanwhile."""
    now = 100.0
    rig = on_demand(model, most=2, clock=lambda: now)

    def turn() -> None:
        nonlocal now
        now += 1.0

    rig.engine.when_idle = turn
    long, short = prompts(12, [180, 20])
    ended, answer = rig.engine.generate([long, short], greedy(4))
    model.check(short, answer, 4)
    assert ended.finish_reason == "abort" and not ended.tokens and 130.0 <= now < 140.0
    check_memory(model, rig.engine)


def test_what_peers_can_never_lend_is_not_waited_for(model: Model) -> None:
    now = 100.0
    rig = on_demand(model, most=8, clock=lambda: now)
    rig.slabs.num_lendable = 4
    most = rig.scheduler.streaming.max_len_with(4 * SLAB)
    outputs: list[TokenOutput] = []
    fits, does_not = prompts(15, [most - 2, most])
    answer, _ = rig.engine.generate(
        [fits, does_not], greedy(1), after_step=lambda decision: outputs.extend(decision.outputs)
    )
    model.check(fits, answer, 1)
    (reason,) = [each.finish_reason for each in outputs if each.finish_reason and each.finish_reason.type == "abort"]
    assert reason.status_code == 503 and f"room for {most - 1}:" in str(reason.message)
    check_memory(model, rig.engine)
