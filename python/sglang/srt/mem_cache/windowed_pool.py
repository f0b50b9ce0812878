"""`WindowedPool`: which frames a tier's pages have in a pool for layers with a window alone, and which pages give
theirs up.

A query sees the end of its request in layers with a window, and all of it in the others. So that pool is the smaller
one. A page that leaves it stays on the tier with its other layers, and its node is partial (see window_reach.py):

    device   | system prompt, document ............................. | end |
    frame_of | none: partial                                         |  3  | 8  5
                                                                      seen by what comes next

Owns the frame table of that pool, and the frame of each page. Reads the tree, which alone knows what is partial.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from operator import itemgetter

import numpy as np

from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import Node, is_lacking, is_partial_on, is_whole, last_access_on
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

# A plain integer: looking up a member of an enumeration costs as much as the rest of a line.
_DEVICE = int(Tier.DEVICE)
_NONE = -1
# Before and behind every launch, see `WindowedPool.last_seen`.
FREE_TO_GO, STAYS = -1, 1 << 62
# The rank of what ends of paths see.
_SEEN = 1
# Of a node so many ends are told apart.
_MOST_ENDS = 4
# The part next to what ends see is a window of that many halvings long.
_NEAR = 3
_FAR = 1 << 62
# By ends of paths, in order: the first token that it sees, and when it was last one; each later than those before.
_Ends = tuple[tuple[int, LaunchSeq], ...]
_NOTHING: tuple[int, _Ends, int, int] = _FAR, (), 0, 0
_NO_READS: Mapping[int, tuple[int, int]] = {}


def _joined(some: _Ends, others: _Ends) -> _Ends:
    """Both, without those that see no more than later ones."""
    if not some or not others:
        return some or others
    joined: list[tuple[int, LaunchSeq]] = []
    for first, at in sorted(some + others):
        if not joined or at > joined[-1][1]:
            joined.append((first, at))
    return tuple(joined[-_MOST_ENDS:])


class WindowedPool:
    """pages: the table of the tier, the device or the host. A page that becomes free there has no frame any more.

    frame_of: (num_pages,) int32, -1 for none.
    """

    def __init__(
        self, tree: HiRadixTree, pages: FrameTable, num_windowed_pages: int, tier: Tier = Tier.DEVICE
    ) -> None:
        self.table = FrameTable(num_windowed_pages, pages.block_pages)
        self.frame_of = np.full(pages.num_pages, _NONE, np.int32)
        self._tier = tier
        self._tree = tree
        # Pages that were given up though ends of paths see them.
        self.num_seen_given_up = 0
        # When the oldest such end was one, since that was taken.
        self._oldest_given_up = STAYS
        # What the executor has not been told, of the device.
        self._given: list[np.ndarray] = []
        pages.watch_freed(lambda pages: self.take_away(pages, NO_LAUNCH))

    def give(self, pages: np.ndarray) -> np.ndarray:
        """Give frames to pages, (n,) int32, that have none; there is room. Returns them, int32."""
        frames = self.table.allocate(len(pages))
        assert frames is not None, "make room first"
        assert (self.frame_of[pages] == _NONE).all(), "a page has a frame already"
        self.frame_of[pages] = frames
        if len(pages) and self._tier == Tier.DEVICE:
            self._given.append(np.stack((pages, frames)))
        return frames

    def of(self, pages: np.ndarray) -> np.ndarray:
        """The frames of pages that all have one, (n,) int32."""
        frames = self.frame_of[pages]
        assert (frames != _NONE).all(), "a page lacks what layers with a window have of it"
        return frames

    def take_away(self, pages: np.ndarray, fence: LaunchSeq) -> int:
        """Pages lose their frames, if they have any. Launches up to `fence` may read these. Returns how many."""
        frames = self.frame_of[pages]
        frames = frames[frames != _NONE]
        if len(frames):
            self.frame_of[pages] = _NONE
            self.table.free_after(frames, FrameState.HELD, fence)
            if fence == NO_LAUNCH:
                self.table.reap(0)
        return len(frames)

    def take_given(self) -> np.ndarray:
        """(2, n) int32: pages that got frames since the last call, and these, in order."""
        given, self._given = self._given, []
        return np.concatenate(given, axis=1) if given else np.empty((2, 0), np.int32)

    # -- what goes next -----------------------------------------------------------------------------------------

    def victims(
        self,
        num_pages: int,
        reads_from: Mapping[int, tuple[int, int]] = _NO_READS,
        kept: Container[int] = (),
        spares_seen: bool = False,
    ) -> list[Node]:
        """Nodes that give up the frames of so many pages, or all that can. Ends of paths that may be continued are
        leaves, and where paths part. First goes what is far before all that ends see, as a later request may leave a
        path a little before its end; then what ends see. Of what is as far, the oldest goes first. What requests see
        that hold a lock, or on the host a soft pin, stays. Nodes are cut where that begins.

        reads_from: of the device; by the id of the node that locks end with, how many of them are requests', and the
        first token that these see. What the others see is what windows reach from their end. kept: ids of nodes that
        stay whole. spares_seen: what ends see stays.
        """
        page, size = self._tree.page_size, self._tree.order.cut_tokens
        # Of each node its front goes, up to there.
        ends: dict[int, tuple[Node, int]] = {}
        for rank, age, _, node, start, end in sorted(self._parts(reads_from), key=itemgetter(0, 1, 2)):
            if num_pages <= 0 or (spares_seen and rank == _SEEN):
                break
            if node.id in kept or self._is_copied(node):
                continue
            # No more than is wanted, in whole blocks.
            end = min(end, -(-(start + num_pages * page) // size) * size)
            ends[node.id] = node, end
            num_pages -= (end - start) // page
            if rank == _SEEN:
                self.num_seen_given_up += (end - start) // page
                self._oldest_given_up = min(self._oldest_given_up, age)
        return [self._tree.split(node, end - node.start) if end < node.end else node for node, end in ends.values()]

    def take_oldest_given_up(self) -> int:
        """The launch at which a path last ended with the oldest that was given up though ends see it, since the last
        call; `STAYS` if nothing was."""
        oldest, self._oldest_given_up = self._oldest_given_up, STAYS
        return oldest

    def last_seen(self) -> np.ndarray:
        """(num_windowed_pages,) int64: of each frame, when a path last ended that sees it; `FREE_TO_GO` where
        none does, `STAYS` of what cannot go now."""
        found = np.where(self.table.state == int(FrameState.FREE), FREE_TO_GO, STAYS)
        page, pages, ages = self._tree.page_size, [], []
        for rank, age, _, node, start, end in self._parts(_NO_READS):
            of_node = node.frames[self._tier]
            assert of_node is not None
            pages.append(of_node[(start - node.start) // page : (end - node.start) // page])
            ages.append(age if rank == _SEEN else FREE_TO_GO)
        if pages:
            found[self.of(np.concatenate(pages))] = np.repeat(ages, [len(part) for part in pages])
        # A transfer reads or writes these.
        found[self.table.pins > 0] = STAYS
        return found

    def _parts(self, reads_from: Mapping[int, tuple[int, int]]) -> list[tuple[int, LaunchSeq, int, Node, int, int]]:
        """(rank, last access, place, node, start, end) of all that can go. Of rank, last access and place the least
        goes first."""
        size, parts = self._tree.order.cut_tokens, []
        for node, locked, ends in self._seen(reads_from):
            if not is_whole(node, self._tier):
                continue
            start, last = node.start, node.end
            if locked < last and self._is_read_here(node):
                last = locked // size * size
            age = last_access_on(node, self._tier)
            first_seen = ends[0][0] if ends else _FAR
            for rank, bound in self._distances(start, first_seen) if start < first_seen else ():
                end = min(last, bound // size * size)
                if end > start:
                    parts.append((rank, age, start, node, start, end))
                    start = end
                if start >= last:
                    break
            # What ends see goes with the last one that sees it.
            bounds = [min(last, first // size * size) for first, _ in ends[1:]]
            for (_, age), end in zip(ends, [*bounds, last]):
                if end > start:
                    # A question goes before what it is asked behind.
                    parts.append((_SEEN, age, -start, node, start, end))
                    start = end
        return parts

    def _seen(self, reads_from: Mapping[int, tuple[int, int]]) -> Iterator[tuple[Node, int, _Ends]]:
        """All nodes that the tier has or that are locked, each with the first token that locks see, and what ends of
        paths see, there or below."""
        tier, on_host = self._tier, self._tier != _DEVICE
        nodes: list[Node] = []
        stack: list[Node] = list(self._tree.roots.values())
        while stack:
            node = stack.pop()
            # Only of the device nothing is below what it lacks.
            if on_host or node.frames[tier] is not None or node.lock or node.parent is None:
                nodes.append(node)
                stack.extend(node.children.values())
        first_seen = self._tree.windows.first_seen
        # Of each node's children together: what locks see, what ends see, how many the tier has, locks.
        below: dict[int, tuple[int, _Ends, int, int]] = {}
        for node in reversed(nodes):
            if (parent := node.parent) is None:
                continue
            locked, ends, num_below, num_locks = below.pop(node.id, _NOTHING)
            held = node.lock + node.soft_pins if on_host else node.lock
            if held > num_locks:
                num_known, first = reads_from.get(node.id, (0, _FAR))
                is_known = num_known == held - num_locks
                locked = min(locked, first, _FAR if is_known else first_seen(node.end))
            is_there = node.frames[tier] is not None
            # What the host is about to get may part from what it has.
            parts = len(node.children) > 1 if on_host else num_below > 1
            if is_there and (parts or num_below == 0):
                ends = _joined(ends, ((first_seen(self._begin_of_end(node)), self._last_end(node)),))
            yield node, locked, ends
            if (above := below.get(parent.id)) is not None:
                locked, ends = min(above[0], locked), _joined(above[1], ends)
                below[parent.id] = locked, ends, above[2] + is_there, above[3] + held
            else:
                below[parent.id] = locked, ends, int(is_there), held

    def _begin_of_end(self, node: Node) -> int:
        """Where a path may end that ends with this node: if the answer is shorter than a window, with the prompt,
        which may be asked again without its answer; else with the node."""
        is_near = 0 < node.end - node.asked_end <= self._tree.windows.num_tokens
        return node.asked_end if is_near and not node.children else node.end

    def _last_end(self, node: Node) -> LaunchSeq:
        """Of a node with two below it: when a path last ended with it, if one did, as the other of the two continues
        an answer. Of any other node: its last access; many below it are questions behind a document."""
        is_known = len(node.children) == 2 and node.last_end != NO_LAUNCH
        return node.last_end if is_known else last_access_on(node, self._tier)

    def _distances(self, start: int, first_seen: int) -> Iterator[tuple[int, int]]:
        """(rank, where it ends) of parts of a path from `start` on, which are the shorter the nearer they are to the
        first token that ends see."""
        smallest = max(1, self._tree.windows.num_tokens >> _NEAR)
        for doublings in range(((first_seen - start) // smallest).bit_length() - 1, -1, -1):
            yield -doublings, first_seen - (smallest << doublings)
        yield 0, first_seen

    def _is_read_here(self, node: Node) -> bool:
        """Whether what locks see of a node is read from this tier. From the host go loads of what the device lacks,
        and what waiting requests have fetched is not given up either."""
        return self._tier == _DEVICE or is_lacking(node) or node.soft_pins > 0

    def _is_copied(self, node: Node) -> bool:
        """Whether a transfer reads or writes its frames."""
        pages = node.frames[self._tier]
        assert pages is not None
        return bool(self.table.pins[self.of(pages)].any())

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_invariants(self, free_pages: np.ndarray) -> None:
        """free_pages: of the tier, those that are free or lent, (num_pages,) bool."""
        self.table.check_invariants()
        has = self.frame_of != _NONE
        frames = self.frame_of[has]
        assert len(np.unique(frames)) == len(frames) == self.table.counts[FrameState.HELD], "a frame has two pages"
        assert (self.table.state[frames] == FrameState.HELD).all()
        assert not (has & free_pages).any(), "a free page has a frame"
        for node in self._tree.walk():
            pages, is_partial = node.frames[self._tier], is_partial_on(node, self._tier)
            if pages is not None:
                assert (has[pages] != is_partial).all(), f"{node}: partial {is_partial}, frames disagree"
