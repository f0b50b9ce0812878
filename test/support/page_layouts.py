"""Layouts of pages that no model here has, and what a pool holds as bytes, so that tiers can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.page_layout import Component, PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from support.pool_pages import pages_of

LAYERS = 3


def layouts(page_size: int) -> dict[str, PageLayout]:
    scaled = tuple(Component(name, (3, 5), "int8") for name in "KV")
    components = {
        "latent 72": (Component("latent", (72,), "bfloat16"),),
        "latent 37": (Component("latent", (37,), "bfloat16"),),
        # At odd page sizes padding lies before the scales.
        "int8 with scales": (*scaled, Component("scale", (2, 3), "float32", per_page=True)),
        "latent and rotated key": (Component("latent", (24,), "float16"), Component("key", (5,), "float32")),
    }
    made = {name: PageLayout(each, LAYERS, page_size) for name, each in components.items()}
    made |= {
        f"K and V in {dtype}": PageLayout.kv(page_size, LAYERS, 2, 4, dtype) for dtype in ("float32", "bfloat16")
    }
    return made


# By a name for the test's id.
LAYOUTS = {f"{name}, page {size}": each for size in (1, 3, 16) for name, each in layouts(size).items()}


def fill(pool: Any, rng: np.random.Generator) -> None:
    """Random bytes everywhere, NaNs with any payload among them."""
    memory = pool.kv.view(-1).view(torch.uint8)
    memory.copy_(torch.from_numpy(rng.integers(0, 256, len(memory), dtype=np.uint8)))


def contents(layout: PageLayout, pool: Any, frames: np.ndarray) -> list[np.ndarray]:
    """Of each component, the bytes of pages `frames`: (num_layers, n, ...) uint8. Padding is no content."""
    copy = pages_of(pool, torch.from_numpy(frames).long()).contiguous().view(-1).view(torch.uint8)
    pages = PageMemory(layout, len(frames), copy, "page_first").kv_pages
    return [each.contiguous().view(torch.uint8).numpy() for each in pages.components]


def are_equal(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))
