"""`BorrowerCoordinator`: a borrower's side of the heartbeats and of the slab channel, towards all its lenders.

Owns one ZeroMQ socket and one connection to the slab channel per lender. Decides nothing about slabs: a `Borrower`
per lender does.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from sglang.srt.peer.coordinator import MESSAGES_PER_TURN, Coordinator
from sglang.srt.peer.memory import slab_channel
from sglang.srt.peer.memory.slab_channel import ChannelError, Process
from sglang.srt.peer.protocol.borrower import (
    Borrower,
    BorrowerConfig,
    BorrowerEvent,
    LenderOffer,
    LenderSilent,
    SlabLent,
)
from sglang.srt.peer.protocol.leases import LeaseState
from sglang.srt.peer.protocol.lender_breaker import Silence
from sglang.srt.peer.protocol.messages import BorrowerId, Fetch, LeaseId, LenderHeartbeat, Refused, Slab
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.peer_endpoint import check_endpoint
from sglang.srt.utils.peer_timing import PeerTiming

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LenderHeartbeat)
logger = logging.getLogger(__name__)


class _LenderLink:
    """The way to one lender."""

    def __init__(self, borrower: Borrower, dealer: zmq.Socket) -> None:
        self.borrower = borrower
        self.dealer = dealer
        # The lender's life that the slab channel leads to.
        self.epoch = 0
        # Path of that life's slab channel; empty: not known.
        self.slab_socket = ""
        # The connection to it.
        self.sock: socket.socket | None = None
        # The process of that life.
        self.process: Process | None = None
        # Numbers of the leases whose memory was asked for.
        self.requested: set[int] = set()
        self.silence = Silence()


class BorrowerCoordinator(Coordinator[BorrowerEvent]):
    """endpoints: of the lenders, which may start later. name, page_bytes, num_ranks: see `Register`. id: of this
    life. Raises PeerError."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        page_bytes: int,
        notify: Callable[[], None] = lambda: None,
        heartbeat_s: float = PeerTiming.heartbeat,
        num_ranks: int = 0,
    ) -> None:
        for endpoint in endpoints:
            check_endpoint(endpoint)
        super().__init__("peer-borrower", notify, heartbeat_s)
        config = BorrowerConfig(name, time.monotonic_ns(), page_bytes, num_ranks, heartbeat_s)
        self._links: dict[str, _LenderLink] = {}
        for endpoint in dict.fromkeys(endpoints):
            dealer = self._open(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, b"p" + secrets.token_bytes(16))
            dealer.connect(endpoint)
            self._links[endpoint] = _LenderLink(Borrower(endpoint, config), dealer)
        self.id = BorrowerId(name, config.incarnation)
        self._start()

    def set_demand(self, lender: str, size_bytes: int, value_us: int = 0) -> None:
        """See `Borrower.set_demand`. lender: its endpoint."""
        borrower = self._links[lender].borrower
        self._submit(lambda: borrower.set_demand(size_bytes, value_us))

    def give_back(self, lender: str, lease: LeaseId) -> None:
        """See `Borrower.give_back`. lender: its endpoint."""
        borrower = self._links[lender].borrower
        self._submit(lambda: borrower.give_back(lease))

    def connected(self) -> dict[str, bool]:
        """For people. Lender -> whether it has answered and its process lives."""
        return {lender: link.process is not None for lender, link in self._links.items()}

    def offers(self) -> dict[str, LenderOffer | None]:
        """Lender -> what it has told of itself; None while it is not connected."""
        return {lender: link.borrower.offer if link.process else None for lender, link in self._links.items()}

    # -- on the thread ------------------------------------------------------------------------------------------

    def _turn(self, ready: dict[Any, int]) -> list[BorrowerEvent]:
        self._run_commands(ready)
        events: list[BorrowerEvent] = []
        for link in self._links.values():
            self._receive(link)
            if link.silence.begins(monotonic()) and link.process is not None:
                events.append(LenderSilent(link.borrower.lender))
            if link.sock is not None and link.sock.fileno() in ready:
                self._take_slabs(link)
            if link.process is not None and ready.get(link.process.pidfd, 0) & zmq.POLLIN:
                self._disconnect(link)
                self._forget_process(link)
                link.borrower.on_lender_death(link.epoch)
                link.slab_socket = ""
            try:
                self._fetch(link)
            except ChannelError as error:
                logger.debug("%s cannot be asked for slabs: %s", link.borrower.lender, error)
                self._disconnect(link)
            message = link.borrower.take_outgoing(monotonic())
            if message is not None:
                try:
                    link.dealer.send(_encoder.encode(message), zmq.NOBLOCK)
                except zmq.Again:
                    pass  # too much waits for the lender: the next heartbeat will do
            events += link.borrower.take_events()
        return events

    def _describe(self) -> dict[str, int]:
        """Leases by state."""
        states = Counter(state for link in self._links.values() for state in link.borrower.states())
        return {f"{state.name.lower()}_leases": states[state] for state in LeaseState}

    def _receive(self, link: _LenderLink) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                data = link.dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _decoder.decode(data)
            except msgspec.DecodeError as error:
                self._reject(error)
                continue
            if not link.borrower.receive(message, monotonic()):
                continue
            link.silence.end()
            link.slab_socket = message.slab_socket
            # What was refused, and is still granted, is asked for again.
            link.requested.clear()
            if link.borrower.epoch != link.epoch:
                self._disconnect(link)
                self._forget_process(link)
                link.epoch = link.borrower.epoch

    def _fetch(self, link: _LenderLink) -> None:
        """Ask for the memory of granted leases. The lender's process is watched from its first message on, so also
        before it has lent anything. Raises ChannelError."""
        if link.process is None and link.slab_socket:
            self._connect(link)
        borrower = link.borrower
        for lease in borrower.leases_to_fetch():
            if lease.number in link.requested:
                continue
            fetch = Fetch(
                name=borrower.config.name,
                incarnation=borrower.config.incarnation,
                epoch=borrower.epoch,
                number=lease.number,
                token=lease.token,
            )
            if not slab_channel.send(self._connect(link), fetch):
                return
            link.requested.add(lease.number)

    def _connect(self, link: _LenderLink) -> socket.socket:
        """The connection to the slab channel, made if there is none. Raises ChannelError."""
        if link.sock is None:
            sock = slab_channel.connect(link.slab_socket)
            try:
                process = slab_channel.peer_process(sock)
            except ChannelError:
                sock.close()
                raise
            link.sock = sock
            self._poller.register(sock.fileno(), zmq.POLLIN)
            if link.process is None:
                link.process = process
                self._poller.register(process.pidfd, zmq.POLLIN)
        return link.sock

    def _take_slabs(self, link: _LenderLink) -> None:
        assert link.sock is not None
        try:
            while True:
                message, fd = slab_channel.receive(link.sock, Slab | Refused)
                lease = LeaseId(link.epoch, message.number)
                if fd is not None and (isinstance(message, Refused) or not link.borrower.hold(lease, fd)):
                    os.close(fd)
        except BlockingIOError:
            pass
        except ChannelError as error:
            logger.debug("the slab channel to %s ends: %s", link.borrower.lender, error)
            self._disconnect(link)

    def _disconnect(self, link: _LenderLink) -> None:
        """The lender's process is still watched: the end of a connection does not end a lease."""
        link.requested.clear()
        if link.sock is not None:
            self._poller.unregister(link.sock.fileno())
            link.sock.close()
            link.sock = None

    def _forget_process(self, link: _LenderLink) -> None:
        if link.process is not None:
            self._poller.unregister(link.process.pidfd)
            link.process = None

    def _release(self) -> None:
        for link in self._links.values():
            self._disconnect(link)
        for event in self._events:
            if isinstance(event, SlabLent) and event.fd is not None:
                os.close(event.fd)
