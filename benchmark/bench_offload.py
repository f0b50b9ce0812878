"""The data plane of the offload proxy: against its slowest stage, over real links, and with small pieces.

    PYTHONPATH=test python benchmark/bench_offload.py [--blocks N] [--rounds N] [--links GBPS ...]

Blocks of 64 tokens of synthetic KV of a Llama-8B's shape (8 MiB in 4 pieces), in a Redis server, fetched by a
`Plane` in this process into pages that lie in one run, as the host pool's mostly do.

*socket*: the server is on a Unix socket, and all stages share this machine's cores with it. *link*: it is in another
network namespace, behind a link that tc shapes (without the right to make one, these rows are left out). *emulated*:
as *socket*, and each stage takes at least as long as a BlueField-3's would (ShadowServe Fig. 13, contended), all
rates divided so that its network has --rate. It shows the pipeline's shape, and nothing about a BlueField's speed.

The slowest stage alone: its threads do nothing else, on pieces that lie ready; reading alone is done by a reader in
Python, with the same threads and window. Of an emulated stage it is what its rate gives. The variants take turns
within a round; medians over rounds, ratios within a round. *Small pieces*: blocks of one piece.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from bench_codecs import block_of, synthetic
from common import print_table, write_json

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.offload.codec import BlockLayout, make_codec
from sglang.srt.offload.proxy.plane import Plane, PoolLink
from sglang.srt.offload.proxy.settings import PROFILES, ProxySettings
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.utils.shared_memory import SharedMemory
from support.network import elsewhere
from support.store_servers import redis_elsewhere

CODECS: dict[str, dict[str, Any]] = {
    "raw": {"codec": "raw"},
    "lossless": {"codec": "lossless"},
    "lossless, deflate": {"codec": "lossless", "coder": "deflate"},
    "binned 255": {"codec": "binned"},
    "binned 255, zstd": {"codec": "binned", "coder": "zstd"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "pipelined": {},
    "staged": {"direct": False},
    "no pipeline": {"pipelined": False},
    "no preallocation": {"preallocated": False},
}
STAGES = ("receive", "decompress", "dequantize")
BLOCK_TOKENS = 64
BUFFERS = {f"{name}_buffer_bytes": 64 << 20 for name in ("compressed", "decompressed", "dequantized")}
SMALL_BYTES = (4 << 10, 64 << 10)
NUM_SMALL = 4096


class Rig:
    """A `Source`: blocks in a store, and memory for them."""

    def __init__(
        self, address: StoreAddress, layout: BlockLayout, codec: dict[str, Any], raw: np.ndarray, num: int
    ) -> None:
        self.layout = layout
        self.codec = make_codec(codec, layout)
        self.store = ObjectStore(address, b"bench", layout.num_pieces, 60.0, self.codec.spec)
        self.keys = [i.to_bytes(16, "big") for i in range(num)]
        self.pool = SharedMemory.allocate(num * layout.block_bytes, "pool")
        self.pool.memory[:] = 0
        self.pages = np.arange(num * layout.num_pages, dtype=np.int32)
        self.pieces: list[tuple[int, bytes, np.ndarray]] = []
        self._number = 0
        writer = self.store.writer()
        for key in self.keys:
            coded = []
            for i in range(layout.num_pieces):
                start, end = layout.piece(i)
                out = np.empty(self.codec.max_stored_bytes(end - start), np.uint8)
                coded.append(out[: self.codec.encode(raw[start:end], i, key, out)])
                self.pieces.append((i, key, coded[-1]))
            assert writer.write(key, [[piece.data] for piece in coded])
        writer.close()
        self.stored_bytes = sum(len(piece) for _, _, piece in self.pieces)

    def note_damaged(self, key: bytes, why: str) -> None:
        raise AssertionError(why)

    def note_incomplete(self, key: bytes) -> None:
        raise AssertionError("a piece is gone: is the store too small?")

    def note_alive(self) -> None:
        pass

    def fetcher(self, settings: ProxySettings, stack: ExitStack) -> tuple[Plane, Callable[[], float]]:
        """A plane, and what fetches all blocks through it. Returns seconds."""
        plane = Plane(settings)
        mine, theirs = socket.socketpair()
        with mine, theirs:
            session = plane.open(self, PoolLink(self.pool.fd, len(self.pages), theirs.fileno()))
        stack.callback(plane.close)
        stack.callback(session.close)

        def fetch() -> float:
            ended, counts = threading.Event(), []
            self.pool.memory[:: self.layout.piece_bytes] = 1
            self._number += 1
            began = time.perf_counter()
            end = lambda count: (counts.append(count), ended.set())  # noqa: E731
            session.get(self._number, b"".join(self.keys), self.pages.tobytes(), end)
            ended.wait()
            seconds = time.perf_counter() - began
            assert counts == [len(self.keys)], f"{counts} of {len(self.keys)} blocks came"
            return seconds

        return plane, fetch

    def alone(self, stage: str, settings: ProxySettings) -> float:
        """Seconds of one stage for all pieces, on its threads."""
        todo, lock = deque(range(len(self.pieces))), threading.Lock()
        headers = [self.codec.parse(stored, i, key) for i, key, stored in self.pieces]
        mids = [np.zeros(h.mid_bytes, np.uint8) for h in headers] if stage != "receive" else []
        if stage == "dequantize":
            for mid, header, (_, _, stored) in zip(mids, headers, self.pieces):
                self.codec.decompress(stored, header, mid)

        def take() -> int | None:
            with lock:
                return todo.popleft() if todo else None

        def receive() -> None:
            reader, buffer, asked = self.store.reader(), np.empty(4 << 20, np.uint8), 0
            while True:
                while asked < settings.window and (at := take()) is not None:
                    reader.request(self.pieces[at][1], self.pieces[at][0])
                    asked += 1
                if not asked:
                    return reader.close()
                reader.receive(buffer.data)
                asked -= 1

        def work() -> None:
            while (at := take()) is not None:
                i, key, stored = self.pieces[at]
                start = at * self.layout.piece_bytes
                target = self.pool.memory[start : start + headers[at].raw_bytes]
                if stage == "decompress":
                    self.codec.decompress(stored, self.codec.parse(stored, i, key), mids[at])
                else:
                    self.codec.dequantize(stored, headers[at], mids[at], target)

        threads = [
            threading.Thread(target=receive if stage == "receive" else work) for _ in range(settings.threads(stage))
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def alone_emulated(self, rates_gbps: dict[str, float]) -> float:
        """Of the slowest stage."""
        headers = [self.codec.parse(stored, i, key) for i, key, stored in self.pieces]
        moved = {
            "receive": self.stored_bytes,
            "decompress": sum(h.mid_bytes for h in headers),
            "dequantize": self.pool.size_bytes,
            "deliver": self.pool.size_bytes,
        }
        return max(moved[stage] * 8 / (1e9 * gbps) for stage, gbps in rates_gbps.items())


def measure(
    rig: Rig, variants: dict[str, dict[str, Any]], stages: tuple[str, ...], rounds: int
) -> list[dict[str, Any]]:
    """stages: that are measured alone; those of an emulated engine are not."""
    settings = {variant: ProxySettings(**BUFFERS, **changes) for variant, changes in variants.items()}
    rows = []
    with ExitStack() as stack:
        made = {variant: rig.fetcher(s, stack) for variant, s in settings.items()}
        works: dict[str, Callable[[], float]] = {variant: fetch for variant, (_, fetch) in made.items()}
        usual = settings["pipelined"]
        for stage in stages:
            works[stage] = lambda stage=stage: rig.alone(stage, usual)
        samples: dict[str, list[float]] = {what: [] for what in works}
        for i in range(rounds + 1):
            for what, work in works.items():
                seconds = work()
                if i:  # the first round warms up
                    samples[what].append(seconds)
        times = {what: np.array(values) for what, values in samples.items()}
        slowest = np.full(rounds, rig.alone_emulated(usual.rates_gbps) if usual.rates_gbps else 0.0)
        for stage in stages:
            slowest = np.maximum(slowest, times[stage])
        for what in works:
            row: dict[str, Any] = {"what": what if what in made else f"{what} alone"}
            row["GB/s raw"] = rig.pool.size_bytes / 1e9 / float(np.median(times[what]))
            row["GB/s stored"] = rig.stored_bytes / 1e9 / float(np.median(times[what]))
            if what in made:
                row["of the slowest stage alone"] = float(np.median(slowest / times[what]))
                row["times as long as pipelined"] = float(np.median(times[what] / times["pipelined"]))
            rows.append(row)
    return rows


def small_pieces(address: StoreAddress, rounds: int) -> list[dict[str, Any]]:
    rows = []
    rng = np.random.default_rng(0)
    for size in SMALL_BYTES:
        layout = BlockLayout(1, PageLayout.kv(1, 1, size // 512, 128, "bfloat16"))
        raw = (rng.standard_normal(size // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        assert layout.block_bytes == size
        for name in ("raw", "lossless"):
            rig = Rig(address, layout, CODECS[name], raw, NUM_SMALL)
            with ExitStack() as stack:
                _, fetch = rig.fetcher(ProxySettings(**BUFFERS), stack)
                fetch()
                seconds = float(np.median([fetch() for _ in range(rounds)]))
            rows.append({"codec": name, "bytes": size, "pieces per second": NUM_SMALL / seconds})
            rig.store.clear()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=10.0, help="the emulated network, in 10^9 bits per second")
    parser.add_argument("--links", type=float, nargs="*", default=[1.0, 10.0], help="10^9 bits per second")
    parser.add_argument("--codecs", nargs="*", default=list(CODECS), choices=list(CODECS))
    args = parser.parse_args()
    layout, raw = block_of(synthetic(BLOCK_TOKENS), 1, "bfloat16")
    contended = PROFILES["bluefield-3-emulated"]["rates_gbps"]
    rates = {stage: gbps * args.rate / contended["receive"] for stage, gbps in contended.items()}
    # An accelerator copies what it has dequantized.
    emulated = {"engine": "emulated", "rates_gbps": rates, "direct": False}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        there = server = None
        try:
            there = stack.enter_context(elsewhere(1000))
            server = stack.enter_context(redis_elsewhere(there))
        except RuntimeError as error:
            print(f"without links: {error}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        local = EmbeddedStore.start(folder / "store", 4 << 30)
        stack.callback(local.stop)
        for name in args.codecs:
            codec = CODECS[name]
            rig = Rig(local.address, layout, codec, raw, args.blocks)
            print(f"{name}: {rig.pool.size_bytes / rig.stored_bytes:.2f} times smaller in the store")
            places = {"socket": measure(rig, VARIANTS, STAGES, args.rounds)}
            slow = {variant: {**changes, **emulated} for variant, changes in VARIANTS.items() if variant != "staged"}
            places[f"emulated, {args.rate:g} Gbit/s"] = measure(rig, slow, (), args.rounds)
            rig.store.clear()
            for gbps in args.links if server is not None else ():
                there.limit(10_000)
                rig = Rig(server, layout, codec, raw, args.blocks)
                there.limit(1000 * gbps)
                places[f"link, {gbps:g} Gbit/s"] = measure(rig, {"pipelined": {}}, ("receive",), args.rounds)
                rig.store.clear()
            rows += [{"codec": name, "store": place, **row} for place, found in places.items() for row in found]
        small = small_pieces(local.address, args.rounds)
    print_table("Data plane", [row for row in rows if "times as long as pipelined" in row])
    print_table("Each stage alone", [row for row in rows if "times as long as pipelined" not in row])
    print_table("Small pieces", small)
    write_json("offload", {**vars(args), "block_tokens": BLOCK_TOKENS, "rates_gbps": rates}, [*rows, *small])


if __name__ == "__main__":
    main()
