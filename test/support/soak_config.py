"""What a seed of the soak draws: pools, tiers, policies, rates of faults, and the kinds of its requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from sglang.srt.managers.scheduler_config import LayerStreamConfig, PriorityConfig, SchedulerConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.border_slabs import BorderSlabs, border_between
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import LOAD_LINKS, Tier
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.lending import LendingConfig
from support.coming_and_going import padded_slabs
from support.hash_model import HashModel

EOS = 0
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
    # Of each layer, the tokens that a query sees; none: all see all.
    windows: tuple[int | None, ...] = ()
    # The pool of the device for layers with a window has one in so many of its pages, or as few as possible; 0: there
    # is one pool for all layers.
    windowed_part: int = 0
    # The same of the host.
    windowed_host_part: int = 0
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
    # And only reads of peers, without which storage goes on.
    peer_switch_rate: float = 0.0
    # How often an administrator erases, limits, keeps something, or changes policies.
    admin_rate: float = 0.0
    # Whether loads are said to be kernels of the GPU that computes.
    has_kernel_links: bool = False
    priorities: PriorityConfig | None = None
    holds_batches: bool = False
    stream_interval: int = 1
    # None: no further limit beside the chunk.
    max_prefill_tokens: int | None = None
    peers_written_through: bool = False
    # Of requests that stream although the device could hold them, where requests stream at all.
    max_resident_tokens: int | None = None
    # Shares of requests that belong to a session, want log-probabilities, and want no token at all.
    session_rate: float = 0.0
    logprob_rate: float = 0.0
    score_rate: float = 0.0
    # Share of requests with penalties, a minimum length or a grammar, or that want an embedding.
    shape_rate: float = 0.0
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

    def with_checks(self, fails: bool) -> SoakConfig:
        """The canary computes hits again, between requests, of which a quarter of the device has room for most."""
        return replace(
            self,
            canary_rate=0.8,
            check_fail_rate=0.3 if fails else 0.0,
            # Few requests, so that nothing is often under way, and most find what came before.
            steps=2 * self.steps,
            arrival_rate=0.03,
            restart_rate=self.restart_rate / 5,
            flush_rate=0.0,
            link_fail_rate=self.link_fail_rate / 4,
            num_documents=3,
            whole_rate=0.8,
            num_device_pages=max(self.num_device_pages, 160 // self.page_size),
        )

    def with_rare_options(self) -> SoakConfig:
        """Requests differ in what they ask for, and the scheduler has what other seeds leave out."""
        # Of its own, so that all else is drawn as without.
        rng = random.Random(f"rare options {self.seed}")
        priorities = PriorityConfig(rng.random() < 0.5, rng.choice((None, 0, 1)))
        storage, near_blocks, max_resident = self.storage, 0, rng.choice((None, None, 16, 24))
        if storage is not None:
            tiers = rng.choice(((Tier.DISK,), (Tier.REMOTE,), (Tier.DISK, Tier.REMOTE)))
            near_blocks = rng.choice((4, 12)) if len(tiers) > 1 else 0
            limits = replace(storage.limits, max_pinned_pages=rng.choice((0, self.num_host_pages // 2)))
            storage = replace(storage, limits=limits, tiers=tiers, is_lossy=rng.random() < 0.2)
        return replace(
            self,
            # The flags refuse priorities with insertion at completion.
            priorities=priorities if rng.random() < 0.8 and self.insert_at == "launch" else None,
            holds_batches=rng.random() < 0.2,
            stream_interval=rng.choice((1, 1, 4)),
            max_prefill_tokens=rng.choice((None, max(self.page_size, 7))),
            peers_written_through=rng.random() < 0.3,
            max_resident_tokens=max_resident,
            # Where most requests stream, few do in a time.
            arrival_rate=min(self.arrival_rate, 0.05) if max_resident and self.streams else self.arrival_rate,
            session_rate=rng.choice((0.0, 0.4)),
            logprob_rate=rng.choice((0.0, 0.35)),
            score_rate=0.06,
            gives_back=rng.random() < 0.5,
            has_kernel_links=rng.random() < 0.3,
            storage=storage,
            near_blocks=near_blocks,
            shape_rate=rng.choice((0.0, 0.4)),
            peer_switch_rate=0.03 if self.num_peer_pages and rng.random() < 0.4 else 0.0,
        )

    def with_windows(self) -> SoakConfig:
        """Some layers have a window, which is shorter than most prompts. Not where requests stream: there all is
        loaded whole, and the model reads all."""
        if self.streams:
            return self
        rng = random.Random(f"windows {self.seed}")
        sizes = [rng.choice((1, 2, 5, 12, None)) for _ in range(HashModel.NUM_LAYERS - 1)]
        windows = [*sizes, rng.choice((3, 8))]
        rng.shuffle(windows)
        device_part, host_part = rng.choice((0, 1, 2, 4)), rng.choice((0, 2, 4, 8))
        made = replace(self, windows=tuple(windows), windowed_part=device_part, windowed_host_part=host_part)
        if not host_part or not self.num_host_pages or rng.random() < 0.5:
            return made
        # Room between the host's pools, for a border that moves.
        chunk = max(self.page_size, 8)
        pages = rng.choice((60, 120, 200))
        return replace(made, num_host_pages=pages, chunked_prefill_size=chunk, host_layout="page_first")

    @property
    def has_windowed_pool(self) -> bool:
        """Whether the device has a pool of its own for layers with a window, see `windowed_part`."""
        return bool(self.windowed_part and self.has_both_kinds)

    @property
    def has_windowed_store(self) -> bool:
        """Whether storage has a store of its own for layers with a window, as the file store."""
        is_near = self.storage is not None and len(self.storage.tiers) == 1 and not self.overlapping_reads
        has_pool = self.windowed_host_part and self.num_host_pages and self.has_both_kinds
        return bool(is_near and has_pool and self.seed % 2)

    def divided_host(self, num_windowed: int) -> tuple[int, int, BorderSlabs | None]:
        """The host's pages beside num_windowed of layers with a window, see `border_between`."""
        if self.host_layout != "page_first" or self.seed % 5 == 0:
            return self.num_host_pages, num_windowed, None
        num_full = self.windows.count(None)
        return border_between(self.num_host_pages, num_windowed, num_full, len(self.windows) - num_full)

    @property
    def has_both_kinds(self) -> bool:
        """Whether some layers have a window of more than a token, others none, and no request streams."""
        is_seen = any(window is not None and window > 1 for window in self.windows)
        return is_seen and None in self.windows and not self.streams

    @property
    def window_reach(self) -> int:
        """See `SchedulerConfig`."""
        seen = [window for window in self.windows if window is not None]
        has_parts = seen and (self.num_host_pages or self.has_windowed_pool)
        return max(seen) - 1 if has_parts and not self.streams else 0

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
            config = config.with_checks(fails=seed % 12 == 5)
        if seed % 11 in (1, 4, 7, 10):
            config = config.with_rare_options()
        if not config.streams:
            return config.with_windows() if seed % 7 in (1, 5) else config
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


def scheduler_config(config: SoakConfig, page_bytes: int) -> SchedulerConfig:
    num_peer_pages = config.num_peer_pages if config.num_host_pages and not config.lend_rate else 0
    slabs: tuple[tuple[int, int], ...] = ()
    if config.lend_rate:
        slabs = padded_slabs(config.num_device_pages)
    elif config.slab_rate:
        slabs = padded_slabs(num_peer_pages)
    max_prefill, max_resident = config.max_prefill_tokens, config.max_resident_tokens
    layer_stream = LayerStreamConfig(config.stream_buffers, config.stream_pages, max_resident_tokens=max_resident)
    made = SchedulerConfig(
        page_size=config.page_size,
        num_device_pages=config.num_device_pages,
        num_host_pages=config.num_host_pages,
        page_bytes=page_bytes,
        context_len=config.max_prompt + config.max_new_tokens,
        eos_token_ids=(EOS,),
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens=SchedulerConfig.max_prefill_tokens if max_prefill is None else max_prefill,
        insert_every_tokens=config.insert_every_tokens,
        max_ahead=config.max_ahead,
        new_token_ratio=config.new_token_ratio,
        max_filling_ratio=config.max_filling_ratio,
        enable_radix_cache=config.enable_radix_cache,
        eviction_policy=config.eviction_policy,
        write_policy=config.write_policy,
        num_layers=HashModel.NUM_LAYERS,
        num_windowed_layers=sum(window is not None for window in config.windows) if config.window_reach else 0,
        window_reach=config.window_reach,
        load_ratio=config.load_ratio,
        bubble_filling=config.bubble_filling,
        load_or_recompute=config.load_or_recompute,
        kernel_links=tuple(LOAD_LINKS.values()) if config.has_kernel_links else (),
        insert_at=config.insert_at,
        deferral_threshold=config.deferral_threshold,
        schedule_policy=config.schedule_policy,
        priorities=config.priorities,
        holds_batches=config.holds_batches,
        stream_interval=config.stream_interval,
        bypass_local=config.bypass_local,
        storage=config.storage if config.num_host_pages else None,
        num_peer_pages=num_peer_pages,
        peers_written_through=config.peers_written_through,
        slabs=slabs,
        borrowing=BorrowingConfig(0.02, 0.05) if num_peer_pages and slabs and config.gives_back else None,
        lending=LendingConfig(1, 0, config.lend_window_s, 0.005) if config.lend_rate else None,
        layer_stream=layer_stream if config.streams else None,
        num_swap_pages=config.num_swap_pages if config.streams else 0,
        canary_rate=config.canary_rate,
        canary_idle_s=0.0,
    )
    if config.has_windowed_pool:
        part = made.num_device_pages // config.windowed_part
        made = replace(made, num_windowed_pages=max(part, made.least_windowed_pages))
    if not config.windowed_host_part or not made.num_host_pages or not config.has_both_kinds:
        return made
    if config.has_windowed_store and made.storage is not None:
        made = replace(made, storage=replace(made.storage, has_windowed_store=True))
    part = made.num_host_pages // config.windowed_host_part
    num_windowed = min(made.num_host_pages, max(part, made.least_windowed_pages))
    num_pages, num_windowed, border = config.divided_host(num_windowed)
    return replace(made, num_host_pages=num_pages, num_windowed_host_pages=num_windowed, host_border=border)
