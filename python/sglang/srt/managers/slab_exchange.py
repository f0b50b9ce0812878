"""`SlabLender` and `SlabBorrower`: what the scheduler does about slabs that it lends or borrows.

Each owns its policy (`DeviceLending` or `Borrowing`) with the use of the slabs, and is the seam between policy and
cache: it reads from the cache what the policy goes by, and drops from the cache what the policy gives up. Decides
nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from sglang.srt.managers.cost_model import USUAL_TOKENS, CostModel
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.schedule_policy import pages_for
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabReport
from sglang.srt.mem_cache.slab_use import SlabUse
from sglang.srt.mem_cache.transfer import D2P, H2D, P2D, StorageOp, Tier, TransferOp
from sglang.srt.model_executor.launch import StreamedPrefix
from sglang.srt.peer.borrowing import Borrowing, BorrowingConfig, Shortage
from sglang.srt.peer.lending import DeviceLending, LendingConfig, OwnCache
from sglang.srt.utils.time_units import Seconds

# Why a prompt's tokens are computed though a larger cache would have them, see `REASONS`.
_EVICTED = ("evicted_device", "evicted_peer", "evicted_host")


def lender_keeps(config: SchedulerConfig, lending: LendingConfig, max_total_len: int) -> int:
    """Device pages that are never lent. max_total_len: the most tokens of a request."""
    # As for `max_resident_len`, with a page that stays free.
    keep_tokens = max_total_len if lending.keep_tokens is None else lending.keep_tokens
    return pages_for(keep_tokens, config.page_size) + 1


class SlabLender:
    """Of an engine that lends. max_total_len: the most tokens of a request."""

    def __init__(self, config: SchedulerConfig, lending: LendingConfig, cache: KVCache, max_total_len: int) -> None:
        self._cache = cache
        self._page_size = config.page_size
        cache.note_lending()
        self.policy = DeviceLending(
            lending,
            SlabLedger(cache.device, config.slabs, mapped=True),
            lender_keeps(config, lending, max_total_len),
            pages_for(lending.cache_tokens, config.page_size),
            SlabUse(config.slabs, cache.device.num_pages),
        )
        self.counters: Counter[str] = Counter()

    @property
    def wake_at(self) -> float | None:
        return self.policy.wake_at

    def update(self, report: SlabReport) -> None:
        """report: what all ranks agree on."""
        self.policy.update(report)

    def step(self, now: Seconds, demand: int, costs: CostModel) -> None:
        """Before the next launch, which may be the one that lacks what is kept. Of slabs that drain, what is not
        locked is dropped at once, and the rest as soon as it is unlocked: requests are never held up for it. demand:
        see `DeviceLending.adjust`."""
        cache, policy = self._cache, self.policy
        token_s = _token_seconds(costs)
        filled, found = cache.take_device_use()
        for frames in filled:
            policy.use.note(now, frames)
        for frames in found:
            policy.use.note(now, frames, token_s * self._page_size)
        victim = cache.tree.order.next_of(Tier.DEVICE)
        own = OwnCache(
            cache.controller.counters["evicted_tokens_device"] // self._page_size,
            victim.last_access if victim is not None else None,
            cache.clock.next,
            _lost_tokens(cache),
            token_s,
        )
        began = policy.adjust(now, demand, own)
        slabs = policy.draining if cache.take_unlocked() else began
        cache.withdraw_from_device(policy.ledger.frames_of(slab) for slab in slabs)

    def take_drained(self) -> tuple[int, ...]:
        """Slabs that are to be lent."""
        drained = self.policy.ledger.take_drained()
        self.counters["slabs_lent"] += len(drained)
        return drained

    def take_num_recalled(self) -> int:
        num_recalled = self.policy.take_num_recalled()
        self.counters["slabs_asked_back"] += num_recalled
        return num_recalled


class SlabBorrower:
    """Of an engine that borrows."""

    def __init__(self, config: SchedulerConfig, borrowing: BorrowingConfig, cache: KVCache) -> None:
        assert cache.borrowed is not None, "there are slabs to borrow"
        self._cache = cache
        self._page_size = config.page_size
        slabs = cache.borrowed.slabs
        # The most pages that lenders may ever lend.
        self.most_pages = self._num_pages = config.most_borrowed_pages
        self._slab_pages = config.slabs[0][1] - config.slabs[0][0]
        self.policy = Borrowing(borrowing, slabs, SlabUse(config.slabs, slabs.table.num_pages))

    @property
    def wake_at(self) -> float | None:
        return self.policy.wake_at

    def update(self, report: SlabReport) -> None:
        """report: what all ranks agree on; the cache has dropped what is lost."""
        self.policy.update(report)
        self.most_pages = min(report.num_lendable * self._slab_pages, self._num_pages)

    def step(
        self,
        now: Seconds,
        costs: CostModel,
        long_reqs: tuple[bool, int],
        losing: Callable[[set[int]], None],
    ) -> bool:
        """Give up slabs that are not used, and those that lenders want. long_reqs: see `Shortage`. losing, and what
        is returned: see `SlabWithdrawal.update`."""
        shortage = Shortage(
            self._cache.controller.num_short_of_peers, _lost_tokens(self._cache), _token_seconds(costs), *long_reqs
        )
        return self._cache.give_back_borrowed(self.policy.adjust(now, shortage), losing)

    def note_streams(self, now: Seconds, streams: Iterable[StreamedPrefix], costs: CostModel) -> None:
        """streams: of a launch that the step has issued."""
        for stream in streams:
            for tier, frames in stream.parts:
                if tier == Tier.PEER:
                    self.policy.use.note(now, frames, self._saved_seconds(costs) * self._page_size)

    def note_ops(self, now: Seconds, ops: Iterable[TransferOp | StorageOp], costs: CostModel) -> None:
        """ops: those that the step has begun."""
        for op in ops:
            if not isinstance(op, TransferOp):
                continue
            if op.ticket.link == D2P:
                self.policy.use.note(now, op.dst_frames)
            elif op.ticket.link == P2D:
                self.policy.use.note(now, op.src_frames, self._saved_seconds(costs) * self._page_size)

    def take_drained(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slabs that are to be given back, and those of them that were chosen here."""
        drained = self.policy.ledger.take_drained()
        return drained, self.policy.take_chosen(drained)

    def take_demand(self, now: Seconds) -> tuple[int, int] | None:
        return self.policy.take_demand(now)

    def _has_host_room(self) -> bool:
        """Whether the host has free pages, or would give up first what another tier has as well."""
        host = self._cache.host
        if host is None or host.num_free:
            return host is not None
        victim = self._cache.tree.order.next_of(Tier.HOST)
        return victim is not None and any(victim.frames[tier] is not None for tier in (Tier.DEVICE, Tier.PEER))

    def _saved_seconds(self, costs: CostModel) -> float:
        """What it saves to load a token from a peer: the host would have it while it has room, else it would be
        computed."""
        load_s = costs.usual_load_seconds(P2D) or 0.0
        other_s = _token_seconds(costs) * USUAL_TOKENS
        if self._has_host_room():
            other_s = min(other_s, costs.usual_load_seconds(H2D) or other_s)
        return max(0.0, other_s - load_s) / USUAL_TOKENS


def _token_seconds(costs: CostModel) -> float:
    return (costs.recompute_seconds(0, USUAL_TOKENS) or 0.0) / USUAL_TOKENS


def _lost_tokens(cache: KVCache) -> int:
    return sum(cache.lost_hits.counts[reason] for reason in _EVICTED)
