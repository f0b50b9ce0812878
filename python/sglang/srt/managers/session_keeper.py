"""`SessionKeeper`: lets the pages of clients' sessions stay longer between their turns.

Owns the table of sessions, and the age at which each tier gives pages up. The rule is in
mem_cache/session_weights.py, and the weights lie on the tree's nodes; eviction reads them there. Pins nothing, and
decides nothing about requests: a session is a hint, and no answer depends on it. While no request has named a
session, nothing is measured or changed.

    begin_turn     a request has come: what it will find counts as used now, and gets weights for its wait
    note_start     it has started
    end_turn       it is answered: the nodes of its path get their weights
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.mem_cache.frame_table import FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import MatchResult, Node, last_access_on
from sglang.srt.mem_cache.session_table import SessionKey, SessionTable
from sglang.srt.mem_cache.session_weights import Returns, bonus_launches
from sglang.srt.mem_cache.tier_age import TierAge
from sglang.srt.mem_cache.transfer import FRAME_TIERS, Tier
from sglang.srt.utils.time_units import LaunchClock, LaunchSeq


class SessionKeeper:
    """tables: of the tiers that are there."""

    def __init__(self, tree: HiRadixTree, tables: Mapping[Tier, FrameTable], clock: LaunchClock) -> None:
        self._tree = tree
        self._clock = clock
        self.table = SessionTable()
        self.ages = {tier: TierAge(table.num_pages) for tier, table in tables.items()}
        self.counters: Counter[str] = Counter()
        # Whether a request has named a session.
        self._is_used = False

    def begin_turn(self, key: SessionKey, match: MatchResult) -> None:
        """match: what the cache has of the request, which is certain to come for it when it starts."""
        self._is_used = True
        self.table.longest_age = max([age.launches for age in self.ages.values()])
        self.table.begin_turn(key, self._clock.next)
        self._count_kept(match)
        if match.path:
            self._tree.weight(match.path[-1], self._until(self.table.expected_starts())[0])

    def note_start(self, came_at: LaunchSeq) -> None:
        """A session's request has started."""
        self.table.note_wait(self._clock.next - came_at + 1)

    def end_turn(self, key: SessionKey, end: Node) -> None:
        """end: of the answered request's path, which is locked."""
        now = self._clock.next
        record = self.table.end_turn(key, now)
        until, longest = self._until(self.table.expected_returns(record))
        self.table.note_weight(record, end.end, LaunchSeq(now + longest))
        if longest:
            self._tree.weight(end, until)

    def note_given_up(self, nodes: Iterable[Node], tier: Tier) -> None:
        """A tier is about to evict nodes. On tiers below the device only last copies count."""
        if not self._is_used:
            return
        age, now = self.ages[tier], self._clock.next
        for node in nodes:
            is_last = all([node.frames[t] is None for t in FRAME_TIERS if t != tier])
            if tier == Tier.DEVICE or is_last:
                age.note_given_up(now - last_access_on(node, tier), len(node.key) // self._tree.page_size)

    def _until(self, returns: Returns) -> tuple[tuple[LaunchSeq, ...], int]:
        """(a path's weights for its next use, the longest time that a tier is expected to keep it for it; 0 for no
        longer than without)."""
        now, longest = self._clock.next, 0
        until = [now] * len(FRAME_TIERS)
        for tier, age in self.ages.items():
            bonus = bonus_launches(returns, age.launches)
            until[tier] = LaunchSeq(now + bonus)
            if bonus:
                longest = max(longest, age.launches + bonus)
        return tuple(until), longest

    def _count_kept(self, match: MatchResult) -> None:
        """Count what would have left its tier by now without a weight."""
        for node in match.path:
            on_device = node.frames[Tier.DEVICE] is not None
            tier = Tier.DEVICE if on_device else self._tree.source_of(node)
            if tier is None or last_access_on(node, tier) == node.last_access:
                continue
            if 0 < self.ages[tier].launches < self._clock.next - node.last_access:
                self.counters["session_kept_tokens"] += len(node.key)

    def state(self) -> dict[str, Any]:
        return {
            "known": len(self.table),
            "between_turns": self.table.num_between_turns(),
            "weighted_tokens": self.table.weighted_tokens(self._clock.next),
            "return_share": round(self.table.return_share, 4),
        }

    def check_invariants(self) -> None:
        self.table.check_invariants(self._clock.next)
