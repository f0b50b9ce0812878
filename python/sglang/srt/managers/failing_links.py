"""`FailingLinks`: which links from the device fail again and again.

Owns, per link, how many copies failed in a row, and until when nothing more is copied by it. After that it is tried
again; where that fails, too, the pause is twice as long.
"""

from __future__ import annotations

from collections import Counter

from sglang.srt.utils.time_units import Seconds

_FAILED_IN_A_ROW = 3
# What has no other way goes on until so many have failed.
_BROKEN_FROM = 30
_FIRST_PAUSE_S, _NUM_DOUBLED = 1.0, 3


class FailingLinks:
    def __init__(self) -> None:
        # Those that get no copies now, and those of them that get none from requests without another tier either.
        self.links: frozenset[str] = frozenset()
        self.broken: frozenset[str] = frozenset()
        self._num_failed: Counter[str] = Counter()
        # Those that failed since the last update.
        self._failed: set[str] = set()
        self._until: dict[str, Seconds] = {}
        self._num_pauses: Counter[str] = Counter()

    def note_ended(self, link: str, is_ok: bool) -> None:
        """A copy is over."""
        if is_ok:
            self._failed.discard(link)
            for known in (self._num_failed, self._until, self._num_pauses):
                known.pop(link, None)
        else:
            self._num_failed[link] += 1
            self._failed.add(link)

    def update(self, now: Seconds) -> None:
        for link in self._failed:
            # What fails in a pause began before it.
            if self._num_failed[link] >= _FAILED_IN_A_ROW and self._until.get(link, now) <= now:
                self._until[link] = Seconds(now + _FIRST_PAUSE_S * 2 ** min(self._num_pauses[link], _NUM_DOUBLED))
                self._num_pauses[link] += 1
        self._failed.clear()
        self.links = frozenset(link for link, until in self._until.items() if until > now)
        self.broken = frozenset(link for link in self.links if self._num_failed[link] >= _BROKEN_FROM)
