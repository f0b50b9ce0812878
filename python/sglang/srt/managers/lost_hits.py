"""`LostHits`: why each prompt token that is computed was not found in the cache.

Owns the counts by reason. Reads the tree and the history of blocks, and changes neither. Every request is counted
once, at its first start; the reasons add up to the tokens that it computes.

    tokens of a prompt    | found | matched, and computed | not matched          | tail | log-probabilities | last |
    reason                |   -   | recomputed            | by tree and history  |      ...
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.block_history import FORGOTTEN, BlockHistory, Left
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import is_private
from sglang.srt.mem_cache.node import Node, is_nowhere_whole, is_ready
from sglang.srt.mem_cache.radix import common_len
from sglang.srt.mem_cache.transfer import FRAME_TIERS

# Reason -> what it means; the order is that of the live page.
REASONS = {
    "never_cached": "no request since the start had them, and storage was not seen to have them",
    "evicted_device": "the device gave them up, and no other tier had them",
    "evicted_peer": "peers gave them up, and no other tier had them",
    "evicted_host": "the host gave them up, and no other tier had them",
    "behind_hole": "they are in memory, behind tokens that are not",
    "in_transfer": "they were on their way from one tier to another",
    "storage_missing": "storage had them once, and lacks them",
    "storage_failed": "storage failed, or they came damaged or not at all",
    "storage_timeout": "storage took too long",
    "storage_not_awaited": "storage was not asked, or not waited for",
    "storage_off": "storage hangs or fails, and is left alone",
    "no_room": "the host had no room to fetch them",
    "recomputed": "computing was expected to be faster than loading or fetching",
    "slab_lost": "a peer took its memory back, or does not answer",
    "failed": "a transfer or a launch failed",
    "flushed": "the cache was flushed",
    "erased": "an administrator erased what was cached of the cache_salt",
    "distrusted": "the canary found cached KV that differs from computed KV",
    "switched_off": "an administrator turned a tier off",
    "bypassed": "the request does not read the cache, or the server has none",
    "forgotten": "they left memory too long ago to know why",
    "page_tail": "they fill no whole page",
    "logprobs": "log-probabilities of the prompt were asked for",
    "last_token": "the last token, which is always computed",
    "restarted": "in replies only: found at the first start, and gone when the request started again",
}


@dataclass(frozen=True)
class StorageOutcome:
    """What a request that starts got from storage."""

    # Why it lacks what storage has; empty if nothing went wrong.
    reason: str = ""
    # Storage is known to have the prompt up to that token.
    stored_end: int = 0
    # Tokens from there on were not worth fetching.
    cut_from: int = 1 << 62


@dataclass(frozen=True)
class Lookup:
    """What a starting request looked for. tokens: int32, those that the cache may serve. matched: how many of them
    the tree had for it."""

    namespace: str
    tokens: np.ndarray
    matched: int
    outcome: StorageOutcome


class LostHits:
    def __init__(self, tree: HiRadixTree, page_size: int) -> None:
        self.history = BlockHistory(page_size)
        # Tokens by reason.
        self.counts: Counter[str] = Counter()
        self._tree = tree
        tree.lost = self.history.note

    def explain_bypass(self, num_prompt: int) -> dict[str, int]:
        """Of a request that does not read the cache."""
        self.counts["bypassed"] += num_prompt
        return {"bypassed": num_prompt}

    def explain(self, lookup: Lookup, num_prompt: int, found: int) -> dict[str, int]:
        """Reason -> tokens, of a prompt of num_prompt tokens of which `found` are not computed."""
        reasons = self._not_matched(lookup)
        reasons["recomputed"] += lookup.matched - found
        reasons["logprobs"] += num_prompt - 1 - len(lookup.tokens)
        reasons["last_token"] += 1
        self.counts += reasons
        return {reason: n for reason, n in reasons.items() if n}

    def _not_matched(self, lookup: Lookup) -> Counter[str]:
        page = self._tree.page_size
        end = len(lookup.tokens) // page * page
        reasons: Counter[str] = Counter()
        if end < len(lookup.tokens):
            reasons["page_tail"] += len(lookup.tokens) - end
        pos, reason = lookup.matched, "switched_off"
        for node, num_tokens in self._beyond(lookup, end):
            if is_nowhere_whole(node):
                self._by_history(lookup, pos, pos + num_tokens, reasons, was_there=True)
                reason = "behind_hole"
            else:
                # What is behind has the same reason.
                reason = reason if any(is_ready(node, tier) for tier in FRAME_TIERS) else "in_transfer"
                reasons[reason] += num_tokens
            pos += num_tokens
        self._by_history(lookup, pos, end, reasons)
        return reasons

    def _beyond(self, lookup: Lookup, end: int) -> list[tuple[Node, int]]:
        """Nodes of the tree that continue the match, and how many tokens of each belong to the prompt."""
        if lookup.matched >= end:
            return []
        tokens, page = lookup.tokens, self._tree.page_size
        match = self._tree.match(lookup.namespace, tokens[:end])
        node, pos = self._tree.next_unmatched(match, tokens), match.total_len
        found = []
        while node is not None and pos < end:
            num_tokens = common_len(node.key, tokens, pos, end, page)
            found.append((node, num_tokens))
            pos += num_tokens
            if num_tokens < len(node.key) or pos >= end:
                break
            node = node.children.get(self._tree.page_key(tokens, pos))
        return found

    def _by_history(
        self, lookup: Lookup, start: int, end: int, reasons: Counter[str], was_there: bool = False
    ) -> None:
        """Of tokens [start, end), which no tier of memory has. A tail that the history does not know counts as the
        block before it, unless memory has that one. was_there: they were cached."""
        if end <= start:
            return
        size, tokens = self.history.block_tokens, lookup.tokens[:end]
        first, tail_start = start // size, end // size * size
        default = last = FORGOTTEN if was_there else None
        for place, left in enumerate(self.history.find(lookup.namespace, tokens[first * size :], first), first):
            last = left or default
            self._add(reasons, lookup, (max(place * size, start), (place + 1) * size), last)
        if (start := max(tail_start, start)) < end:
            num_known, left = self.history.find_tail(lookup.namespace, tokens)
            if not num_known:
                num_known, left = end, last
            known_end = min(max(tail_start + num_known, start), end)
            self._add(reasons, lookup, (start, known_end), left)
            self._add(reasons, lookup, (known_end, end), default)

    def _add(self, reasons: Counter[str], lookup: Lookup, part: tuple[int, int], left: Left | None) -> None:
        """Count tokens [start, end) = part, which left memory like that; None: they never were there. The reason may
        differ in front of and behind what storage has, or can have."""
        (start, end), outcome, names = part, lookup.outcome, self._tree.names.keys
        storable_end = len(lookup.tokens) // names.block_tokens * names.block_tokens if names is not None else 0
        for bound in sorted((end, outcome.stored_end, outcome.cut_from, storable_end)):
            if start < bound <= end:
                reasons[_reason(left, bound, lookup, bound <= storable_end)] += bound - start
                start = bound


def _reason(left: Left | None, end: int, lookup: Lookup, is_storable: bool) -> str:
    """Of tokens that end at token `end` of their prompt. left: how they left memory, None if they never were there.
    is_storable: whether they fill blocks of storage."""
    outcome = lookup.outcome
    if end <= outcome.stored_end:
        return outcome.reason or ("recomputed" if end > outcome.cut_from else "storage_failed")
    if left is None:
        # Memory keeps nothing of a private namespace: what storage did not tell may well be there.
        return (is_storable and is_private(lookup.namespace) and outcome.reason) or "never_cached"
    if left.cause == "erased":
        return left.cause  # from storage too
    return outcome.reason or "storage_missing" if left.is_stored and is_storable else left.cause
