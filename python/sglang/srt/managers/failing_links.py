"""`FailingLinks`: which links fail again and again, and which have failed lately.

Owns, per link, how many copies failed in a row, and until when nothing more is copied by it from the device. After
that it is tried again; where that fails, too, the pause is twice as long. A link is unsound for a while after any
failure: it works, and is not relied on.
"""

from __future__ import annotations

from collections import Counter

from sglang.srt.utils.time_units import Seconds

_FAILED_IN_A_ROW = 3
# What has no other way goes on until so many have failed.
_BROKEN_FROM = 30
_FIRST_PAUSE_S, _NUM_DOUBLED = 1.0, 3
# As long as `storage_breaker.SOUND_S`.
_UNSOUND_S = 30.0


class FailingLinks:
    def __init__(self) -> None:
        # Those that get no copies now, and those of them that get none from requests without another tier either.
        self.links: frozenset[str] = frozenset()
        self.broken: frozenset[str] = frozenset()
        self.unsound: frozenset[str] = frozenset()
        self._num_failed: Counter[str] = Counter()
        # Those that failed since the last update.
        self._failed: set[str] = set()
        self._until: dict[str, Seconds] = {}
        self._num_pauses: Counter[str] = Counter()
        self._sound_from: dict[str, Seconds] = {}

    def note_ended(self, link: str, is_ok: bool) -> None:
        """A copy is over."""
        if is_ok:
            for known in (self._num_failed, self._until, self._num_pauses):
                known.pop(link, None)
        else:
            self._num_failed[link] += 1
            self._failed.add(link)

    def update(self, now: Seconds) -> None:
        for link in self._failed:
            self._sound_from[link] = Seconds(now + _UNSOUND_S)
            # What fails in a pause began before it.
            if self._num_failed[link] >= _FAILED_IN_A_ROW and self._until.get(link, now) <= now:
                self._until[link] = Seconds(now + _FIRST_PAUSE_S * 2 ** min(self._num_pauses[link], _NUM_DOUBLED))
                self._num_pauses[link] += 1
        self._failed.clear()
        self.links = frozenset(link for link, until in self._until.items() if until > now)
        self.unsound = frozenset(link for link, at in self._sound_from.items() if at > now)
        self.broken = frozenset(link for link in self.links if self._num_failed[link] >= _BROKEN_FROM)
