"""Requests that are longer than the device have the tokens that a large device gives, whatever is streamed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from test_equality import MODELS, Model, check_memory, greedy, prompts

from sglang.srt.managers import kv_cache
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.layer_streaming import LayerStreaming
from sglang.srt.managers.schedule_batch import BatchDecision, ReqHold
from sglang.srt.managers.scheduler_config import LayerStreamConfig, PriorityConfig
from sglang.srt.managers.streamed_request import StreamedRequest
from sglang.srt.mem_cache.frame_table import FrameState, FrameTable
from sglang.srt.mem_cache.transfer import P2D, Tier
from sglang.srt.model_executor.launch import Launch, LaunchMode, StreamedPrefix
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import LaunchSeq
from support.local_engine import Generation, LocalEngine
from support.storage_rig import DEVICE, HOST, StorageRig, tokens
from support.two_ranks import TwoRanks

CHUNK = 16


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt_oss"))]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(MODELS[request.param], str(tmp_path_factory.mktemp(request.param)))


def streaming(model: Model, page_size: int = 4, tokens: int = 64, buffer_tokens: int = 20, **options) -> LocalEngine:
    """An engine whose device has room for `tokens` tokens, a few chunks."""
    options = {
        "num_host_pages": 480 // page_size,
        "layer_stream": LayerStreamConfig(2, max(1, buffer_tokens // page_size)),
        "chunked_prefill_size": CHUNK,
        "new_token_ratio": 0.0,
    } | options
    return model.engine(page_size=page_size, num_device_pages=tokens // page_size, **options)


def counters(engine: LocalEngine) -> dict[str, int]:
    return engine.scheduler.state()["counters"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prompt_that_is_longer_than_the_device(model: Model, page_size: int):
    engine = streaming(model, page_size)
    (prompt,) = prompts(21, [230])
    for turn in range(2):
        (answer,) = engine.generate([prompt], greedy(20))
        model.check(prompt, answer, 20)
        engine.settle()
        if turn == 0:
            assert counters(engine)["spilled_tokens"] > 100
            computed = counters(engine)["prefill_tokens"]
        found = answer.cached_tokens_details
        assert found["device"] + found["host"] == turn * (len(prompt) - 1) // page_size * page_size
    # The second time nothing but the last page was computed, and what was streamed are the host's pages.
    assert counters(engine)["prefill_tokens"] - computed <= page_size
    check_memory(model, engine)


def test_a_host_that_is_smaller_than_what_was_computed_in_one_run(model: Model, monkeypatch: pytest.MonkeyPatch):
    """The prompt's chunks are one node by then, of which the host takes the front."""
    monkeypatch.setattr(kv_cache, "COMPACT_EVERY_TOKENS", 2 * CHUNK)
    engine = streaming(model, tokens=128, num_host_pages=20, write_policy="write_back")
    assert engine.scheduler.max_total_len > 150
    (prompt,) = prompts(41, [140])
    (answer,) = engine.generate([prompt], greedy(10))
    model.check(prompt, answer, 10)
    assert counters(engine)["streamed_reqs"] == 1
    engine.settle()
    check_memory(model, engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_buffers", "buffer_tokens"), [(1, 4), (2, 400), (3, 12)])
def test_whole_layers_and_pieces_of_them(model: Model, num_buffers: int, buffer_tokens: int):
    engine = streaming(model, layer_stream=LayerStreamConfig(num_buffers, buffer_tokens // 4))
    (prompt,) = prompts(22, [150])
    (answer,) = engine.generate([prompt], greedy(10))
    model.check(prompt, answer, 10)
    assert counters(engine)["streamed_tokens"] > 0
    check_memory(model, engine)


def test_an_answer_that_outgrows_the_device(model: Model):
    engine = streaming(model)
    (prompt,) = prompts(23, [12])
    (answer,) = engine.generate([prompt], greedy(120))
    model.check(prompt, answer, 120)
    assert counters(engine)["streamed_reqs"] == 1 and counters(engine)["streamed_tokens"] > 0
    check_memory(model, engine)


def test_up_to_what_device_and_host_hold_together(model: Model):
    """The host has less room than the request needs: the device keeps the rest, and nothing twice."""
    engine = streaming(model, tokens=100, num_host_pages=30)
    most = engine.scheduler.max_total_len
    assert most > 30 * 4 and most == (30 + 25 - 2 * 4 - 2) * 4
    prompt = prompts(24, [most - 9])[0]
    (answer,) = engine.generate([prompt], greedy(9))
    model.check(prompt, answer, 9)
    assert counters(engine).get("retracted_reqs", 0) == 0
    (refused,) = engine.generate([np.concatenate([prompt, prompt[:9]])], greedy(1))
    assert refused.finish_reason == "abort" and not refused.tokens
    check_memory(model, engine)


def test_copies_of_what_the_device_has_make_room_on_a_full_host(model: Model):
    """The request finds 52 tokens on the device, of which the host has some, too. Its chunks fill the host: if those
    copies stayed, it would end before its last token."""
    engine = streaming(model, tokens=160, num_host_pages=30, write_policy="write_back")
    prompt = prompts(77, [engine.scheduler.max_total_len - 9])[0]
    other = prompts(78, [136])[0]
    for ids in (prompt[:40], other, prompt[:52]):
        (found,) = engine.generate([ids], greedy(1))
        engine.settle()
    # The second prompt has moved a part to the host, how much depends on when its launches ended.
    assert sum(found.cached_tokens_details.values()) == 40 and found.cached_tokens_details["host"] > 0
    (answer,) = engine.generate([prompt], greedy(9))
    model.check(prompt, answer, 9)
    assert counters(engine).get("retracted_reqs", 0) == 0
    check_memory(model, engine)


def test_what_the_host_has_no_room_for_goes_to_disk(model: Model):
    """The request is three times as long as device and host together; a second one finds what the host kept."""
    engine = streaming(model, tokens=64, num_host_pages=15, num_swap_pages=60)
    assert engine.scheduler.max_total_len == (15 + 60 + 16 - 2 * 4 - 2) * 4
    prompt = prompts(35, [310])[0]
    tiers = set()

    def look(decision) -> None:
        if decision.launch is not None:
            tiers.update(tier for each in decision.launch.streams for tier, _ in each.parts)

    for turn in range(2):
        (answer,) = engine.generate([prompt], greedy(10), after_step=look)
        model.check(prompt, answer, 10)
        engine.settle()
        assert turn == 0 or answer.cached_tokens_details["host"] > 30
    assert tiers == {Tier.HOST, Tier.DISK} and counters(engine)["swapped_tokens"] > 300
    swap = engine.scheduler.cache.swap
    swap.reap(engine.scheduler.clock.done)
    assert swap.num_free == swap.num_pages, "nothing stays there"
    check_memory(model, engine)


def test_a_prompt_that_no_tier_has_room_for_ends(model: Model):
    """Somebody else keeps the host while the prompt is computed; the next one has it again."""
    engine = streaming(model, tokens=64, num_host_pages=15, num_swap_pages=20)
    host = engine.scheduler.cache.host
    taken = host.allocate(14)
    (answer,) = engine.generate(prompts(36, [158]), greedy(5))
    assert answer.finish_reason == "abort" and not answer.tokens
    host.free_after(taken, FrameState.HELD, -1)
    (prompt,) = prompts(37, [158])
    (answer,) = engine.generate([prompt], greedy(5))
    model.check(prompt, answer, 5)
    check_memory(model, engine)


def test_what_comes_back_from_two_tiers_comes_in_any_order(model: Model):
    """The end of what is before the swapped pages is on the device first, and the host has given it up since."""
    # Pages are taken by the test: nothing may look who has them.
    engine = streaming(
        model,
        tokens=160,
        num_host_pages=8,
        num_peer_pages=20,
        num_swap_pages=60,
        debug=False,
        write_policy="write_through",
    )
    scheduler = engine.scheduler
    prompt = prompts(38, [233])[0]
    engine.generate([prompt[:33]], greedy(1))
    engine.settle()
    scheduler.cache.controller.evict(Tier.DEVICE, 40)
    engine.generate(prompts(39, [3]), greedy(1))
    engine.settle()
    (node,) = scheduler.cache.tree.match("", prompt[:32]).path
    scheduler.cache.tree.split(node, 24)
    scheduler.cache.controller.drop(node, Tier.PEER)
    taken = scheduler.cache.device.allocate(20)
    assert not engine.switch("peer", writes=False)
    link, late, tiers, num_launches = engine.core.links[P2D], [], set(), 0
    poll = link.poll

    def poll_late():
        late.extend(poll())
        if late and late[0].seq == 1 and num_launches < 20:
            return []
        found, late[:] = list(late), []
        return found

    link.poll = poll_late

    def look(decision) -> None:
        nonlocal num_launches
        (req,) = scheduler.streaming.reqs or (None,)
        if decision.launch is None or req not in scheduler.queues.running:
            return
        num_launches += 1
        tiers.update(tier for each in decision.launch.streams for tier, _ in each.parts)
        if num_launches == 3:
            scheduler.cache.device.free_after(taken, FrameState.HELD, -1)
        last = req.hold.receipt.node
        if last.frames[Tier.DEVICE] is not None and last.parent.tickets[Tier.DEVICE] is not None:
            scheduler.cache.controller.drop(last, Tier.HOST)

    (answer,) = engine.generate([prompt], greedy(30), after_step=look)
    model.check(prompt, answer, 30)
    assert tiers == {Tier.DEVICE, Tier.PEER, Tier.HOST, Tier.DISK}


def test_what_the_launch_before_computes_is_streamed_from_the_device(model: Model):
    engine = streaming(model, tokens=128)
    executor, scheduler = engine.core.executor, engine.scheduler
    launch, layer, pieces = executor.launch, executor._layer, executor._layer_stream
    wait, fill = pieces.stream.wait, pieces.fill
    # What the stream of pieces is told.
    order: list[str] = []

    def noting_wait(event) -> None:
        order.append("wait")
        wait(event)

    def noting_fill(*args):
        order.append("fill")
        return fill(*args)

    def launch_streaming(found: Launch) -> None:
        if found.mode == LaunchMode.DECODE:
            order.append("launch")
            (req,) = scheduler.queues.running
            path = scheduler.cache.tree.path_of(req.hold.receipt.node)
            frames = np.concatenate([*(node.frames[Tier.DEVICE] for node in path), req.hold.frames])[:14]
            found = replace(found, streams=(StreamedPrefix(0, 0, 56, ((Tier.DEVICE, frames),)),))
        launch(found)

    def late_layer(*args) -> None:
        time.sleep(0.01)
        layer(*args)

    executor.launch, executor._layer = launch_streaming, late_layer
    pieces.stream.wait, pieces.fill = noting_wait, noting_fill
    prompt = prompts(40, [60])[0]
    (answer,) = engine.generate([prompt], greedy(4))
    model.check(prompt, answer, 4)
    # The order of streams is what counts: the launch before may be late or not.
    assert {order[i + 1] for i, what in enumerate(order) if what == "launch"} == {"wait"} and "fill" in order


def test_of_a_path_that_the_host_has_no_room_for_an_end_goes_there(monkeypatch: pytest.MonkeyPatch):
    """The request's path: eight pages that only the device has, and four behind them that only the host has."""
    rig = StorageRig(device=64, host=4 + 3)
    rig.storage.detach_storage()
    rig.clock.next, rig.clock.done = LaunchSeq(100), LaunchSeq(50)
    front = rig.insert("A" * 8)
    gap = rig.insert("b" * 4, below=front)
    rig.controller.back_up([gap], HOST)
    rig.collect()
    rig.finish_all()
    other = rig.insert("o")
    rig.controller.back_up([other], HOST)
    rig.collect()
    rig.finish_all()
    rig.controller.drop(other, DEVICE)
    hold = ReqHold(1, rig.tree.lock_node(gap, rig.clock.next), 12)
    rig.controller.demote(gap, 4, [HOST])
    streaming = StreamedRequest.__new__(StreamedRequest)
    streaming._controller, streaming._tree = rig.controller, rig.tree
    streaming._cache = SimpleNamespace(tables=rig.controller.tables)  # type: ignore[assignment]
    streaming._clock, streaming._page, streaming._start, streaming.counters = rig.clock, 1, 12, Counter()
    streaming._spares_peers = False
    streaming._spilling = streaming._swapped = streaming._swapping = np.empty(0, np.int32)
    streaming.req = SimpleNamespace(hold=hold)  # type: ignore[assignment]
    monkeypatch.setattr(streaming, "_layout", lambda: SimpleNamespace(start=12, stop=12))

    assert streaming._demote(4), "a copy has begun"
    assert rig.host.num_free == 0 and gap.frames[HOST] is not None
    rig.collect()
    rig.finish_all()
    assert streaming._demote(4), "and what was copied leaves the device"
    assert rig.tree.match("", tokens("A" * 8)).device_len == 5
    assert not streaming._demote(4), "there is no room for more"
    rig.tree.check_invariants()


def test_others_run_beside_it(model: Model):
    """Short requests start and end while a long one streams; two long ones go one after the other."""
    engine = streaming(model, tokens=120)
    batch = prompts(25, [200, 20, 180, 30, 25], shared=10)
    lengths = [12, 30, 8, 12, 20]
    params = [greedy(n) for n in lengths]
    most = []

    def look(_) -> None:
        most.append(len(engine.scheduler.queues.active()))

    for prompt, answer, n in zip(batch, engine.generate(batch, params, after_step=look), lengths):
        model.check(prompt, answer, n)
    assert counters(engine)["streamed_reqs"] >= 2 and max(most) > 1
    check_memory(model, engine)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_tokens", [30, 60, 90])
def test_who_comes_while_it_decodes_need_not_wait_for_its_end(model: Model, num_tokens: int):
    """It has filled the device again after its prompt, and gives that up for a short request."""
    engine = streaming(model, tokens=160)
    long, short = prompts(27, [170, num_tokens])
    shorts, num_decodes = [], 0

    def look(decision) -> None:
        nonlocal num_decodes
        if decision.launch is None or decision.launch.mode != LaunchMode.DECODE:
            return
        num_decodes += 1
        if num_decodes == 20:
            shorts.extend(engine.generate([short], greedy(4)))
            assert engine.scheduler.streaming.reqs, "the long one has ended first"

    (answer,) = engine.generate([long], greedy(60), after_step=look)
    model.check(long, answer, 60)
    model.check(short, shorts[0], 4)
    assert counters(engine)["demoted_tokens"] > 0 and "retracted_reqs" not in counters(engine)
    check_memory(model, engine)


def test_it_comes_back_to_the_device_where_there_is_room(model: Model):
    """What the others give back is filled: at its end less is streamed than when they came."""
    engine = streaming(model, tokens=160)
    (prompt,) = prompts(26, [170])
    engine.generate([prompt], greedy(1))
    engine.settle()
    engine.scheduler.cache.controller.evict(Tier.DEVICE, 40)
    holes = []

    def look(decision) -> None:
        if decision.launch is not None:
            holes.append(sum(each.end - each.start for each in decision.launch.streams))

    (answer,) = engine.generate([prompt], greedy(40), after_step=look)
    model.check(prompt, answer, 40)
    assert counters(engine)["promoted_tokens"] > 0 and holes[0] == 168 and min(holes[5:]) < 100
    check_memory(model, engine)


def test_a_failed_copy_fails_the_launch_and_nothing_else(model: Model, monkeypatch: pytest.MonkeyPatch):
    engine = streaming(model)
    (prompt,) = prompts(27, [150])
    copy, calls = engine.layer_stream._copy, []

    def fail(*args) -> None:
        calls.append(args)
        if len(calls) in (30, 90):
            raise OSError("injected")
        copy(*args)

    monkeypatch.setattr(engine.layer_stream, "_copy", fail)
    (answer,) = engine.generate([prompt], greedy(10))
    model.check(prompt, answer, 10)
    assert counters(engine)["failed_launches"] == 2
    check_memory(model, engine)


@pytest.mark.parametrize("fail_rate", [0.3])
def test_transfers_that_fail_and_requests_that_are_given_up(model: Model, fail_rate: float):
    engine = streaming(model, tokens=100, late_rate=0.5, load_fail_rate=fail_rate, seed=5)
    batch = prompts(28, [150, 30, 140], shared=20)
    for turn in range(3):
        answers = engine.generate(batch, greedy(10), abort_after={turn: 3})
        for i, (prompt, answer) in enumerate(zip(batch, answers)):
            if i != turn or answer.finish_reason == "length":
                model.check(prompt, answer, 10)
    check_memory(model, engine)


def test_a_request_that_would_be_too_slow_is_refused(model: Model):
    config = LayerStreamConfig(2, 5, max_tpot_s=1e-9)
    engine = streaming(model, layer_stream=config)
    first, second = prompts(29, [150, 150])
    # Nobody knows yet what it takes.
    (answer,) = engine.generate([first], greedy(4))
    model.check(first, answer, 4)
    (refused,) = engine.generate([second], greedy(4))
    assert refused.finish_reason == "abort" and not refused.tokens
    (short,) = engine.generate([second[:20]], greedy(4))
    model.check(second[:20], short, 4)
    check_memory(model, engine)


def streaming_alone(*max_lens: int, num_borrowed: int = 0) -> LayerStreaming:
    """Without an engine: chunks of two pages of four tokens, ten pages on the device and twenty on the host.

    max_lens: of requests that wait and are longer than the device."""
    each = LayerStreaming.__new__(LayerStreaming)
    each._page, each.chunk_pages, each.max_resident_len, each._streams = 4, 2, 36, {}
    stream = LayerStreamConfig(2, 5, max_tpot_s=1.0)
    each.config = cast(
        Any, SimpleNamespace(num_usable_pages=10, num_host_pages=20, num_swap_pages=0, layer_stream=stream)
    )
    each._cache = cast(Any, SimpleNamespace(num_borrowed_pages=num_borrowed, host=SimpleNamespace(num_pages=20)))
    waiting = [SimpleNamespace(num_known=37, max_len=n, num_recalls=0) for n in max_lens]
    each._queues = cast(Any, SimpleNamespace(waiting=waiting))
    return each


def test_what_others_use_stays_where_a_request_begins_to_stream():
    rig = StorageRig()
    top = rig.insert("aaaa")
    low = rig.insert("bbbb", top)
    each = streaming_alone()
    each._page, each._tree, each._controller = 1, rig.tree, rig.controller
    match = rig.tree.match("", tokens("aaaabbbb"))
    receipt = rig.tree.lock(match, LaunchSeq(20))
    each._cut_back(match, 3)
    assert low.frames[DEVICE] is not None, "others use it"
    rig.tree.unlock(receipt, LaunchSeq(20), LaunchSeq(19))
    each._cut_back(match, 3)
    assert rig.tree.match("", tokens("aaaabbbb")).device_len == 5
    rig.check()


def test_how_many_pages_the_longest_request_lacks():
    # With two chunks and two pages that are not whole: 46.
    assert streaming_alone(40, 160).room_lacking() == (True, 16)
    assert streaming_alone(160, num_borrowed=15).room_lacking() == (True, 1)
    assert streaming_alone(160, num_borrowed=17).room_lacking() == (True, 0)
    assert streaming_alone().room_lacking() == (False, 0)


def test_memory_of_peers_is_not_for_those_that_go_on_without(monkeypatch: pytest.MonkeyPatch):
    each = streaming_alone(40, 100)
    monkeypatch.setattr(each, "max_len_with", lambda num_borrowed: 80)
    for req in each._queues.waiting:
        req.num_recalls = 2
    assert [each.spares_peers(req) for req in each._queues.waiting] == [True, False]
    assert each.room_lacking() == (True, 1)
    each._queues.waiting.pop()
    assert each.room_lacking() == (False, 0)
    each._queues.waiting[0].num_recalls = 1
    assert each.room_lacking() == (True, 0)


@pytest.mark.parametrize(("num_prompt", "streamed", "from_disk"), [(120, 92, 0), (121, 93, 1), (36, 0, 0)])
def test_what_of_a_prompt_would_be_streamed_and_what_from_the_disk(num_prompt: int, streamed: int, from_disk: int):
    asked: list[tuple[int, int]] = []
    expected = SimpleNamespace(
        stream_seconds=lambda *tokens: asked.append(tokens) or 1.5,  # type: ignore[func-returns-value]
        decode_seconds=lambda: 0.5,
    )
    each = streaming_alone(num_borrowed=3)
    each._planner = cast(Any, SimpleNamespace(expected=expected))
    message = each.refusal(num_prompt)
    if streamed:
        assert asked == [(streamed, from_disk)]
        assert f"no room for {streamed} of the prompt's {num_prompt} tokens" in message and "1.5 s" in message
    else:
        assert not asked and not message


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective"])
def test_policies_that_write_late(model: Model, write_policy: str):
    engine = streaming(model, write_policy=write_policy)
    (prompt,) = prompts(30, [150])
    for _ in range(2):
        (answer,) = engine.generate([prompt], greedy(8))
        model.check(prompt, answer, 8)
        engine.settle()
    assert answer.cached_tokens_details["host"] > 60
    check_memory(model, engine)


def test_peers_are_read_where_they_have_it(model: Model):
    # No decision depends on what was measured.
    engine = streaming(model, tokens=100, num_peer_pages=60, load_or_recompute=False)
    (prompt,) = prompts(31, [90])
    engine.generate([prompt], greedy(1))
    engine.settle()
    # What the device evicts goes to the peer; the host has it anyway.
    engine.generate(prompts(32, [90]), greedy(1))
    engine.settle()
    long = np.concatenate([prompt, prompts(33, [120])[0]])
    tiers = set()

    def look(decision) -> None:
        if decision.launch is not None:
            tiers.update(tier for each in decision.launch.streams for tier, _ in each.parts)

    (answer,) = engine.generate([long], greedy(8), after_step=look)
    model.check(long, answer, 8)
    # What the device keeps behind it, the host has too, where its copy is in.
    assert Tier.PEER in tiers and answer.cached_tokens_details["peer"] > 0
    check_memory(model, engine)


@pytest.mark.slow
def test_two_ranks(model: Model):
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, sampling_seed=0)
    engine = TwoRanks(
        model.config,
        (0.2, 0.2),
        page_size=4,
        num_device_pages=25,
        num_host_pages=120,
        late_rate=0.2,
        seed=4,
        chunked_prefill_size=CHUNK,
        layer_stream=LayerStreamConfig(2, 5),
    )
    batch = prompts(34, [150, 20, 130], shared=12)
    for _ in range(2):
        for prompt, answer in zip(batch, engine.generate(batch, params)):
            model.check(prompt, answer, 8)
    assert counters(engine)["streamed_reqs"] >= 4
    engine.settle()
    engine.close()


def test_what_cannot_stream_is_said_at_the_start(model: Model):
    with pytest.raises(ValueError, match="--hicache"):
        streaming(model, num_host_pages=0)
    with pytest.raises(ValueError, match="--chunked-prefill-size"):
        streaming(model, tokens=36)


class Arrivals:
    """Requests that come one by one, in order, each when another one begins; who began, in order."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.began, self.names = engine, [], []

    def add(self, name: str, prompt: np.ndarray, params: SamplingParams, priority: int = 0) -> None:
        self.engine._answers[name] = Generation()
        self.names.append(name)
        message = TokenizedGenerateReqInput(
            rid=name, input_ids=ids_to_bytes(prompt), sampling_params=params, stream=True, priority=priority
        )
        self.engine._turn(0.0, [message], [], self._look)

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.engine._turn(0.0, [], [], self._look)

    def is_over(self, name: str) -> bool:
        return bool(self.engine._answers[name].finish_reason)

    def _look(self, decision: BatchDecision) -> None:
        active = [req.rid for req in self.engine.scheduler.queues.active()]
        self.began += [rid for rid in active if rid not in self.began]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule_policy", ["fcfs", "lpm"])
def test_a_steady_flow_of_requests_that_stream_keeps_no_longer_one_waiting(model: Model, schedule_policy: str):
    """The flow's requests have room beside each other and not beside the long one, which comes third."""
    engine = streaming(model, tokens=160, num_host_pages=80, schedule_policy=schedule_policy)
    flow = prompts(51, [164 + i for i in range(8)])
    (long,) = prompts(52, [420])
    arrivals = Arrivals(engine)
    for i, prompt in enumerate(flow):
        arrivals.add(f"flow {i}", prompt, greedy(6))
        if i == 1:
            arrivals.run(lambda: len(arrivals.began) == 2)
            assert len(engine.scheduler.streaming.reqs) == 2
            arrivals.add("long", long, greedy(6))
    (short,) = prompts(53, [20])
    arrivals.add("short", short, greedy(4))
    arrivals.run(lambda: all(map(arrivals.is_over, arrivals.names)))
    assert arrivals.began.index("long") <= 3 and "short" in arrivals.began[:3], arrivals.began
    assert arrivals.began[-6:] == [f"flow {i}" for i in range(2, 8)]
    for name, prompt, n in (("long", long, 6), ("flow 7", flow[7], 6), ("short", short, 4)):
        model.check(prompt, engine._answers[name], n)
    check_memory(model, engine)


@pytest.mark.parametrize("threshold", [pytest.param(None, marks=pytest.mark.slow), 10])
@pytest.mark.parametrize("num_prompt", [420, pytest.param(20, marks=pytest.mark.slow)])
def test_a_higher_priority_takes_the_place_of_what_streams(model: Model, threshold: int | None, num_prompt: int):
    """Of its memory if it must stream, too; of its slot if it is short, for which pages are given up anyway."""
    slots = {} if num_prompt > 100 else {"max_running_requests": 1}
    engine = streaming(
        model, tokens=160, num_host_pages=80, priorities=PriorityConfig(preemption_threshold=threshold), **slots
    )
    first, high = *prompts(54, [200]), *prompts(55, [num_prompt])
    arrivals = Arrivals(engine)
    arrivals.add("first", first, greedy(60))
    arrivals.run(lambda: len(engine._answers["first"].tokens) > 3)
    assert engine.scheduler.streaming.reqs
    arrivals.add("high", high, greedy(4), priority=20)
    arrivals.run(lambda: arrivals.is_over("high"))
    assert arrivals.is_over("first") == (threshold is None)
    arrivals.run(lambda: arrivals.is_over("first"))
    assert counters(engine).get("preempted_reqs", 0) == (threshold is not None)
    model.check(first, engine._answers["first"], 60)
    model.check(high, engine._answers["high"], 4)
    engine.settle()
    check_memory(model, engine)


def test_what_streams_give_up_for_others_is_taken_once():
    given = []

    def stream(order: int, num_pages: int) -> SimpleNamespace:
        def give_up(wanted: int) -> int:
            given.append((order, min(wanted, num_pages)))
            return min(wanted, num_pages)

        return SimpleNamespace(req=SimpleNamespace(order=order), give_up=give_up)

    streams = LayerStreaming.__new__(LayerStreaming)
    streams._streams = {str(order): stream(order, 6) for order in (1, 2, 3)}
    streams.config, streams._page, streams.chunk_pages = SimpleNamespace(new_token_ratio=0.0), 1, 8
    streams._device, streams._clock = FrameTable(64), SimpleNamespace(last=3)
    streams.shrink_stream_for(10, [])
    # The youngest first.
    assert given == [(3, 6), (2, 4), (1, 0)]
    assert streams.is_giving_way and streams.gave_way_at == 3
