"""Who is told to wait for whom: exact numbers, then random operations beside a dictionary of prompts."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from sglang.srt.mem_cache.transient_nodes import TransientNodes


def tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


class Queue:
    """Requests named by letters, which arrive in the order of the alphabet."""

    def __init__(self, page_size: int = 1, **prompts: str) -> None:
        self.nodes = TransientNodes(page_size)
        for rid, text in prompts.items():
            self.claim(rid, text)

    def claim(self, rid: str, text: str, namespace: str = "") -> None:
        self.nodes.claim(rid, ord(rid), namespace, tokens(text))
        self.nodes.check_invariants()

    def do(self, operation: str, rid: str) -> None:
        getattr(self.nodes, operation)(rid)
        self.nodes.check_invariants()

    def claimed(self, rid: str, stalled: str = "") -> int:
        return self.nodes.claimed_by_older(rid, stalled.__contains__)

    @property
    def counts(self) -> tuple[int, int]:
        return self.nodes.tokens_in_queue, self.nodes.tokens_in_flight


def test_the_younger_waits_for_what_the_older_will_compute():
    queue = Queue(a="systemdoc", b="systemtext", c="systemdoc?", d="other")
    assert [queue.claimed(rid) for rid in "abcd"] == [0, 6, 9, 0]
    # system, doc, ?, text, other
    assert queue.counts == (6 + 3 + 1 + 4 + 5, 0)


def test_the_next_inherits_a_claim():
    queue = Queue(a="abcdef", b="abcxyz", c="abcdeq")
    assert [queue.claimed(rid) for rid in "abc"] == [0, 3, 5]
    queue.do("release", "a")
    assert [queue.claimed(rid) for rid in "bc"] == [0, 3]
    queue.do("release", "b")
    assert queue.claimed("c") == 0 and queue.counts == (6, 0)
    queue.do("release", "c")
    assert queue.counts == (0, 0) and len(queue.nodes) == 0 and not queue.nodes._roots


def test_nobody_waits_for_one_that_is_stalled_or_behind_it():
    queue = Queue(a="abcdef", b="abcd", c="abcdef")
    assert queue.claimed("c") == 6
    assert queue.claimed("c", stalled="a") == 4
    assert queue.claimed("c", stalled="ab") == 0
    assert queue.claimed("b", stalled="a") == 0, "c is behind it"


def test_whoever_is_in_flight_is_worth_waiting_for():
    queue = Queue(a="abcdef", b="abcxyz", c="abcdef")
    queue.do("begin", "c")
    assert queue.claimed("a") == 6, "although c is younger"
    assert queue.claimed("a", stalled="c") == 6, "and it is not waiting for anything any more"
    assert queue.claimed("b") == 3
    assert queue.claimed("c") == 6
    assert queue.counts == (3, 6)
    queue.do("release", "c")
    assert queue.claimed("a") == 0 and queue.counts == (9, 0)


def test_begin_may_be_repeated():
    queue = Queue(a="abc", b="ab")
    for _ in range(2):
        queue.do("begin", "b")
        assert queue.counts == (1, 2)
    queue.do("release", "b")
    assert queue.counts == (3, 0)


def test_only_whole_pages_are_claimed():
    queue = Queue(4, a="aaaabbbbcc", b="aaaabbbxcc", c="aaaabbbbcccc", d="aaa")
    assert [queue.claimed(rid) for rid in "abcd"] == [0, 4, 8, 0]
    assert queue.counts == (4 + 4 + 4 + 4, 0)
    for rid in "dbac":
        queue.do("begin", rid)
        queue.do("release", rid)
        assert rid not in queue.nodes
    assert queue.counts == (0, 0)


def test_namespaces_share_nothing():
    queue = Queue(a="abc")
    queue.claim("b", "abc", namespace="tenant")
    assert queue.claimed("b") == 0 and queue.counts == (6, 0)
    queue.do("release", "a")
    queue.do("release", "b")
    assert not queue.nodes._roots


def test_who_is_unknown_is_released_in_peace_and_nobody_claims_twice():
    queue = Queue(a="abc")
    queue.do("release", "z")
    assert "a" in queue.nodes and "z" not in queue.nodes
    with pytest.raises(AssertionError, match="a has claimed"):
        queue.claim("a", "abc")
    with pytest.raises(KeyError):
        queue.nodes.begin("z")
    with pytest.raises(ValueError, match="at least 1"):
        TransientNodes(0)


def test_what_passed_through_leaves_neither_cuts_nor_prompts_behind():
    queue = Queue()
    first = tokens("abcdefgh")
    queue.nodes.claim("a", 0, "", first)
    kept = weakref.ref(first)
    del first
    queue.claim("b", "abcdefgh")
    for n in range(1, 8):
        queue.claim("c", "abcdefgh"[:n])
        queue.do("release", "c")
        queue.claim("c", "abcdefgh"[:n] + "x")
        queue.do("release", "c")
    (root,) = queue.nodes._roots.values()
    (node,) = root.children.values()
    assert (node.start, node.end, node.children) == (0, 8, {})
    queue.do("release", "a")
    assert kept() is None
    assert queue.counts == (8, 0)


# -- random operations ------------------------------------------------------------------------------------------


@dataclass
class Claimed:
    order: int
    namespace: str
    tokens: list[int]
    in_flight: bool = False


class Driver:
    """Does an operation on the nodes and on the model, and compares all there is."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = random.Random(seed * 100 + page_size)
        self.page = page_size
        self.nodes = TransientNodes(page_size)
        self.model: dict[str, Claimed] = {}
        self.num_claims = 0
        self.order = 0

    def prompt(self) -> list[int]:
        """Over two tokens. Pages mostly repeat one of them, so that prompts share more than their first page."""
        ends = self.rng.choice(list(self.model.values())).tokens if self.model and self.rng.random() < 0.5 else []
        start = ends[: self.rng.randint(0, len(ends))]
        pages = [[self.rng.randint(1, 2)] * self.page for _ in range(self.rng.randint(0, 5))]
        made = start + [token for page in pages for token in page]
        if made and self.rng.random() < 0.3:
            made[self.rng.randrange(len(made))] = self.rng.randint(1, 2)
        return made[: len(made) - self.rng.randint(0, self.page - 1)]

    def step(self) -> None:
        rids = list(self.model)
        operation = self.rng.choice(["claim", "claim", "release", "begin"])
        if operation == "claim" or not rids:
            self.num_claims += 1
            # Not always the youngest: what is claimed again keeps its place in the order of arrival.
            order = self.rng.choice([self.num_claims, -self.num_claims])
            rid = f"r{self.num_claims}"
            claimed = self.model[rid] = Claimed(order, self.rng.choice(["", "", "tenant"]), self.prompt())
            self.nodes.claim(rid, order, claimed.namespace, np.array(claimed.tokens, np.int32))
            return
        rid = self.rng.choice(rids)
        getattr(self.nodes, operation)(rid)
        if operation == "release":
            del self.model[rid]
        else:
            self.model[rid].in_flight = True

    def shared(self, a: Claimed, b: Claimed) -> int:
        if a.namespace != b.namespace:
            return 0
        n = 0
        while n < min(len(a.tokens), len(b.tokens)) and a.tokens[n] == b.tokens[n]:
            n += 1
        return n - n % self.page

    def worth_waiting_for(self, rid: str, stalled: set[str]) -> dict[str, int]:
        """Whose claims count for a request -> what it shares with them."""
        me = self.model[rid]
        return {
            other: self.shared(me, them)
            for other, them in self.model.items()
            if other != rid and (them.in_flight or (them.order < me.order and other not in stalled))
        }

    def compare(self) -> None:
        self.nodes.check_invariants()
        assert len(self.nodes) == len(self.model)
        stalled = {rid for rid in self.model if self.rng.random() < 0.3}
        waits_for: dict[str, set[str]] = {}
        for rid, me in self.model.items():
            shared = self.worth_waiting_for(rid, stalled)
            claimed = self.nodes.claimed_by_older(rid, stalled.__contains__)
            assert claimed == max(shared.values(), default=0), (rid, shared)
            matched = self.rng.randint(0, 2) * self.page
            if claimed > matched and not me.in_flight:
                waits_for[rid] = {other for other, n in shared.items() if n > matched}
        self.check_progress(waits_for, stalled)
        # By page: the oldest claimant in flight, else the oldest, owns it.
        pages: dict[tuple[str, tuple[int, ...]], bool] = {}
        for them in self.model.values():
            for end in range(self.page, len(them.tokens) + 1, self.page):
                page = them.namespace, tuple(them.tokens[:end])
                pages[page] = pages.get(page, False) or them.in_flight
        in_flight = sum(pages.values())
        assert self.nodes.tokens_in_flight == in_flight * self.page
        assert self.nodes.tokens_in_queue == (len(pages) - in_flight) * self.page

    def check_progress(self, waits_for: dict[str, set[str]], stalled: set[str]) -> None:
        """Somebody can always go on, and nobody waits for itself by way of others."""
        able = [rid for rid in self.model if rid not in stalled]
        if able and not any(them.in_flight for them in self.model.values()):
            assert min(able, key=lambda rid: self.model[rid].order) not in waits_for
        left = dict(waits_for)
        while left:
            free = [rid for rid, others in left.items() if not others & left.keys()]
            assert free, f"a cycle among {left}"
            for rid in free:
                del left[rid]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 12))])
def test_random_operations(seed: int, page_size: int):
    print(f"seed {seed}")
    driver = Driver(seed, page_size)
    for _ in range(150):
        driver.step()
        driver.compare()
    for rid in list(driver.model):
        driver.nodes.release(rid)
        del driver.model[rid]
        driver.compare()
    assert not driver.nodes._roots


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(2))
def test_in_a_queue_that_nobody_leaves_the_oldest_never_waits(seed: int, page_size: int):
    print(f"seed {seed}")
    driver = Driver(seed, page_size)
    for _ in range(60):
        driver.step()
        for rid, them in driver.model.items():
            if them.in_flight:  # it was retracted, and keeps its place
                them.in_flight = False
                driver.nodes.release(rid)
                driver.nodes.claim(rid, them.order, them.namespace, np.array(them.tokens, np.int32))
        driver.compare()
