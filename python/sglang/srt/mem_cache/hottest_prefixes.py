"""`hottest`: the prefixes that the most requests have used; `HottestPrefixes`: the public account of them.

Reads the tree beside the steps of the scheduler, and changes nothing. No decision depends on it. Neither tokens nor
namespaces leave it, only hashes. Their key is a secret that this process draws and never shows. A reader of the state
of a server must not learn what other users sent, nor check a guess. Storage's own secret is not used here, because
its owner may have chosen a weak one.

A prefix ends where a node ends. Where about the same requests used a node and its parent, only the longer of the two
is listed:

    [system prompt: 90] --- [rules: 88] --- [Ada's question: 3]      two prefixes: rules (88), Ada's question (3)
                                        \\-- [Ben's question: 1]      and one more (1)
"""

from __future__ import annotations

import hashlib
import heapq
import math
import secrets
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import is_private
from sglang.srt.mem_cache.node import Node, Root
from sglang.srt.mem_cache.prefix_labels import PrefixLabels
from sglang.srt.mem_cache.transfer import FRAME_TIERS, TIER_NAMES
from sglang.srt.utils.time_units import LaunchSeq

# A node with less than this part of the hits at the top of its chain is a prefix of its own.
_SAME = 0.9
# The most nodes that one call looks at, and the most children of one node. They take a few milliseconds, however
# large the tree is.
_MAX_LOOKS = 4096
_MAX_CHILDREN = 1024
# Prefixes with fewer hits than those that are shown at least: some are longer, and saved more tokens. After so many
# looks for them the search ends.
_MORE_PREFIXES = 60
_MORE_LOOKS = 128


def hottest(tree: HiRadixTree, num_prefixes: int, max_looks: int = _MAX_LOOKS, num_more: int = 0) -> list[Node]:
    """The ends of the num_prefixes prefixes with the most hits, in descending order; and up to num_more of those that
    follow, if they are found soon.

    The search goes best first from the roots. A request that uses a node uses its parent, so that nothing below a
    node has more hits, and few nodes are expanded. At most max_looks nodes are looked at, and the oldest
    _MAX_CHILDREN children of each. Nodes beyond these limits are left out, and a node that could not be expanded ends
    its prefix. Private namespaces are left out, because only one request can ever use their prefixes.
    """
    # (-hits, order of arrival, node, hits at the top of its chain)
    queue: list[tuple[int, int, Node, int]] = []
    found: list[tuple[int, int, Node]] = []
    # Hits of the best nodes found, the least first.
    best: list[int] = []
    looks, most, last_look = 0, num_prefixes + num_more, math.inf

    def put(node: Node, top: int) -> None:
        heapq.heappush(queue, (-node.hits, looks, node, top))

    shared = (root for name, root in tree.roots.items() if not is_private(name))
    for root in islice(shared, _MAX_CHILDREN):
        for child in islice(root.children.values(), max(0, min(_MAX_CHILDREN, max_looks - looks))):
            looks += 1
            put(child, child.hits)
    while queue and looks < last_look and (len(best) < most or -queue[0][0] > best[0]):
        _, order, node, top = heapq.heappop(queue)
        goes_on = False
        for child in islice(node.children.values(), max(0, min(_MAX_CHILDREN, max_looks - looks))):
            looks += 1
            same = child.hits >= _SAME * top
            goes_on = goes_on or same
            if len(best) < most or child.hits > best[0]:
                put(child, top if same else child.hits)
        if not goes_on:
            found.append((-node.hits, order, node))
            heapq.heappush(best, node.hits)
            if len(best) > most:
                heapq.heappop(best)
            if num_more and len(best) == num_prefixes:
                last_look = looks + _MORE_LOOKS
    return [node for _, _, node in sorted(found)[:most]]


def saved_tokens(node: Node) -> int:
    """What the requests after the first did not compute of the prefix."""
    return max(0, node.hits - 1) * node.end


class HottestPrefixes:
    """Owns the secret, and the hashes that were computed with it."""

    def __init__(self, tree: HiRadixTree, num_prefixes: int = 20, labels: Sequence[PrefixLabels] = ()) -> None:
        self.tree = tree
        self.num_prefixes = num_prefixes
        self._secret = secrets.token_bytes(32)
        self._own_names = BlockKeys(self._secret, 64)
        self._names = self._own_names
        # Hash by node id. A node keeps its end, and therefore its prefix, as long as it exists.
        self._given: dict[int, str] = {}
        self._labels = labels
        # Likewise the labels, as long as none changes.
        self._labelled: dict[int, tuple[int, str | None]] = {}
        self._versions: list[int] = []

    def table(self, launch: LaunchSeq) -> list[dict[str, Any]]:
        """launch: the next one. docs/reference/state.md explains the fields under /hicache/state."""
        names = self.tree.names.keys or self._own_names
        if names is not self._names:
            self._names, self._given = names, {}
        nodes = hottest(self.tree, self.num_prefixes, num_more=_MORE_PREFIXES)
        nodes = sorted(nodes, key=saved_tokens, reverse=True)[: self.num_prefixes]
        self._find_labels(nodes)
        self._given = {node.id: self._given.get(node.id) or self._hash(self._key_of(node)) for node in nodes}
        return [self._entry(node, launch) for node in nodes]

    def _entry(self, node: Node, launch: LaunchSeq) -> dict[str, Any]:
        names, storage = self._names, self.tree.names.keys is not None
        tokens = {TIER_NAMES[tier]: 0 for tier in FRAME_TIERS} | ({"storage": 0} if storage else {})
        last_access, step = node.last_access, node
        while step.parent is not None:
            for tier in FRAME_TIERS:
                if step.frames[tier] is not None and step.tickets[tier] is None:
                    tokens[TIER_NAMES[tier]] += len(step.key)
            if storage and step.stored is not None:
                tokens["storage"] += int(np.count_nonzero(step.stored)) * names.block_tokens
            step = step.parent
        assert isinstance(step, Root)
        num_blocks = node.end // names.block_tokens
        return {
            "hash": self._given[node.id],
            # The namespace without a salt is no secret.
            "label": self._labelled[node.id][1],
            "label_tokens": self._labelled[node.id][0],
            "namespace": self._hash(names.root(step.namespace)) if step.namespace else None,
            "tokens": node.end,
            "hits": node.hits,
            "saved_tokens": saved_tokens(node),
            "tokens_on": tokens,
            "stored": 0 < num_blocks * names.block_tokens == tokens["storage"] if storage else None,
            "locks": node.lock,
            "idle_launches": 0 if node.lock else max(0, launch - last_access),
        }

    def _find_labels(self, nodes: list[Node]) -> None:
        versions = [labels.version for labels in self._labels]
        known = self._labelled if versions == self._versions else {}
        self._versions = versions
        self._labelled = {node.id: known[node.id] if node.id in known else self._label_of(node) for node in nodes}

    def _label_of(self, node: Node) -> tuple[int, str | None]:
        """The longest label that the prefix begins with, see `PrefixLabels.find`."""
        pieces, step = [], node
        while step.parent is not None:
            pieces.append(step.key)
            step = step.parent
        assert isinstance(step, Root)
        found = [labels.find(step.namespace, pieces[::-1]) for labels in self._labels]
        return max((each for each in found if each is not None), default=(0, None))

    def _hash(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self._secret, digest_size=16).hexdigest()

    def _key_of(self, node: Node) -> bytes:
        """The key of the node's last block. A part after the last block border counts as a block of its own."""
        names, parts, step = self._names, [], node
        last = b""
        while not last and step.parent is not None:
            keys = step.block_keys
            if keys is not None and len(keys):
                last = keys[-1].tobytes()
                parts.append(step.key[step.end // names.block_tokens * names.block_tokens - step.start :])
            else:
                parts.append(step.key)
                step = step.parent
        if not last:
            assert isinstance(step, Root)
            last = names.root(step.namespace)
        rest = np.concatenate(parts[::-1])
        whole = names.chain(last, rest)
        if len(whole):
            last, rest = whole[-1].tobytes(), rest[len(whole) * names.block_tokens :]
        if len(rest):
            last = BlockKeys(names.secret, len(rest)).chain(last, rest)[-1].tobytes()
        return last
