"""`CopySession`: a borrower's end of a connection over which a lender is asked for copies (strict mode, `copier.py`).
Owns the connection and the staging memory. Knows no pools.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang.srt.peer.memory import slab_channel
from sglang.srt.peer.memory.slab_channel import ChannelError
from sglang.srt.peer.memory.slabs import SlabRange
from sglang.srt.peer.protocol.messages import BorrowerId, Copied, Copy, CopyRefused, LeaseId, Refused, Stage, Staged

# A request that a lender has not answered after this time has failed. The largest, a staging memory of 8 MiB, takes
# milliseconds.
COPY_TIMEOUT_S = 1.0
# How many requests are under way at a time. The lender always has work, and neither side's socket fills up.
_WINDOW = 16


class SilentLenderError(ChannelError):
    """The lender has not answered in time. It may have carried out the request, or may do so later."""


class LeaseEndedError(ChannelError):
    """The lender answers, and has no such lease any more."""


class CopyFailure(NamedTuple):
    """A request that was refused, and why. number: among those that were passed to `copy`."""

    number: int
    reason: str


class StrictSlab(NamedTuple):
    """What a borrower needs to have a slab copied."""

    # Path of the slab channel of the lender's life.
    slab_socket: str
    borrower: BorrowerId
    lease: LeaseId
    token: bytes


class CopySession:
    """staging_bytes: a multiple of the system's page. timeout_s: for each answer; None for COPY_TIMEOUT_S. cancel: a
    file descriptor; once it is readable, nothing is waited for any more. Raises ChannelError if the lender is gone or
    `cancel` is readable, LeaseEndedError if it knows no such lease, SilentLenderError if it does not answer in time,
    and SlabError if there is no memory."""

    def __init__(
        self,
        slab: StrictSlab,
        staging_bytes: int,
        timeout_s: float | None = None,
        cancel: int | None = None,
    ) -> None:
        self._timeout_s = COPY_TIMEOUT_S if timeout_s is None else timeout_s
        self._cancel = cancel
        self._next_sequence = 0
        self._staging = SlabRange.owned(1, staging_bytes)
        try:
            self._sock = slab_channel.connect(slab.slab_socket)
        except ChannelError:
            self._staging.close()
            raise
        stage = Stage(
            name=slab.borrower.name,
            incarnation=slab.borrower.incarnation,
            epoch=slab.lease.epoch,
            number=slab.lease.number,
            token=slab.token,
            size_bytes=staging_bytes,
        )
        try:
            deadline = time.monotonic() + self._timeout_s
            self._send(stage, deadline, self._staging.fileno(0))
            if isinstance(self._receive(Staged | Refused, deadline), Refused):
                raise LeaseEndedError(f"lease {slab.lease.number} has ended")
        except ChannelError:
            self.close()
            raise

    @property
    def staging(self) -> np.ndarray:
        """(staging_bytes,) uint8."""
        return self._staging.slab(0)

    def copy(self, requests: Sequence[Callable[[int], Copy]]) -> CopyFailure | None:
        """requests: each makes a request from its sequence number. Returns when all are answered: the first refusal,
        or None. Raises ChannelError and SilentLenderError as above; then it is not known which
        requests were carried out, and the session must not be used again."""
        first = self._next_sequence
        failure = None
        for answered in range(len(requests)):
            deadline = time.monotonic() + self._timeout_s
            while self._next_sequence < first + min(answered + _WINDOW, len(requests)):
                self._send(requests[self._next_sequence - first](self._next_sequence), deadline)
                self._next_sequence += 1
            answer = self._receive(Copied | CopyRefused, deadline)
            if answer.sequence != first + answered:
                raise ChannelError(f"request {first + answered} got the answer to request {answer.sequence}")
            if isinstance(answer, CopyRefused):
                failure = failure or CopyFailure(answered, answer.reason)
        return failure

    def close(self) -> None:
        self._sock.close()
        self._staging.close()

    def _send(self, message: Any, deadline: float, fd: int | None = None) -> None:
        while not slab_channel.send(self._sock, message, fd):
            self._wait(select.POLLOUT, deadline)

    def _receive(self, kind: Any, deadline: float) -> Any:
        while True:
            try:
                message, stray = slab_channel.receive(self._sock, kind)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if stray is not None:
                os.close(stray)
            return message

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        if self._cancel is not None:
            poll.register(self._cancel, select.POLLIN)
        ready = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
        if self._cancel in ready:
            raise ChannelError("the wait for the lender was cancelled")
        if not ready:
            raise SilentLenderError(f"the lender has not answered for {self._timeout_s:g} s")
