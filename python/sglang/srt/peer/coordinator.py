"""`Coordinator`: what lenders' and borrowers' coordinators have in common.

A coordinator is one thread beside an engine. It carries the messages of a `Lender`, or of `Borrower`s, over sockets,
and watches the processes on the other side. Owns the sockets, the timers and that thread; never touches the engine's
state or memory. The engine's calls are queued for the thread. Events are queued for the engine, which is notified and
takes them with `poll` in its own steps.

    engine (lender)                                                              engine (borrower)
      │ lend, recall, reclaim       ┌────────────┐  heartbeats  ┌──────────────┐  set_demand,     │
      ├────────────────────────────►│   Lender   │◄────────────►│   Borrower   │  give_back       │
      │                             │ Coordinator│   ZeroMQ     │  Coordinator │◄─────────────────┤
      │◄────────────────────────────│            │              │              │─────────────────►│
      │ LendOutcome, SlabGivenBack, └────────────┘              └──────────────┘  SlabLent,       │
      ▼ SlabQuarantined,              pidfds  ▲                    ▲ pidfds       SlabsWanted,    ▼
        DemandChanged                         └─ Fetch ── slab fd ─┘              SlabRecalled, SlabLost,
                                                  slab channel                    LenderSilent

In strict mode no borrower fetches: a `CopySession` sends staging memory over the slab channel, and the `Copier` has
its connection from then on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

from sglang.srt.peer.protocol.messages import MAX_HEARTBEAT_BYTES
from sglang.srt.utils.peer_endpoint import PeerError

_Event = TypeVar("_Event")
# Messages that one turn takes from one socket: a sender of more does not keep the others waiting.
MESSAGES_PER_TURN = 1000
# Heartbeats that wait for the other side. Each holds all that older ones hold.
_QUEUED_HEARTBEATS = 8
_TURNS_PER_HEARTBEAT = 4
_CLOSE_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)


class Coordinator(Generic[_Event]):
    """name: of the thread. notify: called from the thread when there are events. heartbeat_s: the interval of
    heartbeats. Raises PeerError where a process's death cannot be proven.

    counters: "rejected" are messages that cannot be decoded or do not come from their alleged sender."""

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
        """What has happened since the last call. Raises RuntimeError if the thread has died."""
        if self._error is not None:
            raise RuntimeError(f"the thread {self._thread.name} has died") from self._error
        return [self._events.popleft() for _ in range(len(self._events))]

    def status(self) -> dict[str, int]:
        """For people: counts, as of the thread's last turn."""
        return self._status

    def close(self) -> None:
        """Ends the thread and removes its sockets. The other side is told nothing: what is lent stays lent until this
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
        """Have the thread run a command in its next turn."""
        self._commands.put(command)
        os.eventfd_write(self._wake, 1)

    # -- on the thread ------------------------------------------------------------------------------------------

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

    def _reject(self, reason: object) -> None:
        self.counters["rejected"] += 1
        logger.debug("a peer's message is ignored: %s", reason)

    def _turn(self, ready: dict[Any, int]) -> list[_Event]:
        """ready: sockets and descriptors at which something has happened. Returns new events."""
        raise NotImplementedError

    def _describe(self) -> dict[str, int]:
        """The counts of `status`, but for `counters`."""
        raise NotImplementedError

    def _release(self) -> None:
        """The thread ends: give up what the subclass owns."""
        raise NotImplementedError
