"""From a user's options to the memory that one rank lends or borrows.

Owns the sizes: how many slabs, where, of how many bytes. A worker (`--peer-role worker`) is a lender, a master a
borrower.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.slab_exchange import lender_keeps
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.mem_cache.hybrid_pages import regions_of
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.borrowed_places import BorrowedOptions
from sglang.srt.peer.lending import LendingConfig, why_nothing_is_lent
from sglang.srt.peer.lent_places import LentOptions
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, granularity_of
from sglang.srt.peer.memory.lent_memory import LentMemory, allocate_pool
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.peer.protocol.elastic_units import pages_of_slabs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.peer_endpoint import PeerError, of_rank
from sglang.srt.utils.peer_timing import PeerTiming

logger = logging.getLogger(__name__)


def borrow_memory(args: ServerArgs, layout: PageLayout, rank: RankSetup) -> BorrowedMemory:
    """The memory that a borrower's rank borrows from the same rank of each lender, of the kind that its device has.
    Raises StartupError."""
    assert args.peer_endpoint is not None
    slab_bytes = slab_bytes_for(args, layout.page_bytes)
    num_slabs = max(1, int(args.peer_size * 1e9 / rank.group.size) // slab_bytes)
    endpoints = [of_rank(each, rank.group.rank) for each in args.peer_endpoint.split(",")]
    # Alike on all ranks, whose parent is the server: what lenders decide by it, they decide alike.
    name = f"{args.model_name} ({os.getppid()})"
    try:
        memory = BorrowedMemory(
            endpoints,
            name,
            SlabsConfig(num_slabs, slab_bytes, rank.device),
            layout,
            rank.notify,
            # Nothing is asked for before it is needed, see `Borrowing`.
            BorrowedOptions(0, num_ranks=rank.group.size, timing=PeerTiming.parse(args.peer_timing)),
            leads=rank.group.rank == 0,
        )
    except (PeerError, SlabError, ValueError) as error:
        raise StartupError(str(error)) from error
    logger.info(
        "peers: up to %d slabs of %d MiB, %.1f %% of them padding, from %s",
        num_slabs,
        args.peer_slab_size,
        100 * memory.pool.slab_padding_bytes / slab_bytes,
        ", ".join(endpoints),
    )
    return memory


def lendable_pages(args: ServerArgs, page_bytes: int, size_bytes: int, device: torch.device) -> int:
    """How many pages a lender's pool on a GPU gets of size_bytes of memory: those of whole slabs, beside the scratch
    page. Raises StartupError."""
    slab_bytes = slab_bytes_for(args, page_bytes)
    try:
        return pages_of_slabs(size_bytes, slab_bytes, page_bytes, granularity_of(device))
    except SlabError as error:
        raise StartupError(str(error)) from error


def in_whole_slabs(
    args: ServerArgs, config: SchedulerConfig, layout: PageLayout, windowed: Sequence[bool], device: torch.device
) -> SchedulerConfig:
    """A lender's config whose device has, beside a pool for layers with a window, pages of whole slabs. windowed: of
    each layer, whether it has a window. Raises StartupError."""
    page_bytes = regions_of(layout, 0, windowed, config.num_windowed_pages)[0][1].page_bytes
    num_pages = lendable_pages(args, page_bytes, config.num_device_pages * page_bytes, device)
    return replace(config, num_device_pages=num_pages)


def lend_memory(
    args: ServerArgs, config: SchedulerConfig, layout: PageLayout, windowed: Sequence[bool], rank: RankSetup
) -> LentMemory:
    """A lender's device pool, in whole slabs: of config.num_device_pages, or more to fill the last slab. On a GPU it
    has a scratch page too. windowed: of each layer, whether it has a window. Raises StartupError."""
    assert args.peer_endpoint is not None
    in_slabs = regions_of(layout, 0, windowed, config.num_windowed_pages)[0][1]
    slab_bytes = slab_bytes_for(args, in_slabs.page_bytes)
    slab_pages = slab_bytes // in_slabs.page_bytes
    num_slabs = -(-config.num_device_pages // slab_pages)
    endpoint = of_rank(args.peer_endpoint, rank.group.rank)
    keep_pages = lender_keeps(
        config, LendingConfig(), min(config.context_len, num_slabs * slab_pages * config.page_size)
    )
    most_kept_pages = lender_keeps(config, LendingConfig(), config.context_len)
    # A larger pool may be divided.
    is_divisible = any(windowed) and not all(windowed)
    most_slab_pages = slab_bytes // (regions_of(layout, 0, windowed, 1)[0][1] if is_divisible else layout).page_bytes
    problem = why_nothing_is_lent(
        num_slabs * slab_pages, keep_pages, slab_pages, config.page_size, most_kept_pages, most_slab_pages
    )
    if problem and rank.group.rank == 0:
        logger.warning("peers: %s", problem)
    num_lent = max(0, (num_slabs * slab_pages - keep_pages) // slab_pages)
    try:
        slabs = SlabsConfig(num_slabs, slab_bytes, rank.device, has_scratch=rank.device.type == "cuda")
        pool = allocate_pool(slabs, layout, windowed, config.num_windowed_pages)
        options = LentOptions(
            args.peer_strict, PeerTiming.parse(args.peer_timing), num_lent, problem, rank.group.size
        )
        memory = LentMemory(endpoint, rank.directory, pool, rank.notify, options)
    except (PeerError, SlabError, ValueError) as error:
        raise StartupError(str(error)) from error
    logger.info(
        "peers: %d tokens on the device are %d slabs of %d MiB, %.1f %% of them padding; up to %d to be lent at %s",
        num_slabs * slab_pages * config.page_size,
        num_slabs,
        args.peer_slab_size,
        100 * pool.slab_padding_bytes / slab_bytes,
        num_lent,
        endpoint,
    )
    return memory


def slab_bytes_for(args: ServerArgs, page_bytes: int) -> int:
    """Of --peer-slab-size. Raises StartupError where a slab has no room for a page."""
    slab_bytes = args.peer_slab_size << 20
    if slab_bytes < page_bytes:
        raise StartupError(
            f"--peer-slab-size {args.peer_slab_size} has no room for a page of {page_bytes:,} bytes: raise it, or "
            "lower --page-size"
        )
    return slab_bytes
