"""`SwapFile`: pages of a device pool in a file, layer by layer, for what neither device nor host has room for.

Owns the file, which has no name: it goes with the process, whatever ends that. Knows nothing of who has which page.
What it holds belongs to one request and is no cache: see managers/layer_streaming.py.

The file is mapped, so reads and writes are the system's, through its page cache. Its blocks are allocated at the
start: writing to it later cannot find the disk full.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.utils.byte_sizes import shown_size


class SwapFileError(RuntimeError):
    """The file cannot be made; the message names the remedy."""


class SwapFile:
    """num_pages pages of `layout` in a file in `folder`. Raises SwapFileError.

    kv, kv_pages: as of `PageMemory`, layer-first, so that a layer of adjacent pages is one run per component.
    """

    def __init__(self, folder: str | Path, num_pages: int, layout: PageLayout) -> None:
        size_bytes = num_pages * layout.page_bytes
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                # Shared: else what is written would take memory.
                memory = mmap.mmap(file.fileno(), size_bytes)
        except (OSError, ValueError) as error:
            raise SwapFileError(
                f"a file of {shown_size(size_bytes)} in {folder} cannot be had ({error}): free space, lower "
                "--layer-stream-disk-size or name another folder with --layer-stream-disk-path"
            ) from error
        self.num_pages = num_pages
        pages = PageMemory(layout, num_pages, torch.frombuffer(memory, dtype=torch.uint8), "layer_first")
        self.kv, self.kv_pages = pages.kv, pages.kv_pages
