"""`BackupLinks`: what is known of the links that copy from the device and back, and how much may begin by each.

Owns which of them hang or fail, and nothing else: what they move is in the ledger. Derives the rest from the ledger
and from what the scheduler expects of costs.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.cost_model import USUAL_TOKENS
from sglang.srt.managers.failing_links import FailingLinks
from sglang.srt.managers.transfer_ledger import TransferLedger
from sglang.srt.mem_cache.placement import FIRST_COPYING_RATIO, MAX_COPYING_RATIO
from sglang.srt.mem_cache.transfer import BACKUP_LINKS, D2S, LOAD_LINKS, Tier


class BackupLinks:
    """is_worth_copying: whether tokens [start, end) of a prompt are better copied to a tier than computed again, as
    far as was measured. is_believed: whether that was lately, so that the tier need not be tried again. late,
    overdue: see `LateCopies`. pages_ahead: so many may always be copied at once, see
    `AutoCopies.write_ahead`."""

    def __init__(self, ledger: TransferLedger) -> None:
        self.late: frozenset[str] = frozenset()
        self.overdue: frozenset[str] = frozenset()
        self.failing = FailingLinks()
        self.is_worth_copying: Callable[[Tier, int, int], bool] = lambda tier, start, end: True
        self.is_believed: Callable[[Tier], bool] = lambda tier: True
        self.pages_ahead = 0
        self._ledger = ledger
        self._num_device_pages = ledger.pools.device.num_pages

    @property
    def slow(self) -> frozenset[str]:
        """Links of tiers that hang, or that are known to be so slow that only a little is copied."""
        slow = [tier for tier in LOAD_LINKS if self.is_measured(tier) and not self.is_fast(tier)]
        return self.late.union(*((BACKUP_LINKS[tier], LOAD_LINKS[tier]) for tier in slow))

    @property
    def num_slow_pages(self) -> int:
        """Device pages that copies hold on to by links that are overdue or slow: they do not become free soon."""
        slow = [BACKUP_LINKS[t] for t in LOAD_LINKS if not self.is_fast(t) or BACKUP_LINKS[t] in self.overdue]
        slow += self.overdue & {D2S}
        return sum(self._ledger.num_pages_on(link) for link in slow)

    @property
    def unusable(self) -> frozenset[str]:
        """Links by which nothing is copied at all: copies hang, or failed again and again."""
        return self.late | self.failing.broken

    def is_fast(self, tier: Tier) -> bool:
        """Whether a tier is known to be faster than computing."""
        is_late = BACKUP_LINKS[tier] in self.late
        return self.is_measured(tier) and not is_late and self.is_worth_copying(tier, 0, USUAL_TOKENS)

    def is_worth_trying(self, tier: Tier, start: int, end: int) -> bool:
        """Whether tokens [start, end) of a prompt may be copied to a tier: as it is worth it, or as that was measured
        too long ago."""
        return self.is_worth_copying(tier, start, end) or not self.is_believed(tier)

    def is_measured(self, tier: Tier) -> bool:
        return self._ledger.num_done(BACKUP_LINKS[tier]) > 0

    def is_sound(self, tier: Tier) -> bool:
        """Whether no copy to or from a tier has failed lately."""
        return not self.failing.unsound & {BACKUP_LINKS[tier], LOAD_LINKS[tier]}

    def is_left_alone(self, tier: Tier) -> bool:
        """Whether nothing more is copied to a tier now, as its link hangs or fails."""
        return bool(self.trouble_of(BACKUP_LINKS[tier]))

    def trouble_of(self, link: str) -> str:
        """Why nothing more is copied by a link from the device now; "" if copies begin."""
        if link in self.late:
            return "it hangs"
        # What goes to the swap file has no other place: its link is tried for longer.
        is_failing = link in (self.failing.broken if link == D2S else self.failing.links)
        return "its copies fail" if is_failing else ""

    def works(self, tier: Tier) -> bool:
        """Whether copies to a tier end in time, and well, as far as is known."""
        return not self.is_left_alone(tier) and BACKUP_LINKS[tier] not in self.overdue

    def is_idle(self, tier: Tier) -> bool:
        return not self._ledger.num_pages_on(BACKUP_LINKS[tier])

    @property
    def trial_pages(self) -> int:
        """Of a copy to a tier whose speed is not known, or not any more, or that is slower than computing."""
        return max(1, int(FIRST_COPYING_RATIO * self._num_device_pages))

    def num_allowed(self, tier: Tier) -> int:
        """Pages that may begin to be copied from the device to a tier."""
        if self.is_left_alone(tier):
            return 0
        most = self.trial_pages
        if self.is_measured(tier) and (self.is_believed(tier) or self.is_worth_copying(tier, 0, USUAL_TOKENS)):
            most = max(most, self.pages_ahead, int(MAX_COPYING_RATIO * self._num_device_pages))
        return most - self._ledger.num_pages_on(BACKUP_LINKS[tier])
