"""`PrefixRetention`: prefixes that an administrator wants kept for a while.

Owns the list of them. What is kept counts as just used, again and again, until its time is over; then it ages as
anything else does. It is no pin: where newer use fills a tier, it goes, and nothing has to be let go of.

    keep ──► counts as used every REFRESH_LAUNCHES launches ──► its time is over, or release ──► ages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import salt_of
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.prefix_labels import PrefixLabels
from sglang.srt.mem_cache.transfer import FRAME_TIERS
from sglang.srt.utils.time_units import LaunchClock, LaunchSeq, Seconds

MAX_PREFIXES = 256
# A week: what is wanted longer has to be asked for again.
MAX_SECONDS = 7 * 24 * 3600.0
REFRESH_LAUNCHES = 16
# Prefixes that one step may refresh, which takes some 50 us each.
_PER_STEP = 4


@dataclass
class _Kept:
    namespace: str
    # (n,) int32, whole pages.
    tokens: np.ndarray
    until: Seconds
    # The next launch when it last counted as used.
    used_at: LaunchSeq


class PrefixRetention:
    """most_tokens: of all prefixes together. used: called with the end of a path that counts as used."""

    def __init__(
        self, tree: HiRadixTree, clock: LaunchClock, most_tokens: int, used: Callable[[Node], None] = lambda end: None
    ) -> None:
        self._tree = tree
        self._clock = clock
        self._most_tokens = most_tokens
        self._used = used
        # The names are labels as well.
        self.labels = PrefixLabels(tree.page_size)
        # By name, the one that was refreshed longest ago first.
        self._kept: dict[str, _Kept] = {}

    def keep(self, name: str, namespace: str, tokens: np.ndarray, seconds: float, now: Seconds) -> str:
        """In place of what was kept under the name. Returns why that cannot be, "" if it is done."""
        tokens = tokens[: len(tokens) - len(tokens) % self._tree.page_size].copy()
        for other in [other for other, kept in self._kept.items() if kept.until <= now]:
            self.release(other)
        others = [kept for other, kept in self._kept.items() if other != name]
        if not len(tokens):
            return (
                f"the prompt is shorter than a page of {self._tree.page_size} tokens, and only whole pages are cached"
            )
        if not 0 < seconds <= MAX_SECONDS:
            return (
                f"a prefix is kept for up to {MAX_SECONDS:g} seconds (a week), not for {seconds:g}: ask again later"
            )
        if len(others) >= MAX_PREFIXES:
            return f"{len(others)} prefixes are kept, which is the most: release one"
        if (num_tokens := sum(len(kept.tokens) for kept in others) + len(tokens)) > self._most_tokens:
            return (
                f"with this one the prefixes that are kept would have {num_tokens} tokens, more than half of the "
                f"largest tier ({self._most_tokens}): release one"
            )
        self.release(name)
        kept = _Kept(namespace, tokens, Seconds(now + seconds), self._clock.next)
        self._kept[name] = kept
        self.labels.put(name, namespace, tokens)
        self._refresh(kept)
        return ""

    def release(self, name: str) -> bool:
        """Keep a prefix no longer. False: it was not kept."""
        self.labels.remove(name)
        return self._kept.pop(name, None) is not None

    def forget_salt(self, salt: str) -> None:
        """Keep nothing of its requests any more."""
        for name in [name for name, kept in self._kept.items() if salt_of(kept.namespace) == salt]:
            self.release(name)

    def step(self, now: Seconds) -> None:
        """Have prefixes count as used where that is due, and drop those whose time is over."""
        for _ in range(min(_PER_STEP, len(self._kept))):
            name, kept = next(iter(self._kept.items()))
            if kept.until > now and self._clock.next - kept.used_at < REFRESH_LAUNCHES:
                break
            del self._kept[name]
            if kept.until > now:
                self._kept[name] = kept
                self._refresh(kept)
            else:
                self.labels.remove(name)

    def _refresh(self, kept: _Kept) -> None:
        kept.used_at = now = self._clock.next
        # As if it were used with each launch until it is refreshed again.
        until = LaunchSeq(now + 2 * REFRESH_LAUNCHES + len(self._kept) // _PER_STEP)
        match = self._tree.match(kept.namespace, kept.tokens)
        if match.path:
            self._tree.weight(match.path[-1], (until,) * len(FRAME_TIERS))
            self._used(match.path[-1])

    def state(self, now: Seconds) -> list[dict[str, Any]]:
        """In the order of their names: what is kept, and how much of it is cached in memory."""
        found = []
        for name, kept in sorted(self._kept.items()):
            if kept.until <= now:
                continue
            match = self._tree.match(kept.namespace, kept.tokens)
            found.append(
                {
                    "name": name,
                    "tokens": len(kept.tokens),
                    "cached_tokens": match.total_len,
                    "device_tokens": match.device_len,
                    "seconds_left": round(kept.until - now, 1),
                }
            )
        return found

    def check_invariants(self) -> None:
        assert len(self._kept) <= MAX_PREFIXES
        assert {each["name"] for each in self.labels.state()} <= self._kept.keys()
        self.labels.check_invariants()
        assert sum(len(kept.tokens) for kept in self._kept.values()) <= self._most_tokens
        for name, kept in self._kept.items():
            assert kept.used_at <= self._clock.next, f"{name} is used by a launch that does not exist"
            assert len(kept.tokens) % self._tree.page_size == 0
