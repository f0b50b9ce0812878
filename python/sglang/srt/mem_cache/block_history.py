"""`BlockHistory`: why blocks of prompts left memory, for those that are asked for again.

Owns a bounded table of blocks and a filter of those that the table has forgotten. Reads the tree's nodes and changes
none. A block is known by a hash of its namespace, its place in the prompt and its own tokens; what comes before is
left out, so two prompts may be taken for each other. That costs an exact count and nothing else. A *tail*, the tokens
of a node behind its last whole block, is known by the block before it and its own first page.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import numpy as np

from sglang.srt.mem_cache.namespaces import is_private
from sglang.srt.mem_cache.node import Node, root_of
from sglang.srt.mem_cache.radix import common_len
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier

# Tokens per block, rounded up to whole pages.
HISTORY_TOKENS = 64
# Blocks that are remembered: some four million tokens.
SIZE = 1 << 16
# Tails that are remembered.
NUM_TAILS = 1 << 13
# Places of half a filter, and the blocks that it takes, two places each. At most one place in eight is taken, so that
# of blocks that were never seen one in thirty counts as forgotten.
_FILTER_SIZE = 1 << 21
_FILTER_BLOCKS = 1 << 17
_PLACE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class Left(NamedTuple):
    """How a block left memory."""

    cause: str
    # Whether storage was believed to have it.
    is_stored: bool


class _Tail(NamedTuple):
    """Of a node, what is behind its last whole block."""

    num_tokens: int
    # int32; None once a tenant was erased.
    tokens: np.ndarray | None
    left: Left


FORGOTTEN = Left("forgotten", False)


class _Forgotten:
    """A Bloom filter in two halves: the newer one takes what is forgotten, and when it is full, it becomes the older
    one, which is dropped. So it holds the last `_FILTER_BLOCKS` blocks, and up to as many before them."""

    def __init__(self) -> None:
        self._older, self._newer = (np.zeros(_FILTER_SIZE, np.bool_) for _ in range(2))
        self._num_newer = 0

    def add(self, digest: int) -> None:
        if self._num_newer == _FILTER_BLOCKS:
            self._older, self._newer = self._newer, np.zeros(_FILTER_SIZE, np.bool_)
            self._num_newer = 0
        for place in _places(digest):
            self._newer[place] = True
        self._num_newer += 1

    def __contains__(self, digest: int) -> bool:
        places = _places(digest)
        return any(all(half[place] for place in places) for half in (self._newer, self._older))


def _places(digest: int) -> tuple[int, int]:
    return digest % _FILTER_SIZE, (digest >> 32) % _FILTER_SIZE


class BlockHistory:
    def __init__(self, page_size: int, size: int = SIZE) -> None:
        self.block_tokens = -(-HISTORY_TOKENS // page_size) * page_size
        self._size = size
        self._page_size = page_size
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._left: OrderedDict[int, Left] = OrderedDict()
        self._forgotten = _Forgotten()
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
        if is_private(namespace := root_of(node).namespace):
            return
        # What comes before a tail is a part of its name.
        begin = min(first, max(last - 1, 0))
        parts, lacking, above = [node.key], node.start - begin * size, node.parent
        while lacking > 0:
            assert above is not None
            part = above.key[-lacking:]
            parts.append(part)
            lacking, above = lacking - len(part), above.parent
        tokens = np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]
        left = Left(self._cause or f"evicted_{TIER_NAMES[tier]}", node.stored is not None and bool(node.stored.all()))
        digests = self._digests(namespace, tokens, begin)
        noted, stored = digests[first - begin :], left._replace(is_stored=True)
        # Storage may have what it had once: computed again while storage was left alone, it was not stored again.
        were_stored = [digest for digest in noted if self._left.get(digest, left).is_stored]
        self._left.update(zip(noted, repeat(left)))
        self._left.update(zip(were_stored, repeat(stored)))
        if node.end % size:
            self._note_tail(self._tail_key(namespace, tokens, digests), tokens[len(digests) * size :], left)
        while len(self._left) > self._size:
            self._forgotten.add(self._left.popitem(last=False)[0])

    def find(self, namespace: str, tokens: np.ndarray, first: int) -> list[Left | None]:
        """Of each whole block of tokens, int32, of which the first is block `first` of a prompt. None: it was never
        in memory, or is still there."""
        found: list[Left | None] = []
        for digest in self._digests(namespace, tokens, first):
            left = self._left.get(digest)
            found.append(left or (FORGOTTEN if digest in self._forgotten else None))
        return found

    def find_tail(self, namespace: str, tokens: np.ndarray) -> tuple[int, Left]:
        """How many tokens of a prompt's tail were in memory, and how they left it. tokens: int32, from the beginning
        of the prompt; their last block is not whole."""
        size = self.block_tokens
        last = len(tokens) // size
        digests = self._digests(namespace, tokens[max(last - 1, 0) * size :], max(last - 1, 0))
        key, tail = self._tail_key(namespace, tokens, digests), tokens[last * size :]
        if (found := self._tails.get(key)) is not None:
            if found.tokens is None:
                return min(found.num_tokens, len(tail)), found.left
            return common_len(found.tokens, tail, 0, len(tail), self._page_size), found.left
        return len(tail) if key in self._forgotten else 0, FORGOTTEN

    def forget_tokens(self) -> None:
        """Keep no tokens of any prompt: to erase one tenant's. How tails left memory is known by their first page and
        their length from then on."""
        self._tails = OrderedDict((key, tail._replace(tokens=None)) for key, tail in self._tails.items())

    def _note_tail(self, key: int, tokens: np.ndarray, left: Left) -> None:
        tail, before = _Tail(len(tokens), tokens.copy(), left), self._tails.pop(key, None)
        if before is not None and before.tokens is not None and len(before.tokens) > len(tokens):
            is_below = np.array_equal(before.tokens[: len(tokens)], tokens)
            # A node below, which has left before this one.
            tail = before if is_below else tail
        self._tails[key] = tail
        if len(self._tails) > NUM_TAILS:
            self._forgotten.add(self._tails.popitem(last=False)[0])

    def _tail_key(self, namespace: str, tokens: np.ndarray, digests: list[int]) -> int:
        """tokens: those of a tail are behind its last whole block. digests: of whole blocks up to the tail."""
        begin = len(tokens) // self.block_tokens * self.block_tokens
        page = tokens[begin : begin + self._page_size].astype(np.uint64)
        before = digests[-1] if digests else int.from_bytes(_seed(namespace), "little")
        return (before * int(_MIX) + int(page @ self._factors[: len(page)])) % (1 << 64)

    def _digests(self, namespace: str, tokens: np.ndarray, first: int) -> list[int]:
        num_blocks = len(tokens) // self.block_tokens
        blocks = tokens[: num_blocks * self.block_tokens].reshape(num_blocks, self.block_tokens)
        places = np.arange(first, first + num_blocks, dtype=np.uint64) * _PLACE
        digests = blocks.astype(np.uint64) @ self._factors + places + np.frombuffer(_seed(namespace), "<u8")
        digests = (digests ^ (digests >> np.uint64(29))) * _MIX
        return [int(digest) for digest in (digests ^ (digests >> np.uint64(32))).tolist()]


def _seed(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=8).digest()
