"""`EngineBuilder`: one rank of an engine, from its flags to an `EngineCore`: model, pools, links, storage, scheduler.

Owns the order in which the parts are made. What has to be closed goes to `on_exit`, which is unwound however the
process ends, also in the middle of the start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sgl_kernel.kvcacheio import LayerFlagsError, pick_backend
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import NATIVE
from sglang.srt.constrained.grammar_rows import GrammarRows
from sglang.srt.distributed.parallel_state import Replicas
from sglang.srt.layers.attention.attention_registry import make_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.crash_record import CrashRecord
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.startup.device import check_device, page_layout, pick_dtype, pick_page_size, with_kv_cache
from sglang.srt.managers.startup.page_checks import check_page_size
from sglang.srt.managers.startup.peers import borrow_memory, in_whole_slabs, lend_memory, slab_bytes_for
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.managers.startup.sizes import (
    build_config,
    check_weights_fit,
    device_pages,
    graph_batch_size_for,
    most_device_pages,
    replicas_of,
    with_windowed_host_pool,
    with_windowed_pool,
    with_windows,
)
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.managers.step_record import Recorder, StepRecorder
from sglang.srt.mem_cache.check_link import CheckLink
from sglang.srt.mem_cache.layer_stream_cache import LayerStreamCache
from sglang.srt.mem_cache.link import CopyLink, CopyOptions, HasPages
from sglang.srt.mem_cache.memory_pool import DevicePool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import HOST_POOL, MHATokenToKVPoolHost, host_pool_bytes
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.shared_host import LEADERS_LINKS, LeftToLeader, share_memory
from sglang.srt.mem_cache.staged_pages import StagedPages
from sglang.srt.mem_cache.storage_link import StorageLink, StoreSlot
from sglang.srt.mem_cache.swap_file import SwapFile, SwapFileError
from sglang.srt.mem_cache.transfer import (
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
    Link,
    Tier,
)
from sglang.srt.model_executor.executor import ExecutorOptions, ModelExecutor
from sglang.srt.model_executor.kernel_warm_up import warm_up_transfers
from sglang.srt.model_loader.loader import load_model, with_weight_format
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.lending import LendingConfig
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.lent_memory import LentMemory
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.child_process import StartupError, without_stopping
from sglang.srt.utils.cuda_stream import make_stream
from sglang.srt.utils.device import settle_memory
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.shared_memory import SharedMemory
from sglang.srt.utils.stream import ThreadStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Storage:
    """A rank's storage tier."""

    # Makes what a request to attach needs.
    opener: StorageOpener
    slot: StoreSlot


def build_core(args: ServerArgs, rank: RankSetup) -> tuple[EngineCore, Storage | None]:
    """Load the model and build one rank around it. The storage is None where there is no host tier. Raises
    StartupError."""
    return EngineBuilder(args, rank).build()


class EngineBuilder:
    def __init__(self, args: ServerArgs, rank: RankSetup) -> None:
        self.args = args
        self.rank = rank
        self.model: ModelConfig
        self.config: SchedulerConfig
        self.replicas: Replicas
        self.pool: DevicePool
        self.borrowed: BorrowedMemory | None = None
        self.lent: LentMemory | None = None
        self._links: dict[str, Link] = {}
        self._limits = {name: RateLimit(rate) for name, rate in args.rate_limits.items()}
        # What requests stream from; filled when the tiers below the device are there.
        self._streamed_from: dict[Tier, HasPages] = {}

    def build(self) -> tuple[EngineCore, Storage | None]:
        args, rank = self.args, self.rank
        try:
            # Before memory is measured, and before minutes of loading.
            rank.group.connect(rank.device)
        except RuntimeError as error:
            raise StartupError(
                f"the GPUs of the ranks cannot be connected by NCCL ({str(error).partition(chr(10))[0]}): "
                "NCCL_DEBUG=INFO tells why; where a container's /dev/shm is small, give --shm-size 1g"
            ) from error
        rank.progress.stage("reading the model's config")
        attention = self._read_model_config()
        args = self.args
        model = load_model(
            self.model,
            args.load_format,
            attention,
            args.random_seed or 0,
            rank.device,
            group=rank.group,
            progress=rank.progress,
        )
        model.finish_loading()
        # What loading left in torch's cache would count as taken when the pools are sized.
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        rank.progress.stage("allocating the pools")
        windows = () if args.disable_hybrid_swa_memory else model.windows
        self.replicas = replicas_of(self.model, rank.group)
        config = build_config(args, self.model, rank.group, rank.device)
        layout = page_layout(self.model, config.page_size, rank.group.size)
        windowed = [window is not None for window in model.windows]
        if attention.computes_masked:
            most_pages = most_device_pages(args, self.model, rank.device)
            config = with_windowed_pool(config, windows, args.swa_full_tokens_ratio, most_pages)
            fills_memory = rank.device.type == "cuda" and config.num_device_pages != most_pages
            if args.peer_role == "worker" and config.num_windowed_pages and fills_memory:
                config = in_whole_slabs(args, config, layout, windowed, rank.device)
        is_page_first = args.hicache_mem_layout == "page_first"
        config = with_windowed_host_pool(
            config, windows, args.swa_full_tokens_ratio, layout if is_page_first else None
        )
        self.config = with_windows(config, windows)
        graph_batch_size = self._open_device_pool(attention.computes_masked, windowed)
        executor = self._open_executor(model, attention, graph_batch_size)
        storage = self._open_tiers(executor) if self.config.num_host_pages else None
        try:
            scheduler = Scheduler(self.config)
        except ValueError as error:
            raise StartupError(str(error)) from error
        slabs = self.borrowed or self.lent
        return EngineCore(scheduler, executor, self._links, record=self._open_record(scheduler), slabs=slabs), storage

    def _read_model_config(self) -> AttentionBackend:
        """Also refuse what does not fit before the weights are read. Returns what the model attends with."""
        args, group, device = self.args, self.rank.group, self.rank.device
        backend = check_device(args, device)
        model = ModelConfig.from_pretrained(
            args.model_path, args.dtype, args.context_length, model_impl=args.model_impl
        )
        if args.tokenizer_path is not None:
            model = model.with_tokenizer(args.tokenizer_path)
        dtype = pick_dtype(args, model.dtype, device)
        self.model = with_kv_cache(args, replace(model, dtype=dtype), backend, device)
        self.model.check_tensor_parallel(group.size)
        self.model = with_weight_format(self.model, args.load_format, group.size, device, args.quantization)
        page = pick_page_size(args, self.model, group.size, device)
        if page != (args.page_size or 1):
            check_page_size(args, page, self.model.context_length)
        self.args = args = replace(args, page_size=page)
        if args.peer_role == "master":
            slab_bytes_for(args, page_layout(self.model, page, group.size).page_bytes)
        weight_bytes = check_weights_fit(self.model, group, device)
        # Again once the weights are there; what does not even fit now need not wait for them.
        device_pages(args, self.model, group, device, weight_bytes)
        return make_attention_backend(backend, device)

    def _open_device_pool(self, computes_masked: bool, windowed: Sequence[bool]) -> int:
        """The device pool, and memory of peers. windowed: of each layer, whether it has a window. Returns the largest
        decode that is a CUDA graph."""
        args, rank, config = self.args, self.rank, self.config
        layout = page_layout(self.model, config.page_size, rank.group.size)
        if args.peer_role == "worker":
            with without_stopping():
                self.lent = lend_memory(args, config, layout, windowed, rank)
                rank.on_exit.callback(self.lent.close)
            self.pool = self.lent.pool
            self.config = replace(
                config,
                num_device_pages=self.lent.pool.num_pages,
                slabs=self.lent.pool.slab_frames,
                lending=LendingConfig(window_s=args.peer_window),
            )
        else:
            self.pool = MHATokenToKVPool(
                config.num_device_pages,
                layout,
                rank.device,
                has_scratch=rank.device.type == "cuda",
                windowed=windowed,
                num_windowed_pages=config.num_windowed_pages,
            )
        if args.peer_role == "master":
            with without_stopping():
                self.borrowed = borrow_memory(args, layout, rank)
                rank.on_exit.callback(self.borrowed.disconnect)
            pool, timing = self.borrowed.pool, PeerTiming.parse(args.peer_timing)
            self.config = replace(
                config,
                num_peer_pages=pool.num_pages,
                slabs=pool.slab_frames,
                borrowing=BorrowingConfig(timing.demand, timing.idle, timing.patience),
            )
        return graph_batch_size_for(args, self.model, config, rank.device, computes_masked)

    def _open_executor(self, model: Any, attention: AttentionBackend, graph_batch_size: int) -> ModelExecutor:
        rank, config = self.rank, self.config
        is_cut = self.model.model_impl == NATIVE
        has_prefill_graphs = graph_batch_size and is_cut and not self.args.disable_prefill_cuda_graph
        graph_prefill_tokens = self.args.cuda_graph_max_bs_prefill if has_prefill_graphs else 0
        layer_stream = None
        if config.layer_stream is not None:
            layer_stream = LayerStreamCache(
                config.layer_stream.num_buffers,
                config.layer_stream.buffer_pages,
                self.pool,
                self._streamed_from,
                make_stream("layer-stream", rank.device, rank.notify, urgent=True),
                self.args.hicache_io_backend,
                self._limits,
            )
        executor = ModelExecutor(
            model,
            self.pool,
            make_stream("compute", rank.device, rank.notify),
            self._links,
            ExecutorOptions(
                config.page_size,
                self.model.attn_scale,
                self.model.vocab_size,
                config.max_running_requests,
                Sampler(),
                rank.notify,
                lockstep=rank.group.size > 1,
                device=rank.device,
                attention=attention,
                graph_batch_size=graph_batch_size,
                graph_prefill_tokens=graph_prefill_tokens,
                grammars=GrammarRows(
                    self.model.vocab_size,
                    config.eos_token_ids,
                    rank.grammars,
                    rank.device,
                    rank.group.broadcast,
                ),
            ),
            layer_stream,
        )
        settle_memory(rank.device)
        if self.pool.scratch_slot is not None:
            rank.progress.stage("compiling kernels")
            executor.warm_up()
        if graph_batch_size:
            rank.progress.stage(f"capturing CUDA graphs of up to {graph_batch_size} requests")
        try:
            executor.capture_graphs()
        except RuntimeError as error:
            if self.model.model_impl == NATIVE:
                raise
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise StartupError(
                f"decodes of {self.model.architecture} cannot be CUDA graphs ({reason}): leave out "
                "--cuda-graph-max-bs-decode"
            ) from error
        return executor

    def _open_tiers(self, executor: ModelExecutor) -> Storage:
        """The tiers below the device, and the links to them."""
        args, rank, config = self.args, self.rank, self.config
        windowed = [window is not None for window in executor.model.windows] if config.window_reach else []
        host_pool = self._open_host_pool(windowed)
        if self.pool.scratch_slot is not None:
            backends = {args.hicache_io_backend}
            if self.borrowed is not None or config.num_swap_pages:
                # What `auto` is there, whatever it is for the host.
                backends.add(pick_backend(args.hicache_io_backend, rank.device))
            try:
                for backend in sorted(backends):
                    warm_up_transfers(self.pool, host_pool.kv_pages, backend, windowed)
            except LayerFlagsError as error:
                raise StartupError(f"--hicache-io-backend persistent cannot run here: {error}; use auto") from error
            # Links' streams, which do not wait for it, write to the same pages.
            settle_memory(rank.device)
        for name, limit in self._limits.items():
            logger.info("hicache: link %s is limited to %g GB/s", name, limit.bytes_per_s / 1e9)
        below: dict[str, HasPages] = {H2D: host_pool, D2H: host_pool}
        # Where copies go, or come from, that is not the device.
        upper: dict[str, HasPages] = {P2H: host_pool}
        self._streamed_from[Tier.HOST] = host_pool
        if config.num_swap_pages:
            below[D2S] = self._streamed_from[Tier.DISK] = self._open_swap_file()
        if self.borrowed is not None:
            pool = self.borrowed.pool
            below |= {name: pool.seen_by_stream(is_within=name == P2P) for name in (P2D, D2P, P2H, P2P)}
            self._streamed_from[Tier.PEER], upper[P2P] = pool.seen_by_stream(), pool
        for name, other in below.items():
            if self.replicas.is_follower and name in LEADERS_LINKS:
                self._links[name] = LeftToLeader(name)
                continue
            stream = make_stream(name, rank.device, rank.notify, urgent=name in LOAD_LINKS.values())
            self._links[name] = CopyLink(
                name,
                upper.get(name, self.pool),
                other,
                stream,
                executor.fence,
                rank.notify,
                CopyOptions(args.hicache_io_backend, self._limits.get(name), rank.device, windowed),
            )
        if args.hicache_canary:
            folder = Path(args.hicache_canary_dir).expanduser()
            self._links[CHECK] = CheckLink(
                self.pool, folder, rank.group.rank, ThreadStream(CHECK, rank.notify), rank.notify
            )
        return self._open_storage(host_pool)

    def _open_host_pool(self, windowed: Sequence[bool]) -> MHATokenToKVPoolHost:
        """windowed: of each layer, whether it has a window."""
        pool, config, group, replicas = self.pool, self.config, self.rank.group, self.replicas
        num_pages, num_windowed_pages = config.num_host_pages, config.num_windowed_host_pages
        border = config.host_border
        size_bytes = host_pool_bytes(pool.page_layout, num_pages, windowed, num_windowed_pages, border)
        shared = None
        try:
            if not replicas.is_follower:
                shared = SharedMemory.allocate(size_bytes, HOST_POOL)
        except OSError as error:
            raise StartupError(
                f"{shown_size(size_bytes)} of host memory cannot be allocated ({error}): lower --hicache-size or "
                "--hicache-ratio"
            ) from error
        if replicas.num_groups < group.size:
            try:
                shared = share_memory(shared, size_bytes, group, replicas)
            except OSError as error:
                raise StartupError(
                    f"rank {group.rank} cannot open the host pool of rank {replicas.leader}: {error}"
                ) from error
        return MHATokenToKVPoolHost(
            pool,
            num_pages,
            self.args.hicache_mem_layout,
            shared=shared,
            num_windowed_pages=num_windowed_pages,
            windowed=windowed,
            border=border,
        )

    def _open_swap_file(self) -> HasPages:
        path, layout = self.args.layer_stream_disk_path, self.pool.page_layout
        assert path is not None
        try:
            file = SwapFile(path, self.config.num_swap_pages, layout)
        except SwapFileError as error:
            raise StartupError(str(error)) from error
        device = self.rank.device
        return StagedPages(file.kv_pages, layout, device) if device.type == "cuda" else file

    def _open_storage(self, host_pool: MHATokenToKVPoolHost) -> Storage:
        """The links to storage, and what is attached from the start."""
        args, rank = self.args, self.rank
        opener = StorageOpener(
            # Reads all weights: not before storage is attached.
            cache(partial(self.model.fingerprint, args.load_format, args.random_seed or 0)),
            args.model_name,
            host_pool,
            rank.group.rank,
            rank.group.size,
            rank.directory,
            self.replicas,
            self.config.window_reach,
        )
        slot = StoreSlot(opener.open)
        # What storage has not written down by then, the next start finds out by itself, only slower.
        rank.on_exit.callback(slot.detach)
        for name in STORAGE_LINKS:
            if self.replicas.is_follower:
                self._links[name] = LeftToLeader(name)
                continue
            stream = ThreadStream(name, rank.notify)
            self._links[name] = StorageLink(
                name, slot, stream, rank.notify, self._limits.get(name), host_pool=host_pool
            )
        if args.hicache_storage_backend is not None:
            rank.progress.stage(f"opening storage: {args.hicache_storage_backend}")
            setup = opener.setup(
                args.hicache_storage_backend,
                args.hicache_storage_backend_extra_config,
                args.hicache_storage_prefetch_policy,
                args.hicache_write_policy,
            )
            if not self.replicas.is_follower:
                slot.store = opener.open(setup.setup)
            self.config = replace(self.config, storage=setup)
        return Storage(opener, slot)

    def _open_record(self, scheduler: Scheduler) -> Recorder | None:
        steps, folder = self.args.record_steps, self.args.crash_dump_folder
        if self.rank.group.rank != 0:
            return None
        if steps:
            logger.info("recording every step to %s", steps)
            # Open as long as the process lives.
            return StepRecorder(open(steps, "wb"), self.config)
        if folder is None:
            return None
        record = CrashRecord(Path(folder), scheduler)
        self.rank.on_exit.callback(record.remove)
        return record
