"""From pages of one size to pages of another: the bytes of blocks that a host pool with another page size wrote.

Pure. A page-first page holds each component layer by layer, so that the tokens of a block lie in another order with
another page size. Components of which a page has one, not one per token, cannot be permuted: such layouts share no
blocks between page sizes (`segment.namespace_digest`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang.srt.mem_cache.page_layout import PageLayout


def reorder_pages(data: np.ndarray, of: PageLayout, to: PageLayout) -> np.ndarray:
    """Page-first pages with the layout `of` as page-first pages with the layout `to`, which differs in the page size
    alone. Padding is zeros.

    data: (n, payload of a block) uint8, whole pages of either layout. Returns (n, payload of a block) uint8; a copy.
    """
    assert len(of.per_token) == len(of.components) and of == replace(to, page_size=of.page_size)
    num_blocks = len(data)
    pages = data.reshape(num_blocks, -1, of.page_bytes)
    num_tokens = pages.shape[1] * of.page_size
    assert num_tokens % to.page_size == 0
    result = np.empty((num_blocks, num_tokens // to.page_size, to.page_bytes), np.uint8)
    for start, end in to.padding:
        result[:, :, start:end] = 0
    starts = zip(of.offsets(), of.run_bytes, to.offsets(), to.run_bytes)
    for of_start, of_bytes, to_start, to_bytes in starts:
        # (blocks, pages, layers, tokens of a page, bytes of a token) -> (blocks, layers, tokens, bytes of a token)
        part = pages[:, :, of_start : of_start + of.num_layers * of_bytes]
        part = part.reshape(num_blocks, -1, of.num_layers, of.page_size, of_bytes // of.page_size)
        tokens = part.swapaxes(1, 2).reshape(num_blocks, of.num_layers, num_tokens, -1)
        found = tokens.reshape(num_blocks, to.num_layers, -1, to.page_size, to_bytes // to.page_size)
        into = result[:, :, to_start : to_start + to.num_layers * to_bytes]
        into[...] = found.swapaxes(1, 2).reshape(into.shape)
    return result.reshape(num_blocks, -1)
