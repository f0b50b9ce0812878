"""Loads that leave out what layers with a window do not see: what is loaded, what later requests find of it, and
whether answers stay what they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_equality import KV_TOLERANCE, MODELS, SHAPE, VOCAB, Model, greedy, not_emulated
from transformers import Qwen2Config

from sglang.srt.managers.expected_times import ExpectedTimes
from sglang.srt.managers.lost_hits import Lookup, LostHits, StorageOutcome
from sglang.srt.managers.schedule_policy import Candidate
from sglang.srt.managers.scheduler_config import LayerStreamConfig, SchedulerConfig
from sglang.srt.managers.startup.sizes import with_windows
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.node import is_whole
from sglang.srt.mem_cache.transfer import H2D, P2D, TransferOp
from support.controller_rig import Rig
from support.kv_oracle import check_kv
from support.residency_events import PARTIAL, WINDOW_EVENTS
from support.soak import Soak
from support.storage_rig import DEVICE, HOST, PEER, StorageRig, keys_of, tokens
from support.tier_mixes import TIER_MIXES, windowed_mix

# Windows of 3: what they reach are the 2 tokens before a query.
REACH = 2


def window_rig(**options: int) -> Rig:
    return Rig(**{"device": 16, "host": 16, "window_reach": REACH, **options})


def begin_loads(rig: Rig, text: str) -> list[TransferOp]:
    """Begin to load what a request with this prefix lacks. Its path is not locked when this returns."""
    receipt = rig.tree.lock(rig.tree.match("", tokens(text)), rig.clock.next)
    tickets = rig.controller.complete_partial(rig.tree.windows.cut_to_complete(receipt.node))
    if lacking := rig.tree.windows.cut_to_load(receipt.node):
        tickets += rig.controller.begin_load(lacking)
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)
    rig.check()
    return [op for op in rig.ledger.take_ops()[0] if isinstance(op, TransferOp) and op.ticket in tickets]


def load(rig: Rig, text: str, ends: bool = True) -> TransferOp:
    """The same, by one operation."""
    (op,) = begin_loads(rig, text)
    if ends:
        rig.at(10).commit(op.ticket)
        rig.check()
    return op


def marks(rig: Rig, text: str = "abcdefgh") -> str:
    return marks_of(rig.tree, text)


def marks_of(tree: HiRadixTree, text: str) -> str:
    """Of each letter what the device has of it: w for all, p for all but layers with a window, - for nothing."""
    found, node = "", tree.roots.get("")
    while node is not None and len(found) < len(text):
        node = node.children.get(ord(text[len(found)]))
        if node is not None:
            mark = "p" if node.is_partial else "w" if is_whole(node, DEVICE) else "-"
            found += mark * len(node.key)
    return found


def loaded(text: str = "abcdefgh", **options: int) -> Rig:
    """A prefix of the host, loaded for what comes behind it."""
    rig = window_rig(**options)
    rig.on_host_only(text)
    load(rig, text)
    return rig


# -- loads --------------------------------------------------------------------------------------------------------


def test_a_load_leaves_out_what_windows_do_not_reach():
    rig = window_rig()
    rig.on_host_only("abcdefgh")
    op = load(rig, "abcdefgh")
    assert (op.num_full_only_pages, op.num_windowed_only_pages, len(op.src_frames)) == (6, 0, 8)
    assert op.size_bytes == 6 * 50 + 2 * 100, "of six pages half of the layers"
    assert marks(rig) == "ppppppww" and rig.lengths("abcdefgh") == (8, 8)
    assert rig.lengths("abcdefghij") == (8, 8) and not begin_loads(rig, "abcdefgh")
    assert rig.controller.counters["load_full_only_tokens"] == 6 and rig.controller.counters["load_back_tokens"] == 8


def test_what_is_no_longer_than_windows_is_loaded_whole():
    rig = window_rig()
    rig.on_host_only("ab")
    assert load(rig, "ab").num_full_only_pages == 0 and marks(rig, "ab") == "ww"


def test_nodes_are_cut_between_blocks_of_storage():
    rig = window_rig()
    rig.tree.order.cut_tokens = 4
    rig.on_host_only("abcdefghij")
    assert load(rig, "abcdefghij").num_full_only_pages == 8 and marks(rig, "abcdefghij") == "ppppppppww"
    rig = window_rig()
    rig.tree.order.cut_tokens = 4
    rig.on_host_only("abcdefghi")
    assert load(rig, "abcdefghi").num_full_only_pages == 4 and marks(rig, "abcdefghi") == "ppppwwwww"


def test_peers_and_host_leave_out_each_their_part():
    rig = window_rig(peer=8)
    top = rig.insert("abcd")
    low = rig.insert("efgh", below=top)
    rig.copy(top, PEER)
    rig.copy(low, HOST)
    rig.controller.drop(top, DEVICE)
    rig.device.reap(1000)
    near, far = begin_loads(rig, "abcdefgh")
    assert (near.ticket.link, far.ticket.link) == (P2D, H2D)
    assert [(op.num_full_only_pages, len(op.src_frames)) for op in (near, far)] == [(4, 4), (2, 4)]
    for op in (near, far):
        rig.at(10).commit(op.ticket)
    rig.check()
    assert marks(rig) == "ppppppww"


# -- what leaves the prefix in the middle -------------------------------------------------------------------------


def test_the_windows_of_a_branch_are_loaded_into_the_same_pages():
    rig = loaded()
    (before,) = (n.frames[DEVICE] for n in rig.tree.walk() if n.is_partial)
    match = rig.tree.match("", tokens("abcde"))
    assert (match.device_len, match.total_len, match.awaits_load) == (5, 5, False)
    assert [n.end for n in match.to_complete] == [6] and rig.tree.windows.on_device(match).total_len == 0
    op = load(rig, "abcde")
    assert (op.num_full_only_pages, op.num_windowed_only_pages) == (0, 2)
    assert op.dst_frames.tolist() == before[3:5].tolist()
    assert op.size_bytes == 2 * 50 and rig.controller.counters["load_windowed_only_tokens"] == 2
    assert marks(rig) == "pppwwpww" and not begin_loads(rig, "abcde")
    assert not rig.tree.match("", tokens("abcde")).to_complete


def test_a_branch_just_behind_the_cut_loads_what_lacks():
    rig = loaded()
    assert load(rig, "abcdefg").num_windowed_only_pages == 1 and marks(rig) == "pppppwww"


def test_a_branch_that_has_to_load_more_completes_what_it_sees():
    rig = loaded("abcdef")
    node = next(n for n in rig.tree.walk() if n.end == 6)
    more = rig.insert("xy", below=node)
    rig.back_up(more)
    rig.controller.drop(node, DEVICE)
    rig.device.reap(1000)
    assert marks(rig, "abcdefxy") == "pppp----"
    completing, loading = begin_loads(rig, "abcde")
    assert (completing.num_windowed_only_pages, len(completing.src_frames)) == (1, 1), "d in layers with a window"
    assert (loading.num_full_only_pages, loading.num_windowed_only_pages, len(loading.src_frames)) == (0, 0, 1), (
        "e in all"
    )
    for op in (completing, loading):
        rig.at(10).commit(op.ticket)
    assert marks(rig, "abcdefxy") == "pppww---"
    # Of what is loaded behind it nothing is left out for windows that reach the partial node.
    assert load(rig, "abcdef").num_full_only_pages == 0


def test_a_branch_waits_for_a_load_that_leaves_out_what_it_sees():
    rig = window_rig()
    rig.on_host_only("abcdefgh")
    op = load(rig, "abcdefgh", ends=False)
    assert rig.tree.match("", tokens("abcdefgh")).awaits_load is False
    match = rig.tree.match("", tokens("abcde"))
    assert match.awaits_load and match.total_len == 5
    rig.at(10).commit(op.ticket)
    assert not rig.tree.match("", tokens("abcde")).awaits_load


def test_who_stays_behind_what_is_being_completed_only_waits_for_it():
    rig = loaded()
    op = load(rig, "abcde", ends=False)
    match = rig.tree.match("", tokens("abcde"))
    assert not match.to_complete and not match.awaits_load and match.total_len == 5
    assert [n.tickets[DEVICE] for n in match.path] == [None, op.ticket]


def test_a_failed_completion_costs_the_pages_and_their_source():
    rig = loaded()
    op = load(rig, "abcde", ends=False)
    rig.at(10).abort(op.ticket)
    rig.check()
    assert marks(rig) == "ppp-----"
    match = rig.tree.match("", tokens("abcde"))
    assert match.total_len == 3 and [n.end for n in match.to_complete] == [3], "the rest is computed"


# -- where no tier has what windows see ---------------------------------------------------------------------------


def without_source(rig: Rig) -> Rig:
    for node in list(rig.tree.walk()):
        if node.frames[HOST] is not None:
            rig.controller.drop(node, HOST)
    rig.check()
    return rig


def test_a_match_ends_where_windows_see_what_the_device_has():
    rig = without_source(loaded())
    assert rig.lengths("abcdefgh") == (8, 8), "all that is seen is there"
    match = rig.tree.match("", tokens("abcde"))
    assert (match.device_len, match.total_len, match.last_len) == (0, 0, 0)
    assert [n.end for n in match.beyond] == [6]
    # Storage may have what windows see from there.
    match = rig.tree.match("", tokens("abcde"), fetching=True)
    assert (match.total_len, match.last_len) == (3, 3)
    assert rig.tree.next_unmatched(match, tokens("abcde")) is match.path[-1]
    assert rig.tree.next_unmatched(match, tokens("abcxe")) is None


def test_a_match_ends_behind_what_is_whole():
    rig = loaded()
    load(rig, "abcde")
    without_source(rig)
    assert marks(rig) == "pppwwpww"
    assert rig.lengths("abcdef") == (5, 5) and rig.lengths("abcdefg") == (5, 5) and rig.lengths("abcd") == (0, 0)


def test_what_is_computed_takes_the_place_of_partial_pages():
    rig = without_source(loaded())
    (before,) = (n.frames[DEVICE] for n in rig.tree.walk() if n.is_partial)
    frames = rig.device.allocate(5)
    result = rig.tree.insert_prefix("", None, tokens("abcde"), frames, rig.clock.next, rig.clock.next)
    assert result.end == 5 and result.frames.tolist() == frames.tolist() and not len(result.duplicates)
    ((gone, fence),) = result.replaced.cached
    assert gone.tolist() == before[:5].tolist() and fence < rig.clock.next
    assert marks(rig) == "wwwwwpww" and rig.lengths("abcde") == (5, 5)


def test_partial_pages_that_a_request_reads_end_what_another_inserts():
    rig = without_source(loaded())
    receipt = rig.tree.lock(rig.tree.match("", tokens("abcdefgh")), rig.clock.next)
    frames = rig.device.allocate(5)
    result = rig.tree.insert_prefix("", None, tokens("abcde"), frames, rig.clock.next, rig.clock.next)
    assert result.end == 0 and not result.replaced.cached and marks(rig) == "ppppppww"
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)


def test_what_can_be_computed_without_a_load():
    rig = loaded()
    whole, branch = (rig.tree.match("", tokens(text)) for text in ("abcdefgh", "abcde"))
    windows = rig.tree.windows
    assert windows.on_device(whole).total_len == 8 and windows.on_device(branch).total_len == 0
    load(rig, "abcde")
    found = windows.on_device(rig.tree.match("", tokens("abcdef")))
    assert (found.total_len, found.device_len, found.path[-1].end) == (5, 5, 5)


def test_what_no_tier_has_whole_counts_as_lost_and_not_as_switched_off():
    rig = loaded()
    lost_hits = LostHits(rig.tree, 1)
    without_source(rig)
    text = tokens("abcde")
    explained = lost_hits.explain(Lookup("", text, 0, StorageOutcome()), 6, 0)
    assert "switched_off" not in explained and sum(explained.values()) == 6, explained


def test_storage_brings_what_windows_see_of_partial_pages():
    """The block around the windows of a branch goes to the host, and its layers from there to the device."""
    text = "aaaabbbbccccdddd"
    rig = StorageRig(text, window_reach=REACH)
    rig.tree.make_partial(rig.insert(text))
    assert rig.on_host("aaaabbbbccccxx") == 0 and rig.on_host(text + "xx") == 0
    (probe,) = rig.begin("r", "aaaabbbbccccxx")
    assert keys_of(rig, probe) == 1, "that in which windows begin"
    (fetch,) = rig.finish(probe)
    assert rig.tree.match("", tokens("aaaabbbbccccxx"), fetching=True).total_len == 12
    rig.finish(fetch)
    assert rig.over("r") == [True]
    rig.detach("r")
    match = rig.tree.match("", tokens("aaaabbbbccccxx"))
    assert (match.total_len, match.device_len) == (12, 12)
    assert [(node.start, node.end) for node in match.to_complete] == [(10, 12)]
    assert marks_of(rig.tree, text) == "p" * 16
    rig.assert_nothing_left()


def test_what_storage_lacks_of_partial_pages_is_computed():
    text = "aaaabbbbccccdddd"
    rig = StorageRig(text[:8], window_reach=REACH)
    rig.tree.make_partial(rig.insert(text))
    (probe,) = rig.begin("r", "aaaabbbbccccxx")
    assert rig.finish(probe) == [] and rig.over("r") == [True]
    rig.detach("r")
    assert rig.on_host("aaaabbbbccccxx") == 0
    # What storage brings beyond has its windows.
    (probe,) = rig.begin("s", text[:8] + "yyyy")
    (fetch,) = rig.finish(probe)
    rig.finish(fetch)
    assert rig.over("s") == [True] and rig.on_host(text[:8] + "yyyy") == 8
    rig.detach("s")
    rig.assert_nothing_left()


def test_with_reads_turned_off_a_match_does_without_the_host():
    rig = loaded()
    rig.tree.set_load_order(rig.tree.order.load_order, unread=frozenset({HOST}))
    assert rig.lengths("abcde") == (0, 0) and rig.lengths("abcdefgh") == (8, 8)


# -- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_policy", ["auto", "write_through", "write_back", "write_through_selective"])
def test_partial_pages_are_copied_nowhere(write_policy: str):
    rig = loaded(peer=16)
    rig.controller.set_write_policy(write_policy)
    without_source(rig)
    end = next(n for n in rig.tree.walk() if n.end == 8)
    for tier in (HOST, PEER):
        rig.controller.begin_backup(end, tier)
    rig.at(10).evict(DEVICE, 8)
    copied = [op for op in rig.ledger.take_ops()[0] if isinstance(op, TransferOp)]
    assert sum(len(op.src_frames) for op in copied if op.dst == HOST) <= 2, "the end, which is whole"
    rig.check()


@pytest.mark.parametrize("write_policy", ["auto", "write_through"])
def test_the_host_gives_up_last_what_lacks_in_pages_that_are_read(write_policy: str):
    rig = loaded()
    rig.controller.set_write_policy(write_policy)
    rig.on_host_only("xyz")
    receipt = rig.tree.lock(rig.tree.match("", tokens("abcdefgh")), rig.clock.next)
    rig.check()
    assert [n.end for n in rig.tree.victims(HOST, 11)][-1] == 6
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)
    rig.check()


@pytest.mark.parametrize("write_policy", ["auto", "write_through"])
def test_what_lacks_in_pages_that_are_read_is_not_given_up_where_pinned_copies_are_spared(write_policy: str):
    rig = loaded()
    rig.controller.set_write_policy(write_policy)
    receipt = rig.tree.lock(rig.tree.match("", tokens("abcdefgh")), rig.clock.next)
    rig.check()
    path = rig.tree.path_of(receipt.node)
    assert [(len(node.key), node.is_partial) for node in path] == [(6, True), (2, False)]
    assert rig.tree.evictable_pages(HOST, spares_pinned=True) == 2
    assert rig.tree.evictable_pages(HOST, path, spares_pinned=True) == 0
    assert not rig.controller.make_room(HOST, 12, (), spares_pinned=True)
    assert all(node.frames[HOST] is not None for node in path)
    rig.tree.unlock(receipt, rig.clock.next, rig.clock.done)
    rig.check()
    assert rig.controller.make_room(HOST, 12, (), spares_pinned=True)
    rig.check()


@pytest.mark.parametrize(("host", "full_only"), [(12, 0), (13, 6)])
def test_where_copies_are_given_up_for_others_few_pages_are_partial(host: int, full_only: int):
    """An eighth of the host's pages, and as many as are free: of 13, 1 and 5."""
    rig = window_rig(host=host)
    rig.on_host_only("abcdefgh")
    for write_policy in ("auto", "write_back"):
        rig.controller.set_write_policy(write_policy)
        assert rig.controller._may_be_partial(6) == (full_only > 0)
    rig.controller.set_write_policy("auto")
    assert load(rig, "abcdefgh").num_full_only_pages == full_only
    assert not full_only or not rig.controller._may_be_partial(1)


def test_what_left_the_device_is_loaded_anew():
    rig = loaded()
    rig.at(10).evict(DEVICE, 8)
    assert marks(rig) == "--------"
    assert load(rig, "abcd").num_full_only_pages == 2 and marks(rig) == "ppww----"


def test_a_chain_is_merged_where_all_or_none_of_it_is_partial():
    rig = loaded()
    load(rig, "abcde")
    end = next(n for n in rig.tree.walk() if n.end == 8)
    rig.tree.compact(end, 10)
    assert marks(rig) == "pppwwpww" and rig.tree.num_nodes == 4
    rig.at(10).evict(DEVICE, 8)
    rig.tree.compact(end, 10)
    rig.check()
    assert rig.tree.num_nodes == 1


# -- what is expected, and when it applies ------------------------------------------------------------------------


def test_a_load_is_expected_to_take_as_long_as_what_it_copies():
    times = ExpectedTimes(10.0, 4, windowed_share=0.75, window_reach=100)
    for num_bytes in (1000, 2000, 4000):
        times.costs.add_copy(num_bytes, num_bytes * 1e-6, H2D)
    assert times.load_seconds(100) == pytest.approx(1e-3, rel=0.01)
    assert times.load_seconds(500) == pytest.approx(2e-3, rel=0.01)
    assert times.load_seconds(400, behind=100) == pytest.approx(1e-3, rel=0.01)
    assert times.load_seconds(100, behind=40) == pytest.approx(0.7e-3, rel=0.01)


def test_only_what_cannot_stream_and_is_long_enough_leaves_windows_out(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    config = SchedulerConfig(1, 64, 64, 8, context_len=4096, num_layers=3)
    assert with_windows(config, (None, None, None)) == config
    found = with_windows(config, (None, 512, 128), tile=100)
    assert (found.num_windowed_layers, found.window_reach) == (2, 611) and found.windowed_share == 2 / 3
    # Without anything to load from, it is only told.
    alone = replace(config, num_host_pages=0)
    assert with_windows(alone, (None, 512, 128), tile=100) == replace(alone, model_windows=(2, 611))
    for other in (
        replace(config, context_len=611),
        replace(config, layer_stream=LayerStreamConfig(2, 8)),
    ):
        assert not caplog.records
        assert with_windows(other, (None, 512, 128), tile=100) == other
    (record,) = caplog.records
    assert record.message.startswith("layer stream: layers with a sliding window keep and load all tokens")


def test_candidates_count_what_is_to_be_completed():
    assert Candidate(1, ((3, 5),)).load == 5


# -- answers ------------------------------------------------------------------------------------------------------


def of_the_mixed_layers() -> Qwen2Config:
    """Its first layer sees all, the others 24 tokens."""
    return Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1)


@pytest.mark.parametrize("page_size", [1, 3, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "gpt_oss", "gemma2", "gemma3")),
        pytest.param("cohere2", marks=(pytest.mark.slow, not_emulated)),
    ],
)
@pytest.mark.parametrize("fail_rate", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_answers_are_those_of_transformers(tmp_path: Path, name: str, page_size: int, fail_rate: float) -> None:
    """Documents come from the host, for questions behind their ends and in their middles. All memory is NaN until it
    is written: what a window hides may not be touched."""
    model = Model(of_the_mixed_layers() if name == "qwen2" else MODELS[name], str(tmp_path))
    engine = model.engine(
        page_size=page_size,
        num_device_pages=330 // page_size,
        num_host_pages=2400 // page_size,
        window_tile=0,
        load_fail_rate=fail_rate,
        seed=3,
    )
    model.check_behind_documents(engine)
    counters = engine.scheduler.state()["counters"]
    assert counters["load_full_only_tokens"] > 300 and counters["load_windowed_only_tokens"] > 0, counters
    pools = {DEVICE: engine.device_pool, HOST: engine.host_pool}
    compared = check_kv(engine.scheduler, pools, model.reference_kv, KV_TOLERANCE, windows=engine.model.windows)
    assert compared > 0
    engine.close()


def test_the_canary_compares_what_is_whole_beside_partial_pages(tmp_path: Path) -> None:
    model = Model(of_the_mixed_layers(), str(tmp_path / "model"))
    options = {"canary_rate": 1.0, "canary_idle_s": 0.0, "evidence": tmp_path, "write_policy": "write_through"}
    engine = model.engine(num_device_pages=460, num_host_pages=3000, window_tile=0, **options)
    rng = np.random.default_rng(1)
    documents = [rng.integers(3, VOCAB, 180).astype(np.int32) for _ in range(3)]
    for number in range(6):
        prompt = np.concatenate((documents[number % 3], rng.integers(3, VOCAB, 6).astype(np.int32)))
        engine.generate([prompt], greedy(3))
        engine.settle()
    # The samples of what was found, when nothing else is to be done.
    for _ in range(500):
        engine._turn(0.0, [], [], lambda decision: None)
    found = engine.scheduler.canary.state()
    assert engine.scheduler.state()["counters"]["load_full_only_tokens"] > 300
    assert found is not None and found["equal_tokens"] > 0 and not found["different_tokens"], found
    engine.close()


@pytest.mark.parametrize(
    ("mix", "seed", "events"),
    [
        (("peer",), 37, WINDOW_EVENTS),
        (("peer", "disk"), 10, WINDOW_EVENTS[:2]),
        (("disk", "lent"), 8, WINDOW_EVENTS[:2]),
    ],
)
def test_the_nets_find_nothing(mix: tuple[str, ...], seed: int, events: tuple[str, ...]) -> None:
    """The seeds were chosen for what happens in them."""
    soak = Soak(windowed_mix(mix, seed))
    soak.run()
    assert all(soak.events.counts[event] for event in events), f"{soak.events.counts}"


@pytest.mark.slow
@pytest.mark.parametrize("mix", [mix for mix in TIER_MIXES if "stream" not in mix], ids="+".join)
def test_the_nets_find_nothing_in_any_mix_of_tiers(mix: tuple[str, ...]) -> None:
    counts = Counter[str]()
    for seed in range(20, 32):
        soak = Soak(windowed_mix(mix, seed))
        soak.run()
        counts.update(soak.events.counts)
    assert counts[PARTIAL], f"{counts}"
