"""`HostPages`: what stores use of the host pool, `MHATokenToKVPoolHost`, or of one of its regions."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sglang.srt.mem_cache.page_layout import PageLayout


class HostPages(Protocol):
    """The host pool, as a store sees it. page_layout: what a page holds; page_bytes: of one page; page_size: tokens.

    The caller holds the frames that it passes until the store's call returns. Nothing else writes to them meanwhile.
    """

    @property
    def page_layout(self) -> PageLayout: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    def buffers(self, frames: np.ndarray) -> list[memoryview] | None:
        """The writable memory of pages `frames` (n,) int32, in order, as bytes; neighbours in memory merged into one
        buffer. None: the pool is not page-first, so a page is not one piece of memory."""
        ...

    def copy_out(self, frames: np.ndarray, out: np.ndarray) -> None:
        """Pages to page-first bytes. out: (n, page_bytes) uint8."""
        ...

    def copy_in(self, frames: np.ndarray, data: np.ndarray) -> None:
        """Page-first bytes to pages. data: (n, page_bytes) uint8."""
        ...
