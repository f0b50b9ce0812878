"""`PageTable`: the pages of each slot. Owned by the executor, changed on its stream only.

One array holds all slots. A slot's pages stand one after the other from a start of its own, with room to grow. The
array is as long as the slots in use need, not slots times the longest context:

    starts[slot]         starts[other]
    |                    |
    | 7 | 3 | 9 |  room  | 4 | 4 |      free      | ...      table

Where layers with a window have a pool of their own, a second array has the frame in it of the page at each place.

On a GPU the arrays lie in device memory, where kernels read them, and a copy lies here. Changes go to the device with
the next launch's numbers (`changes`, `write`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang.srt.mem_cache.kv_view import PagedSegments
from sglang.srt.model_executor.launch import PageRun

_LEAST_ROOM = 64


class PageTable:
    """table: (n,) pages, int64 in host memory, int32 on a GPU. starts: (max_slots,) int64 numpy, where a slot's pages
    begin. num_places: the length of the table at first. When it grows, it becomes another tensor: `version`
    counts.

    num_pages: of the device, where layers with a window have a pool of their own; else 0. windowed_table: as table,
    with frames of that pool, 0 for pages that had none then; the same object where there is no such pool."""

    def __init__(self, max_slots: int, device: torch.device, num_places: int, num_pages: int = 0) -> None:
        self.starts = np.zeros(max_slots, np.int64)
        self.version = 0
        self._device = device
        # The room of each slot, a power of two; 0 for a slot that has had no request yet.
        self._room = np.zeros(max_slots, np.int64)
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0
        # Of each page, its frame in the pool for layers with a window.
        self._windowed = np.zeros(num_pages, np.int64) if num_pages else None
        # A row of pages, and one of frames in that pool, if there is one.
        self._pages = np.zeros((1 if self._windowed is None else 2, num_places), np.int64)
        # Places whose pages are not on the device yet.
        self._changed: list[np.ndarray] = []
        self._is_apart = device.type != "cpu"
        self._use_tables(self._new_tables())

    def apply(self, runs: Sequence[PageRun], appends: np.ndarray, windowed_frames: np.ndarray | None = None) -> None:
        """appends: (3, n) int32, as in `Launch`. They are applied after the runs, and windowed_frames before them."""
        if windowed_frames is not None and self._windowed is not None:
            pages, of_windows = windowed_frames
            self._windowed[pages] = of_windows
        changed: list[np.ndarray] = []
        for run in runs:
            end = run.first_page + len(run.frames)
            if run.fresh:
                self._free_room(run.slot)
            changed += self._reserve(run.slot, end)
            start = self.starts[run.slot]
            self._put(slice(start + run.first_page, start + end), run.frames)
            changed.append(np.arange(start + run.first_page, start + end))
        slots, places, frames = appends
        for i in np.flatnonzero(places >= self._room[slots]).tolist():
            changed += self._reserve(int(slots[i]), int(places[i]) + 1)
        if len(slots):
            where = self.starts[slots] + places
            self._put(where, frames)
            changed.append(where)
        if self._is_apart:
            self._changed += changed

    def changes(self) -> list[np.ndarray]:
        """Places whose pages have changed since the last call, and what stands there now in each table, (n,) int64
        each, for `write`."""
        where = np.concatenate(self._changed) if self._changed else np.empty(0, np.int64)
        self._changed = []
        # The final content of each place. A place that has changed twice is listed twice, with the same value.
        return [where, *self._pages[:, where]]

    def write(self, where: torch.Tensor, *contents: torch.Tensor) -> None:
        """Apply on the device what `changes` returned. The tensors are on the device, in the order of the current
        stream."""
        if len(where):
            for table, content in zip(self._tables, contents, strict=True):
                table.index_copy_(0, where, content.to(torch.int32))

    def at(self, places: np.ndarray) -> np.ndarray:
        """The pages at places of each table, (1 or 2, n) int64."""
        return self._pages[:, places]

    def pages(self, slot: int, first: int, end: int) -> torch.Tensor:
        """A view of a slot's pages first..end."""
        start = int(self.starts[slot])
        return self.table[start + first : start + end]

    def windowed(self, segments: PagedSegments) -> PagedSegments:
        """The same requests for layers with a window. segments: of `table`."""
        return segments if self.windowed_table is self.table else replace(segments, table=self.windowed_table)

    def _put(self, where: slice | np.ndarray, pages: np.ndarray) -> None:
        self._pages[0, where] = pages
        if self._windowed is not None:
            self._pages[1, where] = self._windowed[pages]

    def _free_room(self, slot: int) -> None:
        if room := int(self._room[slot]):
            self._free[room].append(int(self.starts[slot]))
            self._room[slot] = 0

    def _reserve(self, slot: int, num_pages: int) -> list[np.ndarray]:
        """Reserve room for num_pages pages of a slot. Returns the places to which its pages have moved."""
        old_room, old_start = int(self._room[slot]), int(self.starts[slot])
        if num_pages <= old_room:
            return []
        room = max(_LEAST_ROOM, 1 << (num_pages - 1).bit_length())
        if self._free[room]:
            start = self._free[room].pop()
        else:
            start = self._end
            self._end += room
            self._grow(self._end)
        self._pages[:, start : start + old_room] = self._pages[:, old_start : old_start + old_room]
        self._free_room(slot)
        self.starts[slot], self._room[slot] = start, room
        return [np.arange(start, start + old_room)] if old_room else []

    def _grow(self, num_places: int) -> None:
        rows, old = self._pages.shape
        if num_places <= old:
            return
        grown = np.zeros((rows, max(num_places, 2 * old)), np.int64)
        grown[:, :old] = self._pages
        self._pages = grown
        tables = self._new_tables()
        if self._is_apart:
            for table, before in zip(tables, self._tables):
                table[:old].copy_(before)
        self._use_tables(tables)
        self.version += 1

    def _new_tables(self) -> list[torch.Tensor]:
        """Those that kernels read: memory of the device, or that of `_pages`."""
        if self._is_apart:
            return [torch.zeros(len(row), dtype=torch.int32, device=self._device) for row in self._pages]
        return list(torch.from_numpy(self._pages))

    def _use_tables(self, tables: list[torch.Tensor]) -> None:
        self._tables = tables
        self.table, self.windowed_table = tables[0], tables[-1]
