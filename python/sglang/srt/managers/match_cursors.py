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
from sglang.srt.mem_cache.node import MatchResult, Node
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
        loads, from_peers = self._loads(match)
        windows = self._tree.windows
        on_device = windows.on_device(match).total_len if windows.num_tokens else match.device_len
        found = (*match.path, *match.beyond)
        depends: list[Hashable] = [node.id for node in found]
        # Of the last of `beyond` it is not known whether it is whole; then the match may depend on less.
        end = found[-1] if found else None
        pos = end.end if match.beyond and end is not None else match.total_len
        is_whole = end is None or match.beyond or match.last_len == len(end.key)
        if is_whole and pos + self._tree.page_size <= len(tokens):
            page = self._tree.page_key(tokens, pos)
            depends.append((namespace if end is None else end.id, page))
            above = self._tree.roots.get(namespace) if end is None else end
            if above is not None and page in above.children:
                depends.append(above.children[page].id)  # a hole, or on its way to another tier
        loading = dict.fromkeys(t for node in match.path if (t := node.tickets[Tier.DEVICE]) is not None)
        candidate = Candidate(
            num_tokens - match.total_len,
            tuple(loads),
            match.total_len,
            tuple(loading),
            from_peers,
            on_device=on_device if on_device < match.device_len else None,
            awaits_load=match.awaits_load,
        )
        return candidate, tuple(depends)

    def _loads(self, match: MatchResult) -> tuple[list[tuple[int, int]], int]:
        """What is to be loaded from the host, as in `Candidate`, and how many tokens from peers."""
        loads, from_peers = [], match.from_peers
        for node in match.to_complete:
            if node.tickets[Tier.DEVICE] is not None:
                continue  # it is awaited first
            seen = min(node.end, match.total_len) - max(node.start, self._tree.windows.first_seen(match.total_len))
            if self._tree.source_of(node) == Tier.PEER:
                from_peers += seen
            else:
                loads.append((node.id, seen))
        for node in match.path:
            if node.frames[Tier.DEVICE] is None and self._tree.source_of(node) != Tier.PEER:
                loads.append((node.id, min(len(node.key), match.total_len - node.start)))
        return loads, from_peers

    def _changed(self, node: Node) -> None:
        self._forget_all(node.id)

    def _grown(self, parent: Hashable, page: int | bytes) -> None:
        self._forget_all((parent, page))

    def _forget_all(self, what: Hashable) -> None:
        for rid in list(self._dependants.get(what, ())):
            self.forget(rid)
