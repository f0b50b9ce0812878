"""Which tier holds which page, for the write policy `auto`: pure functions over plain numbers.

The capacities of the tiers are to add up. A copy of what a nearer tier has saves nothing while that tier keeps it, so
a full tier gives up such copies first. The copies of what the nearer tier gives up next stay: they are written ahead,
so that the device can always give up some pages at once.

    room everywhere    everything computed goes to the host at once, and to peers before the device gives it up
    a tier is full     what the device keeps is on the device alone; what it gives up next, and what it gave up, is
                       on peers or the host, one copy each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sglang.srt.mem_cache.eviction import Rank
from sglang.srt.mem_cache.transfer import Tier

# Classes of copies on a tier below the device; a full tier gives up the least first.
SPARE, CONVENIENT, LAST = range(3)
# Pages that copies to a tier may have in flight, as a share of the device's pages. They hold on to device memory, and
# a tier that hangs must not hold on to much of it.
MAX_COPYING_RATIO = 1 / 8
# A little more is written ahead than must be, so that it is copied by few operations.
_AHEAD = 1.25


def class_of_copy(on_nearer: bool, on_farther: bool, is_next: bool) -> int:
    """on_nearer, on_farther: other tiers that have the node ready. is_next: the device gives it up soon.

    SPARE: a nearer tier has it and keeps it. CONVENIENT: without this copy it would come from a farther tier. LAST:
    without it the node would have to be computed, or read from storage.
    """
    if on_nearer and not is_next:
        return SPARE
    return CONVENIENT if on_farther and not on_nearer else LAST


def pages_ahead(num_running: int, chunk_pages: int) -> int:
    """R: device pages that can go at once, for two decode steps and a chunk of a prompt."""
    return 2 * num_running + chunk_pages


def pages_to_write_ahead(num_ahead: int, num_free: int, num_known: int) -> int:
    """How far to look at what the device gives up next, in pages; 0 for not now.

    num_ahead: R. num_free: device pages that are free, or will be without eviction. num_known: of what goes next,
    pages that were looked at already.
    """
    lacking = num_ahead - num_free
    return int(_AHEAD * lacking) if lacking > num_known else 0


def should_write_through(num_pages: int, num_free: int) -> bool:
    """Whether what was computed goes to the host at once: only into room that nothing has to leave."""
    return num_pages <= num_free


def may_copy(num_pages: int, num_copying: int, max_copying: int) -> bool:
    """Whether copies to a tier may have so many pages more in flight. One copy may always be."""
    return not num_copying or num_copying + num_pages <= max_copying


class Room(NamedTuple):
    """What a tier could give a copy."""

    # Free pages.
    num_free: int
    # Pages that copies to it have in flight, and may have.
    num_copying: int
    max_copying: int
    # Class of what it gives up next, and its rank among others of that class; None if nothing.
    next_class: int | None
    next_rank: Rank = ()


def choose_tier(num_pages: int, rank: Rank, rooms: Mapping[Tier, Room]) -> Tier | None:
    """Where a node goes that the device gives up: to the nearest tier with free room, else where the least is given
    up for it. None if everything there is worth more, or the links are busy. rank: of the node, by the eviction
    policy."""
    open_ = {tier: room for tier, room in rooms.items() if may_copy(num_pages, room.num_copying, room.max_copying)}
    for tier, room in open_.items():
        if room.num_free >= num_pages:
            return tier
    full = [
        (room.next_class, room.next_rank, tier)
        for tier, room in open_.items()
        if room.next_class is not None and (room.next_class < LAST or room.next_rank <= rank)
    ]
    return min(full)[2] if full else None
