"""How much a cache of any size would hit: Mattson's stack distances of the blocks of prompts. Pure; numpy only.

A request looks up the blocks of its prompt, then leaves those and the blocks of its answer in the cache. Blocks are
known by everything up to their end, so that a hit on one means hits on all before it. A cache that evicts the least
recently used block, ends of prompts first, holds the top of one stack at any size (Mattson et al., 1970):

    request      A B C      looks up A, B, C and moves them to the top, ends first
    stack        A B C | D E F | ...
    distance     of E: the tokens above E, and E's own. A cache that holds as many tokens hits E.

So distances of all lookups give the hits of every size at once. Sampled blocks (SHARDS, Waldspurger et al., FAST'15)
have distances smaller by the rate, which scales them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Uses that are compared with each other at once: 1 MiB of comparisons.
_CHUNK = 1024


class ReferenceLog:
    """Collects the uses of blocks, in the order of requests. rate: the share of blocks that it is told of."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        # Tokens of all prompts, and requests.
        self.prompt_tokens = 0.0
        self.longest_prompt = 0.0
        self.num_requests = 0
        # Tokens of prompts in blocks, sampled or not.
        self.block_tokens = 0.0
        self._blocks: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._deeper: list[np.ndarray] = []
        self._is_lookup: list[np.ndarray] = []

    def add_request(self, prompt_tokens: float, block_tokens: float) -> None:
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.longest_prompt = max(self.longest_prompt, prompt_tokens)
        self.block_tokens += block_tokens

    def use(self, blocks: Sequence[int] | np.ndarray, tokens: Sequence[float], num_looked_up: int) -> None:
        """One path of blocks, from its beginning. The first num_looked_up are looked up; then all are cached."""
        ids, sizes = np.asarray(blocks, np.int64), np.asarray(tokens, np.float64)
        # What is deeper is used first, so that the end of a path leaves a cache first.
        self._blocks.append(ids[::-1])
        self._tokens.append(sizes[::-1])
        self._deeper.append((sizes.sum() - np.cumsum(sizes))[::-1])
        self._is_lookup.append(np.arange(len(ids))[::-1] < num_looked_up)

    def uses(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """(blocks, their tokens, how many were looked up) of each use, from the beginning of its path."""
        for ids, sizes, is_lookup in zip(self._blocks, self._tokens, self._is_lookup):
            yield ids[::-1], sizes[::-1], int(np.count_nonzero(is_lookup))

    def curve(self) -> HitCurve:
        def joined(parts: list[np.ndarray], kind: type) -> np.ndarray:
            return np.concatenate(parts) if parts else np.empty(0, kind)

        blocks, tokens = joined(self._blocks, np.int64), joined(self._tokens, np.float64)
        is_lookup, deeper = joined(self._is_lookup, np.bool_), joined(self._deeper, np.float64)
        before = _previous_use(blocks)
        is_repeat = (before >= 0) & is_lookup
        # Deeper blocks of the same path were used a moment ago, and were below this one before.
        above = (_tokens_between(before, tokens) - deeper)[is_repeat]
        hits = tokens[is_repeat]
        sizes = above / self.rate + hits
        order = np.argsort(sizes, kind="stable")
        sizes, found = sizes[order], np.cumsum(hits[order]) / self.rate
        # The sample has too many or too few lookups, mostly of the hottest blocks (SHARDS-adj).
        surplus = self.block_tokens - float(tokens[is_lookup].sum()) / self.rate if self.rate < 1 else 0.0
        distinct = float(tokens[before < 0].sum()) / self.rate
        return HitCurve(self.prompt_tokens, self.longest_prompt, distinct, sizes, np.maximum(found + surplus, 0.0))


@dataclass(frozen=True)
class HitCurve:
    prompt_tokens: float
    # Tokens of one.
    longest_prompt: float
    # Tokens of all blocks that were ever used: what an endless cache holds.
    distinct_tokens: float
    # Ascending (n,): a cache of sizes[i] tokens hits found[i] tokens.
    sizes: np.ndarray
    found: np.ndarray

    def hits(self, size_tokens: float) -> float:
        """Prompt tokens that a cache of this size finds."""
        place = int(np.searchsorted(self.sizes, size_tokens * (1 + 1e-12), side="right"))
        return float(self.found[place - 1]) if place else 0.0

    @property
    def most(self) -> float:
        """Of an endless cache."""
        return float(self.found[-1]) if len(self.found) else 0.0


def _previous_use(blocks: np.ndarray) -> np.ndarray:
    """(n,) int64: where the same block was used last; -1 for a first use."""
    order = np.argsort(blocks, kind="stable")
    before = np.full(len(blocks), -1, np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _tokens_between(before: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(n,): tokens of the distinct blocks that were used since the last use of the same block."""
    upto = np.concatenate(([0.0], np.cumsum(tokens)))
    at = np.arange(len(before))
    return np.where(before < 0, 0.0, upto[at] - upto[before + 1] - _repeated_since(before, tokens))


def _repeated_since(before: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(n,): tokens of the earlier uses whose own last use is later than `before`: those count a block once more."""
    found = np.zeros(len(before))
    earlier, weights = np.empty(0, np.int64), np.empty(0)
    for start in range(0, len(before), _CHUNK):
        part, own = before[start : start + _CHUNK], tokens[start : start + _CHUNK]
        total = np.concatenate((np.cumsum(weights[::-1])[::-1], [0.0]))
        later = np.tril(part[None, :] > part[:, None], -1)
        found[start : start + _CHUNK] = total[np.searchsorted(earlier, part, side="right")] + later @ own
        # First uses repeat nothing.
        keep = part >= 0
        order = np.argsort(joined := np.concatenate((earlier, part[keep])), kind="stable")
        earlier, weights = joined[order], np.concatenate((weights, own[keep]))[order]
    return found
