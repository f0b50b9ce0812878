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

WRITE_POLICIES = ("auto", "write_through", "write_through_selective", "write_back")
# Classes of copies on a tier below the device; a full tier gives up the least first.
SPARE, CONVENIENT, LAST, PINNED = range(4)
# Pages that copies to a tier may have in flight, as a share of the device's pages. They hold on to device memory, and
# a tier that hangs must not hold on to much of it.
MAX_COPYING_RATIO = 1 / 8
# The same of a link on which no copy has ended yet.
FIRST_COPYING_RATIO = 1 / 64
# A little more is written ahead than must be, so that it is copied by few operations.
_AHEAD = 1.25


def class_of_copy(on_nearer: bool, on_farther: bool, is_next: bool, is_pinned: bool = False) -> int:
    """on_nearer, on_farther: other tiers that have the node ready, of the farther ones only those that are not much
    slower. is_next: the nearer one gives it up soon. is_pinned: a waiting request is about to load it.

    SPARE: a nearer tier has it and keeps it. CONVENIENT: without this copy it would come from a farther tier. LAST:
    without it the node, and what is behind it, would have to be computed, or read from storage. PINNED: after all
    others.
    """
    if is_pinned:
        return PINNED
    if on_nearer and not is_next:
        return SPARE
    return CONVENIENT if on_farther and not on_nearer else LAST


def pages_ahead(num_running: int, num_taken: int) -> int:
    """R: device pages that can go at once, for two decode steps and what a prompt takes. num_taken: see
    `RecentTakes`. A prompt that takes more waits until the rest is copied."""
    return 2 * num_running + num_taken


def pages_to_write_ahead(num_ahead: int, num_free: int, num_known: int) -> int:
    """How far to look at what the device gives up next, in pages; 0 for not now.

    num_ahead: R. num_free: device pages that are free, or will be without eviction. num_known: of what goes next,
    pages that were looked at already.
    """
    lacking = num_ahead - num_free
    return int(_AHEAD * lacking) if lacking > num_known else 0


def is_worth_copying(there_and_back_s: float | None, recompute_s: float | None) -> bool:
    """Whether a copy on a tier saves time: writing and loading it again is faster than computing it again. While
    nothing is measured, it is believed to be."""
    return there_and_back_s is None or recompute_s is None or there_and_back_s < recompute_s


class Room(NamedTuple):
    """What a tier could give a copy."""

    # Free pages.
    num_free: int
    # Pages that copies to it may have in flight beyond those that they have.
    num_allowed: int
    # Class of what it gives up next, and its rank among others of that class; None if nothing.
    next_class: int | None
    next_rank: Rank = ()


def choose_tier(num_pages: int, rank: Rank, rooms: Mapping[Tier, Room], gives_up_last: bool = True) -> Tier | None:
    """Where a node goes that the device gives up: to the nearest tier with free room, else where the least is given
    up for it. None if everything there is worth more, or the links are busy. num_pages: of the node. rank: of it, by
    the eviction policy. gives_up_last: also what no other tier has. A node larger than what is allowed is copied in
    part."""
    open_ = {tier: room for tier, room in rooms.items() if room.num_allowed > 0}
    for tier, room in open_.items():
        if room.num_free >= min(num_pages, room.num_allowed):
            return tier
    full = [
        (room.next_class, room.next_rank, tier)
        for tier, room in open_.items()
        if room.next_class is not None
        and (room.next_class < LAST or (gives_up_last and room.next_class == LAST and room.next_rank <= rank))
    ]
    return min(full)[2] if full else None
