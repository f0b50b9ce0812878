"""The soak: random requests, aborts and faults in tiny pools, with all three nets stretched under every step.

    python -m support.soak --seed 1 --seeds 40 --steps 2000

Every seed draws a configuration (page size, pool sizes, chunk, failure rates, ranks), drives real schedulers, trees,
pools, links and executors on emulated streams with the exact model of hash_model.py, and checks after every step:
all invariants; that ranks decide alike; that tokens are the right ones. Every few steps the KV oracle compares every
cached byte. At the end nothing may be left over, and the record of the run must replay to the same decisions.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang.srt.managers.io_struct import (
    AdminReqInput,
    EraseSaltReqInput,
    FinishReason,
    PromptKeys,
    RetainPrefixReqInput,
    SetPoliciesReqInput,
    SetQuotaReqInput,
    SwitchTierReqInput,
    TokenizedGenerateReqInput,
    ids_to_bytes,
)
from sglang.srt.managers.schedule_batch import BatchDecision, StorageRequest
from sglang.srt.managers.schedule_policy import QUEUE_POLICIES
from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS, Scheduler
from sglang.srt.managers.step_record import StepRecorder, digest_of, replay
from sglang.srt.managers.storage_setup import PREFETCH_POLICIES
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import TIER_NAMES, StorageAction, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import Seconds
from support.coming_and_going import ComingAndGoing
from support.hash_model import DIM, HEADS, HashModel
from support.kv_oracle import check_kv, check_stored
from support.kv_subscriber import WatchedByRouter
from support.pool_pages import Pool
from support.reduction import reduce_progress
from support.residency_events import ResidencyEvents
from support.soak_config import EOS, TENANT, SoakConfig, scheduler_config
from support.soak_rank import ALL_NETS, build_rank
from support.soak_requests import Expected, OtherRequests, check_reasons


class StuckError(AssertionError):
    pass


def _asks_for_a_step(scheduler: Scheduler) -> bool:
    return scheduler._step_again_at is not None


def _check_wake_up(scheduler: Scheduler, now: Seconds) -> None:
    # A request that was given back to the queue is looked at in another step at once.
    is_late = scheduler.wake_at is not None and scheduler.wake_at <= now
    assert _asks_for_a_step(scheduler) or not is_late, "somebody waits beyond its time"
    copies = [op.ticket.link for op in scheduler.cache.oldest_copies().values() if op is not None]
    is_watched = scheduler.wake_at is not None or scheduler.cache.controller.links.late.issuperset(copies)
    if scheduler.queues.waiting and not scheduler.clock.is_running:
        assert is_watched, "nothing causes a step if a copy hangs that requests may wait for"


class Soak:
    """Drives the ranks of one configuration. `run` raises what the nets catch."""

    def __init__(self, config: SoakConfig, nets: frozenset[str] = ALL_NETS) -> None:
        self.config = config
        self.nets = nets
        self.model = HashModel(seed=config.seed % 5, windows=config.windows)
        self.random = random.Random(config.seed)
        self.record = io.BytesIO()
        probe = PageLayout.kv(config.page_size, self.model.num_layers, HEADS, DIM, torch.float64).page_bytes
        recorder = StepRecorder(self.record, scheduler_config(config, probe))
        self.ranks = [
            build_rank(config, self.model, rank, recorder if rank == 0 else None, nets)
            for rank in range(config.num_ranks)
        ]
        # Of its own, so that requests are the same with and without.
        self._admin_random = random.Random(f"administrator {config.seed}")
        self._peer_random = random.Random(f"reads of peers {config.seed}")
        self._other_requests = OtherRequests(config)
        self.live: dict[str, Expected] = {}
        self.aborted: set[str] = set()
        # Requests that were there when their salt was erased.
        self.erased: set[str] = set()
        # Few distinct tokens, so that paths fork everywhere.
        self.documents = [self._random_tokens(config.max_prompt - 8) for _ in range(config.num_documents)]
        self.histories: list[np.ndarray] = [self.documents[0]]
        self.num_finished = 0
        self.num_ticks = 0
        self.events = ResidencyEvents(self.ranks[0].core.scheduler.cache)
        self.router = WatchedByRouter(self.ranks[0].core.scheduler.cache, self.ranks[0].stores, config.seed)
        self._next_rid = 0
        self._is_stopping = False

    def run(self) -> None:
        for _ in range(self.config.steps):
            arrives = self.random.random() < self.config.arrival_rate and not self._is_stopping
            arrivals = [self._new_request()] if arrives else []
            aborts = []
            if self.live and self.random.random() < self.config.abort_rate:
                aborts.append(self.random.choice(sorted(self.live)))
            self.aborted.update(aborts)
            flush = ["flush"] if self.random.random() < self.config.flush_rate else []
            if self._is_stopping and not self.live:
                flush, self._is_stopping = ["flush"], False
            elif self.random.random() < self.config.restart_rate:
                self._is_stopping = True
            storage = []
            if self.config.storage is not None and self.random.random() < self.config.storage_request_rate:
                action = self.random.choice((StorageAction.ATTACH, StorageAction.DETACH, StorageAction.CLEAR))
                what = replace(self.config.storage, has_windowed_store=self.config.has_windowed_store)
                if what.is_lossy and self.random.random() < 0.5:
                    what = replace(what, is_lossy=False)
                storage.append(StorageRequest(id="admin", action=action, what=what))
            self._tick(arrivals, aborts, flush, storage, [*self._switches(), *self._administration()])
        # Each launch of a request that streams without need reads most of what it has, over links that are late.
        per_request = 400 if self.config.max_resident_tokens is None else 2000
        limit = self.num_ticks + per_request * (len(self.live) + 5)
        while self.live:
            self._tick()
            if self.num_ticks > limit:
                raise StuckError(
                    f"{len(self.live)} requests do not end: {self.ranks[0].core.scheduler.queues.active()}"
                )
        self._finish()

    def _tick(
        self,
        arrivals: Sequence[TokenizedGenerateReqInput] = (),
        aborts: Sequence[str] = (),
        flush: Sequence[str] = (),
        storage: Sequence[StorageRequest] = (),
        admin: Sequence[AdminReqInput] = (),
    ) -> None:
        self.num_ticks += 1
        now = Seconds(self.num_ticks * self.config.tick_s)
        ran = 0
        for rank in self.ranks:
            ran += rank.emulator.run(self.random.choice((0, 1, 3, 10, 60)))
        reports = [rank.core.progress() for rank in self.ranks]
        progress = reduce_progress(reports)
        inputs = arrivals or aborts or flush or storage or admin
        if not (inputs or any(rank.core.has_work(now) for rank in self.ranks)):
            scheduler = self.ranks[0].core.scheduler
            awaits_slabs = scheduler.lending is not None and scheduler.lending.awaits_slabs
            # A request that is too long without peers waits for them, and is ended in time.
            awaits_slabs |= scheduler.borrower is not None and scheduler.wake_at is not None
            if self.live and not awaits_slabs and not any(r.core.has_outstanding for r in self.ranks):
                raise StuckError(f"nothing is outstanding and {len(self.live)} requests wait")
            return
        decisions = [r.core.step(now, progress, arrivals, aborts, flush, storage, admin) for r in self.ranks]
        if len({digest_of(d) for d in decisions}) != 1:
            raise AssertionError(f"ranks decide differently in step {decisions[0].step}")
        if "invariants" in self.nets:
            # Of the ranks by turns: they take the same inputs and have just decided alike.
            scheduler = self.ranks[decisions[0].step % len(self.ranks)].core.scheduler
            scheduler.check_invariants()
            _check_wake_up(scheduler, now)
        self.events.note_late_links()
        if "events" in self.nets:
            self.router.take_events()
        self._take_outputs(decisions[0])
        if decisions[0].step % self.config.oracle_every == 0:
            self._ask_oracle()

    def _switches(self) -> list[SwitchTierReqInput]:
        if self._peer_random.random() < self.config.peer_switch_rate:
            return [SwitchTierReqInput(id="switch", tier="peer", reads=self._peer_random.random() < 0.5, writes=None)]
        if not self.config.switch_rate or self.random.random() >= self.config.switch_rate:
            return []
        tier = TIER_NAMES[self.random.choice(self.ranks[0].core.scheduler.cache.tiers)]
        reads, writes = (self.random.choice((None, False, True)) for _ in range(2))
        return [SwitchTierReqInput(id="switch", tier=tier, reads=reads, writes=writes)]

    def _administration(self) -> list[AdminReqInput]:
        rng = self._admin_random
        if not self.config.admin_rate or rng.random() >= self.config.admin_rate:
            return []
        kind = rng.randrange(4)
        if kind == 0:
            aborts = rng.random() < 0.5
            if aborts:
                self.erased |= {rid for rid, request in self.live.items() if request.extra_key == TENANT}
            return [EraseSaltReqInput(id="erase", cache_salt="tenant", aborts_requests=aborts)]
        if kind == 1:
            tiers = [TIER_NAMES[tier] for tier in self.ranks[0].core.scheduler.cache.tables]
            limits = {tier: rng.choice((0, 8, 64, 1000)) for tier in tiers if rng.random() < 0.7}
            return [SetQuotaReqInput(id="quota", cache_salt="tenant", tokens=limits)]
        if kind == 2:
            kept = rng.choice(self.histories + self.documents)
            return [
                RetainPrefixReqInput(
                    id="retain",
                    name=rng.choice("abc"),
                    seconds=rng.choice((0.0, 100 * self.config.tick_s, 1e4)),
                    extra_key=rng.choice(("", TENANT)),
                    input_ids=ids_to_bytes(kept[: rng.randrange(1, len(kept) + 1)]),
                )
            ]
        changes = {
            "radix_eviction_policy": rng.choice(list(EVICTION_POLICIES)),
            "schedule_policy": rng.choice(list(QUEUE_POLICIES)),
            "hicache_load_ratio": rng.choice(("auto", 0.0, 100.0)),
            "hicache_bubble_filling": rng.random() < 0.5,
            "hicache_load_or_recompute": rng.random() < 0.5,
            "hicache_deferral_threshold": rng.choice((0, 8, 100)),
            "hicache_storage_prefetch_policy": rng.choice(PREFETCH_POLICIES),
        }
        name = rng.choice(list(changes))
        return [SetPoliciesReqInput(id="policies", policies={name: changes[name]})]

    def _random_tokens(self, n: int) -> np.ndarray:
        return np.array([self.random.randrange(1, 3) for _ in range(n)], np.int32)

    def _new_request(self) -> TokenizedGenerateReqInput:
        """A continuation or a variation of something said before, or the same as somebody says now."""
        twin = self.live[self.random.choice(sorted(self.live))] if self.live else None
        if twin is not None and self.random.random() < self.config.twin_rate:
            prompt, extra_key = twin.prompt, twin.extra_key
        else:
            base = self.random.choice(self.histories + self.documents)
            kept = min(len(base), self.config.max_prompt - 8)
            if self.random.random() >= self.config.whole_rate:
                kept = self.random.randrange(kept + 1)
            prompt = np.concatenate([base[:kept], self._random_tokens(self.random.randrange(1, 9))])
            extra_key = self.random.choice(("", "", "", TENANT))
        rid = f"r{self._next_rid}"
        self._next_rid += 1
        # What does not fit is refused, and answers end where the pool does.
        streaming = self.ranks[0].core.scheduler.streaming
        room = streaming.longest_len - len(prompt)
        max_new = self.random.randrange(1, self.config.max_new_tokens)
        ignore_eos = self.random.random() < 0.6
        stop = frozenset() if ignore_eos else frozenset({EOS})
        needs_peers = streaming.max_len_with(0) < min(len(prompt) + max_new, streaming.longest_len)
        self.live[rid] = Expected(prompt, min(max_new, room), stop, room <= 0, extra_key, needs_peers)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=ids_to_bytes(prompt),
            sampling_params=SamplingParams(
                max_new_tokens=max_new, temperature=0.0, sampling_seed=0, ignore_eos=ignore_eos
            ),
            extra_key=extra_key,
            cache={5: "no_store", 9: "bypass"}.get(self._next_rid % 13, "") if self.config.cache_modes else "",
            stream=self.random.random() < 0.7,
            priority=self._next_rid % 3 - 1,
            prompt_keys=self._prompt_keys(extra_key, prompt) if self._next_rid % 2 else None,
        )
        request = self._other_requests.vary(request, self.live[rid])
        if request.sampling_params.max_new_tokens == 0:
            self.live[rid].refused = len(prompt) > self.ranks[0].core.scheduler.max_unanswered_len
        return request

    def _prompt_keys(self, extra_key: str, prompt: np.ndarray) -> PromptKeys | None:
        names = self.ranks[0].core.scheduler.cache.tree.names.keys
        return PromptKeys.make(names, extra_key, prompt) if names is not None else None

    def _take_outputs(self, decision: BatchDecision) -> None:
        for output in decision.outputs:
            expected = self.live[output.rid]
            expected.take(output)
            reason = output.finish_reason
            if reason is None:
                continue
            del self.live[output.rid]
            check_reasons(output)
            self._check_end(output.rid, expected, reason)
            if expected.refused:
                continue
            expected.check_answer(output, self.model)
            self.num_finished += 1
            self.histories.append(
                np.concatenate([expected.prompt, np.array(expected.got, np.int32)]).astype(np.int32)
            )
            self.histories = self.histories[-12:]

    def _check_end(self, rid: str, expected: Expected, reason: FinishReason) -> None:
        """Requests end early only for a reason that the soak knows."""
        config = self.config
        faults = config.launch_fail_rate > 0 or config.link_fail_rate > 0
        allowed = {499: rid in self.aborted, 500: faults, 400: expected.refused, None: not expected.refused}
        if expected.needs_peers:
            allowed |= {400: True, 503: True}
        waits_for_late_copy = config.hang_rate > 0 and "do not end" in (reason.message or "")
        if rid in self.erased or waits_for_late_copy:
            allowed |= {503: True}
        assert allowed[reason.status_code], f"{rid} ended with {reason}"

    def _ask_oracle(self) -> None:
        if "events" in self.nets:
            self.router.check()
        if "oracle" not in self.nets:
            return
        for rank in self.ranks:
            memory: dict[Tier, Pool] = {Tier.DEVICE: rank.device_pool}
            if rank.host_pool is not None:
                memory[Tier.HOST] = rank.host_pool
            if rank.peer_pool is not None:
                memory[Tier.PEER] = rank.peer_pool
            check_kv(rank.core.scheduler, memory, self.model.reference, windows=self.config.windows)
            for store in rank.stores:
                check_stored(rank.core.scheduler, store.blocks, self.model.reference, store.layers)

    def _finish(self) -> None:
        borrowed = [rank.slabs for rank in self.ranks if isinstance(rank.slabs, ComingAndGoing)]
        for rank in self.ranks:
            for link in rank.links:
                link.end_hangs()
        for rank in self.ranks:
            if rank.slabs is not None:
                rank.slabs.settle()
        for _ in range(10_000):
            is_busy = any(r.core.has_outstanding or _asks_for_a_step(r.core.scheduler) for r in self.ranks)
            if not is_busy and not any(b.num_owed for b in borrowed):
                break
            self._tick()
        assert not any(b.num_owed for b in borrowed), "slabs that were asked back are kept"
        for rank in self.ranks:
            scheduler = rank.core.scheduler
            assert not rank.core.has_outstanding, "operations never end"
            for tier, table in scheduler.cache.tables.items():
                rest = [table.counts[s] for s in (FrameState.FREE, FrameState.CACHED, FrameState.LENT)]
                assert sum(rest) == table.num_pages, f"left on {tier.name.lower()}: {table.counts}"
            assert all(n.lock == 0 for n in scheduler.cache.tree.walk()), "a lock is left"
            canary = scheduler.canary.state()
            if canary is not None and not self.config.check_fail_rate:
                assert not canary["different_tokens"], f"the canary found a difference: {canary}"
            assert rank.emulator.unrecorded_waits == 0, "somebody waited for an event that was never recorded"
        self._ask_oracle()
        self.record.seek(0)
        replay(self.record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=40, help="how many")
    parser.add_argument("--steps", type=int, default=2000, help="steps with arrivals per seed")
    parser.add_argument("--windows", action="store_true", help="the model of every seed has layers with a window")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # every injected failure says so
    for seed in range(args.seed, args.seed + args.seeds):
        config = SoakConfig.draw(seed, args.steps)
        if args.windows:
            config = config.with_windows()
        soak = Soak(config)
        start = time.perf_counter()
        try:
            soak.run()
        except BaseException:
            print(f"seed {seed} failed after {soak.num_ticks} steps: {config}", file=sys.stderr)
            raise
        counters = soak.ranks[0].core.scheduler.state()["counters"]
        print(
            f"seed {seed}: page {config.page_size}, {config.num_device_pages}+{config.num_host_pages} pages, "
            f"{config.num_ranks} ranks, {soak.num_finished} requests, "
            f"{'/'.join(str(counters.get(f'hit_tokens_{t}', 0)) for t in TIER_NAMES)} tokens hit, "
            f"{counters.get('prefetched_tokens', 0)} prefetched, "
            f"{counters.get('streamed_reqs', 0)} streamed, {counters.get('retracted_reqs', 0)} retracted, "
            f"{counters.get('failed_ops', 0)} transfers and "
            f"{counters.get('failed_launches', 0)} launches failed, "
            f"{'/'.join(str(counters.get(name, 0)) for name in SCHEDULING_COUNTERS)} "
            f"{', '.join(SCHEDULING_COUNTERS)}, {time.perf_counter() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
