"""`reorder_pages` beside a reference that moves token by token, with layouts of several shapes, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang.srt.mem_cache.page_layout import Component, PageLayout
from sglang.srt.mem_cache.storage.file.page_order import reorder_pages

BLOCK_TOKENS = 48
LAYOUTS = {
    "K and V": PageLayout.kv(1, 3, 2, 4, "bfloat16"),
    "one head, one layer": PageLayout.kv(1, 1, 1, 1, "float32"),
    "latent": PageLayout((Component("latent", (37,), "bfloat16"),), 3, 1),
    "parts of several dtypes, padded": PageLayout(
        (Component("latent", (3,), "int8"), Component("key", (5,), "float32"), Component("scale", (1,), "float16")),
        3,
        1,
    ),
    "K and V of two shapes": PageLayout((Component("K", (2, 6), "float16"), Component("V", (2, 3), "float16")), 2, 1),
}


def token_bytes(layout: PageLayout, component: int, layer: int, token: int) -> slice:
    """Where the bytes of a token lie in a block."""
    page, at = divmod(token, layout.page_size)
    size = layout.run_bytes[component] // layout.page_size
    start = page * layout.page_bytes + layout.offsets()[component]
    start += layer * layout.run_bytes[component] + at * size
    return slice(start, start + size)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_token_is_where_it_belongs(layout: PageLayout):
    rng = np.random.default_rng(0)
    sizes = (1, 3, 4, 16, 24, 48)
    for of, to in ((replace(layout, page_size=a), replace(layout, page_size=b)) for a in sizes for b in sizes):
        data = rng.integers(0, 256, (2, BLOCK_TOKENS // of.page_size * of.page_bytes), np.uint8)
        expected = np.zeros((2, BLOCK_TOKENS // to.page_size * to.page_bytes), np.uint8)
        for component in range(len(layout.components)):
            for layer in range(layout.num_layers):
                for token in range(BLOCK_TOKENS):
                    part = data[:, token_bytes(of, component, layer, token)]
                    expected[:, token_bytes(to, component, layer, token)] = part
        assert np.array_equal(reorder_pages(data, of, to), expected), (of, to)


def test_a_part_per_page_is_not_permuted():
    layout = PageLayout((Component("K", (4,), "int8"), Component("scale", (1,), "float32", per_page=True)), 2, 16)
    with pytest.raises(AssertionError):
        reorder_pages(np.zeros((1, 64), np.uint8), layout, replace(layout, page_size=32))
