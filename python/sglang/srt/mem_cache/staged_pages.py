"""`StagedPages`: pages that a GPU cannot reach, such as a file's, copied to and from it through pinned memory.

Owns that memory, two halves for each direction: the host fills or empties one while the GPU copies the other. Waits
for the GPU on the thread of the stream that copies, and nowhere else:

    load, thread     | fill half 0 | fill half 1 | wait, fill half 0 | ...
    GPU                            | half 0      | half 1            | half 0 ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sgl_kernel.kvcacheio import (
    KVPages,
    transfer_kv_all_layer,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_pf_lf,
)
from sglang.srt.mem_cache.link import index_device
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.utils.device import to_device

# A page's size where that is more.
_HALF_BYTES = 8 << 20


class StagedPages:
    """See `CopiesPages`: loads are called on one stream of `device`, a CUDA device, and backups on one. kv_pages: in
    host memory, in any order. half_bytes: of pinned memory; there are four halves."""

    page_numbers_on_host = True

    def __init__(
        self, kv_pages: KVPages, layout: PageLayout, device: torch.device, half_bytes: int = _HALF_BYTES
    ) -> None:
        self.kv_pages = kv_pages
        self._device = device
        self._loads = _Halves(replace(layout, num_layers=1), half_bytes)
        self._backups = _Halves(layout, half_bytes)

    def load_layer(self, layer: int, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str) -> None:
        """As `transfer_kv_per_layer_pf_lf`, but that src and dst are in host memory, int64. Returns when all has been
        read from kv_pages."""
        for half, mine, theirs in self._loads.rounds(src, dst):
            # The last copy from here.
            half.copied.synchronize()
            here = torch.arange(len(mine))
            transfer_kv_per_layer_pf_lf(self.kv_pages, half.pages, mine, here, layer)
            transfer_kv_all_layer(half.pages, pages, *self._numbers(backend, here, theirs), backend=backend)
            half.copied.record()

    def back_up(
        self, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str, layers: range | None = None
    ) -> None:
        """As `transfer_kv_all_layer_lf_pf`, with src and dst as in `load_layer`. Returns when all has been written to
        kv_pages."""
        layers = layers or range(self.kv_pages.num_layers)
        last: tuple[_Half, torch.Tensor] | None = None
        for half, theirs, mine in self._backups.rounds(src, dst):
            here = torch.arange(len(mine))
            numbers = self._numbers(backend, theirs, here)
            transfer_kv_all_layer_lf_pf(pages, half.pages.part(layers), *numbers, backend=backend)
            half.copied.record()
            if last is not None:
                self._write(*last, layers)
            last = half, mine
        if last is not None:
            self._write(*last, layers)

    def _write(self, half: _Half, mine: torch.Tensor, layers: range) -> None:
        half.copied.synchronize()
        transfer_kv_all_layer(half.pages.part(layers), self.kv_pages.part(layers), torch.arange(len(mine)), mine)

    def _numbers(self, backend: str, *numbers: torch.Tensor) -> list[torch.Tensor]:
        where = index_device(backend, self._device)
        return [to_device(each.numpy(), where) for each in numbers]


class _Half:
    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        memory = torch.empty(num_pages * layout.page_bytes, dtype=torch.uint8).pin_memory()
        self.pages = PageMemory(layout, num_pages, memory, "page_first").kv_pages
        # Blocking: a thread that spins would keep the others from Python.
        self.copied = torch.cuda.Event(blocking=True)


class _Halves:
    """Of one direction. layout: of what a round copies of each page."""

    def __init__(self, layout: PageLayout, half_bytes: int) -> None:
        self._round_pages = max(1, half_bytes // layout.page_bytes)
        self._halves = [_Half(layout, self._round_pages) for _ in range(2)]

    def rounds(self, src: torch.Tensor, dst: torch.Tensor) -> Iterator[tuple[_Half, torch.Tensor, torch.Tensor]]:
        """The half that is next, and the pages that go through it."""
        for mine, theirs in zip(src.split(self._round_pages), dst.split(self._round_pages)):
            self._halves.reverse()
            yield self._halves[0], mine, theirs
