"""How an engine reaches its proxy: `OwnProxy` starts one on cores of the host, `OtherProxy` connects to a running
one, `InProcessProxy` runs it on threads of the engine. Each makes connected sockets, and tries to free a proxy that
hangs."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import EmbeddedStore

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
# The environment variable in which the proxy finds the URL of its store.
STORE_VARIABLE = "SGLANG_OFFLOAD_STORE"


class ProxyPlace(Protocol):
    """token: the engine shows it to the proxy."""

    token: str

    def connect(self) -> socket.socket:
        """A new session's socket. Raises StoreError."""
        ...

    def stop_hung_proxy(self) -> bool:
        """The proxy hangs and holds on to pages. Returns whether it was stopped."""
        ...

    def keep_alive(self) -> None:
        """Called from time to time: start again what belongs to the proxy and has ended."""
        ...

    def close(self) -> None: ...


class _KeptStore:
    """The store that was started for a proxy, if any. It is kept alive until `close`."""

    def __init__(self, store: EmbeddedStore | None) -> None:
        self.store = store
        self._lock = threading.Lock()

    def keep_alive(self) -> None:
        """Start it again if it has died. Raises StoreError."""
        with self._lock:
            if self.store is not None:
                self.store = self.store.revived()

    def close(self) -> None:
        with self._lock:
            store, self.store = self.store, None
            if store is not None:
                store.stop()


class OwnProxy:
    """A child process, and a pair of sockets without a name, so that no other process can connect. Each session has a
    process of its own, which ends with it. embedded: the store that was started for it, or None."""

    token = ""

    def __init__(self, store_url: str, settings: dict[str, Any], embedded: EmbeddedStore | None = None) -> None:
        self._store_url = store_url
        self._settings = settings
        self._embedded = _KeptStore(embedded)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __str__(self) -> str:
        return f"a proxy of our own for {StoreAddress.parse(self._store_url)}"

    def connect(self) -> socket.socket:
        self._stop()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arguments = ["--fd", str(theirs.fileno()), "--settings", json.dumps(self._settings)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.srt.offload.proxy", *arguments],
                # Passed in the environment, which other users cannot read: the URL may have a password.
                env={**os.environ, STORE_VARIABLE: self._store_url},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        return mine

    def stop_hung_proxy(self) -> bool:
        """Kill it. A dead proxy writes into no pages."""
        self._stop()
        return True

    def keep_alive(self) -> None:
        if self._process is not None:
            self._process.poll()  # reaps a dead process
        self._embedded.keep_alive()

    def close(self) -> None:
        self._stop()
        self._embedded.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


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

    def stop_hung_proxy(self) -> bool:
        return False

    def keep_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


class InProcessProxy:
    """A baseline for measurements: decompression takes the engine's own time and interpreter lock."""

    token = ""

    def __init__(self, store_url: str, settings: dict[str, Any], embedded: EmbeddedStore | None = None) -> None:
        from sglang.srt.offload.proxy.server import ProxyServer
        from sglang.srt.offload.proxy.settings import ProxySettings

        self._embedded = _KeptStore(embedded)
        self._store_url = store_url
        self._server = ProxyServer(ProxySettings.from_config(settings), StoreAddress.parse(store_url), self.token)

    def __str__(self) -> str:
        return f"in this process, for {StoreAddress.parse(self._store_url)}"

    def connect(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        threading.Thread(target=self._server.serve, args=(theirs,), name="session", daemon=True).start()
        return mine

    def stop_hung_proxy(self) -> bool:
        return False

    def keep_alive(self) -> None:
        self._embedded.keep_alive()

    def close(self) -> None:
        self._embedded.close()


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
