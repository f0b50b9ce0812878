"""Which request goes next: pure functions over plain numbers. Nothing here moves a page or starts a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang.srt.managers.cost_model import LoadLimit
from sglang.srt.mem_cache.transfer import Ticket


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def decode_reserve(active: Iterable[int], ratio: float, page_size: int) -> int:
    """Pages kept back so that running requests can go on.

    active: tokens that each may still generate. ratio: share of them that is expected to be used; SGLang's
    new_token_ratio. At least one page each.
    """
    return sum(max(1, pages_for(int(remaining * ratio), page_size)) for remaining in active)


@dataclass(frozen=True)
class AdmissionNeed:
    """What a waiting request needs of memory, in pages."""

    # For the rest of its prompt, loads included.
    need: int
    # What it may still generate.
    own_future: int
    # It has been admitted on an optimistic guess before, and lost.
    was_retracted: bool


def pages_to_admit(req: AdmissionNeed, reserve: int, worst_reserve: int, anything_active: bool) -> int:
    """How many pages must be available for a request to start.

    A request that was retracted comes back only when its worst case and that of all running requests fit. So it is
    not retracted again and again: each request is readmitted at most once on a guess. With nothing active, anything
    that fits the pool may start. The oldest request is never retracted, so some request always ends.
    """
    if not anything_active:
        return req.need
    if req.was_retracted:
        return req.need + req.own_future + worst_reserve
    return req.need + reserve + 1


# What a request's priority may be: a 32-bit number.
PRIORITIES = range(-(1 << 31), 1 << 31)


def choose_victim(turns: Sequence[tuple[int, int]]) -> int:
    """Index of the request to retract: the last in turn. turns: see `Admission.turn_of`."""
    return max(range(len(turns)), key=turns.__getitem__)


def chunk_of(num_tokens: int, budget: int, page_size: int) -> int:
    """How many of the tokens still to compute go into this batch: all, or whole pages up to the budget."""
    if num_tokens <= budget:
        return num_tokens
    return budget - budget % page_size


@dataclass(frozen=True)
class Candidate:
    """A waiting request as batch formation sees it, in tokens.

    Requests that load the same node share the load, and then the topmost one too, since what is loaded is a path; the
    last node may be loaded in part.
    """

    # Its new tokens, more than 0.
    compute: int
    # The nodes that it would load from the host, top first, as (id, tokens).
    loads: tuple[tuple[int, int], ...] = ()
    # Tokens before the new ones.
    prefix: int = 0
    # Operations in flight that bring some of the prefix.
    loading: tuple[Ticket, ...] = ()
    # Tokens that it would load from peers, which takes nothing from the link to the host.
    from_peers: int = 0
    # Tokens that it has if nothing is loaded; None for all that are not to be loaded.
    on_device: int | None = None
    # See `MatchResult`.
    awaits_load: bool = False
    # The topmost node of loads.
    top: int | None = field(init=False)
    # Tokens of loads.
    load: int = field(init=False)
    # Pairs of a new token and one that it attends to.
    pairs: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "top", self.loads[0][0] if self.loads else None)
        object.__setattr__(self, "load", sum([tokens for _, tokens in self.loads]))
        object.__setattr__(self, "pairs", pairs_of(self.prefix, self.compute))


def first_come_first_served(candidate: Candidate) -> float:
    """first come, first served"""
    return 0.0


def longest_prefix_match(candidate: Candidate) -> float:
    """longest cached prefix first"""
    return -candidate.prefix


# Of its priority a request that so many younger ones have passed goes first, whatever the order is but by age.
MOST_PASSED = 64
# How the queue is ordered: a key of each candidate, the least goes first, equals by age. `--help` shows the
# docstrings.
QUEUE_POLICIES: dict[str, Callable[[Candidate], float]] = {
    "fcfs": first_come_first_served,
    "lpm": longest_prefix_match,
}


def pairs_of(prefix: int, new: int) -> int:
    """Pairs of query and key that attention computes for new tokens behind a prefix."""
    return new * prefix + new * (new + 1) // 2


def balanced_order(queue: Sequence[Candidate], limit: LoadLimit) -> Iterator[tuple[int, bool]]:
    """The order in which a batch is filled: Strata's Algorithm 1. Yields places in the queue, each exactly once, and
    whether the request came along with one before it (a bundle hit).

    The caller takes requests until the batch is full. limit: the most tokens that a batch may load for what it
    computes before it counts as bound by loading:

        free + per_token * new tokens + per_pair * pairs        (`LoadLimit.num_tokens`)

    Strata 4.3.2 has per_token 100 and nothing else; with the others it is the load that takes as long as computing.

    What is loaded is counted once for all requests that share it, so a request that shares a load with the batch is
    taken at once. Linear in the queue: requests that share are found by the topmost node that they load, where the
    printed loop compares each with each. Ours: requests that were put off are taken along too, as they cost nothing
    more then.

    No request starves: the oldest comes first, and what is put off keeps its order.
    """
    by_top: dict[int, list[int]] = {}
    for place, candidate in enumerate(queue):
        if candidate.top is not None:
            by_top.setdefault(candidate.top, []).append(place)
    taken = bytearray(len(queue))
    loaded: dict[int, int] = {}
    load = compute = pairs = 0
    put_off: list[int] = []
    for place, candidate in enumerate(queue):
        if taken[place]:
            continue
        bundle: Sequence[int] = (place,)
        if candidate.top is not None:
            # A request that shares a load with the batch is in it already: what this one loads is all new.
            most = limit.num_tokens(compute + candidate.compute, pairs + candidate.pairs)
            if compute and load + candidate.load > most:
                put_off.append(place)
                continue
            bundle = by_top[candidate.top]
        for each in (place, *bundle):
            if taken[each]:
                continue
            taken[each] = True
            member = queue[each]
            for node, tokens in member.loads:
                if tokens > (before := loaded.get(node, 0)):
                    loaded[node] = tokens
                    load += tokens - before
            compute += member.compute
            pairs += member.pairs
            yield each, each != place
    for place in put_off:
        if not taken[place]:
            yield place, False


FETCH_ORDERS = ("fifo", "sjf")
# So many blocks may be given to others first for every block that a request lacks; see `fetch_rank`.
FETCH_PATIENCE = 8


def fetch_rank(order: str, num_blocks: int, begun_before: int) -> int:
    """Which of several requests is given the link to storage next: the one of lowest rank, of equals the oldest.

    fifo: all are equal. sjf, the shortest job first, with ageing:

        FETCH_PATIENCE * num_blocks + begun_before

    num_blocks: blocks that the request still has to begin, at least 1. begun_before: blocks that all requests
    together had begun when storage answered this one's probe. No request starves: once FETCH_PATIENCE * num_blocks
    further blocks have been begun, every newer request has a higher rank, and a rank only falls with time. So a long
    request waits in proportion to its length.
    """
    return FETCH_PATIENCE * num_blocks + begun_before if order == "sjf" else 0


# So many lengths are looked at; what comes out differs from the best by little.
_CUTS = 64


def blocks_to_fetch(
    num_blocks: int, fetch_s: Callable[[int], float], compute_s: Callable[[int], float], others_s: float
) -> int:
    """Load or recompute, for storage: how many of the leading blocks that it has are worth waiting for. The rest is
    computed, which takes the blocks before it.

        ready(n) = max(fetch_s(n) if n else 0, others_s) + compute_s(n)        the least, of equals the longest fetch

    fetch_s(n): when the first n blocks will have come, in seconds from now, behind what is before them on the link.
    compute_s(n): computing the prompt from behind them to its end. others_s: when the requests that are ready already
    will have been computed. The load to the device is left out, as it is small beside both. Later blocks cost more to
    compute and as much to fetch, so the result is all blocks, none, or as many as come while others are computed; all
    if others_s is fetch_s(num_blocks) or more.
    """

    def ready(n: int) -> float:
        return max(fetch_s(n) if n else 0.0, others_s) + compute_s(n)

    step = -(-num_blocks // _CUTS)
    return min((num_blocks, *range(num_blocks - step, -1, -step), 0), key=ready)


class PrefillWork(NamedTuple):
    """What a prefill launch computes, over all its requests."""

    # Tokens.
    new: int = 0
    # Tokens before the new ones that they attend to.
    prefix: int = 0
    # See `pairs_of`.
    pairs: int = 0

    def plus(self, prefix: int, new: int) -> PrefillWork:
        """One request more."""
        return PrefillWork(self.new + new, self.prefix + prefix, self.pairs + pairs_of(prefix, new))


@dataclass(frozen=True)
class LoadTimes:
    """When what a launch waits for arrives: its first layer, and its last. Seconds, of any clock."""

    first: float
    last: float

    @staticmethod
    def between(start: float, end: float, num_layers: int) -> LoadTimes:
        """Of one load, whose layers arrive evenly."""
        return LoadTimes(start + (end - start) / num_layers, end)

    def and_also(self, other: LoadTimes) -> LoadTimes:
        return LoadTimes(max(self.first, other.first), max(self.last, other.last))


NO_LOADS = LoadTimes(float("-inf"), float("-inf"))


def stall_seconds(loads: LoadTimes, start: float, compute_s: float, num_layers: int) -> float:
    """How long a launch waits for loads. It starts at `start` if it need not wait, computes layer by layer, compute_s
    in all, each when its load is in, and layers arrive evenly (Strata 4.3.3's bubble):

        max(first layer - start, last layer - start - compute_s (L - 1) / L, 0)
    """
    hidden = compute_s * (num_layers - 1) / num_layers
    return max(loads.first - start, loads.last - start - hidden, 0.0)


def should_fill_bubble(stall_s: float, other_work_s: float | None) -> bool:
    """Bubble filling (Strata 4.3.3): whether a request is left out of a launch that its load would hold up for
    stall_s. other_work_s: the cost of the launch that would run meanwhile, a decode step or a prefill of others; None
    if there is none."""
    return other_work_s is not None and stall_s > other_work_s


@dataclass(frozen=True)
class BatchRoom:
    """What one prefill launch may take."""

    num_reqs: int
    new_tokens: int
    # Of the device.
    num_pages: int


def count_prepared(queue: Sequence[Candidate], room: BatchRoom, page_size: int) -> int:
    """How many of the first requests of a queue make up one prefill launch; see `HeldBatch`. The last one may be
    computed in part. What several requests load counts for each of them, so that the batch fits its room."""
    budget, pages = room.new_tokens, room.num_pages
    for place, each in enumerate(queue[: room.num_reqs]):
        chunk = chunk_of(each.compute, budget, page_size)
        pages -= pages_for(each.load + each.from_peers + each.compute, page_size)
        if chunk == 0 or pages < 0:
            return place
        budget -= chunk
        if chunk < each.compute:
            return place + 1
    return min(len(queue), room.num_reqs)


def tokens_to_load(batch: Iterable[Candidate]) -> int:
    """Tokens that requests load from the host together: what several load counts once."""
    loaded: dict[int, int] = {}
    for each in batch:
        for node, tokens in each.loads:
            loaded[node] = max(tokens, loaded.get(node, 0))
    return sum(loaded.values())


def best_recompute_len(num_load: int, page_size: int, seconds_of: Callable[[int], float], max_len: int) -> int:
    """Load or recompute: how many of the first tokens that a request would load are computed instead, whole pages.

    A token's KV needs all before it, so computing has to begin at the front; what is behind that is loaded at the
    same time. seconds_of(n): how long the launch takes, waiting and computing, if the first n tokens are computed.
    While it waits for the load, a larger n shortens it, as less is loaded; beyond that it lengthens it, as more is
    computed. The shortest launch is found by bisection of the turning point. Both ends are looked at, too: with n = 0
    there is a row less to compute, and without any load its latency is saved.
    """
    low, high = 0, min(num_load, max_len) // page_size
    ends = (0, high)
    while low < high:
        middle = (low + high + 1) // 2
        if seconds_of(middle * page_size) < seconds_of((middle - 1) * page_size):
            low = middle
        else:
            high = middle - 1
    return min((*ends, low), key=lambda pages: (seconds_of(pages * page_size), pages)) * page_size
