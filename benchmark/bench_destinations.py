"""What an offload proxy brings into an engine's pages, and takes from them: in shared memory, and through TCP.

    PYTHONPATH=test python benchmark/bench_destinations.py [--rounds N] [--links GBPS ...]

12 blocks of one piece of 2 MiB, in a Redis server on a Unix socket; the proxy is a process by itself. Links are
shaped with tc between two network namespaces (without the right to make them, these rows are left out). Blocks travel
raw between proxy and engine, whatever their codec, so that *of the link* counts raw bytes. The rows take turns within
a round; medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import print_table, write_json

from support.network import elsewhere
from support.proxy_rig import ProxyRig
from support.remote_fixture import NUM

CODECS = ["raw", "lossless"]
BLOCKS = range(NUM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--links", type=float, nargs="*", default=[1.0, 10.0], help="10^9 bits per second")
    args = parser.parse_args()
    with ExitStack() as stack:
        there = None
        try:
            there = stack.enter_context(elsewhere(1000))
        except RuntimeError as error:
            print(f"without links: {error}")
        rigs: dict[str, tuple[ProxyRig, float]] = {}
        for kind in ("shared memory", "tcp"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            rigs[kind] = ProxyRig(folder, kind, None), 0.0
        for gbps in args.links if there is not None else ():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            rigs[f"tcp, {gbps:g} Gbit/s"] = ProxyRig(folder, "tcp elsewhere", there), gbps
        rows = []
        for codec in CODECS:
            engines = {name: rig.engine(codec=codec) for name, (rig, _) in rigs.items()}
            reads: dict[str, list[float]] = {name: [] for name in rigs}
            writes: dict[str, list[float]] = {name: [] for name in rigs}
            for i in range(args.rounds + 1):
                for name, one in engines.items():
                    if gbps := rigs[name][1]:
                        assert there is not None
                        there.limit(1000 * gbps)
                    one.store.clear()
                    began = time.perf_counter()
                    assert one.put(BLOCKS) == NUM
                    written = time.perf_counter()
                    assert one.get(BLOCKS) == NUM
                    read = time.perf_counter()
                    assert one.came(BLOCKS), f"{name}: other bytes came"
                    if i:  # the first round warms up
                        writes[name].append(written - began)
                        reads[name].append(read - written)
            gigabytes = NUM * one.pool.kv.nbytes / (2 * NUM) / 1e9
            for name, (_, gbps) in rigs.items():
                row: dict[str, Any] = {"codec": codec, "destination": name}
                row["read GB/s"] = gigabytes / statistics.median(reads[name])
                row["write GB/s"] = gigabytes / statistics.median(writes[name])
                row["read, of the link"] = row["read GB/s"] * 8 / gbps if gbps else "-"
                row["write, of the link"] = row["write GB/s"] * 8 / gbps if gbps else "-"
                rows.append(row)
        for rig, _ in rigs.values():
            rig.close()
    print_table("Destinations", rows)
    write_json("destinations", vars(args), rows)


if __name__ == "__main__":
    main()
