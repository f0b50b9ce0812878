"""`MatchCursors`: the tokens that each queued request has to load and to compute, kept until the tree changes on its
path.

Matching 2,000 queued prompts again for every batch would take longer than the batch. Owns the result of each
request's last match, and the nodes on which it depends. The tree reports every change (`HiRadixTree.watch`).

A match depends on the nodes that it goes through, and on the absence of a child that would continue it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from sglang.srt.managers.schedule_policy import Candidate
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import Tier


class MatchCursors:
    """rids name the requests. A request that waits no more must be forgotten. candidates: the results by rid, to be
    read only."""

    def __init__(self, tree: HiRadixTree) -> None:
        self.candidates: dict[str, Candidate] = {}
        self._tree = tree
        # The dependencies of each match: a node (its id), or that a node (for a root: its namespace) has no child for
        # a page.
        self._depends: dict[str, tuple[Hashable, ...]] = {}
        self._dependants: dict[Hashable, dict[str, None]] = {}
        tree.watch(self._changed, self._grown)

    def find(self, rid: str, namespace: str, tokens: np.ndarray, num_tokens: int) -> Candidate:
        """Match a request of num_tokens tokens in all, and remember the result. tokens: int32, the ones that a cache
        may serve."""
        self.forget(rid)
        candidate, depends = self._match(namespace, tokens, num_tokens)
        self.candidates[rid], self._depends[rid] = candidate, depends
        for each in depends:
            self._dependants.setdefault(each, {})[rid] = None
        return candidate

    def forget(self, rid: str) -> None:
        if self.candidates.pop(rid, None) is None:
            return
        for each in self._depends.pop(rid):
            dependants = self._dependants[each]
            del dependants[rid]
            if not dependants:
                del self._dependants[each]

    def check_invariants(self, waiting: Mapping[str, tuple[str, np.ndarray, int]]) -> None:
        """waiting: rid -> the arguments of `find`. Every remembered result must equal that of a fresh match."""
        for each, rids in self._dependants.items():
            assert rids and all(each in self._depends[rid] for rid in rids)
        for rid, candidate in self.candidates.items():
            assert candidate == self._match(*waiting[rid])[0], f"{rid}: {candidate} is stale"

    def _match(self, namespace: str, tokens: np.ndarray, num_tokens: int) -> tuple[Candidate, tuple[Hashable, ...]]:
        """The result of the match, and its dependencies."""
        match = self._tree.match(namespace, tokens)
        end = match.path[-1] if match.path else None
        loads = [
            (n.id, len(n.key))
            for n in match.path
            if n.frames[Tier.DEVICE] is None and self._tree.source_of(n) != Tier.PEER
        ]
        if loads and end is not None and loads[-1][0] == end.id:
            loads[-1] = (end.id, match.last_len)
        depends: list[Hashable] = [node.id for node in match.path]
        is_whole = end is None or match.last_len == len(end.key)
        if is_whole and match.total_len + self._tree.page_size <= len(tokens):
            page = self._tree.page_key(tokens, match.total_len)
            depends.append((namespace if end is None else end.id, page))
            above = self._tree.roots.get(namespace) if end is None else end
            if above is not None and page in above.children:
                depends.append(above.children[page].id)  # a hole, or on its way to another tier
        loading = dict.fromkeys(t for node in match.path if (t := node.tickets[Tier.DEVICE]) is not None)
        candidate = Candidate(
            num_tokens - match.total_len, tuple(loads), match.total_len, tuple(loading), match.from_peers
        )
        return candidate, tuple(depends)

    def _changed(self, node: Node) -> None:
        self._forget_all(node.id)

    def _grown(self, parent: Hashable, page: int | bytes) -> None:
        self._forget_all((parent, page))

    def _forget_all(self, what: Hashable) -> None:
        for rid in list(self._dependants.get(what, ())):
            self.forget(rid)
