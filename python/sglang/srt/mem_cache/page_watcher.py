"""`PageWatcher`: what the tree and storage tell of pages as they come and go. Stateless; this one ignores it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from sglang.srt.mem_cache.node import Node
    from sglang.srt.mem_cache.transfer import Ticket, Tier


class PageWatcher:
    def placed(self, node: Node, tier: int) -> None:
        """A node's pages are ready on a tier with frames."""

    def left(self, node: Node, tier: int) -> None:
        """They leave it; the node is still in the tree."""

    def split(self, upper: Node, node: Node) -> None:
        """The upper half was cut off a node."""

    def joined(self, chain: Sequence[Node]) -> None:
        """The last node of a chain takes in the others."""

    def opened(self, tiers: tuple[Tier, ...], block_tokens: int) -> None:
        """Storage was attached, emptied or detached. tiers: of what is attached, the nearest first."""

    def storing(self, ticket: Ticket, path: Sequence[Node], keys: np.ndarray, places: np.ndarray) -> None:
        """An operation writes blocks. path: nodes that follow each other and hold them whole. keys: (n, 16) uint8.
        places: (n,), the first token of each."""

    def stored(self, ticket: Ticket, count: int, skips: tuple[int, ...]) -> None:
        """It has written the first `count`. skips: see `StorageOp`."""

    def fetched(self, nodes: Sequence[Node], tier: Tier, start: int, end: int) -> None:
        """Blocks were read from the tier into nodes of one path: those of tokens [start, end)."""
