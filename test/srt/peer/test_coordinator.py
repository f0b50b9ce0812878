"""Coordinators over real sockets, with real processes that map real memory, are stopped and killed."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglang.srt.peer import lender_coordinator
from sglang.srt.peer.borrower_coordinator import BorrowerCoordinator
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.memory import slab_channel
from sglang.srt.peer.memory.slab_channel import ChannelError
from sglang.srt.peer.memory.slabs import SlabFiles
from sglang.srt.peer.protocol.borrower import BorrowerEvent, SlabLent, SlabLost, SlabsWanted
from sglang.srt.peer.protocol.lender import (
    DemandChanged,
    LenderEvent,
    LenderTiming,
    LendOutcome,
    SlabGivenBack,
    SlabQuarantined,
)
from sglang.srt.peer.protocol.messages import (
    BorrowerHeartbeat,
    Fetch,
    Lease,
    LenderHeartbeat,
    Refused,
    Register,
    Slab,
)
from sglang.srt.utils.peer_endpoint import PeerError, check_endpoint
from sglang.srt.utils.shared_memory import SharedMemory
from support.children import DEADLINE_S, Child, children, wait_until
from support.peer_process import HEARTBEAT_S, SLAB_BYTES, borrow
from support.peer_process import lend as lend_all

TCP = "tcp://127.0.0.1:0"


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as start_one:
        yield start_one


class LenderSide:
    """A lender in this process. events: all so far. Silence is not meant to matter."""

    def __init__(self, directory: Path, endpoint: str = TCP, num_slabs: int = 2, **options: Any) -> None:
        self.slabs = [SharedMemory.allocate(SLAB_BYTES, "slab") for _ in range(num_slabs)]
        self.events: list[LenderEvent] = []
        self.notified = threading.Event()
        timing = LenderTiming(heartbeat_s=HEARTBEAT_S, silence_s=1000, grace_s=0.1, offer_s=0.0)
        self.coordinator = LenderCoordinator(
            endpoint,
            directory,
            SlabFiles(num_slabs, SLAB_BYTES, options.pop("slab_fd", lambda slab: self.slabs[slab].fd)),
            notify=self.notified.set,
            timing=timing,
            **options,
        )

    def wait_for(self, event: LenderEvent) -> None:
        """And forget what came before."""

        def has_come() -> bool:
            self.events += self.coordinator.poll()
            return event in self.events

        wait_until(has_come, f"{event} in {self.events}")
        del self.events[: self.events.index(event) + 1]

    def scrub(self, slab: int) -> None:
        self.slabs[slab].memory[:] = 0
        self.coordinator.reclaim(slab)

    def quarantined(self) -> list[SlabQuarantined]:
        self.events += self.coordinator.poll()
        return [event for event in self.events if isinstance(event, SlabQuarantined)]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def make_lender_side(private: Path) -> Iterator[Callable[..., LenderSide]]:
    lender_sides: list[LenderSide] = []

    def make(**options: Any) -> LenderSide:
        lender_sides.append(LenderSide(private, **options))
        return lender_sides[-1]

    yield make
    for lender_side in lender_sides:
        lender_side.coordinator.close()


class BorrowerSide:
    """A borrower in this process."""

    def __init__(self, endpoint: str, name: str = "here") -> None:
        self.endpoint = endpoint
        self.events: list[BorrowerEvent] = []
        self.coordinator = BorrowerCoordinator([endpoint], name, 4096, heartbeat_s=HEARTBEAT_S)
        self.coordinator.set_demand(endpoint, SLAB_BYTES)

    @property
    def heartbeats(self) -> int:
        """That it has sent."""
        return self.coordinator._links[self.endpoint].borrower._sent_sequence

    def next(self, kind: type[BorrowerEvent]) -> Any:
        def has_come() -> bool:
            self.events += self.coordinator.poll()
            return any(isinstance(event, kind) for event in self.events)

        wait_until(has_come, f"{kind} in {self.events}")
        found = next(event for event in self.events if isinstance(event, kind))
        self.events.remove(found)
        return found


@pytest.fixture
def make_borrower_side() -> Iterator[Callable[..., BorrowerSide]]:
    borrower_sides: list[BorrowerSide] = []

    def make(endpoint: str, name: str = "here") -> BorrowerSide:
        borrower_sides.append(BorrowerSide(endpoint, name))
        return borrower_sides[-1]

    yield make
    for borrower_side in borrower_sides:
        borrower_side.coordinator.close()


# -- processes ---------------------------------------------------------------------------------------------------


def test_two_borrowers_compete_for_a_slab_and_the_one_that_has_it_is_killed(make_lender_side, start):
    lender_side = make_lender_side(num_slabs=1)
    anna, bert = (start(borrow, name, SLAB_BYTES, lender_side.coordinator.endpoint) for name in ("anna", "bert"))
    lender_side.wait_for(DemandChanged(2 * SLAB_BYTES))
    lender_side.coordinator.lend([0])
    lender_side.wait_for(LendOutcome((0,), ()))
    anna.wait_for("lent", 0, 0)
    wait_until(lambda: bytes(lender_side.slabs[0].memory) == b"a" * SLAB_BYTES, "what the borrower wrote")
    assert bert.said == []
    anna.kill()
    lender_side.wait_for(SlabGivenBack(0))
    lender_side.scrub(0)
    lender_side.coordinator.lend([0])
    lender_side.wait_for(LendOutcome((0,), ()))
    bert.wait_for("lent", 0, 0)


@pytest.mark.parametrize("has_tcp", [True, False])
def test_a_killed_borrower_that_was_lent_nothing_is_not_counted(
    make_lender_side, start, private: Path, has_tcp: bool
):
    lender_side = make_lender_side(endpoint=TCP if has_tcp else f"ipc://{private}/peers")
    endpoint, status = lender_side.coordinator.endpoint, lender_side.coordinator.status
    anna, _ = (start(borrow, name, SLAB_BYTES, endpoint) for name in ("anna", "bert"))
    lender_side.wait_for(DemandChanged(2 * SLAB_BYTES))
    assert status()["borrowers"] == 2
    anna.kill()
    lender_side.wait_for(DemandChanged(SLAB_BYTES))
    wait_until(lambda: status()["borrowers"] == 1, "the dead borrower to be forgotten")


def test_a_stopped_borrower_costs_its_slab_until_it_goes_on(make_lender_side, start, private: Path):
    lender_side = make_lender_side(endpoint=f"ipc://{private}/peers")
    borrower = start(borrow, "anna", 2 * SLAB_BYTES, lender_side.coordinator.endpoint)
    lender_side.wait_for(DemandChanged(2 * SLAB_BYTES))
    lender_side.coordinator.lend([0, 1])
    borrower.wait_for("lent", 0)
    borrower.wait_for("lent", 1)
    lender_side.coordinator.recall(1, DEADLINE_S)
    # The borrower chooses what came first; slabs that are not given back in time are named, the lowest first.
    lender_side.wait_for(SlabGivenBack(1))
    borrower.wait_for("unmapped")
    borrower.stop()
    lender_side.coordinator.recall(1, 0.1)
    wait_until(lender_side.quarantined, "the alarm")
    assert (
        lender_side.coordinator.status()["quarantined_slabs"] == lender_side.coordinator.status()["quarantined"] == 1
    )
    assert SlabGivenBack(0) not in lender_side.events and borrower.said.count(["unmapped"]) == 1
    borrower.go_on()
    lender_side.wait_for(SlabGivenBack(0))
    wait_until(lambda: borrower.said.count(["unmapped"]) == 2, "the borrower's word")
    for slab in (0, 1):
        lender_side.scrub(slab)
    wait_until(lambda: lender_side.coordinator.status()["free_slabs"] == 2, "the engine's own slabs")


def test_a_stopped_lender_keeps_its_leases_and_a_killed_one_ends_them(make_borrower_side, start, private: Path):
    endpoint = f"ipc://{private}/peers"
    lender = start(lend_all, private, 1, endpoint)
    lender.wait_for("ready")
    borrower_side = make_borrower_side(endpoint)
    first = borrower_side.next(SlabLent)
    lender.stop()
    memory = SharedMemory(first.fd, SLAB_BYTES).memory
    memory[:] = 1
    sent = borrower_side.heartbeats
    wait_until(lambda: borrower_side.heartbeats > sent + 10, "heartbeats without an answer")
    assert borrower_side.coordinator.poll() == []
    lender.kill()
    assert borrower_side.next(SlabLost) == SlabLost(endpoint, first.lease)
    start(lend_all, private, 1, endpoint)
    second = borrower_side.next(SlabLent)
    assert second.lease.epoch > first.lease.epoch
    os.close(second.fd)


# -- in one process ----------------------------------------------------------------------------------------------


def lend_one(lender_side: LenderSide, borrower_side: BorrowerSide) -> SlabLent:
    lender_side.wait_for(DemandChanged(SLAB_BYTES))
    lender_side.coordinator.lend([0])
    return borrower_side.next(SlabLent)


def test_a_slab_is_lent_recalled_and_given_back(make_lender_side, make_borrower_side):
    lender_side = make_lender_side()
    borrower_side = make_borrower_side(lender_side.coordinator.endpoint)
    lent = lend_one(lender_side, borrower_side)
    assert lender_side.notified.is_set() and lent.slab == 0 and lent.size_bytes == SLAB_BYTES
    SharedMemory(lent.fd, SLAB_BYTES).memory[:] = 9
    assert (lender_side.slabs[0].memory == 9).all()
    lender_side.coordinator.recall(1, DEADLINE_S)
    assert borrower_side.next(SlabsWanted).num_slabs == 1
    borrower_side.coordinator.give_back(borrower_side.endpoint, lent.lease)
    lender_side.wait_for(SlabGivenBack(0))


def test_strict_leases_come_without_memory(make_lender_side, make_borrower_side):
    lender_side = make_lender_side(strict=True)
    borrower_side = make_borrower_side(lender_side.coordinator.endpoint)
    assert lend_one(lender_side, borrower_side).fd is None
    assert borrower_side.coordinator.status()["held_leases"] == 1


def test_the_end_of_a_connection_is_not_the_end_of_a_process(make_lender_side, make_borrower_side):
    lender_side = make_lender_side()
    borrower_side = make_borrower_side(lender_side.coordinator.endpoint)
    lent = lend_one(lender_side, borrower_side)
    os.close(lent.fd)
    borrower_side.coordinator.close()
    wait_until(lambda: not lender_side.coordinator._connections, "the connection to end")
    lender_side.coordinator.recall(1, 0.0)
    wait_until(lender_side.quarantined, "the alarm")
    assert SlabGivenBack(0) not in lender_side.events


def test_what_was_not_taken_is_closed(make_lender_side, make_borrower_side):
    lender_side = make_lender_side()
    borrower_side = make_borrower_side(lender_side.coordinator.endpoint)
    lender_side.wait_for(DemandChanged(SLAB_BYTES))
    lender_side.coordinator.lend([0])
    wait_until(lambda: borrower_side.coordinator._events, "the slab")
    fd = borrower_side.coordinator._events[0].fd
    os.fstat(fd)
    borrower_side.coordinator.close()
    with pytest.raises(OSError):
        os.fstat(fd)


class NoSockets:
    """The module, for a process that has no descriptor left."""

    def __init__(self) -> None:
        self.num_refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def socket(self, *kind: int) -> socket.socket:
        self.num_refused += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_borrower_without_descriptors_goes_on_and_asks_again(make_lender_side, make_borrower_side, monkeypatch):
    lender_side, exhausted = make_lender_side(), NoSockets()
    monkeypatch.setattr(slab_channel, "socket", exhausted)
    borrower_side = make_borrower_side(lender_side.coordinator.endpoint)
    wait_until(lambda: exhausted.num_refused > 1, "the second attempt to connect")
    monkeypatch.undo()
    os.close(lend_one(lender_side, borrower_side).fd)


def test_a_lender_without_descriptors_does_not_ask_for_a_connection_all_the_time(make_lender_side, monkeypatch):
    coordinator, pauses = make_lender_side().coordinator, []
    listener = coordinator._listener

    class Exhausted:
        fileno, close = listener.fileno, listener.close

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(lender_coordinator, "_sleep", pauses.append)
    coordinator._listener = Exhausted()
    with slab_channel.connect(coordinator._slab_socket):
        wait_until(lambda: pauses, "a pause")
        coordinator._listener = listener
        wait_until(lambda: coordinator._connections, "it is connected")


def test_poll_raises_when_the_thread_has_died(make_lender_side, make_borrower_side):
    lender_side = make_lender_side(slab_fd=lambda slab: {}[slab])
    borrower_side = make_borrower_side(lender_side.coordinator.endpoint)
    lender_side.wait_for(DemandChanged(SLAB_BYTES))
    lender_side.coordinator.lend([0])
    wait_until(lambda: not lender_side.coordinator._thread.is_alive(), "the thread's death")
    with pytest.raises(RuntimeError, match="peer-lender has died"):
        lender_side.coordinator.poll()
    assert borrower_side.coordinator.poll() == []


# -- strangers ---------------------------------------------------------------------------------------------------


def fetch_of(lender_side: LenderSide, slab: int = 0, **fields: Any) -> Fetch:
    """A right one, but for `fields`."""
    lender = lender_side.coordinator._lender
    lease = lender._leases[slab]
    right = {"name": lease.borrower.name, "incarnation": lease.borrower.incarnation, "epoch": lender.epoch}
    return Fetch(**(right | {"number": lease.number, "token": lease.token} | fields))


def ask(sock: socket.socket, message: Fetch) -> Slab | Refused:
    slab_channel.send(sock, message)
    answers: list[Any] = []

    def has_come() -> bool:
        try:
            answer, fd = slab_channel.receive(sock, Slab | Refused)
        except BlockingIOError:
            return False
        assert (fd is not None) == isinstance(answer, Slab)
        if fd is not None:
            os.close(fd)
        answers.append(answer)
        return True

    wait_until(has_come, "an answer")
    return answers[0]


def test_only_the_right_token_from_the_right_process_opens_a_slab(make_lender_side, start):
    lender_side = make_lender_side()
    borrower = start(borrow, "anna", SLAB_BYTES, lender_side.coordinator.endpoint)
    lender_side.wait_for(DemandChanged(SLAB_BYTES))
    borrower.stop()
    lender_side.coordinator.lend([0])
    lender_side.wait_for(LendOutcome((0,), ()))
    path = lender_side.coordinator._slab_socket
    assert os.stat(path).st_mode & 0o777 == 0o600
    with slab_channel.connect(path) as sock:
        assert ask(sock, fetch_of(lender_side, token=b"?" * 16)) == Refused(0)
        assert ask(sock, fetch_of(lender_side, incarnation=3)) == Refused(0)
        borrower.go_on()
        borrower.wait_for("lent", 0)
        assert ask(sock, fetch_of(lender_side)) == Refused(0), "another process has fetched as this borrower"
    wait_until(lambda: lender_side.coordinator.status()["refused"] == 3, "refusals to be counted")


def test_one_connection_is_one_borrower(make_lender_side, make_borrower_side):
    lender_side = make_lender_side()
    endpoint = lender_side.coordinator.endpoint
    borrower_sides = [make_borrower_side(endpoint, "anna"), make_borrower_side(endpoint, "bert")]
    lender_side.wait_for(DemandChanged(2 * SLAB_BYTES))
    lender_side.coordinator.lend([0, 1])
    for borrower_side in borrower_sides:
        os.close(borrower_side.next(SlabLent).fd)
    with slab_channel.connect(lender_side.coordinator._slab_socket) as sock:
        assert ask(sock, fetch_of(lender_side, slab=1)) == Slab(0), "the same process, connected anew"
        assert ask(sock, fetch_of(lender_side, slab=0)) == Refused(1), "another borrower's slab"


def test_a_connection_that_ends_is_not_polled_any_more(make_lender_side):
    coordinator = make_lender_side().coordinator
    before = len(coordinator._poller.sockets)
    for _ in range(2):
        sock = slab_channel.connect(coordinator._slab_socket)
        wait_until(lambda: coordinator._connections, "it is connected")
        sock.close()
        wait_until(lambda: not coordinator._connections, "it is not")
        assert len(coordinator._poller.sockets) == before


def test_connections_beyond_the_most_are_turned_away(make_lender_side, monkeypatch):
    monkeypatch.setattr(lender_coordinator, "_MAX_CONNECTIONS", 1)
    coordinator = make_lender_side().coordinator
    with slab_channel.connect(coordinator._slab_socket):
        wait_until(lambda: coordinator._connections, "it is connected")
        with slab_channel.connect(coordinator._slab_socket) as second:
            wait_until(lambda: coordinator.status()["rejected"] == 1, "the second is turned away")
            wait_until(lambda: is_closed(second), "the connection to be closed")
        assert len(coordinator._connections) == 1


def test_garbage_is_ignored_and_counted(make_lender_side, make_borrower_side):
    lender_side = make_lender_side()
    path = lender_side.coordinator._slab_socket

    def rejected(times: int) -> bool:
        return lender_side.coordinator.status()["rejected"] == times

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(lender_side.coordinator.endpoint)
        stranger.send(b"\xc1 not msgpack")
        stranger.send_multipart([b"", b"more", b"frames"])
        stranger.send(msgspec.msgpack.encode({"type": "BorrowerHeartbeat", "sequence": -1}))
        wait_until(lambda: rejected(3), "garbage to be counted")

        lent = lend_one(lender_side, make_borrower_side(lender_side.coordinator.endpoint))
        os.close(lent.fd)
        me = lender_side.coordinator._lender._leases[0].borrower
        register = Register(name=me.name, incarnation=me.incarnation, page_bytes=1, demand_bytes=0)
        forged = BorrowerHeartbeat(
            sequence=1 << 40, register=register, epoch=lent.lease.epoch, mapped=(), given_back=(lent.lease.number,)
        )
        stranger.send(msgspec.msgpack.encode(forged))
        wait_until(lambda: rejected(4), "a forged heartbeat to be counted")
        # Ranks add such numbers in 64 bits.
        greedy = msgspec.structs.replace(register, name="greedy", slab_value_us=1 << 63)
        view = BorrowerHeartbeat(sequence=1, register=greedy, epoch=lent.lease.epoch, mapped=(), given_back=())
        stranger.send(msgspec.msgpack.encode(view))
        wait_until(lambda: rejected(5), "an amount beyond all memory to be counted")
    assert lender_side.coordinator.status()["held_slabs"] == 1

    for data in (b"garbage", b"x" * 100_000, b""):
        with slab_channel.connect(path) as sock:
            sock.send(data)
            wait_until(lambda: is_closed(sock), "the connection to be closed")
    lender_side.coordinator.lend([1])
    lender_side.wait_for(LendOutcome((), (1,)))


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


class FalseLender:
    """Says and gives what a test wants. heard: the newest heartbeat. sock: the newest connection to the slab
    channel."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "slabs")
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(TCP)
        self.endpoint = self.router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.listener = slab_channel.listen(self.path)
        self.sequence = 0

    def hear(self) -> BorrowerHeartbeat:
        assert self.router.poll(1000 * DEADLINE_S), "no heartbeat"
        self.route, data = self.router.recv_multipart()
        self.heard = msgspec.msgpack.decode(data, type=BorrowerHeartbeat)
        return self.heard

    def say(self, *leases: Lease, epoch: int = 1000) -> None:
        self.sequence += 1
        message = LenderHeartbeat(
            sequence=self.sequence,
            epoch=epoch,
            incarnation=self.heard.register.incarnation,
            leases=leases,
            slab_socket=self.path,
        )
        self.router.send_multipart([self.route, msgspec.msgpack.encode(message)])

    def accept(self) -> None:
        assert select.select([self.listener], [], [], DEADLINE_S)[0], "nobody connects"
        self.sock, _ = self.listener.accept()

    def asked(self) -> Fetch:
        assert select.select([self.sock], [], [], DEADLINE_S)[0], "nobody asks"
        return slab_channel.receive(self.sock, Fetch)[0]

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.listener.close()
        self.sock.close()


@pytest.fixture
def false_lender(private: Path) -> Iterator[FalseLender]:
    lender = FalseLender(private)
    yield lender
    lender.close()


def terms(number: int, due_in_s: float | None = None) -> Lease:
    return Lease(number=number, slab=0, size_bytes=SLAB_BYTES, token=b"t", strict=False, due_in_s=due_in_s)


def test_a_borrower_watches_asks_again_and_never_maps_what_comes_too_late(false_lender, make_borrower_side):
    borrower_side = make_borrower_side(false_lender.endpoint)
    false_lender.hear()
    false_lender.router.send_multipart([false_lender.route, b"garbage"])
    false_lender.say()
    false_lender.accept()  # before anything is lent
    false_lender.say(terms(0))
    assert false_lender.asked().number == 0
    slab_channel.send(false_lender.sock, Refused(0))
    false_lender.say(terms(0))
    assert false_lender.asked().number == 0
    false_lender.say(terms(0, due_in_s=1.0))
    wait_until(lambda: false_lender.hear().given_back == (0,), "the slab to be given back")
    read_end, write_end = os.pipe()
    slab_channel.send(false_lender.sock, Slab(0), read_end)
    os.close(read_end)
    wait_until(lambda: is_broken(write_end), "the memory to be closed")
    os.close(write_end)
    assert borrower_side.coordinator.poll() == []
    assert borrower_side.coordinator.status()["rejected"] == 1


def test_the_next_life_of_a_lender_is_connected_to_anew(false_lender, make_borrower_side):
    borrower_side = make_borrower_side(false_lender.endpoint)
    false_lender.hear()
    false_lender.say(terms(0))
    false_lender.accept()
    old = false_lender.sock
    false_lender.asked()
    false_lender.say(terms(0), epoch=1001)
    false_lender.accept()
    assert false_lender.asked().epoch == 1001
    wait_until(lambda: is_closed(old), "the former connection to be closed")
    old.close()
    assert borrower_side.coordinator.poll() == []


def is_broken(write_end: int) -> bool:
    try:
        os.write(write_end, b".")
    except BrokenPipeError:
        return True
    return False


def test_another_users_process_is_refused(monkeypatch):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert slab_channel.peer_process(one).pid == os.getpid()
        monkeypatch.setattr(slab_channel.os, "geteuid", lambda: 12345)
        with pytest.raises(ChannelError, match="is of user"):
            slab_channel.peer_process(one)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("tcp://0.0.0.0:5600", "only loopback"),
        ("tcp://*:5600", "only loopback"),
        ("tcp://10.0.0.2:5600", "only loopback"),
        ("tcp://localhost:5600", "only loopback"),
        ("tcp://127.0.0.1", "only loopback"),
        ("tcp://127.0.0.1:99999", "only loopback"),
        ("udp://127.0.0.1:5600", "give tcp://"),
        ("peers", "give tcp://"),
        ("ipc://relative/peers", "absolute path"),
        ("ipc:///no/such/directory/peers", "mkdir -m 700"),
        ("ipc:///tmp/peers", "others may enter"),
    ],
)
def test_an_endpoint_that_others_can_reach_is_refused(endpoint: str, says: str, tmp_path: Path):
    with pytest.raises(PeerError, match=says):
        LenderCoordinator(endpoint, tmp_path, SlabFiles(1, SLAB_BYTES, lambda slab: -1))
    with pytest.raises(PeerError, match=says):
        BorrowerCoordinator([endpoint], "here", 4096)


def test_a_directory_of_another_user_is_refused(private: Path, monkeypatch):
    check_endpoint(f"ipc://{private}/peers")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PeerError, match="others may enter"):
        check_endpoint(f"ipc://{private}/peers")


@pytest.mark.parametrize(("endpoint", "says"), [(TCP, "cannot listen on"), ("ipc://{}/peers", "another worker")])
def test_an_endpoint_that_is_taken_is_refused(make_lender_side, private: Path, endpoint: str, says: str):
    lender_side = make_lender_side(endpoint=endpoint.format(private))
    with pytest.raises(PeerError, match=says):
        make_lender_side(endpoint=lender_side.coordinator.endpoint)
