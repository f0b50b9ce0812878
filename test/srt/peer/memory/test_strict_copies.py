"""Strict mode: the lender copies, the borrower maps nothing; what is refused, what is revoked, and who dies."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.link import CopyLink
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import D2P, P2D, LoadFailedError, OpResult, Ticket, Tier, TransferOp
from sglang.srt.peer.memory import borrowed_pool, copy_session, slab_channel
from sglang.srt.peer.memory.copier import Copier
from sglang.srt.peer.memory.copy_session import CopySession, StrictSlab
from sglang.srt.peer.memory.lender_breakers import LenderBreakers
from sglang.srt.peer.memory.lent_memory import LentMemory
from sglang.srt.peer.memory.slabs import SlabError, SlabFiles, SlabRange
from sglang.srt.peer.protocol import lender_breaker
from sglang.srt.peer.protocol.messages import BorrowerId, Copied, Copy, CopyRefused, Refused, Stage, Staged
from sglang.srt.utils.stream import ThreadStream
from support.children import DEADLINE_S, Child, children, wait_until
from support.page_layouts import LAYOUTS, are_equal, contents, fill
from support.strict_process import (
    FOREIGN,
    LAYOUT,
    NUM_SLABS,
    OWN,
    PAGE_BYTES,
    SLAB_BYTES,
    borrow,
    borrowed_memory,
    lend,
    lent_memory,
)

DEVICE_PAGES = 24
NUM_LAYERS = LAYOUT.num_layers


class Rig:
    """A borrower's pools and links, and lenders in this process."""

    def __init__(
        self, lenders: dict[str, LentMemory], num_slabs: int = NUM_SLABS, layout: PageLayout = LAYOUT
    ) -> None:
        self.lenders = lenders
        self.memory = borrowed_memory(list(lenders), "here", num_slabs, layout)
        self.device = MHATokenToKVPool(DEVICE_PAGES, layout)
        self.streams = {name: ThreadStream(name) for name in (P2D, D2P)}
        self.links = {
            name: CopyLink(name, self.device, self.memory.pool.mover(), stream, lambda launch: None)
            for name, stream in self.streams.items()
        }
        self._seqs = dict.fromkeys(self.links, 0)

    def mapped(self) -> list[int]:
        for lender in self.lenders.values():
            lender.poll_mapped()
        return np.flatnonzero(np.frombuffer(self.memory.poll_mapped().mapped, np.uint8)).tolist()

    def lend(self, slabs: int) -> None:
        for lender in self.lenders.values():
            lender.lend(range(slabs))
        wait_until(lambda: len(self.mapped()) == slabs * len(self.lenders), "lent slabs are not mapped")

    def frames(self) -> np.ndarray:
        """All that the lenders have lent."""
        return np.concatenate([self.memory.pool.frames_of(place) for place in self.mapped()])

    def copy(self, name: str, pages: np.ndarray, frames: np.ndarray) -> OpResult:
        """pages: of the device."""
        ticket = Ticket(name, self._seqs[name])
        self._seqs[name] += 1
        size = len(pages) * self.memory.pool.page_bytes
        if name == P2D:
            op = TransferOp(ticket, Tier.PEER, Tier.DEVICE, frames, pages, size)
        else:
            op = TransferOp(ticket, Tier.DEVICE, Tier.PEER, pages, frames, size)
        self.links[name].submit(op)
        results: list[OpResult] = []
        wait_until(lambda: results.extend(self.links[name].poll()) or results, "the operation to end")
        return results[0]

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.memory.close()
        for lender in self.lenders.values():
            lender.close()


@pytest.fixture
def make_rig(private: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*strict: bool, layout: PageLayout = LAYOUT, recall_s: float = 10.0) -> Rig:
        lenders = {f"ipc://{private}/peers{len(rigs)}{i}": each for i, each in enumerate(strict or (True,))}
        made = {endpoint: lent_memory(endpoint, private, each, recall_s) for endpoint, each in lenders.items()}
        rigs.append(Rig(made, NUM_SLABS * len(made), layout))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as start_one:
        yield start_one


def arange(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


# -- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [(True,), (True, False), (True, True)])
@pytest.mark.parametrize("staging_bytes", [1, 8 << 20])
def test_what_goes_there_comes_back(
    make_rig: Callable[..., Rig], strict: tuple[bool, ...], staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random operations against a plain dict. The smallest staging memory makes rounds of one page or a few runs."""
    monkeypatch.setattr(borrowed_pool, "STAGING_BYTES", staging_bytes)
    seed = 5
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rig = make_rig(*strict)
    rig.lend(2)
    frames = rig.frames()
    assert len(frames) == 2 * len(strict) * rig.memory.pool.slab_pages
    wanted: dict[int, torch.Tensor] = {}
    for _ in range(15):
        pages = rng.permutation(DEVICE_PAGES).astype(np.int32)[: rng.integers(1, DEVICE_PAGES + 1)]
        there = rng.choice(frames, len(pages), replace=False)
        rig.device.kv.copy_(torch.from_numpy(rng.standard_normal(rig.device.kv.shape)))
        for page, frame in zip(pages.tolist(), there.tolist()):
            wanted[frame] = rig.device.kv[:, :, page].clone()
        assert rig.copy(D2P, pages, there).ok
        known = rng.permutation(np.fromiter(wanted, np.int32))[:DEVICE_PAGES]
        to = rng.permutation(DEVICE_PAGES).astype(np.int32)[: len(known)]
        rig.device.kv.fill_(float("nan"))
        assert rig.copy(P2D, to, known).ok
        for page, frame in zip(to.tolist(), known.tolist()):
            assert torch.equal(rig.device.kv[:, :, page], wanted[frame])
        others = np.setdiff1d(arange(DEVICE_PAGES), to)
        assert rig.device.kv[:, :, others].isnan().all(), "pages that no operation named were written"
    for lender, is_strict in zip(rig.lenders.values(), strict):
        copied = lender.state()["copies"]
        assert (copied["bytes"] > 0) == is_strict and copied["refused"] == 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_of_any_layout_go_there_and_come_back(
    make_rig: Callable[..., Rig], layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowed_pool, "STAGING_BYTES", 1)
    seed = 6
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    rig = make_rig(True, False, layout=layout)
    rig.lend(2)
    frames = rng.permutation(rig.frames())[:DEVICE_PAGES]
    pages, back = (rng.permutation(DEVICE_PAGES)[: len(frames)].astype(np.int32) for _ in "ab")
    fill(rig.device, rng)
    wanted = contents(layout, rig.device, pages)
    assert rig.copy(D2P, pages, frames).ok
    fill(rig.device, rng)
    assert rig.copy(P2D, back, frames).ok
    assert are_equal(contents(layout, rig.device, back), wanted)


def test_a_strict_slab_is_not_mapped_and_a_page_of_it_is_where_it_would_be(make_rig: Callable[..., Rig]) -> None:
    """A lender that scrubs or reads a page finds it where a borrower with a mapping would have put it."""
    rig = make_rig()
    rig.lend(1)
    (place,) = rig.mapped()
    assert not rig.memory.slabs.is_mapped(place) and rig.memory.pool.is_strict(place)
    rig.device.kv.copy_(torch.arange(rig.device.kv.numel()).view(rig.device.kv.shape))
    frames = rig.memory.pool.frames_of(place)[[3, 0]]
    assert rig.copy(D2P, np.array([5, 9], np.int32), frames).ok
    (lender,) = rig.lenders.values()
    (slab,) = (i for i in range(NUM_SLABS) if lender.slabs.slab(i).any())
    pages = lender.slabs.slab(slab)[: SLAB_BYTES // PAGE_BYTES * PAGE_BYTES].view(np.float32)
    pages = pages.reshape(-1, 2, NUM_LAYERS, LAYOUT.page_size, *LAYOUT.components[0].shape)
    assert np.array_equal(pages[3], rig.device.kv[:, :, 5].numpy())
    assert np.array_equal(pages[0], rig.device.kv[:, :, 9].numpy())
    assert not pages[[1, 2]].any() and not pages[4:].any()


# -- what is refused ---------------------------------------------------------------------------------------------


def grant_of(lender: LentMemory, slab: int = 0) -> dict[str, Any]:
    """What the borrower of a slab knows."""
    coordinator = lender.coordinator
    lease = coordinator._lender._leases[slab]
    return {
        "name": lease.borrower.name,
        "incarnation": lease.borrower.incarnation,
        "epoch": coordinator._lender.epoch,
        "number": lease.number,
        "token": lease.token,
    }


def ask(sock: socket.socket, message: Any, fd: int | None = None) -> Any:
    assert slab_channel.send(sock, message, fd)
    answers: list[Any] = []

    def has_come() -> bool:
        with contextlib.suppress(BlockingIOError):
            answers.append(slab_channel.receive(sock, Staged | Refused | Copied | CopyRefused)[0])
        return bool(answers)

    wait_until(has_come, "an answer")
    return answers[0]


def test_copies_that_are_not_this_borrowers_or_not_in_bounds_are_refused(
    make_rig: Callable[..., Rig], private: Path
) -> None:
    rig = make_rig()
    (endpoint,), (lender,) = rig.lenders, rig.lenders.values()
    rig.lend(1)
    other = borrowed_memory([endpoint], "other", 1)
    wait_until(lambda: lender.state()["borrowers"] == 2, "the other borrower")
    lender.lend([1])
    wait_until(lambda: [rig.mapped(), other.poll_mapped().mapped == b"\1"][1], "the other's slab")
    lender.slabs.slab(1)[:] = OWN
    mine, others = grant_of(lender, 0), grant_of(lender, 1)

    def memory() -> np.ndarray:
        return np.stack([lender.slabs.slab(slab) for slab in range(NUM_SLABS)])

    before = memory()
    staging = SlabRange.owned(1, 4096)
    staging.slab(0)[:] = 9
    right = Copy(
        sequence=4,
        to_slab=True,
        number=mine["number"],
        token=mine["token"],
        page_bytes=200,
        parts=2,
        first_byte=10,
        run_bytes=90,
        staging_byte=0,
        pages=np.array([2, 0], np.int32).tobytes(),
    )
    wrong: list[dict[str, Any]] = [
        {"token": b"?" * 16},
        {"token": others["token"]},
        {"number": 77},
        {"number": others["number"], "token": others["token"]},
        {"number": others["number"]},
        {"page_bytes": 201},
        {"parts": 3},
        {"parts": 1 << 62},
        {"first_byte": 11},
        {"run_bytes": 1 << 62},
        {"pages": np.array([2, SLAB_BYTES // 200], np.int32).tobytes()},
        {"pages": np.array([-1, 0], np.int32).tobytes()},
        {"pages": b"123"},
        {"page_bytes": 1 << 62, "run_bytes": 8},
        {"page_bytes": 2 * SLAB_BYTES, "run_bytes": 8, "pages": b""},
        {"staging_byte": 4096 - 2 * 2 * 90 + 1},
        {"staging_byte": 1 << 62},
    ]
    with slab_channel.connect(lender.coordinator._slab_socket) as sock:
        assert ask(sock, Stage(**mine, size_bytes=4096), staging.fileno(0)) == Staged()
        for to_slab in (True, False):
            for fields in wrong:
                answer = ask(sock, msgspec.structs.replace(right, to_slab=to_slab, **fields))
                assert isinstance(answer, CopyRefused) and answer.sequence == 4 and answer.reason, fields
        assert np.array_equal(memory(), before) and (staging.slab(0) == 9).all()
        wait_until(lambda: lender.state()["copies"]["refused"] == 2 * len(wrong), "the alarm")
        assert ask(sock, right) == Copied(4)
    changed = np.flatnonzero(memory() != before)
    runs = [*range(10, 100), *range(110, 200)]
    assert changed.tolist() == runs + [400 + i for i in runs]
    other.close()


def test_staging_memory_is_taken_from_who_has_a_lease_and_if_it_cannot_shrink(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    (lender,) = rig.lenders.values()
    rig.lend(1)
    mine = grant_of(lender)
    staging = SlabRange.owned(1, 4096)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4096)
    wrong: list[tuple[dict[str, Any], int | None]] = [
        (mine | {"token": b"?"}, staging.fileno(0)),
        (mine | {"epoch": mine["epoch"] - 1}, staging.fileno(0)),
        (mine | {"incarnation": 3}, staging.fileno(0)),
        (mine | {"number": 5}, staging.fileno(0)),
        (mine, None),
        (mine, loose),
        (mine | {"size_bytes": 8192}, staging.fileno(0)),
        (mine | {"size_bytes": 100}, staging.fileno(0)),
        (mine | {"size_bytes": 1 << 40}, staging.fileno(0)),
    ]
    with slab_channel.connect(lender.coordinator._slab_socket) as sock:
        for fields, fd in wrong:
            assert ask(sock, Stage(**({"size_bytes": 4096} | fields)), fd) == Refused(fields["number"]), fields
        assert ask(sock, Stage(**mine, size_bytes=4096), staging.fileno(0)) == Staged()
    os.close(loose)


def test_leases_of_those_who_map_are_not_copied(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(False)
    (lender,) = rig.lenders.values()
    rig.lend(1)
    staging = SlabRange.owned(1, 4096)
    with slab_channel.connect(lender.coordinator._slab_socket) as sock:
        assert ask(sock, Stage(**grant_of(lender), size_bytes=4096), staging.fileno(0)) == Refused(0)


# -- taking back -------------------------------------------------------------------------------------------------


def test_a_borrower_that_does_not_answer_is_not_waited_for(make_rig: Callable[..., Rig]) -> None:
    """It goes on asking for copies, and gives nothing back."""
    rig = make_rig(recall_s=0.01)
    rig.lend(2)
    (lender,) = rig.lenders.values()
    frames = np.concatenate([rig.memory.pool.frames_of(place) for place in rig.mapped()])
    # The slab that stays first: a connection begins with a lease that has not ended.
    of_slab = frames.reshape(2, -1)[::-1, :5]
    rig.device.kv.fill_(FOREIGN)
    assert rig.copy(D2P, arange(10), of_slab.ravel().copy()).ok
    lender.recall(1)
    wait_until(lambda: lender.poll_mapped().mapped[0], "the slab to be mapped again")
    assert not lender.slabs.slab(0).any(), "it is not scrubbed"
    lender.slabs.slab(0)[:] = OWN
    assert lender.state()["slabs"]["quarantined"] == 0
    oks = []
    for name in (D2P, P2D):
        for row in of_slab:
            rig.device.kv.fill_(FOREIGN)
            result = rig.copy(name, arange(5), row.copy())
            assert result.ok or "has ended" in result.error, result
            oks.append(result.ok)
            assert (rig.device.kv == FOREIGN).all(), "something of the lender's came along"
    assert sorted(oks) == [False, False, True, True] and oks[:2] == oks[2:]
    assert (lender.slabs.slab(0) == OWN).all()
    wait_until(lambda: lender.state()["copies"]["refused"] >= 2, "the alarm")
    wait_until(lambda: len(rig.mapped()) == 1, "the borrower to hear of it")
    rig.memory.give_back(range(NUM_SLABS))
    assert rig.memory.state()["lenders"][0]["slabs"] == {"held": 1, "asked_back": 0}
    lender.lend([0])
    wait_until(lambda: len(rig.mapped()) == 2, "it is lent anew")
    assert rig.copy(D2P, arange(5), of_slab[oks.index(False)].copy()).ok


def test_a_borrower_that_stands_still_costs_no_slab(private: Path, start: Callable[..., Child]) -> None:
    endpoint = f"ipc://{private}/peers"
    lender = lent_memory(endpoint, private, recall_s=0.01)
    child = start(borrow, endpoint)
    lender.lend(range(NUM_SLABS))
    wait_until(lambda: [lender.poll_mapped(), ["has", NUM_SLABS] in child.said][1], "the child to borrow")
    child.stop()
    lender.recall(2)
    wait_until(lambda: lender.poll_mapped().mapped == b"\1\1\0", "slabs of a borrower that stands still")
    assert lender.state()["slabs"] == {"home": 2, "offered": 0, "lent": 1, "asked_back": 0, "quarantined": 0}
    for slab in (0, 1):
        assert not lender.slabs.slab(slab).any()
        lender.slabs.slab(slab)[:] = OWN
    del child.said[:]
    child.go_on()
    # It never reads anything but what it wrote; it would end.
    wait_until(lambda: child.said[-1:] == [["has", 1]] or not child.is_alive, "the child to go on")
    assert child.is_alive
    assert all((lender.slabs.slab(slab) == OWN).all() for slab in (0, 1))
    child.kill()
    lender.recall(1)
    wait_until(lambda: lender.poll_mapped().mapped == b"\1\1\1", "the last slab")
    lender.close()


def test_when_a_lease_has_ended_nothing_is_copied_for_it_any_more(make_rig: Callable[..., Rig]) -> None:
    """While a borrower copies as fast as it can."""
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = make_rig()
    rig.lend(1)
    (lender,) = rig.lenders.values()
    (place,) = rig.mapped()
    pool, device = rig.memory.pool, rig.device
    mover = pool.mover()
    device.kv.fill_(FOREIGN)
    frames = torch.from_numpy(pool.frames_of(place)).long()[:DEVICE_PAGES]
    done, refused, is_over = [0], [0], threading.Event()

    def write() -> None:
        while not is_over.is_set():
            try:
                mover.back_up(device.kv_pages, torch.arange(len(frames)), frames.clone(), "auto")
                done[0] += 1
            except LoadFailedError:
                refused[0] += 1

    def more_than(count: list[int], times: int) -> None:
        before = count[0]
        wait_until(lambda: count[0] > before + times, "copies, or refusals")

    writer = threading.Thread(target=write)
    writer.start()
    copier = lender.coordinator._copier
    try:
        # The lender's own thread says so too; the same thing, so that here it does not matter which is first.
        grants = lender.coordinator._lender.copy_grants()
        monotone = lender.coordinator._lender.copy_grants
        for _ in range(20):
            more_than(done, rng.randrange(3))
            lender.coordinator._lender.copy_grants = dict  # type: ignore[method-assign, assignment]
            copier.set_grants({})
            lender.slabs.slab(0)[:] = OWN
            more_than(refused, 2)
            assert (lender.slabs.slab(0) == OWN).all()
            lender.coordinator._lender.copy_grants = monotone  # type: ignore[method-assign]
            copier.set_grants(grants)
    finally:
        is_over.set()
        writer.join()


# -- the lender's end --------------------------------------------------------------------------------------------


def borrow_from_child(private: Path, start: Callable[..., Child], name: str = "peers") -> tuple[Rig, Child]:
    endpoint = f"ipc://{private}/{name}"
    child = start(lend, endpoint, private)
    child.wait_for("ready")
    rig = Rig({})
    rig.memory.close()
    rig.memory = borrowed_memory([endpoint], "here")
    for link in rig.links.values():
        link.host_pool = link._copier = rig.memory.pool.mover()
    wait_until(lambda: len(rig.mapped()) == NUM_SLABS, "slabs")
    return rig, child


def test_a_lender_that_is_killed_fails_what_waits_for_it_at_once(
    private: Path, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", 10 * DEADLINE_S)  # longer than the test
    rig, child = borrow_from_child(private, start)
    frames = rig.frames()[:5]
    assert rig.copy(D2P, arange(5), frames).ok and rig.copy(P2D, arange(5), frames).ok
    child.stop()
    results: list[OpResult] = []
    waiting = threading.Thread(target=lambda: results.append(rig.copy(P2D, arange(5), frames)))
    (session,) = rig.memory.pool._states[0]._sessions.values()
    asked = session._next_sequence
    waiting.start()
    wait_until(lambda: session._next_sequence > asked, "a request to be under way")
    child.kill()
    waiting.join()
    assert not results[0].ok and "has gone" in results[0].error
    assert not rig.copy(D2P, arange(5), frames).ok
    wait_until(lambda: rig.mapped() == [], "the slabs to be lost")
    rig.memory.give_back(range(NUM_SLABS))
    start(lend, f"ipc://{private}/peers", private)
    wait_until(lambda: len(rig.mapped()) == NUM_SLABS, "the lender's next life")
    rig.device.kv.fill_(FOREIGN)
    assert rig.copy(D2P, arange(5), rig.frames()[:5]).ok
    rig.close()


def test_a_lender_that_stands_still_does_not_do_later_what_was_given_up(
    private: Path, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, child = borrow_from_child(private, start)
    frames = rig.frames()[:5]
    rig.device.kv.fill_(1.0)
    assert rig.copy(D2P, arange(5), frames).ok
    (session,) = rig.memory.pool._states[1]._sessions.values()
    child.stop()
    session._timeout_s = 0.1
    rig.device.kv.fill_(2.0)
    result = rig.copy(D2P, arange(5), frames)
    assert not result.ok and "has not answered for 0.1 s" in result.error
    child.go_on()
    wait_until(lambda: len(rig.mapped()) == NUM_SLABS, "the lender to be used again")
    rig.device.kv.fill_(3.0)
    assert rig.copy(D2P, arange(5), frames).ok
    for _ in range(20):
        rig.device.kv.fill_(0.0)
        assert rig.copy(P2D, arange(5), frames).ok
        assert (rig.device.kv[:, :, :5] == 3.0).all()
    rig.close()


# -- lenders that are left alone ---------------------------------------------------------------------------------


def lender_of(rig: Rig) -> dict[str, Any]:
    (lender,) = rig.memory.state()["lenders"]
    return lender


def test_a_lender_that_does_not_answer_is_left_alone_until_it_does(
    private: Path,
    start: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One copy waits for it. All others fail at once, of all links, and its slabs are not mapped meanwhile."""
    rig, child = borrow_from_child(private, start)
    assert rig.memory.poll_mapped().is_readable(0)
    notified = threading.Event()
    rig.memory.pool.breakers._notify = notified.set
    mover = rig.memory.pool.mover()
    frames = rig.frames()[:5]
    child.stop()
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", 0.1)
    assert "has not answered" in rig.copy(P2D, arange(5), frames).error
    assert notified.is_set(), "the scheduler hears of it at its next turn"
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", DEADLINE_S)  # nothing waits for it any more
    for name in (P2D, D2P, P2D):
        assert "is left alone: the lender has not answered" in rig.copy(name, arange(5), frames).error
    index, layer = torch.from_numpy(frames).long(), rig.device.kv_pages.layer(0)
    with pytest.raises(LoadFailedError, match="is left alone"):
        mover.load_layer(0, layer, index, torch.arange(5), "auto")
    report = rig.memory.poll_mapped()
    assert report.mapped == report.readable == bytes(NUM_SLABS)
    assert lender_of(rig)["left_alone"] and lender_of(rig)["slabs"]["held"] == NUM_SLABS
    for _ in range(3):
        rig.memory.poll_mapped()
    notified.clear()
    child.go_on()
    assert notified.wait(DEADLINE_S), "the scheduler hears of its answer"
    assert rig.memory.poll_mapped().mapped == b"\1" * NUM_SLABS
    rig.device.kv.fill_(4.0)
    assert rig.copy(D2P, arange(5), frames).ok and rig.copy(P2D, arange(5), frames).ok
    state = lender_of(rig)
    assert not state["left_alone"] and state["times_left_alone"] == 1
    lines = [r.getMessage() for r in caplog.records if "left alone" in r.getMessage()]
    assert len(lines) == 2 and "until it answers" in lines[0] and "any more" in lines[1], lines
    rig.close()


def test_a_lender_whose_heartbeats_stop_is_left_alone_before_a_copy_waits_for_it(
    private: Path, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, child = borrow_from_child(private, start)
    frames = rig.frames()[:5]
    child.stop()
    monkeypatch.setattr(lender_breaker, "SILENT_S", 1.0)
    wait_until(lambda: rig.mapped() == [], "its slabs to be left alone")
    assert "is left alone: it has sent no heartbeat" in rig.copy(P2D, arange(5), frames).error
    child.go_on()
    wait_until(lambda: len(rig.mapped()) == NUM_SLABS, "the lender to be used again")
    assert rig.copy(P2D, arange(5), frames).ok
    rig.close()


def test_a_slab_that_its_lender_refuses_is_not_used_any_more(make_rig: Callable[..., Rig]) -> None:
    """Else what lies there would be asked for again and again until the borrower hears that the lease has ended."""
    rig = make_rig()
    rig.lend(2)
    (lender,) = rig.lenders.values()
    first, second = rig.mapped()
    pool = rig.memory.pool
    frames = pool.frames_of(second)[:5]
    lease = rig.memory._leases[first]
    assert lease is not None
    grants = dict(lender.coordinator._lender.copy_grants())
    left = {number: grant for number, grant in grants.items() if number != lease[1].number}
    lender.coordinator._lender.copy_grants = lambda: left  # type: ignore[method-assign]
    lender.coordinator._copier.set_grants(left)
    both = np.concatenate([frames, pool.frames_of(first)[:5]])
    assert "refuses a copy" in rig.copy(D2P, arange(10), both).error
    assert rig.mapped() == [second] and rig.copy(D2P, arange(5), frames).ok
    assert not lender_of(rig)["left_alone"] and not pool.breakers.all_are_usable
    lender.recall(2)
    wait_until(lambda: rig.mapped() == [], "the recall")
    rig.memory.give_back(range(NUM_SLABS))
    assert pool.breakers.all_are_usable, "it is forgotten"


def test_a_lender_that_cannot_be_probed_is_left_alone(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no staging memory. Else each operation, and each line of the log, would be a failed allocation."""
    monkeypatch.setattr(lender_breaker, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(lender_breaker, "LONGEST_PAUSE_S", 0.02)
    rig = make_rig()
    rig.lend(1)
    frames = rig.frames()[:3]
    owned = SlabRange.owned
    tried = []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise SlabError("no memory")

    monkeypatch.setattr(SlabRange, "owned", fail)
    results = [rig.copy(D2P, arange(3), frames) for _ in range(3)]
    assert not any(result.ok for result in results) and all("no memory" in result.error for result in results)
    wait_until(lambda: len(tried) > 4, "probes")
    assert rig.mapped() == []
    assert caplog.text.count("no memory") == 1
    monkeypatch.setattr(SlabRange, "owned", owned)
    wait_until(lambda: len(rig.mapped()) == 1, "the lender to be used again")
    assert rig.copy(D2P, arange(3), frames).ok


def test_a_rank_keeps_the_slab_that_another_rank_leaves_alone(
    make_rig: Callable[..., Rig], private: Path, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lender of one rank stops. All ranks drop the slab's pages, none gives it back, and all use it again."""
    sick, child = borrow_from_child(private, start)
    well = make_rig()
    well.lend(NUM_SLABS)
    rigs = (sick, well)

    def report() -> bytes:
        """What all ranks have, of which they are told in each step."""
        sick.mapped(), well.mapped()
        all_have = bytes(map(min, *(rig.memory.poll_mapped().mapped for rig in rigs)))
        for rig in rigs:
            rig.memory.mark_in_use(all_have)
        return all_have

    assert report() == b"\1" * NUM_SLABS
    child.stop()
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", 0.1)
    assert not sick.copy(P2D, arange(5), sick.frames()[:5]).ok
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", DEADLINE_S)
    assert report() == bytes(NUM_SLABS)
    for rig in rigs:
        rig.memory.give_back(range(NUM_SLABS))  # drained on all
    assert [lender_of(rig)["slabs"]["held"] for rig in rigs] == [NUM_SLABS] * 2
    child.go_on()
    wait_until(lambda: report() == b"\1" * NUM_SLABS, "the slabs to be used again")
    sick.close()


def test_probes_end_with_the_pool(
    private: Path, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for its pause, or for an answer that never comes."""
    for pause in (0.0, 1000.0):
        monkeypatch.setattr(lender_breaker, "FIRST_PAUSE_S", pause)
        rig, child = borrow_from_child(private, start, f"peers{pause}")
        child.stop()
        monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", 0.1)
        assert not rig.copy(P2D, arange(5), rig.frames()[:5]).ok
        monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", DEADLINE_S)
        assert held()[2:] == (0,) and "peer-probe" in [thread.name for thread in threading.enumerate()]
        rig.close()
        assert "peer-probe" not in [thread.name for thread in threading.enumerate()]
        child.kill()


# -- nothing leaks -----------------------------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    """Slabs and staging memory by descriptor and by mapping, and threads."""
    gc.collect()
    fds = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            fds += "peer-slab" in os.readlink(f"/proc/self/fd/{fd}")
    names = [thread.name for thread in threading.enumerate()]
    return fds, Path("/proc/self/maps").read_text().count("peer-slab"), names.count("peer-copier")


def test_nothing_is_left_of_sessions(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.lend(2)
    (lender,) = rig.lenders.values()
    frames = rig.frames()[:3]
    before = held()
    for _ in range(3):
        assert rig.copy(D2P, arange(3), frames).ok and rig.copy(P2D, arange(3), frames).ok
        assert held()[1] >= before[1] + 2 * 2
        rig.memory.pool.close()
        wait_until(lambda: lender.coordinator._copier.num_sessions == 0, "sessions to end")
    # The lender's own mapping of what it copies stays, and its thread.
    kept = (before[0], before[1] + 1, before[2] + 1)
    wait_until(lambda: held() == kept, f"{kept} to be left, not {held()}")
    lender.coordinator.close()
    wait_until(lambda: held() == before, f"{before} to be left, not {held()}")


def test_a_session_that_is_refused_leaves_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.lend(1)
    (lender,) = rig.lenders.values()
    before = held()
    known = grant_of(lender)
    me, path = BorrowerId(known["name"], known["incarnation"]), lender.coordinator._slab_socket
    lease = next(each[1] for each in rig.memory._leases if each is not None)
    for slab in (StrictSlab(path, me, lease, b"?"), StrictSlab(path + "x", me, lease, known["token"])):
        with pytest.raises(slab_channel.ChannelError):
            CopySession(slab, 4096)
    wait_until(lambda: held() == before, f"{before} to be left, not {held()}")


def test_a_copier_without_a_thread_ends_the_connection_and_begins_with_the_next(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copier = Copier(SlabFiles(1, SLAB_BYTES, lambda slab: -1))
    for is_refused in (True, False):
        ours, theirs = socket.socketpair()
        with ours, monkeypatch.context() as patch:
            if is_refused:
                patch.setattr(threading.Thread, "start", refuse)
            copier.adopt(theirs, BorrowerId("a", 1), SlabRange(1, SLAB_BYTES))
            assert copier.num_sessions == (not is_refused)
            if not is_refused:
                copier.close()
            assert ours.recv(1) == b""


def test_a_lender_that_no_thread_is_left_to_probe_is_asked_on(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    breakers = LenderBreakers([None])
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        breakers.open("socket", "it is silent")
    assert breakers.all_are_usable and not breakers.reason("socket")
    breakers.open("socket", "it is silent")
    assert breakers.reason("socket") and not breakers.all_are_usable
    breakers.close()
