"""What storage is attached and how it is used: `StorageSetup`, `StorageLimits` and `PrefetchConfig`. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.transfer import Tier

PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
# Of the host tier; so much of it may be lost to reads that hang, and to writes. In a small one so many blocks, of a
# quarter of it at most.
_IN_FLIGHT_SHARE = 16
_LEAST_IN_FLIGHT = 4


@dataclass(frozen=True)
class StorageLimits:
    """What each of the stores may have in flight, so that storage neither takes the host pool away from others nor
    stands in its own way."""

    # One operation reads or writes that many blocks, a fraction of a second of work.
    blocks_per_op: int
    # Host pages that reads may be filling.
    max_fetch_pages: int
    # Host pages that writes may be holding on to.
    max_store_pages: int
    # Reads in flight: enough that the link never runs dry, and no more, as what has been begun is served before a
    # request that comes next, however urgent.
    fetch_window_ops: int = 8
    # Host pages that may be soft-pinned when a request begins to fetch, and when more is kept for what waits to be
    # written; 0: as many as reads may be filling.
    max_pinned_pages: int = 0

    @property
    def most_pinned_pages(self) -> int:
        return self.max_pinned_pages or self.max_fetch_pages

    @classmethod
    def of_host(
        cls, num_pages: int, block_pages: int, blocks_per_op: int, fetch_window_ops: int = 8, num_stores: int = 1
    ) -> StorageLimits:
        """Of reads and writes a medium that hangs can hold on to. num_pages: of the host; block_pages: of a block;
        blocks_per_op: the most, if so many may be in flight."""
        num_blocks = num_pages // block_pages
        blocks_in_flight = max(num_blocks // _IN_FLIGHT_SHARE, min(_LEAST_IN_FLIGHT, num_blocks // 4))
        blocks_in_flight = max(1, blocks_in_flight // num_stores)
        return cls(
            # Two at once, so that the link does not run dry.
            blocks_per_op=max(1, min(blocks_per_op, blocks_in_flight // 2)),
            max_fetch_pages=blocks_in_flight * block_pages,
            max_store_pages=blocks_in_flight * block_pages,
            fetch_window_ops=fetch_window_ops,
            max_pinned_pages=num_pages // 2,
        )


@dataclass(frozen=True)
class PrefetchConfig:
    # best_effort goes without what has not come when the request could start, wait_complete waits for all of it,
    # timeout waits for the time below.
    policy: str = "timeout"
    # Fewer tokens than that beyond the local match are not worth asking for.
    threshold: int = 256
    # With `timeout`: at most timeout_base_s + timeout_per_ki_token_s per 1,024 tokens, from arrival.
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    # Which request is given the link next, see `fetch_rank`.
    fetch_order: str = "fifo"


@dataclass(frozen=True)
class StorageSetup:
    """What is attached."""

    # The backend's name, or two.
    backend: str
    # What each rank opens, as JSON.
    setup: str
    # See `BlockKeys`; it covers what all requests share (model, weights, dtype, layout).
    secret: bytes
    block_tokens: int
    limits: StorageLimits
    prefetch: PrefetchConfig
    # Of the host tier, through which everything goes.
    write_policy: str
    # One for each backend, nearest first.
    tiers: tuple[Tier, ...] = (Tier.DISK,)
    # Whether what it stores comes back changed.
    is_lossy: bool = False
    # See `BlockKeys`.
    tenant_key: bytes = b""
    # Whether layers with a window are read and written for themselves, see `WindowedStore`.
    has_windowed_store: bool = False

    def is_exclusive(self, place: int) -> bool:
        """Whether memory and the store at that place, a full disk, hold different blocks, so that their capacities
        add up: memory stores what it gives up, and the disk gives up first what memory has read since."""
        return self.write_policy == "auto" and self.tiers[place] == Tier.DISK


def others_than(place: int, num_stores: int) -> tuple[int, ...]:
    """The places of the other stores; see `StorageOp.skips`."""
    return tuple(other for other in range(num_stores) if other != place)
