"""Coordinators: one thread beside an engine that carries what its `Lender` or its `Borrower`s say over sockets, and
watches the processes on the other side. Own sockets, timers and that thread; never touch engine state or memory.

The engine's calls are queued for the thread; what happened is queued for the engine, which is notified and takes it
with `poll` in its own steps.

    engine (worker)                                                              engine (master)
      │ offer, reclaim, scrubbed    ┌────────────┐  heartbeats  ┌──────────────┐    want, unmapped │
      ├────────────────────────────►│   Lender   │◄────────────►│   Borrower   │◄──────────────────┤
      │◄────────────────────────────│ Coordinator│   ZeroMQ     │  Coordinator │──────────────────►│
      │ Offered, ToScrub,           └────────────┘              └──────────────┘  Lent, AskedBack, │
      ▼ Quarantined, Demand           pidfds  ▲                    ▲ pidfds                   Lost ▼
                                              └─ Fetch ── slab fd ─┘
                                                  slab channel

In strict mode nobody fetches: a `CopySession` sends staging memory over the slab channel, and its connection is the
`Copier`'s from then on.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from sglang.srt.peer.endpoint import PeerError, check_endpoint, check_unused
from sglang.srt.peer.memory import slab_channel
from sglang.srt.peer.memory.copier import Copier
from sglang.srt.peer.memory.slab_channel import ChannelError, Process
from sglang.srt.peer.memory.slabs import SlabError, SlabRange
from sglang.srt.peer.protocol.borrower import Borrower, BorrowerEvent, LeaseState, Lent
from sglang.srt.peer.protocol.lender import Lender, LenderEvent, LenderTiming, Quarantined, SlabState
from sglang.srt.peer.protocol.messages import (
    MAX_HEARTBEAT_BYTES,
    BorrowerHeartbeat,
    BorrowerId,
    Fetch,
    LeaseId,
    LenderHeartbeat,
    Refused,
    Slab,
    Stage,
    Staged,
)

_Event = TypeVar("_Event")
# Of strangers too: a borrower needs one.
_MAX_CONNECTIONS = 64
# Heartbeats that wait for the other side; each holds all that older ones say.
_QUEUED_HEARTBEATS = 8
_TURNS_PER_HEARTBEAT = 4
# Who sends more does not keep the others waiting.
_MESSAGES_PER_TURN = 1000
_CLOSE_TIMEOUT_S = 10.0
# Of one borrower's connection; it is the borrower's memory, and takes this process addresses.
_MAX_STAGING_BYTES = 1 << 30

_encoder = msgspec.msgpack.Encoder()
_borrower_decoder = msgspec.msgpack.Decoder(BorrowerHeartbeat)
_lender_decoder = msgspec.msgpack.Decoder(LenderHeartbeat)
logger = logging.getLogger(__name__)


class _Coordinator(Generic[_Event]):
    """notify: called from the thread when there are events. counters: "rejected" are messages that nobody can
    understand or that do not come from whom they say; "refused", requests for slabs."""

    def __init__(self, name: str, notify: Callable[[], None], heartbeat_s: float) -> None:
        if not hasattr(os, "pidfd_open"):
            raise PeerError("peers need Linux 5.3 or newer: elsewhere a process's death cannot be proven")
        self.counters = Counter(rejected=0)
        self._status: dict[str, int] = {}
        self._notify = notify
        self._turn_ms = max(1, round(1000 * heartbeat_s / _TURNS_PER_HEARTBEAT))
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not at the end of the process: the thread may still be polling it.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._poller.register(self._wake, zmq.POLLIN)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: deque[_Event] = deque()
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def poll(self) -> list[_Event]:
        """What has happened since the last call. Raises if the thread has died."""
        if self._error is not None:
            raise RuntimeError(f"the thread {self._thread.name} has died") from self._error
        return [self._events.popleft() for _ in range(len(self._events))]

    def status(self) -> dict[str, int]:
        """For people: counts, as of the thread's last turn."""
        return self._status

    def close(self) -> None:
        """Ends the thread and removes its sockets. Sends nothing to the other side: what is lent stays so until this
        process ends. May be called twice."""
        self._is_closing = True
        self._submit(lambda: None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _start(self) -> None:
        self._update_status()
        self._thread.start()

    def _update_status(self) -> None:
        self._status = {**self._describe(), **self.counters}

    def _submit(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                events = self._turn(dict(self._poller.poll(self._turn_ms)))
                self._update_status()
                if events:
                    self._events.extend(events)
                    self._notify()
        except BaseException as error:
            self._error = error
            logger.exception("the coordinator has died")
            self._notify()
        finally:
            self._release()
            self._context.destroy(linger=0)

    def _run_commands(self, ready: dict[Any, int]) -> None:
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while not self._commands.empty():
            self._commands.get()()

    def _open(self, kind: int) -> zmq.Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_HEARTBEAT_BYTES)
        sock.setsockopt(zmq.SNDHWM, _QUEUED_HEARTBEATS)
        sock.setsockopt(zmq.RECONNECT_IVL, 20)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._poller.register(sock, zmq.POLLIN)
        return sock

    def _reject(self, why: object) -> None:
        self.counters["rejected"] += 1
        logger.debug("a peer's message is ignored: %s", why)

    def _turn(self, ready: dict[Any, int]) -> list[_Event]:
        """ready: sockets and descriptors at which something has happened."""
        raise NotImplementedError

    def _describe(self) -> dict[str, int]:
        raise NotImplementedError

    def _release(self) -> None:
        """The thread ends."""
        raise NotImplementedError


class _Connection:
    """borrower: whose it is, once it has shown a lease."""

    def __init__(self, sock: socket.socket, process: Process) -> None:
        self.sock = sock
        self.process = process
        self.borrower: BorrowerId | None = None


class LenderCoordinator(_Coordinator[LenderEvent]):
    """endpoint: where borrowers connect, see `check_endpoint`; port 0 is any free one, and the attribute says which.
    directory: a private one, for the slab channel's socket. slab_fd: slab -> file descriptor of its memory, which
    stays the callee's; called from the thread. Slabs and strict: see `Lender`. Raises PeerError."""

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        num_slabs: int,
        slab_bytes: int,
        slab_fd: Callable[[int], int],
        notify: Callable[[], None] = lambda: None,
        strict: bool = False,
        timing: LenderTiming | None = None,
    ) -> None:
        check_endpoint(endpoint)
        check_unused(endpoint)
        timing = timing or LenderTiming()
        super().__init__("peer-lender", notify, timing.heartbeat_s)
        # Later lives of any process on this machine have a higher one.
        epoch = time.monotonic_ns()
        slab_socket = self._slab_socket = str(directory / f"slabs-{epoch}")
        self._lender = Lender(
            epoch=epoch,
            num_slabs=num_slabs,
            slab_bytes=slab_bytes,
            make_token=partial(secrets.token_bytes, 16),
            strict=strict,
            timing=timing,
            slab_socket=slab_socket,
        )
        self.counters["refused"] = 0
        self._slab_fd = slab_fd
        self._copier = Copier(num_slabs, slab_bytes, slab_fd)
        self._routes: dict[BorrowerId, bytes] = {}
        self._connections: dict[int, _Connection] = {}
        # Of those that have shown a lease.
        self._processes: dict[BorrowerId, Process] = {}
        self._router = self._open(zmq.ROUTER)
        # Routes are secrets that borrowers choose: who knows one is that borrower, connected anew.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._router.bind(endpoint)
            self._listener = slab_channel.listen(slab_socket)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise PeerError(f"a lender cannot listen on {endpoint} and {slab_socket}: {error}") from error
        self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        self._start()

    def offer(self, slabs: Sequence[int]) -> None:
        """As `Lender.offer`; until `Offered` says otherwise, these slabs are not the engine's."""
        offered = tuple(slabs)
        self._submit(lambda: self._lender.offer(offered, time.monotonic()))

    def reclaim(self, num_slabs: int, timeout_s: float) -> None:
        """As `Lender.reclaim`."""
        self._submit(lambda: self._lender.reclaim(num_slabs, time.monotonic() + timeout_s))

    def scrubbed(self, slab: int) -> None:
        """As `Lender.scrubbed`."""
        self._submit(lambda: self._lender.scrubbed(slab))

    # -- on the thread ------------------------------------------------------------------------------------------

    def _turn(self, ready: dict[Any, int]) -> list[LenderEvent]:
        self._run_commands(ready)
        self._receive()
        if self._listener.fileno() in ready:
            self._accept()
        for fd in ready.keys() & self._connections.keys():
            self._serve(fd)
        for borrower, process in list(self._processes.items()):
            if ready.get(process.pidfd, 0) & zmq.POLLIN:
                self._lender.died(borrower)
        self._lender.tick(time.monotonic())
        # Before anybody hears of it: whose slab is to be scrubbed has none copied any more.
        self._copier.allow(self._lender.grants())
        self._forget_strangers()
        for borrower, message in self._lender.outgoing(time.monotonic()):
            # Nobody there, or too much waits for them: the next one will do.
            self._router.send_multipart([self._routes[borrower], _encoder.encode(message)], zmq.NOBLOCK)
        events = self._lender.take_events()
        for event in events:
            if isinstance(event, Quarantined):
                logger.error("slab %d is quarantined: %s has not released it in time", event.slab, event.borrower)
        return events

    def _describe(self) -> dict[str, int]:
        """Slabs by state, borrowers, counters, also of copies."""
        states = Counter(self._lender.states)
        slabs = {f"{state.name.lower()}_slabs": states[state] for state in SlabState}
        return {**slabs, "borrowers": len(self._lender.borrowers), **self._lender.counters, **self._copier.counters}

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _borrower_decoder.decode(b"".join(frames))
            except msgspec.DecodeError as error:
                self._reject(error)
                continue
            borrower = BorrowerId(message.register.name, message.register.incarnation)
            if self._routes.get(borrower, route) != route:
                self._reject(f"{borrower} is somebody else")
                continue
            self._lender.receive(message, time.monotonic())
            if borrower in self._lender.borrowers:
                self._routes[borrower] = route

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        try:
            if len(self._connections) + self._copier.num_sessions >= _MAX_CONNECTIONS:
                raise ChannelError("too many connections")
            connection = _Connection(sock, slab_channel.peer_process(sock))
        except ChannelError as error:
            self._reject(error)
            sock.close()
            return
        self._connections[sock.fileno()] = connection
        self._poller.register(sock.fileno(), zmq.POLLIN)

    def _serve(self, fd: int) -> None:
        sock = self._connections[fd].sock
        try:
            while fd in self._connections:
                message, sent_fd = slab_channel.receive(sock, Fetch | Stage)
                try:
                    if isinstance(message, Stage):
                        self._stage(fd, message, sent_fd)
                    else:
                        self._answer(self._connections[fd], message)
                finally:
                    if sent_fd is not None:
                        os.close(sent_fd)
        except BlockingIOError:
            pass
        except ChannelError as error:
            self._disconnect(fd, error)

    def _answer(self, connection: _Connection, message: Fetch) -> None:
        slab = self._lender.fetch(message) if self._can_be(message, connection) else None
        if slab is None:
            self._refuse(connection, message)
            return
        self._identify(connection, BorrowerId(message.name, message.incarnation))
        # If it does not arrive, the borrower asks again.
        slab_channel.send(connection.sock, Slab(message.number), self._slab_fd(slab))

    def _stage(self, fd: int, message: Stage, staging_fd: int | None) -> None:
        connection = self._connections[fd]
        is_allowed = self._can_be(message, connection) and self._lender.may_stage(message)
        if not is_allowed or staging_fd is None or message.size_bytes > _MAX_STAGING_BYTES:
            self._refuse(connection, message)
            return
        try:
            staging = SlabRange(1, message.size_bytes)
            staging.map(0, staging_fd)
        except (SlabError, ValueError) as error:
            logger.warning("%s sends no memory that copies could go through: %s", message.name, error)
            self._refuse(connection, message)
            return
        borrower = BorrowerId(message.name, message.incarnation)
        self._identify(connection, borrower)
        slab_channel.send(connection.sock, Staged())
        self._poller.unregister(fd)
        del self._connections[fd]
        self._copier.adopt(connection.sock, borrower, staging)

    def _can_be(self, message: Fetch | Stage, connection: _Connection) -> bool:
        """Nothing speaks against it that the connection is who it says, but for its token."""
        borrower = BorrowerId(message.name, message.incarnation)
        known = self._processes.get(borrower)
        is_its_process = known is None or known.pid == connection.process.pid
        return connection.borrower in (None, borrower) and is_its_process

    def _identify(self, connection: _Connection, borrower: BorrowerId) -> None:
        connection.borrower = borrower
        if borrower not in self._processes:
            self._processes[borrower] = connection.process
            self._poller.register(connection.process.pidfd, zmq.POLLIN)

    def _refuse(self, connection: _Connection, message: Fetch | Stage) -> None:
        self.counters["refused"] += 1
        slab_channel.send(connection.sock, Refused(message.number))

    def _disconnect(self, fd: int, why: object) -> None:
        connection = self._connections.pop(fd)
        self._poller.unregister(fd)
        connection.sock.close()
        logger.debug("process %d is disconnected: %s", connection.process.pid, why)

    def _forget_strangers(self) -> None:
        for borrower in self._processes.keys() - self._lender.borrowers:
            self._poller.unregister(self._processes.pop(borrower).pidfd)
        for borrower in self._routes.keys() - self._lender.borrowers:
            del self._routes[borrower]

    def _release(self) -> None:
        # ZeroMQ leaves the file of its socket. It still listens: no other worker can have taken its place.
        scheme, _, path = self.endpoint.partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)
        self._copier.close()
        self._listener.close()
        for fd in list(self._connections):
            self._disconnect(fd, "closing")
        Path(self._slab_socket).unlink(missing_ok=True)


class _Worker:
    """A lender that a borrower coordinator talks to. asked: leases whose memory was asked for. slab_socket, sock,
    process: the slab channel to the lender's life `epoch`, and that life."""

    def __init__(self, borrower: Borrower, dealer: zmq.Socket) -> None:
        self.borrower = borrower
        self.dealer = dealer
        self.slab_socket = ""
        self.asked: set[int] = set()
        self.sock: socket.socket | None = None
        self.process: Process | None = None
        self.epoch = 0


class BorrowerCoordinator(_Coordinator[BorrowerEvent]):
    """endpoints: of the lenders, which may come up later. name, page_bytes, strict: see `Register`. id: of this life.
    Raises PeerError."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        page_bytes: int,
        notify: Callable[[], None] = lambda: None,
        strict: bool = False,
        heartbeat_s: float = 0.5,
    ) -> None:
        for endpoint in endpoints:
            check_endpoint(endpoint)
        super().__init__("peer-borrower", notify, heartbeat_s)
        incarnation = time.monotonic_ns()
        self._workers: dict[str, _Worker] = {}
        for endpoint in dict.fromkeys(endpoints):
            dealer = self._open(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, b"p" + secrets.token_bytes(16))
            dealer.connect(endpoint)
            borrower = Borrower(endpoint, name, incarnation, page_bytes, strict, heartbeat_s)
            self._workers[endpoint] = _Worker(borrower, dealer)
        self.id = BorrowerId(name, incarnation)
        self._start()

    def want(self, lender: str, size_bytes: int) -> None:
        """As `Borrower.want`. lender: its endpoint."""
        borrower = self._workers[lender].borrower
        self._submit(lambda: borrower.want(size_bytes))

    def unmapped(self, lender: str, lease: LeaseId) -> None:
        """As `Borrower.unmapped`."""
        borrower = self._workers[lender].borrower
        self._submit(lambda: borrower.unmapped(lease))

    def connected(self) -> dict[str, bool]:
        """For people. Lender -> whether it has answered, and its process lives."""
        return {lender: worker.process is not None for lender, worker in self._workers.items()}

    # -- on the thread ------------------------------------------------------------------------------------------

    def _turn(self, ready: dict[Any, int]) -> list[BorrowerEvent]:
        self._run_commands(ready)
        events: list[BorrowerEvent] = []
        for worker in self._workers.values():
            self._receive(worker)
            if worker.sock is not None and worker.sock.fileno() in ready:
                self._take_slabs(worker)
            if worker.process is not None and ready.get(worker.process.pidfd, 0) & zmq.POLLIN:
                self._disconnect(worker)
                self._forget_process(worker)
                worker.borrower.lender_died(worker.epoch)
                worker.slab_socket = ""
            try:
                self._fetch(worker)
            except ChannelError as error:
                logger.debug("%s cannot be asked for slabs: %s", worker.borrower.lender, error)
                self._disconnect(worker)
            message = worker.borrower.outgoing(time.monotonic())
            if message is not None:
                try:
                    worker.dealer.send(_encoder.encode(message), zmq.NOBLOCK)
                except zmq.Again:
                    pass  # too much waits for it: the next one will do
            events += worker.borrower.take_events()
        return events

    def _describe(self) -> dict[str, int]:
        """Leases by state."""
        states = Counter(state for worker in self._workers.values() for state in worker.borrower.states())
        return {f"{state.name.lower()}_leases": states[state] for state in LeaseState}

    def _receive(self, worker: _Worker) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                data = worker.dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _lender_decoder.decode(data)
            except msgspec.DecodeError as error:
                self._reject(error)
                continue
            if not worker.borrower.receive(message, time.monotonic()):
                continue
            worker.slab_socket = message.slab_socket
            worker.asked.clear()  # what was refused, and is still offered, is asked for again
            if worker.borrower.epoch != worker.epoch:
                self._disconnect(worker)
                self._forget_process(worker)
                worker.epoch = worker.borrower.epoch

    def _fetch(self, worker: _Worker) -> None:
        """Ask for the memory of what is offered. A lender is watched before it has lent anything. Raises
        ChannelError."""
        if worker.process is None and worker.slab_socket:
            self._connected(worker)
        borrower = worker.borrower
        for lend in borrower.to_fetch():
            if lend.number in worker.asked:
                continue
            fetch = Fetch(
                name=borrower.name,
                incarnation=borrower.incarnation,
                epoch=borrower.epoch,
                number=lend.number,
                token=lend.token,
            )
            if not slab_channel.send(self._connected(worker), fetch):
                return
            worker.asked.add(lend.number)

    def _connected(self, worker: _Worker) -> socket.socket:
        """Raises ChannelError."""
        if worker.sock is None:
            sock = slab_channel.connect(worker.slab_socket)
            try:
                process = slab_channel.peer_process(sock)
            except ChannelError:
                sock.close()
                raise
            worker.sock = sock
            self._poller.register(sock.fileno(), zmq.POLLIN)
            if worker.process is None:
                worker.process = process
                self._poller.register(process.pidfd, zmq.POLLIN)
        return worker.sock

    def _take_slabs(self, worker: _Worker) -> None:
        assert worker.sock is not None
        try:
            while True:
                message, fd = slab_channel.receive(worker.sock, Slab | Refused)
                lease = LeaseId(worker.epoch, message.number)
                if fd is not None and (isinstance(message, Refused) or not worker.borrower.fetched(lease, fd)):
                    os.close(fd)
        except BlockingIOError:
            pass
        except ChannelError as error:
            logger.debug("the slab channel to %s ends: %s", worker.borrower.lender, error)
            self._disconnect(worker)

    def _disconnect(self, worker: _Worker) -> None:
        """Its process is watched on: the end of a connection does not end a lease."""
        worker.asked.clear()
        if worker.sock is not None:
            self._poller.unregister(worker.sock.fileno())
            worker.sock.close()
            worker.sock = None

    def _forget_process(self, worker: _Worker) -> None:
        if worker.process is not None:
            self._poller.unregister(worker.process.pidfd)
            worker.process = None

    def _release(self) -> None:
        for worker in self._workers.values():
            self._disconnect(worker)
        for event in self._events:
            if isinstance(event, Lent) and event.fd is not None:
                os.close(event.fd)
