"""`ProxyServer`: the proxy's socket and its sessions. Owns pipeline and writer, which all sessions share."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.proxy.engines import EmulatedEngine, SoftwareEngine, StageEngine
from sglang.srt.offload.proxy.pipeline import Pipeline
from sglang.srt.offload.proxy.session import Session
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.proxy.writer import Writer
from sglang.srt.offload.store.address import StoreAddress

logger = logging.getLogger(__name__)


class ProxyServer:
    """token: engines have to show it. address: the store's."""

    def __init__(self, settings: ProxySettings, address: StoreAddress, token: str) -> None:
        self._settings = settings
        self._address = address
        self._token = token
        self.pipeline = Pipeline(settings, make_engine(settings))
        self.writer = Writer(settings, lambda: self.pipeline.is_reading)

    def serve(self, sock: socket.socket) -> None:
        """Serve one engine's session until it ends. The session owns sock from then on."""
        Session(sock, self._token, self._address, self.pipeline, self.writer, self._settings.store_timeout_s).run()

    def listen(self, path: Path) -> None:
        """Accept connections and serve them, for ever. Raises StoreError if the socket cannot be made."""
        listener = open_listener(path)
        logger.info("offload proxy listens on %s", path)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self.serve, args=(sock,), name="session", daemon=True).start()


def open_listener(path: Path) -> socket.socket:
    """A listening socket to which only this user can connect. It replaces a socket that a dead proxy left behind."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket():
        try:
            listener.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            raise StoreError(f"another proxy listens on {path}: stop it, or choose another --socket")
        listener.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        raise StoreError(f"the proxy cannot listen on {path}: {error}; choose another --socket") from error
    finally:
        os.umask(before)
    listener.listen()
    return listener


def make_engine(settings: ProxySettings) -> StageEngine:
    if settings.engine == "software":
        return SoftwareEngine()
    rates = {stage: gbps * 1e9 / 8 for stage, gbps in settings.rates_gbps.items()}
    return EmulatedEngine(SoftwareEngine(), rates, settings.poll_us * 1e-6)
