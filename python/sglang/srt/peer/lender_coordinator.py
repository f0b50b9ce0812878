"""`LenderCoordinator`: a lender's side of the heartbeats and of the slab channel.

Owns the sockets that borrowers connect to, their connections, and the `Copier` of strict leases. Decides nothing
about slabs: the `Lender` does.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import sleep as _sleep
from typing import Any

import msgspec
import zmq

from sglang.srt.peer.coordinator import MESSAGES_PER_TURN, Coordinator
from sglang.srt.peer.memory import slab_channel
from sglang.srt.peer.memory.copier import Copier
from sglang.srt.peer.memory.slab_channel import ChannelError, Process
from sglang.srt.peer.memory.slabs import SlabError, SlabFiles, SlabRange
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender import Lender, LenderEvent, LenderLimits, LenderTiming, SlabQuarantined
from sglang.srt.peer.protocol.messages import (
    BorrowerHeartbeat,
    BorrowerId,
    Fetch,
    LenderHeartbeat,
    Refused,
    Slab,
    Stage,
    Staged,
)
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.peer_endpoint import PeerError, check_endpoint, check_unused

# To the slab channel, of strangers too. A borrower needs one, and two more in strict mode.
_MAX_CONNECTIONS = 64
# Of one borrower's connection. It is the borrower's memory, and takes this process addresses.
_MAX_STAGING_BYTES = 1 << 30
# While no descriptor is left.
_ACCEPT_PAUSE_S = 0.1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BorrowerHeartbeat)
logger = logging.getLogger(__name__)


class _Connection:
    """To the slab channel."""

    def __init__(self, sock: socket.socket, process: Process) -> None:
        self.sock = sock
        self.process = process
        # None until the process has shown the token of a lease.
        self.borrower: BorrowerId | None = None


class LenderCoordinator(Coordinator[LenderEvent]):
    """endpoint: where borrowers connect, see `check_endpoint`. Port 0 is any free port, and the attribute has it
    then. directory: a private one, for the slab channel's socket. slabs: what can be lent. strict: see `Lender`.
    Raises PeerError.

    counters: "refused" are requests for memory, or for copies, that were refused."""

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        slabs: SlabFiles,
        notify: Callable[[], None] = lambda: None,
        strict: bool = False,
        timing: LenderTiming | None = None,
        limits: LenderLimits | None = None,
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
            num_slabs=slabs.num_slabs,
            slab_bytes=slabs.slab_bytes,
            make_token=partial(secrets.token_bytes, 16),
            strict=strict,
            timing=timing,
            slab_socket=slab_socket,
        )
        self._lender.limits = limits or LenderLimits()
        self.counters["refused"] = 0
        self._slabs = slabs
        self._copier = Copier(slabs)
        self._routes: dict[BorrowerId, bytes] = {}
        # By file descriptor.
        self._connections: dict[int, _Connection] = {}
        # Of borrowers that have shown a lease.
        self._processes: dict[BorrowerId, Process] = {}
        self._router = self._open(zmq.ROUTER)
        # A route is a secret that a borrower chooses: a new connection with the same route is the same borrower.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # What is sent to a borrower whose connection has ended fails.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(endpoint)
            self._listener = slab_channel.listen(slab_socket)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise PeerError(f"a lender cannot listen on {endpoint} and {slab_socket}: {error}") from error
        self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        self._start()

    def lend(self, slabs: Sequence[int]) -> None:
        """See `Lender.lend`. Until a `LendOutcome` keeps them, these slabs are not the engine's."""
        chosen = tuple(slabs)
        self._submit(lambda: self._lender.lend(chosen, monotonic()))

    def recall(self, num_slabs: int, timeout_s: float) -> None:
        """See `Lender.recall`."""
        self._submit(lambda: self._lender.recall(num_slabs, monotonic() + timeout_s))

    def reclaim(self, slab: int) -> None:
        """See `Lender.reclaim`."""
        self._submit(lambda: self._lender.reclaim(slab))

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
                self._lender.on_borrower_death(borrower)
        self._lender.tick(monotonic())
        # Before the engine hears of a slab that was given back: nothing is copied to it any more.
        self._copier.set_grants(self._lender.copy_grants())
        self._forget_strangers()
        for borrower, message in self._lender.take_outgoing(monotonic()):
            self._send(borrower, message)
        events = self._lender.take_events()
        for event in events:
            if isinstance(event, SlabQuarantined):
                logger.error("slab %d is quarantined: %s has not given it back in time", event.slab, event.borrower)
        return events

    def _describe(self) -> dict[str, int]:
        """Slabs by state, borrowers, counters, also of copies."""
        states = Counter(self._lender.states)
        slabs = {f"{state.name.lower()}_slabs": states[state] for state in LeaseState}
        counts = {"borrowers": self._lender.num_usable_borrowers, "wanted_slabs": self._lender.num_wanted}
        return {**slabs, **counts, **self._lender.counters, **self._copier.counters}

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _decoder.decode(b"".join(frames))
            except msgspec.DecodeError as error:
                self._reject(error)
                continue
            borrower = BorrowerId(message.register.name, message.register.incarnation)
            if self._routes.get(borrower, route) != route:
                self._reject(f"another sender is {borrower}")
                continue
            self._lender.receive(message, monotonic())
            if borrower in self._lender.borrowers:
                self._routes[borrower] = route

    def _send(self, borrower: BorrowerId, message: LenderHeartbeat) -> None:
        try:
            self._router.send_multipart([self._routes[borrower], _encoder.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            pass  # too much waits for the borrower: the next heartbeat will do
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lender.on_borrower_unreachable(borrower)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                _sleep(_ACCEPT_PAUSE_S)  # the connection waits, and would wake the thread at once
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
        """Answer what has come over a connection."""
        sock = self._connections[fd].sock
        try:
            while fd in self._connections:
                message, sent_fd = slab_channel.receive(sock, Fetch | Stage)
                try:
                    if isinstance(message, Stage):
                        self._stage(fd, message, sent_fd)
                    else:
                        self._send_slab(self._connections[fd], message)
                finally:
                    if sent_fd is not None:
                        os.close(sent_fd)
        except BlockingIOError:
            pass
        except ChannelError as error:
            self._disconnect(fd, error)

    def _send_slab(self, connection: _Connection, message: Fetch) -> None:
        slab = self._lender.allow_fetch(message) if self._may_be_sender(message, connection) else None
        if slab is None:
            self._refuse(connection, message)
            return
        self._identify(connection, BorrowerId(message.name, message.incarnation))
        # If it does not arrive, the borrower asks again.
        slab_channel.send(connection.sock, Slab(message.number), self._slabs.fileno(slab))

    def _stage(self, fd: int, message: Stage, staging_fd: int | None) -> None:
        """Hand a connection over to the copier."""
        connection = self._connections[fd]
        is_allowed = self._may_be_sender(message, connection) and self._lender.may_stage(message)
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

    def _may_be_sender(self, message: Fetch | Stage, connection: _Connection) -> bool:
        """Whether the connection may be the borrower's that the message names; its token is the proof."""
        borrower = BorrowerId(message.name, message.incarnation)
        known = self._processes.get(borrower)
        is_its_process = known is None or known.pid == connection.process.pid
        return connection.borrower in (None, borrower) and is_its_process

    def _identify(self, connection: _Connection, borrower: BorrowerId) -> None:
        """The connection is proven to be a borrower's: watch its process."""
        connection.borrower = borrower
        if borrower not in self._processes:
            self._processes[borrower] = connection.process
            self._poller.register(connection.process.pidfd, zmq.POLLIN)

    def _refuse(self, connection: _Connection, message: Fetch | Stage) -> None:
        self.counters["refused"] += 1
        slab_channel.send(connection.sock, Refused(message.number))

    def _disconnect(self, fd: int, reason: object) -> None:
        connection = self._connections.pop(fd)
        self._poller.unregister(fd)
        connection.sock.close()
        logger.debug("process %d is disconnected: %s", connection.process.pid, reason)

    def _forget_strangers(self) -> None:
        """Processes and routes of what the lender does not know as a borrower any more."""
        for borrower in self._processes.keys() - self._lender.borrowers:
            self._poller.unregister(self._processes.pop(borrower).pidfd)
        for borrower in self._routes.keys() - self._lender.borrowers:
            del self._routes[borrower]

    def _release(self) -> None:
        # ZeroMQ leaves the file of its socket. It still listens: no other lender can have taken its place.
        scheme, _, path = self.endpoint.partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)
        self._copier.close()
        self._listener.close()
        for fd in list(self._connections):
            self._disconnect(fd, "closing")
        Path(self._slab_socket).unlink(missing_ok=True)
