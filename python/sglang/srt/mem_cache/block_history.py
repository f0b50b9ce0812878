"""`BlockHistory`: why blocks of prompts left memory, for those that are asked for again.

Owns a bounded table of blocks and a filter of those that the table has forgotten. Reads the tree's nodes and changes
none. A block is known by a hash of its namespace, its place in the prompt and its own tokens; what comes before is
left out, so two prompts may be taken for each other. That costs an exact count and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import numpy as np

from sglang.srt.mem_cache.block_keys import is_private
from sglang.srt.mem_cache.node import Node, root_of
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier

# Tokens per block, rounded up to whole pages.
BLOCK_TOKENS = 64
# Blocks that are remembered: some four million tokens.
SIZE = 1 << 16
_FILTER_SIZE = 1 << 20
_PLACE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class Left(NamedTuple):
    """How a block left memory."""

    cause: str
    # Whether storage was believed to have it.
    is_stored: bool


FORGOTTEN = Left("forgotten", False)


class BlockHistory:
    def __init__(self, page_size: int, size: int = SIZE) -> None:
        self.block_tokens = -(-BLOCK_TOKENS // page_size) * page_size
        self._size = size
        self._left: OrderedDict[int, Left] = OrderedDict()
        self._is_forgotten = np.zeros(_FILTER_SIZE, np.bool_)
        # Why nodes leave memory now; empty: they are evicted.
        self._cause = ""
        # The same in every process: ranks have to agree.
        self._factors = np.random.default_rng(0).integers(1, 1 << 63, self.block_tokens, np.uint64) | np.uint64(1)

    def __len__(self) -> int:
        return len(self._left)

    @contextmanager
    def because(self, cause: str) -> Iterator[None]:
        """Nodes that leave memory inside are not evicted."""
        before, self._cause = self._cause, cause
        try:
            yield
        finally:
            self._cause = before

    def note(self, node: Node, tier: Tier) -> None:
        """A node has left memory, with its last copy on a tier. It is still in the tree."""
        size = self.block_tokens
        first, last = node.start // size, node.end // size
        if first == last or is_private(namespace := root_of(node).namespace):
            return
        parts, lacking, above = [node.key[: last * size - node.start]], node.start - first * size, node.parent
        while lacking > 0:
            assert above is not None
            part = above.key[-lacking:]
            parts.append(part)
            lacking, above = lacking - len(part), above.parent
        tokens = np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]
        left = Left(self._cause or f"evicted_{TIER_NAMES[tier]}", node.stored is not None and bool(node.stored.all()))
        self._left.update(zip(self._digests(namespace, tokens, first), repeat(left)))
        while len(self._left) > self._size:
            digest, _ = self._left.popitem(last=False)
            self._is_forgotten[digest % _FILTER_SIZE] = True

    def find(self, namespace: str, tokens: np.ndarray, first: int) -> list[Left | None]:
        """Of each whole block of tokens, int32, of which the first is block `first` of a prompt. None: it was never
        in memory, or is still there."""
        found: list[Left | None] = []
        for digest in self._digests(namespace, tokens, first):
            left = self._left.get(digest)
            found.append(left or (FORGOTTEN if self._is_forgotten[digest % _FILTER_SIZE] else None))
        return found

    def _digests(self, namespace: str, tokens: np.ndarray, first: int) -> list[int]:
        num_blocks = len(tokens) // self.block_tokens
        blocks = tokens[: num_blocks * self.block_tokens].reshape(num_blocks, self.block_tokens)
        seed = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
        places = np.arange(first, first + num_blocks, dtype=np.uint64) * _PLACE
        digests = blocks.astype(np.uint64) @ self._factors + places + np.frombuffer(seed, "<u8")
        digests = (digests ^ (digests >> np.uint64(29))) * _MIX
        return [int(digest) for digest in (digests ^ (digests >> np.uint64(32))).tolist()]
