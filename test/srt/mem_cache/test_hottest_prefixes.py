"""Which prefixes are hottest, against a search of the whole tree, and what is shown of them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from sglang.srt.mem_cache import hottest_prefixes
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.hottest_prefixes import HottestPrefixes, hottest
from sglang.srt.mem_cache.namespaces import private
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.prefix_labels import PrefixLabels
from sglang.srt.mem_cache.transfer import D2H, Ticket, Tier


class World:
    """A tree that grows as requests come."""

    def __init__(self, block_keys: BlockKeys | None = None) -> None:
        self.tree = HiRadixTree(1)
        self.tree.rename_blocks(block_keys)
        self.next_frame = 0
        self.now = 0

    def request(self, text: str, namespace: str = "") -> Node:
        tokens = np.array([ord(c) for c in text], np.int32)
        match = self.tree.match(namespace, tokens)
        receipt = self.tree.lock(match, self.now)
        self.tree.count_use(receipt.node)
        node = receipt.node
        if match.total_len < len(tokens):
            frames = np.arange(self.next_frame, self.next_frame + len(tokens) - match.total_len, dtype=np.int32)
            self.next_frame += len(frames)
            below = node if node.parent is not None else None
            node = self.tree.insert_prefix(
                namespace, below, tokens[match.total_len :], frames, self.now, self.now
            ).node
        self.tree.unlock(receipt, self.now, self.now)
        self.now += 1
        return node


def text_of(node: Node) -> str:
    text = ""
    while node.parent is not None:
        text, node = "".join(map(chr, node.key)) + text, node.parent
    return text


def ends_of_chains(tree: HiRadixTree) -> list[Node]:
    """All prefixes, by the definition, with no search."""
    ends = []

    def visit(node: Node, top: int) -> None:
        children = list(node.children.values())
        if not any(child.hits >= 0.9 * top for child in children):
            ends.append(node)
        for child in children:
            visit(child, top if child.hits >= 0.9 * top else child.hits)

    for root in tree.roots.values():
        for child in root.children.values():
            visit(child, child.hits)
    return ends


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_what_a_walk_finds(seed: int):
    rng = random.Random(seed)
    world = World()
    texts = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 9))) for _ in range(6)]
    for _ in range(rng.randrange(150)):
        world.request(rng.choice(texts) + rng.choice(["", "a", "b", "bb"]), rng.choice(["", "", "tenant"]))
    every = sorted(ends_of_chains(world.tree), key=lambda node: -node.hits)
    for n in (1, 3, 10, 1000):
        found = hottest(world.tree, n)
        assert [node.hits for node in found] == [node.hits for node in every[:n]], f"seed {seed}"
        assert {node.id for node in found} <= {node.id for node in every}
        assert len({node.id for node in found}) == len(found)


def test_nodes_that_the_same_requests_used_are_one_prefix():
    world = World()
    for i in range(20):
        world.request("system" + (" rules" if i else "") + f"{i:c}")
    found = hottest(world.tree, 2)
    assert (text_of(found[0]), found[0].hits) == ("system rules", 19)
    assert found[1].hits == 1
    # Without the limit of similarity a slow decline would hide all but its end.
    world = World()
    for length in range(1, 41):
        world.request("x" * length)
    assert [node.hits for node in hottest(world.tree, 3)] == [36, 32, 28]


def test_a_large_tree_is_not_walked(monkeypatch: pytest.MonkeyPatch):
    world = World()
    for i in range(3000):
        world.request("system" + chr(1000 + i))
    for _ in range(5):
        world.request("system" + chr(1000))
    seen = 0

    class Counting(dict):
        def values(self):
            nonlocal seen
            for value in super().values():
                seen += 1
                yield value

    for node in [*world.tree.walk(), *world.tree.roots.values()]:
        node.children = Counting(node.children)
    found = hottest(world.tree, 4, max_looks=100)
    assert seen <= 100
    assert [text_of(node) for node in found[:2]] == ["system", "system" + chr(1000)]
    monkeypatch.setattr(hottest_prefixes, "_MAX_CHILDREN", 10)
    seen = 0
    assert len(hottest(world.tree, 100)) == 11 and seen <= 12
    assert hottest(HiRadixTree(1), 5) == []


def test_what_is_shown_of_a_prefix():
    world = World(BlockKeys(b"secret", 4))
    node = world.request("abcdefghij")
    table = HottestPrefixes(world.tree)
    entry = table.table(launch=5)[0]
    assert entry | {"hash": ""} == {
        "hash": "",
        "label": None,
        "label_tokens": 0,
        "namespace": None,
        "tokens": 10,
        "hits": 1,
        "saved_tokens": 0,
        "tokens_on": {"device": 10, "peer": 0, "host": 0, "storage": 0},
        "stored": False,
        "locks": 0,
        "idle_launches": 5,
    }
    ticket = Ticket(D2H, 0)
    world.tree.begin_fill([node], Tier.DEVICE, Tier.HOST, np.arange(10, dtype=np.int32), ticket)
    assert table.table(launch=5)[0]["tokens_on"]["host"] == 0, "what is on its way is not there"
    world.tree.commit(ticket, Tier.HOST)
    world.tree.names.name_path(node)
    assert node.stored is not None
    node.stored[0] = True
    entry = table.table(launch=5)[0]
    assert entry["tokens_on"] == {"device": 10, "peer": 0, "host": 10, "storage": 4} and entry["stored"] is False
    node.stored[1] = True
    entry = table.table(launch=5)[0]
    assert entry["tokens_on"]["storage"] == 8 and entry["stored"] is True
    receipt = world.tree.lock_node(node, 3)
    entry = table.table(launch=5)[0]
    assert (entry["locks"], entry["idle_launches"]) == (1, 0)
    world.tree.unlock(receipt, 5, 5)
    world.tree.rename_blocks(None)
    entry = table.table(launch=9)[0]
    assert entry["tokens_on"] == {"device": 10, "peer": 0, "host": 10} and entry["stored"] is None


def test_what_saved_the_most_tokens_comes_first_with_its_label():
    world = World()
    for i in range(6):
        world.request("abc" + f"{i}" * 5)
    for _ in range(3):
        world.request("a long prompt that few have")
    labels, kept = PrefixLabels(1), PrefixLabels(1)
    table = HottestPrefixes(world.tree, 3, labels=(labels, kept))
    shown = lambda: [(p["tokens"], p["saved_tokens"], p["label"], p["label_tokens"]) for p in table.table(9)[:2]]  # noqa: E731
    assert shown() == [(27, 54, None, 0), (3, 15, None, 0)]
    labels.put("letters", "", np.array([ord(c) for c in "abc"], np.int32))
    kept.put("few", "", np.array([ord(c) for c in "a long"], np.int32))
    assert shown() == [(27, 54, "few", 6), (3, 15, "letters", 3)]
    kept.put("more", "", np.array([ord(c) for c in "a long prompt"], np.int32))
    labels.remove("letters")
    assert shown() == [(27, 54, "more", 13), (3, 15, None, 0)]


@pytest.mark.parametrize("block_keys", [None, BlockKeys(b"", 4)])
def test_a_hash_names_a_prefix_and_tells_nothing(block_keys: BlockKeys | None):
    world = World(block_keys)
    texts = ["abcdefgh", "abcdefghi", "abcdefghj", "abc", "x", "y"]
    ends = {(space, text): world.request(text, space) for text in texts for space in ("", "salt")}
    table = HottestPrefixes(world.tree, 100)

    before = [p["hash"] for p in table.table(world.now)]
    assert len(set(before)) == len(before) == len(ends_of_chains(world.tree))
    # Whether blocks have their names already does not change a prefix's, nor do splits.
    if block_keys is not None:
        for (space, _), node in ends.items():
            if space == "":
                world.tree.names.name_path(node)
    table._given = {}
    assert [p["hash"] for p in table.table(world.now)] == before
    entry = json.dumps(table.table(world.now))
    assert "salt" not in entry
    # Another process has other names, whatever secret the storage has.
    assert not {p["hash"] for p in HottestPrefixes(world.tree, 100).table(world.now)} & set(before)
    spaces = {p["namespace"] for p in table.table(world.now)}
    assert None in spaces and len(spaces) == 2


def test_what_only_one_request_can_use_is_no_hot_prefix():
    world = World()
    for i in range(2000):
        world.request("system prompt", private("", i))
    world.request("for all")
    assert [text_of(node) for node in hottest(world.tree, 5)] == ["for all"]
