"""`BlockNames`: the names of the blocks that nodes hold, and which of them storage is believed to have.

Owns the nodes' `block_keys`, `stored` and `seen`. Never reads storage. A block belongs to the node that holds
its last token, so that a split divides names and never makes new ones:

    blocks        |   0   |   1   |   2   |          block_tokens 4, page size 1
    before        [ node: a b c d e f g h i j ]      keys 0 1
    after         [ upper: a b c d e ][ f g h i j ]  keys 0 | 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.node import Node, path_of, root_of

# What a store has of a block: nothing, all layers, or all but those with a window (`WindowBlocks`). `Node.stored` has
# two bits for each store, those of the first one lowest.
NOT_STORED, STORED, WITHOUT_WINDOWS = range(3)
_BITS, _MASK = 2, 3
# The most stores.
MAX_STORES = 2


class BlockNames:
    def __init__(self) -> None:
        # How blocks are named; None while there is no storage, and no node has names.
        self.keys: BlockKeys | None = None
        self.num_stores = 0

    def num_blocks(self, node: Node) -> int:
        """Blocks whose last token the node holds."""
        assert self.keys is not None
        size = self.keys.block_tokens
        return node.end // size - node.start // size

    # -- naming -------------------------------------------------------------------------------------------------

    def rename(self, keys: BlockKeys | None, num_stores: int, nodes: Iterable[Node]) -> None:
        """Another storage, or none: forget all names and what was stored. nodes: all of the tree."""
        assert num_stores <= MAX_STORES
        self.keys, self.num_stores = keys, num_stores
        for node in nodes:
            node.block_keys = node.stored = node.seen = None

    def name_path(self, end: Node) -> None:
        """Give the nodes on the path to `end` the keys of their blocks, where they have none yet."""
        names = self.keys
        assert names is not None
        path = path_of(end)
        first = next((i for i, n in enumerate(path) if n.block_keys is None), len(path))
        if first == len(path):
            return
        last, tail = names.root(root_of(end).namespace), path[0].key[:0]
        lacking = path[first].start % names.block_tokens
        for above in path[:first]:
            if above.block_keys is not None and len(above.block_keys):
                last = above.block_keys[-1].tobytes()
        # The tokens since the last border of a block.
        for above in reversed(path[:first]):
            if len(tail) >= lacking:
                break
            tail = np.concatenate((above.key, tail))
        tail = tail[len(tail) - lacking :]
        for each in path[first:]:
            run = np.concatenate((tail, each.key)) if len(tail) else each.key
            if each.block_keys is None:
                each.block_keys = names.chain(last, run)
                each.stored = np.zeros(len(each.block_keys), np.int8)
                each.seen = np.zeros(len(each.block_keys), np.bool_)
            if len(each.block_keys):
                last = each.block_keys[-1].tobytes()
            tail = run[len(run) - each.end % names.block_tokens :]

    def name_created(self, created: Iterable[Node], keys: np.ndarray) -> None:
        """Name new nodes of a prompt whose blocks have these keys, (n, 16) uint8."""
        assert self.keys is not None
        size = self.keys.block_tokens
        for node in created:
            first, end = node.start // size, node.end // size
            if node.block_keys is None and end <= len(keys):
                node.block_keys = keys[first:end].copy()
                node.stored = np.zeros(end - first, np.int8)
                node.seen = np.zeros(end - first, np.bool_)

    def name_fetched(self, node: Node, block_keys: np.ndarray, lacking: Collection[int] = ()) -> None:
        """A node gets what storage has under these names. lacking: the places of stores that are known to lack it;
        of the others it is believed that they have it, until they are told of it (`BlockTouches`)."""
        assert len(block_keys) == self.num_blocks(node)
        node.block_keys = block_keys
        stored = sum(STORED << _BITS * place for place in range(self.num_stores) if place not in lacking)
        node.stored = np.full(len(block_keys), stored, np.int8)
        node.seen = np.zeros(len(block_keys), np.bool_)

    # -- what is stored -----------------------------------------------------------------------------------------

    @staticmethod
    def stored_in(nodes: Sequence[Node], place: int) -> np.ndarray:
        """(num_blocks,) int8: what the store at that place has of the blocks of nodes, which have names."""
        stored = np.concatenate([node.stored for node in nodes])  # type: ignore[misc]
        return stored >> _BITS * place & _MASK

    @staticmethod
    def mark_stored(path: Sequence[Node], place: int, blocks: np.ndarray, of_each: np.ndarray | int) -> None:
        """Note what the store at that place has of some blocks of the path, counted from its first one. Its nodes
        follow each other and have names. of_each: of all, or (len(blocks),)."""
        of_each = np.broadcast_to(np.asarray(of_each, np.int8), blocks.shape) << _BITS * place
        for node in path:
            assert node.stored is not None
            num_blocks = len(node.stored)
            is_here = (blocks >= 0) & (blocks < num_blocks)
            here = blocks[is_here]
            node.stored[here] = node.stored[here] & ~(_MASK << _BITS * place) | of_each[is_here]
            blocks = blocks - num_blocks

    def note_seen(self, end: Node, first: int, last: int) -> None:
        """Windows reach blocks [first, last) of the path to `end`, which has names."""
        assert self.keys is not None
        step: Node | None = end
        while step is not None and step.seen is not None and step.end // self.keys.block_tokens > first:
            begin = step.start // self.keys.block_tokens
            step.seen[max(first - begin, 0) : max(last - begin, 0)] = True
            step = step.parent

    @staticmethod
    def is_stored(node: Node) -> bool:
        """Whether storage, of two stores any, is believed to have every block that ends in the node."""
        return node.stored is not None and bool(node.stored.all())

    @staticmethod
    def has_stored(node: Node) -> bool:
        """The same, and that there is one: the end of a prompt may be in none."""
        return BlockNames.is_stored(node) and node.stored is not None and len(node.stored) > 0

    @staticmethod
    def forget_stored(node: Node, place: int | None = None) -> None:
        """Nothing of the node is believed stored, in that store or, with None, in any."""
        if node.stored is not None:
            node.stored &= 0 if place is None else ~(_MASK << _BITS * place)

    # -- splits and merges --------------------------------------------------------------------------------------

    def split(self, upper: Node, node: Node) -> None:
        """The upper half was cut off a node, which still has the names of both."""
        if node.block_keys is None or node.stored is None or node.seen is None:
            return
        n = self.num_blocks(upper)
        upper.block_keys, node.block_keys = node.block_keys[:n], node.block_keys[n:]
        upper.stored, node.stored = node.stored[:n].copy(), node.stored[n:].copy()
        upper.seen, node.seen = node.seen[:n].copy(), node.seen[n:].copy()

    @staticmethod
    def join(chain: Sequence[Node]) -> None:
        """The last node of a chain takes in the others; all have names, or none."""
        node = chain[-1]
        if node.block_keys is not None:
            node.block_keys = np.concatenate([n.block_keys for n in chain])  # type: ignore[misc]
            node.stored = np.concatenate([n.stored for n in chain])  # type: ignore[misc]
            node.seen = np.concatenate([n.seen for n in chain])  # type: ignore[misc]

    def check(self, node: Node) -> None:
        if node.block_keys is not None:
            assert node.stored is not None and len(node.block_keys) == len(node.stored) == self.num_blocks(node)
            assert node.seen is not None and len(node.seen) == len(node.stored)
