"""`RecentTakes`: how many device pages prompts take at once."""

from __future__ import annotations

import math

# By how much the most shrinks with each prompt that takes less: by half in eleven of them.
_FORGOTTEN = 1 / 16


class RecentTakes:
    """The most device pages that a launch of prompts or a load took lately. A chunk at first, and at most: what loads
    take beyond it is copied before they begin."""

    def __init__(self, chunk_pages: int) -> None:
        self._chunk_pages = chunk_pages
        self._most = float(chunk_pages)

    def note(self, num_pages: int) -> None:
        self._most = max(min(num_pages, self._chunk_pages), self._most * (1 - _FORGOTTEN))

    @property
    def num_pages(self) -> int:
        return math.ceil(self._most)
