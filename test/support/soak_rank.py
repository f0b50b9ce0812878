"""One rank of the soak: a real scheduler, links and executor on emulated streams, with tiny pools and faults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from sglang.srt.constrained.grammar_rows import GrammarRows
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.step_record import StepRecorder
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.mem_cache.link import CopyOptions, HasPages
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.tiered_store import AnyStore, TieredStore, parts_of
from sglang.srt.mem_cache.storage.windowed_store import WindowedStore
from sglang.srt.mem_cache.storage_link import StoreSlot
from sglang.srt.mem_cache.swap_file import SwapFile
from sglang.srt.mem_cache.transfer import (
    BACKUP_LINKS,
    CHECK,
    D2H,
    D2P,
    D2S,
    H2D,
    LOAD_LINKS,
    P2D,
    P2H,
    P2P,
    STORAGE_LINKS,
    Tier,
)
from sglang.srt.model_executor.executor import ExecutorOptions
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from support.coming_and_going import ComingAndGoing, LentOut
from support.faults import (
    FaultyCheckLink,
    FaultyExecutor,
    FaultyLayerStreamCache,
    FaultyLink,
    LateStorageLink,
    RandomClock,
)
from support.hash_model import DIM, HEADS, HashModel
from support.memory_store import MemoryStore, OverlappingMemoryStore
from support.pool_pages import fill_all, poison, poison_windowed
from support.soak_config import EOS, SoakConfig, scheduler_config
from support.soak_requests import grammars
from support.stream_emulator import StreamEmulator

# What watches a run. Tokens, liveness, equal decisions and the code's own assertions are always on.
ALL_NETS = frozenset({"invariants", "poison", "oracle", "events"})


@dataclass
class Rank:
    core: EngineCore
    emulator: StreamEmulator
    device_pool: MHATokenToKVPool
    host_pool: MHATokenToKVPoolHost | None
    peer_pool: MHATokenToKVPoolHost | None
    slabs: ComingAndGoing | LentOut | None
    stores: list[MemoryStore]
    # Those that copy.
    links: list[FaultyLink]


def greedy(logits: torch.Tensor, sampling: SamplingBatchInfo) -> torch.Tensor:
    return logits.argmax(-1)


def build_rank(
    config: SoakConfig, model: HashModel, rank: int, record: StepRecorder | None, nets: frozenset[str] = ALL_NETS
) -> Rank:
    emulator = StreamEmulator(config.seed * 10 + rank)
    layout = PageLayout.kv(config.page_size, model.num_layers, HEADS, DIM, torch.float64)
    scheduler = Scheduler(scheduler_config(config, layout.page_bytes))
    num_windowed = scheduler.config.num_windowed_pages
    windowed = [window is not None for window in config.windows]
    pool = MHATokenToKVPool(config.num_device_pages, layout, windowed=windowed, num_windowed_pages=num_windowed)
    empty = float("nan") if "poison" in nets else 0.0
    fill_all(pool, empty)
    links: dict[str, FaultyLink] = {}
    storage_links: dict[str, LateStorageLink] = {}
    sources: dict[Tier, HasPages] = {}
    layer_stream = None
    if config.streams:
        layer_stream = FaultyLayerStreamCache(
            config.stream_buffers,
            config.stream_pages,
            pool,
            sources,
            emulator.stream("layer-stream", RandomClock(config.seed, config.load_s)),
            config.io_backend,
            seed=config.seed * 10 + rank,
            fail_rate=config.link_fail_rate / 20,
        )
        layer_stream.kv.fill_(empty)
    executor = FaultyExecutor(
        model,
        pool,
        emulator.stream("compute", RandomClock(config.seed, config.launch_s)),
        links,
        ExecutorOptions(
            config.page_size,
            1.0,
            model.vocab_size,
            config.max_running_requests,
            greedy,
            check_finite="poison" in nets,
            grammars=GrammarRows(model.vocab_size, (EOS,), grammars()) if config.shape_rate else None,
        ),
        layer_stream,
        seed=config.seed * 10 + rank,
        fail_rate=config.launch_fail_rate,
        late_rate=config.late_rate,
    )
    host_pool = peer_pool = None
    stores: list[MemoryStore] = []
    slabs: ComingAndGoing | LentOut | None = None
    poisons: dict[Tier, Callable[[np.ndarray], None]] = {Tier.DEVICE: partial(poison, pool)}
    poisons_windowed: dict[Tier, Callable[[np.ndarray], None]] = {}
    if num_windowed:
        poisons_windowed[Tier.DEVICE] = partial(poison_windowed, pool)
    if config.lend_rate:
        slabs = LentOut(scheduler.config.slabs, config.lend_rate, config.seed * 10 + rank, poisons[Tier.DEVICE])
    if config.num_host_pages:
        num_windowed_host = scheduler.config.num_windowed_host_pages
        host_pool = sources[Tier.HOST] = host = MHATokenToKVPoolHost(
            pool,
            scheduler.config.num_host_pages,
            config.host_layout,
            num_windowed_pages=num_windowed_host,
            windowed=windowed,
            border=scheduler.config.host_border,
        )
        fill_all(host, empty)
        if num_windowed_host:
            poisons_windowed[Tier.HOST] = partial(poison_windowed, host)
        poisons[Tier.HOST] = partial(poison, host)
        below: dict[str, HasPages] = {H2D: host, D2H: host}
        upper: dict[str, HasPages] = {P2H: host}
        if scheduler.config.num_swap_pages:
            swap = sources[Tier.DISK] = SwapFile(tempfile.gettempdir(), config.num_swap_pages, layout)
            swap.kv.fill_(empty)
            below[D2S] = swap
        if scheduler.config.num_peer_pages:
            peer_pool = sources[Tier.PEER] = peer = MHATokenToKVPoolHost(pool, config.num_peer_pages)
            peer.kv.fill_(empty)
            poisons[Tier.PEER] = partial(poison, peer)
            below |= {P2D: peer, D2P: peer, P2H: peer, P2P: peer}
            upper[P2P] = peer
            if config.slab_rate:
                ranges, seed = scheduler.config.slabs, config.seed * 10 + rank
                slabs = ComingAndGoing(ranges, config.slab_rate, seed, poisons[Tier.PEER], config.gives_back)
        for i, (name, other) in enumerate(below.items()):
            links[name] = FaultyLink(
                name,
                upper.get(name, pool),
                other,
                emulator.stream(name, RandomClock(config.seed, config.load_s)),
                executor.fence,
                options=CopyOptions(config.io_backend, windowed=windowed),
                seed=config.seed * 100 + rank * 10 + i,
                fail_rate=config.link_fail_rate,
                late_rate=config.load_late_rate if name in LOAD_LINKS.values() else config.late_rate,
                hangs=(config.hang_rate, config.hang_ticks) if name in (*BACKUP_LINKS.values(), D2S) else (0.0, 0),
            )
        if config.storage is not None:
            stores = _build_stores(config, config.storage, host, emulator, rank)
            store: AnyStore = TieredStore(*stores) if len(stores) > 1 else stores[0]
            if config.has_windowed_store:
                halves = [
                    MemoryStore(region, config.storage.block_tokens, config.seed + i, config.store_fail_rate)
                    for i, region in enumerate(host.regions)
                ]
                for half, kind in zip(halves, (False, True), strict=True):
                    half.layers = [layer for layer, is_windowed in enumerate(windowed) if is_windowed == kind]
                num_seen = -(-scheduler.config.window_reach // config.storage.block_tokens)
                store, stores = WindowedStore(halves[0], halves[1], host.windowed_of, num_seen), halves
            slot = StoreSlot(partial(_reopen, store), store)
            for i, name in enumerate(STORAGE_LINKS):
                storage_links[name] = LateStorageLink(
                    name,
                    slot,
                    emulator.stream(name),
                    config.seed * 100 + rank * 10 + i,
                    config.store_late_rate,
                    RandomClock(config.seed, config.fetch_s),
                    host,
                )
    checks: dict[str, FaultyCheckLink] = {}
    if config.canary_rate:
        checks[CHECK] = FaultyCheckLink(
            pool, emulator.stream(CHECK), seed=config.seed * 10 + rank, fail_rate=config.check_fail_rate
        )
    if "poison" not in nets:
        poisons = poisons_windowed = {}
    core = EngineCore(
        scheduler,
        executor,
        {**links, **storage_links, **checks},
        poisons,
        record,
        slabs,
        poison_windowed=poisons_windowed,
    )
    return Rank(core, emulator, pool, host_pool, peer_pool, slabs, stores, list(links.values()))


def _build_stores(
    config: SoakConfig, storage: StorageSetup, host: MHATokenToKVPoolHost, emulator: StreamEmulator, rank: int
) -> list[MemoryStore]:
    """One per storage tier, nearest first."""
    stores: list[MemoryStore] = []
    for tier in storage.tiers:
        seed = config.seed * 10 + rank + 1000 * len(stores)
        if stores or config.overlapping_reads:
            reads = emulator.stream(f"reads {tier.name.lower()}")
            stores.append(
                OverlappingMemoryStore(host, storage.block_tokens, reads, seed, fail_rate=config.store_fail_rate)
            )
        else:
            stores.append(
                MemoryStore(host, storage.block_tokens, seed, config.store_fail_rate, max_blocks=config.near_blocks)
            )
    return stores


def _reopen(store: AnyStore, setup: str) -> AnyStore:
    """What was stored before is still there, as on a disk."""
    for part in [store.full, store.of_windows] if isinstance(store, WindowedStore) else parts_of(store):
        assert isinstance(part, MemoryStore)
        part.is_open = True
    return store
