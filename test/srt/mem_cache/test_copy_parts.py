"""In which parts a link copies the layers of a model, of pools of any kind."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.mem_cache.copy_parts import CopyPart, copy_parts, layer_groups, load_parts
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.utils.device import CPU

# Each sixth layer has no window.
SIXTH = tuple(layer % 6 != 5 for layer in range(26))
SECOND = tuple(layer % 2 == 0 for layer in range(26))


def pools(windowed: tuple[bool, ...], device_divided: bool, host_divided: bool):
    layout = PageLayout.kv(1, len(windowed), 1, 4, torch.float32)
    device = MHATokenToKVPool(5, layout, CPU, False, windowed, 3 if device_divided else 0)
    host = MHATokenToKVPoolHost(device, 7, num_windowed_pages=2 if host_divided else 0, windowed=windowed)
    return device.kv_pages, host.kv_pages


def layers_of(parts: list[CopyPart]) -> list[tuple[int, ...]]:
    return [part.layers for part in parts]


def test_the_first_layers_are_loaded_alone():
    assert layer_groups(3, 1) == [range(0, 1), range(1, 2), range(2, 3)]
    assert layer_groups(13, 4) == [range(0, 1), range(1, 2), range(2, 4), range(4, 8), range(8, 12), range(12, 13)]
    assert layer_groups(1, 4) == [range(0, 1)]
    assert layer_groups(9, 4, (True, False) * 5)[:3] == [range(0, 2), range(2, 4), range(4, 8)]


def test_divided_pools_are_loaded_kind_by_kind():
    both = pools(SECOND, True, True)
    assert layers_of(load_parts(*both, 4, SECOND)) == [
        *((0,), (1,), (2,), (3,), (4, 6), (5, 7)),
        *((8, 10, 12, 14), (9, 11, 13, 15), (16, 18, 20, 22), (17, 19, 21, 23), (24,), (25,)),
    ]
    assert layers_of(load_parts(*pools(SIXTH, True, True), 4, SIXTH))[:7] == [
        *((0,), (1,), (2, 3), (4, 6, 7, 8), (5,), (9, 10, 12, 13), (11,)),
    ]
    # Where one of them has no common numbers for layers that do not follow each other, runs.
    assert layers_of(load_parts(*pools(SIXTH, True, False), 4, SIXTH))[:8] == [
        *((0,), (1,), (2, 3), (4,), (5,), (6, 7, 8), (9, 10), (11,)),
    ]
    assert len(copy_parts(*both, range(26), SECOND)) == 2
    assert len(copy_parts(*pools(SECOND, False, True), range(26), SECOND)) == 26
    (whole,) = copy_parts(*pools(SECOND, False, False), range(26))
    assert whole.layers == tuple(range(26)) and not whole.of_windows


@pytest.mark.parametrize("device_divided", [True, False])
@pytest.mark.parametrize("host_divided", [True, False])
def test_parts_have_each_layer_once_and_alike(device_divided: bool, host_divided: bool):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        windowed = (True, False, *(rng.random() < 0.6 for _ in range(rng.randrange(20))))
        above, below = pools(windowed, device_divided, host_divided)
        most = rng.choice((1, 2, 4))
        for parts in (
            load_parts(above, below, most, windowed),
            copy_parts(above, below, range(len(windowed)), windowed),
        ):
            assert sorted(layer for part in parts for layer in part.layers) == list(range(len(windowed)))
            for part in parts:
                assert {windowed[layer] for layer in part.layers} == {part.of_windows}
                for pages, of_pool in ((part.above, above), (part.below, below)):
                    assert pages.num_layers == len(part.layers)
                    for i, layer in enumerate(part.layers):
                        alone = of_pool.part(range(layer, layer + 1))
                        assert pages.k[i].data_ptr() == alone.k.data_ptr() and pages.num_pages == alone.num_pages
        assert all(len(part.layers) <= most for part in load_parts(above, below, most, windowed))
