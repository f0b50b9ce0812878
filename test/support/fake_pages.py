"""A host pool of numpy in either layout, and blocks whose bytes follow from their keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang.srt.mem_cache.page_layout import Component, PageLayout
from sglang.srt.mem_cache.storage.host_pages import HostPages

BLOCK_TOKENS = 64


class FakePages(HostPages):
    """kv: (num_pages, 2 * num_layers, bytes of a layer's K or V), page-first or a view of layer-first memory."""

    page_size = 0
    page_bytes = 0
    page_layout = PageLayout.kv(1, 1, 1, 1, "float32")

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        token_bytes: int = 64,
        num_layers: int = 2,
        page_first: bool = True,
        aligned: bool = True,
    ) -> None:
        piece_bytes = page_size * token_bytes
        self.page_size, self.page_bytes, self.page_first = page_size, 2 * num_layers * piece_bytes, page_first
        parts = tuple(Component(name, (token_bytes,), "uint8") for name in ("K", "V"))
        self.page_layout = PageLayout(parts, num_layers, page_size)
        if page_first:
            # As pinned memory is, or off by 16 bytes as malloc's.
            memory = np.zeros(num_pages * self.page_bytes + 4096 + 16, np.uint8)
            start = -memory.ctypes.data % 4096 + (0 if aligned else 16)
            self.kv = memory[start : start + num_pages * self.page_bytes].reshape(num_pages, 2 * num_layers, -1)
        else:
            self.kv = np.zeros((2 * num_layers, num_pages, piece_bytes), np.uint8).transpose(1, 0, 2)

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        if not self.page_first:
            return None
        view = self.kv.reshape(-1).data
        merged: list[list[int]] = []
        for frame in frames.tolist():
            if merged and merged[-1][1] == frame:
                merged[-1][1] += 1
            else:
                merged.append([frame, frame + 1])
        return [view[a * self.page_bytes : b * self.page_bytes] for a, b in merged]

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.kv[frames].reshape(len(frames), -1)

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        self.kv[frames] = data.reshape(len(frames), *self.kv.shape[1:])

    # -- for tests ------------------------------------------------------------------------------------------------

    @property
    def pages_per_block(self) -> int:
        return BLOCK_TOKENS // self.page_size

    def put(self, keys: Sequence[bytes], frames: np.ndarray) -> None:
        """Fill pages with what belongs to keys."""
        for key, pages in zip(keys, frames.reshape(len(keys), self.pages_per_block)):
            self.kv[pages] = self.content(key)

    def holds(self, key: bytes, pages: np.ndarray) -> bool:
        return bool((self.kv[pages] == self.content(key)).all())

    def content(self, key: bytes) -> np.ndarray:
        """(pages per block, 2 * num_layers, bytes of a layer's K or V); the same bytes for each token with any page
        size."""
        shape = (self.kv.shape[1], self.pages_per_block, self.kv.shape[2])
        words = np.arange(np.prod(shape) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (
            (words ^ np.uint64(int.from_bytes(key[-8:], "big") * 31 + 1)).view(np.uint8).reshape(shape).swapaxes(0, 1)
        )


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(n) for n in numbers]
