"""`CopyLink` on a thread and on the stream emulator: bytes, order, gates, fences, cancellation, failure."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from sgl_kernel.kvcacheio import KVLayoutError, KVPages, dma, transfer_kv_all_layer_pf_lf
from sglang.srt.mem_cache.copy_parts import CopyPart
from sglang.srt.mem_cache.link import CopyLink, CopyOptions, index_device
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import ORDERS
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.transfer import (
    D2H,
    H2D,
    P2H,
    GateError,
    LayerGate,
    LoadFailedError,
    OpResult,
    Ticket,
    Tier,
    TransferOp,
)
from sglang.srt.utils.cuda_stream import CudaStream
from sglang.srt.utils.device import settle_memory
from sglang.srt.utils.stream import Event, ThreadEvent, ThreadStream
from support.device_emulator import emulated_device, launch
from support.faults import FaultyLink
from support.pool_pages import pages_of
from support.stream_emulator import EmulatedEvent, EmulatedStream, StreamEmulator

LAYERS, HEADS, DIM = 3, 2, 4
DEVICE_PAGES, HOST_PAGES = 12, 20


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


class Pools:
    def __init__(self, page_size: int = 2, dtype: torch.dtype = torch.float32, layout: str = "page_first") -> None:
        self.device = MHATokenToKVPool(DEVICE_PAGES, PageLayout.kv(page_size, LAYERS, HEADS, DIM, dtype))
        self.host = MHATokenToKVPoolHost(self.device, HOST_PAGES, layout)
        generator = torch.Generator().manual_seed(3)
        for kv in (self.device.kv, self.host.kv):
            kv.copy_(torch.randn(kv.shape, generator=generator))
        self.page_bytes = self.device.page_layout.page_bytes

    def load(self, seq: int, src: np.ndarray, dst: np.ndarray) -> TransferOp:
        return TransferOp(Ticket(H2D, seq), Tier.HOST, Tier.DEVICE, src, dst, len(src) * self.page_bytes)

    def backup(self, seq: int, src: np.ndarray, dst: np.ndarray, after: int | None = None) -> TransferOp:
        return TransferOp(Ticket(D2H, seq), Tier.DEVICE, Tier.HOST, src, dst, len(src) * self.page_bytes, after)

    def expect(self, op: TransferOp, device: np.ndarray, host: np.ndarray) -> None:
        """The five-line reference: apply op to the raw bytes of both pools."""
        for src, dst in zip(op.src_frames, op.dst_frames):
            if op.dst == Tier.DEVICE:
                device[:, :, dst] = host[src]
            else:
                host[dst] = device[:, :, src]


WINDOWED = (True, False, True)


def load_cut(
    pools: Pools, seq: int, src: np.ndarray, dst: np.ndarray, full_only: int = 0, windowed_only: int = 0
) -> TransferOp:
    """A load that leaves layers of its first pages out."""
    return replace(pools.load(seq, src, dst), num_full_only_pages=full_only, num_windowed_only_pages=windowed_only)


def expect_cut(pools: Pools, op: TransferOp, device: np.ndarray, host: np.ndarray) -> None:
    for layer, windowed in enumerate(WINDOWED):
        first = op.num_full_only_pages if windowed else op.num_windowed_only_pages
        for src, dst in zip(op.src_frames[first:], op.dst_frames[first:]):
            device[:, layer, dst] = host[src, :, layer]


class StubFence:
    """A launch that a test ends, well or badly."""

    def __init__(self, event: Event, failed: bool = False) -> None:
        self.event = event
        self.failed = failed


def no_fence(seq: int) -> None:
    raise AssertionError("no launch was to be waited for")


# -- bytes and order, on both kinds of stream --------------------------------------------------------------------


@pytest.fixture(params=["thread", "emulator"])
def stream(request: pytest.FixtureRequest) -> Iterator[ThreadStream | EmulatedStream]:
    if request.param == "emulator":
        yield StreamEmulator(1).stream("link")
        return
    thread = ThreadStream("link")
    yield thread
    thread.close()


def settle(stream: ThreadStream | EmulatedStream) -> None:
    """Run everything that was enqueued."""
    if isinstance(stream, EmulatedStream):
        stream._emulator.run(1 << 30)
    else:
        stream.record().synchronize()


@pytest.mark.parametrize("io_backend", ["auto", "dma", "direct"])
@pytest.mark.parametrize("layout", ORDERS)
def test_a_load_leaves_out_layers_of_its_first_pages(stream, layout: str, io_backend: str):
    pools = Pools(3, layout=layout)
    device, host = raw(pools.device.kv), raw(pages_of(pools.host, torch.arange(HOST_PAGES)))
    options = CopyOptions(io_backend=io_backend, windowed=WINDOWED)
    link = CopyLink(H2D, pools.device, pools.host, stream, no_fence, options=options)
    ops = [
        load_cut(pools, 0, ids(3, 4, 5, 6), ids(0, 1, 2, 3), full_only=3),
        load_cut(pools, 1, ids(9, 7, 8), ids(4, 0, 5), windowed_only=1),
        load_cut(pools, 2, ids(3, 4), ids(0, 1), windowed_only=2),
        load_cut(pools, 3, ids(2, 1), ids(7, 8), full_only=2),
        load_cut(pools, 4, ids(11, 12), ids(10, 11)),
    ]
    for op in ops:
        link.submit(op)
        expect_cut(pools, op, device, host)
    gate = link.gate(Ticket(H2D, 3))
    for layer in range(LAYERS):
        gate.wait(layer, stream)
    settle(stream)
    assert np.array_equal(raw(pools.device.kv), device)
    assert link.poll() == [OpResult(seq, True, seconds=ANY) for seq in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("io_backend", ["auto", "dma", "direct"])
@pytest.mark.parametrize("layout", ORDERS)
def test_loads_and_backups_are_exact(stream, layout: str, io_backend: str, page_size: int, dtype: torch.dtype):
    pools = Pools(page_size, dtype, layout)
    device, host = raw(pools.device.kv), raw(pages_of(pools.host, torch.arange(HOST_PAGES)))
    h2d = CopyLink(H2D, pools.device, pools.host, stream, no_fence, options=CopyOptions(io_backend=io_backend))
    d2h = CopyLink(D2H, pools.device, pools.host, stream, no_fence, options=CopyOptions(io_backend=io_backend))
    ops = [
        pools.load(0, ids(3, 4, 5), ids(0, 1, 2)),
        pools.backup(0, ids(1, 11), ids(19, 0)),
        pools.load(1, ids(19), ids(7)),
        pools.backup(1, ids(7, 3), ids(8, 9)),
        pools.load(2, ids(9, 2, 8), ids(11, 4, 0)),
    ]
    for op in ops:
        (h2d if op.dst == Tier.DEVICE else d2h).submit(op)
        pools.expect(op, device, host)
    settle(stream)
    assert np.array_equal(raw(pools.device.kv), device)
    assert np.array_equal(raw(pages_of(pools.host, torch.arange(HOST_PAGES))), host)
    assert h2d.poll() == [OpResult(0, True), OpResult(1, True), OpResult(2, True)]
    assert d2h.poll() == [OpResult(0, True), OpResult(1, True)]
    assert h2d.poll() == []


def test_operations_complete_in_order_and_notify(stream):
    pools = Pools()
    notified = []
    link = CopyLink(H2D, pools.device, pools.host, stream, no_fence, notify=lambda: notified.append(1))
    for seq in range(20):
        link.submit(pools.load(seq, ids(seq), ids(seq % DEVICE_PAGES)))
    settle(stream)
    assert [r.seq for r in link.poll()] == list(range(20)) and len(notified) == 20
    assert np.array_equal(
        raw(pages_of(pools.device, torch.tensor([7]))), raw(pages_of(pools.host, torch.tensor([19])))
    )


def test_the_order_of_numbers_is_asserted(stream):
    pools = Pools()
    link = CopyLink(H2D, pools.device, pools.host, stream, no_fence)
    with pytest.raises(AssertionError, match="out of order, 0 expected"):
        link.submit(pools.load(1, ids(0), ids(0)))
    with pytest.raises(AssertionError, match="out of order"):
        link.submit(pools.backup(0, ids(0), ids(0)))
    link.submit(pools.load(0, ids(0), ids(0)))
    with pytest.raises(AssertionError, match="out of order, 1 expected"):
        link.submit(pools.load(0, ids(0), ids(0)))


def test_a_failed_copy_fails_the_operation_and_not_the_link(stream, caplog):
    pools = Pools()
    before = raw(pools.device.kv)
    link = CopyLink(H2D, pools.device, pools.host, stream, no_fence)
    link.submit(pools.load(0, ids(HOST_PAGES), ids(3)))
    gate = link.gate(Ticket(H2D, 0))
    link.submit(pools.load(1, ids(1), ids(4)))
    settle(stream)
    first, second = link.poll()
    assert (first.seq, first.ok, second) == (0, False, OpResult(1, True)) and first.error
    with pytest.raises(LoadFailedError, match=r"seq=0"):
        gate.check()
    link.gate(Ticket(H2D, 1)).check()
    changed = np.flatnonzero((raw(pools.device.kv) != before).any(axis=(0, 1, 3, 4, 5)))
    assert changed.tolist() == [4]


def test_a_link_with_injected_faults_has_them(stream):
    """Nets go by it."""
    pools = Pools()
    link = FaultyLink(H2D, pools.device, pools.host, stream, no_fence, seed=1, fail_rate=1.0, late_rate=0.0)
    for seq in range(20):
        link.submit(pools.load(seq, ids(3), ids(5)))
    settle(stream)
    results = link.poll()
    assert len(results) == 20 and {result.error for result in results} == {"injected", "cancelled"}
    assert not any(result.ok for result in results)


def test_after_a_failed_layer_no_other_layer_is_copied(stream):
    class BrokenLink(CopyLink):
        def _load(self, src: torch.Tensor, dst: torch.Tensor, part: CopyPart) -> None:
            if 1 in part.layers:
                raise LoadFailedError("layer 1 broke")
            super()._load(src, dst, part)

    pools = Pools()
    before = raw(pools.device.kv)
    link = BrokenLink(H2D, pools.device, pools.host, stream, no_fence)
    link.submit(pools.load(0, ids(3), ids(5)))
    settle(stream)
    assert link.poll() == [OpResult(0, False, "layer 1 broke")]
    changed = np.flatnonzero((raw(pools.device.kv) != before).any(axis=(0, 2, 3, 4, 5)))
    assert changed.tolist() == [0]


def test_a_gate_needs_a_submitted_load(stream):
    pools = Pools()
    h2d = CopyLink(H2D, pools.device, pools.host, stream, no_fence)
    d2h = CopyLink(D2H, pools.device, pools.host, stream, no_fence)
    with pytest.raises(GateError, match="never submitted"):
        h2d.gate(Ticket(H2D, 0))
    # What is over needs no waiting.
    go_on = threading.Event()
    stream.enqueue(lambda: go_on.wait(60))
    h2d.submit(pools.load(0, ids(0), ids(0)))
    with pytest.raises(GateError, match=f"layer {LAYERS} is awaited but was never enqueued"):
        h2d.gate(Ticket(H2D, 0)).wait(LAYERS, stream)
    d2h.submit(pools.backup(0, ids(0), ids(0)))
    with pytest.raises(GateError, match="layer 0 is awaited"):
        d2h.gate(Ticket(D2H, 0)).wait(0, stream)
    go_on.set()


def test_the_backend_that_was_asked_for_copies(stream, monkeypatch):
    """Else equality between backends would prove nothing: on the CPU most names mean the reference."""
    merged: list[bool] = []
    copy = dma.copy_pages

    def spy(*args: Any, merge: bool, **options: Any) -> None:
        merged.append(merge)
        copy(*args, merge=merge, **options)

    monkeypatch.setattr(dma, "copy_pages", spy)
    pools = Pools()
    for io_backend, expected in (("auto", []), ("dma", [True]), ("direct", [False])):
        merged.clear()
        h2d = CopyLink(H2D, pools.device, pools.host, stream, no_fence, options=CopyOptions(io_backend=io_backend))
        d2h = CopyLink(D2H, pools.device, pools.host, stream, no_fence, options=CopyOptions(io_backend=io_backend))
        h2d.submit(pools.load(0, ids(3, 4), ids(0, 1)))
        d2h.submit(pools.backup(0, ids(0, 1), ids(5, 6)))
        settle(stream)
        assert merged == expected * (LAYERS + 1), "a call per layer, and one for the backup"


def test_a_group_of_layers_is_part_of_a_pool():
    pages = Pools().host.kv_pages
    part = pages.part(range(1, LAYERS))
    assert part is pages.part(range(1, LAYERS)) and part.num_layers == LAYERS - 1
    assert part.k.data_ptr() == pages.layer(1).k.data_ptr() and pages.part(range(1, 2)) is pages.layer(1)
    with pytest.raises(KVLayoutError, match="of a pool with layers 0 to"):
        pages.part(range(1, LAYERS + 1))


def test_page_numbers_lie_where_the_backend_reads_them():
    """Nothing runs: the GPU is only named."""
    gpu = torch.device("cuda", 0)
    for io_backend, expected in (("kernel", gpu), ("dma", torch.device("cpu")), ("direct", torch.device("cpu"))):
        assert index_device(io_backend, gpu) == expected
        assert index_device(io_backend, torch.device("cpu")) == torch.device("cpu")


def test_a_limited_link_waits_for_each_layer(stream):
    pools = Pools()
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 9))
        now[0] += seconds

    for name, num_waits in ((H2D, LAYERS), (D2H, 1)):
        slept.clear()
        limit = RateLimit(pools.page_bytes, lambda: now[0], sleep)  # a page per second
        link = CopyLink(name, pools.device, pools.host, stream, no_fence, options=CopyOptions(rate_limit=limit))
        make = pools.load if name == H2D else pools.backup
        link.submit(make(0, ids(0, 1, 2), ids(3, 4, 5)))
        link.submit(make(1, ids(), ids()))
        settle(stream)
        assert slept == [3 / num_waits] * num_waits
        assert link.poll() == [OpResult(0, True), OpResult(1, True)]


def test_a_load_of_nothing_completes(stream):
    pools = Pools()
    link = CopyLink(H2D, pools.device, pools.host, stream, no_fence)
    link.submit(pools.load(0, ids(), ids()))
    settle(stream)
    assert link.poll() == [OpResult(0, True)]


@pytest.mark.parametrize("windowed", [(), WINDOWED])
def test_what_moves_from_peers_is_copied_at_once(stream, windowed: tuple[bool, ...], monkeypatch):
    """No launch waits for its layers, and in pages that lie page by page a page is one run."""
    pools = Pools()
    peer, host = MHATokenToKVPoolHost(pools.device, 8, "page_first"), pools.host
    peer.kv.copy_(torch.randn(peer.kv.shape))
    before = raw(peer.kv)
    sizes = []

    def spy(src: KVPages, dst: KVPages, *args: Any, **options: Any) -> None:
        sizes.append(src.num_layers)
        transfer_kv_all_layer_pf_lf(src, dst, *args, **options)

    monkeypatch.setattr("sglang.srt.mem_cache.link.transfer_kv_all_layer_pf_lf", spy)
    link = CopyLink(P2H, host, peer, stream, no_fence, options=CopyOptions(windowed=windowed))
    op = TransferOp(Ticket(P2H, 0), Tier.PEER, Tier.HOST, ids(3, 4, 5), ids(0, 9, 2), 3 * pools.page_bytes)
    link.submit(op)
    link.submit(replace(op, ticket=Ticket(P2H, 1), src_frames=ids(7, 1), dst_frames=ids(4, 5), num_full_only_pages=1))
    settle(stream)
    assert link.poll() == [OpResult(0, True, seconds=ANY), OpResult(1, True, seconds=ANY)]
    after = raw(host.kv)
    assert np.array_equal(after[[0, 9, 2, 5]], before[[3, 4, 5, 1]])
    assert sizes == [LAYERS, *([1, 1, 1] if windowed else [LAYERS])]


# -- order between streams, on the emulator ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_layer_gate_lets_nothing_through_before_its_layer(seed: int):
    """In any interleaving the reader finds each layer loaded."""
    print(f"seed {seed}")
    pools = Pools()
    emulator = StreamEmulator(seed)
    compute = emulator.stream("compute")
    link = CopyLink(H2D, pools.device, pools.host, emulator.stream(H2D), no_fence)
    src, dst = ids(3, 4, 5), ids(7, 1, 0)
    device, host = raw(pools.device.kv), raw(pools.host.kv)
    op = pools.load(0, src, dst)
    pools.expect(op, device, host)
    link.submit(op)
    gate = link.gate(op.ticket)
    read: list[int] = []

    def reader(layer: int) -> Callable[[], None]:
        def look() -> None:
            assert np.array_equal(raw(pools.device.kv[:, layer]), device[:, layer]), f"layer {layer} is not there"
            gate.check()
            read.append(layer)

        return look

    for layer in range(LAYERS):
        gate.wait(layer, compute)
        compute.enqueue(reader(layer))
    while emulator.run(1):
        pass
    assert read == list(range(LAYERS)) and emulator.unrecorded_waits == 0


def test_without_gates_some_interleaving_reads_too_early():
    """The control of the test above."""
    early = 0
    for seed in range(20):
        pools = Pools()
        emulator = StreamEmulator(seed)
        compute = emulator.stream("compute")
        link = CopyLink(H2D, pools.device, pools.host, emulator.stream(H2D), no_fence)
        link.submit(pools.load(0, ids(3), ids(7)))
        loaded: list[bool] = []
        for _ in range(2 * LAYERS):
            compute.enqueue(lambda: None)
        compute.enqueue(
            lambda pools=pools, loaded=loaded: loaded.append(
                bool((pools.device.kv[:, :, 7] == pools.host.kv[3]).all())
            )
        )
        emulator.run(1 << 30)
        early += loaded == [False]
    assert 0 < early < 20


def test_a_layer_is_read_while_the_next_one_is_loading():
    pools = Pools()
    emulator = StreamEmulator(0)
    compute, copies = emulator.stream("compute"), emulator.stream(H2D)
    link = CopyLink(H2D, pools.device, pools.host, copies, no_fence)
    link.submit(pools.load(0, ids(3), ids(7)))
    gate = link.gate(Ticket(H2D, 0))
    read: list[int] = []
    for layer in range(LAYERS):
        gate.wait(layer, compute)
        compute.enqueue(lambda layer=layer: read.append(layer))
    for layer in range(LAYERS):
        assert not compute.can_run()
        copies.run_one()  # the copy
        copies.run_one()  # its event
        assert compute.can_run()
        compute.run_one()
        assert read == list(range(layer + 1)) and link.poll() == []
    copies.run_one()  # the operation's end
    copies.run_one()  # what it says of it
    assert link.poll() == [OpResult(0, True)]


@pytest.mark.parametrize("seed", range(10))
def test_a_backup_runs_after_its_fence(seed: int):
    print(f"seed {seed}")
    pools = Pools()
    emulator = StreamEmulator(seed)
    compute = emulator.stream("compute")
    asked: list[int] = []
    fences: list[StubFence] = []

    def fence(launch: int) -> StubFence:
        asked.append(launch)
        return fences[0]

    link = CopyLink(D2H, pools.device, pools.host, emulator.stream(D2H), fence)
    for value in (1.0, 2.0, 3.0):
        compute.enqueue(lambda value=value: pools.device.kv.fill_(value))
    fences.append(StubFence(compute.record()))
    link.submit(pools.backup(0, ids(4, 5), ids(9, 8), after=17))
    emulator.run(1 << 30)
    assert asked == [17] and link.poll() == [OpResult(0, True)]
    assert (pools.host.kv[[9, 8]] == 3.0).all(), "it read before the launch had written"


def test_a_backup_of_a_failed_launch_fails_and_writes_nothing():
    pools = Pools()
    emulator = StreamEmulator(0)
    compute = emulator.stream("compute")
    fence = StubFence(compute.record())
    link = CopyLink(D2H, pools.device, pools.host, emulator.stream(D2H), lambda launch: fence)
    before = raw(pools.host.kv)
    link.submit(pools.backup(0, ids(4), ids(9), after=3))
    fence.failed = True  # known only when the launch has run
    emulator.run(1 << 30)
    (result,) = link.poll()
    assert not result.ok and "launch 3" in result.error
    assert np.array_equal(raw(pools.host.kv), before)


def test_a_launch_that_is_long_over_needs_no_fence():
    pools = Pools()
    emulator = StreamEmulator(0)
    link = CopyLink(D2H, pools.device, pools.host, emulator.stream(D2H), lambda launch: None)
    link.submit(pools.backup(0, ids(4), ids(9), after=3))
    emulator.run(1 << 30)
    assert link.poll() == [OpResult(0, True)]


def test_a_cancelled_operation_keeps_its_number():
    pools = Pools()
    emulator = StreamEmulator(0)
    link = CopyLink(H2D, pools.device, pools.host, emulator.stream(H2D), no_fence)
    before = raw(pools.device.kv)
    for seq in range(3):
        link.submit(pools.load(seq, ids(seq), ids(seq + 5)))
    gate = link.gate(Ticket(H2D, 1))
    link.cancel(Ticket(H2D, 1))
    emulator.run(1 << 30)
    assert link.poll() == [OpResult(0, True), OpResult(1, False, "cancelled"), OpResult(2, True)]
    with pytest.raises(LoadFailedError, match="cancelled"):
        gate.check()
    changed = np.flatnonzero((raw(pools.device.kv) != before).any(axis=(0, 1, 3, 4, 5)))
    assert changed.tolist() == [5, 7]


def test_a_cancelled_load_stops_between_layers_and_its_gates_still_open():
    """A launch that waits for the rest must not hang; it learns from `check`."""
    pools = Pools()
    emulator = StreamEmulator(0)
    copies, compute = emulator.stream(H2D), emulator.stream("compute")
    link = CopyLink(H2D, pools.device, pools.host, copies, no_fence)
    link.submit(pools.load(0, ids(3), ids(5)))
    gate = link.gate(Ticket(H2D, 0))
    before = raw(pools.device.kv)
    gate.wait(LAYERS - 1, compute)
    errors: list[str] = []

    def look() -> None:
        try:
            gate.check()
        except LoadFailedError as error:
            errors.append(str(error))

    compute.enqueue(look)
    copies.run_one()
    link.cancel(Ticket(H2D, 0))
    emulator.run(1 << 30)
    changed = np.flatnonzero((raw(pools.device.kv) != before).any(axis=(0, 2, 3, 4, 5)))
    assert changed.tolist() == [0], "layers that were loaded"
    assert len(errors) == 1 and "cancelled" in errors[0]
    assert link.poll() == [OpResult(0, False, "cancelled")]


def test_cancelling_too_late_or_something_unknown_does_nothing():
    pools = Pools()
    emulator = StreamEmulator(0)
    link = CopyLink(H2D, pools.device, pools.host, emulator.stream(H2D), no_fence)
    link.submit(pools.load(0, ids(3), ids(5)))
    emulator.run(1 << 30)
    link.cancel(Ticket(H2D, 0))
    link.cancel(Ticket(H2D, 7))
    assert link.poll() == [OpResult(0, True)]
    link.gate(Ticket(H2D, 0)).check()


def test_waiting_for_an_event_that_was_never_recorded_is_flagged():
    emulator = StreamEmulator(0)
    stream = emulator.stream("compute")
    stream.wait(EmulatedEvent())
    ran: list[int] = []
    stream.enqueue(lambda: ran.append(1))
    assert emulator.run(10) == 1 and ran == [1] and emulator.unrecorded_waits == 1


# -- loads by one kernel, on the device emulator ------------------------------------------------------------------


class KernelRig:
    """A link whose loads are one kernel each, and a stream that computes; both are the device's."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        layout = PageLayout.kv(2, LAYERS, HEADS, DIM, torch.float32)
        self.pool = MHATokenToKVPool(DEVICE_PAGES, layout, device=device)
        self.host = MHATokenToKVPoolHost(self.pool, HOST_PAGES)
        self.host.kv.copy_(torch.randn(self.host.kv.shape, generator=torch.Generator().manual_seed(3)))
        settle_memory(device)
        self.copies, self.compute = CudaStream("copies", device), CudaStream("compute", device)
        options = CopyOptions(io_backend="persistent", windowed=WINDOWED)
        self.link = CopyLink(H2D, self.pool, self.host, self.copies, no_fence, options=options)

    def load(self, seq: int, src: int, dst: int, full_only: int = 0) -> LayerGate:
        size = self.pool.page_layout.page_bytes
        op = TransferOp(
            Ticket(H2D, seq), Tier.HOST, Tier.DEVICE, ids(src), ids(dst), size, num_full_only_pages=full_only
        )
        self.link.submit(op)
        return self.link.gate(Ticket(H2D, seq))

    def read(self, layer: int, page: int) -> list[torch.Tensor]:
        """What the computing stream sees when its turn comes, once it has ended."""
        seen: list[torch.Tensor] = []
        self.compute.enqueue(lambda: seen.append(self.pool.kv[:, layer, page].cpu()))
        return seen

    def close(self) -> None:
        for stream in (self.copies, self.compute):
            stream.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_tells_of_each_layer_while_it_loads(seed: int):
    with emulated_device(seed):
        rig = KernelRig()
        found = []
        for turn in range(6):
            # Time for one that does not wait to read too early.
            rig.copies.enqueue(lambda: launch(lambda: time.sleep(2e-3)))
            gate = rig.load(turn, turn, turn + 1)
            for layer in range(LAYERS):
                gate.wait(layer, rig.compute)
                found.append((rig.read(layer, turn + 1), rig.host.kv[turn, :, layer]))
        rig.close()
        assert all(torch.equal(seen[0], loaded) for seen, loaded in found)
        assert rig.link.poll() == [OpResult(turn, True, seconds=ANY) for turn in range(6)]
        assert rig.link._flags is not None and rig.link._flags.words == [6] * LAYERS


@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_leaves_layers_out_is_several_kernels_among_single_ones(seed: int):
    with emulated_device(seed):
        rig = KernelRig()
        rig.pool.kv.zero_()
        settle_memory(torch.device("cuda", 0))
        found = []
        for turn in range(6):
            rig.copies.enqueue(lambda: launch(lambda: time.sleep(2e-3)))
            gate = rig.load(turn, turn, turn + 1, full_only=turn % 2)
            for layer, windowed in enumerate(WINDOWED):
                gate.wait(layer, rig.compute)
                is_left_out = windowed and turn % 2
                found.append((rig.read(layer, turn + 1), rig.host.kv[turn, :, layer] * (not is_left_out)))
        rig.close()
        assert all(torch.equal(seen[0], loaded) for seen, loaded in found)
        assert rig.link.poll() == [OpResult(turn, True, seconds=ANY) for turn in range(6)]
        assert rig.link._flags is not None and rig.link._flags.words == [3] * LAYERS


@pytest.mark.parametrize("ends", ["cancelled", "dead"])
def test_who_waits_for_a_kernel_that_is_never_launched_goes_on(ends: str):
    with emulated_device():
        rig = KernelRig()
        hold = threading.Event()
        rig.copies.enqueue(hold.wait)
        if ends == "dead":
            rig.copies.enqueue(lambda: 1 // 0)
        gate = rig.load(0, 3, 5)
        gate.wait(0, rig.compute)
        errors: list[str] = []

        def look() -> None:
            try:
                gate.check()
            except LoadFailedError as error:
                errors.append(str(error))

        rig.compute.enqueue(look)
        if ends == "cancelled":
            rig.link.cancel(Ticket(H2D, 0))
        hold.set()
        rig.compute.record().wait()
        rig.close()
        if ends == "cancelled":
            assert len(errors) == 1 and "cancelled" in errors[0]
        else:
            with pytest.raises(RuntimeError, match="stream copies died"):
                rig.link.poll()


# -- real threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[tuple[ThreadStream, ThreadStream]]:
    pair = ThreadStream("compute"), ThreadStream("copies")
    yield pair
    for stream in pair:
        stream.close()


def test_a_thread_waits_at_a_gate(threads):
    compute, copies = threads
    pools = Pools()
    hold = threading.Event()
    copies.enqueue(hold.wait)
    link = CopyLink(H2D, pools.device, pools.host, copies, no_fence)
    link.submit(pools.load(0, ids(3), ids(7)))
    gate = link.gate(Ticket(H2D, 0))
    read: list[bool] = []
    for layer in range(LAYERS):
        gate.wait(layer, compute)
        compute.enqueue(
            lambda layer=layer: read.append(bool((pools.device.kv[:, layer, 7] == pools.host.kv[3, :, layer]).all()))
        )
    time.sleep(0.02)
    assert read == [] and link.poll() == []
    hold.set()
    compute.record().synchronize()
    assert read == [True] * LAYERS


def test_a_thread_backs_up_after_its_fence(threads):
    compute, copies = threads
    pools = Pools()
    hold = threading.Event()
    compute.enqueue(hold.wait)
    compute.enqueue(lambda: pools.device.kv.fill_(5.0))
    fence = StubFence(compute.record())
    link = CopyLink(D2H, pools.device, pools.host, copies, lambda launch: fence)
    link.submit(pools.backup(0, ids(4), ids(9), after=0))
    time.sleep(0.02)
    assert link.poll() == []
    hold.set()
    copies.record().synchronize()
    assert (pools.host.kv[9] == 5.0).all() and link.poll() == [OpResult(0, True)]


def test_a_dead_stream_makes_poll_raise_and_releases_who_waits(threads):
    compute, copies = threads
    pools = Pools()

    def die() -> None:
        raise ValueError("notify broke")

    link = CopyLink(H2D, pools.device, pools.host, copies, no_fence, notify=die)
    link.submit(pools.load(0, ids(3), ids(7)))
    copies.record().synchronize()
    before = raw(pools.device.kv)
    link.submit(pools.load(1, ids(4), ids(8)))
    gate = link.gate(Ticket(H2D, 1))
    gate.wait(LAYERS - 1, compute)
    event = compute.record()
    assert isinstance(event, ThreadEvent)
    event.synchronize()
    assert np.array_equal(raw(pools.device.kv), before), "a dead stream runs nothing"
    with pytest.raises(RuntimeError, match="stream copies died: notify broke"):
        link.poll()


def test_of_a_finished_operation_neither_indices_nor_events_are_kept(stream):
    """Thousands of operations are remembered; a load of 100,000 pages has arrays of 800 KB."""
    pools = Pools()
    link = CopyLink(H2D, pools.device, pools.host, stream, no_fence)
    op = pools.load(0, ids(3), ids(7))
    indices = weakref.ref(op.src_frames)
    looked = threading.Event()
    stream.enqueue(looked.wait)
    link.submit(op)
    event = weakref.ref(link._operations[0].layer_events[0])
    looked.set()
    settle(stream)
    del op
    gc.collect()
    assert indices() is None and event() is None
    other = StreamEmulator(1).stream("compute")
    link.gate(Ticket(H2D, 0)).wait(LAYERS - 1, other)
    link.gate(Ticket(H2D, 0)).check()


def test_a_dying_stream_wakes_who_sleeps_until_work_completes():
    woken = threading.Event()
    stream = ThreadStream("compute", woken.set)

    def die() -> None:
        raise ValueError("no memory")

    stream.enqueue(die)
    assert woken.wait(120)
    with pytest.raises(RuntimeError, match="stream compute died: no memory"):
        stream.raise_if_dead()
    stream.close()
