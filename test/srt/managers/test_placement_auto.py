"""The write policy `auto` by example: what the controller copies where, and what a full tier gives up."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from sglang.srt.managers.auto_copies import _TIDY_WAITING
from sglang.srt.managers.slab_withdrawal import SlabWithdrawal
from sglang.srt.mem_cache.block_names import BlockNames
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.placement import CONVENIENT, FIRST_COPYING_RATIO, LAST, MAX_COPYING_RATIO, SPARE
from sglang.srt.mem_cache.slab_ledger import SlabLedger
from sglang.srt.mem_cache.transfer import BACKUP_LINKS, D2H, D2P, LINKS, LOAD_LINKS, P2H, Ticket, Tier
from sglang.srt.utils.time_units import Seconds
from support.controller_rig import Rig, ops_of
from support.storage_rig import DEVICE, HOST, PEER, tokens

# Device pages of which a bound on copies in flight leaves room for some letters.
LARGE = 8 * 64


class AutoRig(Rig):
    """Of the device all but `spare` pages are held by others. Any number of copies may be in flight unless
    is_bounded."""

    def __init__(self, spare: int = 12, host: int = 8, peer: int = 0, is_bounded: bool = False) -> None:
        super().__init__(LARGE, host, "auto", peer=peer)
        self.held = self.device.allocate(LARGE - spare)
        if not is_bounded:
            self.ledger._next_seq = dict.fromkeys(LINKS, 0)
            self.ledger.num_done = lambda link: 1  # type: ignore[method-assign]

    def computed(self, text: str, below: Node | None = None, now: int = 0) -> Node:
        """Inserted as the scheduler does it."""
        node = self.insert(text, below, now=now)
        self.at(10).back_up_inserted(node)
        self.check()
        return node

    def use(self, text: str, now: int) -> None:
        receipt = self.tree.lock(self.tree.match("", tokens(text)), now)
        self.tree.unlock(receipt, now, -1)
        self.check()

    def end_all(self) -> None:
        self.ledger.take_ops()
        for ticket in list(self.ledger.in_flight):
            self.at(10).commit(ticket)
        for table in self.controller.tables.values():
            table.reap(10)
        self.check()

    def where(self, node: Node) -> str:
        return "".join(name for name, frames in zip("DPH", node.frames) if frames is not None)

    def begun(self) -> list[tuple[str, int]]:
        return [(ticket.link, len(src)) for ticket, src, _, _ in ops_of(self)]

    def give_up(self, num_pages: int) -> None:
        self.at(10).evict(DEVICE, num_pages)
        self.check()


# -- while there is room -----------------------------------------------------------------------------------------


def test_with_room_on_the_host_all_that_is_computed_goes_there_at_once():
    rig = AutoRig(host=8)
    top = rig.computed("abc")
    assert rig.begun() == [(D2H, 3)]
    low = rig.computed("de", below=top)
    assert rig.begun() == [(D2H, 2)], "the rest is on its way"
    rig.end_all()
    assert [rig.where(n) for n in rig.tree.path_of(low)] == ["DH"], "one node by now"
    rig.give_up(5)
    assert rig.begun() == [] and rig.lengths("abcde") == (0, 5), "nothing is left to copy"


def test_what_a_full_host_has_no_room_for_is_not_copied_when_it_is_computed():
    rig = AutoRig(host=4)
    old = rig.computed("abc")
    rig.end_all()
    new = rig.computed("xy")
    assert rig.begun() == [(D2H, 1)] and rig.where(new) == "D", "the front has room"
    assert rig.where(old) == "DH", "nothing leaves for it"
    assert rig.states(HOST) == "CCCI"


def test_what_is_not_worth_a_copy_is_not_copied():
    rig = AutoRig(host=8)
    asked = []
    # None: not worth it.
    rig.controller.links.is_worth_copying = lambda tier, start, end: asked.append((tier, start, end))
    node = rig.computed("abc")
    rig.give_up(3)
    assert rig.begun() == [] and node.parent is None
    assert (HOST, 0, 3) in asked


def test_a_little_is_written_ahead_where_it_is_not_worth_it_which_shows_when_it_is():
    rig = AutoRig(spare=200, host=400)
    rig.controller.links.is_worth_copying = lambda tier, start, end: False
    most = bound(FIRST_COPYING_RATIO)
    rig.insert("".join(chr(1000 + i) for i in range(3 * most)))
    rig.at(10).auto.write_ahead(200)
    assert rig.begun() == [(D2H, most)]
    rig.give_up(most + 1)
    assert rig.begun() == [], "one copy at a time, and none of what leaves"


@pytest.mark.parametrize("is_worth", [False, True])
def test_a_link_that_fails_gets_nothing(is_worth: bool):
    rig = AutoRig(spare=200, host=400)
    rig.controller.links.is_worth_copying = lambda tier, start, end: is_worth
    failing = rig.controller.links.failing
    for _ in range(3):
        failing.note_ended(D2H, is_ok=False)
    failing.update(Seconds(0.0))
    most = bound(FIRST_COPYING_RATIO)
    rig.computed("".join(chr(1000 + i) for i in range(3 * most)))
    rig.at(10).auto.write_ahead(200)
    rig.give_up(most)
    assert rig.begun() == []
    failing.update(Seconds(2.0))
    rig.controller.num_looked_at.clear()
    rig.at(10).auto.write_ahead(200)
    assert rig.begun()[0][0] == D2H


def test_without_other_tiers_nothing_is_copied():
    rig = AutoRig(host=0)
    rig.computed("abc")
    rig.controller.auto.write_ahead(1000)
    rig.give_up(3)
    assert rig.begun() == [] and rig.tree.num_nodes == 0


# -- ahead of eviction -------------------------------------------------------------------------------------------


def test_write_ahead_copies_what_the_device_gives_up_next():
    rig = AutoRig(spare=8, host=4)
    rig.computed("abcd", now=9)
    rig.end_all()
    rig.controller.drop(rig.tree.match("", tokens("abcd")).path[0], HOST)
    rig.host.reap(10)
    rig.ledger.take_ops()
    old = rig.insert("wxyz", now=1)
    assert rig.device.num_free == 0
    rig.at(10).auto.write_ahead(2)
    rig.check()
    assert rig.begun() == [(D2H, 2)]
    left = [n for n in rig.tree.walk() if n.frames[HOST] is not None]
    assert left == [old] and rig.where(old) == "DH", "the end of the oldest; all is on the device still"
    rig.end_all()
    free = rig.device.num_free
    rig.at(10).evict(DEVICE, 2)
    assert rig.device.num_free == free + 2 and rig.begun() == [], "at once, without a copy"
    assert rig.lengths("wxyz") == (2, 4)


def test_write_ahead_copies_nothing_while_enough_is_free_or_was_looked_at():
    rig = AutoRig(spare=12, host=20)
    rig.insert("abcdefgh")
    rig.at(10).auto.write_ahead(4)
    assert rig.begun() == [], "four pages are free"
    rig.at(10).auto.write_ahead(6)
    assert rig.begun() == [(D2H, 2)]
    rig.at(10).auto.write_ahead(6)
    assert rig.begun() == [], "that was looked at already"
    rig.give_up(2)
    rig.device.allocate(2)
    rig.at(10).auto.write_ahead(6)
    assert rig.begun() != [], "what was written ahead has gone"


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
def test_other_policies_write_nothing_ahead(policy: str):
    rig = Rig(device=8, host=8, write_policy=policy)
    rig.insert("abcdefgh")
    rig.at(10).auto.write_ahead(4)
    assert ops_of(rig) == []


def test_what_was_not_written_ahead_is_copied_when_it_leaves():
    rig = AutoRig(host=8)
    node = rig.insert("abcd")
    rig.give_up(4)
    assert rig.begun() == [(D2H, 4)] and rig.lengths("abcd") == (0, 0)
    rig.end_all()
    assert rig.where(node) == "H"


def test_what_is_being_copied_leaves_last():
    rig = AutoRig(host=8)
    rig.insert("abc", now=1)
    rig.insert("xyz", now=2)
    rig.at(10).auto.write_ahead(rig.device.num_free + 2)
    rig.ledger.take_ops()
    free = rig.device.num_free
    rig.give_up(2)
    assert rig.lengths("abc") == (3, 3), "its pages become free only when they are copied"
    assert rig.device.num_free == free and rig.begun() == [(D2H, 2)]


# -- written once ------------------------------------------------------------------------------------------------


def given_up_by_the_host(rig: AutoRig, text: str) -> Node:
    """On the device, its copy given up."""
    node = rig.computed(text)
    rig.end_all()
    assert rig.where(node) == "DH"
    rig.at(10).evict(HOST, len(text))
    rig.check()
    assert rig.where(node) == "D" and node.was_copied
    return node


def test_a_copy_that_was_given_up_is_not_written_again_by_what_is_inserted_below():
    rig = AutoRig(host=8)
    node = given_up_by_the_host(rig, "abc")
    low = rig.computed("de", below=node)
    assert rig.begun() == [(D2H, 2)]
    rig.end_all()
    assert (rig.where(node), rig.where(low)) == ("D", "DH")
    rig.use("abcde", 5)
    rig.at(10).back_up_reused(low)
    assert rig.begun() == []


def test_a_copy_that_was_given_up_is_written_again_ahead_of_eviction():
    rig = AutoRig(spare=12, host=8)
    node = given_up_by_the_host(rig, "abc")
    rig.at(10).auto.write_ahead(rig.device.num_free + 3)
    assert rig.begun() == [(D2H, 3)]
    rig.end_all()
    rig.give_up(3)
    assert rig.where(node) == "H"


def test_both_halves_of_what_was_copied_were_copied():
    rig = AutoRig(host=8)
    given_up_by_the_host(rig, "abcd")
    new = rig.computed("abxy")
    assert rig.begun() == [(D2H, 2)] and [n.was_copied for n in rig.tree.path_of(new)] == [True, True]
    assert rig.tree.path_of(new)[0].frames[HOST] is None


# -- what a full tier gives up -----------------------------------------------------------------------------------


def test_the_host_gives_up_spare_copies_before_what_it_alone_has():
    """Of them that which the device keeps longest."""
    rig = AutoRig(host=8)
    alone = rig.computed("ab", now=1)
    rig.end_all()
    rig.give_up(2)
    old, young = rig.computed("cd", now=2), rig.computed("ef", now=3)
    rig.end_all()
    assert [rig.where(n) for n in (alone, old, young)] == ["H", "DH", "DH"]
    assert [rig.tree.order.class_of(n, HOST) for n in (alone, old, young)] == [LAST, SPARE, SPARE]
    assert rig.tree.victims(HOST, 6) == [young, old, alone]
    rig.at(10).evict(HOST, 2)
    assert rig.where(young) == "D" and rig.where(alone) == "H"


def test_copies_of_what_the_device_gives_up_next_stay():
    rig = AutoRig(host=8)
    next_, kept = rig.computed("ab", now=1), rig.computed("cd", now=2)
    rig.end_all()
    assert rig.tree.victims(HOST, 4) == [kept, next_]
    rig.at(10).auto.write_ahead(rig.device.num_free + 2)
    assert next_.is_next and not kept.is_next and rig.begun() == []
    assert rig.tree.order.class_of(next_, HOST) == LAST and rig.tree.order.class_of(kept, HOST) == SPARE
    other = rig.computed("ef", now=3)
    rig.end_all()
    assert rig.tree.victims(HOST, 9) == [other, kept, next_]


def test_a_peer_gives_up_what_the_host_has_before_what_it_alone_has():
    rig = AutoRig(host=8, peer=8)
    on_both, alone, spare = (rig.insert(text, now=i) for i, text in enumerate(("ab", "cd", "ef")))
    for node in (on_both, alone, spare):
        rig.copy(node, PEER)
    rig.copy(on_both, HOST)
    for node in (on_both, alone):
        rig.controller.drop(node, DEVICE)
    rig.check()
    classes = [rig.tree.order.class_of(n, PEER) for n in (on_both, alone, spare)]
    assert classes == [CONVENIENT, LAST, SPARE]
    assert rig.tree.victims(PEER, 9) == [spare, on_both, alone]
    assert rig.tree.order.class_of(on_both, HOST) == SPARE, "a peer is nearer"


@pytest.mark.parametrize("order", [(PEER, HOST), (HOST, PEER)])
@pytest.mark.parametrize("adds_up", [True, False])
@pytest.mark.parametrize("unread, other", [(PEER, HOST), (HOST, PEER)])
def test_what_a_tier_has_that_is_not_read_stays_on_the_other(
    unread: Tier, other: Tier, adds_up: bool, order: tuple[Tier, ...]
):
    rig = AutoRig(host=8, peer=8)
    rig.tree.set_placement(adds_up)
    rig.tree.set_load_order(order)
    old, new = rig.insert("ab", now=1), rig.insert("cd", now=2)
    for node, tier in ((old, other), (new, PEER), (new, HOST)):
        rig.copy(node, tier)
    for node in (old, new):
        rig.controller.drop(node, DEVICE)
    rig.tree.set_load_order(order, frozenset({unread}))
    rig.check()
    assert rig.tree.victims(other, 4) == [old, new], "the younger one stays longer"


@pytest.mark.parametrize("failed, other", [(PEER, HOST), (HOST, PEER)])
def test_a_tier_that_failed_lately_gets_what_no_other_takes_without_a_loss(failed: Tier, other: Tier):
    rig = AutoRig(host=4, peer=4)
    rig.controller.links.failing.note_ended(LOAD_LINKS[failed], is_ok=False)
    rig.controller.links.failing.update(Seconds(0.0))
    first, second = rig.insert("abcd", now=1), rig.insert("efgh", now=2)
    rig.give_up(4)
    assert rig.begun() == [(BACKUP_LINKS[other], 4)] and rig.where(first) == "DPH"[other]
    rig.end_all()
    rig.give_up(4)
    assert rig.begun() == [(BACKUP_LINKS[failed], 4)] and rig.where(second) == "DPH"[failed]
    # It does not get what is on the device and on the other tier.
    third = rig.insert("ijkl", now=3)
    rig.end_all()
    rig.controller.drop(first, other)
    rig.copy(third, other)
    rig.at(10).auto.write_ahead(rig.device.num_free + 4)
    assert rig.begun() == [] and rig.where(second) == "DPH"[failed]


@pytest.mark.parametrize("idle, other", [(PEER, HOST), (HOST, PEER)])
def test_the_front_of_a_prompt_goes_by_its_age_where_its_end_is_on_a_tier_that_gets_nothing(idle: Tier, other: Tier):
    """Nothing displaces the end, and the other tier would keep the front for ever."""
    rig = AutoRig(host=8, peer=8)
    front = rig.insert("ab", now=1)
    end = rig.insert("cd", below=front, now=1)
    used = rig.insert("ef", now=2)
    for node, tier in ((front, other), (end, idle), (used, other)):
        rig.copy(node, tier)
    for node in (end, front, used):
        rig.controller.drop(node, DEVICE)
    rig.controller.evict(other, 2)
    assert [rig.where(node) for node in (front, end, used)] == ["", "DPH"[idle], "DPH"[other]]
    rig.check()


@pytest.mark.parametrize("slow, other", [(PEER, HOST), (HOST, PEER)])
def test_what_a_slow_tier_has_goes_with_what_the_other_gives_up_after_it(slow: Tier, other: Tier):
    """Nothing new displaces it."""
    rig = AutoRig(host=8, peer=8)
    texts = (("ab", 1, other), ("cd", 2, slow), ("ef", 3, other), ("gh", 4, slow))
    first, old, between, young = nodes = [rig.insert(text, now=now) for text, now, _ in texts]
    for node, (_, _, tier) in zip(nodes, texts):
        rig.copy(node, tier)
        rig.controller.drop(node, DEVICE)
    rig.is_worth = lambda tier: True
    rig.controller.links.is_worth_copying = lambda tier, start, end: rig.is_worth(tier)
    rig.controller.evict(other, 2)
    assert [rig.where(n) for n in (first, old, young)] == ["", *["DPH"[slow]] * 2], "nothing is slow yet"
    rig.is_worth = lambda tier: tier != slow
    rig.controller.evict(other, 2)
    assert (rig.where(between), rig.where(old), rig.where(young)) == ("", "", "DPH"[slow]), "it was used later"
    rig.check()


def test_what_is_being_saved_from_a_slow_peer_does_not_age():
    """The older one goes where the host has free pages. The host makes room for the other one by giving up what was
    used between them."""
    rig = AutoRig(host=4, peer=4)
    new, between, old = (rig.insert(text, now=now) for text, now in (("ab", 3), ("cd", 2), ("ef", 1)))
    for node, tier in ((old, PEER), (between, HOST), (new, PEER)):
        rig.copy(node, tier)
        rig.controller.drop(node, DEVICE)
    rig.controller.links.is_worth_copying = lambda tier, start, end: tier != PEER
    slabs = SlabLedger(rig.controller.tables[PEER], [(0, 4)], mapped=True)
    SlabWithdrawal(rig.controller, slabs).give_back([0], losing=lambda ids: None)
    assert rig.begun() == [(P2H, 4)]
    assert [rig.where(node) for node in (old, between, new)] == ["H", "", "H"]
    rig.check()


def peers_with(rig: AutoRig, *texts: str) -> list[Node]:
    """Nodes that peers alone have, the first one used first. Storage is fed, and has nothing."""
    rig.controller.feeds_storage = True
    rig.tree.names.is_stored = lambda node: False  # type: ignore[method-assign]
    nodes = [rig.insert(text, now=now) for now, text in enumerate(texts)]
    for node in nodes:
        rig.copy(node, PEER)
        rig.controller.drop(node, DEVICE)
    return nodes


def newer_on_host(rig: AutoRig, text: str) -> Node:
    """A node that the host alone has, used after those of `peers_with`."""
    node = rig.insert(text, now=5)
    rig.copy(node, HOST)
    rig.controller.drop(node, DEVICE)
    return node


def test_what_storage_lacks_goes_to_the_host_before_peers_give_it_up():
    rig = AutoRig(host=8, peer=6)
    old, young, stored = peers_with(rig, "ab", "cd", "ef")
    rig.tree.names.is_stored = lambda node: node is stored  # type: ignore[method-assign]
    assert rig.at(10).make_room(PEER, 2, ()), "what storage has makes the room, though used last"
    assert rig.begun() == [(P2H, 2), (P2H, 2)]
    assert [rig.where(node) for node in (old, young, stored)] == ["PH", "PH", ""]
    rig.end_all()
    assert rig.at(10).make_room(PEER, 4, ()) and rig.where(old) == "H"
    rig.check()


def test_what_storage_lacks_is_copied_from_peers_that_have_nothing_else():
    rig = AutoRig(host=8, peer=4)
    old, young = peers_with(rig, "ab", "cd")
    assert not rig.at(10).make_room(PEER, 2, ()), "the pages are free when they are copied"
    assert rig.begun() == [(P2H, 2), (P2H, 2)] and [rig.where(node) for node in (old, young)] == ["H", "PH"]
    rig.end_all()
    assert rig.at(10).make_room(PEER, 2, ()) and rig.where(young) == "PH"
    rig.at(10).evict(PEER, 2)
    rig.check()


def test_what_the_device_gives_up_is_kept_while_peers_make_room():
    """Their copies to the host are under way: peers give up more, older pages, for what is newer."""
    rig = AutoRig(host=2, peer=4)
    old, older = peers_with(rig, "ab", "cd")
    rig.at(10).evict(PEER, 2)
    assert rig.begun() == [(P2H, 2)] and rig.where(old) == "H"
    rig.insert("xy", now=5)
    rig.give_up(2)
    assert rig.begun() == [(D2P, 2)] and rig.where(older) == ""
    rig.end_all()
    assert rig.lengths("xy") == (0, 2)


def test_little_more_is_copied_than_peers_give_up():
    """Nothing is stored, as with a store that hangs: making room for one page does not copy all that peers have."""
    rig = AutoRig(host=8, peer=7)
    nodes = peers_with(rig, *"abcdefg")
    assert not rig.at(10).make_room(PEER, 1, ()), "the fifth has to be copied, too"
    assert rig.begun() == [(P2H, 1)] * 5
    assert [rig.where(node) for node in nodes] == ["PH", "PH", "PH", "PH", "H", "P", "P"]
    rig.check()


def test_what_is_never_stored_leaves_peers_as_it_is():
    rig = AutoRig(host=8, peer=2)
    peers_with(rig, "ab")
    with mock.patch("sglang.srt.managers.cache_controller.is_alone", lambda namespace: True):
        assert rig.at(10).make_room(PEER, 2, ())
    assert rig.begun() == []


def test_what_storage_lacks_leaves_peers_with_a_copy_under_way():
    """As when peers become fewer: nothing else is to stay for it."""
    rig = AutoRig(host=8, peer=4)
    old, young = peers_with(rig, "ab", "cd")
    rig.at(10).evict(PEER, 2)
    assert rig.begun() == [(P2H, 2)] and [rig.where(node) for node in (old, young)] == ["H", "P"]
    rig.end_all()
    assert rig.states(HOST) == "CCFFFFFF", rig.states(HOST)


def test_what_is_stored_nowhere_stays_on_the_host_before_what_is_older():
    """As while storage hangs: nothing that was used later is lost for it."""
    rig = AutoRig(host=2, peer=2)
    new = newer_on_host(rig, "cd")
    (old,) = peers_with(rig, "ab")
    assert rig.at(10).make_room(PEER, 2, ())
    assert rig.begun() == [] and [rig.where(node) for node in (old, new)] == ["", "H"]
    rig.check()


def test_what_the_host_does_not_give_up_is_not_split():
    rig = AutoRig(host=4, peer=2)
    new = newer_on_host(rig, "cdef")
    (old,) = peers_with(rig, "a")
    rig.at(10).move_to_host([old])
    assert rig.begun() == [] and len(new.key) == 4


def test_what_storage_has_leaves_the_host_for_what_it_lacks():
    rig = AutoRig(host=2, peer=2)
    stored = newer_on_host(rig, "cd")
    (lacking,) = peers_with(rig, "ab")
    rig.tree.names.has_stored = lambda node: node is stored  # type: ignore[method-assign]
    assert not rig.at(10).make_room(PEER, 2, ())
    assert rig.begun() == [(P2H, 2)] and [rig.where(node) for node in (lacking, stored)] == ["H", ""]
    rig.check()


@pytest.mark.parametrize(
    ("blocks", "lacks_none", "has_some"),
    [((True, True), True, True), ((True, False), False, False), ((), True, False)],
    ids=str,
)
def test_the_end_of_a_prompt_that_is_in_no_block_is_not_stored(
    blocks: tuple[bool, ...], lacks_none: bool, has_some: bool
):
    node = Node(1, tokens("abc"), None)
    node.stored = np.array(blocks, np.bool_)
    assert (BlockNames.is_stored(node), BlockNames.has_stored(node)) == (lacks_none, has_some)


def test_room_on_the_host_takes_no_other_victim_off_slow_peers():
    """What the host gives up for a moved page goes along with what slow peers have of that age: not with a page
    that they are giving up already."""
    rig = AutoRig(host=2, peer=6)
    upper = rig.insert("a", now=1)
    rig.copy(upper, PEER)
    lower = rig.insert("b", below=upper, now=1)
    rig.copy(lower, HOST)
    rig.controller.drop(lower, DEVICE)
    other = rig.insert("x", now=2)
    rig.copy(other, HOST)
    rig.controller.drop(other, DEVICE)
    peers_with(rig, "u", "v")
    rig.controller.links.is_worth_copying = lambda tier, start, end: tier != PEER
    rig.at(10).evict(PEER, 3)
    rig.check()


def test_another_policy_ranks_copies_by_age():
    rig = AutoRig(host=8)
    old, young = rig.computed("ab", now=1), rig.computed("cd", now=2)
    rig.end_all()
    assert rig.tree.victims(HOST, 4) == [young, old]
    rig.controller.set_write_policy("write_through")
    assert rig.tree.victims(HOST, 4) == [old, young]
    rig.controller.set_write_policy("auto")
    assert rig.tree.victims(HOST, 4) == [young, old]


def test_a_spare_copy_leaves_for_what_the_device_gives_up():
    """Together the tiers hold what neither does alone: six on the device, then four more."""
    rig = AutoRig(spare=6, host=4)
    kept = rig.computed("abcd", now=5)
    rig.end_all()
    rig.insert("xy", now=1)
    rig.give_up(2)
    rig.end_all()
    assert rig.lengths("xy") == (0, 2) and rig.lengths("abcd") == (4, 4)
    assert rig.host.num_free == 0 and [n.frames[HOST] is None for n in rig.tree.path_of(kept)] == [False, True]


def test_what_is_worth_less_than_all_on_the_host_is_not_copied():
    rig = AutoRig(host=4)
    valued = rig.computed("abcd", now=9)
    rig.end_all()
    rig.controller.drop(valued, DEVICE)
    rig.insert("xy", now=1)
    rig.give_up(2)
    assert rig.begun() == [] and rig.lengths("xy") == (0, 0) and rig.lengths("abcd") == (0, 4)
    assert rig.controller.counters["backup_dropped_tokens"] == 2


# -- peers -------------------------------------------------------------------------------------------------------


def test_peers_come_before_the_host_while_they_have_room():
    rig = AutoRig(host=8, peer=2)
    first, second = rig.insert("ab", now=1), rig.insert("cd", now=2)
    rig.give_up(4)
    assert sorted(rig.begun()) == [(D2H, 2), (D2P, 2)]
    rig.end_all()
    assert sorted((rig.where(first), rig.where(second))) == ["H", "P"], "one copy each"


def test_what_the_host_has_goes_to_peers_with_room_too_when_it_leaves_the_device():
    rig = AutoRig(host=8, peer=4)
    node = rig.computed("abc")
    rig.end_all()
    rig.give_up(3)
    assert rig.begun() == [(D2P, 3)]
    rig.end_all()
    assert rig.where(node) == "PH"
    other = rig.computed("xy")
    rig.end_all()
    rig.give_up(2)
    assert rig.begun() == [] and rig.where(other) == "H", "one page is free there, and nothing leaves for it"


def test_a_full_peer_gives_up_its_spare_copy_for_what_no_other_tier_would_have():
    rig = AutoRig(host=2, peer=2)
    spare = rig.insert("ab", now=9)
    rig.copy(spare, PEER)
    taken = rig.insert("cd", now=5)
    rig.copy(taken, HOST)
    rig.controller.drop(taken, DEVICE)
    node = rig.insert("ef", now=1)
    rig.give_up(2)
    rig.end_all()
    assert [rig.where(n) for n in (spare, taken, node)] == ["D", "H", "P"]


# -- while others are under way ------------------------------------------------------------------------------------


def test_what_is_copied_ahead_waits_for_the_spare_copies_that_a_load_leaves():
    rig = AutoRig(spare=8, host=6)
    alone = rig.on_host_only("mn")
    loaded = rig.on_host_only("abcd")
    rig.insert("vwxy", now=5)
    assert (rig.device.num_free, rig.host.num_free) == (4, 0)
    receipt = rig.tree.lock(rig.tree.match("", tokens("abcd")), 6)
    rig.at(10).begin_load([loaded])
    rig.ledger.take_ops()
    rig.at(10).auto.write_ahead(2)
    assert rig.begun() == [], "the host has nothing to spare yet"
    rig.end_all()
    rig.tree.unlock(receipt, 10, -1)
    rig.at(10).auto.write_ahead(2)
    assert rig.begun() == [(D2H, 2)]
    rig.end_all()
    assert rig.where(alone) == "H" and rig.lengths("vwxy") == (4, 4)


def test_what_a_busy_link_would_take_stays_while_the_caller_waits():
    rig = AutoRig(spare=200, host=400, is_bounded=True)
    most = bound(FIRST_COPYING_RATIO)
    node = rig.insert("".join(chr(1000 + i) for i in range(2 * most)))
    rig.at(10).evict(DEVICE, 2 * most, waits=True)
    rig.check()
    assert rig.begun() == [(D2H, most)] and rig.device.counts[FrameState.PENDING_FREE] == most
    rig.at(10).evict(DEVICE, most, waits=True)
    assert rig.begun() == [] and node.parent is not None
    assert rig.controller.counters["backup_dropped_tokens"] == 0
    rig.end_all()
    rig.at(10).evict(DEVICE, most, waits=True)
    assert sum(n for _, n in rig.begun()) == most
    rig.end_all()
    assert rig.lengths("".join(chr(1000 + i) for i in range(2 * most))) == (0, 2 * most), "nothing is lost"


def test_nobody_waits_for_a_link_that_is_overdue():
    rig = AutoRig(spare=200, host=400, is_bounded=True)
    most = bound(FIRST_COPYING_RATIO)
    rig.insert("".join(chr(1000 + i) for i in range(2 * most)))
    rig.at(10).evict(DEVICE, most, waits=True)
    assert rig.begun() == [(D2H, most)]
    rig.controller.links.overdue = frozenset({D2H})
    rig.at(10).evict(DEVICE, most, waits=True)
    assert rig.begun() == [] and rig.controller.counters["backup_dropped_tokens"] == most


# -- the bound on copies in flight -------------------------------------------------------------------------------


def bound(ratio: float) -> int:
    return int(ratio * LARGE)


def test_until_the_first_copy_has_ended_few_pages_are_copied():
    assert 0 < bound(FIRST_COPYING_RATIO) < bound(MAX_COPYING_RATIO)
    rig = AutoRig(spare=200, host=400, is_bounded=True)
    most = bound(FIRST_COPYING_RATIO)
    text = "".join(chr(1000 + i) for i in range(most + 1))
    rig.computed(text)
    assert rig.begun() == [(D2H, most)], "as much as may be"
    rig.at(10).auto.write_ahead(bound(MAX_COPYING_RATIO))
    rig.check()
    assert rig.begun() == [], "the link is busy"
    rig.give_up(1)
    assert rig.begun() == [] and rig.ledger.num_pages_on(D2H) == most
    rig.at(10).commit(Ticket(D2H, 0))
    most = bound(MAX_COPYING_RATIO)
    rig.computed("".join(chr(5000 + i) for i in range(most - 1)))
    assert rig.begun() == [(D2H, most - 1)]
    rig.computed("ab")
    assert rig.begun() == [(D2H, 1)], "one page is allowed still"
    rig.computed("c")
    assert rig.begun() == []


def test_a_tier_whose_link_is_busy_leaves_copies_to_the_other():
    rig = AutoRig(spare=200, host=400, peer=400, is_bounded=True)
    most = bound(FIRST_COPYING_RATIO)
    nodes = [rig.insert("".join(chr(1000 * (i + 1) + j) for j in range(most)), now=i) for i in range(3)]
    rig.give_up(3 * most)
    assert sorted(rig.begun()) == [(D2H, most), (D2P, most)]
    assert sum(node.parent is None for node in nodes) == 1, "eviction never refuses"
    assert rig.controller.counters["backup_dropped_tokens"] == most
    rig.end_all()
    assert rig.device.counts[FrameState.PENDING_FREE] == 0


def test_of_a_node_beyond_the_bound_the_front_is_saved_when_it_leaves():
    rig = AutoRig(spare=200, host=400, is_bounded=True)
    most = bound(FIRST_COPYING_RATIO)
    text = "".join(chr(1000 + i) for i in range(2 * most))
    rig.insert(text)
    rig.give_up(2 * most)
    assert rig.begun() == [(D2H, most)]
    rig.end_all()
    match = rig.tree.match("", np.array([ord(c) for c in text], np.int32))
    assert (match.device_len, match.total_len) == (0, most)


def test_a_link_that_hangs_holds_no_more_of_the_device_than_the_bound():
    rig = AutoRig(spare=400, host=500, is_bounded=True)
    rig.ledger.num_done = lambda link: 1  # type: ignore[method-assign]
    for i in range(40):
        rig.insert("".join(chr(1000 + 20 * i + j) for j in range(10)), now=i)
    for _ in range(40):
        rig.at(10).auto.write_ahead(20)
        rig.give_up(10)
    held = rig.device.counts[FrameState.PENDING_FREE]
    assert 0 < held <= bound(MAX_COPYING_RATIO) and rig.device.num_free == 400 - held
    assert rig.ledger.num_pages_on(D2H) <= bound(MAX_COPYING_RATIO)


def test_paths_that_wait_for_a_link_that_hangs_are_forgotten_when_they_leave():
    rig = AutoRig(spare=40, host=400)
    rig.controller.links.num_allowed = lambda tier: 0
    for i in range(1000):
        node = rig.computed(chr(1000 + i))
        rig.at(10).evict(DEVICE, 1 if i >= 30 else 0)
        rig.device.reap(10)
    waiting = rig.controller.auto._to_write
    assert len(waiting) < 2 * 40 + 2 * _TIDY_WAITING and waiting[node.id] is node
    rig.controller.links.num_allowed = lambda tier: 400
    rig.at(10).auto.write_ahead(1)
    assert not rig.controller.auto._to_write and len(rig.begun()) == rig.tree.num_nodes > 20


def test_peers_and_host_take_the_copies_of_a_path_together():
    """Room for a part on each: what leaves lies on both in turn, and is found as one prefix."""
    rig = AutoRig(host=3, peer=3)
    node = None
    for text in ("ab", "c", "de", "f"):
        node = rig.insert(text, below=node)
    rig.give_up(6)
    rig.end_all()
    assert rig.lengths("abcdef") == (0, 6)
    assert {Tier.PEER, Tier.HOST} == {rig.tree.source_of(n) for n in rig.tree.walk()}
    assert all(len(rig.where(n)) == 1 for n in rig.tree.walk()), "one copy each"
