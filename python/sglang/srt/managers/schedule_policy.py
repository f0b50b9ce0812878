"""Which request goes next: pure functions over plain numbers. Moving anything is somebody else's file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Candidate:
    """A waiting request as batch formation sees it.

    compute: what computing its new tokens costs, more than 0. loads: the nodes that it would load, top first, as (id,
    cost). Both in tokens, or both in seconds. Requests that load the same node share the load, and then the topmost
    one too, since what is loaded is a path; the last may be loaded in part.
    """

    compute: float
    loads: tuple[tuple[int, float], ...] = ()
    top: int | None = field(init=False)
    load: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "top", self.loads[0][0] if self.loads else None)
        object.__setattr__(self, "load", sum([cost for _, cost in self.loads]))


def balanced_order(queue: Sequence[Candidate], load_ratio: float) -> Iterator[tuple[int, bool]]:
    """The order in which a batch is filled: Strata's Algorithm 1, as places in the queue, each exactly once, and
    whether the request came along with one before it (a bundle hit).

    The caller takes requests one after another until the batch is full; the paper's `is_full` is that nobody asks any
    more. load_ratio: the most that a batch may load per what it computes before it counts as bound by loading
    (Strata 4.3.2; 100 in tokens). What is loaded is counted once for all that share it, so whoever
    shares a load with the batch is taken at once. Linear in the queue: those who share are found by the topmost node
    that they load, where the printed loop compares each with each. Ours: those that were put off are taken along too,
    as they cost nothing more then.

    Nobody starves: the oldest comes first, and what is put off keeps its order and comes before nothing but the end.
    """
    by_top: dict[int, list[int]] = {}
    for place, candidate in enumerate(queue):
        if candidate.top is not None:
            by_top.setdefault(candidate.top, []).append(place)
    taken = bytearray(len(queue))
    loaded: dict[int, float] = {}
    load = compute = 0.0
    put_off: list[int] = []
    for place, candidate in enumerate(queue):
        if taken[place]:
            continue
        bundle: Sequence[int] = (place,)
        if candidate.top is not None:
            # Whoever shares a load with the batch is in it already: what this one loads is all new.
            if compute and load + candidate.load > load_ratio * (compute + candidate.compute):
                put_off.append(place)
                continue
            bundle = by_top[candidate.top]
        for each in (place, *bundle):
            if taken[each]:
                continue
            taken[each] = True
            for node, cost in queue[each].loads:
                if cost > (before := loaded.get(node, 0)):
                    loaded[node] = cost
                    load += cost - before
            compute += queue[each].compute
            yield each, each != place
    for place in put_off:
        if not taken[place]:
            yield place, False
