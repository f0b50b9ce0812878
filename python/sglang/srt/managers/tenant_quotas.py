"""`TenantQuotas`: how much requests with one `cache_salt` may have cached on device, peers and host.

Owns the quotas and which tenants have grown. A tenant over its quota gives up its own pages, and no other's, in the
order in which the tier would give them up anyway. What its requests use at the moment stays, also what is fetched for
those that wait. It is looked at when a tier has got something of it, and again where something stayed, every
CHECK_LAUNCHES launches at most: until then it may be over.

Storage's quotas are the business of the stores, which know what they have; see `StorageAction.LIMIT`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import salt_of
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier
from sglang.srt.utils.time_units import LaunchClock, LaunchSeq

MAX_QUOTAS = 4096
CHECK_LAUNCHES = 8
# What is over a quota goes with that share of the quota, so that the next request does not cause the same again.
_SHARE_AHEAD = 1 / 32


class TenantQuotas:
    """tiers: with frames, that are there. evict: gives up so many pages of a tier among nodes with these ids.
    awaited_ids: of the nodes with what was fetched for waiting requests; they stay."""

    def __init__(
        self,
        tree: HiRadixTree,
        tiers: Sequence[Tier],
        clock: LaunchClock,
        evict: Callable[[Tier, int, frozenset[int]], None],
        awaited_ids: Callable[[], Container[int]],
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self._clock = clock
        self._evict = evict
        self._awaited_ids = awaited_ids
        # By cache_salt: tier -> tokens.
        self._quotas: dict[str, dict[Tier, int]] = {}
        # Tenants of which a tier has got something since they were looked at, and when they are looked at.
        self._grown: dict[str, LaunchSeq] = {}
        # Tiers that a tenant has filled, until it computes something new. Without that, what is given up would be
        # copied there again, and given up, and so on.
        self._filled: dict[str, set[Tier]] = {}

    def set(self, salt: str, tokens: dict[Tier, int]) -> str:
        """In place of what was set before; empty: no quota. Returns why that cannot be, "" if it is done."""
        if tokens and salt not in self._quotas and len(self._quotas) >= MAX_QUOTAS:
            return f"{MAX_QUOTAS} tenants have a quota, which is the most: remove one"
        self._quotas.pop(salt, None)
        self._grown.pop(salt, None)
        self._filled.pop(salt, None)
        if tokens:
            self._quotas[salt] = tokens
            self._grown[salt] = self._clock.next
        return ""

    def put_back(self, salt: str, tier: Tier, tokens: int | None) -> None:
        """A tier of storage did not take its new quota, and keeps to the one before; None: there was none."""
        quota = dict(self._quotas.get(salt, {}))
        quota.pop(tier, None)
        if tokens is not None:
            quota[tier] = tokens
        self.set(salt, quota)

    def of(self, tier: Tier) -> dict[str, int]:
        """By salt, the tokens that tenants may have on a tier; without those that have no limit there."""
        return {salt: tokens[tier] for salt, tokens in self._quotas.items() if tier in tokens}

    @property
    def is_used(self) -> bool:
        """Whether any tenant has a quota."""
        return bool(self._quotas)

    def note(self, namespace: str, is_new: bool = True) -> None:
        """A tier has got something of the namespace. is_new: that no tier had."""
        if not self._quotas or (salt := salt_of(namespace)) not in self._quotas:
            return
        if is_new:
            self._filled.pop(salt, None)
        if salt not in self._grown:
            self._grown[salt] = LaunchSeq(self._clock.next + CHECK_LAUNCHES)

    def is_over(self, node: Node, tier: Tier) -> bool:
        """Whether a tier is to get no copy of the node."""
        return bool(self._filled) and tier in self._filled.get(salt_of(self._tree.root_of(node).namespace), ())

    def enforce(self, is_idle: bool) -> None:
        """Have tenants that are over their quota give up pages, where that is due. is_idle: no launch is near."""
        for salt in [salt for salt, due in self._grown.items() if is_idle or due <= self._clock.next]:
            del self._grown[salt]
            stays = [self._enforce(salt, tier, n) for tier, n in self._quotas[salt].items() if tier in self._tiers]
            if any(stays):
                # Its requests use that, and may end without leaving anything new.
                self._grown[salt] = LaunchSeq(self._clock.next + CHECK_LAUNCHES)

    def _enforce(self, salt: str, tier: Tier, quota: int) -> bool:
        """Whether it is over its quota still."""
        nodes = self._nodes_on(salt, tier)
        over = sum([len(node.key) for node in nodes]) - quota
        if over <= 0:
            return False
        num_pages = -(-(over + int(quota * _SHARE_AHEAD)) // self._tree.page_size)
        self._filled.setdefault(salt, set()).add(tier)
        awaited = self._awaited_ids()
        self._evict(tier, num_pages, frozenset(node.id for node in nodes if node.id not in awaited))
        return sum([len(node.key) for node in self._nodes_on(salt, tier)]) > quota

    def _nodes_on(self, salt: str, tier: Tier) -> list[Node]:
        return [node for node in self._nodes_of(salt) if node.frames[tier] is not None]

    def _nodes_of(self, salt: str) -> Iterator[Node]:
        for namespace, root in self._tree.roots.items():
            if salt_of(namespace) == salt:
                yield from self._tree.walk_below(root)

    def used_tokens(self, salt: str) -> dict[Tier, int]:
        """Tokens that the tenant has on each tier, also those that are on their way."""
        used = dict.fromkeys(self._tiers, 0)
        for node in self._nodes_of(salt):
            for tier in self._tiers:
                if node.frames[tier] is not None:
                    used[tier] += len(node.key)
        return used

    def state(self) -> dict[str, Any]:
        """Without the salts, which are secrets of their tenants."""
        return {"tenants": len(self._quotas)}

    def table(self, salt: str) -> dict[str, Any]:
        """One tenant's quotas, and what it has in memory."""
        used = self.used_tokens(salt)
        return {
            "quotas": {TIER_NAMES[tier]: tokens for tier, tokens in self._quotas.get(salt, {}).items()},
            "used_tokens": {TIER_NAMES[tier]: used[tier] for tier in self._tiers},
        }

    def check_invariants(self) -> None:
        assert len(self._quotas) <= MAX_QUOTAS and self._grown.keys() <= self._quotas.keys()
        assert self._filled.keys() <= self._quotas.keys()
