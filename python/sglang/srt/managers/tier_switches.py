"""`TierSwitches`: which tiers an administrator has turned off while the server runs, for reads, for writes or both.

Owns the switches and nothing else; `KVCache` has its parts obey them. What is under way when a switch is turned ends
as it began.

    device    reads off: new requests are served as with `cache: bypass`; writes off: as with `no_store`
    peer      reads off: nothing is loaded from it; writes off: nothing is copied to it, and what it has is still read
    host      the same; either turns off what storage reads, too, as all of that goes through the host
    disk, remote    reads off: it is not asked; writes off: nothing is stored there
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier

READS, WRITES = "reads", "writes"


class TierSwitches:
    def __init__(self) -> None:
        self.unread: frozenset[Tier] = frozenset()
        self.unwritten: frozenset[Tier] = frozenset()

    def turn(self, tier: Tier, reads: bool | None, writes: bool | None) -> None:
        """True: on, False: off, None: as before."""
        if reads is not None:
            self.unread = self.unread - {tier} if reads else self.unread | {tier}
        if writes is not None:
            self.unwritten = self.unwritten - {tier} if writes else self.unwritten | {tier}

    def cache_mode(self, asked: str) -> str:
        """Of a new request, see `TokenizedGenerateReqInput.cache`."""
        if Tier.DEVICE in self.unread or asked == "bypass":
            return "bypass"
        return "no_store" if Tier.DEVICE in self.unwritten else asked

    def state(self, tiers: Iterable[Tier]) -> dict[str, dict[str, bool]]:
        """By the tier's name: whether it is on."""
        return {TIER_NAMES[t]: {READS: t not in self.unread, WRITES: t not in self.unwritten} for t in tiers}
