"""`TransientNodes`: what requests are about to compute, so that a younger one can wait for it (Strata 4.3.1).

Owns a radix tree over the prompts of requests that have not computed them yet, apart from the resident nodes: neither
eviction nor insertion moves a claim. Never reads the resident tree; never decides who waits.

Each request claims its whole prompt, once, on arrival. A node lists all whose prompts go through it, and the deepest
node that two prompts share ends where they part, or where one of them ends:

    root --- [document: A B C] --- [question 1: A]
                               --- [question 2: B C]        B and C ask the same; A shares only the document

A claimant is IN_QUEUE or IN_FLIGHT. A node belongs to its oldest claimant that is in flight, else to its oldest; when
that one goes, the next inherits it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from sglang.srt.mem_cache.radix import PageKey, common_len, page_key_of, put_above


class Claim:
    """A request's claim on its prompt. order: of arrival. node: where it ends; None if it has no whole page."""

    __slots__ = ("in_flight", "namespace", "node", "order", "rid", "tokens")

    def __init__(self, rid: str, order: int, namespace: str, tokens: np.ndarray) -> None:
        self.rid = rid
        self.order = order
        self.namespace = namespace
        self.tokens = tokens
        self.in_flight = False
        self.node: TransientNode | None = None


class TransientNode:
    """Tokens start to end of every prompt that goes through it; `spelt_by` is one of those claims. queued, in_flight:
    the claimants by mark, sorted by order, as (order, claim)."""

    __slots__ = ("children", "end", "in_flight", "parent", "queued", "spelt_by", "start")

    def __init__(self, start: int, end: int, spelt_by: Claim | None, parent: TransientNode | None) -> None:
        self.start = start
        self.end = end
        self.spelt_by = spelt_by
        self.parent = parent
        self.children: dict[PageKey, TransientNode] = {}
        self.queued: list[tuple[int, Claim]] = []
        self.in_flight: list[tuple[int, Claim]] = []

    @property
    def key(self) -> np.ndarray:
        assert self.spelt_by is not None
        return self.spelt_by.tokens[self.start : self.end]

    @property
    def num_claimants(self) -> int:
        return len(self.queued) + len(self.in_flight)


class TransientNodes:
    """tokens_in_queue, tokens_in_flight: of the nodes, by the mark of whom they belong to."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_key = page_key_of(page_size)
        self.tokens_in_queue = 0
        self.tokens_in_flight = 0
        self._claims: dict[str, Claim] = {}
        self._roots: dict[str, TransientNode] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._claims

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, rid: str, order: int, namespace: str, tokens: np.ndarray) -> None:
        """A request has arrived. order: its place in the order of arrival, unique; lower is older. tokens:
        int32, kept by reference; a page that they do not fill is not claimed."""
        assert rid not in self._claims, f"{rid} has claimed its prompt already"
        assert tokens.dtype == np.int32
        claim = self._claims[rid] = Claim(rid, order, namespace, tokens)
        end = len(tokens) - len(tokens) % self.page_size
        if end == 0:
            return
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = TransientNode(0, 0, None, None)
        while node.end < end:
            pos = node.end
            page = self._page_key(tokens, pos)
            child = node.children.get(page)
            if child is None:
                child = node.children[page] = TransientNode(pos, end, claim, node)
                self.tokens_in_queue += end - pos
            else:
                common = common_len(child.key, tokens, pos, end, self.page_size)
                if pos + common < child.end:
                    child = self._split(child, pos + common)
            insort(child.queued, (order, claim))
            node = child
        claim.node = node

    def release(self, rid: str) -> None:
        """It has computed its prompt, was aborted or ended; a no-op for a request without a claim."""
        claim = self._claims.pop(rid, None)
        if claim is None or claim.node is None:
            return
        last: TransientNode | None = None  # the deepest node of its path that stays
        for node in list(_path(claim)):
            self._leave(node, claim)
            if node.num_claimants == 0:
                assert node.parent is not None
                self.tokens_in_queue -= node.end - node.start
                del node.parent.children[self._page_key(claim.tokens, node.start)]
            else:
                last = last or node
                if node.spelt_by is claim:
                    node.spelt_by = (node.queued or node.in_flight)[0][1]
        claim.node = None  # else the two would keep each other, and the prompt
        if last is not None:
            self._merge(last)
        elif not self._roots[claim.namespace].children:
            del self._roots[claim.namespace]  # namespaces come and go with their tenants

    def begin(self, rid: str) -> None:
        """IN_QUEUE -> IN_FLIGHT: it is being computed."""
        claim = self._claims[rid]
        if not claim.in_flight:
            self._mark_in_flight(claim)

    def claimed_by_older(self, rid: str, stalled: Callable[[str], bool]) -> int:
        """Up to which token of its own prompt the request would do better to wait: the longest prefix in whole pages
        that it shares with a request in flight, or with an older one in the queue that is not stalled. 0 for none.

        stalled: whether a request cannot start, for instance because it waits for storage. So no request in the queue
        waits for a younger one there: the relation has no cycle, and the oldest that can start waits only for
        requests that are computing.
        """
        claim = self._claims[rid]
        for node in _path(claim):
            if len(node.in_flight) > claim.in_flight:  # another request is
                return node.end
            for order, other in node.queued:
                if order >= claim.order:
                    break
                if not stalled(other.rid):
                    return node.end
        return 0

    def check_invariants(self) -> None:
        claimants: dict[int, list[str]] = {}
        for claim in self._claims.values():
            path = list(_path(claim))
            assert (
                sum(node.end - node.start for node in path) == len(claim.tokens) - len(claim.tokens) % self.page_size
            )
            assert not path or path[-1].start == 0
            for node in path:
                claimants.setdefault(id(node), []).append(claim.rid)
                assert np.array_equal(node.key, claim.tokens[node.start : node.end])
        assert len({claim.order for claim in self._claims.values()}) == len(self._claims), "two have the same order"
        tokens = {True: 0, False: 0}
        nodes = list(self._roots.values())
        assert all(root.children for root in nodes)
        while nodes:
            node = nodes.pop()
            for page, child in node.children.items():
                assert child.parent is node and child.start == node.end and self._page_key(child.key, 0) == page
                nodes.append(child)
            if node.parent is None:
                continue
            assert node.start < node.end and (node.end - node.start) % self.page_size == 0
            listed = [claim for _, claim in node.queued + node.in_flight]
            assert sorted(claim.rid for claim in listed) == sorted(claimants.pop(id(node)))
            assert node.spelt_by in listed
            for claims, in_flight in ((node.queued, False), (node.in_flight, True)):
                assert all(claim.in_flight == in_flight and claim.order == order for order, claim in claims)
                assert all(a[0] < b[0] for a, b in pairwise(claims))
            # At most two nodes per claim, whatever requests have come and gone.
            assert len(node.children) > 1 or any(claim.node is node for claim in listed)
            tokens[bool(node.in_flight)] += node.end - node.start
        assert not claimants, "a claim ends outside the tree"
        assert (tokens[False], tokens[True]) == (self.tokens_in_queue, self.tokens_in_flight)

    # -- inside -------------------------------------------------------------------------------------------------

    def _mark_in_flight(self, claim: Claim) -> None:
        claim_at = (claim.order, claim)
        for node in _path(claim):
            self._leave(node, claim)
            if not node.in_flight:
                self._move_tokens(node, 1)
            insort(node.in_flight, claim_at)
        claim.in_flight = True

    def _leave(self, node: TransientNode, claim: Claim) -> None:
        claims = node.in_flight if claim.in_flight else node.queued
        del claims[bisect_left(claims, (claim.order,))]
        if claim.in_flight and not claims:
            self._move_tokens(node, -1)

    def _move_tokens(self, node: TransientNode, direction: int) -> None:
        """From the queue's count to that in flight, or back (-1)."""
        self.tokens_in_flight += direction * (node.end - node.start)
        self.tokens_in_queue -= direction * (node.end - node.start)

    def _split(self, node: TransientNode, at: int) -> TransientNode:
        """Cut a node at a token and return the upper half; the lower one stays where claims end."""
        assert node.parent is not None
        upper = TransientNode(node.start, at, node.spelt_by, node.parent)
        upper.queued = node.queued.copy()
        upper.in_flight = node.in_flight.copy()
        first_page = self._page_key(node.key, 0)
        node.start = at
        put_above(node, upper, first_page, self._page_key(node.key, 0))
        return upper

    def _merge(self, upper: TransientNode) -> None:
        """Undo a split that parts no claims any more: all go on to the only child."""
        if len(upper.children) != 1:
            return
        (node,) = upper.children.values()
        if node.num_claimants < upper.num_claimants:
            return
        assert upper.parent is not None
        node.start = upper.start
        node.parent = upper.parent
        node.parent.children[self._page_key(node.key, 0)] = node


def _path(claim: Claim) -> Iterator[TransientNode]:
    """From where the claim ends up to below the root."""
    node = claim.node
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
