"""The soak: random requests, aborts and faults in tiny pools, with all three nets stretched under every step.

    python -m support.soak --seed 1 --seeds 40 --steps 2000

Every seed draws a configuration (page size, pool sizes, chunk, failure rates, ranks), drives real schedulers, trees,
pools, links and executors on emulated streams with the exact model of hash_model.py, and checks after every step:
all invariants; that ranks decide alike; that tokens are the right ones. Every few steps the KV oracle compares every
cached byte. At the end nothing may be left over, and the record of the run must replay to the same decisions.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from sglang.srt.managers.engine_core import EngineCore, StepRecorder, digest_of, replay
from sglang.srt.managers.io_struct import (
    AdminReqInput,
    EraseSaltReqInput,
    FinishReason,
    PromptKeys,
    RetainPrefixReqInput,
    SetPoliciesReqInput,
    SetQuotaReqInput,
    SwitchTierReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
    bytes_to_ids,
    ids_to_bytes,
)
from sglang.srt.managers.lost_hits import REASONS
from sglang.srt.managers.progress import reduce_progress
from sglang.srt.managers.schedule_batch import BatchDecision, StorageRequest
from sglang.srt.managers.schedule_policy import QUEUE_POLICIES
from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS, Scheduler, SchedulerConfig
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.storage_setup import PREFETCH_POLICIES, PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.link import CopyOptions, HasPages
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.storage.tiered_store import TieredStore, parts_of
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
    TIER_NAMES,
    StorageAction,
    Tier,
)
from sglang.srt.model_executor.executor import ExecutorOptions
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.lending import LendingConfig
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import Seconds
from support.coming_and_going import ComingAndGoing, LentOut, padded_slabs
from support.faults import (
    FaultyCheckLink,
    FaultyExecutor,
    FaultyLayerStreamCache,
    FaultyLink,
    LateStorageLink,
    RandomClock,
)
from support.hash_model import DIM, HEADS, HashModel
from support.kv_oracle import PagedMemory, check_kv, check_stored
from support.kv_subscriber import WatchedByRouter
from support.memory_store import MemoryStore, OverlappingMemoryStore
from support.residency_events import ResidencyEvents
from support.stream_emulator import StreamEmulator

EOS = 0
# What watches a run. Tokens, liveness, equal decisions and the code's own assertions are always on.
ALL_NETS = frozenset({"invariants", "poison", "oracle", "events"})


class WrongTokensError(AssertionError):
    pass


class StuckError(AssertionError):
    pass


TENANT = namespace_of("tenant", "")


@dataclass(frozen=True)
class SoakConfig:
    """One seed's configuration. Rates are probabilities."""

    seed: int
    # Ticks in which requests may arrive.
    steps: int
    page_size: int
    num_device_pages: int
    num_host_pages: int
    max_running_requests: int
    chunked_prefill_size: int
    max_ahead: int
    num_ranks: int
    arrival_rate: float
    abort_rate: float
    link_fail_rate: float
    launch_fail_rate: float
    # That what has completed is reported later.
    late_rate: float
    max_prompt: int = 48
    max_new_tokens: int = 24
    oracle_every: int = 25
    eviction_policy: str = "lru"
    write_policy: str = "write_through"
    # Texts that requests begin with; more than the device holds make loads.
    num_documents: int = 1
    # Share of requests that keep their document whole.
    whole_rate: float = 0.3
    # As late_rate, for loads alone, so that they stay in flight while other things happen.
    load_late_rate: float = 0.5
    # Share of requests that repeat one still running.
    twin_rate: float = 0.1
    flush_rate: float = 0.0
    new_token_ratio: float = 0.3
    max_filling_ratio: float = 0.5
    insert_every_tokens: int = 8
    enable_radix_cache: bool = True
    # Used where there is a host tier.
    storage: StorageSetup | None = None
    store_fail_rate: float = 0.0
    # As late_rate, for storage.
    store_late_rate: float = 0.0
    # How often storage is attached, detached or cleared.
    storage_request_rate: float = 0.0
    # Whether storage has several reads under way at once; a second storage tier always has.
    overlapping_reads: bool = False
    # Blocks that the first of two storage tiers keeps.
    near_blocks: int = 0
    # How often no request comes until all is quiet, and then all is forgotten but what storage has.
    restart_rate: float = 0.0
    load_ratio: float | str = 100.0
    bubble_filling: bool = True
    load_or_recompute: bool = True
    insert_at: str = "launch"
    deferral_threshold: int = 100
    schedule_policy: str = "fcfs"
    bypass_local: bool = False
    # What the scheduler is told that launches, loads and fetches take, in seconds; a tick has 0.001.
    launch_s: float = 1e-3
    load_s: float = 1e-3
    fetch_s: float = 1e-3
    host_layout: str = "page_first"
    io_backend: str = "auto"
    num_peer_pages: int = 0
    # How often a borrowed slab comes or is recalled.
    slab_rate: float = 0.0
    # Whether slabs that are not used, and those that lenders want, are given back.
    gives_back: bool = False
    # How often a recalled slab is back; above 0 slabs of the device are lent, which then needs no peers.
    lend_rate: float = 0.0
    # What was needed in so many seconds is not lent.
    lend_window_s: float = 0.05
    # Of each buffer of the layer stream cache, 0 for none; used where there is a host tier and nothing is lent.
    stream_pages: int = 0
    stream_buffers: int = 2
    # Of the swap file, beside a host that is then too small.
    num_swap_pages: int = 0
    # Chance per tick that a link from the device begins to hang, and for how many ticks it then does.
    hang_rate: float = 0.0
    # Whether some requests leave nothing in the cache, or do not read it.
    cache_modes: bool = True
    # How often an administrator turns a tier's reads or writes off or on.
    switch_rate: float = 0.0
    # How often an administrator erases, limits, keeps something, or changes policies.
    admin_rate: float = 0.0
    # Of hits, and of comparisons that are said to have found a difference.
    canary_rate: float = 0.0
    check_fail_rate: float = 0.0
    hang_ticks: int = 60
    # Of a tick, as the scheduler is told.
    tick_s: float = 1e-3

    def with_hangs(self) -> SoakConfig:
        """Links hang now and then for longer than is waited for them."""
        storage, tick_s = self.storage, 0.05
        if storage is not None:
            prefetch = replace(
                storage.prefetch, timeout_base_s=storage.prefetch.timeout_base_s * tick_s / self.tick_s
            )
            storage = replace(storage, prefetch=prefetch)
        return replace(self, storage=storage, hang_rate=0.01, tick_s=tick_s)

    @property
    def streams(self) -> bool:
        return bool(self.stream_pages and self.num_host_pages and self.enable_radix_cache and not self.lend_rate)

    @staticmethod
    def draw(seed: int, steps: int) -> SoakConfig:
        rng = random.Random(seed)
        page_size = rng.choice((1, 3, 4, 16))
        # Too little for the longest requests, enough for one, and for few more.
        pages = -(-rng.choice((40, 72, 72)) // page_size) + 2 + rng.randrange(1 + rng.choice((20, 160)) // page_size)
        # By turns, so that a few seeds have every combination.
        faults = seed % 4 != 0
        storage = draw_storage(rng, page_size)
        # What the host keeps, nobody asks storage for.
        hosts = (
            (pages // 2 + 1, pages, 3 * pages) if storage else (0, pages // 2 + 1, 3 * pages, 8 * pages, 8 * pages)
        )
        config = SoakConfig(
            seed=seed,
            steps=steps,
            page_size=page_size,
            num_device_pages=pages,
            num_host_pages=rng.choice(hosts),
            max_running_requests=rng.choice((1, 4, 8, 8)),
            chunked_prefill_size=max(page_size, rng.choice((5, 16, 64))),
            max_ahead=rng.choice((1, 2, 2)),
            num_ranks=2 if seed % 3 == 0 else 1,
            arrival_rate=rng.choice((0.2, 0.5) if storage else (0.1, 0.2, 0.5)),
            abort_rate=rng.choice((0.0, 0.02, 0.1)),
            link_fail_rate=rng.choice((0.05, 0.2, 0.4)) if faults else 0.0,
            launch_fail_rate=rng.choice((0.0, 0.02)) if faults else 0.0,
            late_rate=rng.choice((0.0, 0.5)),
            num_documents=rng.choice((2, 6, 12) if storage else (1, 6, 12)),
            whole_rate=rng.choice((0.3, 0.8) if storage else (0.0, 0.3)),
            load_late_rate=rng.choice((0.0, 0.9)),
            twin_rate=rng.choice((0.0, 0.3)),
            flush_rate=rng.choice((0.0, 0.02)),
            new_token_ratio=rng.choice((0.0, 0.3)),
            max_filling_ratio=rng.choice((0.1, 0.5)),
            insert_every_tokens=rng.choice((8, 8, 64)),
            enable_radix_cache=rng.random() < 0.9,
            storage=storage,
            store_fail_rate=rng.choice((0.02, 0.2)) if faults else 0.0,
            store_late_rate=rng.choice((0.0, 0.5, 0.9)),
            storage_request_rate=rng.choice((0.0, 0.0, 0.02)),
            restart_rate=0.02 if storage else 0.0,
            eviction_policy=rng.choice(("lru", "lfu", "priority")),
            write_policy=rng.choice(("auto", "auto", "write_through", "write_back", "write_through_selective")),
            host_layout=rng.choice(("page_first", "layer_first")),
            io_backend=rng.choice(("auto", "auto", "dma", "direct")),
            load_ratio=rng.choice((0.0, 1.0, 100.0, "auto")),
            bubble_filling=rng.random() < 0.8,
            load_or_recompute=rng.random() < 0.8,
            insert_at=rng.choice(("launch", "launch", "completion")),
            deferral_threshold=rng.choice((0, 1, 6)),
            schedule_policy=rng.choice(("fcfs", "fcfs", "lpm")),
            launch_s=rng.choice((3e-4, 3e-3)),
            load_s=rng.choice((3e-4, 3e-3, 3e-2)),
            fetch_s=rng.choice((3e-5, 3e-3, 3e-2)),
            # Where nobody uses anything twice, only this policy writes.
            bypass_local=storage is not None and storage.write_policy == "write_through" and rng.random() < 0.5,
            overlapping_reads=rng.random() < 0.5,
            num_peer_pages=rng.choice((0, pages // 2 + 1, 3 * pages)),
            slab_rate=rng.choice((0.0, 0.02, 0.2)),
            lend_rate=rng.choice((0.0, 0.0, 0.02, 0.5)),
            lend_window_s=rng.choice((0.0, 0.05)),
            stream_pages=rng.choice((0, 0, 1, 2, 100)),
            stream_buffers=rng.choice((1, 2, 2, 3)),
            num_swap_pages=rng.choice((0, 60)) // page_size,
        )
        if seed % 5 == 1:
            config = config.with_hangs()
        if seed % 7 == 3:
            config = replace(config, switch_rate=0.03)
        if seed % 7 in (2, 3):
            config = replace(config, admin_rate=0.03)
        if seed % 6 == 5:
            # Checks are made between requests.
            config = replace(config, canary_rate=0.5, check_fail_rate=0.0 if seed % 4 else 0.1, arrival_rate=0.05)
        if not config.streams:
            return config
        # Too little for most requests.
        chunk = max(page_size, 5)
        pages = 2 * -(-chunk // page_size) + 2
        host_tokens = 12 if config.num_swap_pages else max(config.num_host_pages * page_size, 80)
        peer_pages = config.num_peer_pages
        if seed % 2 and peer_pages:
            # Most requests fit only while peers lend.
            host_tokens, peer_pages = 12, max(peer_pages, 120 // page_size)
        return replace(
            config,
            chunked_prefill_size=chunk,
            # Sometimes with room for two that stream.
            num_device_pages=pages + rng.randrange(1 + rng.choice((16, 48)) // page_size),
            num_host_pages=host_tokens // page_size + 2,
            num_peer_pages=peer_pages,
        )


def draw_storage(rng: random.Random, page_size: int) -> StorageSetup | None:
    """Short blocks, since prompts are short, and limits that are met."""
    block_pages = rng.choice((1, 2, 4)) if page_size < 16 else 1
    blocks_per_op, fetches, stores = rng.choice((1, 2, 3)), rng.choice((4, 20, 200)), rng.choice((2, 20))
    setup = StorageSetup(
        backend="memory",
        setup="",
        secret=b"soak",
        block_tokens=page_size * block_pages,
        limits=StorageLimits(
            blocks_per_op=blocks_per_op,
            max_fetch_pages=fetches * block_pages,
            max_store_pages=stores * block_pages,
            fetch_window_ops=rng.choice((1, 2, 8)),
        ),
        prefetch=PrefetchConfig(
            policy=rng.choice(("best_effort", "wait_complete", "timeout", "timeout")),
            threshold=rng.choice((1, 12)),
            timeout_base_s=rng.choice((0.01, 0.2)),
            fetch_order=rng.choice(("fifo", "sjf")),
        ),
        write_policy=rng.choice(WRITE_POLICIES),
    )
    return setup if rng.random() < 0.6 else None


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


@dataclass
class _Expected:
    prompt: np.ndarray
    max_new_tokens: int
    stop: frozenset[int]
    refused: bool
    extra_key: str
    # It has room only while peers lend enough: then it may be refused, cut or ended.
    needs_peers: bool
    got: list[int] = field(default_factory=list)


def greedy(logits: torch.Tensor, sampling: SamplingBatchInfo) -> torch.Tensor:
    return logits.argmax(-1)


def build_rank(
    config: SoakConfig, model: HashModel, rank: int, record: StepRecorder | None, nets: frozenset[str] = ALL_NETS
) -> Rank:
    emulator = StreamEmulator(config.seed * 10 + rank)
    layout = PageLayout.kv(config.page_size, model.num_layers, HEADS, DIM, torch.float64)
    pool = MHATokenToKVPool(config.num_device_pages, layout)
    empty = float("nan") if "poison" in nets else 0.0
    pool.kv.fill_(empty)
    scheduler = Scheduler(scheduler_config(config, layout.page_bytes))
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
        ),
        layer_stream,
        seed=config.seed * 10 + rank,
        fail_rate=config.launch_fail_rate,
        late_rate=config.late_rate,
    )
    host_pool = peer_pool = None
    stores: list[MemoryStore] = []
    slabs: ComingAndGoing | LentOut | None = None
    poison = {Tier.DEVICE: lambda frames: pool.poison(torch.from_numpy(frames).to(torch.int64))}
    if config.lend_rate:
        slabs = LentOut(scheduler.config.slabs, config.lend_rate, config.seed * 10 + rank, poison[Tier.DEVICE])
    if config.num_host_pages:
        host_pool = sources[Tier.HOST] = host = MHATokenToKVPoolHost(pool, config.num_host_pages, config.host_layout)
        host.kv.fill_(empty)
        poison[Tier.HOST] = lambda frames: host.poison(torch.from_numpy(frames).to(torch.int64))
        below: dict[str, HasPages] = {H2D: host, D2H: host}
        upper: dict[str, HasPages] = {P2H: host}
        if scheduler.config.num_swap_pages:
            swap = sources[Tier.DISK] = SwapFile(tempfile.gettempdir(), config.num_swap_pages, layout)
            swap.kv.fill_(empty)
            below[D2S] = swap
        if scheduler.config.num_peer_pages:
            peer_pool = sources[Tier.PEER] = peer = MHATokenToKVPoolHost(pool, config.num_peer_pages)
            peer.kv.fill_(empty)
            poison[Tier.PEER] = lambda frames: peer.poison(torch.from_numpy(frames).to(torch.int64))
            below |= {P2D: peer, D2P: peer, P2H: peer, P2P: peer}
            upper[P2P] = peer
            if config.slab_rate:
                ranges, seed = scheduler.config.slabs, config.seed * 10 + rank
                slabs = ComingAndGoing(ranges, config.slab_rate, seed, poison[Tier.PEER], config.gives_back)
        for i, (name, other) in enumerate(below.items()):
            links[name] = FaultyLink(
                name,
                upper.get(name, pool),
                other,
                emulator.stream(name, RandomClock(config.seed, config.load_s)),
                executor.fence,
                options=CopyOptions(config.io_backend),
                seed=config.seed * 100 + rank * 10 + i,
                fail_rate=config.link_fail_rate,
                late_rate=config.load_late_rate if name in LOAD_LINKS.values() else config.late_rate,
                hangs=(config.hang_rate, config.hang_ticks) if name in BACKUP_LINKS.values() else (0.0, 0),
            )
        if config.storage is not None:
            stores = _build_stores(config, config.storage, host, emulator, rank)
            store = TieredStore(*stores) if len(stores) > 1 else stores[0]
            slot = StoreSlot(partial(_reopen, store), store)
            for i, name in enumerate(STORAGE_LINKS):
                storage_links[name] = LateStorageLink(
                    name,
                    slot,
                    emulator.stream(name),
                    config.seed * 100 + rank * 10 + i,
                    config.store_late_rate,
                    RandomClock(config.seed, config.fetch_s),
                )
    checks: dict[str, FaultyCheckLink] = {}
    if config.canary_rate:
        checks[CHECK] = FaultyCheckLink(
            pool, emulator.stream(CHECK), seed=config.seed * 10 + rank, fail_rate=config.check_fail_rate
        )
    if "poison" not in nets:
        poison = {}
    core = EngineCore(scheduler, executor, {**links, **storage_links, **checks}, poison, record, slabs)
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


def _reopen(store: MemoryStore | TieredStore, setup: str) -> MemoryStore | TieredStore:
    """What was stored before is still there, as on a disk."""
    for part in parts_of(store):
        assert isinstance(part, MemoryStore)
        part.is_open = True
    return store


def scheduler_config(config: SoakConfig, page_bytes: int) -> SchedulerConfig:
    num_peer_pages = config.num_peer_pages if config.num_host_pages and not config.lend_rate else 0
    slabs: tuple[tuple[int, int], ...] = ()
    if config.lend_rate:
        slabs = padded_slabs(config.num_device_pages)
    elif config.slab_rate:
        slabs = padded_slabs(num_peer_pages)
    return SchedulerConfig(
        page_size=config.page_size,
        num_device_pages=config.num_device_pages,
        num_host_pages=config.num_host_pages,
        page_bytes=page_bytes,
        context_len=config.max_prompt + config.max_new_tokens,
        eos_token_ids=(EOS,),
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        insert_every_tokens=config.insert_every_tokens,
        max_ahead=config.max_ahead,
        new_token_ratio=config.new_token_ratio,
        max_filling_ratio=config.max_filling_ratio,
        enable_radix_cache=config.enable_radix_cache,
        eviction_policy=config.eviction_policy,
        write_policy=config.write_policy,
        num_layers=HashModel.NUM_LAYERS,
        load_ratio=config.load_ratio,
        bubble_filling=config.bubble_filling,
        load_or_recompute=config.load_or_recompute,
        insert_at=config.insert_at,
        deferral_threshold=config.deferral_threshold,
        schedule_policy=config.schedule_policy,
        bypass_local=config.bypass_local,
        storage=config.storage if config.num_host_pages else None,
        num_peer_pages=num_peer_pages,
        slabs=slabs,
        borrowing=BorrowingConfig(0.02, 0.05) if slabs and config.gives_back else None,
        lending=LendingConfig(1, 0, config.lend_window_s, 0.005) if config.lend_rate else None,
        layer_stream=LayerStreamConfig(config.stream_buffers, config.stream_pages) if config.streams else None,
        num_swap_pages=config.num_swap_pages if config.streams else 0,
        canary_rate=config.canary_rate,
        canary_idle_s=0.0,
    )


def _check_wake_up(scheduler: Scheduler, now: Seconds) -> None:
    # A request that was given back to the queue is looked at in another step at once.
    is_asked_for = scheduler._step_again_at is not None
    assert is_asked_for or scheduler.wake_at is None or scheduler.wake_at > now, "somebody waits beyond its time"
    copies = [op.ticket.link for op in scheduler.cache.oldest_copies().values() if op is not None]
    is_watched = scheduler.wake_at is not None or scheduler.cache.controller.links.late.issuperset(copies)
    if scheduler.queues.waiting and not scheduler.clock.is_running:
        assert is_watched, "nothing causes a step if a copy hangs that requests may wait for"


def _check_reasons(output: TokenOutput) -> None:
    """Each prompt token of a request that has started was found, or has a reason why not."""
    reasons = output.computed_tokens_details
    assert reasons.keys() <= REASONS.keys() and all(n > 0 for n in reasons.values()), reasons
    if output.cached_tokens_details:
        num_found = sum(output.cached_tokens_details.values())
        assert num_found + sum(reasons.values()) == output.prompt_tokens, f"{output.rid}: {reasons}"


class Soak:
    """Drives the ranks of one configuration. `run` raises what the nets catch."""

    def __init__(self, config: SoakConfig, nets: frozenset[str] = ALL_NETS) -> None:
        self.config = config
        self.nets = nets
        self.model = HashModel(seed=config.seed % 5)
        self.random = random.Random(config.seed)
        self.record = io.BytesIO()
        probe = PageLayout.kv(config.page_size, self.model.num_layers, HEADS, DIM, torch.float64).page_bytes
        recorder = StepRecorder(self.record, scheduler_config(config, probe))
        self.ranks = [
            build_rank(config, self.model, rank, recorder if rank == 0 else None, nets)
            for rank in range(config.num_ranks)
        ]
        # Of its own, so that requests are the same with and without.
        self._admin_random = random.Random(f"administrator {config.seed}")
        self.live: dict[str, _Expected] = {}
        self.aborted: set[str] = set()
        # Requests that were there when their salt was erased.
        self.erased: set[str] = set()
        # Few distinct tokens, so that paths fork everywhere.
        self.documents = [self._random_tokens(config.max_prompt - 8) for _ in range(config.num_documents)]
        self.histories: list[np.ndarray] = [self.documents[0]]
        self.num_finished = 0
        self.num_ticks = 0
        self.events = ResidencyEvents(self.ranks[0].core.scheduler.cache)
        self.router = WatchedByRouter(self.ranks[0].core.scheduler.cache, self.ranks[0].stores, config.seed)
        self._next_rid = 0
        self._is_stopping = False

    def run(self) -> None:
        for _ in range(self.config.steps):
            arrives = self.random.random() < self.config.arrival_rate and not self._is_stopping
            arrivals = [self._new_request()] if arrives else []
            aborts = []
            if self.live and self.random.random() < self.config.abort_rate:
                aborts.append(self.random.choice(sorted(self.live)))
            self.aborted.update(aborts)
            flush = ["flush"] if self.random.random() < self.config.flush_rate else []
            if self._is_stopping and not self.live:
                flush, self._is_stopping = ["flush"], False
            elif self.random.random() < self.config.restart_rate:
                self._is_stopping = True
            storage = []
            if self.config.storage is not None and self.random.random() < self.config.storage_request_rate:
                action = self.random.choice((StorageAction.ATTACH, StorageAction.DETACH, StorageAction.CLEAR))
                what = self.config.storage
                if what.is_lossy and self.random.random() < 0.5:
                    what = replace(what, is_lossy=False)
                storage.append(StorageRequest(id="admin", action=action, what=what))
            self._tick(arrivals, aborts, flush, storage, [*self._switches(), *self._administration()])
        limit = self.num_ticks + 400 * (len(self.live) + 5)
        while self.live:
            self._tick()
            if self.num_ticks > limit:
                raise StuckError(
                    f"{len(self.live)} requests do not end: {self.ranks[0].core.scheduler.queues.active()}"
                )
        self._finish()

    def _tick(
        self,
        arrivals: Sequence[TokenizedGenerateReqInput] = (),
        aborts: Sequence[str] = (),
        flush: Sequence[str] = (),
        storage: Sequence[StorageRequest] = (),
        admin: Sequence[AdminReqInput] = (),
    ) -> None:
        self.num_ticks += 1
        now = Seconds(self.num_ticks * self.config.tick_s)
        ran = 0
        for rank in self.ranks:
            ran += rank.emulator.run(self.random.choice((0, 1, 3, 10, 60)))
        reports = [rank.core.progress() for rank in self.ranks]
        progress = reduce_progress(reports)
        inputs = arrivals or aborts or flush or storage or admin
        if not (inputs or any(rank.core.has_work(now) for rank in self.ranks)):
            lending = self.ranks[0].core.scheduler.lending
            awaits_slabs = lending is not None and lending.awaits_slabs
            if self.live and not awaits_slabs and not any(r.core.has_outstanding for r in self.ranks):
                raise StuckError(f"nothing is outstanding and {len(self.live)} requests wait")
            return
        decisions = [r.core.step(now, progress, arrivals, aborts, flush, storage, admin) for r in self.ranks]
        if len({digest_of(d) for d in decisions}) != 1:
            raise AssertionError(f"ranks decide differently in step {decisions[0].step}")
        if "invariants" in self.nets:
            # Of the ranks by turns: they take the same inputs and have just decided alike.
            scheduler = self.ranks[decisions[0].step % len(self.ranks)].core.scheduler
            scheduler.check_invariants()
            _check_wake_up(scheduler, now)
        self.events.note_late_links()
        if "events" in self.nets:
            self.router.take_events()
        self._take_outputs(decisions[0])
        if decisions[0].step % self.config.oracle_every == 0:
            self._ask_oracle()

    def _switches(self) -> list[SwitchTierReqInput]:
        if not self.config.switch_rate or self.random.random() >= self.config.switch_rate:
            return []
        tier = TIER_NAMES[self.random.choice(self.ranks[0].core.scheduler.cache.tiers)]
        reads, writes = (self.random.choice((None, False, True)) for _ in range(2))
        return [SwitchTierReqInput(id="switch", tier=tier, reads=reads, writes=writes)]

    def _administration(self) -> list[AdminReqInput]:
        rng = self._admin_random
        if not self.config.admin_rate or rng.random() >= self.config.admin_rate:
            return []
        kind = rng.randrange(4)
        if kind == 0:
            aborts = rng.random() < 0.5
            if aborts:
                self.erased |= {rid for rid, request in self.live.items() if request.extra_key == TENANT}
            return [EraseSaltReqInput(id="erase", cache_salt="tenant", aborts_requests=aborts)]
        if kind == 1:
            tiers = [TIER_NAMES[tier] for tier in self.ranks[0].core.scheduler.cache.tables]
            limits = {tier: rng.choice((0, 8, 64, 1000)) for tier in tiers if rng.random() < 0.7}
            return [SetQuotaReqInput(id="quota", cache_salt="tenant", tokens=limits)]
        if kind == 2:
            kept = rng.choice(self.histories + self.documents)
            return [
                RetainPrefixReqInput(
                    id="retain",
                    name=rng.choice("abc"),
                    seconds=rng.choice((0.0, 100 * self.config.tick_s, 1e4)),
                    extra_key=rng.choice(("", TENANT)),
                    input_ids=ids_to_bytes(kept[: rng.randrange(1, len(kept) + 1)]),
                )
            ]
        changes = {
            "radix_eviction_policy": rng.choice(list(EVICTION_POLICIES)),
            "schedule_policy": rng.choice(list(QUEUE_POLICIES)),
            "hicache_load_ratio": rng.choice(("auto", 0.0, 100.0)),
            "hicache_bubble_filling": rng.random() < 0.5,
            "hicache_load_or_recompute": rng.random() < 0.5,
            "hicache_deferral_threshold": rng.choice((0, 8, 100)),
            "hicache_storage_prefetch_policy": rng.choice(PREFETCH_POLICIES),
        }
        name = rng.choice(list(changes))
        return [SetPoliciesReqInput(id="policies", policies={name: changes[name]})]

    def _random_tokens(self, n: int) -> np.ndarray:
        return np.array([self.random.randrange(1, 3) for _ in range(n)], np.int32)

    def _new_request(self) -> TokenizedGenerateReqInput:
        """A continuation or a variation of something said before, or the same as somebody says now."""
        twin = self.live[self.random.choice(sorted(self.live))] if self.live else None
        if twin is not None and self.random.random() < self.config.twin_rate:
            prompt, extra_key = twin.prompt, twin.extra_key
        else:
            base = self.random.choice(self.histories + self.documents)
            kept = min(len(base), self.config.max_prompt - 8)
            if self.random.random() >= self.config.whole_rate:
                kept = self.random.randrange(kept + 1)
            prompt = np.concatenate([base[:kept], self._random_tokens(self.random.randrange(1, 9))])
            extra_key = self.random.choice(("", "", "", TENANT))
        rid = f"r{self._next_rid}"
        self._next_rid += 1
        # What does not fit is refused, and answers end where the pool does.
        streaming = self.ranks[0].core.scheduler.streaming
        room = streaming.longest_len - len(prompt)
        max_new = self.random.randrange(1, self.config.max_new_tokens)
        ignore_eos = self.random.random() < 0.6
        stop = frozenset() if ignore_eos else frozenset({EOS})
        needs_peers = streaming.max_len_with(0) < min(len(prompt) + max_new, streaming.longest_len)
        self.live[rid] = _Expected(prompt, min(max_new, room), stop, room <= 0, extra_key, needs_peers)
        return TokenizedGenerateReqInput(
            rid=rid,
            input_ids=ids_to_bytes(prompt),
            sampling_params=SamplingParams(
                max_new_tokens=max_new, temperature=0.0, sampling_seed=0, ignore_eos=ignore_eos
            ),
            extra_key=extra_key,
            cache={5: "no_store", 9: "bypass"}.get(self._next_rid % 13, "") if self.config.cache_modes else "",
            stream=self.random.random() < 0.7,
            priority=self._next_rid % 3 - 1,
            prompt_keys=self._prompt_keys(extra_key, prompt) if self._next_rid % 2 else None,
        )

    def _prompt_keys(self, extra_key: str, prompt: np.ndarray) -> PromptKeys | None:
        names = self.ranks[0].core.scheduler.cache.tree.names.keys
        return PromptKeys.make(names, extra_key, prompt) if names is not None else None

    def _take_outputs(self, decision: BatchDecision) -> None:
        for output in decision.outputs:
            expected = self.live[output.rid]
            expected.got += bytes_to_ids(output.output_ids).tolist()
            assert output.cached_tokens < max(1, output.prompt_tokens), (
                f"{output.rid}: the last prompt token is never cached"
            )
            reason = output.finish_reason
            if reason is None:
                continue
            del self.live[output.rid]
            _check_reasons(output)
            self._check_end(output.rid, expected, reason)
            if expected.refused:
                continue
            wanted = self.model.generate(expected.prompt, expected.max_new_tokens, expected.stop)
            got = expected.got
            is_cut = reason.type == "abort" or expected.needs_peers
            if got != (wanted[: len(got)] if is_cut else wanted):
                raise WrongTokensError(f"{output.rid}: got {got}, expected {wanted}")
            self.num_finished += 1
            self.histories.append(np.concatenate([expected.prompt, np.array(got, np.int32)]).astype(np.int32))
            self.histories = self.histories[-12:]

    def _check_end(self, rid: str, expected: _Expected, reason: FinishReason) -> None:
        """Requests end early only for a reason that the soak knows."""
        config = self.config
        faults = config.launch_fail_rate > 0 or config.link_fail_rate > 0
        allowed = {499: rid in self.aborted, 500: faults, 400: expected.refused, None: not expected.refused}
        if expected.needs_peers:
            allowed |= {400: True, 503: True}
        if rid in self.erased:
            allowed |= {503: True}
        assert allowed[reason.status_code], f"{rid} ended with {reason}"

    def _ask_oracle(self) -> None:
        if "events" in self.nets:
            self.router.check()
        if "oracle" not in self.nets:
            return
        for rank in self.ranks:
            memory: dict[Tier, PagedMemory] = {Tier.DEVICE: rank.device_pool}
            if rank.host_pool is not None:
                memory[Tier.HOST] = rank.host_pool
            if rank.peer_pool is not None:
                memory[Tier.PEER] = rank.peer_pool
            check_kv(rank.core.scheduler, memory, self.model.reference)
            for store in rank.stores:
                check_stored(rank.core.scheduler, store.blocks, self.model.reference)

    def _finish(self) -> None:
        borrowed = [rank.slabs for rank in self.ranks if isinstance(rank.slabs, ComingAndGoing)]
        for rank in self.ranks:
            for link in rank.links:
                link.end_hangs()
        for rank in self.ranks:
            if rank.slabs is not None:
                rank.slabs.settle()
        for _ in range(10_000):
            if not any(r.core.has_outstanding for r in self.ranks) and not any(b.num_owed for b in borrowed):
                break
            self._tick()
        assert not any(b.num_owed for b in borrowed), "slabs that were asked back are kept"
        for rank in self.ranks:
            scheduler = rank.core.scheduler
            assert not rank.core.has_outstanding, "operations never end"
            for tier, table in scheduler.cache.tables.items():
                rest = [table.counts[s] for s in (FrameState.FREE, FrameState.CACHED, FrameState.LENT)]
                assert sum(rest) == table.num_pages, f"left on {tier.name.lower()}: {table.counts}"
            assert all(n.lock == 0 for n in scheduler.cache.tree.walk()), "a lock is left"
            canary = scheduler.canary.state()
            if canary is not None and not self.config.check_fail_rate:
                assert not canary["different_tokens"], f"the canary found a difference: {canary}"
            assert rank.emulator.unrecorded_waits == 0, "somebody waited for an event that was never recorded"
        self._ask_oracle()
        self.record.seek(0)
        replay(self.record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=40, help="how many")
    parser.add_argument("--steps", type=int, default=2000, help="steps with arrivals per seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # every injected failure says so
    for seed in range(args.seed, args.seed + args.seeds):
        config = SoakConfig.draw(seed, args.steps)
        soak = Soak(config)
        start = time.perf_counter()
        try:
            soak.run()
        except BaseException:
            print(f"seed {seed} failed after {soak.num_ticks} steps: {config}", file=sys.stderr)
            raise
        counters = soak.ranks[0].core.scheduler.state()["counters"]
        print(
            f"seed {seed}: page {config.page_size}, {config.num_device_pages}+{config.num_host_pages} pages, "
            f"{config.num_ranks} ranks, {soak.num_finished} requests, "
            f"{'/'.join(str(counters.get(f'hit_tokens_{t}', 0)) for t in TIER_NAMES)} tokens hit, "
            f"{counters.get('prefetched_tokens', 0)} prefetched, "
            f"{counters.get('streamed_reqs', 0)} streamed, {counters.get('retracted_reqs', 0)} retracted, "
            f"{counters.get('failed_ops', 0)} transfers and "
            f"{counters.get('failed_launches', 0)} launches failed, "
            f"{'/'.join(str(counters.get(name, 0)) for name in SCHEDULING_COUNTERS)} "
            f"{', '.join(SCHEDULING_COUNTERS)}, {time.perf_counter() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
