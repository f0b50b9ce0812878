"""Progress, its reduction over ranks, recording and replay."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.launch_batches import LaunchRecord
from sglang.srt.managers.progress import COUNTS_PER_STEP, Progress, pack_progress
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.step_record import ReplayMismatchError, StepRecorder, replay
from sglang.srt.mem_cache.shared_host import LeftToLeader
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.mem_cache.transfer import (
    D2H,
    EXEC,
    FETCH,
    H2D,
    LINKS,
    PROBE,
    STALL,
    STORAGE_LINKS,
    OpResult,
    Ticket,
    TransferOp,
)
from sglang.srt.model_executor.executor import StepResult
from sglang.srt.model_executor.launch import Launch
from sglang.srt.sampling.sampling_params import SamplingParams
from support.reduction import reduce_progress
from support.soak import Soak
from support.soak_config import SoakConfig


def progress(exec_done: int, h2d: int = 0, d2h: int = 0, failed: dict[str, int] | None = None) -> Progress:
    results = {seq: bytes([seq]) * 4 for seq in range(exec_done)}
    return Progress(dict.fromkeys(LINKS, 0) | {EXEC: exec_done, H2D: h2d, D2H: d2h}, failed or {}, results)


@pytest.mark.parametrize(
    ("ranks", "done", "failed"),
    [
        ([progress(3, 2, 1)], (3, 2, 1), {}),
        ([progress(3, 2, 1), progress(1, 5, 0)], (1, 2, 0), {}),
        # One rank's load 1 failed; the other has completed it: both hear of it.
        ([progress(3, 2, 0, {H2D: 1}), progress(3, 4, 0)], (3, 2, 0), {H2D: 1}),
        # The other rank is not there yet: nobody hears of it.
        ([progress(3, 2, 0, {H2D: 1}), progress(3, 1, 0)], (3, 1, 0), {}),
        # Both failed, at different numbers: the earlier counts.
        ([progress(3, 2, 0, {H2D: 1}), progress(3, 1, 0, {H2D: 0})], (3, 1, 0), {H2D: 0}),
    ],
)
def test_reduction_is_min(ranks: list[Progress], done: tuple[int, int, int], failed: dict[str, int]) -> None:
    reduced = reduce_progress(ranks)
    assert tuple(reduced.done[name] for name in (EXEC, H2D, D2H)) == done
    assert reduced.failed == failed
    assert sorted(reduced.results) == list(range(done[0]))


def stored(fetched: tuple[int, ...], consumed: int = 0) -> Progress:
    done = dict.fromkeys((EXEC, *LINKS), 0) | {FETCH: consumed + len(fetched)}
    return Progress(done, {}, {}, counts={FETCH: fetched}, consumed={FETCH: consumed})


@pytest.mark.parametrize("consumed", [0, 7])
def test_storage_has_brought_what_every_rank_has(consumed: int) -> None:
    ranks = [stored((4, 2, 9), consumed), stored((3, 5), consumed)]
    reduced = reduce_progress(ranks)
    assert reduced.done[FETCH] == consumed + 2
    assert reduced.counts == dict.fromkeys(STORAGE_LINKS, ()) | {FETCH: (3, 2)}
    # As many as one reduction has room for.
    many = tuple(range(1, COUNTS_PER_STEP + 1))
    assert reduce_progress([stored(many, consumed)] * 2).counts[FETCH] == many


def probed(*results: tuple[int, int]) -> Progress:
    """results: (count, far count) of each probe."""
    done = dict.fromkeys((EXEC, *LINKS), 0) | {PROBE: len(results)}
    counts, far_counts = zip(*results)
    return Progress(done, {}, {}, counts={PROBE: counts}, far_counts=far_counts)


def test_of_a_probe_the_first_store_has_on_all_ranks_what_is_read_there() -> None:
    reduced = reduce_progress([probed((5, 3), (10, 0), (4, 4)), probed((6, 2), (5, 5))])
    assert reduced.counts[PROBE] == (5, 5) and reduced.far_counts == (3, 5)
    follower = LeftToLeader(PROBE)
    follower.submit(SimpleNamespace(ticket=Ticket(PROBE, 0)))  # type: ignore[arg-type]
    (left,) = follower.poll()
    reduced = reduce_progress([probed((5, 2)), probed((left.count, left.far_count))])
    assert reduced.counts[PROBE] == (5,) and reduced.far_counts == (2,), "its leader alone counts"
    many = [(n, n - 1) for n in range(1, COUNTS_PER_STEP + 1)]
    assert reduce_progress([probed(*many)] * 2).far_counts == tuple(range(COUNTS_PER_STEP))


def test_slabs_are_what_all_ranks_have_and_as_late_as_on_the_slowest() -> None:
    reports = [SlabReport(b"\1\1\0", 4, 0), SlabReport(b"\1\0\0", 300, 2), SlabReport(b"\1\1\1", 3, 1)]
    ranks = [replace(progress(1), slab_report=report) for report in reports]
    assert reduce_progress(ranks).slab_report == SlabReport(b"\1\0\0", 3, 2)
    reports = [SlabReport(b"\1\0", readable=b"\1\0"), SlabReport(b"\1\1"), SlabReport(b"\0\1", readable=b"\0\1")]
    ranks = [replace(progress(1), slab_report=report) for report in reports]
    assert reduce_progress(ranks).slab_report == SlabReport(b"\0\0", readable=b"\0\0")
    assert reduce_progress(ranks[:2]).slab_report == SlabReport(b"\1\0", readable=b"\1\0")
    assert reduce_progress(ranks[1:2]).slab_report.is_readable(1)
    assert reduce_progress(ranks[:1]) == replace(ranks[0], counts=dict.fromkeys(STORAGE_LINKS, ()))


def test_what_ranks_reduce_has_one_shape() -> None:
    """A collective of another size would hang, or mix columns."""
    report = SlabReport(b"\0\0", 0, 0)
    idle = replace(progress(0), slab_report=report)
    busy = replace(probed((5, 3)), failed={H2D: 0}, slab_report=SlabReport(b"\1\1", 7, 7))
    assert pack_progress(idle).shape == pack_progress(busy).shape


def recorded(seed: int = 3) -> bytes:
    soak = Soak(SoakConfig.draw(seed, 40))
    soak.run()
    return soak.record.getvalue()


def test_replay_notices_a_changed_decision_and_a_cut_off_record() -> None:
    data = recorded()
    steps = replay(io.BytesIO(data))
    assert steps > 20
    # Cut off in the last digest, and in the inputs before it: a digest takes 4 + 16 bytes.
    assert replay(io.BytesIO(data[:-3])) == replay(io.BytesIO(data[:-25])) == steps - 1
    with pytest.raises(ValueError, match="no record"):
        replay(io.BytesIO(b""))
    # A record of before the format was named begins with the configuration.
    unnamed = data[4 + int.from_bytes(data[:4], "little") :]
    with pytest.raises(ValueError, match="of another version: record it anew"):
        replay(io.BytesIO(unnamed))
    with pytest.raises(ValueError, match="cut off before its first step"):
        replay(io.BytesIO(data[:30]))
    # The digest is the last thing in a frame: flip its last bit.
    broken = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ReplayMismatchError, match="decides differently"):
        replay(io.BytesIO(broken))


def test_a_disk_that_is_full_ends_the_record_alone(caplog) -> None:
    class Full(io.BytesIO):
        is_full = False

        def flush(self) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")

    file = Full()
    rank = ScriptedRank(file)
    file.is_full = True
    for new in ((asked(),), ()):
        rank.core.step(0.0, rank.core.progress(), new)
    assert [each.message for each in caplog.records] == [
        "--record-steps: no more is recorded (No space left on device)"
    ]


# -- costs ----------------------------------------------------------------------------------------------------


def test_costs_are_rank_0_s_and_of_what_all_have_done() -> None:
    cost = {EXEC: {4: 0.4, 5: 0.5, 6: 0.6}, STALL: {4: 0.04, 6: 0.06}, H2D: {1: 0.1, 2: 0.2}, D2H: {0: 0.7}}
    first = Progress(progress(7, 3, 1).done, {}, {}, cost=cost)
    other = Progress(progress(5, 2, 1).done, {}, {}, cost={EXEC: {4: 9.0}, H2D: {1: 9.0}})
    assert reduce_progress([first, other]).cost == {EXEC: {4: 0.4}, STALL: {4: 0.04}, H2D: {1: 0.1}, D2H: {0: 0.7}}
    assert reduce_progress([first, first]).cost == cost
    assert reduce_progress([other, first]).cost == {EXEC: {4: 9.0}, H2D: {1: 9.0}}


class Scripted:
    """An executor or a link of which a test says what has ended, in order."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.submitted: list[TransferOp] = []
        self.results: list[StepResult | OpResult] = []

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)

    def submit(self, op: TransferOp) -> None:
        self.submitted.append(op)

    def reset(self, mark: int) -> None:
        pass

    def cancel(self, ticket: Ticket) -> None:
        pass

    def poll(self) -> list:
        results, self.results = self.results, []
        return results


class ScriptedRank:
    def __init__(self, record: io.BytesIO | None = None) -> None:
        config = SchedulerConfig(page_size=1, num_device_pages=64, num_host_pages=64, page_bytes=8, context_len=60)
        self.executor, self.links = Scripted(), {H2D: Scripted(), D2H: Scripted()}
        recorder = StepRecorder(record, config) if record is not None else None
        self.core = EngineCore(Scheduler(config), self.executor, dict(self.links), record=recorder)  # type: ignore
        self.seen: list[dict[str, dict[int, float]]] = []
        take = self.core.scheduler.planner.take_costs

        def spy(inputs: StepInputs, launches: dict[int, LaunchRecord]) -> None:
            self.seen.append({name: dict(costs) for name, costs in inputs.cost.items()})
            take(inputs, launches)

        self.core.scheduler.planner.take_costs = spy  # type: ignore[method-assign]

    def ends(self, seq: int, seconds: float, stall_s: float = 0.0) -> None:
        launch = self.executor.launches[seq]
        tokens = ids_to_bytes([7] * int(launch.samples.sum()))
        self.executor.results.append(StepResult(seq, tokens, False, None, seconds, stall_s))


def asked() -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid="a", input_ids=ids_to_bytes([5, 6, 7]), sampling_params=params)


def test_a_step_follows_a_launch_at_once_only_where_another_may_be_issued() -> None:
    rank = ScriptedRank()
    rank.core.step(0.0, rank.core.progress(), [asked()])
    nothing_new = rank.core.progress()
    assert rank.core.has_work(0.0)
    rank.core.step(0.0, nothing_new)
    assert len(rank.executor.launches) == rank.core.scheduler.config.max_ahead == 2
    rank.core.progress()
    assert not rank.core.has_work(0.0)
    rank.ends(0, 1.0)
    completed = rank.core.progress()
    assert rank.core.has_work(0.0)
    rank.core.step(0.0, completed)
    assert len(rank.executor.launches) == 3
    rank.core.progress()
    assert not rank.core.has_work(0.0)


def test_no_cost_is_lost_or_used_twice_while_a_rank_is_behind() -> None:
    """Rank 1 reports each launch two steps after rank 0: each cost is learned when both have it, by both, once."""
    record = io.BytesIO()
    ranks = [ScriptedRank(record), ScriptedRank()]

    def step(*new: TokenizedGenerateReqInput) -> None:
        reduced = reduce_progress([rank.core.progress() for rank in ranks])
        for rank in ranks:
            rank.core.step(0.0, reduced, new)

    step(asked())
    step()
    for seq in range(6):
        ranks[0].ends(seq, 1.0 + seq, stall_s=0.5 * (seq == 1))
        step()
        if seq:
            ranks[1].ends(seq - 1, 99.0, stall_s=77.0)
        step()
        assert ranks[0].core.scheduler.clock.done == seq
    learned = [{name: costs for name, costs in each.items() if costs} for each in ranks[0].seen]
    assert [each for each in learned if each] == [
        {EXEC: {0: 1.0}},
        {EXEC: {1: 2.0}, STALL: {1: 0.5}},
        {EXEC: {2: 3.0}},
        {EXEC: {3: 4.0}},
        {EXEC: {4: 5.0}},
    ]
    assert ranks[0].seen == ranks[1].seen
    schedulers = [rank.core.scheduler for rank in ranks]
    assert schedulers[0].planner.stall_s == schedulers[1].planner.stall_s == 0.5
    assert schedulers[0].planner.expected.costs.state() == schedulers[1].planner.expected.costs.state()
    assert (
        schedulers[0].planner.expected.costs._prefill.num_samples == 1
        and schedulers[0].planner.expected.costs._decode.num_samples == 4
    )
    # Rank 0 has kept what rank 1 has not done yet, and nothing else; rank 1 nothing at all.
    assert [{name: costs for name, costs in rank.core._cost.items() if costs} for rank in ranks] == [
        {EXEC: {5: 6.0}},
        {},
    ]
    record.seek(0)
    assert replay(record) == 14


def test_a_failed_launch_teaches_nothing_and_later_ones_wait_their_turn() -> None:
    rank = ScriptedRank()
    rank.core.step(0.0, rank.core.progress(), [asked()])
    rank.core.step(0.0, rank.core.progress())
    # Both are over when anybody looks: the first failed, so that the second is void.
    rank.executor.results += [StepResult(0, b"", True, None, 1.0, 0.25), StepResult(1, b"", False, None, 2.0, 0.25)]
    decision = rank.core.step(0.0, rank.core.progress())
    assert decision.reset == 2 and rank.core._cost[EXEC] == {1: 2.0} and rank.core._cost[STALL] == {1: 0.25}
    rank.core.step(0.0, rank.core.progress())
    assert rank.core._cost[EXEC] == rank.core._cost[STALL] == {}
    scheduler = rank.core.scheduler
    assert scheduler.planner.stall_s == 0.0 and not any(scheduler.planner.expected.costs.state().values())
    rank.ends(2, 4.0)
    rank.core.step(0.0, rank.core.progress())
    assert scheduler.planner.expected.costs._prefill.num_samples == 1
    assert scheduler.planner.expected.costs.prefill_seconds(3, 0, 6) == pytest.approx(4.0, rel=0.01)


def test_a_record_with_costs_replays() -> None:
    """Rank 0's costs have reached rank 1, and the record; `run` replays it, too."""
    soak = Soak(replace(SoakConfig.draw(216, 60), num_ranks=2))
    soak.run()
    scheduler = soak.ranks[0].core.scheduler
    costs = scheduler.planner.expected.costs
    fits = (costs._prefill, costs._decode, costs._copies[H2D], costs.stores[0]._fetch)
    assert all(fit.num_samples > 0 for fit in fits)
    assert soak.ranks[1].core.scheduler.planner.expected.costs.state() == scheduler.planner.expected.costs.state()
    data = soak.record.getvalue()
    assert replay(io.BytesIO(data)) > 60
