"""The pipeline of the offload proxy: each stage alone, all at once, and the two baselines without its ideas.

    python benchmark/bench_offload.py [--blocks N] [--rounds N] [--rate GBPS]

Blocks of 256 tokens of synthetic KV of a Llama-8B's shape (32 MiB in 16 pieces), in a Redis server on a Unix socket,
fetched by a `Pipeline` in this process into pages that lie in one run, as the host pool's mostly do.

*software*: the stages do their work on this machine's cores, which they share with each other and with the store.
*emulated*: the same work, and each stage takes at least as long as a BlueField-3's would (ShadowServe Fig. 13,
contended), all rates divided so that its network has --rate. The result shows the pipeline's shape. It shows nothing
about a BlueField's speed.

A stage alone: its threads do nothing else, on pieces that lie ready. The variants take turns within a round; medians
over rounds, ratios within a round. Bytes moved: written by the stages, per byte delivered.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_codecs import block_of, synthetic
from common import print_table, write_json

from sglang.srt.offload.codec import BlockLayout, make_codec
from sglang.srt.offload.proxy.destination import PoolPages
from sglang.srt.offload.proxy.engines import StageEngine
from sglang.srt.offload.proxy.pipeline import Fetch, Pipeline
from sglang.srt.offload.proxy.server import make_engine
from sglang.srt.offload.proxy.settings import PROFILES, STAGES, ProxySettings
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.offload.store.object_store import ObjectStore, PieceReader

CODECS: dict[str, dict[str, Any]] = {
    "lossless": {"codec": "lossless"},
    "binned 255, deflate": {"codec": "binned"},
    "raw": {"codec": "raw"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "pipelined": {},
    "staged": {"direct": False},
    "no pipeline": {"pipelined": False},
    "no preallocation": {"preallocated": False},
}
BLOCK_TOKENS = 256
BUFFERS = {f"{name}_buffer_bytes": 64 << 20 for name in ("compressed", "decompressed", "dequantized")}


class Rig:
    """A `Source`: blocks in a store, and memory for them."""

    def __init__(
        self, store: ObjectStore, layout: BlockLayout, codec: dict[str, Any], raw: np.ndarray, num: int
    ) -> None:
        self.layout = layout
        self.codec = make_codec(codec, layout)
        self.store = store
        self.keys = [i.to_bytes(16, "big") for i in range(num)]
        self.memory = np.zeros(num * layout.block_bytes, np.uint8)
        pages = np.arange(num * layout.num_pages, dtype=np.int32).reshape(num, -1)
        self.target = PoolPages(self.memory, layout.page.page_bytes, pages)
        self.pieces: list[tuple[int, bytes, np.ndarray]] = []
        self._readers: dict[tuple[str, int], PieceReader] = {}
        for key in self.keys:
            coded = []
            for i in range(layout.num_pieces):
                start, end = layout.piece(i)
                out = np.empty(self.codec.max_stored_bytes(end - start), np.uint8)
                coded.append(out[: self.codec.encode(raw[start:end], i, key, out)])
                self.pieces.append((i, key, coded[-1]))
            assert store.writer().write(key, [[piece.data] for piece in coded])
        self.stored_bytes = sum(len(piece) for _, _, piece in self.pieces)

    def reader(self, thread: int) -> PieceReader:
        # The threads of each pipeline have their own.
        key = (threading.current_thread().name, threading.get_ident())
        if key not in self._readers:
            self._readers[key] = self.store.reader()
        return self._readers[key]

    def damaged(self, key: bytes, why: str) -> None:
        raise AssertionError(why)

    def incomplete(self, key: bytes) -> None:
        raise AssertionError("a piece is gone: is the store too small?")

    def fetch(self, pipeline: Pipeline) -> float:
        ended, counts = threading.Event(), []
        self.memory[:: self.layout.piece_bytes] = 1
        began = time.perf_counter()
        pipeline.submit(Fetch(self, self.keys, self.target, lambda count: (counts.append(count), ended.set())))
        ended.wait()
        seconds = time.perf_counter() - began
        assert counts == [len(self.keys)], f"{counts} of {len(self.keys)} blocks came"
        return seconds

    def alone(self, engine: StageEngine, stage: str, settings: ProxySettings) -> float:
        """Seconds of one stage for all pieces, on its threads."""
        todo, lock = deque(range(len(self.pieces))), threading.Lock()
        headers = [self.codec.parse(stored, i, key) for i, key, stored in self.pieces]
        mids = [np.empty(h.mid_bytes, np.uint8) for h in headers]
        outs = [np.empty(h.raw_bytes, np.uint8) for h in headers] if stage == "deliver" else []
        for mid, header, (_, _, stored) in zip(mids, headers, self.pieces):
            self.codec.decompress(stored, header, mid)
        for out in outs:
            out[:] = 0

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
                    return
                engine.receive(reader, buffer)
                asked -= 1

        def work() -> None:
            while (at := take()) is not None:
                i, key, stored = self.pieces[at]
                start = at * self.layout.piece_bytes
                target = self.memory[start : start + headers[at].raw_bytes]
                if stage == "decompress":
                    engine.decompress(self.codec, stored, self.codec.parse(stored, i, key), mids[at])
                elif stage == "dequantize":
                    engine.dequantize(self.codec, stored, headers[at], mids[at], target)
                else:
                    engine.deliver(self.target, *divmod(start, self.layout.block_bytes), outs[at], lambda _: None)

        threads = [
            threading.Thread(target=receive if stage == "receive" else work) for _ in range(settings.threads(stage))
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def measure(rig: Rig, name: str, emulated: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    raw_gb = rig.memory.nbytes / 1e9
    # An accelerator copies what it has dequantized.
    variants = {v: {**c, **({"direct": False} if emulated else {})} for v, c in VARIANTS.items()}
    if emulated:
        del variants["staged"]
    settings = {variant: ProxySettings(**BUFFERS, **changes, **emulated) for variant, changes in variants.items()}
    pipelines = {variant: Pipeline(s, make_engine(s)) for variant, s in settings.items()}
    stages = [s for s in STAGES if s != "deliver"]
    works: dict[str, Callable[[], float]] = {v: (lambda p=p: rig.fetch(p)) for v, p in pipelines.items()}
    for stage in (*stages, "deliver"):
        s = settings["pipelined"]
        works[stage] = lambda stage=stage, s=s: rig.alone(make_engine(s), stage, s)
    samples: dict[str, list[float]] = {what: [] for what in works}
    for i in range(rounds + 1):
        for what, work in works.items():
            seconds = work()
            if i:  # the first round warms up
                samples[what].append(seconds)
    times = {what: np.array(values) for what, values in samples.items()}
    rows = []
    for what in works:
        row: dict[str, Any] = {"codec": name, "engine": "emulated" if emulated else "software", "what": what}
        row["GB/s raw"] = raw_gb / float(np.median(times[what]))
        if what in pipelines:
            # Without a staging copy nothing is delivered.
            needed = stages if settings[what].direct else (*stages, "deliver")
            slowest = np.max([times[stage] for stage in needed], axis=0)
            counters, direct = pipelines[what].stats(), settings[what].direct
            fetched = counters["deliver_bytes"]
            moved = counters["receive_bytes"] + counters["decompress_bytes"] + counters["dequantize_bytes"]
            row["of the slowest stage alone"] = float(np.median(slowest / times[what]))
            row["times as long as pipelined"] = float(np.median(times[what] / times["pipelined"]))
            row["bytes moved per byte"] = (moved + (0 if direct else fetched)) / fetched
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1.0, help="the emulated network, in 10^9 bits per second")
    args = parser.parse_args()
    layout, raw = block_of(synthetic(BLOCK_TOKENS), 1, "bfloat16")
    contended = PROFILES["bluefield-3-emulated"]["rates_gbps"]
    rates = {stage: gbps * args.rate / contended["receive"] for stage, gbps in contended.items()}
    emulated = {"engine": "emulated", "rates_gbps": rates}
    rows: list[dict[str, Any]] = []
    for name, codec in CODECS.items():
        with tempfile.TemporaryDirectory() as folder:
            server = EmbeddedStore.start(Path(folder) / "store", 4 << 30)
            try:
                store = ObjectStore(server.address, b"bench", layout.num_pieces, 60.0)
                rig = Rig(store, layout, codec, raw, args.blocks)
                for engine in ({}, emulated):
                    rows += measure(rig, name, engine, args.rounds)
                print(f"{name}: {rig.memory.nbytes / rig.stored_bytes:.2f} times smaller in the store")
            finally:
                server.stop()
    for engine in ("software", "emulated"):
        print_table(f"Pipeline, {engine}", [r for r in rows if r["engine"] == engine and "bytes moved per byte" in r])
        alone = [r for r in rows if r["engine"] == engine and "bytes moved per byte" not in r]
        print_table(f"Each stage alone, {engine}", alone)
    write_json("offload", {**vars(args), "block_tokens": BLOCK_TOKENS, "rates_gbps": rates}, rows)


if __name__ == "__main__":
    main()
