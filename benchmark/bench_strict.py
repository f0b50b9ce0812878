"""The cost for a borrower that may not map slabs: loads and backups through strict copies, against mapped slabs.

Two workers, processes of their own, lend a slab each: one to be mapped, the other strictly. A master copies the same
scattered pages from and to either, in turns; loads go layer by layer. The numbers are the fastest of the rounds,
because the machine has other work. The copied bytes are compared.

    python benchmark/bench_strict.py [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import print_table, write_json

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, LentOptions, allocate_pool
from sglang.srt.utils.peer_timing import PeerTiming

SLAB_BYTES = 64 << 20
# A Qwen3-8B's heads and as many layers, pages of 1 token in bfloat16: 144 KiB per page.
DTYPE = torch.bfloat16
LAYOUT = PageLayout.kv(1, 36, 8, 128, DTYPE)
PAGE_BYTES = LAYOUT.page_bytes
KINDS = ("mapped", "strict")
DEADLINE_S = 60.0


def lend(endpoint: str, directory: str, kind: str) -> None:
    options = LentOptions(kind == "strict", PeerTiming(offer=1e6))
    pool = allocate_pool(SlabsConfig(1, SLAB_BYTES), LAYOUT)
    memory = LentMemory(endpoint, Path(directory), pool, options=options)
    memory.lend([0])
    while True:
        memory.poll_mapped()
        time.sleep(0.5)


class Master:
    def __init__(self, endpoints: list[str]) -> None:
        self.memory = BorrowedMemory(endpoints, "bench", SlabsConfig(2, SLAB_BYTES), LAYOUT)
        deadline = time.monotonic() + DEADLINE_S
        while self.memory.poll_mapped().mapped != b"\1\1":
            assert time.monotonic() < deadline, "no worker lends"
            time.sleep(0.01)
        pool = self.memory.pool
        self._mover = pool.mover()
        self.device = MHATokenToKVPool(pool.slab_pages, LAYOUT)
        places = {("mapped", "strict")[pool.is_strict(place)]: place for place in (0, 1)}
        self.frames = {kind: torch.from_numpy(pool.frames_of(places[kind])).long() for kind in KINDS}

    def load(self, kind: str, pages: torch.Tensor, there: torch.Tensor) -> float:
        frames = self.frames[kind][there]
        start = time.perf_counter()
        for layer in range(LAYOUT.num_layers):
            self._mover.load_layer(layer, self.device.kv_pages.layer(layer), frames, pages, "auto")
        return time.perf_counter() - start

    def back_up(self, kind: str, pages: torch.Tensor, there: torch.Tensor) -> float:
        frames = self.frames[kind][there]
        start = time.perf_counter()
        self._mover.back_up(self.device.kv_pages, pages, frames, "auto")
        return time.perf_counter() - start


def measure(master: Master, num_pages: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(num_pages)
    times: dict[str, list[float]] = {f"{what} {kind}": [] for what in ("load", "backup") for kind in KINDS}
    for _ in range(rounds):
        pages, there = (torch.from_numpy(rng.permutation(master.device.kv.shape[2])[:num_pages]) for _ in "ab")
        for kind in KINDS:
            wanted = torch.randn(2, LAYOUT.num_layers, num_pages, *LAYOUT.run_shape(LAYOUT.components[0])).to(DTYPE)
            master.device.kv[:, :, pages] = wanted
            times[f"backup {kind}"].append(master.back_up(kind, pages, there))
            master.device.kv[:, :, pages] = 0
            times[f"load {kind}"].append(master.load(kind, pages, there))
            assert torch.equal(master.device.kv[:, :, pages], wanted), "the bytes read differ from the bytes written"
    best = {name: min(samples) * 1e3 for name, samples in times.items()}
    row: dict[str, Any] = {"pages": num_pages, "MiB": num_pages * PAGE_BYTES / (1 << 20)}
    for what in ("load", "backup"):
        row |= {f"{what} {kind}, ms": best[f"{what} {kind}"] for kind in KINDS}
        row[f"{what}, strict / mapped"] = best[f"{what} strict"] / best[f"{what} mapped"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--lend", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lend:
        lend(*args.lend)
    with tempfile.TemporaryDirectory() as directory:
        endpoints = {kind: f"ipc://{directory}/{kind}" for kind in KINDS}
        workers = [
            subprocess.Popen([sys.executable, __file__, "--lend", endpoint, directory, kind])
            for kind, endpoint in endpoints.items()
        ]
        try:
            master = Master(list(endpoints.values()))
            rows = [measure(master, n, 3 if args.quick else 20) for n in (1, 16, 128, 448)]
            master.memory.close()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    print_table("Strict copies against mapped slabs", rows)
    write_json("bench_strict", {"quick": args.quick}, rows)


if __name__ == "__main__":
    main()
