"""How long the host pool's memory takes to come into being: by a first write to each page, or by threads that
populate it, on ordinary and on huge pages. On a GPU also how long CUDA takes to register it, untouched and populated.

    python benchmark/bench_host_memory.py [--size-gb 2] [--rounds 5]

New memory each time, as a pool has it (`SharedMemory`), the ways in turn; medians of the rounds, and of each round's
ratios over the first write.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import percentiles, print_table, write_json

from sgl_kernel.cpu.huge_pages import ask_for_huge_pages, populate
from sglang.srt.mem_cache.memory_pool_host import cuda_register, cuda_unregister
from sglang.srt.utils.shared_memory import SharedMemory

THREADS = (1, 2, 4, 8)
_PAGE_BYTES = 4096
_FIRST_WRITE = "first write, 1 thread"


def write_each_page(memory: torch.Tensor) -> None:
    memory[::_PAGE_BYTES] = 1


def ways() -> dict[str, Callable[[torch.Tensor], Any]]:
    found: dict[str, Callable[[torch.Tensor], Any]] = {_FIRST_WRITE: write_each_page}
    for threads in THREADS:
        found[f"populate, {threads} threads"] = lambda memory, n=threads: populate(memory, n)
    return found


def seconds_of(size_bytes: int, is_huge: bool, way: Callable[[torch.Tensor], Any] | None) -> dict[str, float]:
    """way: None leaves all to CUDA."""
    memory = torch.from_numpy(SharedMemory.allocate(size_bytes, "bench").memory)
    if is_huge:
        ask_for_huge_pages(memory)
    start = time.perf_counter()
    if way is not None:
        way(memory)
    found = {"s": time.perf_counter() - start}
    if torch.cuda.is_available():
        start = time.perf_counter()
        cuda_register(memory.data_ptr(), size_bytes)
        found["register s"] = time.perf_counter() - start
        cuda_unregister(memory.data_ptr())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size_bytes = int(args.size_gb * 1e9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    named: dict[str, Callable[[torch.Tensor], Any] | None] = dict(ways())
    if torch.cuda.is_available():
        named["register alone"] = None
    rows = []
    for is_huge in (False, True):
        rounds = [
            {name: seconds_of(size_bytes, is_huge, way) for name, way in named.items()} for _ in range(args.rounds)
        ]
        for name in named:
            times = [each[name]["s"] for each in rounds]
            ratios = [each[name]["s"] / each[_FIRST_WRITE]["s"] for each in rounds]
            row: dict[str, Any] = {
                "pages": "huge, if the system has them" if is_huge else "ordinary",
                "way": name,
                "s per 10 GB": percentiles(times, 50)[0] * 10 / args.size_gb,
                "times the first write": percentiles(ratios, 50)[0],
            }
            if "register s" in rounds[0][name]:
                row["register, s per 10 GB"] = (
                    percentiles([each[name]["register s"] for each in rounds], 50)[0] * 10 / args.size_gb
                )
            rows.append(row)
    print_table("Memory of the host pool (measured)", rows)
    write_json(f"host_memory_{device}", vars(args), rows)


if __name__ == "__main__":
    main()
