"""`TierPressure`: how long a tier keeps a page after its last use, and what its memory finds at the end of that time.

Owns running averages. Never reads the tree. Pure arithmetic, equal on all ranks.
"""

from __future__ import annotations

from sglang.srt.mem_cache.session_weights import price_of_memory

# The age is averaged over such a share of the tier's pages, hits and losses over all of them.
_AGE_SHARE = 1 / 8


class TierPressure:
    """num_pages: of the tier."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._age: float | None = None
        # Pages that were found in the last half of their lives, and that were given up; older ones count less.
        self._num_found = 0.0
        self._num_gone = 0.0

    @property
    def age(self) -> int:
        """Launches from a page's last use to when the tier gives it up; 0 while it has given up none."""
        return 0 if self._age is None else round(self._age)

    @property
    def price(self) -> float:
        """See `price_of_memory`."""
        return price_of_memory(self._num_found, self._num_gone)

    def note_given_up(self, age: int, num_pages: int) -> None:
        """Pages have left the tier so many launches after their last use, bonuses included."""
        age = max(0, age)
        share = num_pages / (num_pages + self._num_pages * _AGE_SHARE)
        self._age = float(age) if self._age is None else self._age + share * (age - self._age)
        self._fade(num_pages)
        self._num_gone += num_pages

    def note_found(self, age: int, num_pages: int) -> None:
        """A request has found pages so many launches after their last use."""
        if 2 * age >= self.age > 0:
            self._fade(num_pages)
            self._num_found += num_pages

    def _fade(self, num_pages: int) -> None:
        rest = self._num_pages / (self._num_pages + num_pages)
        self._num_found *= rest
        self._num_gone *= rest

    def check_invariants(self) -> None:
        assert self._num_found >= 0 and self._num_gone >= 0 and self.age >= 0
        assert 0 <= self.price <= 4, "more is found in the last half than can be"
