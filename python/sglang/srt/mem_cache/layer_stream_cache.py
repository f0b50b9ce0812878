"""`LayerStreamCache`: buffers of the device that hold a piece of one layer's KV while attention reads it.

Owns the buffers and the order in which they are filled, on a stream of its own. Never decides what is streamed. It
reads the pools below the device without locks, because a launch's fence keeps their pages in place.

A prefix that the device has no room for is read layer by layer, in *pieces* of at most a buffer's pages. Piece n goes
to buffer n mod num_buffers as soon as piece n - num_buffers has been read from it. Copies therefore run ahead of the
attention, under the feed-forward part of the layer before:

    stream       | layer 0, piece 0 | layer 0, piece 1 | layer 1, piece 0 | layer 1, piece 1 | ...
                          | filled       ^ read                 ^ read
    compute               | attend, rest of layer 0 ... | attend, ...

With buffers as long as the prefix, a piece is a layer, as in the layer stream cache of SwiftCache 3.2. With shorter
buffers, the capacity of the pools below bounds the context, and a layer's size does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sgl_kernel.kvcacheio import KVPages, pick_backend, transfer_kv_per_layer
from sglang.srt.mem_cache.kv_view import KVSegment, KVView
from sglang.srt.mem_cache.link import CopiesPages, HasPages, page_numbers_device
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.transfer import FETCH, LOAD_LINKS, LoadFailedError, Tier
from sglang.srt.utils.device import to_device
from sglang.srt.utils.stream import Event, Stream


@dataclass(frozen=True)
class Piece:
    """Pages of a request that fill a buffer together, from its first page on."""

    # Per tier: its frames and the pages of the buffer that they fill, (n,) int64 each.
    copies: tuple[tuple[Tier, np.ndarray, np.ndarray], ...]
    # Of all tiers together, from this one of the run that was cut.
    num_pages: int
    first_page: int
    # `copies` as tensors where the copies read them. The first copy makes them, on the stream.
    indices: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class FilledPiece:
    """A piece of one layer in its buffer, readable once `ready` has passed."""

    view: KVView
    segment: KVSegment
    ready: Event = field(init=False)
    # Why the copy failed; "" if it did not.
    error: str = field(default="", init=False)
    # Marks of the cache's stream, around the copy.
    began: Any = field(default=None, init=False)
    ended: Any = field(default=None, init=False)

    def check(self) -> None:
        """Raises LoadFailedError if the copy failed; called on the stream, after the wait."""
        if self.error:
            raise LoadFailedError(self.error)


class LayerStreamCache:
    """num_buffers buffers of buffer_pages pages of one layer, in the device pool's layout. kv: all buffers, in the
    layout of `PageMemory`.

    sources: the pools below. A pool that copies its pages itself (`CopiesPages`) is one that no link uses at the same
    time. Pages may come from the device's pool, too. stream: runs the copies. rate_limits: by link, as for loads.
    """

    def __init__(
        self,
        num_buffers: int,
        buffer_pages: int,
        device_pool: DevicePool,
        sources: Mapping[Tier, HasPages],
        stream: Stream,
        io_backend: str = "auto",
        rate_limits: Mapping[str, RateLimit] | None = None,
    ) -> None:
        if num_buffers < 1 or buffer_pages < 1:
            raise ValueError(
                f"{num_buffers} buffers of {buffer_pages} pages: at least one buffer of one page is needed"
            )
        self.num_buffers = num_buffers
        self.buffer_pages = buffer_pages
        self.page_size = device_pool.page_size
        self.stream = stream
        self._sources = sources
        self._device_pool = device_pool
        self._io_backend = io_backend
        if device_pool.kv.is_cuda:
            run_bytes = max(device_pool.kv_pages.run_bytes)
            self._io_backend = pick_backend(io_backend, device_pool.kv.device, run_bytes)
        self._limits = rate_limits or {}
        self._layer_bytes = device_pool.page_layout.layer_bytes
        device = device_pool.kv.device
        # Buffer i lies where layer i of a pool of buffer_pages pages would lie.
        layout = replace(device_pool.page_layout, num_layers=num_buffers)
        memory = torch.zeros(buffer_pages * layout.page_bytes, dtype=torch.uint8, device=device)
        buffers = PageMemory(layout, buffer_pages, memory, "layer_first")
        self.kv = buffers.kv
        self._buffers = buffers.kv_pages.layers
        self._views = [KVView.of_layer(buffer) for buffer in self._buffers]
        self._pages = torch.arange(buffer_pages, device=device)
        # For each buffer, the event that passes when its last piece has been read.
        self._read: list[Event | None] = [None] * num_buffers
        self._next = 0

    def pieces(self, parts: Sequence[tuple[Tier, np.ndarray]]) -> list[Piece]:
        """Cut a run of pages into pieces. parts: the tier and its frames (int32), one part after another."""
        tiers = np.concatenate([np.full(len(frames), tier) for tier, frames in parts])
        frames = np.concatenate([frames for _, frames in parts]).astype(np.int64)
        pieces = []
        for first in range(0, len(frames), self.buffer_pages):
            of_piece = frames[first : first + self.buffer_pages]
            of_tiers = tiers[first : first + self.buffer_pages]
            copies = []
            # Copies runs of one tier, not single pages: there may be hundreds of thousands.
            borders = np.flatnonzero(np.diff(of_tiers)) + 1
            for pos, end in zip((0, *borders.tolist()), (*borders.tolist(), len(of_piece))):
                copies.append((Tier(int(of_tiers[pos])), of_piece[pos:end], np.arange(pos, end)))
            pieces.append(Piece(tuple(copies), len(of_piece), first))
        return pieces

    def fill(self, layer: int, piece: Piece) -> FilledPiece:
        """Enqueue the copy of a piece of a layer to the next buffer. The reader calls `has_read` before anything else
        is filled."""
        index = self._next % self.num_buffers
        self._next += 1
        if (read := self._read[index]) is not None:
            self.stream.wait(read)
        segment = KVSegment(self._pages[: piece.num_pages], piece.num_pages * self.page_size)
        filled = FilledPiece(self._views[index], segment)

        def copy() -> None:
            filled.began = self.stream.mark()
            try:
                self._copy(layer, piece, self._buffers[index])
            except Exception as error:
                # The error fails the launch that reads the piece, not the stream.
                filled.error = f"layer {layer} cannot be streamed: {error or type(error).__name__}"
            filled.ended = self.stream.mark()

        self.stream.enqueue(copy)
        filled.ready = self.stream.record()
        return filled

    def seconds(self, filled: FilledPiece) -> float:
        """Seconds of the copy; callable once the device is done with it."""
        assert filled.ended is not None, "the launch ended before the piece that it streams was copied"
        return self.stream.seconds(filled.began, filled.ended)

    def has_read(self, event: Event) -> None:
        """The piece that was filled last has been read when the event passes."""
        self._read[(self._next - 1) % self.num_buffers] = event

    def _pool(self, tier: Tier) -> HasPages:
        return self._device_pool if tier == Tier.DEVICE else self._sources[tier]

    def _copy(self, layer: int, piece: Piece, buffer: KVPages) -> None:
        if not piece.indices:
            indices = []
            for tier, *pages in piece.copies:
                where = page_numbers_device(self._pool(tier), self._io_backend, self.kv.device)
                src, dst = (to_device(each, where) for each in pages)
                indices.append((src, dst))
            piece.indices.extend(indices)
        for (tier, _, _), (src, dst) in zip(piece.copies, piece.indices):
            limit = self._limits.get(LOAD_LINKS.get(tier, FETCH))
            size = len(src) * self._layer_bytes
            pace: AbstractContextManager[None] = limit.transfer(size) if limit is not None else nullcontext()
            pool = self._pool(tier)
            with pace:
                if isinstance(pool, CopiesPages):
                    pool.load_layer(layer, buffer, src, dst, self._io_backend)
                else:
                    there = pool.kv_pages.part(range(layer, layer + 1))
                    transfer_kv_per_layer(there, buffer, src, dst, backend=self._io_backend)
