"""What `hicache advise` predicts beside what the simulator finds, on the first rows of a trace.

    python -m benchmark.bench_advise --trace FILE [--num-rows N] [--predict-only]

The real scheduler runs on the virtual clock with a device, a host and a disk: all its numbers are simulated. Answers
have one token, because a simulated decode step takes a millisecond of ours.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from benchmark.common import print_table, write_json
from benchmark.simulator.small_machine import SmallMachine
from benchmark.simulator.traces import read_agentic, read_mooncake
from benchmark.simulator.workloads import WorkloadSource

from sglang.cli.reference_sources import read_sample, read_trace
from sglang.cli.reuse import HitCurve
from sglang.simulator.simulation import Simulation
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.prefix_sampler import PrefixSampler
from sglang.srt.mem_cache.transfer import Tier

PAGE_SIZE = 64
CONTEXT_LEN = 262_144
CHUNK_TOKENS = 16_384
# Sessions at a time.
NUM_OPEN = 16
# Requests come so much more slowly than in the trace, so that few wait.
SLOWER = 0.1
# Tokens by tier: device, host, disk.
CASES = (
    (524_288, 0, 0),
    (524_288, 1_048_576, 0),
    (524_288, 4_194_304, 0),
    (524_288, 1_048_576, 4_194_304),
)


@dataclass(frozen=True)
class Result:
    device: int
    host: int
    disk: int
    # Shares of all prompt tokens: from the trace, and from a sample as a live server takes it.
    predicted: float
    sampled: float | None
    simulated: float | None


def cut(trace: Path, num_rows: int, folder: Path) -> Path:
    """The first rows, with answers of one token."""
    path = folder / "cut.jsonl"
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else open(trace) as lines:
        rows = [json.loads(line) for line in islice(lines, num_rows)]
    path.write_text("".join(json.dumps(row | {"output_length": 1}) + "\n" for row in rows))
    return path


class SampledSource:
    """A `RequestSource` whose prompts are sampled when they are sent."""

    def __init__(self, source: WorkloadSource) -> None:
        self.sampler = PrefixSampler()
        self._source = source

    def next_at(self) -> float | None:
        return self._source.next_at()

    def take(self, now: float) -> list[TokenizedGenerateReqInput]:
        sent = self._source.take(now)
        for request in sent:
            self.sampler.note_prompt("", np.frombuffer(request.input_ids, np.int32))
        return sent

    def finished(self, rid: str, now: float) -> None:
        self._source.finished(rid, now)


def simulate(path: Path, sizes: tuple[int, int, int]) -> tuple[float, float]:
    """What a sample of the run's prompts predicts, and what the run found."""
    workload = read_agentic(path, NUM_OPEN) if "session_id" in path.read_text() else read_mooncake(path, SLOWER)
    tiers = {tier: size for tier, size in zip((Tier.DEVICE, Tier.HOST, Tier.DISK), sizes) if size}
    machine = SmallMachine(tiers, page_size=PAGE_SIZE, chunk_tokens=CHUNK_TOKENS, context_len=CONTEXT_LEN)
    sim = Simulation(machine.config(), machine.hardware())
    source = SampledSource(workload.source())
    times = sim.run(source)
    found = sum(sum(each.cached_tokens_details.values()) for each in times.values())
    counters = sim.core.scheduler.counters
    log, _ = read_sample(source.sampler.state())
    return predict(log.curve(), sizes), found / counters["prompt_tokens"]


def predict(curve: HitCurve, sizes: tuple[int, int, int]) -> float:
    return curve.hits(sum(sizes)) / curve.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-rows", type=int, default=2000)
    parser.add_argument("--predict-only", action="store_true", help="leave the simulator out")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = cut(args.trace, args.num_rows, Path(folder))
        log, _ = read_trace(path, args.num_rows)
        curve = log.curve()
        for sizes in CASES:
            sampled, simulated = (None, None) if args.predict_only else simulate(path, sizes)
            results.append(Result(*sizes, predict(curve, sizes), sampled, simulated))
    print(f"{curve.prompt_tokens:,.0f} prompt tokens; an endless cache finds {curve.most / curve.prompt_tokens:.1%}")
    rows = [
        {
            "device": each.device,
            "host": each.host,
            "disk": each.disk,
            "predicted %": round(100 * each.predicted, 1),
            "from a sample %": None if each.sampled is None else round(100 * each.sampled, 1),
            "simulated %": None if each.simulated is None else round(100 * each.simulated, 1),
        }
        for each in results
    ]
    print_table("Prompt tokens found", rows)
    write_json("advise", {"trace": args.trace.name, "num_rows": args.num_rows}, rows)


if __name__ == "__main__":
    main()
