"""How large the pools of an engine are, and whether its weights fit. Owns nothing: it measures free memory, and all
ranks agree on the least."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from sgl_kernel.kvcacheio import page_size_for_dma
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import TRANSFORMERS
from sglang.srt.distributed.parallel_state import Replicas, TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import WINDOW_TILE
from sglang.srt.layers.attention.latent_expansion import PIECE_BYTES
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.scheduler_config import (
    MOST_CUT_TOKENS,
    LayerStreamConfig,
    PriorityConfig,
    SchedulerConfig,
)
from sglang.srt.managers.startup.device import free_memory, has_memory_of_its_own, kv_cache_bytes, page_layout
from sglang.srt.managers.startup.peers import lendable_pages
from sglang.srt.mem_cache.border_slabs import border_between
from sglang.srt.mem_cache.hybrid_pages import regions_of
from sglang.srt.mem_cache.link import kernel_links_of
from sglang.srt.mem_cache.memory_pool_host import host_pages_that_fit
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import H2D
from sglang.srt.models.registry import get_model_class
from sglang.srt.peer.protocol.elastic_units import layer_stream_sizes
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU
from sglang.srt.utils.shared_memory import has_shared_memory

logger = logging.getLogger(__name__)

DEFAULT_MAX_RUNNING = 256
# Pages of layers with a window per page of the others: a prompt of so many tokens has room for what windows reach
# from its end; at least and at most.
_TOKENS_PER_END = 3072
_LEAST_WINDOWED, _MOST_WINDOWED = 0.25, 0.8
# On the host, where the border may move.
_MOST_WINDOWED_HOST = 0.5


def device_pages(
    args: ServerArgs,
    model: ModelConfig,
    group: TensorParallelGroup,
    device: torch.device = CPU,
    weight_bytes: int = 0,
) -> tuple[int, int]:
    """How many pages the device gets of the memory that is free now, and their size. weight_bytes: what a rank's
    weights are still going to take of a GPU's. Raises StartupError where that is too little."""
    page = args.page_size or 1
    page_bytes = page_layout(model, page, group.size).page_bytes
    size_bytes = kv_cache_bytes(args, device, group.size)
    if device.type == "cuda":
        # Latents' pieces are beside what any model takes while it computes.
        pieces = PIECE_BYTES if model.latent is not None else 0
        size_bytes = max(0, size_bytes - weight_bytes - pieces)
    fitting = size_bytes // page_bytes
    if args.peer_role == "worker" and device.type == "cuda":
        fitting = lendable_pages(args, page_bytes, size_bytes, device)
    if args.max_total_tokens is not None:
        num_pages = args.max_total_tokens // page
        if num_pages > fitting:
            raise StartupError(
                f"--max-total-tokens {args.max_total_tokens} needs {shown_size(num_pages * page_bytes)}, but "
                f"{fitting * page} tokens fit into the memory that is free; lower it"
            )
    elif device.type == "cpu":
        num_pages = min(fitting, _enough_pages(model, page))
    else:
        num_pages = fitting
    if num_pages < 2:
        others = ", --quantization fp8 or a larger --tp-size" if device.type == "cuda" else ""
        raise StartupError(
            f"memory is left for {num_pages} pages of {page} tokens of the KV cache, and at least 2 are needed: "
            f"raise --mem-fraction-static, lower --page-size, or choose a smaller model{others}"
        )
    return num_pages, page_bytes


def _enough_pages(model: ModelConfig, page: int) -> int:
    """Memory is not the CPU's bottleneck: four full contexts."""
    return -(-4 * model.context_length // page)


def most_device_pages(args: ServerArgs, model: ModelConfig, device: torch.device) -> int | None:
    """The most pages that the device is to have, however little each needs."""
    page = args.page_size or 1
    if args.max_total_tokens is not None:
        return args.max_total_tokens // page
    return _enough_pages(model, page) if device.type == "cpu" else None


def priorities_for(args: ServerArgs) -> PriorityConfig | None:
    if not args.enable_priority_scheduling:
        return None
    threshold = None if args.disable_priority_preemption else args.priority_scheduling_preemption_threshold
    return PriorityConfig(args.schedule_low_priority_values_first, threshold)


def build_config(
    args: ServerArgs, model: ModelConfig, group: TensorParallelGroup, device: torch.device = CPU
) -> SchedulerConfig:
    """Sizes the pools, alike on all ranks. Raises StartupError where not even one short request would fit."""
    num_pages, page_bytes = device_pages(args, model, group, device)
    page, num_host_pages = args.page_size or 1, 0
    if args.enable_hierarchical_cache:
        # The CPU's "device" is in the same memory, and so is that of a GPU without its own.
        is_pinned = device.type != "cpu"
        taken = 0 if has_memory_of_its_own(device) else num_pages * page_bytes * group.size
        num_owners = replicas_of(model, group).num_groups
        if num_owners < group.size:
            logger.info("hicache: %d ranks have %d host pools, as some cache the same", group.size, num_owners)
        num_host_pages = _host_pages(args, num_pages, page, page_bytes, num_owners, taken, is_pinned)
    logger.info(
        "KV cache: %d tokens on the device (%s), page size %d",
        num_pages * page,
        shown_size(num_pages * page_bytes),
        page,
    )
    sizes = group.reduce_min(torch.tensor([num_pages, num_host_pages]))
    num_pages, num_host_pages = sizes.tolist()
    layer_stream = None
    if args.layer_stream:
        layer_stream, num_left = layer_stream_sizes_for(args, num_pages, num_host_pages, model.num_layers, device)
        if layer_stream.buffer_pages < 1 or num_left < 1:
            raise StartupError(
                f"the buffers of --layer-stream take all {num_pages * page} tokens of the device: lower "
                "--layer-stream or --layer-stream-tokens, or raise --max-total-tokens"
            )
        num_pages = num_left
    num_swap_pages = int(args.layer_stream_disk_size * 1e9 / group.size) // page_bytes
    if args.layer_stream_disk_size and not num_swap_pages:
        raise StartupError(
            f"--layer-stream-disk-size {args.layer_stream_disk_size:g} GB has no room for one page of {page_bytes} "
            f"bytes on each of {group.size} ranks: raise it"
        )
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else model.context_length
    return SchedulerConfig(
        page_size=page,
        num_device_pages=num_pages,
        num_host_pages=num_host_pages,
        page_bytes=page_bytes,
        context_len=model.context_length,
        eos_token_ids=model.eos_token_ids,
        max_running_requests=args.max_running_requests or DEFAULT_MAX_RUNNING,
        chunked_prefill_size=max(chunk, page),
        max_prefill_tokens=max(args.max_prefill_tokens, page),
        stream_interval=args.stream_interval,
        max_ahead=1 if args.disable_overlap_schedule else 2,
        enable_radix_cache=not args.disable_radix_cache,
        eviction_policy=args.radix_eviction_policy,
        write_policy=args.hicache_write_policy,
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        schedule_policy=args.schedule_policy,
        priorities=priorities_for(args),
        bypass_local=args.hicache_bypass_local,
        load_ratio=args.load_ratio,
        bubble_filling=args.hicache_bubble_filling != "off",
        holds_batches=args.hicache_bubble_filling == "decode",
        load_or_recompute=args.hicache_load_or_recompute == "on",
        kernel_links=kernel_links(args, model, group, device),
        insert_at=args.hicache_publish_at,
        deferral_threshold=args.hicache_deferral_threshold,
        layer_stream=layer_stream,
        num_swap_pages=num_swap_pages,
        canary_rate=args.hicache_canary,
    )


def kernel_links(
    args: ServerArgs, model: ModelConfig, group: TensorParallelGroup, device: torch.device
) -> tuple[str, ...]:
    """See `SchedulerConfig`. The log tells if kernels load the host's pages, and copy engines would larger ones."""
    if device.type != "cuda":
        return ()
    page = args.page_size or 1
    run_bytes = max(page_layout(model, page, group.size).run_bytes)
    found = kernel_links_of(args.hicache_io_backend, run_bytes, device)
    larger = page_size_for_dma(run_bytes // page)
    with_larger = kernel_links_of(args.hicache_io_backend, run_bytes // page * larger, device)
    if H2D in found and H2D not in with_larger and args.enable_hierarchical_cache:
        logger.info(
            "hicache: kernels load pages of %d tokens, and wait for prefills; from --page-size %d on copy engines "
            "load, which do not wait",
            page,
            larger,
        )
    return found


def replicas_of(model: ModelConfig, group: TensorParallelGroup) -> Replicas:
    """Which ranks share a host pool and a storage tier: those with the same KV heads in the same scales. Latents are
    one head, which all ranks have. See `shared_host.py`."""
    if not has_shared_memory():
        return group.replicas(range(group.size))
    heads = group.kv_heads_of_ranks(model.num_kv_heads)
    return group.replicas(list(zip(heads, model.kv_scales or [()] * group.size, strict=True)))


def _host_pages(
    args: ServerArgs, num_device_pages: int, page: int, page_bytes: int, num_owners: int, taken: int, is_pinned: bool
) -> int:
    """page: tokens of one. num_owners: of host pools, which divide the memory. taken: bytes of host memory that the
    device pools of all ranks are going to take."""
    num_pages, limited = host_pages_that_fit(
        num_device_pages,
        page_bytes,
        args.hicache_ratio,
        args.hicache_size / num_owners,
        free_memory(CPU, num_owners) - -(-taken // num_owners),
        is_pinned,
    )
    if num_pages < 1 and not limited:
        name, size = ("size", args.hicache_size) if args.hicache_size else ("ratio", args.hicache_ratio)
        raise StartupError(
            f"--hicache-{name} {size:g} has no room for a page of {page_bytes:,} bytes on the host: raise it, "
            "lower --page-size or drop --hicache"
        )
    if num_pages < 1:
        raise StartupError("no host memory is free for --hicache: lower --max-total-tokens or drop --hicache")
    logger.info(
        "hicache: host tier of %d tokens (%s%s), %s, %s",
        num_pages * page,
        shown_size(num_pages * page_bytes),
        ", limited by free memory" if limited else "",
        args.hicache_write_policy,
        f"storage {args.hicache_storage_backend}" if args.hicache_storage_backend else "no storage",
    )
    return num_pages


def graph_batch_size_for(
    args: ServerArgs, model: ModelConfig, config: SchedulerConfig, device: torch.device, computes_masked: bool
) -> int:
    """The largest decode that is a CUDA graph; 0 for none. What looks at tensors on the host cannot be captured. That
    is what computes windows for backends that do not, and may be code of transformers, which is tried where the flag
    asks for it. computes_masked: see `AttentionBackend`."""
    if device.type != "cuda" or args.disable_cuda_graph:
        return 0
    if not computes_masked and (model.model_impl == TRANSFORMERS or any(each is not None for each in model.windows)):
        return 0
    default = 0 if model.model_impl == TRANSFORMERS else config.max_running_requests
    return min(args.cuda_graph_max_bs_decode or default, config.max_running_requests)


def with_windows(config: SchedulerConfig, windows: Sequence[int | None], tile: int = WINDOW_TILE) -> SchedulerConfig:
    """A config whose loads leave out what layers with a window do not see. windows: of each layer, the tokens that a
    query sees, itself included; None for all. tile: see `WINDOW_TILE`."""
    reach = window_reach_of(windows, tile)
    if not 0 < reach < config.context_len:
        return config
    if config.layer_stream is not None:
        logger.info(
            "layer stream: layers with a sliding window keep and load all tokens, as a request that streams may read "
            "any of them"
        )
        return config
    num_windowed = sum(window is not None for window in windows)
    config = replace(config, model_windows=(num_windowed, reach))
    if not config.num_host_pages and not config.num_windowed_pages:
        return config
    return replace(config, num_windowed_layers=num_windowed, window_reach=reach)


def with_windowed_pool(
    config: SchedulerConfig,
    windows: Sequence[int | None],
    ratio: float | None,
    most_pages: int | None,
    tier: str = "device",
    most: float = _MOST_WINDOWED,
) -> SchedulerConfig:
    """A config whose device has a pool of its own for layers with a window, of so many of its pages, `ratio`, in the
    memory that it has; the same where that gives no room. Pages of which layers have how many bytes each:

        num_device_pages * num_layers  =  pages * layers with full attention + ratio * pages * layers with a window

    windows: as for `with_windows`. ratio: None for more where windows are long, `most` at the most, or as much more
    as there is memory for, but one pool if that has as many pages. most_pages: of the device, None for no limit.
    tier: for the log."""
    if not _can_divide(config, windows):
        return config
    num_windowed = sum(window is not None for window in windows)
    num_full = len(windows) - num_windowed
    reach, page = window_reach_of(windows), config.page_size
    memory = config.num_device_pages * len(windows)
    wanted = most_pages or memory
    # Storage that is attached later may have longer blocks.
    least = (
        replace(config, num_device_pages=wanted, window_reach=reach).least_windowed_pages + MOST_CUT_TOKENS // page
    )
    share = ratio or usual_windowed_share(reach, most)
    num_pages = min(wanted, int(memory / (num_full + share * num_windowed)))
    of_memory = (memory - num_pages * num_full) // num_windowed
    num_windowed_pages = max(least, of_memory if ratio is None else math.ceil(share * num_pages))
    num_pages = min(wanted, (memory - num_windowed_pages * num_windowed) // num_full)
    if num_windowed_pages >= num_pages or (ratio is None and num_pages <= config.num_device_pages):
        return config
    logger.info(
        "KV cache: in the same memory the %s has %d tokens, %d in layers with a sliding window "
        "(--swa-full-tokens-ratio)",
        tier,
        num_pages * page,
        num_windowed_pages * page,
    )
    return replace(config, num_device_pages=num_pages, num_windowed_pages=num_windowed_pages)


def with_windowed_host_pool(
    config: SchedulerConfig, windows: Sequence[int | None], ratio: float | None, layout: PageLayout | None = None
) -> SchedulerConfig:
    """The same of the host, if there is one, also where that gives no room, with as many pages of both kinds: what is
    stored is divided as the host is, and has to be found again after a start with other sizes. Layers with a window
    may get more of the others' memory later. layout: of the host's pages, if they are page-first; None: they may
    not."""
    if not config.num_host_pages or not _can_divide(config, windows):
        return config
    as_device = replace(config, num_device_pages=config.num_host_pages, num_windowed_pages=0)
    found = with_windowed_pool(as_device, windows, ratio, None, "host", _MOST_WINDOWED_HOST)
    if not found.num_windowed_pages:
        return replace(config, num_windowed_host_pages=config.num_host_pages)
    num_pages, num_windowed, border = found.num_device_pages, found.num_windowed_pages, None
    if layout is not None:
        (_, full), (_, windowed) = regions_of(layout, num_pages, [w is not None for w in windows], num_windowed)
        num_pages, num_windowed, border = border_between(
            num_pages, num_windowed, full.page_bytes, windowed.page_bytes, config.host_block_pages
        )
    return replace(config, num_host_pages=num_pages, num_windowed_host_pages=num_windowed, host_border=border)


def _can_divide(config: SchedulerConfig, windows: Sequence[int | None]) -> bool:
    """Whether layers with a window may have a pool of their own: there are layers of both kinds, windows hide
    something, and no request streams, which may read any of it."""
    kinds = {window is None for window in windows}
    return len(kinds) == 2 and window_reach_of(windows) < config.context_len and config.layer_stream is None


def usual_windowed_share(reach: int, most: float = _MOST_WINDOWED) -> float:
    """Pages of layers with a window per page of the others, where no flag gives it. reach: see `window_reach_of`."""
    return min(most, max(_LEAST_WINDOWED, reach / _TOKENS_PER_END))


def window_reach_of(windows: Sequence[int | None], tile: int = WINDOW_TILE) -> int:
    """How many tokens before the first new one layers with a window read; 0 without such layers."""
    seen = [window for window in windows if window is not None]
    return max(seen) - 1 + tile if seen else 0


def layer_stream_sizes_for(
    args: ServerArgs, num_pages: int, num_host_pages: int, num_layers: int, device: torch.device = CPU
) -> tuple[LayerStreamConfig, int]:
    """The buffers of the layer stream cache, and the pages that they leave of the device's num_pages."""
    in_whole_layers, _ = layer_stream_sizes(num_pages * num_layers, [num_host_pages], num_layers, args.layer_stream)
    buffer_pages, page = in_whole_layers, args.page_size or 1
    tokens = args.layer_stream_tokens
    if tokens is None:
        # On a GPU the host's work for each piece is longer than the piece's own (docs/records/measurements.md).
        tokens = 4096 if device.type == "cpu" else 16384
    if tokens:
        buffer_pages = min(buffer_pages, -(-tokens // page))
    left = (num_pages * num_layers - args.layer_stream * buffer_pages) // num_layers
    logger.info(
        "layer stream: %d buffers of %d tokens of a layer, which leaves %d tokens on the device",
        args.layer_stream,
        buffer_pages * page,
        left * page,
    )
    return LayerStreamConfig(args.layer_stream, buffer_pages, args.layer_stream_max_tpot), left


def check_weights_fit(model: ModelConfig, group: TensorParallelGroup, device: torch.device = CPU) -> int:
    """Bytes that this rank's weights need, logged before they are read. Raises StartupError if that is more than is
    free: the system would kill a process much later, without a reason."""
    with torch.device("meta"):
        weights = get_model_class(model)(model, TorchNativeAttnBackend(), group)
    size = sum(each.numel() * each.element_size() for each in weights.parameters())
    # All ranks look before any takes its part.
    free = int(group.reduce_min(torch.tensor([free_memory(device, group.size)]))[0])
    if size > free:
        ranks = f" on each of {group.size} ranks" if group.size > 1 else ""
        raise StartupError(
            f"the weights need {shown_size(size)}{ranks}, but {shown_size(free)} of memory are free: free some, or "
            "choose a smaller model or --dtype"
        )
    logger.info("weights: %s of %s of free memory", shown_size(size), shown_size(free))
    return size
