"""`TierAge`: how long a tier keeps a page after its last use.

Owns a running average. Never reads the tree. Pure arithmetic, equal on all ranks.
"""

from __future__ import annotations

# The average is over such a share of the tier's pages.
_SHARE = 1 / 8


class TierAge:
    """num_pages: of the tier."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._average: float | None = None

    @property
    def launches(self) -> int:
        """From a page's last use to when the tier gives it up; 0 while it has given up none."""
        return 0 if self._average is None else round(self._average)

    def note_given_up(self, age: int, num_pages: int) -> None:
        """Pages have left the tier so many launches after their last use, bonuses included."""
        age = max(0, age)
        share = num_pages / (num_pages + self._num_pages * _SHARE)
        self._average = float(age) if self._average is None else self._average + share * (age - self._average)
