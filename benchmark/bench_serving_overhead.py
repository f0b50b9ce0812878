"""The cost of serving beside the model: CPU per token at 64 streams, a request's way to its first step, sampling.

    python benchmark/bench_serving_overhead.py [--rounds N]

The server is real, with the embedded model. CPU time is the operating system's account of each process, so that it
holds on a machine with other work too. The way to the first step is read from a record of the run: both ends read one
monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
from bench_end_to_end import Server
from common import percentiles, print_table, time_each, write_json

from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

STREAMS, PROMPT_LEN, OUTPUT_LEN = 64, 64, 128


def cpu_seconds(server: Server) -> dict[str, float]:
    """Per process of the server, so far."""
    parent = psutil.Process(server.process.pid)
    found = {"http and tokenizer": parent}
    for child in parent.children(recursive=True):
        line = " ".join(child.cmdline())
        for name in ("scheduler", "detokenizer"):
            if f"managers.{name}" in line:
                found[name] = child
    return {name: sum(p.cpu_times()[:2]) for name, p in found.items()}


async def stream(server: Server, prompt: list[int]) -> int:
    """Chunks of one streamed answer."""
    body = {
        "model": "embedded",
        "prompt": prompt,
        "max_tokens": OUTPUT_LEN,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    chunks = 0
    async with server.client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            chunks += line.startswith("data: {")
    return chunks


async def cpu_per_token(rounds: int) -> list[dict[str, object]]:
    server = Server("--hicache")
    rng = np.random.default_rng(0)
    try:
        await server.ready()
        samples: dict[str, list[float]] = {}
        for i in range(rounds + 1):
            before = cpu_seconds(server)
            prompts = [rng.integers(10, 2000, PROMPT_LEN).tolist() for _ in range(STREAMS)]
            chunks = await asyncio.gather(*(stream(server, p) for p in prompts))
            after = cpu_seconds(server)
            assert min(chunks) > OUTPUT_LEN / 2, "the answers did not come as streams"
            if i:
                for name in before:
                    samples.setdefault(name, []).append((after[name] - before[name]) / (STREAMS * OUTPUT_LEN))
    finally:
        await server.stop()
    return [
        {"process": name, "CPU us per token": float(np.median(values)) * 1e6, "rounds": rounds}
        for name, values in samples.items()
    ]


async def first_step() -> list[dict[str, object]]:
    rng = np.random.default_rng(1)
    rows: list[dict[str, object]] = []
    # Few of the longest prompts, because each also takes seconds to compute.
    for length, num_requests in ((16, 60), (1024, 60), (16384, 10)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps"
            server = Server("--record-steps", str(path))
            sent = []
            try:
                await server.ready()
                for _ in range(num_requests):
                    prompt = rng.integers(10, 2000, length)
                    sent.append(time.monotonic())
                    await server.generate(prompt, 1)
                    await asyncio.sleep(0.02)
            finally:
                await server.stop()
            arrived = [inputs.now for inputs in recorded_inputs(path) for _ in inputs.new]
        assert len(arrived) == len(sent)
        waits = (np.array(arrived) - np.array(sent))[2:] * 1e3
        median, p99 = percentiles(waits.tolist(), 50, 99)
        rows.append({"prompt tokens": length, "median ms": median, "p99 ms": p99, "num_samples": len(waits)})
    return rows


def recorded_inputs(path: Path) -> list[StepInputs]:
    """Frames of a record: its format, the configuration, then inputs and digests in turn."""
    data, frames, at = path.read_bytes(), [], 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    decoder = msgspec.msgpack.Decoder(StepInputs)
    return [decoder.decode(frame) for frame in frames[2::2]]


def sampling(rounds: int) -> list[dict[str, object]]:
    n, rows = 256, []
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (2048, 32_000, 151_936):
        logits = torch.randn(n, vocab_size, generator=generator) * 3
        for name, temperature, top_k, top_p, min_p in (
            ("greedy", 0.0, vocab_size, 1.0, 0.0),
            ("temperature", 1.0, vocab_size, 1.0, 0.0),
            ("top_k 50", 1.0, 50, 1.0, 0.0),
            ("top_p 0.9", 1.0, vocab_size, 0.9, 0.0),
            ("min_p 0.05", 1.0, vocab_size, 1.0, 0.05),
        ):
            params = [
                SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, sampling_seed=i)
                for i in range(n)
            ]
            info = SamplingBatchInfo.from_params(params, vocab_size, torch.arange(n))
            sampler = Sampler()
            samples = time_each(lambda x: sampler(*x), [(logits, info)], rounds + 2)[2:]  # noqa: B023
            rows.append({"vocabulary": vocab_size, "sampling": name, "median ms": float(np.median(samples)) * 1e3})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cpu = asyncio.run(cpu_per_token(args.rounds))
    print_table(f"CPU per token, {STREAMS} streams of {OUTPUT_LEN} tokens over HTTP", cpu)
    step = asyncio.run(first_step())
    print_table("From the client's request to its first scheduler step", step)
    drawn = sampling(args.rounds)
    print_table("Sampling for 256 requests", drawn)
    write_json("serving_overhead", {"rounds": args.rounds}, [*cpu, *step, *drawn])


if __name__ == "__main__":
    main()
