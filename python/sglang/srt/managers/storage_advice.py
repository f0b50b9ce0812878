"""`StorageAdvice`: what the scheduler knows of costs, for those that read and write storage. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.mem_cache.transfer import StorageOp, Ticket


@dataclass(frozen=True)
class StorageAdvice:
    """By default nothing is known: everything is stored, and every request waits for all that storage has."""

    # What an operation is expected to take, in seconds; 0: not known.
    expected_s: Callable[[StorageOp], float] = lambda op: 0.0
    # What so many tokens take from the store at a place, without what their end's windows do not reach; None: not
    # known.
    fetch_s: Callable[[int, int], float | None] = lambda place, num_tokens: None
    # By how many seconds tokens [start, end) of a prompt are fetched sooner from the store at a place than computed;
    # None: not known.
    fetch_gain_s: Callable[[int, int, int], float | None] = lambda place, start, end: None
    # Of a request, by its id: how many of its blocks from the first lacking one on to fetch, where the first store
    # has so many of them and the second one the rest, and `ahead` blocks of others go first; the others are computed.
    blocks_worth_fetching: Callable[[str, int, tuple[int, int], int], int] = lambda rid, first, num, ahead: sum(num)
    # Whether tokens [start, end) of a path are worth it, for the store at a place.
    is_worth_storing: Callable[[int, int, int], bool] = lambda place, start, end: True
    # Takes the ticket of a fetch that begins, and its bytes.
    fetch_begun: Callable[[Ticket, int], None] = lambda ticket, num_bytes: None
