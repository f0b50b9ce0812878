"""`AutoCopies`: what the write policy `auto` copies from the device, when and where.

Owns the paths that wait for a link. Which tier a page is worth most on is a pure function in placement.py; the copies
are begun, and room is made for them, by the controller.

    write_through           what was just computed goes to the host, as far as there is room to spare
    write_ahead             at the end of a step: what the device gives up next is copied, so that it can go at once
    before_links_are_busy   of what would have to be copied now, what links take
    copy_before_eviction    what goes now is copied, as far as it was not copied before
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.eviction import RETIRED_PRIORITY, Rank
from sglang.srt.mem_cache.node import Node, is_only_on_device, mark_next, survivor_of
from sglang.srt.mem_cache.placement import LAST, Room, choose_tier
from sglang.srt.mem_cache.transfer import LOAD_LINKS, Tier

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController

# So many paths that wait for a link, and those that have left the tree are looked for.
_TIDY_WAITING = 64


class AutoCopies:
    def __init__(self, controller: HiCacheController) -> None:
        self._controller = controller
        self._ledger = controller.ledger
        self._links = controller.links
        self._tables = controller.tables
        self._tree = controller.tree
        # Ends of paths that are to be written through when the link takes more.
        self._to_write: dict[int, Node] = {}
        self._tidy_at = _TIDY_WAITING
        # Of what was looked at last, pages that are copied when loads have ended.
        self._num_put_off = 0

    def write_through(self, node: Node) -> None:
        """Copy what was never copied of the path to a node to the host, the front first, as far as the link takes it
        and the host has room to spare, or passes it on to storage. The rest is tried again."""
        lacking = [n for n in self._tree.path_of(node) if not n.was_copied and is_only_on_device(n)]
        if not lacking or not self._links.is_worth_trying(Tier.HOST, lacking[0].start, node.end):
            return
        num_pages, num_free = self._links.num_allowed(Tier.HOST), self._tables[Tier.HOST].num_free
        controller = self._controller
        passes_on = controller.stores_early and controller.is_worth_storing(lacking[0].start, node.end)
        if not (passes_on or self._gives_up_retired(Tier.HOST)):
            num_pages = min(num_pages, num_free)
        nodes: list[Node] = []
        for each in lacking:
            if num_pages <= 0:
                break
            n = len(each.key) // self._tree.page_size
            part = each
            if n > num_pages:
                part = self._tree.split(each, self._front_tokens(each, num_pages))
            nodes.append(part)
            num_pages -= n
        if nodes:
            controller.back_up(nodes, Tier.HOST)
        if num_pages < 0 or (len(nodes) < len(lacking) and (num_free or passes_on)):
            self._write_later(node)

    def write_ahead(self, num_pages: int) -> None:
        """Copy what the device gives up next, so that it can give up num_pages at once. With another write policy,
        nothing."""
        controller = self._controller
        if controller.write_policy != "auto" or len(self._tables) == 1:
            return
        self._links.pages_ahead = num_pages
        if self._to_write and self._links.num_allowed(Tier.HOST) > 0:
            self._write_rest()
        if wanted := controller.num_to_look_at(Tier.DEVICE, num_pages):
            self._num_put_off = 0
            nodes = self.copy_before_eviction(self._tree.victims(Tier.DEVICE, wanted), is_ahead=True)
            controller.num_looked_at[Tier.DEVICE] = controller.pages_of(nodes) - self._num_put_off

    def before_links_are_busy(self, victims: list[Node]) -> list[Node]:
        """The first of the device's next victims, until one is to be copied by a link that takes no more now, but
        works. Where that takes a part of a node, it is split."""
        tiers = [tier for tier in self._written_tiers() if self._links.works(tier)]
        allowed = {tier: max(0, self._links.num_allowed(tier)) for tier in tiers}
        for i, node in enumerate(victims):
            worth = [tier for tier in allowed if self._links.is_worth_copying(tier, node.start, node.end)]
            if not worth or not is_only_on_device(node):
                continue
            num_pages = len(node.key) // self._tree.page_size
            rooms = {tier: self.room(tier, 0)._replace(num_allowed=num_pages) for tier in worth}
            tier = choose_tier(num_pages, self._tree.order.rank(node), rooms)
            if tier is None:
                continue
            if num_pages > allowed[tier]:
                front = num_pages - allowed[tier]
                if allowed[tier]:
                    self._tree.split(node, front * self._tree.page_size)
                return victims[: i + (allowed[tier] > 0)]
            allowed[tier] -= num_pages
        return victims

    def copy_before_eviction(self, victims: list[Node], is_ahead: bool = False) -> list[Node]:
        """Copy what no other tier has of the device's next victims, each to where it is worth most. is_ahead: the
        device does not give them up yet; then what goes first is copied first, else what all behind it needs. Returns
        the victims, of which some were split."""
        controller = self._controller
        mark_next(victims)
        parts: dict[Tier, list[Node]] = {tier: [] for tier in self._written_tiers()}
        begins = [node.start for node in victims]
        for node in victims if is_ahead else reversed(victims):
            tier = self._tier_for(node, parts, is_ahead)
            if tier is None:
                if not is_ahead and is_only_on_device(node):
                    controller.count_backup(Tier.HOST, len(node.key), is_dropped=True)
                continue
            num_planned, num_pages = controller.pages_of(parts[tier]), len(node.key) // self._tree.page_size
            num_allowed = self._links.num_allowed(tier) - num_planned
            if not self._links.is_worth_copying(tier, node.start, node.end):
                num_allowed = min(num_allowed, self._links.trial_pages)
            copied = node
            if num_allowed < num_pages:
                front = num_pages - num_allowed if is_ahead else num_allowed
                upper = self._tree.split(node, self._front_tokens(node, front))
                copied = node if is_ahead else upper
                num_allowed = len(copied.key) // self._tree.page_size
            if controller.make_room(tier, num_planned + min(num_pages, num_allowed), victims, spares_pinned=True):
                parts[tier].append(copied)
        for tier, nodes in parts.items():
            if nodes:
                controller.back_up(nodes[::-1] if is_ahead else nodes, tier, kept=victims)
        return parts_of(victims, begins)

    def room(self, tier: Tier, num_planned: int) -> Room:
        """What a tier could give a copy beside num_planned pages that are about to be copied there."""
        node = self._tree.order.next_of(tier)
        return Room(
            self._tables[tier].num_free - num_planned,
            self._links.num_allowed(tier) - num_planned,
            self._tree.order.class_of(node, tier) if node is not None else None,
            self._tree.order.rank(node) if node is not None else (),
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _written_tiers(self) -> list[Tier]:
        """The tiers that copies go to, the fastest first."""
        unwritten = self._controller.unwritten
        return [tier for tier in self._tree.order.load_order if tier in self._tables and tier not in unwritten]

    def _write_later(self, end: Node) -> None:
        """A link that hangs may take nothing for long, and nodes that have left the tree keep their tokens alive."""
        self._to_write[end.id] = end
        if len(self._to_write) >= self._tidy_at:
            self._to_write = {node.id: node for node in self._waiting_ends()}
            self._tidy_at = 2 * len(self._to_write) + _TIDY_WAITING

    def _waiting_ends(self) -> list[Node]:
        return [node for end in self._to_write.values() if (node := survivor_of(end)) is not None]

    def _write_rest(self) -> None:
        """Write through what found the link busy."""
        ends, self._to_write, self._tidy_at = self._waiting_ends(), {}, _TIDY_WAITING
        for node in ends if Tier.HOST not in self._controller.unwritten else ():
            if node.parent is not None:
                self.write_through(node)

    def _tier_for(self, node: Node, planned: dict[Tier, list[Node]], is_ahead: bool) -> Tier | None:
        """Where a copy of a node goes that the device gives up soon. planned: copies that are about to begin."""
        if not planned or node.is_partial:
            return None
        is_worth = self._links.is_worth_trying
        worth = {tier: nodes for tier, nodes in planned.items() if is_worth(tier, node.start, node.end)}
        # A tier that is only tried, as its speed is not known, gets no only copy if there is another that takes it.
        unknown = {
            tier: nodes
            for tier, nodes in worth.items()
            if not (self._links.is_measured(tier) and self._links.is_worth_copying(tier, node.start, node.end))
        }
        if len(unknown) < len(worth):
            worth = {tier: nodes for tier, nodes in worth.items() if tier not in unknown}
        is_alone = is_only_on_device(node)
        if is_alone and worth:
            num_pages, rank = len(node.key) // self._tree.page_size, self._tree.order.rank(node)
            chosen = self._choose(num_pages, rank, self._rooms(worth))
            if chosen is None and unknown:
                worth, chosen = unknown, choose_tier(num_pages, rank, self._rooms(unknown))
            if (
                is_ahead
                and chosen is not None
                and self._has_room_soon(chosen, self._controller.pages_of([*worth[chosen], node]))
            ):
                self._num_put_off += num_pages
                return None
            return chosen
        first = next(iter(planned))
        if first in worth and node.frames[first] is None and node.tickets[Tier.HOST] is None:
            # Another tier has it: the fastest one gets it if it has room to spare.
            num_pages = self._controller.pages_of([*worth[first], node])
            has_room = num_pages <= self._tables[first].num_free
            return first if has_room and num_pages <= self._links.num_allowed(first) else None
        if not is_ahead:
            return None
        # A little is copied also where it is not worth it, which shows when a tier has become faster.
        lacking = (
            t for t in planned if t not in worth and node.frames[t] is None and self._is_trial_copy(t, planned[t])
        )
        return next(lacking, None)

    def _choose(self, num_pages: int, rank: Rank, rooms: dict[Tier, Room]) -> Tier | None:
        """As `choose_tier`, but a tier that failed lately gets nothing that another one takes without a loss."""
        sound = {tier: room for tier, room in rooms.items() if self._links.is_sound(tier)}
        chosen = choose_tier(num_pages, rank, sound, gives_up_last=False) if len(sound) < len(rooms) else None
        return choose_tier(num_pages, rank, rooms) if chosen is None else chosen

    def _has_room_soon(self, tier: Tier, num_pages: int) -> bool:
        """Whether a tier would give up the only copy of something for so many pages, though loads from it are under
        way, which leave copies to spare."""
        lacking = num_pages - self._tables[tier].num_free
        if lacking <= 0 or not self._ledger.num_pages_on(LOAD_LINKS[tier]):
            return False
        return any(self._tree.order.class_of(node, tier) >= LAST for node in self._tree.victims(tier, lacking))

    def _is_trial_copy(self, tier: Tier, planned: list[Node]) -> bool:
        """Whether a copy to a tier would be the only one on its way there, and begins."""
        return not planned and self._links.is_idle(tier) and self._links.num_allowed(tier) > 0

    def _gives_up_retired(self, tier: Tier) -> bool:
        """Whether what a tier would give up next is of no use to any request."""
        node = self._tree.order.next_of(tier)
        return node is not None and node.priority == RETIRED_PRIORITY

    def _rooms(self, planned: dict[Tier, list[Node]]) -> dict[Tier, Room]:
        return {tier: self.room(tier, self._controller.pages_of(nodes)) for tier, nodes in planned.items()}

    def _front_tokens(self, node: Node, num_pages: int) -> int:
        """Where a node is cut for num_pages in front: behind a block if there is one."""
        whole = self._tree.order.whole_blocks(node, num_pages * self._tree.page_size)
        return whole if whole > 0 else num_pages * self._tree.page_size


def parts_of(nodes: list[Node], begins: list[int]) -> list[Node]:
    """What splitting has made of nodes that began at `begins`: each and those above it, the last first."""
    parts: list[Node] = []
    for node, begin in zip(nodes, begins, strict=True):
        parts.append(node)
        while parts[-1].start > begin:
            assert parts[-1].parent is not None
            parts.append(parts[-1].parent)
    return parts
