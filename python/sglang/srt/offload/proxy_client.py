"""`ProxyClient`: the engine's end of one session with an offload proxy. Owns the socket and the unanswered messages.

A proxy that is left alone is asked only for a sign of life until it is heard again. Messages that lend it no pages
count 0 blocks then, those under way too, and so do messages that were not sent yet. When the stream ends, all
unanswered messages count 0 blocks. A proxy closes the stream after its last write, and the system closes that of a
dead proxy. From then on the pages are the engine's again.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload import wire

# Seconds for the first answer. The proxy asks the store first whether it is up.
_HELLO_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class ProxyClient:
    """on_lost: called once, from the reading thread, when the session has ended without `shut`. place: where the
    proxy is, for messages."""

    def __init__(
        self, sock: socket.socket, hello: wire.Hello, fd: int, on_lost: Callable[[], None], place: str
    ) -> None:
        """Raises StoreError if the proxy refuses the session, or if the other side is no proxy."""
        self.stats: dict[str, int] = {}
        self.is_lost = False
        self._sock = sock
        self._on_lost = on_lost
        self._lock = threading.Condition()
        # Messages that are not sent yet, by a thread that may have to wait for the proxy.
        self._outbox: deque[wire.ToProxy] = deque()
        self._next_id = 0
        self._waiting: dict[int, Callable[[int], None]] = {}
        # The unanswered messages that lend no pages; and those that were answered here, whose answers come too late.
        self._questions: set[int] = set()
        self._answered: set[int] = set()
        self._is_left_alone = False
        # When the first question since the last answer was asked; None: nothing was.
        self._asked_at: float | None = None
        try:
            sock.settimeout(_HELLO_TIMEOUT_S)
            wire.send(sock, hello, (fd,))
            answer, _ = wire.receive(sock, wire.Welcome | wire.Refused)
            sock.settimeout(None)
        except wire.WireError as error:
            sock.close()
            raise StoreError(f"{place} does not answer: {error}") from error
        if isinstance(answer, wire.Refused):
            sock.close()
            raise StoreError(f"no session with the offload proxy: {answer.reason}")
        self.codec: str = answer.codec
        try:
            threading.Thread(target=self._send, name="proxy-messages", daemon=True).start()
            threading.Thread(target=self._read, name="proxy-replies", daemon=True).start()
        except RuntimeError:
            # The first one ends. Nothing was asked, so the proxy writes nothing.
            with self._lock:
                self.is_lost = True
                self._lock.notify_all()
            sock.close()
            raise

    def ask(self, make: Callable[[int], wire.ToProxy], on_end: Callable[[int], None]) -> int:
        """Send a message and return its id. on_end(count) follows from another thread, or from this one if the
        session is lost. make: id -> message."""
        with self._lock:
            id = self._next_id
            self._next_id += 1
            message = make(id)
            is_asked = not (self.is_lost or self._is_left_alone)
            if is_asked:
                self._waiting[id] = on_end
                if not isinstance(message, wire.Get | wire.Put):
                    self._questions.add(id)
                self._note_question()
                self._outbox.append(message)
                self._lock.notify_all()
        if not is_asked:
            on_end(0)
        return id

    @property
    def silent_s(self) -> float:
        """How long the first question since the last answer has waited; 0 if there is none."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def leave_alone(self) -> None:
        """Ask nothing until the proxy is heard again, except for a sign of life."""
        with self._lock:
            self._is_left_alone = True
            # What was sent may still be given up, and answered late.
            unsent = [m for m in self._outbox if not isinstance(m, wire.Cancel)]
            self._outbox = deque([*(m for m in self._outbox if isinstance(m, wire.Cancel)), wire.GetStats()])
            self._lock.notify_all()
            unsent_ids = {m.id for m in unsent if not isinstance(m, wire.GetStats)}
            ended = [self._waiting.pop(id) for id in self._questions | unsent_ids]
            self._answered |= self._questions - unsent_ids
            self._questions = set()
        for on_end in ended:
            on_end(0)

    def tell(self, message: wire.ToProxy) -> None:
        """Send a message that has no answer of its own, soon."""
        with self._lock:
            self._outbox.append(message)
            self._lock.notify_all()

    def request_stats(self) -> None:
        """Ask for statistics, unless messages before have not been sent. Any answer shows that the proxy is alive."""
        with self._lock:
            self._note_question()
            if not self._outbox:
                self._outbox.append(wire.GetStats())
                self._lock.notify_all()

    def shut(self) -> None:
        """End the session. Unanswered messages end after the proxy's last write."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _note_question(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def _send(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._outbox or self.is_lost)
                if self.is_lost:
                    return
                message = self._outbox.popleft()
            try:
                wire.send(self._sock, message)
            except wire.WireError:
                self.shut()  # the reading thread sees the end and reports it
                return

    def _read(self) -> None:
        try:
            while True:
                message, _ = wire.receive(self._sock, wire.ToEngine)
                self._asked_at, self._is_left_alone = None, False
                if isinstance(message, wire.Stats):
                    self.stats = message.values
                    continue
                with self._lock:
                    self._questions.discard(message.id)
                    if message.id in self._answered:
                        self._answered.discard(message.id)
                        continue
                    on_end = self._waiting.pop(message.id)
                on_end(message.count)
        except (wire.WireError, KeyError) as error:
            logger.debug("session with the offload proxy ends: %s", error)
        with self._lock:
            self.is_lost = True
            waiting, self._waiting = self._waiting, {}
            self._lock.notify_all()
        self._sock.close()
        for on_end in waiting.values():
            on_end(0)
        self._on_lost()
