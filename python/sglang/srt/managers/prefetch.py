"""`Prefetch`: what one waiting request expects from storage. Plain data; storage_controller.py writes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import Ticket


@dataclass
class Prefetch:
    """What one request expects."""

    namespace: str
    # int32, up to the end of the last block that storage may have.
    tokens: np.ndarray
    # How long it waits, and until when.
    limit_s: float
    deadline: float = math.inf
    # It is not put off from then on.
    last_deadline: float = math.inf
    # Of all its blocks from the first on, (n, 16) uint8; empty until storage is asked.
    keys: np.ndarray = field(default_factory=lambda: np.empty((0, 16), np.uint8))
    num_asked: int = 0
    # Why storage was not read when the request came, one of `REASONS`.
    unread: str = ""
    # Tokens that were found, or were left to storage for lack of room.
    reach: int = 0
    # Fetches that had ended when its deadline was set.
    num_ended_before: int = 0
    # End of its soft-pinned path.
    pinned: Node | None = None
    # Not answered yet; it asks for the blocks from `probed` on.
    probe: Ticket | None = None
    probed: int = 0
    # Whether storage did not answer the last one.
    probe_failed: bool = False
    # Whether it is held up until the answer comes.
    waits_for_probe: bool = True
    # Storage has the blocks up to that token; 0 when nothing more is to be begun.
    end: int = 0
    # It has begun to fetch all up to that token since storage was asked; what is gone again is not fetched once more.
    begun_end: int = 0
    # Fetches that it waits for.
    tickets: dict[Ticket, None] = field(default_factory=dict)
    # Of each fetch that brought something, the place of its store and tokens [start, end). Fetches that others have
    # begun count.
    found: list[tuple[int, int, int]] = field(default_factory=list)
    # Of what it begins to fetch, tokens from there on are in the second store.
    far_from: int = 0
    # The places of stores that were not asked.
    skips: tuple[int, ...] = ()
    # To be begun, as far as it is known.
    blocks_left: int = 0
    # Storage is known to have its prompt up to that token.
    stored_end: int = 0
    # From that token on it was not worth fetching.
    cut_from: int = 1 << 62
    # Up to that token storage is known to have layers with full attention: later prompts may leave the path there.
    leaves_at: int = 0
    # Whether it was let go before all had come, and whether the host had no room, or did not keep what had come.
    timed_out: bool = False
    no_room: bool = False
    # See `fetch_rank`.
    begun_before: int = 0

    @property
    def asked(self) -> list[Ticket]:
        """Operations that it waits for."""
        return ([self.probe] if self.probe is not None else []) + list(self.tickets)

    @property
    def is_pinned(self) -> bool:
        """Whether its path has its soft pin; that ends where the path leaves the tree."""
        return self.pinned is not None and self.pinned.parent is not None

    @property
    def is_over(self) -> bool:
        return (self.probe is None or not self.waits_for_probe) and not self.tickets and not self.end

    @property
    def trouble(self) -> str:
        """Why a request that starts now lacks what storage has, one of `REASONS`; empty for no trouble."""
        if self.unread:
            return self.unread
        if self.timed_out:
            return "storage_timeout"
        if self.probe_failed:
            return "storage_failed"
        if self.no_room:
            return "no_room"
        return "storage_not_awaited" if self.asked or self.end or not self.num_asked else ""


def joined_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs [start, end) in their order, without empty ones, and as one where one begins at another's end."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(runs):
        if start < end:
            begin = found.pop()[0] if found and found[-1][1] == start else start
            found.append((begin, end))
    return tuple(found)
