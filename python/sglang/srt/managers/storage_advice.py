"""`StorageAdvice`: what the scheduler knows of costs, for those that read and write storage. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.mem_cache.transfer import StorageOp


@dataclass(frozen=True)
class StorageAdvice:
    """By default nothing is known: everything is stored, and every request waits for all that storage has."""

    # What an operation is expected to take, in seconds; 0: not known.
    expected_s: Callable[[StorageOp], float] = lambda op: 0.0
    # What so many tokens take from storage, without what their end's windows do not reach; None: not known.
    fetch_s: Callable[[int], float | None] = lambda num_tokens: None
    # By how many seconds tokens [start, end) of a prompt are fetched sooner than computed; None: not known.
    fetch_gain_s: Callable[[int, int], float | None] = lambda start, end: None
    # Of a request, by its id: how many of its num_blocks blocks from the first lacking one on to fetch, where `ahead`
    # blocks of others go first; the rest is computed.
    blocks_worth_fetching: Callable[[str, int, int, int], int] = lambda rid, first, num_blocks, ahead: num_blocks
    # Whether tokens [start, end) of a path are worth it.
    is_worth_storing: Callable[[int, int], bool] = lambda start, end: True
    # Takes the number of a fetch that begins, and its bytes.
    fetch_begun: Callable[[int, int], None] = lambda seq, num_bytes: None
