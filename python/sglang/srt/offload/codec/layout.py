"""`BlockLayout`: the meaning of the bytes of a block of the remote tier, and how they are cut into pieces.

Pure arithmetic over one frozen shape. Owns nothing but the small index arrays that it remembers per piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sglang.srt.mem_cache.page_layout import PageLayout

# The most bytes that BlueField-3's decompression and DMA engines take at once (ShadowServe 5).
MAX_PIECE_BYTES = 2 << 20


@dataclass(frozen=True)
class BlockLayout:
    """The canonical bytes of a block: num_pages page-first pages, little-endian, as the host pool gives them to any
    storage. For K and V they are (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim). Raises ValueError.

    A *vector* is the last dimension of a component, such as one head of one token in one layer of K. A *piece* is
    compressed and stored by itself. It consists of whole pages where one page fits into max_piece_bytes, else of
    whole vectors. All pieces but the last have one size.
    """

    num_pages: int
    page: PageLayout
    max_piece_bytes: int = MAX_PIECE_BYTES

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise ValueError(f"a block of {self.num_pages} pages is empty")
        if self.max_piece_bytes < self.vector_bytes:
            raise ValueError(
                f"pieces of at most {self.max_piece_bytes} bytes cannot hold a vector of {self.vector_bytes}: "
                "raise max_piece_bytes"
            )

    @cached_property
    def value_bytes(self) -> int:
        """The size of one value, where all values have 2 bytes or all have 4; else 1, as if each byte were a
        value."""
        sizes = {each.item_bytes for each in self.page.components}
        return sizes.pop() if sizes in ({2}, {4}) else 1

    @cached_property
    def vector_bytes(self) -> int:
        """The smallest size of a piece. Where components have vectors of different sizes, it is the alignment of
        pages."""
        sizes = {each.shape[-1] * each.item_bytes for each in self.page.components}
        return sizes.pop() if len(sizes) == 1 and not self.page.padding else self.page.alignment

    @property
    def block_bytes(self) -> int:
        return self.num_pages * self.page.page_bytes

    @cached_property
    def piece_bytes(self) -> int:
        """The size of every piece but the last: as few pieces as possible, all about as large."""
        page_bytes = self.page.page_bytes
        unit = page_bytes if page_bytes <= self.max_piece_bytes else self.vector_bytes
        num_units = self.block_bytes // unit
        num_pieces = math.ceil(num_units / (self.max_piece_bytes // unit))
        return math.ceil(num_units / num_pieces) * unit

    @property
    def num_pieces(self) -> int:
        return math.ceil(self.block_bytes / self.piece_bytes)

    def piece(self, index: int) -> tuple[int, int]:
        """(start, end): the bytes of the block that piece `index` holds."""
        assert 0 <= index < self.num_pieces, f"piece {index} of {self.num_pieces}"
        start = index * self.piece_bytes
        return start, min(start + self.piece_bytes, self.block_bytes)

    def raw_bytes(self, index: int) -> int:
        start, end = self.piece(index)
        return end - start

    def vectors(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each vector in bytes start..end of a block of K and V (at borders of vectors): is_value (n,) bool, V
        rather than K, and layer (n,) int32."""
        assert self.page.kv_shape is not None, f"{self.page}: no K and V"
        num_heads, _ = self.page.kv_shape
        num_layers = self.page.num_layers
        assert start % self.vector_bytes == 0 and end % self.vector_bytes == 0, f"{start}..{end} cuts a vector"
        index = np.arange(start // self.vector_bytes, end // self.vector_bytes)
        run = index // (self.page.page_size * num_heads)
        return run // num_layers % 2 == 1, (run % num_layers).astype(np.int32)

    @property
    def spec(self) -> str:
        """The layout in one line. Two layouts are the same if and only if their lines are."""
        page = self.page
        if page.kv_shape is None:
            return f"{self.num_pages} of {page} in {self.max_piece_bytes}"
        shape = (self.num_pages, len(page.components), page.num_layers, page.page_size, *page.kv_shape)
        return f"{'x'.join(map(str, shape))} {page.dtype} in {self.max_piece_bytes}"

    def as_dict(self) -> dict[str, Any]:
        """For a message to another process; `from_dict` is the inverse."""
        return {"num_pages": self.num_pages, "page": self.page.as_dict(), "max_piece_bytes": self.max_piece_bytes}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> BlockLayout:
        """Raises ValueError for unknown or missing fields."""
        try:
            page = PageLayout.from_dict(fields["page"])
            return BlockLayout(int(fields["num_pages"]), page, int(fields["max_piece_bytes"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the fields of a block's layout are wrong: {error!r}") from error
