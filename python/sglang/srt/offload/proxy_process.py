"""How an engine reaches its proxy: `OwnProxy` starts one on cores of the host, `OtherProxy` connects to a running
one, `ProxyElsewhere` has a relay to one on another machine, `InProcessProxy` runs it on threads of the engine. Each
makes connected sockets, and tries to free pages of a proxy that hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.store.address import Endpoint, StoreAddress
from sglang.srt.offload.store.embedded import EmbeddedStore

_CONNECT_TIMEOUT_S = 5.0
# The environment variable in which the proxy finds the URL of its store.
STORE_VARIABLE = "SGLANG_OFFLOAD_STORE"
# The one in which a relay finds the shared key.
KEY_VARIABLE = "SGLANG_OFFLOAD_KEY"
# As a shared key it protects all KV on the network: 16 random bytes in hex.
MIN_TOKEN_CHARS = 32


class ProxyPlace(Protocol):
    """token: the engine shows it to the proxy."""

    token: str

    def connect(self) -> socket.socket:
        """A new session's socket. Raises StoreError."""
        ...

    def stop_hung_proxy(self) -> str:
        """The proxy hangs and holds on to pages. Returns what was done so that it holds none, in words; "" if
        nothing could be done."""
        ...

    def keep_alive(self) -> None:
        """Called from time to time: start again what belongs to the proxy and has ended."""
        ...

    def close(self) -> None: ...


class KeptStore:
    """The store that was started for a proxy, if any, or for two. It is kept alive until each has called `close`."""

    def __init__(self, store: EmbeddedStore | None) -> None:
        self.store = store
        self._num_users = 1
        self._lock = threading.Lock()

    def join(self) -> KeptStore:
        """For another proxy. Returns itself."""
        with self._lock:
            self._num_users += 1
        return self

    def keep_alive(self) -> None:
        """Start it again if it has died. Raises StoreError."""
        with self._lock:
            if self.store is not None:
                self.store = self.store.revived()

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self.store is not None:
                self.store.stop()
                self.store = None


class _Child:
    """A Python process that serves one session over a pair of sockets without a name, so that no other process can
    connect, and ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, arguments: list[str], variable: str, secret: str) -> socket.socket:
        """Start it anew. arguments: the module and its own. variable: of the environment, which other users cannot
        read, for the secret. Returns this process's socket; the other's is --fd. Raises StoreError."""
        self.stop()
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise StoreError(f"no socket can be made for {arguments[0]}: {error}") from error
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", *arguments, "--fd", str(theirs.fileno())],
                    env={**os.environ, variable: secret},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                mine.close()
                raise StoreError(f"{arguments[0]} cannot be started: {error}") from error
        return mine

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def reap(self) -> None:
        if self._process is not None:
            self._process.poll()


class OwnProxy:
    """A child process. Each session has one of its own. kept: the store that was started for it, if any."""

    token = ""

    def __init__(self, store_url: str, settings: dict[str, Any], kept: KeptStore | None = None) -> None:
        self._store_url = store_url
        self._settings = settings
        self.kept = kept or KeptStore(None)
        self._child = _Child()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def __str__(self) -> str:
        return f"a proxy of our own for {StoreAddress.parse(self._store_url)}"

    def connect(self) -> socket.socket:
        # Here too, so that the user gets the sentence from the engine.
        ProxySettings.from_config(self._settings).check_memory()
        arguments = ["sglang.srt.offload.proxy", "--settings", json.dumps(self._settings)]
        # The URL may have a password.
        return self._child.start(arguments, STORE_VARIABLE, self._store_url)

    def stop_hung_proxy(self) -> str:
        """Kill it. A dead proxy writes into no pages."""
        self._child.stop()
        return "it is started anew"

    def keep_alive(self) -> None:
        self._child.reap()
        self.kept.keep_alive()

    def close(self) -> None:
        self._child.stop()
        self.kept.close()


class ProxyElsewhere:
    """A proxy on another machine. A relay, a child process, receives from it what it writes into the pool, so that a
    proxy that hangs holds no pages: the relay is killed. Each session has a relay of its own. key: the shared one."""

    token = ""

    def __init__(self, endpoint: Endpoint, key: str) -> None:
        self._endpoint = endpoint
        self._key = key
        self._child = _Child()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def __str__(self) -> str:
        return f"the proxy at tcp://{self._endpoint}"

    def connect(self) -> socket.socket:
        return self._child.start(
            ["sglang.srt.offload.relay", "--proxy", f"tcp://{self._endpoint}"], KEY_VARIABLE, self._key
        )

    def stop_hung_proxy(self) -> str:
        self._child.stop()
        return "the connection is given up, and made anew"

    def keep_alive(self) -> None:
        self._child.reap()

    def close(self) -> None:
        self._child.stop()


class OtherProxy:
    """A proxy that was started separately on this machine. Memory is passed over its socket."""

    def __init__(self, path: Path, token: str) -> None:
        self.token = token
        self._path = path

    def __str__(self) -> str:
        return f"the proxy at {self._path}"

    def connect(self) -> socket.socket:
        try:
            return connect_to(self._path)
        except OSError as error:
            raise StoreError(f'no offload proxy at {self._path} ({error}): start one, or correct "proxy"') from error

    def stop_hung_proxy(self) -> str:
        return ""

    def keep_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


class InProcessProxy:
    """A baseline for measurements: decompression takes the engine's own time and interpreter lock."""

    token = ""

    def __init__(self, store_url: str, settings: dict[str, Any], kept: KeptStore | None = None) -> None:
        from sglang.srt.offload.proxy.server import ProxyServer

        self.kept = kept or KeptStore(None)
        self._store_url = store_url
        try:
            self._server = ProxyServer(ProxySettings.from_config(settings), StoreAddress.parse(store_url), self.token)
        except StoreError:
            self.kept.close()
            raise

    def __str__(self) -> str:
        return f"in this process, for {StoreAddress.parse(self._store_url)}"

    def connect(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        threading.Thread(target=self._server.serve, args=(theirs,), name="session", daemon=True).start()
        return mine

    def stop_hung_proxy(self) -> str:
        return ""

    def keep_alive(self) -> None:
        self.kept.keep_alive()

    def close(self) -> None:
        self.kept.close()
        # On another thread, because a session that ends waits for a store that does not answer.
        threading.Thread(target=self._server.close, name="proxy-close", daemon=True).start()


def parse_tcp(address: str, name: str) -> Endpoint:
    """tcp://host:port. name: what the user calls it. Raises StoreError."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError:  # also a name that cannot be one
        host = port = None
    if not host or port is None or parts.scheme != "tcp" or parts.path or parts.query or parts.username:
        raise StoreError(f"{name} has to be tcp://host:port, not {address!r}")
    return Endpoint(host, port)


def connect_to(path: Path) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.connect(os.fspath(path))
        sock.settimeout(None)
    except OSError:
        sock.close()
        raise
    return sock
