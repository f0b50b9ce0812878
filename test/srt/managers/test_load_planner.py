"""What is copied to tiers when copies have been slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from managers.test_scheduler import Driver

from sglang.srt.managers.load_planner import BELIEVED_S, LoadPlanner
from sglang.srt.mem_cache.transfer import D2H, H2D, P2D, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.time_units import Seconds
from support.local_engine import LocalEngine
from support.tiny_model import tiny_llama


def test_a_moment_of_slow_copies_is_not_believed_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped_s = 0.0
    engine = LocalEngine(
        tiny_llama(tmp_path),
        num_device_pages=800,
        num_host_pages=800,
        page_size=4,
        load_or_recompute=True,
        clock=lambda: Seconds(monotonic() + skipped_s),
    )
    costs = engine.scheduler.planner.expected.costs
    # So long that no copy of this machine looks slow beside it, however busy the machine is.
    monkeypatch.setattr(costs, "recompute_seconds", lambda start, end: 100.0)

    def num_copied(seed: int) -> int:
        """Tokens of a new prompt of 200 that the host has."""
        text = np.random.default_rng(seed).integers(3, 97, 200).astype(np.int32)
        engine.generate([text], SamplingParams(max_new_tokens=2))
        engine.settle()
        tree = engine.scheduler.cache.tree
        return sum(len(node.key) for node in tree.match("", text).path if node.frames[Tier.HOST] is not None)

    for seed in range(3):
        assert num_copied(seed) == 200
    for _ in range(100):
        costs.add_copy(int(costs._usual_bytes), 1000.0, D2H)
    assert num_copied(3) == 0 == num_copied(4)
    skipped_s += BELIEVED_S
    assert num_copied(5) > 0, "it is measured once more, by a small copy, and by others as that was fast"
    assert num_copied(6) == 200
    engine.close()


# -- what a fetch is worth, without an engine ------------------------------------------------------------------------

SECOND_PER_BLOCK = 1.0
BLOCK = 10


class Req(SimpleNamespace):
    """num_known tokens, of which the cache has `prefix`, or which are computed."""

    def __hash__(self) -> int:
        return id(self)


def planner_at(
    now: float, *waiting: Req, prompts: tuple[Req, ...] = (), stalled: tuple[str, ...] = ()
) -> LoadPlanner:
    """A fetch takes a second per block, and computing half a second. stalled: requests that wait for storage."""
    each = LoadPlanner.__new__(LoadPlanner)
    compute_s: Any = lambda start, end, chunk=0: SECOND_PER_BLOCK / 2 * (end - start) / BLOCK  # noqa: E731
    each.config = cast(Any, SimpleNamespace(chunked_prefill_size=10**6))
    each.expected = cast(
        Any,
        SimpleNamespace(
            now=now,
            fetches=(SimpleNamespace(free_at=0.0), SimpleNamespace(free_at=0.0)),
            launches=SimpleNamespace(free_at=0.0),
            fetch_seconds=lambda num_tokens, per_op, seen_only=False, place=0: SECOND_PER_BLOCK * num_tokens / BLOCK,
            costs=SimpleNamespace(
                recompute_seconds=compute_s, most_prompt_seconds=compute_s, prompt_seconds=compute_s
            ),
        ),
    )
    reqs = {req.rid: req for req in waiting}
    queues = SimpleNamespace(get=reqs.get, waiting=list(waiting), prompts=lambda: list(prompts), has_decode=False)
    each._queues = cast(Any, queues)
    each._storage = cast(
        Any,
        SimpleNamespace(
            limits=SimpleNamespace(blocks_per_op=1),
            leaves_out_windows=False,
            may_start=lambda rid: rid not in stalled,
            startable=lambda waiting: [req for req in waiting if req.rid not in stalled],
        ),
    )
    each._cache = cast(Any, SimpleNamespace(block_tokens=BLOCK, candidate=lambda req: req))
    return each


def test_as_many_blocks_are_fetched_as_come_while_others_are_computed():
    mine = Req(rid="mine", num_known=8 * BLOCK)
    # They take 2 and 4 seconds.
    other, computed = Req(rid="other", num_known=8 * BLOCK, prefix=4 * BLOCK), Req(num_known=8 * BLOCK, computed=0)
    assert planner_at(5.0, mine).blocks_worth_fetching("mine", 0, (8, 0), 0) == 0
    assert planner_at(5.0, mine, other).blocks_worth_fetching("mine", 0, (8, 0), 0) == 2
    assert planner_at(5.0, mine, other, stalled=("other",)).blocks_worth_fetching("mine", 0, (8, 0), 0) == 0
    assert planner_at(5.0, mine, prompts=(computed,)).blocks_worth_fetching("mine", 0, (8, 0), 0) == 4
    assert planner_at(5.0, mine, other, prompts=(computed,)).blocks_worth_fetching("mine", 0, (8, 0), 0) == 6
    # What is on the link comes first.
    busy = planner_at(5.0, mine, other, prompts=(computed,))
    assert busy.blocks_worth_fetching("mine", 0, (8, 0), 3) == 3
    busy.expected.fetches[0].free_at = 8.0
    assert busy.blocks_worth_fetching("mine", 0, (8, 0), 0) == 3
    # Launches that are issued take their time.
    launched = planner_at(5.0, mine)
    launched.expected.launches.free_at = 8.0
    assert launched.blocks_worth_fetching("mine", 0, (8, 0), 0) == 3


def test_other_work_is_a_prompt_that_needs_no_load():
    batch: Any = SimpleNamespace(reqs=[])
    loads: dict[str, Any] = {"load": 0, "from_peers": 0, "loading": ()}
    for needs in ({"load": 4}, {"from_peers": 4}, {"loading": ("ticket",)}, {}):
        each = planner_at(0.0, Req(rid="r", **(loads | needs)))
        each._needs_no_load = None
        each.expected.compute_seconds = lambda work: 0.25  # type: ignore[method-assign]
        assert each._other_work_seconds(batch) == (None if needs else 0.25)


def test_the_order_of_loads_is_as_at_first_once_nothing_is_computed_in_their_place() -> None:
    planner = Driver(num_host_pages=64, num_peer_pages=64, load_or_recompute=True).scheduler.planner
    order = planner._cache.tree.order
    for _ in range(6):
        planner.expected.costs.add_copy(8192, 0.001, H2D)
        planner.expected.costs.add_copy(8192, 0.1, P2D)
    planner.note_sick_links()
    assert order.load_order == (Tier.HOST, Tier.PEER)
    planner.policies.load_or_recompute = False
    planner.obey_policies()
    planner.note_sick_links()
    assert order.load_order == (Tier.PEER, Tier.HOST)
