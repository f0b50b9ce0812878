"""What small nodes keep alive: a slice holds the whole array that it was cut from."""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.transfer import Tier
from support.evictions import evict


def kept_bytes(tree: HiRadixTree) -> int:
    """Bytes of all arrays that the tree's nodes hold, or hold alive."""
    bases = {}
    for node in tree.walk():
        for array in (node.key, *node.frames):
            if array is not None:
                base = array if array.base is None else array.base
                bases[id(base)] = base.nbytes
    return sum(bases.values())


def insert(tree: HiRadixTree, tokens: np.ndarray, frames: np.ndarray) -> None:
    tree.insert_prefix("", None, tokens, frames, 0, 0)


def test_a_short_answer_does_not_keep_room_for_the_longest():
    """A request that may generate up to the end of the context has an array of that length."""
    tree = HiRadixTree(1)
    for i in range(20):
        tokens, frames = np.empty(100_000, np.int32), np.empty(100_000, np.int32)
        tokens[:50], frames[:50] = i, np.arange(50 * i, 50 * i + 50)
        insert(tree, tokens[:50], frames[:50])
    assert kept_bytes(tree) < 20 * 8 * 1000


def test_what_is_left_of_a_long_prompt_does_not_keep_all_of_it():
    tree = HiRadixTree(1)
    for i in range(20):
        tokens = np.arange(100_000, dtype=np.int32)
        tokens[0] = -i
        insert(tree, tokens, np.arange(100_000 * i, 100_000 * (i + 1), dtype=np.int32))
        evict(tree, Tier.DEVICE, 99_990)
    assert tree.resident_pages(Tier.DEVICE) == 200
    assert kept_bytes(tree) < 20 * 8 * 1000


def test_long_runs_are_not_copied():
    tree = HiRadixTree(1)
    tokens, frames = np.arange(10_000, dtype=np.int32), np.arange(10_000, dtype=np.int32)
    insert(tree, tokens[:9_000], frames[:9_000])
    (node,) = tree.walk()
    assert node.key.base is tokens and node.frames[Tier.DEVICE].base is frames
