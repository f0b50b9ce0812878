"""Which request goes next: pure functions over plain numbers. Moving anything is somebody else's file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def decode_reserve(active: Iterable[int], ratio: float, page_size: int) -> int:
    """Pages kept back so that running requests can go on.

    active: tokens that each may still generate. ratio: share of them that is expected to be used; SGLang's
    new_token_ratio. At least one page each.
    """
    return sum(max(1, pages_for(int(remaining * ratio), page_size)) for remaining in active)


@dataclass(frozen=True)
class Admission:
    """A waiting request, measured against memory, in pages.

    need: for the rest of its prompt, loads included. own_future: what it may still generate. was_retracted: it has
    been admitted on an optimistic guess before, and lost.
    """

    need: int
    own_future: int
    was_retracted: bool


def may_admit(req: Admission, available: int, reserve: int, worst_reserve: int, anything_active: bool) -> bool:
    """Whether a request may start.

    A request that was retracted comes back only when its worst case and everybody's fit, so that it is not retracted
    again and again; each request is thus readmitted at most once on a guess. With nothing active anything that fits
    the pool may start, and the oldest request is never retracted, so some request always ends.
    """
    if not anything_active:
        return req.need <= available
    if req.was_retracted:
        return req.need + req.own_future + worst_reserve <= available
    return req.need + reserve + 1 <= available


def choose_victim(orders: Sequence[int]) -> int:
    """Index of the request to retract: the youngest."""
    return max(range(len(orders)), key=orders.__getitem__)


def chunk_of(num_tokens: int, budget: int, page_size: int) -> int:
    """How many of the tokens still to compute go into this batch: all, or whole pages up to the budget."""
    if num_tokens <= budget:
        return num_tokens
    return budget - budget % page_size
