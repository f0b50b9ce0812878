"""`BorderSlabs`: memory between the two parts of a pool that may be the one's or the other's.

    layers with full attention   | ................... slab | slab | slab |
    layers with a window                             | slab | slab | slab | ........ |

Both parts have frames for all slabs, in the same bytes. `HostBorder` decides whose each is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# So many there are at most.
_MOST_SLABS = 64


@dataclass(frozen=True)
class BorderSlabs:
    """The last pages of layers with full attention, and the first of layers with a window."""

    num_slabs: int
    # Of each slab, of the one kind and of the other.
    full_pages: int
    windowed_pages: int

    @property
    def num_full(self) -> int:
        return self.num_slabs * self.full_pages

    @property
    def num_windowed(self) -> int:
        return self.num_slabs * self.windowed_pages


def border_between(
    num_full: int, num_windowed: int, full_bytes: int, windowed_bytes: int, block_pages: int = 1
) -> tuple[int, int, BorderSlabs | None]:
    """Slabs of a pool's num_full pages, of full_bytes each, beside num_windowed of windowed_bytes each: so many that
    both kinds have as many pages if all go over. They begin and end between pages of both kinds, counted from the
    start of the memory, and have whole blocks of block_pages. Returns the pages of the one kind, less those that fit
    into no slab, those of the other, with its part of the slabs, and the slabs; None if there is no room for one."""
    common = math.gcd(full_bytes, windowed_bytes)
    step, windowed_pages = windowed_bytes // common, full_bytes // common * block_pages
    full_pages, num_fitting = step * block_pages, num_full // step * step
    num_most = (num_fitting - num_windowed) // (full_pages + windowed_pages)
    if num_most < 1:
        return num_full, num_windowed, None
    joined = -(-num_most // _MOST_SLABS)
    slabs = BorderSlabs(num_most // joined, full_pages * joined, windowed_pages * joined)
    return num_fitting, num_windowed + slabs.num_windowed, slabs
