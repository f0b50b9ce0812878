"""`PageLayout` and `PageMemory`: sizes, offsets and names of layouts, and where components lie."""

from __future__ import annotations

import msgspec
import pytest
import torch

from sglang.srt.mem_cache.page_layout import Component, PageLayout, PageLayoutError
from sglang.srt.mem_cache.page_memory import ORDERS, PageMemory
from support.page_layouts import LAYOUTS, layouts


def test_k_and_v_have_the_sizes_of_their_heads():
    layout = PageLayout.kv(page_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    run = 16 * 8 * 128 * 2
    assert layout.run_bytes == (run, run) and layout.layer_bytes == 2 * run and layout.page_bytes == 2 * 32 * run
    assert layout.offsets() == (0, 32 * run) and layout.offsets(10) == (0, 320 * run)
    assert layout.padding == () and layout.alignment == 2 and layout.is_uniform
    assert layout.kv_shape == (8, 128) and layout.dtype == "bfloat16" and layout.per_token == (0, 1)
    assert layout == PageLayout.kv(16, 32, 8, 128, "bfloat16")


def test_components_of_other_sizes_are_aligned():
    layout = layouts(3)["int8 with scales"]
    assert layout.run_bytes == (45, 45, 24) and layout.layer_bytes == 114
    assert layout.offsets() == (0, 135, 272) and layout.page_bytes == 344 and layout.padding == ((270, 272),)
    assert (
        layout.per_token == (0, 1) and layout.kv_shape is None and not layout.is_uniform and layout.dtype == "uint8"
    )
    layout = PageLayout((Component("x", (3,), "int8"), Component("scale", (1,), "float32", True)), 1, 1)
    assert layout.offsets() == (0, 4) and layout.padding == ((3, 4),) and layout.page_bytes == 8
    assert layout.offsets(3) == (0, 12)
    layout = PageLayout((Component("scale", (1,), "float32", True), Component("x", (3,), "int8")), 1, 1)
    assert layout.padding == ((7, 8),) and layout.page_bytes == 8


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_two_runs_share_a_byte_and_all_lie_in_the_memory(layout: PageLayout, order: str):
    memory = torch.zeros(5 * layout.page_bytes, dtype=torch.uint8)
    pages = PageMemory(layout, 5, memory, order).kv_pages
    for component, run_bytes in zip(pages.components, layout.run_bytes, strict=True):
        assert component.shape[:2] == (layout.num_layers, 5)
        assert component.shape[2:].numel() * component.dtype.itemsize == run_bytes
        component.view(torch.uint8).add_(1)
    used = int(memory.sum())
    assert memory.max() == 1 and used == 5 * layout.num_layers * layout.layer_bytes
    if order == "page_first":
        padding = sum(end - start for start, end in layout.padding)
        assert len(memory) - used == 5 * padding
        for start, end in layout.padding:
            assert not memory.view(5, -1)[:, start:end].any()


def test_two_layouts_never_share_a_fingerprint():
    found = list(LAYOUTS.values())
    found += [
        PageLayout(each.components, each.num_layers + 1, 3) for each in layouts(3).values() if not each.kv_shape
    ]
    swapped = layouts(3)["int8 with scales"]
    found.append(PageLayout(swapped.components[::-1], swapped.num_layers, 3))
    assert len({each.fingerprint for each in found}) == len(found)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_goes_through_a_message(layout: PageLayout):
    assert PageLayout.from_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(layout.as_dict()))) == layout


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(PageLayoutError, match="latent of dtype 'float4': use one of float64"):
        Component("latent", (72,), "float4")
    for shape in ((), (0,), (2, -1)):
        with pytest.raises(PageLayoutError, match=r"latent of shape .* is empty"):
            Component("latent", shape, "float32")
    for fields in (((), 1, 1), ((Component("x", (1,), "int8"),), 0, 1), ((Component("x", (1,), "int8"),), 1, 0)):
        with pytest.raises(PageLayoutError, match="is empty"):
            PageLayout(*fields)
    with pytest.raises(ValueError, match="layout 'page_head' is none of page_first, layer_first"):
        PageMemory(PageLayout.kv(1, 1, 1, 1, "int8"), 1, torch.zeros(2, dtype=torch.uint8), "page_head")
    described = str(layouts(3)["int8 with scales"])
    assert described == (
        "pages of 3 tokens: K 3x5 int8 per token, V 3x5 int8 per token, scale 2x3 float32 per page, 3 layers"
    )
