"""`HiCacheController`: copies between device, peers and host, and what leaves these tiers.

Owns the write policy; what `auto` copies from the device is in auto_copies.py. Decides nothing about requests and
executes nothing: the scheduler calls it, links carry the operations out. Storage is the business of
storage_controller.py.

    device ── D2H: back_up, begin_spill ──► host
    device ◄── H2D: begin_load ──────────── host
    device ── D2P: back_up, when it evicts; begin_spill ──► peer
    device ◄── P2D: begin_load ──────────────────── peer
    peer ── P2H: move_to_host, when the peer gives it up ──► host
    peer ── P2P: see slab_withdrawal.py ──► peer
    device ── D2S: begin_swap ──► swap file of a request that streams

What storage brings and what the device computes may be the same page: such a node is CACHED on the device and FILLING
on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from sglang.srt.managers.auto_copies import AutoCopies, parts_of
from sglang.srt.managers.backup_links import BackupLinks
from sglang.srt.managers.transfer_ledger import TransferLedger
from sglang.srt.managers.windowed_host import WindowedHost
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import is_alone
from sglang.srt.mem_cache.node import (
    FilledRun,
    Node,
    is_lacking,
    is_only_on_device,
    is_ready,
    is_whole,
    mark_next,
    note_source,
    ready_frames,
)
from sglang.srt.mem_cache.placement import (
    LAST,
    WRITE_POLICIES,
    choose_tier,
    pages_to_write_ahead,
)
from sglang.srt.mem_cache.transfer import BACKUP_LINKS, D2S, LOAD_LINKS, P2H, Ticket, Tier, TransferOp
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

# The tiers below the device that pages are copied to.
_OTHER = {Tier.PEER: Tier.HOST, Tier.HOST: Tier.PEER}
_FROM_DEVICE = frozenset(BACKUP_LINKS.values())
# With write_through_selective, pages that so many requests have used go to the host.
SELECTIVE_HITS = 2

# Of the host's pages, one in so many may be what partial nodes lack, besides those that are free.
_PARTIAL_SHARE = 8

# What peers give up, of which storage lacks all, is looked for and copied so many times as far as it must go.
_MOVED_AHEAD = 4


class HiCacheController:
    """write_policy: when pages go to the host: write_through at once, write_through_selective when a second request
    uses them, write_back when they leave the device. To peers they then go when they leave the device, so that peers
    hold what it has no room for. auto: see placement.py. peers_written_through: see `SchedulerConfig`."""

    def __init__(
        self, ledger: TransferLedger, write_policy: str = "auto", peers_written_through: bool = False
    ) -> None:
        self.ledger = ledger
        self.tree: HiRadixTree = ledger.tree
        self.tables: dict[Tier, FrameTable] = ledger.tables
        self.links = BackupLinks(ledger)
        self.auto = AutoCopies(self)
        self.counters: Counter[str] = Counter()
        self.clock = ledger.clock
        self.windowed_host = WindowedHost(self, ledger.pools.border)
        self._peers_written_through = peers_written_through
        self._to_compact: list[Node] = []
        # Whether storage is attached, to which everything comes through the host; and whether what is computed goes
        # there at once, for which the host gives up copies: peers get pages that the host never had.
        self.feeds_storage = self.stores_early = False
        # See `TierSwitches`.
        self.unwritten: frozenset[Tier] = frozenset()
        # By tier: of what it gives up next, pages that were looked at, see `num_to_look_at`.
        self.num_looked_at: Counter[Tier] = Counter()
        # Pages that the device, or peers, have given up and no peer had room for.
        self.num_short_of_peers = 0
        # See `StorageAdvice`.
        self.is_worth_storing: Callable[[int, int], bool] = lambda start, end: True
        self._host_filled: Callable[[list[Node]], None] = lambda nodes: None
        # See `TenantQuotas`.
        self.is_over_quota: Callable[[Node, Tier], bool] = lambda node, tier: False
        # Called with nodes that a tier is about to evict.
        self.evicting: Callable[[list[Node], Tier], None] = lambda nodes, tier: None
        self.set_write_policy(write_policy)

    def set_write_policy(self, write_policy: str) -> None:
        if write_policy not in WRITE_POLICIES:
            raise ValueError(f"write policy {write_policy!r} is none of {', '.join(WRITE_POLICIES)}")
        self.write_policy = write_policy
        self.tree.set_placement(adds_up=write_policy == "auto")

    @property
    def bounds_copies(self) -> bool:
        """Whether what the device evicts is copied only as far as links take it."""
        return self.write_policy == "auto"

    def watch_host(self, filled: Callable[[list[Node]], None], leaving: Callable[[list[Node]], None]) -> None:
        """filled: called with the nodes that a copy has brought to the host. leaving: with those that it has whole,
        and soon partial."""
        self._host_filled, self.windowed_host.leaving = filled, leaving

    @property
    def has_host(self) -> bool:
        return Tier.HOST in self.tables

    # -- loads --------------------------------------------------------------------------------------------------

    def begin_load(self, nodes: list[Node]) -> list[Ticket]:
        """Load a path of nodes (top first) that are not on the device, each from the nearest tier that has it. The
        caller has made room on the device. Of those that windows do not reach from its end, layers with a window are
        left out."""
        tickets, windows, end = [], self.tree.windows, nodes[-1].end
        cut, first_seen = windows.cut(end), windows.first_seen(end)
        for source, part in self._by_source(nodes, first_seen).items():
            # What the host has partial ends where windows reach begins, which may be behind the cut.
            num_unseen = max(
                (
                    i + 1
                    for i, node in enumerate(part)
                    if node.end <= cut or (node.end <= first_seen and not is_whole(node, source))
                ),
                default=0,
            )
            unseen = part[:num_unseen]
            if not self._may_be_partial(self.pages_of(unseen)):
                unseen = []
            op = self._begin_copy(LOAD_LINKS[source], (source, Tier.DEVICE), part, num_unseen=len(unseen))
            assert op is not None, "a load needs free frames: make room first"
            tickets.append(op.ticket)
            num_tokens = self.tokens_of(part)
            self.counters["load_back_tokens"] += num_tokens
            self.counters["load_full_only_tokens"] += self.tokens_of(unseen)
            if source == Tier.PEER:
                self.counters["load_peer_tokens"] += num_tokens
        return tickets

    def _may_be_partial(self, num_pages: int) -> bool:
        """Whether so many more pages may be partial on the device. They need their copies below it: that costs room
        where those are given up for others once the device has them, or were not made before it gives them up. A pool
        of its own for layers with a window has no room for more than that."""
        if self.ledger.windowed or self.write_policy in ("write_through", "write_through_selective"):
            return True
        host = self.tables[Tier.HOST]
        return self.tree.counts.partial + num_pages <= host.num_pages // _PARTIAL_SHARE + host.num_free

    def complete_partial(self, nodes: list[Node]) -> list[Ticket]:
        """Load what the device lacks of partial nodes, into the pages that they have."""
        tickets = []
        for source, part in self._by_source(nodes, first_seen=0).items():
            src = np.concatenate([ready_frames(node, source) for node in part])
            dst = np.concatenate([frames for node in part if (frames := node.frames[Tier.DEVICE]) is not None])
            self.tables[Tier.DEVICE].transition(dst, FrameState.CACHED, FrameState.FILLING)
            tiers = source, Tier.DEVICE
            op = self.ledger.begin_transfer(
                LOAD_LINKS[source], tiers, src, dst, None, num_windowed_only_pages=len(src)
            )
            self.tree.begin_completing(part, op.ticket)
            tickets.append(op.ticket)
            self.counters["load_windowed_only_tokens"] += self.tokens_of(part)
        return tickets

    def _by_source(self, nodes: list[Node], first_seen: int) -> dict[Tier, list[Node]]:
        """Nodes by the nearest tier that has them and is read, else by one that is not read any more; whole, if they
        end behind first_seen."""
        by_source: dict[Tier, list[Node]] = {}
        for node in nodes:
            is_seen = node.end > first_seen
            source = self.tree.whole_source_of(node) if is_seen else self.tree.source_of(node)
            source = source or self.tree.order.ready_tier(node, whole=is_seen)
            assert source is not None, f"{node} is ready nowhere"
            by_source.setdefault(source, []).append(node)
        return by_source

    # -- backups ------------------------------------------------------------------------------------------------

    def back_up_inserted(self, node: Node) -> None:
        """The path to `node` has got pages that the host may lack."""
        if self._peers_written_through and self._is_written(Tier.PEER):
            self.begin_backup(node, Tier.PEER)
        if self.write_policy == "write_through" and self._is_written(Tier.HOST):
            self.begin_backup(node)
        elif self.write_policy == "auto" and self.has_host and Tier.HOST not in self.unwritten:
            self.auto.write_through(node)

    def back_up_reused(self, node: Node) -> None:
        """Another request uses the path to `node`."""
        if self.write_policy != "write_through_selective" or not self._is_written(Tier.HOST):
            return
        step: Node | None = node
        while step is not None and step.parent is not None and step.hits < SELECTIVE_HITS:
            step = step.parent
        if step is not None and step.parent is not None:
            self.begin_backup(step)

    def _is_written(self, tier: Tier) -> bool:
        """Whether a tier takes copies from the device. What a link that hangs or fails was given would only wait, and
        room was made for it."""
        return tier in self.tables and tier not in self.unwritten and not self.links.is_left_alone(tier)

    def begin_backup(self, node: Node, tier: Tier = Tier.HOST, only_uncopied: bool = False) -> Ticket | None:
        """Back up what the tier lacks of the path to `node`. None if it lacks nothing or has no room, or its link
        hangs. only_uncopied: only what no other tier below the device has either."""
        if tier not in self.tables or BACKUP_LINKS[tier] in self.links.late:
            return None
        nodes = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            is_there = step.frames[tier] is not None or (only_uncopied and not is_only_on_device(step))
            if not is_there and is_whole(step, Tier.DEVICE):
                nodes.append(step)
            step = step.parent
        return self.back_up(nodes[::-1], tier, kept=self.tree.path_of(node)) if nodes else None

    def back_up(self, nodes: list[Node], tier: Tier, kept: Sequence[Node] = ()) -> Ticket | None:
        """Copy nodes that are ready on the device to a tier that lacks them, by one operation. None if the tier has
        no room, or may have no more of theirs. kept: nodes whose copies are not given up for it."""
        if not (nodes := [node for node in nodes if not self.is_over_quota(node, tier)]):
            return None
        if tier == Tier.HOST and self.feeds_storage:
            whole = self._from_block_starts(nodes)
            if len(whole) > len(nodes) and self.make_room(tier, self.pages_of(whole), kept, spares_pinned=True):
                nodes = whole
        self.make_room(tier, self.pages_of(nodes), kept)
        after = LaunchSeq(max(n.fences[Tier.DEVICE] for n in nodes))
        num_tokens = self.tokens_of(nodes)
        op = self._begin_copy(BACKUP_LINKS[tier], (Tier.DEVICE, tier), nodes, after)
        self.count_backup(tier, num_tokens, is_dropped=op is None)
        return None if op is None else op.ticket

    def _begin_copy(
        self,
        link: str,
        tiers: tuple[Tier, Tier],
        nodes: list[Node],
        after: LaunchSeq | None = None,
        num_unseen: int = 0,
    ) -> TransferOp | None:
        """Copy nodes to another tier. None if that has not enough free frames. tiers: source and destination. after:
        see `TransferOp`. num_unseen: of the first so many layers with a window are left out; the source has the
        others whole."""
        src = np.concatenate([ready_frames(node, tiers[0], whole=i >= num_unseen) for i, node in enumerate(nodes)])
        first_page = nodes[0].start // self.tree.page_size
        dst = self.tables[tiers[1]].allocate(len(src), FrameState.FILLING, first_page)
        if dst is None:
            return None
        if tiers[1] == Tier.HOST:
            nodes, num_unseen = self.windowed_host.fitting(nodes)
        num_full_only_pages = self.pages_of(nodes[:num_unseen])
        op = self.ledger.begin_transfer(link, tiers, src, dst, after, num_full_only_pages=num_full_only_pages)
        self.tree.begin_fill(nodes, *tiers, dst, op.ticket, num_unseen)
        return op

    def _from_block_starts(self, nodes: list[Node]) -> list[Node]:
        """The nodes, and before each what the host lacks of the block that it begins in: storage takes whole blocks,
        and finds nothing behind one that it lacks."""
        assert self.tree.names.keys is not None
        size, known, found = self.tree.names.keys.block_tokens, {node.id for node in nodes}, []
        for node in nodes:
            begin, fronts, above = node.start // size * size, [], node.parent
            if not self.is_worth_storing(begin, node.end):
                above = None
            while above is not None and above.end > begin and is_only_on_device(above) and above.id not in known:
                if above.start < begin:
                    self.tree.split(above, begin - above.start)
                fronts.append(above)
                known.add(above.id)
                above = above.parent
            found += [*fronts[::-1], node]
        return found

    def move_to_host(self, nodes: list[Node], kept: Sequence[Node] = ()) -> None:
        """Copy to the host those nodes that only peers have, which are about to give them up, as far as the host has
        room for them, or has less valuable pages, or such as storage has. kept: other nodes, whose copies stay."""
        moving: list[Node] = []
        num_moving = 0
        stay = [node for node in kept if node.frames[Tier.HOST] is not None]
        for node in nodes if Tier.HOST not in self.unwritten else ():
            num_pages = len(node.key) // self.tree.page_size
            is_known = is_ready(node, Tier.PEER) and is_lacking(node) and node.frames[Tier.HOST] is None
            if not is_known or not self.links.is_worth_trying(Tier.HOST, node.start, node.end):
                continue
            if self.is_over_quota(node, Tier.HOST):
                continue
            room = self.auto.room(Tier.HOST, num_moving)._replace(num_allowed=num_pages)
            goes = choose_tier(num_pages, self.tree.order.rank(node), {Tier.HOST: room}) is not None
            if not (goes or (self.feeds_storage and self._gives_up_stored(num_moving + num_pages, stay))):
                continue
            # Peers are giving up what is oldest anyway.
            if self.make_room(Tier.HOST, num_moving + num_pages, stay, spares_pinned=True, ages=False):
                moving.append(node)
                num_moving += num_pages
        if moving:
            self.copy_to_host(moving)

    def _gives_up_stored(self, num_pages: int, kept: Sequence[Node]) -> bool:
        """Whether nothing is lost if the host makes room for so many pages: storage or another tier has it too."""
        missing = num_pages - self.tables[Tier.HOST].num_free
        return all(
            not is_lacking(node) or node.frames[Tier.PEER] is not None or self.tree.names.has_stored(node)
            for node in self.tree.victims(Tier.HOST, missing, {node.id for node in kept}, splits=False)
        )

    def copy_to_host(self, nodes: list[Node]) -> None:
        """Copy nodes that peers have to the host, which has room for them."""
        num_tokens = self.tokens_of(nodes)
        op = self._begin_copy(P2H, (Tier.PEER, Tier.HOST), nodes)
        assert op is not None, "there was room"
        self.counters["moved_to_host_tokens"] += num_tokens

    def begin_spill(
        self, below: Node, tokens: np.ndarray, src: np.ndarray, fence: LaunchSeq, priority: int, tiers: list[Tier]
    ) -> tuple[Ticket, Node] | None:
        """Move to the first of the tiers that has room what a request has computed below a node, on pages src that
        are its own, as much of it as there is room for; None if there is none. The request locks the node that it
        gets."""
        found = self._room_to_spill(len(src), self.tree.path_of(below), tiers)
        if found is None:
            return None
        tier, num_pages = found
        if Tier.PEER in tiers and tier != Tier.PEER:
            self.num_short_of_peers += num_pages
        link = BACKUP_LINKS[tier]
        src, tokens = src[:num_pages], tokens[: num_pages * self.tree.page_size]
        first_page = below.end // self.tree.page_size
        dst = self.tables[tier].allocate(num_pages, FrameState.FILLING, first_page)
        assert dst is not None
        op = self.ledger.begin_transfer(link, (Tier.DEVICE, tier), src, dst, fence)
        self.count_backup(tier, len(tokens), is_dropped=False)
        run = FilledRun(tokens, dst, op.ticket, fence, priority)
        return op.ticket, self.tree.put_run(below, run, tier, self.clock.next)

    def _room_to_spill(self, num_pages: int, kept: list[Node], tiers: list[Tier]) -> tuple[Tier, int] | None:
        """The first of the tiers that has free room for so many pages, else the first that has any, or could make it,
        and how many it takes. kept: nodes that stay."""
        rooms = {}
        for tier in tiers:
            table = self.tables[tier]
            table.reap(self.clock.done)
            if table.num_free >= num_pages:
                return tier, num_pages
            rooms[tier] = min(num_pages, table.num_free + self.tree.evictable_pages(tier, kept))
        for tier, room in rooms.items():
            if room > 0 and self.make_room(tier, room, kept):
                return tier, room
        return None

    def tiers_below(self) -> list[Tier]:
        """The tiers below the device that take what a request streams, the fastest first. The host is one even where
        its link is slow, or writing is turned off, as the request could not go on without it; but not while its link
        hangs."""
        return [
            tier
            for tier in self.tree.order.load_order
            if (tier == Tier.HOST and BACKUP_LINKS[tier] not in self.links.unusable)
            or (tier in self.tables and tier not in self.unwritten and self.links.works(tier))
        ]

    def begin_swap(self, src: np.ndarray, fence: LaunchSeq) -> TransferOp | None:
        """Write pages src of the device, a request's own, to the swap file; None if that has no room for them all, or
        does not answer, or is broken."""
        swap = self.ledger.pools.swap
        if swap is None or D2S in self.links.unusable:
            return None
        swap.reap(self.clock.done)
        dst = swap.allocate(len(src))
        if dst is None:
            return None
        return self.ledger.begin_transfer(D2S, (Tier.DEVICE, Tier.DISK), src, dst, fence)

    # -- ends ---------------------------------------------------------------------------------------------------

    def commit(self, ticket: Ticket) -> None:
        """The operation brought its bytes on every rank."""
        op = self.ledger.end(ticket)
        assert isinstance(op, TransferOp)
        self.links.failing.note_ended(ticket.link, is_ok=True)
        if op.dst == Tier.DISK:
            return
        nodes = self.commit_nodes(ticket, op.dst)
        note_source(nodes, op.src)
        if op.dst == Tier.HOST:
            self._host_filled(nodes)
        if op.dst == Tier.PEER and self.write_policy == "auto":
            self._drop_trial_copies(nodes)
        if (op.src, op.dst) == (Tier.PEER, Tier.DEVICE):
            for node in nodes:
                self.back_up_inserted(node)
        # The last one takes in all above it.
        for node in reversed(nodes):
            if node.parent is not None:
                self.tree.compact(node, self.clock.done)

    def _drop_trial_copies(self, nodes: list[Node]) -> None:
        """Give up what went to peers only to measure how slow they are: once they alone have it, all behind it that
        the host has would be computed, too. What a request uses stays: one that streams may have had it copied."""
        for node in nodes:
            is_elsewhere = not is_lacking(node) or (node.frames[Tier.HOST] is not None and not node.is_host_partial)
            if is_elsewhere and not node.lock and not self.links.is_worth_copying(Tier.PEER, node.start, node.end):
                self.drop(node, Tier.PEER)

    def give_up_late_copies(self) -> None:
        """Take their device pages back from copies that hang. What they bring is not used: the pages may be written
        while they are read, and those that it writes stay pinned. Pages whose memory may be lent are not taken back,
        nor is what a request spills."""
        for ticket, op in list(self.ledger.in_flight.items()):
            if ticket.link not in self.links.late or not self.ledger.can_release(ticket):
                continue
            assert isinstance(op, TransferOp)
            nodes = list(self.tree.nodes_of(ticket))
            if any(node.lock and node.frames[Tier.DEVICE] is None for node in nodes):
                continue
            for node in nodes:
                self.drop(node, op.dst)
            self.ledger.release_source(ticket)

    def commit_nodes(self, ticket: Ticket, tier: Tier) -> list[Node]:
        """The nodes that still wanted what the operation brought; their frames are CACHED now."""
        nodes = self.tree.commit(ticket, tier)
        for node in nodes:
            frames = node.frames[tier]
            assert frames is not None
            self.tables[tier].transition(frames, FrameState.FILLING, FrameState.CACHED)
        return nodes

    def abort(self, ticket: Ticket, was_cancelled: bool = False) -> None:
        """The operation failed on some rank, perhaps as it was cancelled. A failed load also loses its source, else
        it is retried for ever; the scheduler has ended the holds of all requests that read these nodes."""
        op = self.ledger.end(ticket)
        assert isinstance(op, TransferOp)
        if not was_cancelled:
            self.links.failing.note_ended(ticket.link, is_ok=False)
        for node in list(self.tree.nodes_of(ticket)):
            for tier in (op.dst, op.src) if op.dst == Tier.DEVICE else (op.dst,):
                self.drop(node, tier)
        self.counters["failed_ops"] += 1

    # -- room ---------------------------------------------------------------------------------------------------

    def make_room(
        self, tier: Tier, num_pages: int, kept: Sequence[Node], spares_pinned: bool = False, ages: bool = True
    ) -> bool:
        """Evict until so many pages of a tier below the device are free; the nodes `kept` stay, and everything if
        that would not be enough. spares_pinned: pinned copies stay, too. ages: whether a slow tier gives up
        what is as old, see `_aged_with`. Whether they are free."""
        table = self.tables[tier]
        table.reap(self.clock.done)
        missing = num_pages - table.num_free
        if 0 < missing <= self.tree.evictable_pages(tier, kept, spares_pinned):
            stay = {node.id for node in kept}
            if tier == Tier.PEER and self._moves_unstored:
                stay |= self._move_unstored(missing, kept)
            victims = self.tree.victims(tier, missing, stay, stay=False)
            if tier == Tier.HOST and (border := self.windowed_host.border) is not None:
                border.note_given_up(victims)
            self._give_up(victims, tier, kept, ages)
        return table.num_free >= num_pages

    @property
    def _moves_unstored(self) -> bool:
        """Whether what peers alone have goes to the host before they give it up, as storage is fed from there."""
        return self.write_policy == "auto" and self.feeds_storage

    def _move_unstored(self, num_pages: int, kept: Sequence[Node]) -> set[int]:
        """Copy to the host what storage lacks of what peers give up next, up to `_MOVED_AHEAD` times num_pages or a
        little more. Returns the ids of nodes that stay for it: none if num_pages could not go without them."""
        begin, moving, num_moving = {node.id for node in kept}, set[int](), 0
        while True:
            victims = self.tree.victims(Tier.PEER, num_pages, begin | moving)
            if self.pages_of(victims) < num_pages:
                return set()
            unstored = self._unstored(victims) if num_moving < _MOVED_AHEAD * num_pages else []
            mark_next(unstored)
            self.move_to_host(unstored, [*victims, *kept])
            begun = [node for node in unstored if node.frames[Tier.HOST] is not None]
            if not begun:
                return moving
            moving.update(node.id for node in begun)
            num_moving += self.pages_of(begun)

    def _unstored(self, nodes: Iterable[Node]) -> list[Node]:
        """Those that storage lacks, and takes, and no tier but peers has."""
        return [
            node
            for node in nodes
            if is_lacking(node)
            and node.frames[Tier.HOST] is None
            and not self.tree.names.is_stored(node)
            and not is_alone(self.tree.root_of(node).namespace)
        ]

    def evict_of(self, tier: Tier, num_pages: int, node_ids: frozenset[int]) -> None:
        """As `evict`, but only nodes of the list go."""
        victims = self.tree.victims(tier, num_pages, _AllBut(node_ids), stay=False)
        self._give_up(self._save(victims) if tier == Tier.DEVICE else victims, tier)

    def evict(self, tier: Tier, num_pages: int, waits: bool = False) -> None:
        """Evict up to num_pages and free what may be reused at once; the rest follows when its fence passes. What the
        device gives up is saved first, by the write policy. waits: whether it keeps what links would take that are
        busy."""
        if tier != Tier.DEVICE:
            self._give_up(self.tree.victims(tier, num_pages, stay=False), tier)
            return
        # What is being copied from the device becomes free only then: others go first.
        in_flight = [ticket for ticket in self.ledger.in_flight if ticket.link in _FROM_DEVICE]
        copied = {node.id for ticket in in_flight for node in self.tree.nodes_of(ticket)}
        for kept in (copied, ()) if copied else ((),):
            victims = self.tree.victims(tier, num_pages, kept, stay=waits)
            if waits and self.write_policy == "auto":
                victims = self.auto.before_links_are_busy(victims)
            num_pages -= self.pages_of(victims) if kept else num_pages
            self._give_up(self._save(victims), tier)
            if num_pages <= 0:
                break

    def shed(self, num_pages: int, reads_from: Mapping[int, tuple[int, int]]) -> None:
        """Give up what layers with a window have of so many device pages; their nodes are partial then. What no other
        tier has is saved first, as in `evict`. reads_from: see `WindowedPool.victims`."""
        pool = self.ledger.windowed[Tier.DEVICE]
        # Deepest first, as victims of the device are.
        victims = sorted(pool.victims(num_pages, reads_from), key=lambda node: -node.start)
        for node in self._save(victims):
            pages = ready_frames(node, Tier.DEVICE)
            fence = max(node.fences[Tier.DEVICE], node.last_use, self.clock.last if node.lock else NO_LAUNCH)
            self.tree.make_partial(node)
            num_shed = pool.take_away(pages, LaunchSeq(fence))
            self.counters["evicted_tokens_windowed"] += num_shed * self.tree.page_size
            self._to_compact.append(node)

    def num_to_look_at(self, tier: Tier, num_pages: int) -> int:
        """Pages to look at of what a tier gives up next, so that num_pages can go at once; 0 for not now. The caller
        sets `num_looked_at`."""
        table = self.tables[tier]
        num_free = table.num_free + table.counts[FrameState.PENDING_FREE]
        return pages_to_write_ahead(num_pages, num_free, self.num_looked_at[tier])

    def _save(self, victims: list[Node]) -> list[Node]:
        """Copy what the device is about to give up, as the write policy has it. No copy of one victim is given up for
        another. Returns the victims, of which some were split."""
        if len(self.tables) == 1:
            return victims
        if self.write_policy == "auto":
            return self.auto.copy_before_eviction(victims)
        begins = [node.start for node in victims]
        for tier in (Tier.PEER, Tier.HOST) if self.write_policy == "write_back" else (Tier.PEER,):
            if tier not in self.tables or tier in self.unwritten:
                continue
            lacking = [node for node in reversed(victims) if node.frames[tier] is None and not node.is_partial]
            fitting = self._fitting(lacking, tier, kept=victims) if self._is_written(tier) else []
            num_lacking, num_fitting = self.tokens_of(lacking), self.tokens_of(fitting)
            if fitting:
                self.back_up(fitting, tier, kept=victims)
            self.count_backup(tier, num_lacking - num_fitting, is_dropped=True)
        return parts_of(victims, begins)

    def pages_of(self, nodes: Iterable[Node]) -> int:
        return self.tokens_of(nodes) // self.tree.page_size

    @staticmethod
    def tokens_of(nodes: Iterable[Node]) -> int:
        return sum([len(node.key) for node in nodes])

    def _fitting(self, nodes: list[Node], tier: Tier, kept: Sequence[Node]) -> list[Node]:
        """The first of the nodes, as many as a tier has room for."""
        room = self.tables[tier].num_free + self.tree.evictable_pages(tier, kept)
        for i, node in enumerate(nodes):
            room -= len(node.key) // self.tree.page_size
            if room < 0:
                return nodes[:i]
        return nodes

    def _give_up(self, victims: list[Node], tier: Tier, kept: Sequence[Node] = (), ages: bool = True) -> None:
        begins = [node.start for node in victims]
        if tier == Tier.PEER and self._moves_unstored:
            self.move_to_host(self._unstored(victims), [*victims, *kept])
        elif tier == Tier.PEER and self.has_host and self.write_policy != "auto":
            self.move_to_host(victims, kept)
        victims = parts_of(victims, begins)
        aged = self._aged_with(victims, tier, kept) if ages else []
        self._evict_nodes(victims, tier)
        if aged:
            self._evict_nodes([node for node in aged if node.frames[_OTHER[tier]] is not None], _OTHER[tier])

    def _aged_with(self, victims: list[Node], tier: Tier, kept: Sequence[Node]) -> list[Node]:
        """What the other tier below the device gives up along with the victims of this one, if it has become so slow
        that nothing is copied to it any more. As nothing new displaces what it has, it would keep for ever what was
        used before the victims, and requests would wait for it."""
        other = _OTHER.get(tier)
        if other not in self.tables or self.write_policy != "auto" or self.links.is_fast(other) or not victims:
            return []
        newest = max(map(self.tree.order.rank, victims))
        stay = {node.id for node in (*victims, *kept)}
        aged = self.tree.victims(other, self.pages_of(victims), stay)
        return [n for n in aged if self.tree.order.class_of(n, other) < LAST or self.tree.order.rank(n) < newest]

    def _evict_nodes(self, nodes: list[Node], tier: Tier) -> None:
        table = self.tables[tier]
        before = table.counts[FrameState.CACHED]
        if Tier.PEER in self.tables and tier != Tier.HOST:
            other = Tier.PEER if tier == Tier.DEVICE else Tier.DEVICE
            self.num_short_of_peers += self.pages_of(node for node in nodes if node.frames[other] is None)
        self.evicting(nodes, tier)
        dropped = self.tree.give_up(nodes, tier)
        self.ledger.free(dropped, tier)
        self._to_compact += dropped.staying
        num_evicted = before - table.counts[FrameState.CACHED]
        self.counters[f"evicted_tokens_{tier.name.lower()}"] += num_evicted * self.tree.page_size
        self.num_looked_at[tier] = max(0, self.num_looked_at[tier] - num_evicted)
        table.reap(self.clock.done)

    def give_up_on_host(self, nodes: list[Node]) -> None:
        """Whatever their age."""
        self._evict_nodes(nodes, Tier.HOST)

    def compact_later(self, node: Node) -> None:
        """It was cut; see `tidy`."""
        self._to_compact.append(node)

    def tidy(self) -> None:
        """When nothing else looks at nodes: move the border between the host's pools, and merge what eviction has
        cut, as the device gives up a page per decode step when it is full, and each would become a node on the
        host."""
        if (border := self.windowed_host.border) is not None:
            border.update()
        if not self._to_compact:
            return
        cut, self._to_compact = self._to_compact, []
        for node in cut:
            if node.parent is not None and (node.is_partial or node.is_host_partial):
                self.tree.compact(node, self.clock.done)
            if node.parent is not None and len(node.children) == 1:
                self.tree.compact(next(iter(node.children.values())), self.clock.done)

    def drop(self, node: Node, tier: Tier) -> None:
        """Take a node off a tier, of the device with all below it; operations that fill nothing any more are
        cancelled."""
        self.ledger.free(self.tree.drop([node], tier), tier, self.clock.last)

    def take_back(self, node: Node) -> np.ndarray:
        """Give the device pages of a node, of which nothing is on its way, back to the request that computed them;
        they are HELD again. What is below it leaves the device."""
        assert node.lock == 0
        below, own = self.tree.take_off_device(node, len(node.key))
        self.ledger.free(below, Tier.DEVICE, self.clock.last)
        ((frames, _),) = own.cached
        self.tables[Tier.DEVICE].transition(frames, FrameState.CACHED, FrameState.HELD)
        return frames

    def demote(self, node: Node, num_tokens: int, tiers: list[Tier]) -> None:
        """Take the last num_tokens of a node off the device, whose only user reads another tier's copy from now on.
        Launches that were issued may still read the device's. tiers: those that may take what the user streams."""
        assert node.lock == 1
        assert self.tree.order.ready_tier(node) is not None, f"{node} is ready nowhere else"
        if num_tokens < len(node.key):
            self.tree.split(node, len(node.key) - num_tokens)
        if Tier.PEER in tiers and node.frames[Tier.PEER] is None:
            self.num_short_of_peers += self.pages_of([node])
        self.tree.note_read(node, self.clock.last)
        below, own = self.tree.take_off_device(node, num_tokens)
        self.ledger.free(below, Tier.DEVICE, self.clock.last)
        self.ledger.free(own, Tier.DEVICE, self.clock.last)

    def nodes_in(self, tier: Tier, runs: Sequence[np.ndarray]) -> list[Node]:
        """The nodes that have a frame of the runs on a tier, parents first. All runs in one pass over the tree: a
        server is not to stop for a peer that is lost with all its slabs."""
        nodes = [node for node in self.tree.walk() if node.frames[tier] is not None]
        if not nodes or not runs:
            return []
        is_in = np.zeros(self.tables[tier].num_pages, np.bool_)
        is_in[np.concatenate(runs)] = True
        parts: list[np.ndarray] = [n.frames[tier] for n in nodes]  # type: ignore[misc]
        found = np.logical_or.reduceat(is_in[np.concatenate(parts)], np.cumsum([0, *map(len, parts[:-1])]))
        return [nodes[i] for i in np.flatnonzero(found).tolist()]

    def withdraw_from_device(self, runs: Sequence[np.ndarray]) -> None:
        """Drop every node that has a frame of the runs off the device, with what is below it: they are about to go.
        Locked nodes stay."""
        going = [node for node in self.nodes_in(Tier.DEVICE, runs) if not node.lock]
        self.ledger.free(self.tree.drop(going, Tier.DEVICE), Tier.DEVICE, self.clock.last)

    def count_backup(self, tier: Tier, num_tokens: int, is_dropped: bool) -> None:
        if tier == Tier.HOST and is_dropped:
            self.counters["backup_dropped_tokens"] += num_tokens
        elif tier == Tier.HOST:
            self.counters["backup_tokens"] += num_tokens
        elif is_dropped:
            self.counters["peer_backup_dropped_tokens"] += num_tokens
        else:
            self.counters["peer_backup_tokens"] += num_tokens


class _AllBut:
    """All ids but some."""

    def __init__(self, ids: frozenset[int]) -> None:
        self._ids = ids

    def __contains__(self, id: object) -> bool:
        return id not in self._ids
