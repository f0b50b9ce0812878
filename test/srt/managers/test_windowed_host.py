"""The host's pool for layers with a window: what is copied into it, given up, loaded from it, fetched and stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_equality import KV_TOLERANCE, SHAPE, Model
from transformers import Qwen2Config

from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.managers.startup.sizes import with_windowed_host_pool, with_windows
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_store import BlockStore
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.node import Node, is_whole
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.registry import STORAGE_BACKENDS
from sglang.srt.mem_cache.transfer import H2D, P2H, StorageOp, TransferOp
from support.controller_rig import Rig
from support.kv_oracle import check_kv
from support.remote_fixture import PATIENCE_S, PROXY, close_to_the_end
from support.storage_rig import DEVICE, HOST, PEER, StorageRig, keys_of, tokens

# Windows of 3: what they reach are the 2 tokens before a query.
REACH = 2


def rig_with(windowed_host: int, **options: Any) -> Rig:
    return Rig(
        **{"device": 24, "host": 24, "peer": 0, "window_reach": REACH, "windowed_host": windowed_host, **options}
    )


def copies(rig: Rig) -> list[TransferOp]:
    return [op for op in rig.ledger.take_ops()[0] if isinstance(op, TransferOp)]


def end(rig: Rig, op: TransferOp) -> None:
    rig.at(10).commit(op.ticket)
    rig.check()


def marks(rig: Rig | StorageRig, text: str) -> str:
    """Of each letter what the host has of it: w for all, p for all but layers with a window, - for nothing."""
    found, node = "", rig.tree.roots.get("")
    while node is not None and len(found) < len(text):
        node = node.children.get(ord(text[len(found)]))
        if node is not None:
            mark = "-" if node.frames[HOST] is None else "p" if node.is_host_partial else "w"
            found += mark * len(node.key)
    return found


def load(rig: Rig, text: str) -> TransferOp:
    """Load what the device lacks of a text, to the end."""
    receipt = rig.tree.lock(rig.tree.match("", tokens(text)), rig.clock.next)
    rig.controller.begin_load(rig.tree.windows.cut_to_load(receipt.node))
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)
    (op,) = copies(rig)
    end(rig, op)
    return op


def shed(rig: Rig, num_pages: int, kept: tuple[Node, ...] = ()) -> int:
    """Have the host give up so many pages of layers with a window. Returns how many are free more than before."""
    pool = rig.windowed_host
    assert pool is not None
    before = pool.table.num_free
    rig.controller.windowed_host.make_room(before + num_pages, kept)
    rig.check()
    return pool.table.num_free - before


# -- copies to the host -------------------------------------------------------------------------------------------


def test_a_copy_takes_pages_of_both_pools_and_gives_both_back():
    rig = rig_with(12)
    node = rig.insert("abcdefgh")
    rig.back_up(node)
    pool = rig.windowed_host
    assert pool is not None and pool.table.num_free == 4 and marks(rig, "abcdefgh") == "w" * 8
    rig.controller.drop(node, HOST)
    rig.host.reap(10)  # type: ignore[union-attr]
    assert pool.table.num_free == 12 and (pool.frame_of == -1).all()
    rig.check()


def test_where_room_lacks_the_front_of_a_copy_is_partial():
    rig = rig_with(4)
    rig.at(10).begin_backup(rig.insert("abcdefgh"))
    (op,) = copies(rig)
    assert (op.num_full_only_pages, len(op.src_frames), op.size_bytes) == (4, 8, 4 * 50 + 4 * 100)
    assert op.src_windowed is not None and op.dst_windowed is not None
    assert len(op.src_windowed) == len(op.dst_windowed) == 4
    end(rig, op)
    assert marks(rig, "abcdefgh") == "ppppwwww"
    assert rig.controller.counters["backup_tokens"] == 8


def test_a_failed_copy_gives_back_both_pools():
    rig = rig_with(4)
    rig.at(10).begin_backup(rig.insert("abcdefgh"))
    (op,) = copies(rig)
    rig.at(10).abort(op.ticket)
    rig.host.reap(10)  # type: ignore[union-attr]
    rig.check()
    assert rig.windowed_host is not None and rig.windowed_host.table.num_free == 4
    assert marks(rig, "abcdefgh") == "-" * 8


def test_a_copy_has_what_is_far_from_all_ends_give_up_its_windows():
    rig = rig_with(10)
    rig.back_up(rig.insert("abcdefgh"))
    rig.back_up(rig.insert("uvwx"))
    assert marks(rig, "abcdefgh") == "ppwwwwww" and marks(rig, "uvwx") == "wwww"
    assert rig.controller.counters["evicted_tokens_windowed_host"] == 2


def test_peers_move_to_the_host_what_fits_there():
    rig = rig_with(3, peer=12)
    node = rig.insert("abcdefgh")
    rig.copy(node, PEER)
    rig.controller.drop(node, DEVICE)
    rig.controller.copy_to_host([node])
    (op,) = copies(rig)
    assert op.ticket.link == P2H and op.num_full_only_pages == 5 and op.src_windowed is None
    assert op.dst_windowed is not None and len(op.dst_windowed) == 3
    end(rig, op)
    assert marks(rig, "abcdefgh") == "pppppwww"


def test_what_the_device_evicts_may_be_split_by_its_copy():
    rig = rig_with(3, write_policy="write_back")
    rig.insert("ij", below=rig.insert("abcdefgh"))
    rig.at(10).evict(DEVICE, 10)
    rig.device.reap(10)
    rig.check()
    for op in copies(rig):
        end(rig, op)
    rig.device.reap(10)
    assert rig.device.num_free == 24 and marks(rig, "abcdefghij").count("w") == 3


# -- loads --------------------------------------------------------------------------------------------------------


def on_host(rig: Rig, text: str) -> None:
    rig.on_host_only(text)
    rig.device.reap(1000)


def test_what_is_partial_on_the_host_is_loaded_where_no_window_reaches():
    rig = rig_with(4)
    on_host(rig, "abcdefgh")
    assert marks(rig, "abcdefgh") == "ppppwwww" and rig.lengths("abcdefgh") == (0, 8)
    op = load(rig, "abcdefgh")
    assert op.ticket.link == H2D and op.num_full_only_pages == 6
    # Behind it all comes from the device.
    assert rig.lengths("abcdefghij") == (8, 8)


def test_a_match_ends_where_windows_reach_what_is_partial_on_the_host():
    rig = rig_with(4)
    on_host(rig, "abcdefgh")
    assert rig.lengths("abcdef") == (0, 6), "windows reach e"
    assert rig.lengths("abcde") == (0, 0) and rig.lengths("abc") == (0, 0)
    # A fetch would bring it.
    assert rig.tree.match("", tokens("abcde"), fetching=True).total_len == 3


def test_a_match_for_a_fetch_ends_where_tokens_part_from_what_is_partial():
    rig = rig_with(4)
    on_host(rig, "abcdefghij")
    assert marks(rig, "abcdefghij") == "ppppppwwww"
    # Windows will reach f from where the fetch ends, which is behind b.
    match = rig.tree.match("", tokens("abxyzuv"), fetching=True, wanted=7)
    assert (match.total_len, match.last_len) == (2, 2)


def test_what_the_device_has_partial_is_not_completed_from_what_is_partial():
    rig = rig_with(4)
    on_host(rig, "abcdefgh")
    load(rig, "abcdefgh")
    assert rig.lengths("abcde") == (0, 0) and not rig.tree.match("", tokens("abcde")).to_complete
    node = rig.tree.match("", tokens("abcdef")).path[-1]
    assert not is_whole(node, DEVICE) and rig.tree.whole_source_of(node) == HOST


def test_cuts_between_blocks_may_leave_more_out_than_the_host_has():
    rig = rig_with(3)
    rig.tree.order.cut_tokens = 4
    on_host(rig, "abcdefgh")
    assert marks(rig, "abcdefgh") == "pppppwww"
    # Loads are cut at d; e and f are partial on the host.
    assert load(rig, "abcdefgh").num_full_only_pages == 5


# -- what goes next -----------------------------------------------------------------------------------------------


def test_what_waiting_requests_fetched_and_what_is_about_to_be_loaded_stays():
    rig = rig_with(16)
    on_host(rig, "abcdefgh")
    receipt = rig.tree.lock(rig.tree.match("", tokens("abcdef")), rig.clock.next)
    assert shed(rig, 16) == 6 and marks(rig, "abcdefgh") == "ppppwwpp"
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)
    end_node = rig.tree.match("", tokens("abcdef")).path[-1]
    rig.tree.soft_pin(end_node)
    rig.at(10, next=2000)
    assert shed(rig, 16) == 0
    rig.tree.end_soft_pin(end_node)
    rig.at(10, next=3000)
    assert shed(rig, 16) == 2 and marks(rig, "abcdefgh") == "p" * 8


def test_nodes_that_are_kept_and_copies_in_flight_stay_whole():
    rig = rig_with(16)
    on_host(rig, "abcdefgh")
    (node,) = rig.tree.match("", tokens("abcdefgh")).path
    assert shed(rig, 16, (node,)) == 0
    receipt = rig.tree.lock(rig.tree.match("", tokens("abcdefgh")), rig.clock.next)
    rig.controller.begin_load(rig.tree.windows.cut_to_load(receipt.node))
    (op,) = copies(rig)
    rig.at(10, next=2000)
    assert shed(rig, 16) == 6, "those that the load leaves out"
    end(rig, op)
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)


def test_a_tree_without_victims_is_not_looked_through_again_at_once():
    rig, looks = rig_with(16), 0
    on_host(rig, "abcdefgh")
    pool = rig.windowed_host
    assert pool is not None
    victims = pool.victims

    def counted(*args: Any, **more: Any) -> list[Node]:
        nonlocal looks
        looks += 1
        return victims(*args, **more)

    pool.victims = counted  # type: ignore[method-assign]
    path = rig.tree.match("", tokens("abcdefgh")).path
    for _ in range(5):
        assert shed(rig, 16, path) == 0
    assert looks == 1
    rig.at(10, next=1016)
    assert shed(rig, 16) > 0 and looks == 2


def test_a_tree_whose_pages_are_being_copied_is_looked_through_again():
    rig = rig_with(16)
    for text in ("abcdefgh", "ijklmnop"):
        rig.at(10).begin_backup(rig.insert(text))
    ops = copies(rig)
    assert shed(rig, 8) == 0, "all are being written"
    for op in ops:
        end(rig, op)
    assert shed(rig, 8) >= 8


def test_what_is_computed_again_is_copied_again_as_far_as_windows_reach():
    rig = rig_with(6)
    on_host(rig, "abcdefghij")
    assert marks(rig, "abcdefghij") == "ppppwwwwww"
    # A branch behind e, whose windows reach d and e.
    node = rig.insert("abcdexy")
    rig.controller.windowed_host.drop_partial_ends(node)
    assert marks(rig, "abcdefghij") == "ppp-wwwwww"
    rig.at(10).begin_backup(node)
    (op,) = copies(rig)
    end(rig, op)
    assert len(op.src_frames) == 3 and marks(rig, "abcdexy") == "pppwwww"
    assert marks(rig, "abcdefghij") == "pppwwpppww", "where paths part, and the end"
    # It is done once.
    rig.controller.windowed_host.drop_partial_ends(node)
    assert rig.at(10).begin_backup(node) is None


# -- storage ------------------------------------------------------------------------------------------------------

TEXT = "aaaabbbbccccdddd"


def rig_of_storage(*stored: str, windowed_host: int, **options: Any) -> StorageRig:
    return StorageRig(*stored, window_reach=4, windowed_host=windowed_host, **options)


def fetch_all(rig: StorageRig, rid: str, text: str) -> None:
    (probe,) = rig.begin(rid, text)
    rig.finish(probe)
    rig.finish_all()


def test_a_fetch_without_room_leaves_out_what_windows_do_not_reach():
    rig = rig_of_storage(TEXT, windowed_host=6)
    fetch_all(rig, "r", TEXT + "x")
    assert marks(rig, TEXT)[-4:] == "wwww" and marks(rig, TEXT)[:4] == "pppp"
    assert rig.on_host(TEXT + "x") == 16 and rig.over("r") == [True]
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_store_of_their_own_brings_only_what_windows_reach():
    rig = rig_of_storage(TEXT, windowed_host=32)
    assert rig.storage.setup is not None
    rig.storage.setup = replace(rig.storage.setup, has_windowed_store=True)
    (probe,) = rig.begin("r", TEXT + "x")
    fetches = rig.finish(probe)
    ops = [op for op in (rig.ops[fetch] for fetch in fetches) if isinstance(op, StorageOp)]
    assert [(op.windowed >= 0).sum() for op in ops if op.windowed is not None] == [0, 4]
    rig.finish_all()
    assert marks(rig, TEXT) == "p" * 12 + "wwww" and rig.on_host(TEXT + "x") == 16
    rig.detach("r")
    rig.assert_nothing_left()


def test_what_came_without_windows_is_pinned_until_the_rest_has_come():
    text = TEXT + "eeeeffff"
    rig = StorageRig(text, window_reach=8, windowed_host=64, max_fetch_pages=16)
    assert rig.storage.setup is not None
    rig.storage.setup = replace(rig.storage.setup, has_windowed_store=True)
    (probe,) = rig.begin("r", text + "x")
    first, second = rig.finish(probe)
    # Windows reach 8 from 16, but the fetch goes on.
    assert marks(rig, text) == "p" * 16 and rig.tree.counts.soft_pinned[HOST] == 16
    rig.finish(first)
    rig.finish(second)
    rig.finish_all()
    assert marks(rig, text) == "p" * 16 + "w" * 8 and rig.on_host(text + "x") == 24
    rig.detach("r")
    rig.assert_nothing_left()


def test_a_store_of_their_own_takes_what_is_partial_on_the_host():
    rig = rig_of_storage(windowed_host=6, max_store_pages=0)
    assert rig.storage.setup is not None
    rig.storage.setup = replace(rig.storage.setup, has_windowed_store=True, limits=StorageLimits(8, 64, 64, 8))
    rig.storage.stores.near.writer.setup = rig.storage.setup
    ticket = rig.controller.begin_backup(rig.insert(TEXT))
    assert ticket is not None
    rig.collect()
    begun, ops = rig.finish(ticket), []
    assert marks(rig, TEXT) == "p" * 10 + "w" * 6
    # An eighth of the pool may be on its way at once, and a block always.
    while begun:
        (store,) = begun
        ops.append(rig.ops[store])
        begun = rig.finish(store, count=1)
    assert [(op.windowed >= 0).tolist() for op in ops if isinstance(op, StorageOp) and op.windowed is not None] == [
        [False] * 4,
        [False] * 4,
        [False] * 2 + [True] * 2,
        [True] * 4,
    ]


def test_what_waits_to_be_stored_leaves_the_pool_to_others():
    """Of a storage that does not answer."""
    rig = rig_of_storage(windowed_host=64, host=256, device=256, max_store_pages=64, blocks_per_op=1)
    texts = ["".join(chr(1000 * i + j) for j in range(16)) for i in range(1, 9)]
    for text in texts:
        ticket = rig.controller.begin_backup(rig.insert(text))
        assert ticket is not None
        rig.collect()
        rig.finish(ticket)
    assert rig.storage.stores.near.writer.storing_pages == 8 and rig.tree.counts.soft_pinned[HOST] <= 16
    assert [marks(rig, text)[-4:] for text in texts] == ["wwww"] * 8
    # What is oldest of what is not being stored, or is one of those that wait first.
    rig.clock.next += 16  # type: ignore[assignment]
    rig.controller.windowed_host.make_room(32)
    assert rig.windowed_host is not None and rig.windowed_host.table.num_free >= 24
    rig.check()


def test_a_fetch_with_room_brings_all_layers():
    rig = rig_of_storage(TEXT, windowed_host=32)
    fetch_all(rig, "r", TEXT + "x")
    assert marks(rig, TEXT) == "w" * 16
    rig.detach("r")
    rig.assert_nothing_left()


def test_storage_brings_again_what_is_partial_on_the_host():
    rig = rig_of_storage(TEXT, windowed_host=6)
    fetch_all(rig, "r", TEXT + "x")
    rig.detach("r")
    assert rig.on_host(TEXT[:8] + "y") == 0
    (probe,) = rig.begin("s", TEXT[:8] + "y")
    assert keys_of(rig, probe) == 1, "that in which windows begin"
    (fetch,) = rig.finish(probe)
    op = rig.ops[fetch]
    assert isinstance(op, StorageOp) and op.windowed is not None and (op.windowed >= 0).all()
    rig.finish(fetch)
    assert rig.on_host(TEXT[:8] + "y") == 8 and rig.over("s") == [True]
    rig.detach("s")
    rig.assert_nothing_left()


def test_a_fetch_that_fails_leaves_no_pages_behind():
    rig = rig_of_storage(TEXT, windowed_host=6)
    fetch_all(rig, "r", TEXT + "x")
    rig.detach("r")
    (probe,) = rig.begin("s", TEXT[:8] + "y")
    (fetch,) = rig.finish(probe)
    rig.finish(fetch, count=0)
    assert rig.over("s") == [True] and rig.on_host(TEXT[:8] + "y") == 0
    rig.detach("s")
    rig.assert_nothing_left()
    assert rig.windowed_host is not None
    held = int((rig.windowed_host.frame_of >= 0).sum())
    assert held == rig.windowed_host.table.num_pages - rig.windowed_host.table.num_free


def test_what_a_load_reads_is_not_fetched_over():
    rig = rig_of_storage(TEXT, windowed_host=6)
    fetch_all(rig, "r", TEXT + "x")
    rig.detach("r")
    receipt = rig.tree.lock(rig.tree.match("", tokens(TEXT)), rig.clock.next)
    (probe,) = rig.begin("s", TEXT[:8] + "y")
    assert rig.finish(probe) == [] and rig.over("s") == [True]
    rig.detach("s")
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)
    rig.assert_nothing_left()


def test_pages_are_stored_before_they_give_up_their_windows():
    rig = rig_of_storage(windowed_host=16, max_store_pages=4, blocks_per_op=1)
    ticket = rig.controller.begin_backup(rig.insert(TEXT))
    assert ticket is not None
    rig.collect()
    # Storage takes one block at a time, the first of them now.
    (first,) = rig.finish(ticket)
    pool = rig.windowed_host
    assert pool is not None and pool.table.num_free == 0
    rig.controller.windowed_host.make_room(6)
    assert marks(rig, TEXT)[:4] == "wwww", "it is being stored"
    assert marks(rig, TEXT)[-4:] == "wwww", "the end"
    rig.finish(first)
    rig.finish_all()
    rig.clock.next += 16  # type: ignore[assignment]
    rig.controller.windowed_host.make_room(6)
    assert marks(rig, TEXT)[:4] == "pppp" and pool.table.num_free >= 6
    rig.collect()
    rig.finish_all()


# -- sizes --------------------------------------------------------------------------------------------------------

WINDOWS = (128, 128, 128, 128, 128, None)


def config_of(num_host_pages: int, **fields: Any) -> SchedulerConfig:
    sizes = {"page_size": 1, "num_device_pages": 9000, "num_host_pages": num_host_pages, "page_bytes": 6}
    return SchedulerConfig(**sizes, context_len=8192, num_layers=6, chunked_prefill_size=256, **fields)


def test_the_host_has_more_pages_of_the_same_bytes():
    found = with_windows(with_windowed_host_pool(config_of(18000), WINDOWS, None), WINDOWS)
    assert found.num_windowed_host_pages == pytest.approx(0.25 * found.num_host_pages, abs=1)
    assert 18000 * 6 - 6 < found.num_host_pages + 5 * found.num_windowed_host_pages <= 18000 * 6
    assert (found.num_device_pages, found.num_windowed_pages) == (9000, 0)
    found.check()
    half = with_windowed_host_pool(config_of(18000), WINDOWS, 0.5)
    assert half.num_host_pages == pytest.approx(18000 * 6 / 3.5, abs=5)


def test_long_windows_have_more_of_the_host():
    found = with_windowed_host_pool(config_of(18000), (1024,) * 5 + (None,), None)
    assert found.num_windowed_host_pages == pytest.approx((1023 + 128) / 3072 * found.num_host_pages, abs=5)
    found = with_windowed_host_pool(config_of(90000), (4096,) * 5 + (None,), None)
    assert found.num_windowed_host_pages == pytest.approx(0.5 * found.num_host_pages, abs=5)


@pytest.mark.parametrize(
    "config, windows",
    [
        (config_of(18000), (None,) * 6),
        (config_of(18000), (128,) * 6),
        (config_of(0), WINDOWS),
        (config_of(18000, layer_stream=LayerStreamConfig(2, 8)), WINDOWS),
    ],
)
def test_the_host_has_one_pool_where_windows_hide_nothing(
    config: SchedulerConfig, windows: tuple[int | None, ...], caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    assert with_windowed_host_pool(config, windows, None) == config and not caplog.records


def test_a_host_that_gains_nothing_is_divided_too():
    """What is stored is found by starts with other sizes. This host has room for a launch and a window."""
    config = config_of(600)
    found = with_windowed_host_pool(config, WINDOWS, None)
    assert found == replace(config, num_windowed_host_pages=600)
    with_windows(found, WINDOWS).check()


# -- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_pools", ["one", pytest.param("two", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("order", "stores"),
    [
        ("page_first", "file"),
        ("page_first", "remote"),
        ("layer_first", "one"),
        pytest.param("layer_first", "file", marks=pytest.mark.slow),
        pytest.param("page_first", "file,remote", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_transformers(
    tmp_path: Path, order: str, stores: str, page_size: int, device_pools: str
):
    """Documents are asked behind their ends and in their middles. The host has all of them in layers with full
    attention, and little more than their ends in the others, which storage brings. All memory is NaN until it is
    written. stores: which backends have a store for each kind of layers; "one": the disk has one for both."""
    shape = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    model, block = Model(shape, str(tmp_path / "model")), 8
    backend = stores.replace("one", "file")
    tiers = tuple(STORAGE_BACKENDS[name].tier for name in backend.split(","))
    limits = StorageLimits.of_host(1200 // page_size, block // page_size, 4)
    prefetch = PrefetchConfig("wait_complete", 1)
    setup = StorageSetup("test", "", b"test", block, limits, prefetch, "write_through", tiers)
    setup = replace(setup, has_windowed_store=stores != "one")
    settings = {
        "file": {"path": str(tmp_path / "store"), "limit_gb": 0.1},
        "remote": {"in_process": True, "limit_gb": 0.1, "proxy": PROXY, "hang_timeout_s": PATIENCE_S},
    }

    opened: list[BlockStore] = []

    def open_store(pool: MHATokenToKVPoolHost) -> BlockStore:
        if stores == "one":
            return HiCacheFile(tmp_path / "store", "model", pool, block, FileStoreOptions(64 << 20))
        names = backend.split(",")
        config = settings[backend] if len(names) == 1 else {name: settings[name] for name in names}
        opener = StorageOpener(lambda: "model", "name", pool, 0, 1, directory=tmp_path, window_reach=23)
        config = {"block_tokens": block, **config}
        opened.append(opener.open(opener.setup(backend, json.dumps(config), "wait_complete", "write_through").setup))
        return opened[0]

    engine = model.engine(
        page_size=page_size,
        num_device_pages=330 // page_size,
        num_windowed_pages=236 // page_size if device_pools == "two" else 0,
        num_host_pages=1200 // page_size,
        num_windowed_host_pages=236 // page_size,
        chunked_prefill_size=32,
        host_layout=order,
        window_tile=0,
        open_store=open_store,
        storage=setup,
        write_policy="write_through",
    )
    model.check_behind_documents(engine)
    counters = engine.scheduler.state()["counters"]
    assert counters["evicted_tokens_windowed_host"] > 200 and counters["load_full_only_tokens"] > 50, counters
    assert counters["prefetched_tokens"] > 0, counters
    pools = {DEVICE: engine.device_pool, HOST: engine.host_pool}
    assert check_kv(engine.scheduler, pools, model.reference_kv, KV_TOLERANCE, windows=engine.model.windows)
    engine.close()
    for store in opened:
        close_to_the_end(store)
