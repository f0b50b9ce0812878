"""`RemoteStore`: the remote tier as a `BlockStore`. The offload proxy does the work; this class supervises it.

Owns the session with the proxy. Without a session operations count 0 blocks at once. A thread begins a new one, with
pauses from `RETRY_S` to `MAX_RETRY_S`. Reads that a lost session has not brought are asked of the next one, once, if
that begins within `ASK_AGAIN_S`. Never touches KV: the proxy writes into the host pool's pages itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang.srt.mem_cache.block_store import ExistsFailed, StoreError
from sglang.srt.mem_cache.storage.registry import StoreParams
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.offload import wire
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.codec.registry import codec_of_layers
from sglang.srt.offload.proxy_client import ProxyClient
from sglang.srt.offload.proxy_process import (
    InProcessProxy,
    KeptStore,
    OtherProxy,
    OwnProxy,
    ProxyElsewhere,
    ProxyPlace,
)
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.memory import available_memory
from sglang.srt.utils.rare_log import RareLog

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool_host import HostRegion, MHATokenToKVPoolHost

logger = logging.getLogger(__name__)

RETRY_S = 0.25
MAX_RETRY_S = 16.0
# A session that was shorter has not shown that the proxy works: the pauses do not begin anew.
_GOOD_SESSION_S = 10.0
ASK_AGAIN_S = 5.0
_CHECK_INTERVAL_S = 0.5
# Blocks of one message, so that a question of a request waits for few.
_TOUCHED_AT_ONCE = 64
# Statistics of a whole store, and those of this session alone.
_OF_STORE = frozenset(("blocks", "size_bytes", "limit_bytes", "keys", "evicted_keys"))
_OF_SESSION = frozenset(("read_errors", "write_errors", "proxy_sessions", "proxy_hangs"))
# Parts of the limit. A store that is filled up to the first, or evicts, is full until it is down to the second: one
# that evicts whole pieces may stay well below its limit.
_FULL_AT = 0.95
_ROOM_AT = 0.75


class RemoteStore:
    """hello: the first message, without the token. fd: the host pool's memory. first_page: see `HostRegion`, of the
    pages that are read and written. settings.hang_s: a proxy that has answered no question for this long is killed
    if the server has started it, and of one elsewhere the relay is. Another proxy is asked only for a sign of life
    until it is heard again; the pages that it has stay taken until it moves or ends."""

    def __init__(
        self,
        name: str,
        block_tokens: int,
        place: ProxyPlace,
        hello: wire.Hello,
        fd: int,
        settings: RemoteSettings,
        clock: Callable[[], float] = time.monotonic,
        first_page: int = 0,
    ) -> None:
        """Raises StoreError."""
        self.name = name
        self.block_tokens = block_tokens
        self.is_synchronous = settings.is_synchronous
        self._place = place
        self._hello = hello
        self._fd = fd
        self._first_page = first_page
        self._hang_s = settings.hang_s
        self._clock = clock
        self._has_own_proxy = isinstance(settings.proxy, OwnProxySettings)
        self._lock = threading.Lock()
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._is_connecting = False
        # When the session began.
        self._since = 0.0
        # Tenant -> the most blocks, which every session is told.
        self._limits: dict[bytes, int] = {}
        # Reads of a lost session that wait for the next one.
        self._unanswered: list[_Read] = []
        # Set when there is something to do before the next look at the proxy.
        self._wake = threading.Event()
        self._log = RareLog(logger, clock)
        self._closed = threading.Event()
        # As of the store's last answer: see `BlockStore`, and how many keys it has given up.
        self.has_room = True
        self._num_evicted: int | None = None
        # Looks in a row that found the proxy silent.
        self._num_silent = 0
        self._counters = {"read_errors": 0, "write_errors": 0, "proxy_sessions": 0, "proxy_hangs": 0}
        try:
            self._client: ProxyClient | None = self._connect()
            self.codec = self._client.codec
        except StoreError:
            place.close()
            raise
        threading.Thread(target=self._watch, name="proxy-watch", daemon=True).start()

    def exists(self, keys: Sequence[bytes]) -> int:
        """Raises ExistsFailed."""
        return self._told(partial(wire.Exists, keys=b"".join(keys)))

    def longest_seen(self, keys: Sequence[bytes], num_seen: int) -> int:
        """See WindowStore."""
        return self._told(partial(wire.Exists, keys=b"".join(keys), num_seen=num_seen))

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        ended = _Result()
        self.start_get(keys, frames, ended.put)
        return ended.wait()

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        """As `get`, without waiting: on_end(count) follows, from another thread. Several may be under way; the proxy
        takes them in order. Returns a function that gives the operation up; on_end follows all the same."""

        def ended(count: int) -> None:
            if count < len(keys):
                with self._lock:
                    self._counters["read_errors"] += 1
            on_end(count)

        read = _Read(partial(wire.Get, keys=b"".join(keys), pages=_pages(frames + self._first_page)), ended)
        self._ask_read(read)
        return partial(self._give_up, read)

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        count = self._wait(
            partial(wire.Put, keys=b"".join(keys), pages=_pages(frames + self._first_page), tenant=tenant)
        )
        if count < len(keys):
            with self._lock:
                self._counters["write_errors"] += 1
        return count

    def touch(self, keys: Sequence[bytes]) -> int:
        """See TouchedStore. Raises ExistsFailed."""
        count = 0
        # The front last, as `ObjectStore.touch`.
        for begin in reversed(range(0, len(keys), _TOUCHED_AT_ONCE)):
            part = keys[begin : begin + _TOUCHED_AT_ONCE]
            told = self._told(partial(wire.Touch, keys=b"".join(part)))
            count = told + (count if told == len(part) else 0)
        return count

    def erase(self, tenant: bytes, tier: Tier = Tier.REMOTE) -> bool:
        """See TenantStore."""
        is_erased = bool(self._wait(partial(wire.Erase, tenant=tenant)))
        if not is_erased:
            logger.warning("nothing, or not all, was erased from the remote store: it does not answer, or refuses")
        return is_erased

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        """See TenantStore. All servers that share the store and have the limit count together."""
        assert tier == Tier.REMOTE
        before = self._limits.pop(tenant, -1)
        is_set = bool(self._wait(partial(wire.Limit, tenant=tenant, num_blocks=num_blocks)))
        if not is_set:
            logger.warning("no limit was set in the remote store: it does not answer, or refuses")
            num_blocks = before
            self._tell_limit(tenant, before)
        if num_blocks >= 0:
            self._limits[tenant] = num_blocks
        return is_set

    def _tell_limit(self, tenant: bytes, num_blocks: int) -> None:
        if (client := self._client) is not None:
            client.ask(partial(wire.Limit, tenant=tenant, num_blocks=num_blocks), lambda _: None)

    def clear(self) -> bool:
        is_cleared = bool(self._wait(wire.Clear))
        if not is_cleared:
            logger.warning("the remote store was not emptied: it does not answer, or refuses")
        return is_cleared

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.shut()
        for read in self._take_unanswered(before=float("inf")):
            read.on_end(0)
        self._wake.set()
        self._place.close()

    def stats(self) -> dict[str, int]:
        """Of the proxy and the store, as of their last answer."""
        client = self._client
        values = {"blocks": 0, "size_bytes": 0, "limit_bytes": 0, **(client.stats if client is not None else {})}
        return {**values, **self._counters}

    @property
    def kept_store(self) -> KeptStore | None:
        """The store that was started for it, if it has a proxy of its own."""
        return self._place.kept if isinstance(self._place, OwnProxy | InProcessProxy) else None

    def is_of_all(self, name: str) -> bool:
        """Whether another session with the same settings tells the same under this name of `stats`."""
        if name in _OF_STORE:
            return True
        return name not in _OF_SESSION and not self._has_own_proxy

    # -- inside -------------------------------------------------------------------------------------------------

    def _told(self, make: Callable[[int], wire.ToProxy]) -> int:
        """How many blocks the store has. Raises ExistsFailed."""
        if (told := self._wait(make)) < 1:
            raise ExistsFailed("the remote store does not answer")
        return told - 1

    def _wait(self, make: Callable[[int], wire.ToProxy]) -> int:
        ended = _Result()
        client = self._client
        if client is None:
            return 0
        client.ask(make, ended.put)
        return ended.wait()

    def _ask_read(self, read: _Read) -> None:
        client = self._client
        if client is None:
            read.on_end(0)
            return

        def ended(count: int) -> None:
            if not (client.is_lost and self._keep(read)):
                read.on_end(count)

        id = client.ask(read.make, ended)
        with self._lock:
            read.asked = client, id
            is_given_up = read.is_given_up
        if is_given_up:
            client.tell(wire.Cancel(id))

    def _keep(self, read: _Read) -> bool:
        """Of a session that was lost: ask the next one, once. False if it ends."""
        with self._lock:
            if read.until or read.is_given_up or self._closed.is_set():
                return False
            read.until = self._clock() + ASK_AGAIN_S
            self._unanswered.append(read)
            return True

    def _give_up(self, read: _Read) -> None:
        with self._lock:
            read.is_given_up = True
            asked = read.asked
            if is_waiting := read in self._unanswered:
                self._unanswered.remove(read)
        if is_waiting:
            read.on_end(0)
        elif asked is not None:
            client, id = asked
            client.tell(wire.Cancel(id))

    def _take_unanswered(self, before: float) -> list[_Read]:
        """Those that may wait no longer than that."""
        with self._lock:
            taken = [read for read in self._unanswered if read.until <= before]
            self._unanswered = [read for read in self._unanswered if read.until > before]
        return taken

    def _begin_reconnecting(self) -> None:
        """On a thread of its own, as a proxy that hangs takes its time."""
        self._is_connecting = True
        try:
            threading.Thread(target=self._reconnect, name="proxy-connect", daemon=True).start()
        except RuntimeError as error:
            self._is_connecting = False
            self._note_out_of_reach(error)

    def _reconnect(self) -> None:
        """Begin a new session. Takes as long as a proxy that hangs lets it."""
        try:
            self._begin_session()
        except (StoreError, OSError, RuntimeError) as error:  # also of a system that has no descriptor or thread left
            self._note_out_of_reach(error)
        finally:
            self._is_connecting = False

    def _note_out_of_reach(self, error: Exception) -> None:
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._log.warn("connect", "the remote tier is out of reach: %s", error)

    def _begin_session(self) -> None:
        client = self._connect()
        with self._lock:
            is_used = not self._closed.is_set() and not client.is_lost
            if is_used:
                self._client = client
        if not is_used:
            client.shut()
        for tenant, num_blocks in list(self._limits.items()):
            self._tell_limit(tenant, num_blocks)
        for read in self._take_unanswered(before=float("inf")):
            self._ask_read(read)

    def _connect(self) -> ProxyClient:
        # Also after an attempt that failed, of which the proxy may know more.
        self._hello = msgspec.structs.replace(self._hello, epoch=self._hello.epoch + 1)
        client = ProxyClient(self._place.connect(), self._hello, self._fd, self._lost, str(self._place))
        self._since = self._clock()
        self._counters["proxy_sessions"] += 1
        if not self._hello.is_first:
            self._log.log(logging.INFO, "again", "the remote tier has an offload proxy again")
        self._hello = msgspec.structs.replace(self._hello, is_first=False)
        return client

    def _lost(self) -> None:
        with self._lock:
            self._client = None
            now = self._clock()
            self._retry_s = RETRY_S if now - self._since > _GOOD_SESSION_S else min(2 * self._retry_s, MAX_RETRY_S)
            self._retry_at = now + self._retry_s
        self._wake.set()
        if not self._closed.is_set():
            self._log.warn("lost", "the offload proxy has ended; a new session is begun")

    def _watch(self) -> None:
        """Ask the proxy for its statistics from time to time, and deal with a proxy that does not answer."""
        while not self._closed.is_set():
            # While reads wait for a session it is looked for more often.
            self._wake.wait(RETRY_S / 2 if self._unanswered else _CHECK_INTERVAL_S)
            self._wake.clear()
            for read in self._take_unanswered(before=self._clock()):
                read.on_end(0)
            if self._closed.is_set():
                break
            try:
                self._place.keep_alive()
            except StoreError as error:
                self._log.warn("store", "%s", error)
            client = self._client
            if client is None or client.is_lost:
                self._num_silent = 0
                if client is None and not self._is_connecting and self._clock() >= self._retry_at:
                    self._begin_reconnecting()
                continue
            self._look_at(client)

    def _look_at(self, client: ProxyClient) -> None:
        self._num_silent = self._num_silent + 1 if client.silent_s >= self._hang_s else 0
        if self._num_silent < 2:
            # Also if it is silent for the first time: this process may have stood still with the answer unread.
            self._look_for_room(client.stats)
            client.request_stats()
        elif self._num_silent == 2:
            with self._lock:
                self._counters["proxy_hangs"] += 1
            if not (what := self._place.stop_hung_proxy()):
                client.leave_alone()
                what = "it is asked nothing, and its pages stay taken, until it moves or is stopped"
            text = "the offload proxy has not answered for %g s: %s"
            self._log.log(logging.ERROR, "hang", text, self._hang_s, what)

    def _look_for_room(self, stats: Mapping[str, int]) -> None:
        if "evicted_keys" not in stats:
            return  # the store has not told
        limit_bytes, num_evicted = stats["limit_bytes"], stats["evicted_keys"]
        share = stats["size_bytes"] / limit_bytes if limit_bytes else 0.0
        has_evicted = self._num_evicted is not None and num_evicted > self._num_evicted
        if limit_bytes and (share >= _FULL_AT or has_evicted):
            self.has_room = False
        elif share < _ROOM_AT:
            self.has_room = True
        self._num_evicted = num_evicted


@dataclass(frozen=True)
class OwnProxySettings:
    """Of a proxy that the server starts."""

    # Of the store; empty for one that is started here.
    url: str
    # For ProxySettings.
    settings: dict[str, Any]
    in_process: bool
    # Of a store that is started here, for all ranks; 0 for a quarter of the free memory.
    limit_gb: float


@dataclass(frozen=True)
class RemoteSettings:
    """A user's settings of the remote tier."""

    # A name, or an object for the proxy to check.
    codec: Any
    # How long the proxy may be silent.
    hang_s: float
    is_synchronous: bool
    proxy: OwnProxySettings | OtherProxy | ProxyElsewhere


def open_remote_store(backend: str, settings: RemoteSettings, params: StoreParams) -> RemoteStore:
    """The remote tier of one rank, or of ranks that cache the same, or of its layers of one kind. backend: its name.
    Raises StoreError."""
    pool: MHATokenToKVPoolHost | HostRegion = params.pool
    namespace, block_tokens, directory = params.namespace, params.block_tokens, params.directory
    if pool.layout != "page_first" or pool.shared.fd < 0:
        raise StoreError(
            f"--hicache-storage-backend {backend} writes whole pages into shared memory: use --hicache-mem-layout "
            "page_first, on Linux"
        )
    layout = BlockLayout(block_tokens // pool.page_size, pool.page_layout)
    codec = {"codec": settings.codec} if isinstance(settings.codec, str) else settings.codec
    if params.layers:
        try:
            codec = codec_of_layers(codec, params.layers, params.num_layers)
        except ValueError as error:
            raise StoreError(f"--hicache-storage-backend {backend}: {error}") from None
    own = settings.proxy
    assert params.beside is None or isinstance(params.beside, RemoteStore)
    place: ProxyPlace = (
        _start_own_proxy(own, directory, params.tp_size, params.beside) if isinstance(own, OwnProxySettings) else own
    )
    hello = wire.Hello(
        token=place.token,
        num_pages=(num_pages := pool.first_page + pool.num_pages),
        pool_bytes=num_pages * pool.page_bytes,
        layout=layout.as_dict(),
        codec=codec,
        namespace=hashlib.blake2b(namespace.encode()).digest(),
        mac_key=_mac_key_of(params.mac_key, namespace),
        engine=os.urandom(16),
    )
    store = RemoteStore(backend, block_tokens, place, hello, pool.shared.fd, settings, first_page=pool.first_page)
    part = f" of {len(params.layers)} of {params.num_layers} layers" if params.layers else ""
    logger.info("remote tier: %s, codec %s, blocks of %d tokens%s", place, store.codec, block_tokens, part)
    return store


def _mac_key_of(mac_key: bytes, namespace: str) -> bytes:
    """One for each model, layout and rank, so that no block of another can stand in its place; empty without one."""
    return (
        hashlib.blake2b(namespace.encode(), key=mac_key, digest_size=wire.MAC_KEY_BYTES).digest() if mac_key else b""
    )


def _start_own_proxy(
    own: OwnProxySettings, directory: Path, num_stores: int, beside: RemoteStore | None
) -> ProxyPlace:
    """num_stores: that share the limit. beside: one of the same rank, whose store this one's proxy uses, too."""
    url, kept = own.url, None
    if not url:
        kept = beside.kept_store if beside is not None else None
        if kept is None:
            # Each tier of the server starts one.
            limit_bytes = int((own.limit_gb * 1e9 or available_memory() / 4) / num_stores)
            kept = KeptStore(EmbeddedStore.start(directory / "store", limit_bytes))
            logger.info("remote tier: no url is given, so a store of %s is started here", shown_size(limit_bytes))
        else:
            kept.join()
        assert kept.store is not None
        url = str(kept.store.address)
    kind = InProcessProxy if own.in_process else OwnProxy
    return kind(url, own.settings, kept)


@dataclass(eq=False)
class _Read:
    """A read that has not ended. until: when it ends that waits to be asked again; 0: it was asked once."""

    make: Callable[[int], wire.ToProxy]
    on_end: Callable[[int], None]
    asked: tuple[ProxyClient, int] | None = None
    until: float = 0.0
    is_given_up: bool = False


class _Result:
    """A count that comes once, from another thread."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._count = 0

    def put(self, count: int) -> None:
        self._count = count
        self._came.set()

    def wait(self) -> int:
        self._came.wait()
        return self._count


def _pages(frames: np.ndarray) -> bytes:
    return np.ascontiguousarray(frames, np.int32).tobytes()
