"""The scheduler processes, one per rank: an `EngineCore` with a model, real pools and links, between sockets.

Owns the sockets, the clock and the sizes of the pools. It gathers what came in and what completed, steps the state
machine, and sends out what it decides; when nothing can happen it sleeps until a message or a completion wakes it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
import zmq

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import TensorParallelGroup, init_tensor_parallel
from sglang.srt.layers.attention.attention_registry import make_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.engine_core import EngineCore, StepRecorder
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ClearHiCacheReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    SchedulerReady,
    StorageReqInput,
    TokenizedGenerateReqInput,
    decode_to_scheduler,
    detokenize_req,
    encode,
)
from sglang.srt.managers.rank_sync import RankSync, Tick
from sglang.srt.managers.schedule_batch import BatchDecision, StorageRequest
from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS, Scheduler, SchedulerConfig
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.startup.device import (
    check_device,
    free_memory,
    kv_cache_bytes,
    page_layout,
    pick_device,
    pick_dtype,
)
from sglang.srt.managers.startup.peers import borrow_memory, lend_memory
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.hottest_prefixes import HottestPrefixes
from sglang.srt.mem_cache.layer_stream_cache import LayerStreamCache
from sglang.srt.mem_cache.link import CopyLink, HasPages
from sglang.srt.mem_cache.memory_pool import DevicePool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, host_pages_that_fit
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.storage.tiered_store import parts_of
from sglang.srt.mem_cache.storage_link import StorageLink, StoreSlot
from sglang.srt.mem_cache.swap_file import SwapFile, SwapFileError
from sglang.srt.mem_cache.transfer import (
    D2H,
    D2P,
    D2S,
    H2D,
    LOAD_LINKS,
    P2D,
    STORAGE_LINKS,
    Link,
    StorageAction,
    Tier,
)
from sglang.srt.model_executor.executor import ExecutorOptions, ModelExecutor
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.registry import get_model_class
from sglang.srt.peer.lending import LendingConfig
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.lent_memory import LentMemory
from sglang.srt.peer.protocol.elastic_units import layer_stream_sizes
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import ChildArgs, StartupError, open_pull, open_push, run_child, without_stopping
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.cuda_stream import make_stream
from sglang.srt.utils.device import CPU, settle_memory
from sglang.srt.utils.startup_progress import SILENT, StartupProgress
from sglang.srt.utils.stream import ThreadStream

logger = logging.getLogger(__name__)

DEFAULT_MAX_RUNNING = 256
LOG_EVERY_S = 5.0
IDLE_CHECK_AFTER_MS = 5000
# Checking takes some 40 us per node of the tree, in which no request is heard.
IDLE_CHECK_MAX_NODES = 5000


def device_pages(
    args: ServerArgs, model: ModelConfig, group: TensorParallelGroup, device: torch.device = CPU
) -> tuple[int, int]:
    """How many pages the device gets of the memory that is free now, and their size. Raises StartupError where that
    is too little."""
    page_bytes = page_layout(model, args.page_size, group.size).page_bytes
    fitting = kv_cache_bytes(args, device, group.size) // page_bytes
    if args.max_total_tokens is not None:
        num_pages = args.max_total_tokens // args.page_size
        if num_pages > fitting:
            raise StartupError(
                f"--max-total-tokens {args.max_total_tokens} needs {num_pages * page_bytes / 1e9:.1f} GB, but "
                f"{fitting * args.page_size} tokens fit into the memory that is free; lower it"
            )
    elif device.type == "cpu":
        # Memory is not the CPU's bottleneck: four full contexts, if they fit.
        num_pages = min(fitting, -(-4 * model.context_length // args.page_size))
    else:
        num_pages = fitting
    if num_pages < 2:
        raise StartupError(
            f"the KV cache has {num_pages} pages of {args.page_size} tokens, at least 2 are needed: raise "
            "--max-total-tokens or lower --page-size"
        )
    return num_pages, page_bytes


def build_config(
    args: ServerArgs, model: ModelConfig, group: TensorParallelGroup, device: torch.device = CPU
) -> SchedulerConfig:
    """Sizes the pools, alike on all ranks. Raises StartupError where not even one short request would fit."""
    num_pages, page_bytes = device_pages(args, model, group, device)
    num_host_pages = 0
    if args.enable_hierarchical_cache:
        # The CPU's "device" is in the same memory.
        taken = num_pages * page_bytes if device.type == "cpu" else 0
        num_host_pages, limited = host_pages_that_fit(
            num_pages,
            page_bytes,
            args.hicache_ratio,
            args.hicache_size / group.size,
            free_memory(CPU, group.size) - taken,
        )
        if num_host_pages < 1:
            raise StartupError("no host memory is free for --hicache: lower --max-total-tokens or drop --hicache")
        logger.info(
            "hicache: host tier of %d tokens (%.2f GB%s), %s, %s",
            num_host_pages * args.page_size,
            num_host_pages * page_bytes / 1e9,
            ", limited by free memory" if limited else "",
            args.hicache_write_policy,
            f"storage {args.hicache_storage_backend}" if args.hicache_storage_backend else "no storage",
        )
    logger.info(
        "KV cache: %d tokens on the device (%.2f GB), page size %d",
        num_pages * args.page_size,
        num_pages * page_bytes / 1e9,
        args.page_size,
    )
    sizes = group.reduce_min(torch.tensor([num_pages, num_host_pages]))
    num_pages, num_host_pages = sizes.tolist()
    layer_stream = None
    if args.layer_stream:
        layer_stream, num_pages = layer_stream_sizes_for(args, num_pages, num_host_pages, model.num_layers)
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else model.context_length
    return SchedulerConfig(
        page_size=args.page_size,
        num_device_pages=num_pages,
        num_host_pages=num_host_pages,
        page_bytes=page_bytes,
        context_len=model.context_length,
        eos_token_ids=model.eos_token_ids,
        max_running_requests=args.max_running_requests or DEFAULT_MAX_RUNNING,
        chunked_prefill_size=max(chunk, args.page_size),
        max_prefill_tokens=max(args.max_prefill_tokens, args.page_size),
        stream_interval=args.stream_interval,
        max_ahead=1 if args.disable_overlap_schedule else 2,
        enable_radix_cache=not args.disable_radix_cache,
        eviction_policy=args.radix_eviction_policy,
        write_policy=args.hicache_write_policy,
        num_layers=model.num_layers,
        schedule_policy=args.schedule_policy,
        bypass_local=args.hicache_bypass_local,
        load_ratio=args.load_ratio,
        bubble_filling=args.hicache_bubble_filling == "on",
        load_or_recompute=args.hicache_load_or_recompute == "on",
        insert_at=args.hicache_publish_at,
        deferral_threshold=args.hicache_deferral_threshold,
        layer_stream=layer_stream,
        num_swap_pages=int(args.layer_stream_disk_size * 1e9 / group.size) // page_bytes,
    )


def graph_batch_size_for(args: ServerArgs, config: SchedulerConfig, device: torch.device) -> int:
    """The largest decode that is a CUDA graph; 0 for none."""
    if device.type != "cuda" or args.disable_cuda_graph:
        return 0
    return min(args.cuda_graph_max_bs_decode or config.max_running_requests, config.max_running_requests)


def layer_stream_sizes_for(
    args: ServerArgs, num_pages: int, num_host_pages: int, num_layers: int
) -> tuple[LayerStreamConfig, int]:
    """The buffers of the layer stream cache, and the pages that they leave of the device's num_pages."""
    in_whole_layers, _ = layer_stream_sizes(num_pages * num_layers, [num_host_pages], num_layers, args.layer_stream)
    buffer_pages = in_whole_layers
    if args.layer_stream_tokens:
        buffer_pages = min(buffer_pages, -(-args.layer_stream_tokens // args.page_size))
    left = (num_pages * num_layers - args.layer_stream * buffer_pages) // num_layers
    logger.info(
        "layer stream: %d buffers of %d tokens of a layer, which leaves %d tokens on the device",
        args.layer_stream,
        buffer_pages * args.page_size,
        left * args.page_size,
    )
    return LayerStreamConfig(args.layer_stream, buffer_pages, args.layer_stream_max_tpot), left


def check_weights_fit(model: ModelConfig, group: TensorParallelGroup, device: torch.device = CPU) -> None:
    """Log what this rank's weights need, before they are read. Raises StartupError if that is more than is free: the
    system would kill a process much later, without a reason."""
    with torch.device("meta"):
        weights = get_model_class(model.architecture)(model, TorchNativeAttnBackend(), group)
    size = sum(each.numel() * each.element_size() for each in weights.parameters())
    # All ranks look before any takes its part.
    free = int(group.reduce_min(torch.tensor([free_memory(device, group.size)]))[0])
    if size > free:
        ranks = f" on each of {group.size} ranks" if group.size > 1 else ""
        raise StartupError(
            f"the weights need {size / 1e9:.1f} GB{ranks}, but {free / 1e9:.1f} GB of memory are free: free some, or "
            "choose a smaller model or --dtype"
        )
    logger.info("weights: %.2f GB of %.2f GB of free memory", size / 1e9, free / 1e9)


@dataclass(frozen=True)
class Storage:
    """A rank's storage tier. opener makes what a request to attach needs."""

    opener: StorageOpener
    slot: StoreSlot


def build_core(
    args: ServerArgs,
    group: TensorParallelGroup,
    notify: Callable[[], None],
    directory: Path,
    on_exit: ExitStack,
    device: torch.device = CPU,
    progress: StartupProgress = SILENT,
) -> tuple[EngineCore, Storage | None]:
    """Load the model and build one rank around it. notify: called from other threads when something completed.
    directory: the server's private one. on_exit: gets what has to be closed before the process ends. The storage is
    None where there is no host tier."""
    progress.stage("reading the model's config")
    attention_backend = check_device(args, device)
    model_config = ModelConfig.from_pretrained(args.model_path, args.dtype, args.context_length)
    model_config = replace(model_config, dtype=pick_dtype(args, model_config.dtype, device))
    model_config.check_tensor_parallel(group.size)
    check_weights_fit(model_config, group, device)
    # Again once the weights are there; what does not even fit now need not wait for them.
    device_pages(args, model_config, group, device)
    attention = make_attention_backend(attention_backend, device)
    model = load_model(
        model_config,
        args.load_format,
        attention,
        args.random_seed or 0,
        device,
        group=group,
        progress=progress,
    )
    progress.stage("allocating the pools")
    config = build_config(args, model_config, group, device)
    layout = page_layout(model_config, config.page_size, group.size)
    pool: DevicePool
    borrowed = lent = None
    graph_batch_size = 0
    if args.peer_role == "worker":
        with without_stopping():
            lent = lend_memory(args, config, layout, group.rank, directory, notify, device)
            on_exit.callback(lent.close)
        pool = lent.pool
        config = replace(
            config,
            num_device_pages=lent.pool.num_pages,
            slabs=lent.pool.slab_frames,
            lending=LendingConfig(window_s=args.peer_window),
        )
    else:
        graph_batch_size = graph_batch_size_for(args, config, device)
        pool = MHATokenToKVPool(config.num_device_pages, layout, device, has_scratch=graph_batch_size > 0)
    if args.peer_role == "master":
        with without_stopping():
            borrowed = borrow_memory(args, layout, group.rank, group.size, notify, device)
            on_exit.callback(borrowed.disconnect)
        config = replace(config, num_peer_pages=borrowed.pool.num_pages, slabs=borrowed.pool.slab_frames)
    links: dict[str, Link] = {}
    limits = {name: RateLimit(rate) for name, rate in args.rate_limits.items()}
    storage = layer_stream = None
    streamed_from: dict[Tier, HasPages] = {}
    if config.layer_stream is not None:
        layer_stream = LayerStreamCache(
            config.layer_stream.num_buffers,
            config.layer_stream.buffer_pages,
            pool,
            streamed_from,
            make_stream("layer-stream", device, notify, urgent=True),
            args.hicache_io_backend,
            limits,
        )
    executor = ModelExecutor(
        model,
        pool,
        make_stream("compute", device, notify),
        links,
        ExecutorOptions(
            config.page_size,
            model_config.attn_scale,
            model_config.vocab_size,
            config.max_running_requests,
            Sampler(),
            notify,
            lockstep=group.size > 1,
            device=device,
            attention=attention,
            graph_batch_size=graph_batch_size,
        ),
        layer_stream,
    )
    settle_memory(device)
    if graph_batch_size:
        progress.stage(f"capturing CUDA graphs of up to {graph_batch_size} requests")
    executor.capture_graphs()
    if config.num_host_pages:
        host_pool = MHATokenToKVPoolHost(pool, config.num_host_pages, args.hicache_mem_layout)
        for name, limit in limits.items():
            logger.info("hicache: link %s is limited to %g GB/s", name, limit.bytes_per_s / 1e9)
        below: dict[str, HasPages] = {H2D: host_pool, D2H: host_pool}
        streamed_from[Tier.HOST] = host_pool
        if config.num_swap_pages:
            assert args.layer_stream_disk_path is not None
            try:
                swap = SwapFile(args.layer_stream_disk_path, config.num_swap_pages, layout)
            except SwapFileError as error:
                raise StartupError(str(error)) from error
            below[D2S] = streamed_from[Tier.DISK] = swap
        if borrowed is not None:
            below |= {P2D: borrowed.pool, D2P: borrowed.pool}
            streamed_from[Tier.PEER] = borrowed.pool
        for name, other in below.items():
            stream = make_stream(name, device, notify, urgent=name in LOAD_LINKS.values())
            links[name] = CopyLink(
                name, pool, other, stream, executor.fence, notify, args.hicache_io_backend, limits.get(name)
            )
        opener = StorageOpener(
            model_config.fingerprint(args.load_format, args.random_seed or 0),
            args.model_name,
            host_pool,
            group.rank,
            group.size,
            directory,
        )
        slot = StoreSlot(opener.open)
        # What storage has not written down by then, the next start finds out by itself, only slower.
        on_exit.callback(slot.detach)
        for name in STORAGE_LINKS:
            links[name] = StorageLink(name, slot, ThreadStream(name, notify), notify, limits.get(name))
        storage = Storage(opener, slot)
        if args.hicache_storage_backend is not None:
            progress.stage(f"opening storage: {args.hicache_storage_backend}")
            setup = opener.setup(
                args.hicache_storage_backend,
                args.hicache_storage_backend_extra_config,
                args.hicache_storage_prefetch_policy,
                args.hicache_write_policy,
            )
            slot.store = opener.open(setup.setup)
            config = replace(config, storage=setup)
    record = None
    if args.record_steps and group.rank == 0:
        # Open as long as the process lives.
        record = StepRecorder(open(args.record_steps, "wb"), config)  # noqa: SIM115
        logger.info("recording every step to %s", args.record_steps)
    try:
        scheduler = Scheduler(config)
    except ValueError as error:
        raise StartupError(str(error)) from error
    return EngineCore(scheduler, executor, links, record=record, slabs=borrowed or lent), storage


@dataclass
class _Inbox:
    new: list[TokenizedGenerateReqInput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    flush: list[str] = field(default_factory=list)
    storage: list[StorageRequest] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.new or self.aborts or self.flush or self.storage)


class SchedulerProcess:
    """Rank 0. wake_fd: an eventfd that completions write to."""

    def __init__(
        self,
        core: EngineCore,
        storage: Storage | None,
        sync: RankSync,
        receiver: zmq.Socket,
        sender: zmq.Socket,
        wake_fd: int,
    ) -> None:
        self.core = core
        self.storage = storage
        self.sync = sync
        self.receiver = receiver
        self.sender = sender
        self.wake_fd = wake_fd
        self._poller = zmq.Poller()
        self._poller.register(receiver, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)
        if sync.poke_fd is not None:
            self._poller.register(sync.poke_fd, zmq.POLLIN)
        self._busy_since_check = False
        self._logged_at = monotonic()
        self._slept_s = 0.0
        self._logged: dict[str, int] = {}
        self._logged_stall_s = 0.0
        self._gen_throughput = 0.0
        self._hottest = HottestPrefixes(core.scheduler.cache.tree)

    def serve(self) -> None:
        while True:
            inbox = self._receive()
            progress = self.core.progress()
            # Both, always: a poke must not be left to wake the poller again.
            if self.sync.take_pokes() or inbox or self.core.has_work(monotonic()):
                tick = Tick(
                    now=monotonic(),
                    new=tuple(inbox.new),
                    aborts=tuple(inbox.aborts),
                    flush=tuple(inbox.flush),
                    storage=tuple(inbox.storage),
                    results=progress.results,
                    logprobs=progress.logprobs,
                    cost=progress.cost,
                )
                progress = self.sync.lead(tick, progress)
                self._send(self.core.step(tick.now, progress, tick.new, tick.aborts, tick.flush, tick.storage))
                self._busy_since_check = True
                self._log_throughput()
            else:
                self._sleep()

    def _receive(self) -> _Inbox:
        inbox = _Inbox()
        while True:
            try:
                message = decode_to_scheduler(self.receiver.recv(zmq.NOBLOCK))
            except zmq.Again:
                return inbox
            if isinstance(message, TokenizedGenerateReqInput):
                self.sender.send(encode(detokenize_req(message)))
                inbox.new.append(message)
            elif isinstance(message, AbortReq):
                inbox.aborts.append(message.rid)
            elif isinstance(message, FlushCacheReqInput):
                inbox.flush.append(message.id)
            elif isinstance(message, GetInternalStateReq):
                self.sender.send(encode(GetInternalStateReqOutput(id=message.id, state=self._state())))
            else:
                try:
                    inbox.storage.append(self._storage_request(message))
                except StoreError as error:
                    self.sender.send(encode(ControlReqOutput(id=message.id, success=False, message=str(error))))

    def _storage_request(self, message: StorageReqInput) -> StorageRequest:
        if isinstance(message, DetachHiCacheStorageReqInput):
            return StorageRequest(id=message.id, action=StorageAction.DETACH)
        if isinstance(message, ClearHiCacheReqInput):
            return StorageRequest(id=message.id, action=StorageAction.CLEAR)
        if self.storage is None:
            raise StoreError("there is no host tier for storage to fill: start the server with --hicache")
        what = self.storage.opener.setup(
            message.backend, message.extra_config, message.prefetch_policy, message.write_policy
        )
        return StorageRequest(id=message.id, action=StorageAction.ATTACH, what=what)

    def _send(self, decision: BatchDecision) -> None:
        if decision.outputs:
            self.sender.send(encode(BatchTokenIDOutput(outputs=list(decision.outputs))))
        for reply in decision.replies:
            message = reply.message
            if self.storage is not None and self.storage.slot.last_error and not reply.success:
                message, self.storage.slot.last_error = self.storage.slot.last_error, ""
            self.sender.send(encode(ControlReqOutput(id=reply.id, success=reply.success, message=message)))

    def _sleep(self) -> None:
        """Until something happens, or the next line of the log is due while there is work. After some idle seconds,
        once: check all invariants and put garbage away."""
        idle, started = self.core.is_idle, monotonic()
        wake_at = self.core.scheduler.wake_at
        due: list[float] = [] if wake_at is None else [wake_at]
        if not idle:
            due.append(self._logged_at + LOG_EVERY_S)
        elif self._busy_since_check and wake_at is None:
            due.append(started + IDLE_CHECK_AFTER_MS / 1000)
        timeout_ms = int(max(0.0, min(due) - started) * 1000) + 1 if due else None
        ready = dict(self._poller.poll(timeout_ms))
        if self.wake_fd in ready:
            os.eventfd_read(self.wake_fd)
        if not idle:
            self._log_throughput()
            return
        self._slept_s += monotonic() - started
        if not ready and wake_at is None:
            self._busy_since_check = False
            self._gen_throughput = 0.0
            tidy_up(self.core)

    def _state(self) -> bytes:
        state = self.core.scheduler.state()
        state["gen_throughput"] = round(self._gen_throughput, 2)
        state["steps"] = self.core.num_steps
        store = self.storage.slot.store if self.storage is not None else None
        if store is not None and state["storage"] is not None:
            for tier, part in zip(state["storage"]["tiers"], parts_of(store)):
                stats = part.stats()
                state["tiers"][tier] = {"cached_tokens": stats["blocks"] * part.block_tokens, **stats}
        peers = self.core.slabs
        state["peers"] = peers.state() if isinstance(peers, BorrowedMemory | LentMemory) else None
        state["hottest"] = self._hottest.table(self.core.scheduler.clock.next)
        return msgspec.json.encode(state)

    def _log_throughput(self) -> None:
        now = monotonic()
        if now - self._logged_at < LOG_EVERY_S:
            return
        # Of the time at work: after an idle hour, one request would look slow.
        elapsed = now - self._logged_at - self._slept_s
        scheduler = self.core.scheduler
        counters = dict(scheduler.counters)

        def per_second(name: str) -> float:
            return (counters.get(name, 0) - self._logged.get(name, 0)) / elapsed

        self._gen_throughput = per_second("generation_tokens")
        cache, queues = scheduler.cache, scheduler.queues
        table = cache.device
        in_use = table.num_pages - table.num_free - cache.tree.evictable_pages(Tier.DEVICE)
        logger.info(
            "Batch. #running-req: %d, #queue-req: %d, #token: %d, token usage: %.2f, "
            "prefill throughput (token/s): %.1f, gen throughput (token/s): %.1f",
            len(queues.active()),
            len(queues.waiting),
            in_use * scheduler.page_size,
            in_use / table.num_pages,
            per_second("prefill_tokens"),
            self._gen_throughput,
        )
        if cache.host is not None:
            acted = {name: counters.get(name, 0) - self._logged.get(name, 0) for name in SCHEDULING_COUNTERS}
            acted["layer_streamed_token"] = scheduler.streaming.hole
            stall = f"{scheduler.planner.stall_s - self._logged_stall_s:.2f} s"
            shown = [f"stall: {stall}"] if stall != "0.00 s" else []
            shown += [f"#{name.replace('_', '-')}: {n}" for name, n in acted.items() if n]
            if shown:
                logger.info("Loads. %s", ", ".join(shown))
        self._logged_at, self._logged, self._slept_s = now, counters, 0.0
        self._logged_stall_s = scheduler.planner.stall_s


class FollowerProcess:
    """Any other rank: sleeps until rank 0 starts a step, and joins it."""

    def __init__(self, core: EngineCore, sync: RankSync) -> None:
        self.core = core
        self.sync = sync

    def serve(self) -> None:
        assert self.sync.socket is not None
        busy_since_check = False
        while True:
            if busy_since_check and not self.sync.socket.poll(IDLE_CHECK_AFTER_MS):
                busy_since_check = False
                if self.core.is_idle:
                    tidy_up(self.core)
            tick, progress = self.sync.follow(self.sync.socket.recv(), self.core.progress)
            self.core.step(tick.now, progress, tick.new, tick.aborts, tick.flush, tick.storage)
            busy_since_check = True


def tidy_up(core: EngineCore) -> None:
    """In an idle moment: check all invariants, unless that would take long, and put garbage away."""
    if core.scheduler.cache.tree.num_nodes <= IDLE_CHECK_MAX_NODES:
        core.scheduler.check_invariants()
    gc.collect()
    gc.freeze()


def start(child: ChildArgs, on_exit: ExitStack) -> Callable[[], None]:
    args = child.parsed_server_args()
    rank, directory = child.extra["tp_rank"], Path(child.extra["directory"])
    progress = StartupProgress(child.stage_file, child.columns, is_leader=rank == 0)
    if args.tp_size > 1:
        progress.stage(f"meeting the other {args.tp_size - 1} ranks")
    context = zmq.Context()
    receiver = open_pull(context, child.ipc["scheduler_in"]) if rank == 0 else None
    device = pick_device(args, rank)
    group = init_tensor_parallel(rank, args.tp_size, f"{directory}/ranks", device)
    sync = RankSync(group, context, child.extra["directory"])
    torch.manual_seed(args.random_seed or 0)
    if group.size > 1:
        # Each rank would take all cores, and they would wait for each other's threads.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // group.size))
    if receiver is None:
        core, _ = build_core(args, group, sync.poke, directory, on_exit, device, progress)
        gc.collect()
        gc.freeze()
        return FollowerProcess(core, sync).serve
    sender = open_push(context, child.ipc["detokenizer_in"])
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    core, storage = build_core(
        args, group, lambda: os.eventfd_write(wake_fd, 1), directory, on_exit, device, progress
    )
    process = SchedulerProcess(core, storage, sync, receiver, sender, wake_fd)
    gc.collect()
    gc.freeze()
    config = core.scheduler.config
    sender.send(
        encode(
            SchedulerReady(
                max_total_num_tokens=config.num_device_pages * config.page_size,
                max_req_input_len=core.scheduler.max_total_len - 1,
                info={"num_host_pages": config.num_host_pages, "page_size": config.page_size},
            )
        )
    )
    return process.serve


if __name__ == "__main__":
    run_child(start)
