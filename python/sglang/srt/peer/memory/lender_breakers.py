"""`LenderBreakers`: which strict slabs a borrower has copied by their lenders, and which it leaves alone.

Owns a breaker per lender's life, and the thread that probes a lender while its breaker is open. No request waits for
a probe: it is a connection of its own, over which one byte of a slab is copied. Knows no pages. Decides nothing about
residency: `BorrowedMemory` reports slabs that are left alone as not mapped.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from sglang.srt.peer.memory.copy_session import CopySession, LeaseEndedError, StrictSlab
from sglang.srt.peer.memory.slab_channel import ChannelError
from sglang.srt.peer.memory.slabs import GRANULARITY, SlabError
from sglang.srt.peer.protocol.lender_breaker import LenderBreaker
from sglang.srt.peer.protocol.messages import Copy
from sglang.srt.utils.time_units import Seconds

# A probe that is not answered by then begins anew. A lender that goes on answers the probe that waits for it at once.
PROBE_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 10.0


class LenderBreakers:
    """slabs: the pool's strict slabs, by place. notify: called from links' and probes' threads when a slab is left
    alone or used again. Safe to call from several threads."""

    def __init__(self, slabs: Sequence[StrictSlab | None], notify: Callable[[], None] = lambda: None) -> None:
        self._slabs = slabs
        self._notify = notify
        self._lock = threading.Lock()
        # By slab socket, that is, by lender's life.
        self._breakers: dict[str, LenderBreaker] = {}
        self._probes: dict[str, threading.Thread] = {}
        # Slabs whose lenders have refused to copy them: their leases have ended.
        self._refused: set[StrictSlab] = set()
        # Readable once probes are to end.
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._closing).atexit = False

    def reason(self, slab_socket: str) -> str:
        """Why a lender's life is left alone; empty if it is not."""
        breaker = self._breakers.get(slab_socket)
        return breaker.reason if breaker is not None else ""

    @property
    def all_are_usable(self) -> bool:
        """Whether no lender is left alone, and no slab was refused."""
        return not self._probes and not self._refused

    def is_usable(self, slab: StrictSlab) -> bool:
        """Whether pages of a slab may be copied."""
        return slab not in self._refused and not self.reason(slab.slab_socket)

    def open(self, slab_socket: str, reason: str) -> None:
        """A lender's life does not answer, or cannot be asked. It is left alone until it answers a probe."""
        with self._lock:
            self._forget_old()
            breaker = self._breakers.setdefault(slab_socket, LenderBreaker())
            if not breaker.open(Seconds(time.monotonic()), reason):
                return
            thread = threading.Thread(target=self._probe, args=(slab_socket, breaker), name="peer-probe", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is left: it is asked on, until its next failure
                breaker.close(Seconds(time.monotonic()))
                return
            self._probes[slab_socket] = thread
        self._notify()

    def refuse(self, slab: StrictSlab) -> None:
        """The lender refuses to copy a slab. The borrower is told later that its lease has ended."""
        with self._lock:
            self._refused.add(slab)
        self._notify()

    def forget(self, slab: StrictSlab) -> None:
        """The slab is not borrowed any more."""
        with self._lock:
            self._refused.discard(slab)

    def close(self) -> None:
        """End all probes."""
        os.eventfd_write(self._closing, 1)
        for thread in list(self._probes.values()):
            thread.join(_CLOSE_TIMEOUT_S)

    # -- on a probe's thread ------------------------------------------------------------------------------------

    def _probe(self, slab_socket: str, breaker: LenderBreaker) -> None:
        answers = False
        while not answers and not self._is_closing_after(breaker.pause_s):
            slab = next((s for s in self._slabs if s is not None and s.slab_socket == slab_socket), None)
            # Of a lender of which nothing is borrowed any more, nothing has to be known.
            answers = slab is None or self._answers(slab)
            if not answers:
                breaker.fail_probe()
        if not answers:
            return
        with self._lock:
            del self._probes[slab_socket]
            breaker.close(Seconds(time.monotonic()))
        self._notify()

    def _answers(self, slab: StrictSlab) -> bool:
        """Whether the lender answers; it may take any time."""
        try:
            session = CopySession(slab, GRANULARITY, PROBE_TIMEOUT_S, self._closing)
            try:
                session.copy([lambda sequence: _one_byte(slab, sequence)])
            finally:
                session.close()
        except LeaseEndedError:
            return True
        except (ChannelError, SlabError):
            return False
        return True

    def _is_closing_after(self, seconds: float) -> bool:
        """Wait, but for no longer than until `close`."""
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def _forget_old(self) -> None:
        """Forget lenders' lives of which nothing is borrowed any more."""
        lives = {slab.slab_socket for slab in self._slabs if slab is not None} | self._probes.keys()
        for slab_socket in self._breakers.keys() - lives:
            del self._breakers[slab_socket]


def _one_byte(slab: StrictSlab, sequence: int) -> Copy:
    return Copy(
        sequence=sequence,
        to_slab=False,
        number=slab.lease.number,
        token=slab.token,
        page_bytes=1,
        parts=1,
        first_byte=0,
        run_bytes=1,
        staging_byte=0,
        pages=np.zeros(1, np.int32).tobytes(),
    )
