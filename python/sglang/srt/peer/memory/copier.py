"""`Copier`: a lender's thread that copies between slabs and the staging memory of borrowers that map no slab (strict
mode). Owns the connections over which it is asked to, and its mappings of slabs and of staging memory.

    borrower's device pool ◄── its own copy ──► staging memory ◄── the copier's ──► slab
                                  (the borrower's, mapped by both)

Every request is checked. A borrower that has hung up has given up its requests: they are not carried out any more.
Thus no request that the borrower has given up is carried out after one of its next connection. The copier carries out
one request at a time, of at most a staging memory's size; `set_grants` waits for that one.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import select
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from sgl_kernel.kvcacheio import KVPages, copy_pages
from sglang.srt.peer.memory import slab_channel
from sglang.srt.peer.memory.slab_channel import ChannelError
from sglang.srt.peer.memory.slabs import SlabError, SlabFiles, SlabRange
from sglang.srt.peer.protocol.lender import CopyGrant
from sglang.srt.peer.protocol.messages import BorrowerId, Copied, Copy, CopyRefused

_CLOSE_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)


class _Session:
    def __init__(self, sock: socket.socket, borrower: BorrowerId, staging: SlabRange) -> None:
        self.sock = sock
        self.borrower = borrower
        self.staging = staging

    def close(self) -> None:
        self.sock.close()
        self.staging.close()


class Copier:
    """The thread begins with the first connection.

    counters: "copied_bytes"; "refused_copies", which are alarms, but for those that come when a lease has just
    ended."""

    def __init__(self, slabs: SlabFiles) -> None:
        self.counters = Counter(copied_bytes=0, refused_copies=0)
        self._slab_fd = slabs.fileno
        self._slabs = SlabRange(slabs.num_slabs, slabs.slab_bytes)
        # Held while something is copied.
        self._lock = threading.Lock()
        self._grants: Mapping[int, CopyGrant] = {}
        self._sessions: dict[int, _Session] = {}
        self._new: queue.SimpleQueue[_Session] = queue.SimpleQueue()
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not at the end of the process: the thread may still be polling it.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._poll.register(self._wake, select.POLLIN)
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_sessions(self) -> int:
        return len(self._sessions) + self._new.qsize()

    def set_grants(self, grants: Mapping[int, CopyGrant]) -> None:
        """grants: by number of the lease. When it returns, nothing is copied for any other lease any more."""
        if grants != self._grants:
            with self._lock:
                self._grants = grants

    def adopt(self, sock: socket.socket, borrower: BorrowerId, staging: SlabRange) -> None:
        """Copy for a borrower over this connection. staging: one slab, mapped. The copier owns connection and staging
        memory from now on."""
        session = _Session(sock, borrower, staging)
        if self._is_closing:
            session.close()
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="peer-copier", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the borrower asks again
                logger.warning("a borrower's connection is closed: %s", error)
                session.close()
                return
            self._thread = thread
        self._new.put(session)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End all connections."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    # -- on the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for fd, events in self._poll.poll():
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                        self._take_new()
                    elif events & (select.POLLHUP | select.POLLERR):
                        self._end(fd, "the borrower has hung up")
                    else:
                        self._serve(fd)
        except BaseException:
            logger.exception("the copier has died: borrowers cannot reach what this worker has lent")
        finally:
            self._is_closing = True
            self._take_new()
            for fd in list(self._sessions):
                self._end(fd, "closing")
            self._slabs.close()

    def _take_new(self) -> None:
        while not self._new.empty():
            session = self._new.get()
            self._sessions[session.sock.fileno()] = session
            self._poll.register(session.sock.fileno(), select.POLLIN)

    def _serve(self, fd: int) -> None:
        session = self._sessions[fd]
        try:
            message, stray = slab_channel.receive(session.sock, Copy)
            if stray is not None:
                os.close(stray)
            answer = self._answer(session, message)
            if not slab_channel.send(session.sock, answer):
                raise ChannelError("the borrower does not take answers")
        except BlockingIOError:
            pass
        except ChannelError as error:
            self._end(fd, error)

    def _answer(self, session: _Session, message: Copy) -> Copied | CopyRefused:
        with self._lock:
            reason = self._refusal(session, message)
            if reason is None:
                try:
                    self._copy(session, message)
                    return Copied(message.sequence)
                except SlabError as error:
                    reason = str(error)  # not host memory: a lender on a GPU copies for no borrower
                except Exception as error:  # a bug here must not end the copies of other borrowers
                    logger.exception("a copy failed")
                    reason = f"it failed: {error}"[:400]
        self.counters["refused_copies"] += 1
        logger.warning("a copy for %s is refused: %s", session.borrower.name, reason)
        return CopyRefused(message.sequence, reason)

    def _refusal(self, session: _Session, message: Copy) -> str | None:
        """Why a request must not be carried out; None: it may be."""
        grant = self._grants.get(message.number)
        if grant is None or grant.borrower != session.borrower or not hmac.compare_digest(grant.token, message.token):
            return f"lease {message.number} is not this borrower's, or has ended"
        if message.page_bytes > self._slabs.slab_bytes:
            return f"a page of {message.page_bytes} bytes is larger than a slab of {self._slabs.slab_bytes}"
        part_bytes, rest = divmod(message.page_bytes, message.parts)
        if rest or message.first_byte + message.run_bytes > part_bytes:
            return f"{message.run_bytes} bytes from {message.first_byte} are not in a part of a page of {part_bytes}"
        if len(message.pages) % 4:
            return "page numbers are 4 bytes each"
        pages = np.frombuffer(message.pages, np.int32)
        num_pages = self._slabs.slab_bytes // message.page_bytes
        if len(pages) and (pages.min() < 0 or pages.max() >= num_pages):
            return f"there are pages 0 to {num_pages - 1}, not {pages.min()} to {pages.max()}"
        end = message.staging_byte + message.parts * message.run_bytes * len(pages)
        if end > session.staging.slab_bytes:
            return f"the staging memory ends at {session.staging.slab_bytes}, not at {end}"
        return None

    def _copy(self, session: _Session, message: Copy) -> None:
        slab = self._grants[message.number].slab
        if not self._slabs.is_mapped(slab):
            self._slabs.map(slab, self._slab_fd(slab))
        pages = torch.from_numpy(np.frombuffer(message.pages, np.int32).astype(np.int64))
        first, run_bytes = message.first_byte, message.run_bytes
        num_bytes = message.parts * run_bytes * len(pages)
        staging = session.staging.slab(0)[message.staging_byte : message.staging_byte + num_bytes]
        num_pages = self._slabs.slab_bytes // message.page_bytes
        parts = self._slabs.slab(slab)[: num_pages * message.page_bytes].reshape(num_pages, message.parts, -1)
        inside = _as_pages(parts[:, :, first : first + run_bytes])
        outside = _as_pages(staging.reshape(len(pages), message.parts, run_bytes))
        in_turn = torch.arange(len(pages))
        if message.to_slab:
            copy_pages(outside, inside, in_turn, pages)
        else:
            copy_pages(inside, outside, pages, in_turn)
        self.counters["copied_bytes"] += num_bytes

    def _end(self, fd: int, reason: object) -> None:
        self._poll.unregister(fd)
        session = self._sessions.pop(fd)
        session.close()
        logger.debug("no more copies for %s: %s", session.borrower.name, reason)


def _as_pages(runs: np.ndarray) -> KVPages:
    """runs: (num_pages, parts, bytes)."""
    return KVPages(*torch.from_numpy(runs)[None].unbind(2))
