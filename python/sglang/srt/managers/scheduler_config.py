"""`SchedulerConfig`: what a scheduler is built with, equal on all ranks. Plain data; a record of a run holds it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.mem_cache.border_slabs import BorderSlabs
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.lending import LendingConfig

# Strata 4.3.2, and what `auto` goes by before anything was measured.
DEFAULT_LOAD_RATIO = 100.0
# Host pages come in whole blocks of so many tokens where they can: those of most storage backends.
HOST_BLOCK_TOKENS = 64
# Where layers with a window have a pool of their own, nodes are cut between blocks of storage up to this size. What
# lies before what windows reach in a block takes room there.
MOST_CUT_TOKENS = 256


@dataclass(frozen=True)
class LayerStreamConfig:
    """Of the layer stream cache, through which a request longer than the device is read."""

    num_buffers: int
    # Pages of one buffer.
    buffer_pages: int
    # A request whose tokens are expected to take longer each is refused; None for no limit.
    max_tpot_s: float | None = None
    # For experiments: requests of more tokens stream although the device could hold them (SwiftCache 3.2).
    max_resident_tokens: int | None = None


@dataclass(frozen=True)
class PriorityConfig:
    """Requests of higher priority go first, see `SchedulerConfig.priorities`."""

    # A lower value is a higher priority.
    low_values_first: bool = False
    # A waiting request takes the memory of running ones that come after it by more than this; None: of none.
    preemption_threshold: int | None = None

    def rank(self, priority: int) -> int:
        """The least goes first."""
        return priority if self.low_values_first else -priority


@dataclass(frozen=True)
class SchedulerConfig:
    # Tokens per page.
    page_size: int
    num_device_pages: int
    # 0: there is no host tier.
    num_host_pages: int
    # Of one page, all layers.
    page_bytes: int
    # The most tokens of a request, prompt and output.
    context_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_running_requests: int = 256
    # The most tokens of one prompt, and of all, that a prefill launch computes.
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    # The share of what running requests may still generate that is kept free for them.
    new_token_ratio: float = 0.3
    # The share of the device that loads may be filling.
    max_filling_ratio: float = 0.5
    # Decoded tokens enter the tree in runs of about this many.
    insert_every_tokens: int = 64
    # Tokens per output of a streamed request.
    stream_interval: int = 1
    # Launches issued and not completed; 2 executes one step ahead.
    max_ahead: int = 2
    enable_radix_cache: bool = True
    eviction_policy: str = "lru"
    write_policy: str = "auto"
    # Of the model; loads hide behind them.
    num_layers: int = 1
    # How many of them have a window, and how many tokens before the first new one these may read. 0: all are loaded
    # whole.
    num_windowed_layers: int = 0
    window_reach: int = 0
    # The same of the model, also where there is nothing to load from; for what is shown.
    model_windows: tuple[int, int] = (0, 0)
    # Of the model; 0: not known.
    vocab_size: int = 0
    # Of the device's pool for layers with a window, see `WindowedPool`; 0: one pool has all layers.
    num_windowed_pages: int = 0
    # The same of the host, and what of both its pools is either's, see `HostBorder`; None: nothing.
    num_windowed_host_pages: int = 0
    host_border: BorderSlabs | None = None
    # The order of the queue, see `QUEUE_POLICIES`.
    schedule_policy: str = "fcfs"
    # None: priorities do not order the queue. Else they come before `schedule_policy`, and age only within one.
    priorities: PriorityConfig | None = None
    # For experiments: a request finds on device and host only what storage brought for it.
    bypass_local: bool = False
    # Tokens loaded per token computed before a batch counts as bound by loading, see `balanced_order`. "auto": as
    # many as take as long to load as the batch takes to compute. 0: no limit.
    load_ratio: float | str = DEFAULT_LOAD_RATIO
    # See `should_defer_for_load`.
    bubble_filling: bool = True
    # Bubble filling is decided for the whole batch, and only decode steps fill bubbles, see `HeldBatch`.
    holds_batches: bool = False
    # See `recompute_prefix_len`, and `blocks_to_fetch` for storage.
    load_or_recompute: bool = True
    # Links whose loads are kernels of the GPU that computes: beside a prefill they wait for multiprocessors. What
    # they take then is no property of the link.
    kernel_links: tuple[str, ...] = ()
    # When what a launch computes can be shared: at its "launch", since later ones follow it on the device, or at its
    # "completion", as upstream.
    insert_at: str = "launch"
    # A request that shares more tokens than that with what an older one is about to compute comes right after it. 0:
    # never.
    deferral_threshold: int = 100
    # Attached from the start; needs a host tier.
    storage: StorageSetup | None = None
    # Borrowed from peers; they need a host tier.
    num_peer_pages: int = 0
    # For experiments: pages go to peers as they are computed (SwiftCache 3.3), not when they leave the device.
    peers_written_through: bool = False
    # Runs [first, end) of pages that come and go as a whole: of the peer pool, or of the device if it lends. Empty:
    # all pages are there all the time.
    slabs: tuple[tuple[int, int], ...] = ()
    # The slabs are the device's, all of one length, and lent to others while no request here needs them. An engine
    # that lends does not borrow.
    lending: LendingConfig | None = None
    # The slabs are the peer pool's, asked for as they are needed. None: they come and go by themselves.
    borrowing: BorrowingConfig | None = None
    # A request may be longer than the device; needs a host tier.
    layer_stream: LayerStreamConfig | None = None
    # Of the swap file of such a request.
    num_swap_pages: int = 0
    # The share of hits that are computed again to compare, see `Canary`.
    canary_rate: float = 0.0
    # That is done when no request was there for so long.
    canary_idle_s: float = 0.5

    @property
    def num_usable_pages(self) -> int:
        """Pages of the device, less those of a lender that lie in no slab."""
        if self.lending is None:
            return self.num_device_pages
        return sum(end - first for first, end in self.slabs)

    @property
    def most_borrowed_pages(self) -> int:
        """Pages of the peer pool when all slabs are there that may be borrowed."""
        if self.num_peer_pages and self.slabs:
            return sum(end - first for first, end in self.slabs)
        return self.num_peer_pages

    @property
    def windowed_share(self) -> float:
        """Of the layers, those with a window."""
        return self.num_windowed_layers / self.num_layers

    @property
    def least_windowed_pages(self) -> int:
        """Of a pool for layers with a window, so that a request of any length goes on: what windows reach, cut
        between pages or blocks, what has not entered the tree, and the tokens of two launches."""
        cut = self.storage.block_tokens if self.storage is not None else 0
        cut = cut if self.page_size < cut <= MOST_CUT_TOKENS else self.page_size
        tokens = self.window_reach + self.insert_every_tokens + cut + 2 * self.chunk_budget
        return min(self.num_device_pages, -(-tokens // self.page_size) + 4)

    @property
    def host_block_pages(self) -> int:
        """Consecutive pages of the host that are one read or write of storage, where that is possible."""
        return max(1, HOST_BLOCK_TOKENS // self.page_size)

    @property
    def inserts_late(self) -> bool:
        """Whether what a launch computes is inserted when it has completed."""
        return self.insert_at == "completion"

    @property
    def max_resident_len(self) -> int:
        """The most tokens that a request may have on the device. One page stays free of any single request: the step
        that runs ahead of a finish may ask for it."""
        most = min(self.context_len, (self.num_usable_pages - 1) * self.page_size)
        if self.layer_stream is None or self.layer_stream.max_resident_tokens is None:
            return most
        return min(most, self.layer_stream.max_resident_tokens)

    @property
    def chunk_budget(self) -> int:
        """The most tokens that one prefill launch computes."""
        return min(self.chunked_prefill_size, self.max_prefill_tokens)

    def check(self) -> None:
        """Raises ValueError for what does not go together."""
        if self.chunked_prefill_size < self.page_size:
            raise ValueError(
                f"chunked prefill size {self.chunked_prefill_size} is below the page size {self.page_size}; "
                "set --chunked-prefill-size to at least one page"
            )
        assert self.num_host_pages or not self.num_peer_pages, "memory of peers needs a host tier"
        assert self.priorities is None or not self.inserts_late, "priorities and late insertion: the flags refuse it"
        if self.lending is not None:
            if self.num_peer_pages:
                raise ValueError(
                    "an engine that lends memory of its device cannot borrow from peers: use one of the two"
                )
            if len({end - first for first, end in self.slabs}) != 1:
                raise ValueError("an engine that lends needs slabs of its device pool, all of the same length")
        assert self.layer_stream is None or not self.window_reach, "what a request streams is read from any tier"
        if self.num_windowed_pages:
            assert self.window_reach, "there are no layers with a window"
            assert self.num_windowed_pages >= self.least_windowed_pages, "a request could not go on"
        assert self.window_reach or not self.num_windowed_host_pages, "there are no layers with a window"
        if self.layer_stream is None:
            return
        if not self.num_host_pages or not self.enable_radix_cache:
            raise ValueError("layer streaming needs a host tier, for what the device has no room for: --hicache")
        if self.lending is not None:
            raise ValueError(
                "an engine that lends memory of its device has none to stream through: use one of the two"
            )
