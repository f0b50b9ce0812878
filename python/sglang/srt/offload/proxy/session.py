"""`Session`: one engine at the proxy. Owns its channel and its connections to the store; data plane and writer are
the proxy's.

All input is checked: a page outside of the pool, or a count that does not fit, ends the session. The session ends
when the engine closes its side, or begins another one. First its operations end, then the channel is closed. An
engine that sees the end of the stream therefore knows that no more writes to its pages follow.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing

from sglang.srt.mem_cache.block_keys import KEY_BYTES
from sglang.srt.offload import wire
from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.codec.registry import make_codec
from sglang.srt.offload.proxy.channel import Channel, SessionRefusedError
from sglang.srt.offload.proxy.plane import Plane, PlaneRefused, PlaneSession
from sglang.srt.offload.proxy.settings import MAX_BLOCK_BYTES, PIECE_BYTES, ProxySettings
from sglang.srt.offload.proxy.writer import Write, Writer
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.object_store import ObjectStore, ObjectWriter
from sglang.srt.offload.store.resp import RespConnection, StoreFailure, StoreLost
from sglang.srt.utils.rare_log import RareLog

# Of a message.
_MAX_NUMBER = 2**63 - 1

logger = logging.getLogger(__name__)


class Session:
    """A `Source` and a `Sink`: layout, codec, store. admit: called with the first message, before the session begins;
    raises SessionRefusedError."""

    layout: BlockLayout
    codec: Codec
    store: ObjectStore
    _fetches: PlaneSession

    def __init__(
        self,
        channel: Channel,
        admit: Callable[[wire.Hello, Session], Callable[[float], bool]],
        address: StoreAddress,
        plane: Plane,
        writer: Writer,
        settings: ProxySettings,
    ) -> None:
        self.channel = channel
        self._admit = admit
        self._address = address
        self._plane = plane
        self._writer = writer
        self._settings = settings
        # Connections by thread.
        self._writers: dict[int, ObjectWriter] = {}
        self._outbox: queue.SimpleQueue[wire.ToEngine | None] = queue.SimpleQueue()
        # What moves no block, carried out one after another on a thread of its own, because a store that does not
        # answer must delay nothing else; and what concerns the whole store and may take long, on another.
        self._questions: queue.SimpleQueue[wire.Exists | wire.Touch | None] = queue.SimpleQueue()
        self._chores: queue.SimpleQueue[wire.Clear | wire.Erase | wire.Limit | wire.GetStats | list[bytes] | None] = (
            queue.SimpleQueue()
        )
        self._usage: dict[str, int] = {}
        # Whether the engine's older sessions have ended, after so many seconds at most: until then they may write.
        self._have_older_ended: Callable[[float], bool] = lambda timeout_s: True
        self._lock = threading.Condition()
        # Operations that are not answered yet: the write, or a fetch's keys.
        self._open: dict[int, Write | list[bytes]] = {}
        # What is closed after the last operation, if the session came that far.
        self._ending = ExitStack()
        self._log = RareLog(logger)
        self.damaged_blocks = 0
        self.incomplete_blocks = 0

    def run(self) -> None:
        """Serve until the engine closes its side."""
        try:
            try:
                self._begin()
            except SessionRefusedError as error:
                logger.info("a session was refused: %s", error)
                self.channel.send(wire.Refused(str(error)))
                return
            threads: list[threading.Thread] = []
            try:
                for run in (self._send, self._answer_questions, self._do_chores):
                    threads.append(self._start_thread(run))
                self._serve()
            finally:
                self.channel.end_waits()
                self._questions.put(None)
                self._chores.put(None)
                for thread in threads[1:]:
                    thread.join()
                self._end()
                self._outbox.put(None)
                for sender in threads[:1]:
                    sender.join()
        except wire.WireError as error:
            logger.debug("session ends: %s", error)
        finally:
            self._ending.close()
            self.channel.close()

    def block_writer(self, thread: int) -> ObjectWriter:
        writer = self._writers.get(thread)
        if writer is None:
            writer = self._writers[thread] = self.store.writer()
        return writer

    def note_damaged(self, key: bytes, why: str) -> None:
        """Forget a block that does not verify, so that it can be stored again."""
        with self._lock:
            self.damaged_blocks += 1
        self._log.warn("damaged", "block %s does not verify, and is forgotten: %s", key.hex(), why)
        self.store.forget(key)

    def note_incomplete(self, key: bytes) -> None:
        """Forget the rest of a block that lacks a piece. Otherwise its manifest would make it look stored for
        ever."""
        with self._lock:
            self.incomplete_blocks += 1
        self.store.forget(key)

    def note_alive(self) -> None:
        self._outbox.put(wire.Stats(self._stats()))

    # -- inside -------------------------------------------------------------------------------------------------

    def _start_thread(self, run: Callable[[], None]) -> threading.Thread:
        """Start one of the session's. Its death ends the session, which would never answer. Raises WireError where
        none can be started."""

        def body() -> None:
            try:
                run()
            except Exception:
                logger.exception("a session ends, because a thread of it has died")
                self.channel.shut()

        thread = threading.Thread(target=body, name="session" + run.__name__, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("a session ends: %s", error)
            raise wire.WireError(f"the session has no thread: {error}") from error
        return thread

    def _begin(self) -> None:
        """Raises SessionRefusedError."""
        hello = self.channel.begin()
        if hello.version != wire.WIRE_VERSION:
            raise SessionRefusedError(f"engine and proxy differ: version {hello.version}, here {wire.WIRE_VERSION}")
        try:
            self.layout = BlockLayout.from_dict(hello.layout)
            self.codec = make_codec(hello.codec, self.layout, hello.mac_key)
        except (TypeError, ValueError) as error:
            raise SessionRefusedError(str(error)) from error
        if len(hello.mac_key) not in (0, wire.MAC_KEY_BYTES):
            raise SessionRefusedError(f"its mac_key has {len(hello.mac_key)} bytes, not {wire.MAC_KEY_BYTES}")
        if self.layout.piece_bytes > PIECE_BYTES or self.layout.block_bytes > MAX_BLOCK_BYTES:
            raise SessionRefusedError(
                f"its pieces or blocks are too large: at most {PIECE_BYTES} and {MAX_BLOCK_BYTES} bytes; lower "
                "block_tokens"
            )
        settings, room = self._settings, self._plane.num_slots
        if not settings.pipelined and self.layout.num_pieces > room - settings.receive_threads:
            raise SessionRefusedError(
                f"without pipelining a block of {self.layout.num_pieces} pieces has to fit into the buffers: raise "
                "their sizes"
            )
        self.channel.attach(hello, self.layout)
        self._have_older_ended = self._admit(hello, self)
        namespace = hashlib.blake2b(self.codec.spec.encode(), key=hello.namespace[:64], digest_size=16).digest()
        self.store = ObjectStore(
            self._address,
            namespace,
            self.layout.num_pieces,
            self._settings.store_timeout_s,
            self.codec.spec,
            self._settings.ttl_s,
        )
        self._ending.callback(self.store.close)
        if hello.is_first:
            try:
                self.store.check()
                self._refuse_sentinel()
            except StoreFailure as error:
                raise SessionRefusedError(f"the store cannot be used: {error}") from error
        try:
            self._fetches = self._plane.open(self, self.channel.link())
        except PlaneRefused as error:
            raise SessionRefusedError(str(error)) from error
        self._ending.callback(self._fetches.close)
        self.channel.linked(self._fetches)
        self.channel.send(wire.Welcome(self.codec.spec))

    def _refuse_sentinel(self) -> None:
        """A sentinel answers like a server until something is stored. Raises StoreRefused."""
        address = self._address
        if address.cluster or address.sentinels:
            return
        with closing(RespConnection(address, self._settings.store_timeout_s)) as connection:
            connection.refuse_sentinel()

    def _serve(self) -> None:
        while True:
            message = self.channel.receive()
            if isinstance(message, wire.Get | wire.Put):
                self._move(message)
            elif isinstance(message, wire.Cancel):
                self._give_up(message.id)
            elif isinstance(message, wire.Exists | wire.Touch):
                _split(message.keys)  # raises here, where it ends the session
                self._questions.put(message)
            else:
                if isinstance(message, wire.GetStats):
                    # A data plane that hangs is a proxy that hangs.
                    self._fetches.ping()
                self._chores.put(message)

    def _answer_questions(self) -> None:
        while (question := self._questions.get()) is not None:
            keys = _split(question.keys)
            if isinstance(question, wire.Exists):
                count = self.store.leading(keys, question.num_seen)
            else:
                count = self._touch(keys)
            self._outbox.put(wire.Done(question.id, 0 if count is None else 1 + count))

    def _do_chores(self) -> None:
        while (chore := self._chores.get()) is not None:
            if isinstance(chore, list):
                self.store.renew(chore)
            elif isinstance(chore, wire.Clear | wire.Erase | wire.Limit):
                self._outbox.put(wire.Done(chore.id, int(self._administer(chore))))
            elif self._chores.empty():
                # Not once for each that came while a store was slow.
                self._usage = {name: min(number, _MAX_NUMBER) for name, number in self.store.usage().items()}

    def _touch(self, keys: list[bytes]) -> int | None:
        """As `ObjectStore.touch`."""
        count, incomplete = self.store.touch(keys)
        for key in incomplete:
            self.note_incomplete(key)
        return count

    def _administer(self, chore: wire.Clear | wire.Erase | wire.Limit) -> bool:
        try:
            if isinstance(chore, wire.Clear):
                what = "emptied"
                self._wait_for_older_writes()
                self.store.clear()
            elif isinstance(chore, wire.Erase):
                what = "rid of a tenant's blocks"
                self._wait_for_older_writes()
                self.store.erase(chore.tenant)
            else:
                what = "asked how many blocks a tenant has"
                self.store.limit(chore.tenant, chore.num_blocks)
        except StoreFailure as error:
            logger.warning("the store was not %s: %s", what, error)
            return False
        return True

    def _wait_for_older_writes(self) -> None:
        """Of sessions whose connections were lost. Raises StoreFailure where one goes on."""
        if not self._have_older_ended(self._settings.store_timeout_s):
            raise StoreLost("the store has not answered a write of the engine's last session: try again later")

    def _move(self, message: wire.Get | wire.Put) -> None:
        keys = _split(message.keys)
        if message.id in self._open or not 0 <= message.id < 1 << 63:
            raise wire.WireError(f"{message.id} is the number of another message, or none")
        answer = lambda count: self._answer(message.id, count)  # noqa: E731
        if isinstance(message, wire.Get):
            self.channel.check_get(message, len(keys))
            self._open[message.id] = keys
            self._fetches.get(message.id, message.keys, message.pages, answer)
        else:
            self.store.limits.begin_write(message.tenant, keys)
            write = self._open[message.id] = Write(
                self, keys, self.channel.origin(message, len(keys)), answer, message.tenant
            )
            self._writer.submit(write)

    def _give_up(self, id: int) -> None:
        with self._lock:
            what = self._open.get(id)
        if isinstance(what, Write):
            what.is_given_up = True
        elif what is not None:
            self._fetches.give_up(id)

    def _answer(self, id: int, count: int) -> None:
        with self._lock:
            what = self._open.pop(id)
            self._lock.notify_all()
        if isinstance(what, list) and self._settings.ttl_s:
            self._chores.put(what[:count])
        self._outbox.put(wire.Done(id, count))

    def _send(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self.channel.send(message)
            except wire.WireError:
                return  # the reading side sees the end too

    def _end(self) -> None:
        """End everything that reads or writes the pool."""
        with self._lock:
            ids = list(self._open)
        for id in ids:
            self._give_up(id)
        with self._lock:
            self._lock.wait_for(lambda: not self._open)
        for writer in self._writers.values():
            writer.close()

    def _stats(self) -> dict[str, int]:
        """Statistics of the proxy and of the store, as of its last answer."""
        blocks = self._usage.get("keys", 0) // (self.layout.num_pieces + 1)
        mine = {
            "blocks": blocks,
            "damaged_blocks": self.damaged_blocks,
            "incomplete_blocks": self.incomplete_blocks,
        }
        return {**self._plane.stats(), **self._writer.stats(), **self.store.stats(), **mine, **self._usage}


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise wire.WireError(f"{len(keys)} bytes are no keys")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
