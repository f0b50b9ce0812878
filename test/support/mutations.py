"""Planted bugs, and which net catches which.

    python -m support.mutations          each bug under all nets
    python -m support.mutations --alone  each bug under each net alone: the table in docs/records/planted_bugs.md
    python -m support.mutations --first-tries stale  write first_tries.json anew where it misses its bug

A mutation changes one line of the engine in a way that somebody could have written. The soak must not survive it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang.srt.constrained.grammar_rows import GrammarRows
from sglang.srt.managers import storage_controller
from sglang.srt.managers.admission import Admission
from sglang.srt.managers.auto_copies import AutoCopies
from sglang.srt.managers.batch_builder import BatchBuilder
from sglang.srt.managers.block_writer import BlockWriter
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.host_border import HostBorder
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.launch_batches import ExtendBatch, LaunchRecord
from sglang.srt.managers.layer_streaming import LayerStreaming
from sglang.srt.managers.schedule_batch import EndReason
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.storage_controller import StorageController
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.managers.streamed_request import StreamedRequest
from sglang.srt.managers.transfer_ledger import NO_FRAMES, TransferLedger
from sglang.srt.managers.windowed_room import WindowedRoom
from sglang.srt.mem_cache import block_names, hiradix_tree
from sglang.srt.mem_cache import link as link_module
from sglang.srt.mem_cache.block_keys import NO_KEYS, BlockKeys
from sglang.srt.mem_cache.block_names import BlockNames
from sglang.srt.mem_cache.copy_parts import CopyPart
from sglang.srt.mem_cache.eviction_order import EvictionOrder
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.layer_stream_cache import LayerStreamCache
from sglang.srt.mem_cache.link import CopyGate, CopyLink
from sglang.srt.mem_cache.node import Node, is_hole, path_of
from sglang.srt.mem_cache.slab_ledger import SlabLedger, SlabState
from sglang.srt.mem_cache.storage_link import StorageLink
from sglang.srt.mem_cache.transfer import D2P, FRAME_TIERS, P2D, P2H, GateError, Tier
from sglang.srt.mem_cache.transient_nodes import TransientNodes
from sglang.srt.mem_cache.window_reach import WindowReach
from sglang.srt.mem_cache.windowed_pool import WindowedPool
from sglang.srt.model_executor import executor as executor_module
from sglang.srt.model_executor.executor import ModelExecutor, NonFiniteLogitsError
from sglang.srt.sampling.penalties import PenaltyTable
from sglang.srt.utils.time_units import NO_LAUNCH
from support import soak as soak_module
from support.kv_oracle import OracleError
from support.reduction import reduce_progress
from support.residency_events import CopiedTwiceError
from support.soak import Soak, StuckError
from support.soak_config import SoakConfig
from support.soak_rank import ALL_NETS
from support.soak_requests import WrongTokensError
from support.stream_emulator import EmulatedEvent
from support.tier_mixes import tier_mix, windowed_mix

MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}


def mutation(function: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], Any]:
    MUTATIONS[function.__name__] = function
    return function


@mutation
def reuse_before_fence() -> Any:
    """Freed frames are reused while launches that use them still run."""
    free_after = FrameTable.free_after
    return mock.patch.object(
        FrameTable, "free_after", lambda self, frames, before, fence: free_after(self, frames, before, -1)
    )


@mutation
def gate_not_waited() -> Any:
    """The forward pass does not wait for the layers that are being loaded."""
    return mock.patch.object(CopyGate, "wait", lambda self, layer, stream: None)


@mutation
def gate_of_the_layer_before() -> Any:
    """The forward pass waits for the wrong layer's load."""
    wait = CopyGate.wait
    return mock.patch.object(CopyGate, "wait", lambda self, layer, stream: wait(self, max(0, layer - 1), stream))


@mutation
def launch_without_gates() -> Any:
    """The scheduler forgets which loads a launch depends on."""

    class NoGates(dict):
        def setdefault(self, key: Any, default: Any = None) -> Any:
            return None

    init = ExtendBatch.__init__

    def patched(self: Any, *args: Any) -> None:
        init(self, *args)
        self.gates = NoGates()

    return mock.patch.object(ExtendBatch, "__init__", patched)


@mutation
def backup_without_after() -> Any:
    """A backup does not wait for the launch that writes its source."""
    return mock.patch.object(ModelExecutor, "fence", lambda self, seq: None)


@mutation
def early_unpin() -> Any:
    """Transfers do not pin their frames."""
    return mock.patch.multiple(
        FrameTable, pin=lambda self, frames: None, unpin=lambda self, f: setattr(self, "_unpinned_since_reap", True)
    )


@mutation
def max_for_min() -> Any:
    """Ranks agree on the fastest instead of the slowest."""

    def fastest(ranks: Any) -> Any:
        return max(ranks, key=lambda rank: sum(rank.done.values()))

    return mock.patch.object(soak_module, "reduce_progress", fastest)


@mutation
def unknown_token_inserted() -> Any:
    """A request whose hold ends inserts KV of a token that is still being sampled."""
    insert = KVCache.insert_prefix

    def patched(self: Any, req: Any, upto: int, page_runs: Any) -> None:
        is_running = req.length > req.num_prompt
        insert(self, req, max(upto, req.computed) if is_running else upto, page_runs)

    return mock.patch.object(KVCache, "insert_prefix", patched)


@mutation
def last_token_inserted() -> Any:
    """A finished request inserts its last token too, whose KV was never computed."""
    insert = KVCache.insert_prefix

    def patched(self: Any, req: Any, upto: int, page_runs: Any) -> None:
        ends = req.num_known == req.max_len and len(req.hold.frames) * self.page_size + req.hold.inserted_len > upto
        insert(self, req, req.num_known if ends else upto, page_runs)

    return mock.patch.object(KVCache, "insert_prefix", patched)


@mutation
def stale_results_taken() -> Any:
    """Results of an earlier epoch are taken for a request that was retracted meanwhile."""

    class AnyEpoch(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    init = LaunchRecord.__init__

    def patched(self: Any, reqs: Any, sampled: Any, **kwargs: Any) -> None:
        init(self, reqs, [(r, AnyEpoch(e)) for r, e in sampled], **kwargs)

    return mock.patch.object(LaunchRecord, "__init__", patched)


@mutation
def reset_keeps_what_was_inserted() -> Any:
    """After a failed launch the tree keeps the pages it was to write."""
    reset = Scheduler._reset

    def patched(self: Any, failed: int) -> int:
        with mock.patch.object(HiRadixTree, "walk", lambda self: iter(())):
            return reset(self, failed)

    return mock.patch.object(Scheduler, "_reset", patched)


@mutation
def voided_launch_counts() -> Any:
    """The executor goes on after a failed launch as if nothing had happened, and so does the scheduler."""

    def patched(self: Any, failed: int) -> int:
        record = self._launches.pop(failed, None)
        if record is not None:
            for req, epoch in record.reqs:
                if req.epoch == epoch:
                    self.end_hold(req, EndReason.LOST)
                    self._requeue(req)
        return self.clock.next

    return mock.patch.object(Scheduler, "_reset", patched)


@mutation
def failed_load_committed() -> Any:
    """A load that failed counts as done."""

    def patched(self: Any, ticket: Any, was_cancelled: bool) -> None:
        self.commit(ticket)

    return mock.patch.object(HiCacheController, "abort", patched)


@mutation
def readers_of_failed_load_stay() -> Any:
    """Requests that count on a failed load are not started again."""
    return mock.patch.object(Scheduler, "_end_readers", lambda self, ticket: None)


@mutation
def lock_not_released() -> Any:
    """A request whose hold ends leaves its lock behind."""
    end_hold = Scheduler.end_hold

    def patched(self: Any, req: Any, reason: EndReason) -> None:
        with mock.patch.object(HiRadixTree, "unlock", lambda *a: None):
            end_hold(self, req, reason)

    return mock.patch.object(Scheduler, "end_hold", patched)


@mutation
def locked_nodes_evicted() -> Any:
    """Eviction ignores locks."""

    def patched(self: Any, node: Node, tier: Tier) -> bool:
        return (
            node.parent is not None
            and node.frames[tier] is not None
            and node.tickets[tier] is None
            and node.num_device_children == 0
        )

    return mock.patch.object(EvictionOrder, "is_evictable", patched)


@mutation
def duplicates_leaked() -> Any:
    """Pages that the tree had already are not given back."""
    free_after = FrameTable.free_after

    def patched(self: Any, frames: Any, before: FrameState, fence: int) -> None:
        caller = contextlib.nullcontext() if before != FrameState.HELD or fence < 0 else None
        if caller is None and len(frames) == 1:
            return
        free_after(self, frames, before, fence)

    return mock.patch.object(FrameTable, "free_after", patched)


@mutation
def duplicates_not_replaced() -> Any:
    """A request goes on using its own copy of a page after that has been given back."""
    insert = KVCache.insert_prefix
    return mock.patch.object(KVCache, "insert_prefix", lambda self, req, upto, page_runs: insert(self, req, upto, []))


@mutation
def split_forgets_ticket() -> Any:
    """The upper half of a node that is being filled counts as ready."""
    split = HiRadixTree.split

    def patched(self: Any, node: Node, num_tokens: int) -> Node:
        upper = split(self, node, num_tokens)
        for tier in FRAME_TIERS:
            if upper.tickets[tier] is not None:
                self._by_ticket[upper.tickets[tier]].remove(upper)
                upper.tickets[tier] = None
        return upper

    return mock.patch.object(HiRadixTree, "split", patched)


@mutation
def load_in_wrong_order() -> Any:
    """A load puts pages into each other's places."""
    load = CopyLink._load

    def patched(self: Any, src: torch.Tensor, dst: torch.Tensor, part: CopyPart) -> None:
        load(self, src.flip(0), dst, part)

    return mock.patch.object(CopyLink, "_load", patched)


@mutation
def windows_reach_a_page_less() -> Any:
    """A load leaves out a page too much of layers with a window."""
    first_seen = WindowReach.first_seen

    def patched(self: Any, num_tokens: int) -> int:
        return first_seen(self, num_tokens) + self._page_size

    return mock.patch.object(WindowReach, "first_seen", patched)


@mutation
def partial_nodes_match_as_whole() -> Any:
    """A request that leaves a prefix in the middle finds there what the device lacks."""
    return mock.patch.object(WindowReach, "longest_whole", lambda self, match, source_of: match)


@mutation
def partial_nodes_are_computed_on() -> Any:
    """Tokens behind what the device has are computed instead of loaded, though windows reach partial nodes."""
    return mock.patch.object(WindowReach, "on_device", lambda self, match: match.on_device())


@mutation
def partial_on_the_host_counts_as_whole() -> Any:
    """What windows reach is loaded from pages of the host that lack it."""
    return mock.patch("sglang.srt.mem_cache.node.is_partial_on", lambda node, tier: node.is_partial and not tier)


@mutation
def windows_get_another_slab_than_was_freed() -> Any:
    """Frames for layers with a window lie in slabs whose pages the host still has."""
    oldest = HostBorder._to_windows

    def patched(self: Any, num_pages: int, lost: int) -> None:
        windowed, self._windowed = self._windowed, self._windowed[::-1]
        oldest(self, num_pages, lost)
        self._windowed = windowed

    return mock.patch.object(HostBorder, "_to_windows", patched)


@mutation
def completion_brings_the_other_layers() -> Any:
    """What a partial node lacks is not loaded, but again what it has."""
    begin = TransferLedger.begin_transfer

    def patched(self: Any, *args: Any, **skips: Any) -> Any:
        return begin(self, *args, **{"num_full_only_pages": sum(skips.values())})

    return mock.patch.object(TransferLedger, "begin_transfer", patched)


@mutation
def computed_pages_give_way_to_partial_ones() -> Any:
    """Partial pages stay in the place of those that a request has computed."""
    insert = HiRadixTree.insert_prefix

    def patched(self: Any, *args: Any) -> Any:
        partial = [node for node in self.walk() if node.is_partial and node.tickets[Tier.DEVICE] is None]
        for node in partial:
            node.is_partial = False
        found = insert(self, *args)
        for node in partial:
            node.is_partial = node.frames[Tier.DEVICE] is not None
        return found

    return mock.patch.object(HiRadixTree, "insert_prefix", patched)


@mutation
def windows_lose_what_the_next_launch_reads() -> Any:
    """Layers with a window give up pages that a request sees which joined the launch before."""
    return mock.patch.object(WindowedRoom, "_reads_from", lambda self: {})


@mutation
def frames_of_windows_are_reused_while_they_are_read() -> Any:
    """What layers with a window have given up is free at once."""
    take = WindowedPool.take_away
    return mock.patch.object(WindowedPool, "take_away", lambda self, pages, fence: take(self, pages, NO_LAUNCH))


@mutation
def executor_is_not_told_the_frames_of_windows() -> Any:
    """Only the first frame that a page gets for layers with a window is told."""
    take = WindowedPool.take_given
    told: set[tuple[int, int]] = set()

    def patched(self: Any) -> Any:
        given = take(self)
        is_new = [(id(self), page) not in told for page in given[0].tolist()]
        told.update((id(self), page) for page in given[0].tolist())
        return given[:, is_new]

    return mock.patch.object(WindowedPool, "take_given", patched)


@mutation
def load_forgets_v() -> Any:
    """A load copies K twice."""
    transfer = link_module.transfer_kv_all_layer_pf_lf

    def patched(host: Any, pages: Any, src: Any, dst: Any, **options: Any) -> None:
        transfer(host, pages, src, dst, **options)
        pages.v.index_copy_(1, dst, pages.k.index_select(1, dst))

    return mock.patch.object(link_module, "transfer_kv_all_layer_pf_lf", patched)


@mutation
def slot_keeps_old_pages() -> Any:
    """The page table of a slot is not replaced when a new request gets it."""
    apply = executor_module.PageTable.apply

    def patched(self: Any, runs: Any, *more: Any) -> None:
        apply(self, [run for run in runs if not (run.fresh and self._room[run.slot])], *more)

    return mock.patch.object(executor_module.PageTable, "apply", patched)


@mutation
def last_token_of_wrong_slot() -> Any:
    """The token that the launch before sampled is written to the neighbour's slot."""

    class Rolled(torch.Tensor):
        def index_copy_(self, dim: int, index: Any, source: Any) -> Any:
            return super().index_copy_(dim, (index + 1) % len(self), source)

    init = ModelExecutor.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._last_tokens = self._last_tokens.as_subclass(Rolled)

    return mock.patch.object(ModelExecutor, "__init__", patched)


@mutation
def match_takes_half_a_page() -> Any:
    """A common prefix is not rounded down to whole pages."""

    def patched(key: np.ndarray, tokens: np.ndarray, pos: int, end: int, page_size: int) -> int:
        n = min(len(key), end - pos)
        differs = np.flatnonzero(key[:n] != tokens[pos : pos + n])
        first = int(differs[0]) if len(differs) else n
        return -(-first // page_size) * page_size

    return mock.patch.object(hiradix_tree, "common_len", patched)


@mutation
def fetch_not_pinned() -> Any:
    """What storage reads into is not pinned: pages of a fetch that was given up are reused while they are written."""
    return _without_pins("fetch", StorageController, "end_fetch")


@mutation
def store_not_pinned() -> Any:
    """What is being written to storage is not pinned."""
    return _without_pins("store", BlockWriter, "end")


def _without_pins(link: str, owner: type, end: str) -> contextlib.AbstractContextManager[Any]:
    """owner, end: whose method is called at the end of an operation."""
    begin, over = TransferLedger.begin_storage_op, getattr(owner, end)

    def began(self: Any, to: str, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(FrameTable, "pin", lambda *a: None) if to == link else contextlib.nullcontext():
            return begin(self, to, *args, **kwargs)

    def ended(self: Any, *args: Any) -> Any:
        op = self.ledger.in_flight[args[0]]
        self.ledger.tables[Tier.HOST].pin(op.frames)
        return over(self, *args)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(TransferLedger, "begin_storage_op", began))
    stack.enter_context(mock.patch.object(owner, end, ended))
    return stack


@mutation
def fetch_counts_as_whole() -> Any:
    """What storage did not bring counts as there."""
    end_fetch = StorageController.end_fetch

    def patched(self: Any, ticket: Any, count: int) -> Any:
        return end_fetch(self, ticket, len(self.ledger.in_flight[ticket].keys))

    return mock.patch.object(StorageController, "end_fetch", patched)


@mutation
def fetched_matched_too_early() -> Any:
    """A request starts on pages that storage has not brought yet."""
    match = HiRadixTree.match
    return mock.patch.object(
        HiRadixTree, "match", lambda self, ns, tokens, fetching=False, **more: match(self, ns, tokens, True, **more)
    )


@mutation
def fetched_pages_in_wrong_order() -> Any:
    """The tree takes the pages of a block whose head it has from the wrong end."""
    begin_fetch = HiRadixTree.begin_fetch

    def patched(self: Any, match: Any, run: Any, *args: Any) -> Any:
        return begin_fetch(self, match, dataclasses.replace(run, frames=np.roll(run.frames, 1)), *args)

    return mock.patch.object(HiRadixTree, "begin_fetch", patched)


@mutation
def store_one_page_further() -> Any:
    """Each block is written from the pages that begin one further."""
    begin = TransferLedger.begin_storage_op

    def patched(self: Any, link: str, action: Any, keys: Any = NO_KEYS, frames: Any = NO_FRAMES, **more: Any) -> Any:
        return begin(self, link, action, keys, np.roll(frames, -1) if link == "store" else frames, **more)

    return mock.patch.object(TransferLedger, "begin_storage_op", patched)


@mutation
def names_forget_the_tail() -> Any:
    """A block that begins in a node above is named by the wrong tokens of that node."""
    name_path, concatenate = BlockNames.name_path, np.concatenate

    def patched(self: Any, end: Node) -> None:
        keys = [above.key for above in path_of(end)]

        def joined(parts: Any, *args: Any) -> Any:
            # The key of a node above, whose end is the tail.
            backwards = any(parts[0] is key for key in keys)
            return concatenate([parts[0][::-1], *parts[1:]] if backwards else parts, *args)

        with mock.patch.object(block_names.np, "concatenate", joined):
            name_path(self, end)

    return mock.patch.object(BlockNames, "name_path", patched)


@mutation
def names_without_a_past() -> Any:
    """A block is named by its own tokens alone."""
    chain = BlockKeys.chain

    def patched(self: Any, last: bytes, tokens: np.ndarray) -> np.ndarray:
        size = self.block_tokens
        blocks = [chain(self, bytes(16), tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        return np.concatenate(blocks) if blocks else chain(self, last, tokens[:0])

    return mock.patch.object(BlockKeys, "chain", patched)


@mutation
def split_forgets_names() -> Any:
    """The lower half of a node keeps the names of all its blocks."""
    split = HiRadixTree.split

    def patched(self: Any, node: Node, num_tokens: int) -> Node:
        keys, stored, seen = node.block_keys, node.stored, node.seen
        upper = split(self, node, num_tokens)
        node.block_keys, node.stored, node.seen = keys, stored, seen
        return upper

    return mock.patch.object(HiRadixTree, "split", patched)


@mutation
def abandoned_fetch_goes_on() -> Any:
    """A fetch that nobody waits for any more is not given up."""
    return mock.patch.object(StorageController, "_cancel_fetch", lambda self, ticket: None)


@mutation
def deadlines_never_pass() -> Any:
    """A request waits for storage however long that takes."""
    return mock.patch.object(StorageController, "expire", lambda self, now: None)


@mutation
def largest_count_taken() -> Any:
    """Ranks agree on what the luckiest of them got from storage."""

    def reduced(ranks: Any) -> Any:
        progress = reduce_progress(ranks)
        counts = {
            name: tuple(max(rank.counts[name][i] for rank in ranks) for i in range(len(least)))
            for name, least in progress.counts.items()
        }
        return dataclasses.replace(progress, counts=counts)

    return mock.patch.object(soak_module, "reduce_progress", reduced)


@mutation
def detach_does_not_wait() -> Any:
    """Storage is detached while it is read and written."""
    return mock.patch.object(StorageController, "has_outstanding", False)


@mutation
def given_up_counts_as_ended() -> Any:
    """A read that was given up is reported at once, though the store still writes into its pages."""
    cancel = StorageLink.cancel

    def patched(self: Any, ticket: Any) -> None:
        cancel(self, ticket)
        for begun in self._begun:
            if begun.seq == ticket.seq and begun.is_unwanted and begun.result is None:
                self._end(begun, 0)

    return mock.patch.object(StorageLink, "cancel", patched)


@mutation
def reads_reported_as_they_end() -> Any:
    """Reads that overlap are reported in the order in which they end."""

    def patched(self: Any) -> list[Any]:
        ended = [begun for begun in self._begun if begun.result is not None]
        for begun in ended:
            self._begun.remove(begun)
        return [begun.result for begun in ended]

    return mock.patch.object(StorageLink, "poll", patched)


@mutation
def count_of_another_read() -> Any:
    """What the first of several reads to end has brought is taken for what the oldest of them has."""
    end = StorageLink._end

    def patched(self: Any, begun: Any, *args: Any, **error: Any) -> None:
        end(self, next((b for b in self._begun if b.result is None), begun), *args, **error)

    return mock.patch.object(StorageLink, "_end", patched)


@mutation
def last_read_to_end_ends_all() -> Any:
    """When a read ends, those before it are taken to have ended as well."""
    end = StorageLink._end

    def patched(self: Any, begun: Any, *args: Any, **error: Any) -> None:
        end(self, begun, *args, **error)
        for other in self._begun:
            if other.seq < begun.seq and other.result is None:
                other.result = dataclasses.replace(begun.result, seq=other.seq, count=0)

    return mock.patch.object(StorageLink, "_end", patched)


@mutation
def preload_kept_on_abort() -> Any:
    """An aborted request leaves what it loaded ahead locked."""
    return _without_ending_preloads("_abort")


@mutation
def preload_kept_when_its_load_fails() -> Any:
    """A request goes on waiting on a load that has failed."""
    return _without_ending_preloads("_end_readers")


def _without_ending_preloads(method: str) -> contextlib.AbstractContextManager[Any]:
    real = getattr(Scheduler, method)

    def patched(self: Any, what: Any) -> None:
        with mock.patch.object(Admission, "end_preloads", lambda self, reqs: 0):
            real(self, what)

    return mock.patch.object(Scheduler, method, patched)


@mutation
def preloads_never_cancelled() -> Any:
    """What waiting requests have loaded ahead is kept for them, whoever needs the memory."""
    return mock.patch.object(Admission, "cancel_preloads", lambda self, reqs: 0)


@mutation
def preload_not_waited_for() -> Any:
    """A request that has loaded ahead is launched as if all of that were there."""
    count = Admission._count_found

    def patched(self: Any, req: Any, *args: Any) -> None:
        count(self, req, *args)
        if req.loaded:
            req.plan = tuple(dataclasses.replace(span, ticket=None) for span in req.plan)

    return mock.patch.object(Admission, "_count_found", patched)


@mutation
def front_not_computed() -> Any:
    """The front of a load that is computed instead gets no row in the launch."""
    return _front_of(lambda ids, page: ids[:0])


@mutation
def front_one_page_short() -> Any:
    """The last page of the front is neither computed nor loaded."""
    return _front_of(lambda ids, page: ids[:-page])


def _front_of(part: Callable[[np.ndarray, int], np.ndarray]) -> contextlib.AbstractContextManager[Any]:
    recompute = BatchBuilder.recompute

    def patched(self: Any, build: Any, *args: Any) -> None:
        add = build.add

        def added(req: Any, start: int, ids: np.ndarray, samples: bool) -> None:
            if len(ids := part(ids, self.page_size)):
                add(req, start, ids, samples)

        with mock.patch.object(build, "add", added):
            recompute(self, build, *args)

    return mock.patch.object(BatchBuilder, "recompute", patched)


@mutation
def claim_outlives_its_request() -> Any:
    """Others go on waiting for what a request that ended was about to compute."""
    end = Scheduler._end

    def patched(self: Any, req: Any, reason: Any) -> None:
        with mock.patch.object(TransientNodes, "release", lambda self, rid: None):
            end(self, req, reason)

    return mock.patch.object(Scheduler, "_end", patched)


@mutation
def free_place_on_the_link_not_used() -> Any:
    """Nobody who waits for the link gets the place of a fetch that has ended."""
    end_probe = StorageController.end_probe

    def patched(self: Any, *args: Any) -> None:
        with mock.patch.object(StorageController, "begin_fetches", begin_fetches):
            end_probe(self, *args)

    begin_fetches = StorageController.begin_fetches
    changes: dict[str, Any] = {"end_probe": patched, "begin_fetches": lambda self: None}
    return mock.patch.multiple(StorageController, **changes)


@mutation
def request_that_fetches_nothing_stays_in_line() -> Any:
    """A request that is to compute everything still waits for its turn on the link."""
    cut = StorageController._cut

    def patched(self: Any, *args: Any) -> bool:
        cut(self, *args)
        return True

    return mock.patch.object(StorageController, "_cut", patched)


@mutation
def retired_namespaces_stay() -> Any:
    """Bypassing the local tiers, what nobody can ask for again stays as long as anything."""
    return mock.patch.object(HiRadixTree, "retire", lambda self, namespace: None)


@mutation
def peer_loads_not_awaited() -> Any:
    """Launches have no gates for loads from peers."""
    launch = ExtendBatch.launch

    def patched(self: Any) -> Any:
        self.gates = {ticket: None for ticket in self.gates if ticket.link != P2D}
        return launch(self)

    return mock.patch.object(ExtendBatch, "launch", patched)


@mutation
def peer_keeps_what_failed() -> Any:
    """A backup to the peer that failed counts as done."""
    abort = HiCacheController.abort

    def patched(self: Any, ticket: Any, was_cancelled: bool) -> None:
        if ticket.link == D2P:
            self.commit(ticket)
        else:
            abort(self, ticket, was_cancelled)

    return mock.patch.object(HiCacheController, "abort", patched)


@mutation
def loaded_keeps_its_place_on_the_peer() -> Any:
    """What a load brings back to the device is no candidate anew on the tier that it came from."""
    commit = HiRadixTree.commit

    def patched(self: Any, ticket: Any, tier: Any) -> Any:
        def offered(self: Any, node: Node) -> None:
            self._offer(node, tier)

        with mock.patch.object(HiRadixTree, "_offer_everywhere", offered):
            return commit(self, ticket, tier)

    return mock.patch.object(HiRadixTree, "commit", patched)


@mutation
def slab_lent_in_use() -> Any:
    """A slab is lent while pages in it are still read, written or locked."""

    def patched(self: Any) -> tuple[int, ...]:
        drained = tuple(slab for slab, state in enumerate(self.states) if state == SlabState.DRAINING)
        for slab in drained:
            self.states[slab] = SlabState.UNMAPPED
        return drained

    return mock.patch.object(SlabLedger, "take_drained", patched)


@mutation
def cancelled_drain_still_lends() -> Any:
    """Draining of a slab is cancelled, and pages that were in use then are lent all the same."""

    def patched(self: Any, frames: np.ndarray) -> None:
        self.reclaim(frames[self.state[frames] == FrameState.LENT])

    return mock.patch.object(FrameTable, "cancel_lend", patched)


@mutation
def own_slabs_count_as_agreed() -> Any:
    """A rank takes the borrowed slabs that it has mapped for those that all ranks have mapped."""
    step = EngineCore.step

    def patched(self: Any, *args: Any) -> Any:
        if self._borrowed is not None:
            self._borrowed.mark_in_use(self._seen[2].mapped)
        return step(self, *args)

    return mock.patch.object(EngineCore, "step", patched)


@mutation
def streamed_before_it_came() -> Any:
    """Attention reads a buffer of the layer stream cache before its copy is done."""
    fill = LayerStreamCache.fill

    def patched(self: Any, layer: int, piece: Any) -> Any:
        filled = fill(self, layer, piece)
        filled.ready = EmulatedEvent()
        filled.ready.recorded = filled.ready.passed = True
        return filled

    return mock.patch.object(LayerStreamCache, "fill", patched)


@mutation
def buffer_filled_before_it_was_read() -> Any:
    """The layer stream cache copies into a buffer whatever still reads it."""
    return mock.patch.object(LayerStreamCache, "has_read", lambda self, event: None)


@mutation
def spilled_pages_free_at_once() -> Any:
    """Device pages of a request that streams are free once the host has them, whatever launches still read."""
    committed = StreamedRequest.committed

    def patched(self: Any, ticket: Any) -> None:
        last_launch, self.req.last_launch = self.req.last_launch, -1
        committed(self, ticket)
        self.req.last_launch = last_launch

    return mock.patch.object(StreamedRequest, "committed", patched)


@mutation
def streamed_host_pages_free_at_once() -> Any:
    """Host pages are reused while a launch still streams them."""
    return mock.patch.object(HiRadixTree, "note_stream", staticmethod(lambda node, launch: None))


@mutation
def failed_spill_kept() -> Any:
    """A request goes on although what it moved to the host did not get there."""
    return mock.patch.object(LayerStreaming, "readers_of", lambda self, ticket: [])


@mutation
def promoted_pages_not_told() -> Any:
    """The executor is not told which device pages a request has again."""
    prefix = StreamedRequest.prefix
    return mock.patch.object(StreamedRequest, "prefix", lambda self, place: (prefix(self, place)[0], []))


@mutation
def swapped_before_it_is_computed() -> Any:
    """Pages go to the swap file without waiting for the launch that computes them."""
    begin_swap = HiCacheController.begin_swap
    without_fence = lambda self, src, fence: begin_swap(self, src, NO_LAUNCH)  # noqa: E731
    return mock.patch.object(HiCacheController, "begin_swap", without_fence)


@mutation
def swapped_pages_free_at_once() -> Any:
    """Pages of the swap file are free as soon as they are written, while their request still needs them."""
    committed = StreamedRequest.committed

    def patched(self: Any, ticket: Any) -> None:
        written = self._swapping
        committed(self, ticket)
        if len(written) and not len(self._swapping):
            self._cache.swap.free_after(written, FrameState.HELD, -1)

    return mock.patch.object(StreamedRequest, "committed", patched)


@mutation
def upper_half_is_unimportant() -> Any:
    """The upper half of a node that is split has no priority."""
    split = HiRadixTree.split

    def patched(self: Any, node: Any, num_tokens: int) -> Any:
        upper = split(self, node, num_tokens)
        upper.priority = min(0, upper.priority)
        return upper

    return mock.patch.object(HiRadixTree, "split", patched)


@mutation
def empty_holes_stay() -> Any:
    """Holes stay in the tree when nothing is below them any more."""
    take_frames = HiRadixTree._take_frames

    def patched(self: Any, node: Node, *args: Any) -> None:
        with mock.patch.object(hiradix_tree, "is_hole", lambda other: other is node and is_hole(node)):
            take_frames(self, node, *args)

    return mock.patch.object(HiRadixTree, "_take_frames", patched)


@mutation
def match_goes_through_holes() -> Any:
    """A match goes on behind a hole."""
    source_of = HiRadixTree.source_of
    through = lambda self, node: Tier.HOST if is_hole(node) else source_of(self, node)  # noqa: E731
    return mock.patch.object(HiRadixTree, "source_of", through)


@mutation
def duplicates_rewritten_at_insertion() -> Any:
    """Whatever the host lacks of a path is copied there when something is inserted below it."""
    write_through = AutoCopies.write_through

    def patched(self: Any, node: Node) -> None:
        path = path_of(node)
        marks = [above.was_copied for above in path]
        for above in path:
            above.was_copied = False
        write_through(self, node)
        for above, mark in zip(path, marks):
            above.was_copied |= mark

    return mock.patch.object(AutoCopies, "write_through", patched)


@mutation
def copies_not_remembered() -> Any:
    """A node whose copy was given up counts as one that was never copied."""
    begin_fill = HiRadixTree.begin_fill

    def patched(self: Any, nodes: list[Node], *args: Any) -> None:
        begin_fill(self, nodes, *args)
        for node in nodes:
            node.was_copied = False

    return mock.patch.object(HiRadixTree, "begin_fill", patched)


@mutation
def computed_hole_counts_as_exact() -> Any:
    """A hole that is computed counts as exact, also behind lossy KV."""
    insert_prefix = HiRadixTree.insert_prefix

    def patched(self: Any, *args: Any) -> Any:
        result = insert_prefix(self, *args)
        for node in result.created:
            node.is_lossy &= not node.children
        return result

    return mock.patch.object(HiRadixTree, "insert_prefix", patched)


@mutation
def fetch_goes_beyond_the_hole() -> Any:
    """A fetch into a hole takes whole blocks, also where the hole ends within one."""
    return mock.patch.object(storage_controller, "common_len", lambda key, tokens, pos, end, page: end - pos)


@mutation
def blocks_stored_with_a_page_missing() -> Any:
    """A block is stored though the host lacks some of its pages."""
    host_frames = BlockWriter._host_frames
    with_any = lambda self, node: np.maximum(host_frames(self, node), 0)  # noqa: E731
    return mock.patch.object(BlockWriter, "_host_frames", with_any)


@mutation
def moved_pages_not_pinned() -> Any:
    """Pages that move from a peer to the host are not pinned on the peer: their slab goes while they are read."""
    begin, end = TransferLedger.begin_transfer, TransferLedger.end

    def began(self: Any, link: str, *args: Any, **kwargs: Any) -> Any:
        op = begin(self, link, *args, **kwargs)
        if link == P2H:
            self.tables[Tier.PEER].unpin(op.src_frames)
        return op

    def ended(self: Any, ticket: Any) -> Any:
        if ticket.link == P2H:
            self.tables[Tier.PEER].pin(self.in_flight[ticket].src_frames)
        return end(self, ticket)

    return mock.patch.multiple(TransferLedger, begin_transfer=began, end=ended)


@mutation
def late_links_awaited() -> Any:
    """Copies that hang are waited for like any other."""
    return mock.patch.object(KVCache, "note_sick_links", lambda self, late, overdue, now: None)


@mutation
def sources_of_loads_evicted() -> Any:
    """The host gives up what is being loaded from it."""

    def patched(node: Node, tier: Tier) -> bool:
        ready = node.parent is not None and node.frames[tier] is not None and node.tickets[tier] is None
        return ready and (tier != Tier.DEVICE or node.lock == 0)

    return mock.patch.object(EvictionOrder, "_is_free_to_go", staticmethod(patched))


@mutation
def copied_pages_free_at_once() -> Any:
    """Pages that the device gives up are free while they are still copied."""
    reap = FrameTable.reap

    def patched(self: Any, done: int) -> None:
        pins, self.pins = self.pins, np.where(self.state == FrameState.PENDING_FREE, 0, self.pins)
        reap(self, done)
        self.pins = pins

    return mock.patch.object(FrameTable, "reap", patched)


@mutation
def penalties_begin_anew() -> Any:
    """A request that starts again is penalised only for what it generates from then on."""
    start = PenaltyTable.start
    return mock.patch.object(PenaltyTable, "start", lambda self, slot, tokens: start(self, slot, tokens[:0]))


@mutation
def grammar_begins_anew() -> Any:
    """A request that starts again is at the beginning of its grammar."""
    start = GrammarRows.start
    return mock.patch.object(
        GrammarRows, "start", lambda self, slot, spec, generated: start(self, slot, spec, generated[:0])
    )


@mutation
def embedding_of_another_request() -> Any:
    """An embedding is that of the launch's first request."""
    embeddings = ModelExecutor._embeddings
    return mock.patch.object(
        ModelExecutor, "_embeddings", staticmethod(lambda hidden, rows: embeddings(hidden, torch.zeros_like(rows)))
    )


_NAMES: dict[type[BaseException], str] = {
    NonFiniteLogitsError: "poison",
    OracleError: "oracle",
    WrongTokensError: "tokens",
    CopiedTwiceError: "copies",
    StuckError: "liveness",
    GateError: "gates",
}


def catcher(error: BaseException) -> str:
    """Which net an exception comes from; assertions stand for the invariants and the code's own checks."""
    return _NAMES.get(type(error), "invariants" if isinstance(error, AssertionError) else type(error).__name__)


# In these, requests queue for loads: all that the scheduler does about that happens in one of them.
QUEUES = (9, 10, 16, 26)


# In these, peers hold what the host has no room for.
PEERS: dict[int, dict[str, Any]] = {
    11: {"steps": 80, "num_host_pages": 8, "num_documents": 6, "whole_rate": 0.6},
    12: {"steps": 120, "num_documents": 6, "whole_rate": 0.6, "write_policy": "write_back", "bubble_filling": False},
    15: {"steps": 120, "num_documents": 6, "whole_rate": 0.6, "slab_rate": 0.2},
}


# In these, most requests are longer than the device.
STREAMERS: dict[int, dict[str, Any]] = {
    17: {
        "page_size": 1,
        "num_device_pages": 20,
        "num_host_pages": 110,
        "chunked_prefill_size": 5,
        "stream_pages": 7,
        "num_peer_pages": 0,
        "link_fail_rate": 0.05,
        "steps": 60,
    },
    20: {
        "page_size": 3,
        "num_device_pages": 12,
        "num_host_pages": 45,
        "chunked_prefill_size": 12,
        "stream_pages": 2,
        "stream_buffers": 3,
        "num_peer_pages": 40,
        "steps": 120,
    },
    # Most of it on disk. These two are drawn by seeds in which what they are there for happens.
    21: {
        "seed": 507,
        "write_policy": "write_through",
        "page_size": 1,
        "num_device_pages": 20,
        "num_host_pages": 14,
        "chunked_prefill_size": 5,
        "stream_pages": 7,
        "num_swap_pages": 60,
        "num_peer_pages": 0,
        "link_fail_rate": 0.1,
        "steps": 60,
    },
    # The host gives up what is streamed.
    300: {
        "seed": 522,
        "page_size": 1,
        "num_device_pages": 20,
        "num_host_pages": 77,
        "chunked_prefill_size": 5,
        "stream_pages": 7,
        "num_peer_pages": 0,
        "link_fail_rate": 0.05,
        "steps": 60,
    },
}


# In these, a worker lends what it does not need for a moment, and gets it back late.
LENDERS: dict[int, dict[str, Any]] = {
    14: {
        "steps": 150,
        "page_size": 1,
        "num_device_pages": 100,
        "num_host_pages": 120,
        "num_ranks": 2,
        "arrival_rate": 0.2,
        "link_fail_rate": 0.1,
        "launch_fail_rate": 0.02,
        "max_prompt": 24,
        "lend_rate": 0.1,
        "lend_window_s": 0.0,
    }
}
# Drawn by a seed in which a load comes late.
LENDERS[18] = {**LENDERS[14], "seed": 708, "abort_rate": 0.2}


# In this one, answers are shaped, and requests often start again.
SHAPES = 40


# In these, links from the device hang for ever, and the device has room for what they hold on to.
HANGS: dict[int, dict[str, Any]] = {
    22: {
        "steps": 150,
        "num_host_pages": 40,
        "num_device_pages": 240,
        "num_documents": 12,
        "whole_rate": 0.9,
        "write_policy": "auto",
        "hang_rate": 0.02,
        "hang_ticks": 1 << 30,
        "tick_s": 0.05,
        "num_ranks": 1,
        "page_size": 1,
    }
}


# Some of what storage has is sooner computed. Drawn by a seed in which a request that waits fetches nothing any more.
_SLOW_FETCHES: dict[str, Any] = {
    "seed": 313,
    "bypass_local": True,
    "load_or_recompute": True,
    "launch_s": 1e-3,
    "fetch_s": 1e-2,
    "arrival_rate": 0.9,
    "store_late_rate": 0.9,
}


# Prompts of two documents that part early.
_BRANCHES: dict[str, Any] = {
    "page_size": 1,
    "num_host_pages": 500,
    "num_documents": 2,
    "arrival_rate": 0.3,
    "max_new_tokens": 8,
    "write_policy": "write_through",
    "steps": 200,
    "load_s": 3e-3,
}
_WINDOWED: dict[int, dict[str, Any]] = {
    1: {"num_device_pages": 114, "whole_rate": 0.3, "launch_s": 3e-4},
    50: {
        "num_device_pages": 164,
        "whole_rate": 0.5,
        "launch_s": 1e-3,
        "link_fail_rate": 0.0,
        "load_or_recompute": True,
    },
}


_POOLED: dict[str, Any] = {
    "num_device_pages": 200,
    "windowed_part": 3,
    "chunked_prefill_size": 8,
    "insert_every_tokens": 8,
    "max_running_requests": 8,
    "arrival_rate": 0.6,
    "late_rate": 0.0,
    "load_late_rate": 0.0,
    "num_ranks": 1,
}


def configurations() -> Iterator[SoakConfig]:
    """In which all requests use the cache."""
    return (dataclasses.replace(config, cache_modes=False, switch_rate=0.0) for config in _configurations())


def _configurations() -> Iterator[SoakConfig]:
    """Small, hot and various: every mechanism acts within some hundred steps."""
    for seed in (
        10,
        66,
        38,
        9,
        26,
        16,
        13,
        237,
        45,
        1,
        2,
        5,
        6,
        3,
        4,
        7,
        8,
        11,
        12,
        15,
        14,
        17,
        18,
        20,
        21,
        300,
        402,
        22,
        SHAPES,
    ):
        page_size = (1, 4, 3, 16)[seed % 4]
        pages = -(-72 // page_size) + (4, 12)[seed % 2]
        config = SoakConfig(
            seed=seed,
            steps=250,
            page_size=page_size,
            num_device_pages=pages,
            num_host_pages=pages * (4, 1)[seed % 3 == 0],
            max_running_requests=6,
            chunked_prefill_size=max(page_size, 12),
            max_ahead=2,
            num_ranks=1 + seed % 2,
            arrival_rate=0.5,
            abort_rate=(0.02, 0.2)[seed // 4 % 2],
            link_fail_rate=(0.0, 0.2, 0.0, 0.05)[seed % 4],
            launch_fail_rate=(0.0, 0.02)[seed % 2],
            late_rate=0.3,
            oracle_every=5,
        )
        if seed in QUEUES:
            yield dataclasses.replace(config, **_queues(seed))
            continue
        if seed in PEERS:
            yield dataclasses.replace(config, num_peer_pages=4 * pages, link_fail_rate=0.1, **PEERS[seed])
            continue
        if seed in STREAMERS:
            yield dataclasses.replace(config, **STREAMERS[seed])
            continue
        if seed in HANGS:
            yield dataclasses.replace(config, **HANGS[seed])
            continue
        if seed == SHAPES:
            yield dataclasses.replace(config, shape_rate=1.0, num_device_pages=60, max_running_requests=8, steps=100)
            continue
        if seed in LENDERS:
            yield dataclasses.replace(config, **LENDERS[seed])
            continue
        if seed in (38, 66, 402):
            config = dataclasses.replace(config, **_overlapping(seed, page_size))
            # Storage is attached and detached while it is read.
            yield dataclasses.replace(config, storage_request_rate=0.05) if seed == 402 else config
            continue
        # All loads are awaited inside of launches, where they meet more of what else is there.
        config = dataclasses.replace(config, bubble_filling=False, load_or_recompute=False, deferral_threshold=0)
        if seed % 4 in (1, 2):
            config = dataclasses.replace(config, **_storage(seed, page_size))
        yield dataclasses.replace(config, **_SLOW_FETCHES) if seed == 13 else config
    # A prefix on its way to a peer, or on a peer alone, with blocks in storage below it.
    yield tier_mix(("peer", "disk"), 1)
    yield tier_mix(("peer", "disk"), 4)
    # With the policy auto.
    yield tier_mix(("peer", "remote"), 0)
    yield tier_mix(("disk", "stream"), 0)
    # Layers with a window, which leave their part of loads out; in the second, the front of loads may be computed.
    one_pool: dict[str, Any] = {"windowed_part": 0, "windowed_host_part": 0}
    for seed, more in _WINDOWED.items():
        yield dataclasses.replace(windowed_mix(("peer",), seed), **one_pool, **_BRANCHES, **more)
    # The same with a pool of their own on the device, which requests share.
    for seed in (24, 30):
        yield dataclasses.replace(windowed_mix(("peer",), seed), windowed_host_part=0, **(_BRANCHES | _POOLED))
    # And on the host, from where they are loaded.
    for seed in (24, 31):
        mix = windowed_mix(("disk",), seed)
        changed = _BRANCHES | _POOLED | {"windowed_host_part": 8, "num_host_pages": mix.num_host_pages // 2}
        yield dataclasses.replace(mix, **changed)
    # And with a border between the host's pools that moves.
    moving: dict[str, Any] = {"windowed_host_part": 8, "num_host_pages": 120, "num_documents": 6, "steps": 120}
    yield dataclasses.replace(windowed_mix(("disk",), 32), **(_BRANCHES | _POOLED | moving))


def _storage(seed: int, page_size: int) -> dict[str, Any]:
    """Few documents that come back, often twice at once, after all but storage has forgotten them; some do not wait
    for what others wait for."""
    block_pages = (2, 3)[seed // 4 % 2]
    setup = StorageSetup(
        backend="memory",
        setup="",
        secret=b"hunt",
        block_tokens=page_size * block_pages,
        limits=StorageLimits(
            blocks_per_op=2, max_fetch_pages=8 * block_pages, max_store_pages=4 * block_pages, fetch_window_ops=2
        ),
        prefetch=PrefetchConfig(("best_effort", "timeout")[seed % 2], 1, timeout_base_s=0.01, fetch_order="sjf"),
        write_policy="write_through",
    )
    return {
        "storage": setup,
        "num_documents": 3,
        "whole_rate": 0.8,
        "twin_rate": 0.4,
        "restart_rate": 0.03,
        # The queue is what waits for storage.
        "max_running_requests": 2,
        "num_host_pages": 90 // page_size * 4,
        "storage_request_rate": 0.01,
        "store_fail_rate": 0.05,
        "store_late_rate": (0.9, 0.5)[seed // 4 % 2],
    }


def _overlapping(seed: int, page_size: int) -> dict[str, Any]:
    """Storage that is read at many places at once: short blocks, two to a read, and all is forgotten often. By turns,
    who waits is given little time and much."""
    storage = _storage(seed, page_size)
    setup = dataclasses.replace(
        storage["storage"],
        block_tokens=page_size,
        limits=StorageLimits(blocks_per_op=2, max_fetch_pages=64, max_store_pages=64, fetch_window_ops=8),
        prefetch=PrefetchConfig("timeout", 1, timeout_base_s=(0.008, 0.1)[seed // 4 % 2]),
    )
    changes = {
        "storage": setup,
        "overlapping_reads": True,
        "restart_rate": 0.1,
        "whole_rate": 0.9,
        "twin_rate": 0.1,
        "arrival_rate": 0.9,
        "max_new_tokens": 4,
        "store_late_rate": 0.2,
        "load_or_recompute": False,
        "num_host_pages": 30,
        "num_ranks": 1 + seed // 4 % 2,
    }
    return {**storage, **changes}


def _queues(seed: int) -> dict[str, Any]:
    """Loads that take long beside launches that do not, of few documents, that several ask for at once; the queue is
    long, and many give up. By turns, what is computed is shared at once or when it is there."""
    return {
        # Of the first, a seed in which what is loaded ahead takes the memory that those who run need.
        "seed": 1012 if seed == 10 else seed,
        "steps": (110, 170)[seed % 2],
        "oracle_every": 10,
        "num_documents": 4,
        "whole_rate": 0.8,
        "twin_rate": 0.5,
        "abort_rate": (0.3, 0.2)[seed % 2],
        "late_rate": 0.0,
        "load_late_rate": 0.9,
        "max_running_requests": 2,
        "load_ratio": "auto",
        "deferral_threshold": 4,
        "insert_at": ("launch", "completion")[seed % 2],
        "launch_s": 3e-4,
        "load_s": (3e-3, 1e-2)[seed % 2],
    }


# The quickest configuration for each bug, by its seed; written by `--first-tries`. It saves time, nothing else: where
# it no longer catches the bug, all the others are tried.
FIRST_TRIES_FILE = Path(__file__).with_name("first_tries.json")


def first_tries() -> dict[str, int]:
    return json.loads(FIRST_TRIES_FILE.read_text())


def hunt(name: str, nets: frozenset[str] = ALL_NETS) -> str | None:
    """Run the soak with a bug planted until something catches it. Returns what did, None if nothing."""
    first = first_tries().get(name)
    for config in sorted(configurations(), key=lambda config: config.seed != first):
        with MUTATIONS[name]():
            caught = run(Soak(config, nets))
        if caught is not None:
            return caught
    return None


def run(soak: Soak) -> str | None:
    """What catches the bug that is planted, None if nothing does. Built and run while it is."""
    try:
        soak.run()
    except (TypeError, AttributeError, NameError):
        raise  # the mutation itself is broken: the code that it changes has moved on
    except Exception as error:
        return catcher(error)
    return None


def quickest(name: str) -> int | None:
    """Seed of the configuration that catches a bug in the fewest steps of all ranks; None if none does."""
    best, least = None, 1 << 30
    for config in configurations():
        with MUTATIONS[name]():
            soak = _BoundedSoak(config, least // config.num_ranks)
            caught = run(soak)
        if caught not in (None, _TooManyStepsError.__name__):
            best, least = config.seed, soak.num_ticks * config.num_ranks
    return best


class _TooManyStepsError(Exception):
    pass


class _BoundedSoak(Soak):
    """A soak that gives up after so many steps."""

    def __init__(self, config: SoakConfig, max_ticks: int) -> None:
        super().__init__(config)
        self._max_ticks = max_ticks

    def _tick(self, *args: Any, **kwargs: Any) -> None:
        if self.num_ticks >= self._max_ticks:
            raise _TooManyStepsError
        super()._tick(*args, **kwargs)


def write_first_tries(search_all: bool) -> list[str]:
    """Write the quickest configuration of each bug, of those whose present one misses it if not of all. Returns the
    bugs that none catches."""
    known = {} if search_all else first_tries()
    configs = {config.seed: config for config in configurations()}
    found: dict[str, int | None] = {}
    for name in MUTATIONS:
        config = configs.get(known.get(name, -1))
        if config is not None:
            with MUTATIONS[name]():
                if run(Soak(config)) is not None:
                    found[name] = config.seed
                    continue
        found[name] = quickest(name)
        print(f"{name}: {found[name]}, before {known.get(name)}", flush=True)
    tries = {name: seed for name, seed in sorted(found.items()) if seed is not None}
    FIRST_TRIES_FILE.write_text(json.dumps(tries, indent=1) + "\n")
    return [name for name in found if name not in tries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alone", action="store_true", help="try each net alone")
    parser.add_argument(
        "--first-tries", choices=("stale", "all"), help="search for the quickest configurations, and write them down"
    )
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if args.first_tries:
        missed = write_first_tries(args.first_tries == "all")
        raise SystemExit(f"caught by no configuration: {', '.join(missed)}" if missed else 0)
    sets = {"all": ALL_NETS}
    if args.alone:
        sets |= {"none": frozenset(), **{net: frozenset({net}) for net in sorted(ALL_NETS)}}
    print("| planted bug | " + " | ".join(f"nets: {name}" for name in sets) + " |")
    print("|---" * (len(sets) + 1) + "|")
    for name in MUTATIONS:
        print(f"| {name} | " + " | ".join(hunt(name, nets) or "-" for nets in sets.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
