"""`BlockLayout`: what the bytes of a block of the remote tier mean, and how they are cut into pieces.

Pure arithmetic over one frozen shape; owns nothing but the small index arrays that it remembers per piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# What BlueField-3's decompression and DMA engines take at once (ShadowServe 5).
MAX_PIECE_BYTES = 2 << 20
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class BlockLayout:
    """The canonical bytes of a block: (num_pages, 2, num_layers, page_size, num_kv_heads, head_dim), little-endian,
    K before V; pages as the host pool gives them to any storage.

    A *vector* is one head of one token in one layer, K or V: the last dimension. A *piece* is what is compressed and
    stored by itself: whole pages where one fits into max_piece_bytes, else whole vectors; pieces are of one size but
    for the last.
    """

    num_pages: int
    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_piece_bytes: int = MAX_PIECE_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV of dtype {self.dtype!r} has no codec: use one of {', '.join(ITEM_BYTES)}")
        sizes = (self.num_pages, self.num_layers, self.page_size, self.num_kv_heads, self.head_dim)
        if min(sizes) < 1:
            raise ValueError(f"a block of {sizes} (pages, layers, page size, KV heads, head size) is empty")
        if self.max_piece_bytes < self.vector_bytes:
            raise ValueError(
                f"pieces of at most {self.max_piece_bytes} bytes cannot hold a vector of {self.vector_bytes}: "
                "raise max_piece_bytes"
            )

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def vector_bytes(self) -> int:
        return self.head_dim * self.item_bytes

    @property
    def vectors_per_page(self) -> int:
        return 2 * self.num_layers * self.page_size * self.num_kv_heads

    @property
    def page_bytes(self) -> int:
        return self.vectors_per_page * self.vector_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @cached_property
    def piece_bytes(self) -> int:
        """Of every piece but the last: as few pieces as fit, all about as large."""
        unit = self.page_bytes if self.page_bytes <= self.max_piece_bytes else self.vector_bytes
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
        """Of each vector in bytes start..end of the block (at borders of vectors): is_value (n,) bool, V rather than
        K, and layer (n,) int32."""
        assert start % self.vector_bytes == 0 and end % self.vector_bytes == 0, f"{start}..{end} cuts a vector"
        index = np.arange(start // self.vector_bytes, end // self.vector_bytes)
        run = index // (self.page_size * self.num_kv_heads)
        return run // self.num_layers % 2 == 1, (run % self.num_layers).astype(np.int32)

    @property
    def spec(self) -> str:
        """All of it in one line; two layouts are the same if and only if these are."""
        shape = (self.num_pages, 2, self.num_layers, self.page_size, self.num_kv_heads, self.head_dim)
        return f"{'x'.join(map(str, shape))} {self.dtype} in {self.max_piece_bytes}"
