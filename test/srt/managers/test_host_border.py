"""The border between the host's two pools: how its memory is divided, and when a slab changes hands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_equality import KV_TOLERANCE, SHAPE, VOCAB, Model, greedy
from test_windowed_host import WINDOWS, config_of, marks
from transformers import Qwen2Config

from sglang.srt.managers.startup.sizes import with_windowed_host_pool
from sglang.srt.mem_cache.border_slabs import BorderSlabs, border_between
from sglang.srt.mem_cache.hybrid_pages import regions_of
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, host_pool_bytes
from sglang.srt.mem_cache.node import MatchResult, Node
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq
from support.controller_rig import Rig
from support.kv_oracle import check_kv
from support.storage_rig import DEVICE, HOST, tokens

# As in test_hybrid_pool.py: a page has three layers with a window, and two without.
KINDS = (True, False, True, True, False)


# -- how memory is divided ----------------------------------------------------------------------------------------


def test_slabs_hold_whole_pages_and_blocks_of_both_kinds():
    assert border_between(100, 20, 3, 3) == (100, 20 + 40, BorderSlabs(40, 1, 1))
    # Until both kinds have as many pages; some fit into no slab.
    assert border_between(1000, 250, 10, 52) == (988, 250 + 115, BorderSlabs(23, 26, 5))
    assert 988 - 23 * 26 >= 250 + 115
    # At most 64.
    _, _, found = border_between(100_000, 25_000, 2, 10)
    assert found is not None and 50 < found.num_slabs <= 64 and found.full_pages == 5 * found.windowed_pages
    _, _, found = border_between(100_000, 25_000, 2, 10, block_pages=64)
    assert found is not None and found.full_pages % 64 == found.windowed_pages % 64 == 0
    assert border_between(100, 20, 3, 7, block_pages=16) == (100, 20, None)
    assert border_between(20, 20, 3, 3) == (20, 20, None)


@pytest.mark.parametrize("num_windowed_slabs", range(5))
def test_pages_of_both_kinds_lie_side_by_side_wherever_the_border_is(num_windowed_slabs: int):
    layout = PageLayout.kv(4, len(KINDS), 2, 4, torch.float32)
    regions = regions_of(layout, 35, KINDS, 9)
    num_full, num_windowed, border = border_between(35, 9, *(each.page_bytes for _, each in regions))
    assert (num_full, num_windowed, border) == (33, 17, BorderSlabs(4, 3, 2))
    device = MHATokenToKVPool(1, layout, windowed=KINDS, num_windowed_pages=1)
    host = MHATokenToKVPoolHost(device, 33, num_windowed_pages=17, windowed=KINDS, border=border)
    # The memory of both without what lies in it twice.
    full, of_windows = (region.page_bytes for region in host.regions)
    assert len(host.kv) == host_pool_bytes(layout, 33, KINDS, 17, border) == 33 * full + 9 * of_windows
    in_full = np.delete(np.arange(33, dtype=np.int32), slice(21, 21 + 3 * num_windowed_slabs))
    in_windowed = np.delete(np.arange(17, dtype=np.int32), slice(2 * num_windowed_slabs, 8))
    rng = np.random.default_rng(num_windowed_slabs)
    written = []
    for region, frames in zip(host.regions, (in_full, in_windowed), strict=True):
        written.append(rng.integers(0, 256, (len(frames), region.page_bytes), dtype=np.uint8))
        region.copy_in(frames, written[-1])
    for region, frames, data in zip(host.regions, (in_full, in_windowed), written, strict=True):
        found = np.empty_like(data)
        region.copy_out(frames, found)
        assert np.array_equal(found, data)


def test_a_layer_first_host_has_no_slabs():
    layout = PageLayout.kv(4, len(KINDS), 2, 4, torch.float32)
    device = MHATokenToKVPool(1, layout, windowed=KINDS, num_windowed_pages=1)
    with pytest.raises(AssertionError, match="one run of bytes"):
        MHATokenToKVPoolHost(device, 20, "layer_first", None, None, 17, KINDS, BorderSlabs(4, 3, 2))


def test_the_server_has_a_border_where_pages_lie_as_they_are():
    layout = PageLayout.kv(1, 6, 1, 1, torch.uint8)
    plain = with_windowed_host_pool(config_of(18000), WINDOWS, None)
    assert plain.host_border is None
    found = with_windowed_host_pool(config_of(18000), WINDOWS, None, layout)
    border = found.host_border
    assert border is not None and border.full_pages == 5 * border.windowed_pages and border.full_pages % 64 == 0
    assert plain.num_host_pages - 5 < found.num_host_pages <= plain.num_host_pages
    assert found.num_windowed_host_pages == plain.num_windowed_host_pages + border.num_windowed
    most, least = found.num_windowed_host_pages, found.num_host_pages - border.num_full
    assert 0 <= least - most < border.full_pages + border.windowed_pages


# -- when a slab changes hands ------------------------------------------------------------------------------------


def rig_with(**options: Any) -> Rig:
    """Of the host's pages 24 are of layers with full attention, 4 of layers with a window; 10 of those may be 10 of
    these, two at a time."""
    border = BorderSlabs(5, 2, 2)
    return Rig(**{"device": 24, "host": 24, "window_reach": 2, "windowed_host": 14, "border": border, **options})


def slabs_of_windows(rig: Rig) -> int:
    pool = rig.windowed_host
    assert pool is not None
    rig.check()
    return (pool.table.num_usable - 4) // 2


def on_host(rig: Rig, text: str, now: int) -> Node:
    """Used at launch `now`, and on the host alone."""
    node = rig.insert(text, now=now)
    rig.back_up(node)
    rig.at(10).evict(DEVICE, len(text))
    rig.device.reap(1000)
    return node


def tidy(rig: Rig) -> None:
    rig.controller.tidy()
    rig.check()


def short_prompts(rig: Rig, texts: str, now: int = 100) -> None:
    """Of two letters each, which windows see as a whole."""
    for place in range(0, len(texts), 2):
        on_host(rig, texts[place : place + 2], now + place)
        tidy(rig)


def test_windows_get_free_slabs_when_what_ends_see_was_lost():
    rig = rig_with(host=44)
    short_prompts(rig, "abcdef")
    assert slabs_of_windows(rig) == 1 and marks(rig, "ab") == "pp", "lost before the slab came"
    short_prompts(rig, "ghijklmnopqrstuvwxyz", now=200)
    assert slabs_of_windows(rig) == 5 and rig.controller.counters["moved_slabs_host"] == 5
    assert [marks(rig, text) for text in ("yz", "wx", "uv", "st", "qr", "op")] == ["ww"] * 6
    assert rig.host is not None and rig.host.num_usable == 34


def test_the_border_stays_where_what_is_oldest_is_not_given_up_first():
    rig = rig_with(host=44, eviction="lfu")
    short_prompts(rig, "abcdefghijkl")
    assert slabs_of_windows(rig) == 0
    rig.tree.set_eviction_policy("lru")
    short_prompts(rig, "mnopqr", now=200)
    assert slabs_of_windows(rig) > 0


def test_windows_get_no_slab_for_what_no_end_sees():
    rig = rig_with()
    for place, text in enumerate(("abcdefgh", "ijklmnop")):
        on_host(rig, text, 100 + place)
        tidy(rig)
    assert rig.controller.counters["evicted_tokens_windowed_host"] > 0
    assert slabs_of_windows(rig) == 0 and rig.controller.counters["evicted_tokens_seen_host"] == 0


def old_and_new(rig: Rig) -> tuple[Node, Node]:
    """The first was used at launch 50 and has three slabs, the second at launch 401 and has two. What windows saw of
    launches 400 and 401 was lost."""
    on_host(rig, "wxyz", 400)
    on_host(rig, "AB", 402)
    new, old = on_host(rig, "ghij", 401), on_host(rig, "abcdef", 50)
    assert [marks(rig, text) for text in ("abcdef", "wxyz", "ghij", "AB")] == ["ppppww", "pppp", "pppp", "ww"]
    return old, new


def test_windows_get_slabs_of_what_was_used_before_what_they_lost():
    rig = rig_with(host=16)
    _, new = old_and_new(rig)
    tidy(rig)
    assert marks(rig, "abcdef") == "----ww" and new.frames[HOST] is not None
    assert slabs_of_windows(rig) == 2 and rig.controller.counters["evicted_tokens_host"] == 4


def test_a_slab_with_something_newer_stays():
    rig = rig_with(host=16)
    old, _ = old_and_new(rig)
    for node in rig.tree.path_of(old):
        node.last_access = LaunchSeq(400)
    tidy(rig)
    assert marks(rig, "abcdef") == "ppppww" and slabs_of_windows(rig) == 0


@pytest.mark.parametrize("use", ["awaited", "read", "stored"])
def test_slabs_of_what_is_in_use_stay(use: str):
    rig = rig_with(host=16)
    old, _ = old_and_new(rig)
    (front, end) = rig.tree.path_of(old)
    if use == "awaited":
        rig.tree.soft_pin(end)
    elif use == "read":
        rig.tree.lock(MatchResult("", (front, end), 2, 0, 6), LaunchSeq(50))
    host, frames = rig.controller.tables[HOST], np.concatenate([front.frames[HOST], end.frames[HOST]])
    if use == "stored":
        host.pin(frames)
    rig.controller.tidy()
    if use == "stored":
        host.unpin(frames)
    assert marks(rig, "abcdef") == "ppppww" and slabs_of_windows(rig) == 0


def given_to_windows() -> Rig:
    """All slabs are of layers with a window."""
    rig = rig_with(host=34)
    short_prompts(rig, "abcdefghijklmnopqrstuvwxyz")
    assert slabs_of_windows(rig) == 5
    return rig


def long_prompts(rig: Rig, num: int) -> list[str]:
    """Of twelve letters each, of which windows see two."""
    texts = ["".join(chr(200 + 12 * place + i) for i in range(12)) for place in range(num)]
    for place, text in enumerate(texts):
        on_host(rig, text, 300 + place)
        tidy(rig)
    return texts


def test_slabs_of_which_ends_see_nothing_newer_go_back():
    rig = given_to_windows()
    texts = long_prompts(rig, 8)
    assert slabs_of_windows(rig) <= 1
    assert [marks(rig, text)[10:] for text in texts[-2:]] == ["ww"] * 2, "of these all that windows see has stayed"


def test_what_windows_see_stays_as_long_as_it_is_newer_than_lost_prefixes():
    rig = given_to_windows()
    for place in range(8):
        on_host(rig, chr(300 + 2 * place) + chr(301 + 2 * place), 90)
        # All as old as can be: these go, and are lost.
        tidy(rig)
    assert rig.controller.counters["evicted_tokens_host"] >= 16 and slabs_of_windows(rig) == 5


def test_what_a_quota_takes_off_the_host_moves_no_slab():
    rig = given_to_windows()
    for place in range(8):
        node = on_host(rig, chr(300 + 2 * place) + chr(301 + 2 * place), 900 + place)
        rig.controller.evict_of(HOST, 2, frozenset({node.id}))
        tidy(rig)
    assert slabs_of_windows(rig) == 5


def test_an_end_that_is_not_known_is_as_old_as_its_node():
    """A path that parts where no prompt has ended, as what windows saw there was lost and computed again."""
    rig = rig_with(host=44)
    node = on_host(rig, "abcd", 100)
    rig.tree.split(node, 2)
    on_host(rig, "abxy", 100)
    (front, *_) = rig.tree.match("", tokens("ab"), fetching=True).path
    assert len(front.children) == 2 and front.last_end == NO_LAUNCH and front.last_access >= 100
    pool = rig.windowed_host
    assert pool is not None and front.frames[HOST] is not None
    if not front.is_host_partial:
        assert pool.last_seen()[pool.of(front.frames[HOST])].min() >= 100
    assert rig.controller.windowed_host.make_room(4) and pool.take_oldest_given_up() >= 100


# -- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_are_those_of_transformers_while_the_border_moves(tmp_path: Path, page_size: int):
    """Conversations, then documents, of which the device has room for few. All memory is NaN until it is written."""
    shape = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    model = Model(shape, str(tmp_path / "model"))
    num_pages, num_windowed, border = border_between(1000 // page_size, 180 // page_size, 1, 2)
    assert border is not None
    engine = model.engine(
        page_size=page_size,
        num_device_pages=330 // page_size,
        num_host_pages=num_pages,
        num_windowed_host_pages=num_windowed,
        host_border=border,
        chunked_prefill_size=32,
        window_tile=0,
        write_policy="write_through",
    )
    controller = engine.scheduler.cache.controller
    rng = np.random.default_rng(11)
    chats = [rng.integers(3, VOCAB, 30).astype(np.int32) for _ in range(24)]
    for turn in range(3):
        for place in rng.permutation(len(chats)).tolist():
            (answer,) = engine.generate([chats[place]], greedy(4))
            if turn == 2:
                model.check(chats[place], answer, 4)
            chats[place] = np.concatenate((chats[place], answer.tokens, rng.integers(3, VOCAB, 5))).astype(np.int32)
            engine.settle()
    num_to_windows = controller.counters["moved_slabs_host"]
    model.check_behind_documents(engine)
    pools = {DEVICE: engine.device_pool, HOST: engine.host_pool}
    assert check_kv(engine.scheduler, pools, model.reference_kv, KV_TOLERANCE, windows=engine.model.windows)
    assert num_to_windows > 10 and controller.counters["moved_slabs_host"] > num_to_windows, controller.counters
    engine.close()
