"""`RequestTimes`: where the time of a request goes, from its arrival in the scheduler to its first token.

Owns one account per request that has no token yet. All its numbers come from steps' inputs: `now`, and the measured
costs of launches and loads. It decides nothing, and no decision depends on it.

    arrived ── waits for storage ──► storage_over ── waits for its turn ──► started ── loads, launches ──► first_token
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sglang.srt.managers.io_struct import ReqTimes
from sglang.srt.managers.launch_batches import LaunchRecord
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.mem_cache.transfer import EXEC, LOAD_LINKS, STALL, TIER_NAMES, Ticket
from sglang.srt.utils.time_units import Seconds

_TIER_OF_LINK = {link: TIER_NAMES[tier] for tier, link in LOAD_LINKS.items()}


@dataclass
class _Account:
    arrived: Seconds
    # None while it waits for storage.
    storage_over: Seconds | None
    # None while it waits in the queue.
    started: Seconds | None = None
    # Tier -> seconds of the loads that brought its prefix from there.
    loads: dict[str, float] = field(default_factory=dict)
    # Seconds of the launches that computed its prompt, and what they waited for loads.
    compute_s: float = 0.0
    stall_s: float = 0.0


class RequestTimes:
    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        # Those that wait for storage.
        self._in_storage: dict[str, None] = {}
        # Loads under way -> the requests that asked for them.
        self._loading: dict[Ticket, list[str]] = {}
        self._now = Seconds(0.0)
        # Of requests whose first token has come in this step.
        self.known: dict[str, ReqTimes] = {}

    def begin_step(self, now: Seconds) -> None:
        self._now = now
        self.known = {}

    def arrived(self, rid: str, waits_for_storage: bool) -> None:
        self._accounts[rid] = _Account(self._now, None if waits_for_storage else self._now)
        if waits_for_storage:
            self._in_storage[rid] = None

    def note_storage(self, rids: Iterable[str]) -> None:
        """rids: of requests that wait for storage no more."""
        for rid in rids:
            self._end_storage(rid)

    def started(self, rid: str) -> None:
        """A request that was retracted before its first token starts again, which changes nothing."""
        account = self._accounts.get(rid)
        if account is not None and account.started is None:
            self._end_storage(rid)
            account.started = self._now

    def note_loads(self, rid: str, tickets: Iterable[Ticket]) -> None:
        if rid in self._accounts:
            for ticket in tickets:
                self._loading.setdefault(ticket, []).append(rid)

    def take_costs(self, inputs: StepInputs, launches: Mapping[int, LaunchRecord]) -> None:
        """launches: the completed ones are still among them."""
        stalls, failed = inputs.cost.get(STALL, {}), inputs.failed.get(EXEC)
        for seq, seconds in inputs.cost.get(EXEC, {}).items():
            record = launches.get(seq)
            if record is None or record.work is None or seq >= inputs.done[EXEC] or seq == failed:
                continue
            # A request that computes two parts of its prompt in one launch is there twice.
            for rid in dict.fromkeys(req.rid for req, _ in record.reqs):
                if (account := self._accounts.get(rid)) is not None:
                    account.compute_s += seconds
                    account.stall_s += stalls.get(seq, 0.0)
        for link, tier in _TIER_OF_LINK.items():
            for seq, seconds in inputs.cost.get(link, {}).items():
                for rid in self._loading.get(Ticket(link, seq), ()):
                    if (account := self._accounts.get(rid)) is not None:
                        account.loads[tier] = account.loads.get(tier, 0.0) + seconds
        for ticket in [t for t in self._loading if t.seq < inputs.done.get(t.link, 0)]:
            del self._loading[ticket]

    def first_token(self, rid: str) -> None:
        account = self._accounts.get(rid)
        if account is None or account.started is None or account.storage_over is None:
            return
        self.known[rid] = ReqTimes(
            queue_s=account.started - account.arrived,
            storage_s=account.storage_over - account.arrived,
            loads_s=account.loads,
            stall_s=account.stall_s,
            compute_s=account.compute_s,
            prefill_s=self._now - account.started,
        )
        self.ended(rid)

    def ended(self, rid: str) -> None:
        """The request has its first token, or has ended without one."""
        self._accounts.pop(rid, None)
        self._in_storage.pop(rid, None)

    def _end_storage(self, rid: str) -> None:
        if rid in self._in_storage:
            del self._in_storage[rid]
            self._accounts[rid].storage_over = self._now

    def check_invariants(self, rids: Iterable[str], is_held_up: Callable[[str], bool]) -> None:
        """rids: of the requests that are there. is_held_up: whether one waits for storage, as far as is told here."""
        assert self._accounts.keys() <= set(rids), "an account of a request that has ended"
        assert self._in_storage.keys() <= self._accounts.keys()
        assert all(map(is_held_up, self._in_storage)), "a request that waits for storage in its account alone"
