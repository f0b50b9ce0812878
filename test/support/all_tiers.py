"""A server with all tiers at once, and the parts that they need: a lender, a store behind a relay, an offload proxy
and a disk. Each part can be killed, stopped, slowed and brought back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import torch

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, LentOptions, allocate_pool
from sglang.srt.utils.peer_timing import PeerTiming
from support.children import Child
from support.server_fixture import NO_TLS, PATIENCE_S, Server, free_port, wait_until
from support.store_servers import RedisServer

SOURCES = ("device", "peer", "host", "disk", "remote")
BLOCK = 32
# Of the storage.
SECRET = "of the tests"
ADMIN_KEY = "of-the-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
SLAB_MIB = 1
# As float32 or bfloat16 large values, 48.
DAMAGE = b"\x00\x00\x40\x42" * 16
SMALL_DISK_MIB = 16
# Slabs wait for a borrower.
LONG_S = 1e6
# Bytes of a token, K and V of all layers, of the embedded model on a CPU.
_TOKEN_BYTES = 2048
# The longest request of a neighbour that lends.
_WORKER_TOKENS = 1024
DISK_HOOK = Path(__file__).parent / "disk_hook"


def lend(_say: Callable[..., None], endpoint: str, directory: str, num_slabs: int, strict: bool) -> None:
    """The work of a `Child`: lends all its slabs for ever."""
    layout = PageLayout.kv(1, 8, 4, 32, torch.bfloat16)
    pool = allocate_pool(SlabsConfig(num_slabs, SLAB_MIB << 20), layout)
    options = LentOptions(strict, PeerTiming(offer=LONG_S))
    memory = LentMemory(endpoint, Path(directory), pool, options=options)
    while True:
        # What a borrower that has ended gives back is lent again.
        memory.lend([slab for slab, is_here in enumerate(memory.poll_mapped().mapped) if is_here])
        time.sleep(0.05)


class Lender:
    """A process that lends slabs, or one for each rank of a master."""

    def __init__(self, folder: Path, num_slabs: int, strict: bool, num_ranks: int = 1) -> None:
        folder.mkdir(mode=0o700)
        self.endpoint = f"ipc://{folder}/peers"
        endpoints = [self.endpoint, *(f"{self.endpoint}.{rank}" for rank in range(1, num_ranks))]
        self._arguments = [(endpoint, str(folder), num_slabs, strict) for endpoint in endpoints]
        self._children: list[Child]
        self.start()

    def start(self) -> None:
        self._children = [Child(lend, *arguments) for arguments in self._arguments]

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    def pause(self) -> None:
        for child in self._children:
            child.stop()

    def resume(self) -> None:
        for child in self._children:
            child.go_on()


class Relay:
    """A TCP port of 127.0.0.1 that leads to another. bytes_per_s: how much passes in each direction; None is all that
    comes, 0 is nothing."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s: float | None = None
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            self._open |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        try:
            while not self._closed.is_set():
                rate = self.bytes_per_s
                if rate == 0:
                    time.sleep(0.02)
                    continue
                if not select.select([source], [], [], 0.5)[0]:
                    continue
                data = source.recv(1 << 16 if rate is None else max(1, int(rate / 20)))
                if not data:
                    break
                to.sendall(data)
                if rate is not None:
                    time.sleep(len(data) / rate)
        except (OSError, ValueError):
            pass
        self._open -= {source, to}
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections, in the middle of what they carry."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self.cut()


class OffloadProxy:
    """A proxy by itself, as a user starts it. is_elsewhere: it is reached as one on another machine."""

    def __init__(self, folder: Path, url: str, is_elsewhere: bool = False) -> None:
        folder.mkdir(mode=0o700)
        self._port = free_port() if is_elsewhere else 0
        # Where an engine finds it.
        self.address = f"tcp://127.0.0.1:{self._port}" if is_elsewhere else str(folder / "kv.sock")
        self.token_file = folder / "token"
        self.token_file.write_text("a token of the tests, which is long")
        self._log = open(folder / "log", "w")  # noqa: SIM115
        self._url = url
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        small = {f"{name}_buffer_bytes": 12 << 20 for name in ("compressed", "decompressed", "dequantized")}
        command = [sys.executable, "-m", "sglang.srt.offload.proxy"]
        command += ["--listen" if self._port else "--socket", self.address]
        command += ["--token-file", str(self.token_file), "--settings", json.dumps(small)]
        environment = {**os.environ, "SGLANG_OFFLOAD_STORE": self._url}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)

    def wait_ready(self) -> None:
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.output()
        with socket.socket(socket.AF_INET if self._port else socket.AF_UNIX) as probe:
            return probe.connect_ex(("127.0.0.1", self._port) if self._port else self.address) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def output(self) -> str:
        return Path(self._log.name).read_text()

    def close(self) -> None:
        self.kill()
        self._log.close()


class StartedProxy:
    """The proxy that the server has started, and starts again."""

    def __init__(self) -> None:
        self.server: Server

    def kill(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        pass

    def pause(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        found = []
        for child in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE and "sglang.srt.offload.proxy" in child.cmdline():
                    found.append(child.pid)
        return found


class Disk:
    """The folder of the disk tier, and what slows it (`disk_hook`). mounted: a small file system for it alone."""

    def __init__(self, folder: Path, mounted: Path | None = None) -> None:
        self.mounted = mounted
        self.folder = (mounted or folder) / "kv"
        self._speed = folder / "disk-speed"
        path = os.pathsep.join([str(DISK_HOOK), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        self.environment = {"PYTHONPATH": path, "HICACHE_TEST_DISK": str(self._speed)}

    def set_speed(self, wanted: str) -> None:
        """wanted: seconds of each read or write, or "hang"; empty for a disk as it is."""
        if wanted:
            draft = self._speed.with_suffix(".new")
            draft.write_text(wanted)
            draft.rename(self._speed)
        else:
            self._speed.unlink(missing_ok=True)

    def segments(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kv"))

    def delete(self) -> None:
        """All files and folders, at once; the server makes new ones, at any moment."""
        gone = self.folder.with_name("deleted")
        self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def damage(self) -> None:
        """Change values all over each file, so much that an answer from them would be another one."""
        for path in self.segments():
            with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
                for at in range(0, path.stat().st_size, 1024):
                    file.seek(at)
                    file.write(DAMAGE)

    def truncate(self) -> None:
        for path in self.segments():
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, path.stat().st_size // 2)


@contextlib.contextmanager
def small_file_system(folder: Path) -> Iterator[Path | None]:
    """None where this user cannot mount one."""
    folder.mkdir(mode=0o700)
    size = f"size={SMALL_DISK_MIB}m,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
    is_mounted = shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


# Of the remote store, beside the names of the server: the proxy is a part of the server.
IN_PROCESS = "in_process"
# What another server does beside asking the same storage.
Neighbour = Literal["alone", "borrows", "lends"]


@dataclass(frozen=True)
class Parts:
    # The lender copies for the server.
    strict: bool = False
    # Of each rank's lender.
    num_slabs: int = 1
    # A neighbour lends, too.
    has_worker: bool = False
    # Of the remote store; with `remote` the server starts the proxy itself.
    backend: str = "bluefield"
    # A proxy that the server does not start is reached as one on another machine.
    is_elsewhere: bool = False
    # The disk tier is a plugin, which erases no tenant's blocks, and keeps to no quota. v1: see `interface_v1`.
    plugin: Literal["", "generic", "v1"] = ""
    # The disk tier has a file system of its own, where one can be mounted.
    small_disk: bool = False
    # Of the server.
    num_ranks: int = 1
    # Of layers, each of which has stores of its own.
    num_kinds: int = 1


def slabs_of_worker(kv_bytes: int, parts: Parts) -> int:
    """Of a rank's device of a neighbour that lends. It keeps what its longest request needs; more than a slab beside
    that would serve what the host is to serve. kv_bytes: of a number."""
    return 1 + math.ceil((_WORKER_TOKENS + BLOCK) * _token_bytes(kv_bytes, parts) / (SLAB_MIB << 20))


def _token_bytes(kv_bytes: int, parts: Parts) -> int:
    """On a rank, in slabs of a neighbour that lends: of four layers three may have a pool of their own."""
    return _TOKEN_BYTES * kv_bytes // 4 // parts.num_ranks // (4 if parts.num_kinds > 1 else 1)


class AllTiers:
    """The parts, and a server on top of them once `start_server` was called."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        folder.chmod(0o700)
        self.num_ranks = parts.num_ranks
        # Of each storage tier.
        self.num_stores = parts.num_ranks * parts.num_kinds
        self.block_tokens = BLOCK
        # Storage tiers that erase a tenant's blocks, and keep to its quota.
        self.forgetful = ("remote",) if parts.plugin else ("disk", "remote")
        self._parts = parts
        self._stack = contextlib.ExitStack()
        self.lender = Lender(folder / "lender", parts.num_slabs, parts.strict, parts.num_ranks)
        self._stack.callback(self.lender.kill)
        (folder / "worker").mkdir(mode=0o700)
        self._worker = f"ipc://{folder}/worker/peers"
        self.store = RedisServer(folder)
        self._stack.callback(self.store.kill)
        self.relay = Relay(self.store.port)
        self._stack.callback(self.relay.close)
        self._url = f"redis://127.0.0.1:{self.relay.port}"
        # None: it is a part of the server.
        self.proxy: OffloadProxy | StartedProxy | None = None
        if parts.backend == "remote":
            self.proxy = StartedProxy()
        elif parts.backend == "bluefield":
            self.proxy = OffloadProxy(folder / "proxy", self._url, parts.is_elsewhere)
            self._stack.callback(self.proxy.close)
        mounted = self._stack.enter_context(small_file_system(folder / "disk")) if parts.small_disk else None
        self.disk = Disk(folder, mounted)
        self.server: Server
        self.last_output = self.last_state = ""

    def start_server(
        self,
        *flags: str,
        disk_tokens: int,
        codec: str | dict[str, Any] = "lossless",
        storage: dict[str, Any] | None = None,
        disk: dict[str, Any] | None = None,
        own: tuple[str, ...] = (),
    ) -> Server:
        """It is not ready yet. disk_tokens: what the disk holds. codec: of the remote store. storage, disk: options
        of all storage, and of the disk tier. own: flags that a neighbour has not."""
        proxy = self.proxy
        remote: dict[str, object]
        if isinstance(proxy, OffloadProxy):
            proxy.wait_ready()
            remote = {"proxy": proxy.address, "token_file": str(proxy.token_file)}
        else:
            remote = {"url": self._url, "hang_timeout_s": 3, "in_process": proxy is None}
        backend = "bluefield" if isinstance(proxy, OffloadProxy) else "remote"
        remote["codec"] = codec
        local, limit_bytes = "file", disk_tokens * _TOKEN_BYTES
        of_disk = {
            "path": str(self.disk.folder),
            "limit_gb": limit_bytes / 1e9,
            "segment_mb": 8 * BLOCK * _TOKEN_BYTES / 1e6,
            **(disk or {}),
        }
        if self._parts.plugin:
            local = "dynamic"
            of_disk = {
                "backend_name": "folder",
                "module_path": "support.folder_plugin",
                "class_name": "FolderStorage",
                "interface_v1": int(self._parts.plugin == "v1"),
                "staging_mb": 1.0,
                "folder": str(self.disk.folder),
                "folder_limit_bytes": limit_bytes,
            }
        config: dict[str, Any] = {
            "block_tokens": BLOCK,
            "prefetch_threshold": BLOCK,
            # Else it is in a file of the disk's folder, which faults delete.
            "secret": SECRET,
            local: of_disk,
            backend: remote,
            **(storage or {}),
        }
        self.block_tokens = config["block_tokens"]
        self._storage = {
            "hicache_storage_backend": f"{local},{backend}",
            "hicache_storage_backend_extra_config_json": json.dumps(config),
        }
        self._flags = [
            *("--hicache", "--hicache-storage-backend", f"{local},{backend}"),
            *("--hicache-storage-backend-extra-config", json.dumps(config)),
            *("--admin-api-key", ADMIN_KEY),
            *flags,
        ]
        endpoints = [self.lender.endpoint, *([self._worker] if self._parts.has_worker else ())]
        self.server = self._start(*self._borrowing(*endpoints), *own)
        if isinstance(proxy, StartedProxy):
            proxy.server = self.server
        return self.server

    def start_neighbour(self, kind: Neighbour, kv_bytes: int) -> Server:
        """Another server with the same storage, and more room on the host. It is not ready yet. kv_bytes: of a
        number."""
        flags = ["--hicache-ratio", "2"]
        if kind == "borrows":
            flags += self._borrowing(self.lender.endpoint)
        if kind == "lends":
            size_bytes = slabs_of_worker(kv_bytes, self._parts) * SLAB_MIB << 20
            num_tokens = size_bytes // _token_bytes(kv_bytes, self._parts)
            flags += ["--max-total-tokens", str(num_tokens), "--context-length", str(_WORKER_TOKENS)]
            flags += ["--peer-role", "worker", "--peer-endpoint", self._worker, "--peer-slab-size", str(SLAB_MIB)]
            flags += ["--peer-window", "2", *(["--peer-strict"] if self._parts.strict else ())]
            flags += ["--swa-full-tokens-ratio", "0.5"] if self._parts.num_kinds > 1 else []
        return self._start(*flags)

    def _borrowing(self, *endpoints: str) -> list[str]:
        flags = ["--peer-role", "master", "--peer-endpoint", ",".join(endpoints)]
        return [*flags, "--peer-slab-size", str(SLAB_MIB), "--peer-size", "0.05"]

    def _start(self, *flags: str) -> Server:
        server = Server(*self._flags, *flags, wait=False, environment=self.disk.environment)
        return self._stack.enter_context(server)

    def detach_storage(self) -> None:
        reply = self._switch_storage("DELETE", None)
        assert reply.status_code == 200, reply.text

    def attach_storage(self) -> None:
        """A proxy that was started just now, which does not listen yet, is refused."""
        wait_until(lambda: self._switch_storage("PUT", self._storage).status_code == 200)

    def _switch_storage(self, method: str, body: dict[str, str] | None) -> httpx.Response:
        url = f"{self.server.url}/hicache/storage-backend"
        return httpx.request(method, url, json=body, headers=ADMIN, timeout=PATIENCE_S, verify=NO_TLS)

    def damage_store(self) -> None:
        """Change some bytes of each value, most of which are not looked at again."""
        connection = self.store.connection()
        keys = connection.call("KEYS", "*")
        assert isinstance(keys, list)
        for key in keys:
            assert isinstance(key, bytes)
            if key.endswith(b":t"):
                continue  # no value, but which blocks a tenant has
            size = connection.call("STRLEN", key)
            assert isinstance(size, int)
            if size:
                at = size * 2 // 3 // 4 * 4
                connection.call("SETRANGE", key, str(at), DAMAGE[: size - at])

    def __enter__(self) -> AllTiers:
        return self

    def __exit__(self, *_: object) -> None:
        """What the server has told last is kept: see last_output, last_state."""
        if hasattr(self, "server"):
            self.last_output = self.server.output()
            with contextlib.suppress(httpx.HTTPError):
                self.last_state = httpx.get(f"{self.server.url}/hicache/state", timeout=5, verify=NO_TLS).text
        self._stack.close()


def borrowed_tokens(server: Server) -> int:
    total: int = server.state()["tiers"]["peer"]["total_tokens"]
    return total


# -- faults ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def killed(part: Lender | RedisServer | OffloadProxy | StartedProxy) -> Iterator[None]:
    part.kill()
    try:
        yield
    finally:
        part.start()


@contextlib.contextmanager
def stopped(part: Lender | RedisServer | OffloadProxy | StartedProxy) -> Iterator[None]:
    part.pause()
    try:
        yield
    finally:
        part.resume()


@contextlib.contextmanager
def relayed_at(relay: Relay, bytes_per_s: float) -> Iterator[None]:
    relay.bytes_per_s = bytes_per_s
    try:
        yield
    finally:
        relay.bytes_per_s = None


@contextlib.contextmanager
def detached(tiers: AllTiers) -> Iterator[None]:
    tiers.detach_storage()
    try:
        yield
    finally:
        tiers.attach_storage()


@contextlib.contextmanager
def done(what: Callable[[], None]) -> Iterator[None]:
    """Something that need not be undone."""
    what()
    yield


@contextlib.contextmanager
def gone(disk: Disk) -> Iterator[None]:
    """As a file system that is not mounted for a while."""
    away = disk.folder.with_name("away")
    disk.folder.rename(away)
    try:
        yield
    finally:
        # The server makes the folder anew when it writes, at any moment.
        wait_until(lambda: _takes_place_of(away, disk.folder))


def _takes_place_of(folder: Path, there: Path) -> bool:
    shutil.rmtree(there, ignore_errors=True)
    try:
        folder.rename(there)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def filled(disk: Disk) -> Iterator[None]:
    """No space is left, where the disk has a file system of its own; else nothing happens. What the server frees is
    taken at once."""
    if disk.mounted is None:
        yield
        return
    filler = disk.mounted / "filler"
    is_over = threading.Event()

    def fill() -> None:
        # Unbuffered: what is left in a buffer would be written when the file is closed.
        with open(filler, "wb", buffering=0) as file:
            while not is_over.wait(0.001):
                with contextlib.suppress(OSError):
                    while file.write(bytes(1 << 12)):
                        pass

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        wait_until(lambda: shutil.disk_usage(filler.parent).free == 0)
        yield
    finally:
        is_over.set()
        thread.join()
        filler.unlink()


@contextlib.contextmanager
def disk_at(disk: Disk, speed: str) -> Iterator[None]:
    disk.set_speed(speed)
    try:
        yield
    finally:
        disk.set_speed("")


@contextlib.contextmanager
def small_files(server: Server, size_bytes: int) -> Iterator[None]:
    """The scheduler process can write to no file beyond this size."""
    pid = server.child("scheduler_process").pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def faults(tiers: AllTiers) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    """What may happen to the parts, by name; it is undone at the end of the context."""
    lender, store, relay, proxy, disk = tiers.lender, tiers.store, tiers.relay, tiers.proxy, tiers.disk
    of_proxy: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}
    if proxy is not None:
        of_proxy = {"proxy killed": lambda: killed(proxy), "proxy stopped": lambda: stopped(proxy)}
    return of_proxy | {
        "lender killed": lambda: killed(lender),
        "lender stopped": lambda: stopped(lender),
        "store killed": lambda: killed(store),
        "store stopped": lambda: stopped(store),
        "store slow": lambda: relayed_at(relay, 300_000),
        "store silent": lambda: relayed_at(relay, 0),
        "store cut off": lambda: done(relay.cut),
        "store damaged": lambda: done(tiers.damage_store),
        "disk slow": lambda: disk_at(disk, "0.1"),
        "disk hangs": lambda: disk_at(disk, "hang"),
        "disk filled": lambda: filled(disk),
        "disk full": lambda: small_files(tiers.server, 0),
        "disk damaged": lambda: done(disk.damage),
        "disk truncated": lambda: done(disk.truncate),
        "disk deleted": lambda: done(disk.delete),
        "disk gone": lambda: gone(disk),
        "storage detached": lambda: detached(tiers),
    }
