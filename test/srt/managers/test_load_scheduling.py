"""What the scheduler does about loads and about prompts that are being computed: each mechanism alone, on against
off, on a virtual clock. Costs are simple, so that times can be worked out by hand:

    decode step 10 ms     prefill 1 ms per new token, in 4 layers     load: 1,000 bytes per token, at the test's rate
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from msgspec.structs import replace

from sglang.simulator.health import HEALTHY, LinkHealth
from sglang.simulator.simulation import RequestTimes, SimulatedHardware, Simulation
from sglang.srt.managers import admission
from sglang.srt.managers.cost_model import LoadLimit
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.schedule_policy import MOST_PASSED, balanced_order, pairs_of
from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS, Req, SchedulerConfig
from sglang.srt.managers.scheduler_config import PriorityConfig
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import MatchResult
from sglang.srt.mem_cache.transfer import H2D, Tier, TransferOp
from sglang.srt.model_executor.launch import Launch, LaunchMode
from sglang.srt.sampling.sampling_params import SamplingParams

LAYERS = 4
DECODE_S = 0.010
TOKEN_S = 0.001
TOKEN_BYTES = 1000
DOCUMENT = list(range(100))
OFF = {"bubble_filling": False, "load_or_recompute": False, "deferral_threshold": 0, "load_ratio": 0.0}


def launch_seconds(launch: Launch) -> float:
    return DECODE_S if launch.mode == LaunchMode.DECODE else TOKEN_S * int(launch.lens.sum())


def request(rid: str, prompt: list[int], max_new_tokens: int = 1) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids_to_bytes(prompt), sampling_params=params, stream=True)


def fresh(n: int, which: int = 0) -> list[int]:
    """Tokens that nobody else has."""
    return list(range(10_000 * (which + 1), 10_000 * (which + 1) + n))


class Rig:
    """A simulation with all mechanisms off but those that a test asks for, and times from when `run` was called.
    load_s: seconds that a token takes to load. health: of the link that loads. aborts: when which request is aborted.
    check_every: so many steps."""

    def __init__(
        self,
        load_s: float = 0.005,
        fails: Callable[[TransferOp], bool] = lambda op: False,
        taught: bool = True,
        check_every: int = 1,
        health: LinkHealth = HEALTHY,
        **changes: object,
    ) -> None:
        settings = {"page_size": 1, "num_device_pages": 1000, "num_host_pages": 2000, "context_len": 900, **OFF}
        settings["write_policy"] = "write_through"
        config = SchedulerConfig(**{**settings, **changes, "page_bytes": 0})  # type: ignore[arg-type]
        config = SchedulerConfig(**{**config.__dict__, "page_bytes": TOKEN_BYTES * config.page_size})
        hardware = SimulatedHardware(
            LAYERS, launch_seconds, TOKEN_BYTES / load_s, load_fails=fails, health={H2D: health}
        )
        self.sim = Simulation(config, hardware)
        self.scheduler = self.sim.core.scheduler
        self.load_s = load_s
        self.check_every = check_every
        self.aborts: dict[str, float] = {}
        self.launches: list[tuple[float, Launch]] = []
        self.loads: list[tuple[float, TransferOp]] = []
        self.preloads: dict[str, Req] = {}
        self.began = 0.0
        self._step = self.sim.core.step
        self.sim.core.step = self._with_aborts  # type: ignore[method-assign]
        if taught:
            self.teach()

    def teach(self) -> None:
        costs = self.scheduler.planner.expected.costs
        for n in (1, 5, 20, 100, 200, 5, 20, 100):
            costs.add_prefill(n, 0, pairs_of(0, n), TOKEN_S * n)
            costs.add_copy(n * TOKEN_BYTES, n * self.load_s, H2D)
            costs.add_decode(1, 50, DECODE_S)

    def _with_aborts(self, now, progress, new=(), *rest, **more):
        due = [rid for rid, at in self.aborts.items() if self.began + at <= now and rid in self.scheduler.queues]
        return self._step(now, progress, new, due, *rest, **more)

    def remember(self, *documents: list[int]) -> None:
        """Have them on the host, and nothing on the device."""
        self.run([(10.0 * i, request(f"first{i}", d)) for i, d in enumerate(documents)])
        self.scheduler.cache.controller.evict(Tier.DEVICE, 10**6)
        assert self.scheduler.cache.tree.resident_pages(Tier.DEVICE) == 0
        for document in documents:
            match = self.scheduler.cache.tree.match("", np.array(document, np.int32))
            page = self.scheduler.page_size
            assert (match.total_len, match.device_len) == (len(document) // page * page, 0)
        self.scheduler.counters.clear()
        self.sim.executor.stall_s = 0.0

    def run(
        self,
        arrivals: Iterable[tuple[float, TokenizedGenerateReqInput]],
        after_step: Callable[[BatchDecision], None] = lambda decision: None,
    ) -> dict[str, RequestTimes]:
        self.launches, self.loads, self.began = [], [], self.sim.now
        before = set(self.sim.times)

        def stepped(decision: BatchDecision) -> None:
            if decision.step % self.check_every == 0:
                self.scheduler.check_invariants()
            now = self.sim.now - self.began
            if decision.launch is not None:
                self.launches.append((now, decision.launch))
            self.loads += [(now, op) for op in decision.ops if op.ticket.link == H2D]
            for req in self.scheduler.queues.waiting:
                if req.preload is not None:
                    self.preloads[req.rid] = req
            after_step(decision)

        times = self.sim.run([(self.began + at, req) for at, req in arrivals], after_step=stepped)
        self.scheduler.check_invariants()
        assert all(node.lock == 0 for node in self.scheduler.cache.tree.walk())
        for table in self.scheduler.cache.tables.values():
            assert table.counts[FrameState.FREE] + table.counts[FrameState.CACHED] == table.num_pages
        return {rid: t for rid, t in times.items() if rid not in before}

    def first(self, times: dict[str, RequestTimes], rid: str) -> float:
        return times[rid].tokens[0] - self.began

    def counter(self, name: str) -> int:
        return self.scheduler.counters[name]

    def prefills(self) -> list[tuple[float, Launch]]:
        return [(at, launch) for at, launch in self.launches if launch.mode == LaunchMode.EXTEND]

    def spans_of_loads(self) -> list[tuple[float, float]]:
        """When the bytes of this run's loads moved."""
        timings = self.sim.links[H2D]._timings
        return [
            (timings[op.ticket.seq].start - self.began, timings[op.ticket.seq].end - self.began)
            for _, op in self.loads
        ]


def gaps(times: RequestTimes) -> list[float]:
    return np.diff(times.tokens).tolist()


# -- bubble filling -------------------------------------------------------------------------------------------

RUNNER = (0.0, request("runner", fresh(10), 100))


@pytest.mark.parametrize("load_s", [0.002, 0.005])
def test_decoding_goes_on_while_a_load_is_under_way(load_s: float) -> None:
    """A prompt whose 100 tokens come from the host joins one that is decoding."""

    def run(on: bool) -> tuple[Rig, dict[str, RequestTimes]]:
        rig = Rig(load_s, bubble_filling=on)
        rig.remember(DOCUMENT)
        return rig, rig.run([RUNNER, (0.1, request("loads", DOCUMENT + fresh(5, 1)))])

    (off, plain), (on, filled) = run(False), run(True)
    load = 100 * load_s
    # Its load begins when it would have been launched without: what was in flight at 0.1 is over then.
    began = on.loads[0][0]
    assert began == off.loads[0][0] and 0.1 <= began <= 0.1 + 2 * DECODE_S
    assert off.prefills()[-1][0] == began and on.prefills()[-1][0] > began + load - 3 * DECODE_S
    # Without, everybody waits for the load, but for the step that was issued before; the last layer follows it.
    assert off.first(plain, "loads") == pytest.approx(began + load + 5 * TOKEN_S / LAYERS)
    assert max(gaps(plain["runner"])) == pytest.approx(load - DECODE_S + 5 * TOKEN_S / LAYERS + DECODE_S)
    assert off.sim.executor.stall_s == pytest.approx(load - DECODE_S - 5 * TOKEN_S * (LAYERS - 1) / LAYERS)
    # With, no token of the other is later than by the prefill and less than a step of waiting.
    assert max(gaps(filled["runner"])) <= 2 * DECODE_S + 5 * TOKEN_S + 1e-9
    assert on.sim.executor.stall_s <= DECODE_S
    delay = on.first(filled, "loads") - off.first(plain, "loads")
    assert -1e-9 <= delay <= DECODE_S
    # A launch went in between for every 10 ms of the load, less those that were issued before and the last.
    assert off.counter("bubbles_filled") == 0
    assert abs(on.counter("bubbles_filled") - load / DECODE_S) <= 3
    assert filled["loads"].cached_tokens_details == plain["loads"].cached_tokens_details == {"device": 0, "host": 100}


def test_requests_that_need_no_load_pass_one_that_waits_for_its_own() -> None:
    rig = Rig(bubble_filling=True)
    rig.remember(DOCUMENT)
    arrivals = [RUNNER, (0.1, request("loads", DOCUMENT + fresh(5, 1)))]
    arrivals += [(0.15, request("cold", fresh(20, 2))), (0.2, request("hit", [*fresh(20, 2), 7]))]
    times = rig.run(arrivals)
    assert times["cold"].ttft < 0.05 and times["hit"].ttft < 0.03
    assert times["hit"].cached_tokens_details == {"device": 20, "host": 0}
    assert times["loads"].ttft == pytest.approx(0.5, abs=2 * DECODE_S)
    assert rig.counter("deprioritised") == 0, "who waits for its own load is not put off by others"


def test_a_request_waits_for_one_load_however_its_match_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others add to what the host has of a prompt while its load is under way: the match of the load ends 20 tokens
    early. Then the request does not wait again: what it has loaded leaves the next one too little room, and those
    behind that, for whose work it would wait, would never come to their turn."""
    rig = Rig(bubble_filling=True, num_device_pages=180)
    other = fresh(100, 5)
    rig.remember(DOCUMENT, other)
    preload = rig.scheduler.admission._begin_preload

    def preload_early_part(req: Req, match: MatchResult) -> bool:
        if req.rid == "loads":
            match = rig.scheduler.cache.tree.match("", np.array(DOCUMENT[:80], np.int32))
        return preload(req, match)

    monkeypatch.setattr(rig.scheduler.admission, "_begin_preload", preload_early_part)
    arrivals = [(0.0, request("runner", fresh(5), 60)), (0.01, request("loads", DOCUMENT + fresh(5, 1)))]
    arrivals += [(0.02, request("behind", other + fresh(5, 2))), (0.3, request("small", fresh(10, 3)))]
    times = rig.run(arrivals)
    assert times["loads"].tokens[0] <= times["behind"].tokens[0]
    assert times["loads"].ttft < 0.8


def test_a_load_alone_is_launched_at_once_and_overlaps_layer_by_layer() -> None:
    for compute in (5, 40, 400):
        rig = Rig(0.001, bubble_filling=True)
        rig.remember(DOCUMENT)
        times = rig.run([(0.0, request("loads", DOCUMENT + fresh(compute, 1)))])
        load_s, compute_s = 0.1, compute * TOKEN_S
        slower = max(load_s + compute_s / LAYERS, compute_s + load_s / LAYERS)
        assert times["loads"].ttft == pytest.approx(slower)
        assert rig.counter("bubbles_filled") == 0 and not rig.preloads
        assert [at for at, _ in rig.launches] == [0.0] and rig.launches[0][1].gates == (rig.loads[0][1].ticket,)


def test_a_load_that_computation_hides_is_not_waited_for() -> None:
    """300 tokens are computed while 100 are loaded, a quarter of which must be in before."""
    rig = Rig(0.0003, bubble_filling=True)
    rig.remember(DOCUMENT)
    times = rig.run([RUNNER, (0.1, request("loads", DOCUMENT + fresh(300, 1)))])
    assert rig.counter("bubbles_filled") == 0 and not rig.preloads
    assert times["loads"].ttft <= 300 * TOKEN_S + 3 * DECODE_S


def test_the_link_never_idles_while_somebody_waits_to_load() -> None:
    documents = [fresh(100, i) for i in range(5)]
    rig = Rig(0.002, bubble_filling=True)
    rig.remember(*documents)
    arrivals = [(0.0, request("runner", fresh(10, 8), 150))]
    arrivals += [(0.1, request(f"loads{i}", [*d, i])) for i, d in enumerate(documents)]
    times = rig.run(arrivals)
    spans = rig.spans_of_loads()
    assert len(spans) == 5
    assert [start for start, _ in spans[1:]] == pytest.approx([end for _, end in spans[:-1]])
    # Each comes when its own load is in, not when all are.
    firsts = [rig.first(times, f"loads{i}") for i in range(5)]
    for first, (_, end) in zip(firsts, spans):
        assert end < first <= end + 3 * DECODE_S
    assert max(gaps(times["runner"])) < 3 * DECODE_S


def test_who_shares_a_load_waits_for_it_without_one_of_its_own() -> None:
    rig = Rig(bubble_filling=True)
    rig.remember(DOCUMENT)
    arrivals = [RUNNER, *((0.1 + 0.05 * i, request(f"loads{i}", DOCUMENT + fresh(5, i + 1))) for i in range(3))]
    times = rig.run(arrivals)
    assert len(rig.loads) == 1 and list(rig.preloads) == ["loads0"]
    (joint,) = [launch for _, launch in rig.prefills() if launch.gates or len(launch.lens) == 3]
    assert joint.lens.tolist() == [5, 5, 5]
    assert max(gaps(times["runner"])) <= 2 * DECODE_S + 15 * TOKEN_S
    assert len({times[f"loads{i}"].tokens[0] for i in range(3)}) == 1


def test_without_costs_nobody_waits() -> None:
    rig = Rig(taught=False, bubble_filling=True)
    rig.remember(DOCUMENT)
    rig.run([RUNNER, (0.1, request("loads", DOCUMENT + fresh(5, 1)))])
    assert rig.counter("bubbles_filled") == 0 and not rig.preloads


def test_decoding_takes_back_what_was_loaded_ahead() -> None:
    """One slot: while the first decodes, the second's load comes in; then the first needs the memory."""
    rig = Rig(0.001, bubble_filling=True, num_device_pages=150, context_len=149, max_running_requests=1)
    rig.scheduler.config = SchedulerConfig(**{**rig.scheduler.config.__dict__, "new_token_ratio": 0.0})
    rig.remember(DOCUMENT)
    seen = []

    def look(decision: BatchDecision) -> None:
        (loads,) = [
            r for r in (*rig.scheduler.queues.waiting, *rig.scheduler.queues.active()) if r.rid == "loads"
        ] or [None]
        seen.append(loads is not None and loads.preload is not None)

    arrivals = [(0.0, request("runner", fresh(10), 100)), (0.005, request("loads", DOCUMENT + fresh(5, 1)))]
    times = rig.run(arrivals, look)
    assert True in seen and False in seen[seen.index(True) :][: len(seen) // 2], "it was not given up"
    assert gaps(times["runner"]) == pytest.approx([DECODE_S] * 99), "decoding does not wait for that"
    assert rig.counter("retracted_reqs") == 0
    assert times["loads"].finish_reason == "length" and len(rig.loads) >= 2


def test_the_oldest_takes_back_what_others_have_loaded_ahead() -> None:
    rig = Rig(0.001, bubble_filling=True, num_device_pages=150, context_len=149, max_running_requests=1)
    rig.remember(DOCUMENT)
    # With one slot, "old" waits behind "runner" and fits, as nothing is loaded yet; so the other loads ahead.
    arrivals = [
        (0.0, request("runner", fresh(10), 30)),
        (0.005, request("old", fresh(130, 2))),
        (0.005, request("loads", DOCUMENT + fresh(5, 1))),
    ]
    times = rig.run(arrivals)
    assert "loads" in rig.preloads
    assert rig.first(times, "runner") < rig.first(times, "old") < rig.first(times, "loads")
    assert rig.first(times, "old") <= times["runner"].tokens[-1] - rig.began + 130 * TOKEN_S + 2 * DECODE_S


def test_an_aborted_request_leaves_nothing_of_its_load_locked() -> None:
    for at in (0.13, 0.3, 0.55):
        rig = Rig(bubble_filling=True)
        rig.remember(DOCUMENT)
        rig.aborts["loads"] = at
        times = rig.run([RUNNER, (0.1, request("loads", DOCUMENT + fresh(5, 1)))])
        assert times["loads"].finish_reason == "abort" and "loads" in rig.preloads
        assert len(times["runner"].tokens) == 100
        # `run` has seen to it that nothing is locked; what came is there for others.
        assert rig.scheduler.cache.tree.match("", np.array(DOCUMENT, np.int32)).device_len == 100


def test_a_load_ahead_that_fails_is_computed() -> None:
    rig = Rig(bubble_filling=True, fails=lambda op: True)
    rig.remember(DOCUMENT)
    arrivals = [RUNNER, *((0.1, request(f"loads{i}", DOCUMENT + fresh(5, i + 1))) for i in range(2))]
    times = rig.run(arrivals)
    assert len(rig.preloads) == 1 and len(rig.loads) == 1
    for i in range(2):
        assert len(times[f"loads{i}"].tokens) == 1
        assert times[f"loads{i}"].cached_tokens_details["host"] == 0
    # Both are launched when the load is nearly in, and again when it has failed; then one computes it for both.
    assert rig.counter("failed_launches") == 1
    assert {5, 105} <= set(rig.prefills()[-1][1].lens.tolist())


def test_a_failed_launch_ends_loads_ahead_and_loses_nothing() -> None:
    """ "bad" is launched at once with a load that fails at its end; "good" comes meanwhile and loads ahead."""
    documents = [fresh(100, i) for i in range(2)]
    rig = Rig(bubble_filling=True, fails=lambda op: op.ticket.seq == 0)
    rig.remember(*documents)
    ended = []

    def look(decision: BatchDecision) -> None:
        if decision.reset is not None:
            ended.append(all(r.preload is None for r in rig.scheduler.queues.waiting))

    arrivals = [(0.0, request("bad", [*documents[0], 1], 40)), (0.2, request("good", [*documents[1], 1]))]
    times = rig.run(arrivals, look)
    assert len(ended) == rig.counter("failed_launches") == 1
    assert {rid: len(t.tokens) for rid, t in times.items()} == {"bad": 40, "good": 1}
    assert times["bad"].cached_tokens_details == {"device": 0, "host": 0}
    assert times["good"].cached_tokens_details == {"device": 0, "host": 100}
    assert sum(op.size_bytes for _, op in rig.loads) == 200 * TOKEN_BYTES, "what is on its way is not loaded twice"


# -- load or recompute ----------------------------------------------------------------------------------------


def seconds_of_launch(num_load: int, front: int, rest: int, load_s: float) -> float:
    """Layer by layer."""
    time = 0.0
    for layer in range(LAYERS):
        arrived = (num_load - front) * load_s * (layer + 1) / LAYERS
        time = max(time, arrived) + (front + rest) * TOKEN_S / LAYERS
    return time


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("load_s", [0.0005, 0.002, 0.01])
def test_the_front_is_computed_while_the_rest_is_loaded(page_size: int, load_s: float) -> None:
    document = fresh(160)

    def run(on: bool) -> tuple[Rig, RequestTimes]:
        rig = Rig(load_s, load_or_recompute=on, page_size=page_size, num_device_pages=1000 // page_size)
        rig.remember(document)
        return rig, rig.run([(0.0, request("a", document + fresh(5, 1)))])["a"]

    (off, plain), (on, mixed) = run(False), run(True)
    assert plain.ttft == pytest.approx(seconds_of_launch(160, 0, 5, load_s))
    assert off.counter("recomputed_instead") == 0
    best = min(seconds_of_launch(160, front, 5, load_s) for front in range(0, 161, page_size))
    front = on.counter("recomputed_instead_tokens")
    assert front % page_size == 0 and mixed.ttft == pytest.approx(seconds_of_launch(160, front, 5, load_s))
    assert mixed.ttft <= best + page_size * TOKEN_S and mixed.ttft < plain.ttft
    assert on.counter("recomputed_instead") == 1
    # Every token comes from one place.
    assert mixed.cached_tokens_details == {"device": 0, "host": 160 - front}
    assert sum(int(launch.lens.sum()) for _, launch in on.launches) == front + 5
    assert sum(op.size_bytes for _, op in on.loads) == (160 - front) * TOKEN_BYTES
    assert on.scheduler.cache.tree.match("", np.array(document, np.int32)).device_len == 160


def test_a_fast_link_loads_everything() -> None:
    rig = Rig(1e-6, load_or_recompute=True)
    rig.remember(DOCUMENT)
    times = rig.run([(0.0, request("a", DOCUMENT + fresh(50, 1)))])
    assert rig.counter("recomputed_instead") == 0 and times["a"].cached_tokens_details["host"] == 100


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("load_s", "computes"), [(0.0005, False), (0.0009, False), (0.002, True)])
def test_beside_others_computing_must_be_cheaper_than_loading(load_s: float, computes: bool) -> None:
    """A token takes 1 ms to compute: alone, the front is computed while the rest is loaded; beside others only if
    that takes less of everybody's time."""
    for alone in (True, False):
        rig = Rig(load_s, load_or_recompute=True)
        rig.remember(DOCUMENT)
        rig.run([*([] if alone else [RUNNER]), (0.1, request("a", DOCUMENT + fresh(5, 1)))])
        assert (rig.counter("recomputed_instead") > 0) == (alone or computes)


def test_nothing_is_computed_instead_of_a_load_that_nobody_has_measured() -> None:
    rig = Rig(0.01, taught=False, load_or_recompute=True)
    rig.remember(DOCUMENT)
    times = rig.run([(0.0, request("a", DOCUMENT + fresh(5, 1)))])
    assert rig.counter("recomputed_instead") == 0 and times["a"].cached_tokens_details["host"] == 100


def test_after_a_failed_load_behind_a_front_nothing_is_lost() -> None:
    document = fresh(160)
    rig = Rig(0.002, load_or_recompute=True, fails=lambda op: op.ticket.seq == 0)
    rig.remember(document)
    times = rig.run([(0.0, request("a", document + fresh(5, 1), 3))])
    assert rig.counter("failed_launches") == 1 and len(times["a"].tokens) == 3
    ((_, lost),) = rig.loads
    # What did not come is computed, and so is the front, which the host still has: nothing is loaded for a while.
    assert 0 < lost.size_bytes < 160 * TOKEN_BYTES
    assert rig.prefills()[-1][1].lens.sum() == 165
    assert times["a"].cached_tokens_details == {"device": 0, "host": 0}


@pytest.mark.parametrize("num_load", [100, 800])
def test_behind_a_load_that_was_late_only_what_is_soon_computed_is(num_load: int) -> None:
    """A load is late by 60 ms, more than is expected. What comes then would compute 100 tokens in 100 ms, or 800 in
    800, of which a quarter is longer than that."""
    hang = 1000.0
    health = LinkHealth(((hang, 0.0), (hang + 0.06, 1.0)))
    sizes = {"num_device_pages": 3000, "num_host_pages": 4000}
    rig = Rig(1e-4, load_or_recompute=True, health=health, **sizes)
    late, document = fresh(100), fresh(num_load, 1)
    rig.remember(late, document)
    at = hang - rig.sim.now
    times = rig.run([(at, request("late", late + [1])), (at + 0.072, request("next", document + [2]))])
    assert times["late"].cached_tokens_details["host"] == 100
    is_long = num_load == 800
    assert times["next"].cached_tokens_details["host"] == (800 if is_long else 0)
    assert times["next"].ttft == pytest.approx(0.08 if is_long else 0.1, abs=0.002)


def test_what_is_published_late_is_never_computed_instead() -> None:
    """Others would take the front for loaded before it is there."""
    rig = Rig(0.01, load_or_recompute=True, insert_at="completion")
    rig.remember(DOCUMENT)
    rig.run([(0.0, request("a", DOCUMENT + fresh(5, 1)))])
    assert rig.counter("recomputed_instead") == 0


# -- delay hits -----------------------------------------------------------------------------------------------


def computed(rig: Rig) -> int:
    return sum(int(launch.lens.sum()) for _, launch in rig.prefills())


@pytest.mark.parametrize(
    ("insert_at", "threshold", "tokens", "deferred"),
    [("completion", 0, 400, 0), ("completion", 100, 201, 1), ("launch", 0, 201, 0), ("launch", 100, 201, 1)],
)
def test_two_who_ask_the_same_at_once(insert_at: str, threshold: int, tokens: int, deferred: int) -> None:
    rig = Rig(insert_at=insert_at, deferral_threshold=threshold)
    prompt = fresh(200)
    times = rig.run([(0.0, request("a", prompt)), (0.0, request("b", prompt))])
    assert computed(rig) == tokens and rig.counter("deferred") == deferred
    assert times["a"].ttft == pytest.approx({400: 0.4, 201: 0.2}[tokens], abs=0.0011)
    assert times["b"].cached_tokens_details["device"] == 400 - tokens
    # Where it is inserted at launch, one launch does both.
    assert len(rig.prefills()) == (2 if insert_at == "completion" and threshold else 1)


@pytest.mark.parametrize(("shared", "deferred"), [(100, 0), (101, 1)])
def test_who_shares_little_does_not_wait(shared: int, deferred: int) -> None:
    rig = Rig(insert_at="completion", deferral_threshold=100)
    rig.run([(0.0, request("a", fresh(shared) + fresh(90, 1))), (0.0, request("b", fresh(shared) + fresh(90, 2)))])
    assert rig.counter("deferred") == deferred
    assert computed(rig) == 2 * (shared + 90) - deferred * shared


@pytest.mark.parametrize("insert_at", ["launch", "completion"])
def test_a_delay_hit_comes_right_after_the_oldest(insert_at: str) -> None:
    """Six others are in the queue before the second of two who ask the same. A launch takes 201 tokens: those of "a"
    and one of the first of them, then the rest of that one, the second, and so on."""
    prompt = fresh(200)

    def run(threshold: int) -> list[float]:
        rig = Rig(insert_at=insert_at, deferral_threshold=threshold, chunked_prefill_size=201, max_ahead=1)
        others = [(0.0, request(f"other{i}", fresh(60, i + 1))) for i in range(6)]
        times = rig.run([(0.0, request("a", prompt)), *others, (0.0, request("again", prompt))])
        assert computed(rig) == 201 + 6 * 60
        return [t.tokens[0] for t in times.values()]

    a, *others, again = run(0)
    assert again == max(others) and a == pytest.approx(0.201)
    a, *others, again = run(100)
    assert again == others[0] == others[1] == pytest.approx(0.402) and again < min(others[3:])


@pytest.mark.parametrize("insert_at", ["launch", "completion"])
def test_chains_of_delay_hits_compute_each_part_once(insert_at: str) -> None:
    x, y, z = fresh(200, 1), fresh(150, 2), fresh(120, 3)
    rig = Rig(insert_at=insert_at, deferral_threshold=100)
    times = rig.run([(0.0, request("a", x)), (0.0, request("b", x + y)), (0.0, request("c", x + y + z))])
    assert computed(rig) == len(x + y + z) and rig.counter("deferred") == 2
    assert times["c"].cached_tokens_details["device"] == 350
    if insert_at == "completion":
        assert [t.tokens[0] for t in times.values()] == pytest.approx([0.2, 0.35, 0.47])


def test_nobody_waits_for_a_request_that_is_gone() -> None:
    """With one slot all three wait; the owner of the prompt is aborted before it begins."""
    rig = Rig(insert_at="completion", deferral_threshold=100, max_running_requests=1)
    rig.aborts["a"] = 0.1
    prompt = fresh(200, 1)
    times = rig.run(
        [(0.0, request("runner", fresh(10), 30)), *((0.01, request(rid, prompt)) for rid in ("a", "b", "c"))]
    )
    assert times["a"].finish_reason == "abort" and not times["a"].tokens
    assert times["b"].tokens[0] == pytest.approx(times["runner"].tokens[-1] + 0.2, abs=2 * DECODE_S)
    assert computed(rig) == 10 + 200 + 1 and len(rig.scheduler.cache.tree.claims) == 0


@pytest.mark.parametrize("insert_at", ["launch", "completion"])
def test_nobody_waits_for_a_request_that_waits_for_storage(insert_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(insert_at=insert_at, deferral_threshold=100)
    until = 1.0
    storage = rig.scheduler.storage
    monkeypatch.setattr(storage, "may_start", lambda rid: rid != "a" or rig.sim.now >= until)
    monkeypatch.setattr(storage, "startable", lambda waiting: [r for r in waiting if storage.may_start(r.rid)])
    prompt = fresh(200)
    times = rig.run([(0.0, request("a", prompt)), (0.0, request("b", prompt)), (until, request("c", fresh(20, 1)))])
    assert times["b"].ttft == pytest.approx(0.2)
    assert times["a"].ttft > until and times["a"].cached_tokens_details["device"] == 199
    assert computed(rig) == 200 + 1 + 20


def test_an_owner_that_fails_passes_the_prompt_on() -> None:
    """The owner loads a part that fails; whoever waits for the rest of its prompt goes on all the same."""
    rig = Rig(insert_at="completion", deferral_threshold=100, fails=lambda op: True)
    rig.remember(DOCUMENT)
    prompt = DOCUMENT + fresh(200, 1)
    times = rig.run([(0.0, request("a", prompt)), (0.0, request("b", prompt)), (0.0, request("c", prompt))])
    assert {len(t.tokens) for t in times.values()} == {1} and rig.counter("failed_launches") == 1
    assert times["c"].cached_tokens_details["device"] == 299
    assert len(rig.scheduler.cache.tree.claims) == 0


def test_a_request_that_starts_again_waits_for_nobody_once_that_is_off() -> None:
    """It was put off for another's tokens; then its launch fails, and an administrator has turned that off."""
    rig = Rig(insert_at="completion", deferral_threshold=100)
    prompt, asked = fresh(300, 1), []

    def turn_off(decision: BatchDecision) -> None:
        waiting = [r for r in rig.scheduler.queues.waiting if r.delay_end]
        if waiting and not asked:
            rig.scheduler.admission._policies.deferral_threshold = 0
            rig.scheduler.admission.claim(waiting[0])
            asked.extend(req for req, _ in rig.scheduler.admission.iter_admissible())

    times = rig.run([(0.0, request(rid, prompt)) for rid in "abc"], turn_off)
    assert asked and {len(t.tokens) for t in times.values()} == {1}


# -- batches, order -------------------------------------------------------------------------------------------


def test_auto_takes_as_much_load_as_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def spy(queue, limit):
        limits.append(limit)
        return balanced_order(queue, limit)

    monkeypatch.setattr(admission, "balanced_order", spy)
    documents = [fresh(100, i) for i in range(3)]

    def run(load_s: float, ratio: float | str, taught: bool = True) -> Rig:
        rig = Rig(load_s, taught=taught, load_ratio=ratio)
        rig.remember(*documents)
        limits.clear()
        busy = [(0.0, request("busy", fresh(50, 8)))]
        rig.run(busy + [(0.01, request(f"r{i}", d + fresh(30, 10 + i))) for i, d in enumerate(documents)])
        return rig

    slow = run(0.002, "auto")
    fitted = slow.scheduler.planner.expected.costs.load_limit()
    assert fitted is not None and all(limit.per_token == pytest.approx(0.5, rel=0.05) for limit in limits)
    # 30 new tokens hide 15 loaded ones: one load per batch.
    assert slow.counter("deprioritised") == 0 and [len(x.lens) for _, x in slow.prefills()] == [1, 3]
    run(0.002, 7.0)
    assert set(limits) == {LoadLimit(0.0, 7.0, 0.0)}
    run(0.002, "auto", taught=False)
    assert limits[0] == LoadLimit(0.0, 100.0, 0.0)


def test_lpm_takes_the_longest_cached_prefix_first() -> None:
    base = fresh(90)
    prompts = {"none": fresh(30, 1), "some": base[:50] + fresh(30, 2), "most": base + fresh(30, 3)}

    def run(policy: str) -> list[int]:
        rig = Rig(schedule_policy=policy, max_ahead=1)
        rig.run([(0.0, request("base", base))])
        arrivals = [(0.0, request("busy", fresh(100, 8)))]
        rig.run(arrivals + [(0.01, request(rid, prompt)) for rid, prompt in prompts.items()])
        return rig.prefills()[-1][1].starts.tolist()

    assert run("fcfs") == [0, 50, 90]
    assert run("lpm") == [90, 50, 0]


def test_lpm_lets_no_request_be_passed_for_ever() -> None:
    """One without a cached prefix comes first, and younger ones that have one go on coming."""
    base, most = fresh(90), 2 * MOST_PASSED
    prompts = {"none": fresh(60, 9), **{f"{i}": base + fresh(60, 100 + i) for i in range(most)}}

    def passed_by(policy: str) -> int:
        rig = Rig(schedule_policy=policy, max_ahead=1, chunked_prefill_size=60, max_prefill_tokens=60)
        rig.run([(0.0, request("base", base))])
        arrivals = [(0.0, request("busy", fresh(100, 8)))]
        times = rig.run(arrivals + [(0.01, request(rid, prompt)) for rid, prompt in prompts.items()])
        first = times["none"].tokens[0]
        return sum(times[rid].tokens[0] < first for rid in prompts)

    assert passed_by("fcfs") == 0
    assert MOST_PASSED <= passed_by("lpm") < MOST_PASSED + 3


def late_and_small(monkeypatch: pytest.MonkeyPatch, priority: int, **options: object) -> int:
    """How many younger requests have their first token before one whose load is the shorter one, while all of them
    together keep the link busy and something decodes all the time."""
    monkeypatch.setattr(admission, "MOST_PASSED", 8)
    most, every = 60, 0.15
    sizes = {"num_device_pages": 1500, "num_host_pages": 20000, "context_len": 5000}
    rig = Rig(0.001, check_every=50, bubble_filling=True, **sizes, **options)
    documents, short = [fresh(200, 100 + i) for i in range(most)], fresh(100, 5)
    rig.remember(short, *documents)
    arrivals = [(0.1 + every * i, request(f"{i}", each + fresh(5, 1000 + i))) for i, each in enumerate(documents)]
    late = replace(request("late", short + fresh(5, 3)), priority=priority)
    arrivals += [(2.0, late), *((8.0 * i, request(f"runner{i}", fresh(10, 50 + i), 880)) for i in range(2))]
    times = rig.run(sorted(arrivals, key=lambda each: each[0]))
    first = times["late"].tokens[0]
    return sum(rig.began + 2.0 < times[f"{i}"].tokens[0] < first for i in range(most))


def test_one_that_waits_for_the_link_is_passed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_and_small(monkeypatch, 0, schedule_policy="lpm") <= 8 + 6, "six were older"


def test_the_first_that_is_deferred_gets_the_next_load_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that begins lasts longer than what the link has to do, so that it counts as free again."""
    assert late_and_small(monkeypatch, 5, priorities=PriorityConfig()) <= 2


# -- all together ---------------------------------------------------------------------------------------------

ALL = {"bubble_filling": True, "load_or_recompute": True, "deferral_threshold": 100, "load_ratio": "auto"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("insert_at", ["launch", "completion"])
@pytest.mark.parametrize("pool", [150, 1000])
def test_a_load_behind_an_endless_stream_of_device_hits_is_not_forgotten(pool: int, insert_at: str) -> None:
    """Requests that need no load come faster than they end, and pass it while its load is under way, also where they
    fill the device and take back what was loaded: that happens to it once."""
    common = fresh(20, 1)
    # It takes longer to load than to compute, so it would be computed.
    options = {**ALL, "load_or_recompute": False}
    rig = Rig(**options, num_device_pages=pool, context_len=149, insert_at=insert_at, check_every=20)
    rig.remember(DOCUMENT)
    stream = [(0.004 * i, request(f"hit{i}", [*common, 500 + i], 4)) for i in range(300)]
    times = rig.run([(0.0, request("warm", common)), *stream, (0.2, request("loads", DOCUMENT + fresh(5, 2)))])
    assert len(times) == 302 and all(t.finish_reason == "length" for t in times.values())
    arrival, first = times["loads"].arrival, times["loads"].tokens[0]
    older = max(t.tokens[0] for t in times.values() if t.arrival < arrival)
    assert first <= max(older, arrival) + 2 * 0.5 + 0.2
    assert sum(arrival < t.arrival and t.tokens[0] < first for t in times.values()) > 5, "nobody passed it"
    assert sum(t.tokens[0] > first for t in times.values()) > 50, "the stream has ended"


SMALL_POOL = {"num_device_pages": 220, "num_host_pages": 600, "context_len": 200, "chunked_prefill_size": 64}


def run_questions(rig: Rig, rng: np.random.Generator) -> None:
    """Sixty questions about eight documents, of which the pool holds few. All are answered."""
    documents = [fresh(int(n), i) for i, n in enumerate(rng.integers(60, 160, 8))]
    at, arrivals = 0.0, []
    for i in range(60):
        at += (2.0, 0.0, float(rng.exponential(0.2)))[min(2, i % 10)]
        document = documents[int(rng.integers(len(documents)))]
        arrivals.append((at, request(f"r{i}", document + rng.integers(0, 9, 6).tolist(), int(rng.integers(1, 30)))))
    times = rig.run(arrivals)
    assert len(times) == 60 and {t.finish_reason for t in times.values()} == {"length"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_all_together_in_a_small_pool(seed: int) -> None:
    """Every request ends, whatever fails; counters say that each mechanism was at work."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rig = Rig(
        0.0005,
        **{**ALL, "deferral_threshold": 30},
        fails=lambda op: bool(rng.random() < 0.2),
        taught=seed == 0,
        check_every=5,
        **SMALL_POOL,
        insert_at=("launch", "completion")[seed % 2],
    )
    run_questions(rig, rng)
    print({name: rig.counter(name) for name in SCHEDULING_COUNTERS})
    assert rig.counter("bubbles_filled") > 0 and rig.counter("deferred") > 0
    assert (rig.counter("recomputed_instead") > 0) == (seed % 2 == 0)
