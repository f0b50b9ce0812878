"""Configurations of the soak with every mix of tiers that a server can have, small enough that each tier is needed.

The host has room for less than a few documents, so that it gives up what peers and storage still have, and a prefix
may lie on a peer alone with blocks in storage below it. Seeds that are drawn at random seldom come there: where they
have storage, they mostly ask it after a flush, which empties the peers as well.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.transfer import Tier
from support.soak import Soak
from support.soak_config import SoakConfig

# Device and host are in every mix. "stream" is a request longer than the device, with its swap file; "lent" are slabs
# of the device that others borrow. Who lends neither borrows nor streams.
_PARTS = ("peer", "disk", "remote", "stream")
_POLICIES = ("write_through", "write_back", "write_through_selective")

TIER_MIXES = [
    *(mix for n in range(1, len(_PARTS) + 1) for mix in combinations(_PARTS, n)),
    ("disk", "lent"),
    ("remote", "lent"),
    ("disk", "remote", "lent"),
]
# What counts that a part was of use; of a tier, the tokens that it served.
_COUNTERS = {"stream": "streamed_reqs", "lent": "slabs_lent"}


def unused_parts(mix: tuple[str, ...], soak: Soak) -> set[str]:
    """Parts of the mix that were of no use in a run that is over: tiers that served no token, no request that
    streamed, no slab that was lent."""
    counters = soak.ranks[0].core.scheduler.state()["counters"]
    return {part for part in mix if not counters.get(_COUNTERS.get(part, f"hit_tokens_{part}"))}


def tier_mix(mix: tuple[str, ...], seed: int) -> SoakConfig:
    """Device and host with the other parts. Page size, ranks and policies go by the mix and the seed."""
    i = TIER_MIXES.index(mix) + seed
    page_size = (1, 4, 3, 16)[i % 4]
    streams, lends = "stream" in mix, "lent" in mix
    num_device_tokens = 24 if streams else 100 if lends else 84
    tiers = tuple(tier for name, tier in (("disk", Tier.DISK), ("remote", Tier.REMOTE)) if name in mix)
    # Every other seed has the default.
    write_policy = _POLICIES[i % 3] if seed % 2 else "auto"
    chunk = max(page_size, 8)
    num_pages = num_device_tokens // page_size + 4
    config = SoakConfig(
        seed=1000 * (TIER_MIXES.index(mix) + 1) + seed,
        steps=400,
        page_size=page_size,
        num_device_pages=2 * -(-chunk // page_size) + max(2, 8 // page_size) if streams else num_pages,
        num_host_pages=72 // page_size + 4,
        max_running_requests=3,
        chunked_prefill_size=chunk,
        max_ahead=2,
        num_ranks=1 + i % 2,
        arrival_rate=0.1,
        abort_rate=0.03,
        link_fail_rate=0.05,
        launch_fail_rate=0.01,
        late_rate=0.3,
        max_new_tokens=5,
        oracle_every=10,
        eviction_policy=("lru", "priority", "lfu")[i % 3],
        write_policy=write_policy,
        num_documents=10,
        whole_rate=0.9,
        twin_rate=0.1,
        storage=_storage(page_size, tiers, write_policy, i) if tiers else None,
        near_blocks=12 if len(tiers) > 1 else 0,
        overlapping_reads=tiers == (Tier.REMOTE,),
        store_fail_rate=0.02,
        store_late_rate=0.3,
        storage_request_rate=0.01 if i % 3 == 0 else 0.0,
        # With `auto` it also decides what is copied at all, and here every tier is to be used.
        load_or_recompute=i % 2 == 0 and write_policy != "auto",
        deferral_threshold=6,
        num_peer_pages=48 // page_size + 6 if "peer" in mix else 0,
        slab_rate=0.05 if "peer" in mix and i % 2 else 0.0,
        lend_rate=0.1 if lends else 0.0,
        lend_window_s=0.0,
        stream_pages=max(2, 8 // page_size) if streams else 0,
        num_swap_pages=60 // page_size if streams else 0,
    )
    return config.with_hangs() if seed % 4 == 2 else config


def windowed_mix(mix: tuple[str, ...], seed: int) -> SoakConfig:
    """A mix in which no request streams, with layers that have windows: prompts of a few documents that branch
    everywhere, of which the device holds one or two."""
    config = tier_mix(mix, seed)
    return replace(
        config,
        num_device_pages=150 // config.page_size + 4,
        num_host_pages=3 * config.num_host_pages,
        max_prompt=90,
        num_documents=3,
        whole_rate=0.4,
        steps=150,
        load_or_recompute=False,
    ).with_windows()


def _storage(page_size: int, tiers: tuple[Tier, ...], write_policy: str, i: int) -> StorageSetup:
    block_tokens = page_size * max(1, 4 // page_size)
    return StorageSetup(
        backend="memory",
        setup="",
        secret=b"mix",
        block_tokens=block_tokens,
        limits=StorageLimits(blocks_per_op=2, max_fetch_pages=40, max_store_pages=40, fetch_window_ops=2),
        prefetch=PrefetchConfig(("timeout", "wait_complete")[i % 2], 1, timeout_base_s=0.1),
        write_policy=write_policy,
        tiers=tiers,
        is_lossy=i % 5 == 3,
    )
