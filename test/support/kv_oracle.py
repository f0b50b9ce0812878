"""The KV oracle, third of the three nets: recompute every cached path and compare its bytes on every tier.

It catches what tokens, invariants and poison miss: a inserted token that was never the real one, a page copied from
the wrong place under the right tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.node import Node, is_partial_on
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.device import to_device
from support.pool_pages import Pool, pages_of


class OracleError(AssertionError):
    pass


def tokens_to(node: Node) -> np.ndarray:
    """The tokens of the path that ends with node."""
    keys = []
    step: Node | None = node
    while step is not None:
        keys.append(step.key)
        step = step.parent
    return np.concatenate(keys[::-1])


def check_kv(
    scheduler: Scheduler,
    memory: dict[Tier, Pool],
    reference: Callable[[np.ndarray], np.ndarray],
    atol: float = 0.0,
    windows: Sequence[int | None] = (),
) -> int:
    """Compare all KV that is ready with its recomputation; returns the number of pages compared.

    reference: tokens -> (num_tokens, 2, num_layers, num_kv_heads, head_dim). windows: of each layer; where a node is
    partial, layers with one are left out. A node is ready on a tier if nothing
    fills it and the launch that wrote it is over.
    """
    page = scheduler.page_size
    compared = 0
    known: dict[int, np.ndarray] = {}
    nodes = list(scheduler.cache.tree.walk())
    for node in nodes:
        if node.children:
            continue
        tokens = tokens_to(node)
        try:
            kv = reference(tokens)
        except IndexError as error:
            raise OracleError(f"{node}: the tree has tokens that are in no vocabulary: {tokens[-32:]}") from error
        step: Node | None = node
        end = len(tokens)
        while step is not None and step.parent is not None and step.id not in known:
            start = end - len(step.key)
            known[step.id] = kv[start:end]
            step, end = step.parent, start
    for node in nodes:
        wanted = known[node.id]
        # (pages, page, 2, layers, heads, dim) -> (pages, 2, layers, page, heads, dim), the pages' own order.
        wanted = wanted.reshape(-1, page, *wanted.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
        for tier, pool in memory.items():
            frames = node.frames[tier]
            if frames is None or node.tickets[tier] is not None or node.fences[tier] >= scheduler.clock.done:
                continue
            is_cut = is_partial_on(node, tier)
            # Of a pool of its own for layers with a window.
            windowed = None
            if not is_cut and (of_tier := scheduler.cache.ledger.windowed.get(tier)) is not None:
                windowed = of_tier.frame_of[frames]
                if (windowed < 0).any():
                    raise OracleError(f"{node}: is whole, and has no frames in the pool for layers with a window")
            there = to_device(frames.astype(np.int64), pool.kv.device)
            of_windows = None if windowed is None else to_device(windowed.astype(np.int64), pool.kv.device)
            found = pages_of(pool, there, of_windows).cpu().to(torch.float64).numpy()
            layers = [layer for layer, window in enumerate(windows) if window is None] if is_cut else slice(None)
            found, right = found[:, :, layers], wanted[:, :, layers]
            good = np.array_equal(found, right) if atol == 0 else np.allclose(found, right, rtol=0, atol=atol)
            if not good:
                raise OracleError(f"{node}: wrong bytes on {tier.name.lower()} for tokens {tokens_to(node)[:32]}…")
            compared += len(frames)
    return compared


def check_stored(
    scheduler: Scheduler,
    blocks: Mapping[bytes, np.ndarray],
    reference: Callable[[np.ndarray], np.ndarray],
    layers: Sequence[int] | None = None,
) -> int:
    """Compare what storage has under the names of the tree's blocks with its recomputation; returns how many blocks.

    blocks: key -> bytes, page after page; reference: as for `check_kv`, of the pools' dtype. layers: those that
    blocks have, None for all.
    """
    names, page, compared = scheduler.cache.tree.names.keys, scheduler.page_size, 0
    if names is None:
        return 0
    for node in list(scheduler.cache.tree.walk()):
        if node.block_keys is None or not len(node.block_keys):
            continue
        tokens = tokens_to(node)
        chain = names.of_prompt(scheduler.cache.tree.root_of(node).namespace, tokens)
        if not np.array_equal(node.block_keys, chain[len(chain) - len(node.block_keys) :]):
            raise OracleError(f"{node}: its blocks have wrong names")
        kv = reference(tokens)
        for i, key in enumerate(node.block_keys):
            stored = blocks.get(key.tobytes())
            if stored is None:
                continue
            start = (node.start // names.block_tokens + i) * names.block_tokens
            wanted = kv[start : start + names.block_tokens]
            wanted = wanted.reshape(-1, page, *wanted.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
            wanted = wanted if layers is None else wanted[:, :, layers]
            if stored.tobytes() != np.ascontiguousarray(wanted).tobytes():
                raise OracleError(f"{node}: storage has wrong bytes for the block at token {start} of {tokens[:32]}…")
            compared += 1
    return compared
