"""`KVCacheEventRecorder`: collects KV events, what came to which tier and left it, for a publisher to take.

Owns the events of a step, the digests of nodes' pages (`Node.page_digests`), and which blocks are on the disk as far
as their tokens are known here. An observer: nothing that it does changes a decision.

The requests whose pages no other one may use, in private namespaces, make no events. Storage is told of in pages too:
a stored block has several. What others wrote to the disk is told when it is fetched, since until then its tokens are
unknown. What leaves a remote store is never told: it is its owner's, not this server's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.disaggregation.kv_events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.mem_cache.namespaces import is_private, parts_of_namespace
from sglang.srt.mem_cache.node import Node, Root, is_ready, path_of, root_of
from sglang.srt.mem_cache.page_hashes import PageHashes
from sglang.srt.mem_cache.page_watcher import PageWatcher
from sglang.srt.mem_cache.transfer import FRAME_TIERS, TIER_NAMES, Ticket, Tier

_MEDIA = tuple(MEDIA[name] for name in TIER_NAMES)


@dataclass(frozen=True)
class _Block:
    """A block of storage, in pages."""

    key: bytes
    hashes: list[int]
    parent: int | None
    tokens: list[int]
    salt: str | None


class KVCacheEventRecorder(PageWatcher):
    """format: of `kv_events.FORMATS`. is_stored: whether a tier of storage has a block now, as far as that is
    known without asking the medium."""

    def __init__(
        self,
        page_size: int,
        format: str = "default",
        is_stored: Callable[[Tier, bytes], bool] = lambda tier, key: True,
    ) -> None:
        self.page_size = page_size
        self.is_stored = is_stored
        self._format = format
        self._events: list[KVCacheEvent] = []
        self._hashes: dict[str, PageHashes] = {}
        self._tiers: tuple[Tier, ...] = ()
        self._block_tokens = 0
        self._writing: dict[Ticket, list[_Block]] = {}
        # The hashes of the blocks that are there, by their keys.
        self.on_disk: dict[bytes, list[int]] = {}
        # How many of those blocks have a page, by its hash.
        self._disk_uses: Counter[int] = Counter()

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def take_anew(self, nodes: Iterable[Node]) -> list[KVCacheEvent]:
        """In place of all events so far: what is in memory, for subscribers that have missed some. Of storage they
        hear as after the start, when it is used. nodes: of the tree, parents first."""
        self._events = [AllBlocksCleared()]
        self.on_disk, self._disk_uses = {}, Counter()
        for node in nodes:
            for tier in FRAME_TIERS:
                if is_ready(node, tier):
                    self.placed(node, tier)
        return self.take()

    # -- the tree ---------------------------------------------------------------------------------------------------

    def placed(self, node: Node, tier: int) -> None:
        if (hashes := self._hashes_of(node)) is None:
            return
        digests = self._digests(node, hashes)
        parent = self._parent_hash(node, hashes)
        self._note_stored(hashes.published(digests), parent, node.key.tolist(), hashes.cache_salt, _MEDIA[tier])

    def left(self, node: Node, tier: int) -> None:
        if (hashes := self._hashes_of(node)) is not None:
            self._note_removed(hashes.published(self._digests(node, hashes)), _MEDIA[tier])

    def split(self, upper: Node, node: Node) -> None:
        if node.page_digests is not None:
            n = len(upper.key) // self.page_size
            upper.page_digests, node.page_digests = node.page_digests[:n], node.page_digests[n:]

    def joined(self, chain: Sequence[Node]) -> None:
        parts = [node.page_digests for node in chain]
        whole = [part for part in parts if part is not None]
        chain[-1].page_digests = np.concatenate(whole) if len(whole) == len(parts) else None

    # -- storage ----------------------------------------------------------------------------------------------------

    def opened(self, tiers: tuple[Tier, ...], block_tokens: int) -> None:
        for hashes in self.on_disk.values():
            self._note_given_up(hashes)
        self._tiers, self._block_tokens = tiers, block_tokens
        self._writing, self.on_disk = {}, {}

    def storing(self, ticket: Ticket, path: Sequence[Node], keys: np.ndarray, places: np.ndarray) -> None:
        if self._tiers and (blocks := self._blocks(path, to_bytes(keys), places.tolist())):
            self._writing[ticket] = blocks

    def stored(self, ticket: Ticket, count: int, skips: tuple[int, ...]) -> None:
        for block in self._writing.pop(ticket, [])[:count]:
            for place, tier in enumerate(self._tiers):
                if place not in skips:
                    self._note_block(block, tier)

    def fetched(self, nodes: Sequence[Node], tier: Tier, start: int, end: int) -> None:
        for node in nodes:
            if node.block_keys is None or not len(node.block_keys):
                continue
            size = self._block_tokens
            first = node.start // size
            read = [at for at in range(first, node.end // size) if start <= at * size < end]
            if not read:
                continue
            path, top = path_of(node), 0
            while path[top].end <= read[0] * size:
                top += 1
            keys = to_bytes(node.block_keys)[read[0] - first : read[-1] + 1 - first]
            for block in self._blocks(path[top:], keys, [at * size for at in read]):
                self._note_block(block, tier)

    def lost(self, keys: Iterable[bytes]) -> None:
        """The disk has given these blocks up. A block that it has again stays."""
        for key in keys:
            if key in self.on_disk and not self.is_stored(Tier.DISK, key):
                self._note_given_up(self.on_disk.pop(key))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _hashes_of(self, node: Node) -> PageHashes | None:
        """None for a private namespace."""
        namespace = root_of(node).namespace
        if is_private(namespace):
            return None
        hashes = self._hashes.get(namespace)
        if hashes is None:
            salt, extra_key = parts_of_namespace(namespace)
            if len(self._hashes) >= 1024:  # tenants come and go
                self._hashes.clear()
            hashes = PageHashes(self.page_size, salt or None, extra_key or None, self._format)
            self._hashes[namespace] = hashes
        return hashes

    def _digests(self, node: Node, hashes: PageHashes) -> np.ndarray:
        """(pages, 32) uint8."""
        lacking: list[Node] = []
        step: Node = node
        while not isinstance(step, Root) and step.page_digests is None:
            lacking.append(step)
            assert step.parent is not None
            step = step.parent
        for each in reversed(lacking):
            each.page_digests = hashes.chain(self._last_digest(each.parent, hashes), each.key)
        assert node.page_digests is not None
        return node.page_digests

    def _last_digest(self, node: Node | None, hashes: PageHashes) -> bytes:
        if node is None or isinstance(node, Root):
            return hashes.first
        return self._digests(node, hashes)[-1].tobytes()

    def _parent_hash(self, node: Node, hashes: PageHashes) -> int | None:
        parent = node.parent
        if parent is None or isinstance(parent, Root):
            return None
        return hashes.published(self._digests(parent, hashes)[-1:])[0]

    def _blocks(self, path: Sequence[Node], keys: list[bytes], places: list[int]) -> list[_Block]:
        hashes, page = self._hashes_of(path[0]), self.page_size
        if hashes is None:
            return []
        start, per_block = path[0].start, self._block_tokens // page
        published = hashes.published(np.concatenate([self._digests(node, hashes) for node in path]))
        tokens = np.concatenate([node.key for node in path])
        first_parent = self._parent_hash(path[0], hashes)
        blocks = []
        for key, place in zip(keys, places, strict=True):
            at = (place - start) // page
            parent = published[at - 1] if at else first_parent
            own = tokens[place - start : place - start + self._block_tokens].tolist()
            blocks.append(_Block(key, published[at : at + per_block], parent, own, hashes.cache_salt))
        return blocks

    def _note_block(self, block: _Block, tier: Tier) -> None:
        if (block.key in self.on_disk and tier == Tier.DISK) or not self.is_stored(tier, block.key):
            return
        hashes, parent, first = block.hashes, block.parent, 0
        if tier == Tier.DISK:
            # Blocks that differ within have the pages before that in common.
            self.on_disk[block.key] = hashes
            first = sum(each in self._disk_uses for each in hashes)
            self._disk_uses.update(hashes)
        if first < len(hashes):
            parent = hashes[first - 1] if first else parent
            tokens = block.tokens[first * self.page_size :]
            self._note_stored(hashes[first:], parent, tokens, block.salt, _MEDIA[tier])

    def _note_given_up(self, hashes: list[int]) -> None:
        """A block of the disk."""
        self._disk_uses.subtract(hashes)
        if gone := [each for each in hashes if not self._disk_uses[each]]:
            for each in gone:
                del self._disk_uses[each]
            self._note_removed(gone, _MEDIA[Tier.DISK])

    def _note_stored(
        self, hashes: list[int], parent: int | None, tokens: list[int], salt: str | None, medium: str
    ) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and (last.medium, last.cache_salt) == (medium, salt)
            and parent == last.block_hashes[-1]
        ):
            last.block_hashes += hashes
            last.token_ids += tokens
            return
        # A list of its own: later events may make it longer.
        self._events.append(
            BlockStored(list(hashes), parent, tokens, self.page_size, None, medium=medium, cache_salt=salt)
        )

    def _note_removed(self, hashes: list[int], medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes += hashes
        else:
            self._events.append(BlockRemoved(list(hashes), medium=medium))
