"""The server over HTTP beside transformers' `generate`, on the same model and machine, in turns.

    python benchmark/bench_end_to_end.py [--rounds N]

Throughput: 32 concurrent requests, new prompts each round. `generate` runs them one after the other, and again as one
left-padded batch, which a server could only do if all came at once. First token: prompts that share 90 % with a
prompt that was served before; `generate` has no cache between calls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import torch
from common import print_table, write_json
from transformers import AutoModelForCausalLM

from sglang.srt.configs.embedded_model import ensure_embedded_model

CONCURRENT, PROMPT_LEN, OUTPUT_LEN = 32, 256, 64
TTFT_LEN, SHARED = 2048, 0.9
# One after the other, in each round.
FIRST_TOKENS = 6
REST_S = 0.3


class Server:
    def __init__(self, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "embedded", "--log-level", "error"]
        self.process = subprocess.Popen([*command, "--port", str(self.port), *flags], env=os.environ)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    async def ready(self) -> None:
        for _ in range(600):
            try:
                if (await self.client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise TimeoutError("the server did not start")

    async def generate(self, prompt: np.ndarray, num_tokens: int) -> None:
        params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        reply = await self.client.post("/generate", json={"input_ids": prompt.tolist(), "sampling_params": params})
        assert reply.json()["meta_info"]["completion_tokens"] == num_tokens, reply.text

    async def stop(self) -> None:
        await self.client.aclose()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


async def run(rounds: int) -> list[dict[str, object]]:
    server = Server("--hicache")
    model = AutoModelForCausalLM.from_pretrained(ensure_embedded_model(), dtype=torch.float32).eval()
    rng = np.random.default_rng(0)

    def prompt(length: int) -> np.ndarray:
        return rng.integers(10, 2000, length)

    def transformers_generate(ids: np.ndarray, num_tokens: int) -> None:
        batch = torch.from_numpy(ids.reshape(-1, ids.shape[-1]))
        with torch.inference_mode():
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[-1] == batch.shape[-1] + num_tokens

    try:
        await server.ready()
        shared = prompt(int(TTFT_LEN * SHARED))
        await server.generate(np.concatenate([shared, prompt(1)]), 1)
        seconds: dict[str, list[float]] = {}
        for i in range(rounds + 1):
            prompts = [prompt(PROMPT_LEN) for _ in range(CONCURRENT)]
            tailed = [np.concatenate([shared, prompt(TTFT_LEN - len(shared))]) for _ in range(FIRST_TOKENS)]

            async def concurrent(batch: list[np.ndarray] = prompts) -> None:
                await asyncio.gather(*(server.generate(p, OUTPUT_LEN) for p in batch))

            async def one_by_one(batch: list[np.ndarray] = prompts) -> None:
                for p in batch:
                    transformers_generate(p, OUTPUT_LEN)

            async def padded_batch(batch: list[np.ndarray] = prompts) -> None:
                transformers_generate(np.stack(batch), OUTPUT_LEN)

            async def server_first(batch: list[np.ndarray] = tailed) -> None:
                for p in batch:
                    await server.generate(p, 1)

            async def transformers_first(batch: list[np.ndarray] = tailed) -> None:
                for p in batch:
                    transformers_generate(p, 1)

            for name, work in (
                ("server", concurrent),
                ("one by one", one_by_one),
                ("padded batch", padded_batch),
                ("server first token", server_first),
                ("transformers first token", transformers_first),
            ):
                # The threads of the last measured variant spin for a while on the cores of the next one.
                await asyncio.sleep(REST_S)
                start = time.perf_counter()
                await work()
                if i:  # the first round warms up
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
    finally:
        await server.stop()
    s = {name: np.array(values) for name, values in seconds.items()}
    tokens = CONCURRENT * OUTPUT_LEN
    rows: list[dict[str, object]] = []
    for name in ("one by one", "padded batch"):
        rows.append(
            {
                "measure": f"output tokens/s, {CONCURRENT} requests; generate {name}",
                "server": float(np.median(tokens / s["server"])),
                "transformers": float(np.median(tokens / s[name])),
                "server is better by": float(np.median(s[name] / s["server"])),
            }
        )
    mine, theirs = s["server first token"], s["transformers first token"]
    rows.append(
        {
            "measure": f"first token, ms; {TTFT_LEN} tokens, {SHARED:.0%} shared",
            "server": float(np.median(mine)) / FIRST_TOKENS * 1e3,
            "transformers": float(np.median(theirs)) / FIRST_TOKENS * 1e3,
            "server is better by": float(np.median(theirs / mine)),
        }
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = asyncio.run(run(args.rounds))
    print_table("End to end over HTTP, embedded model, float32; medians, ratios pair by pair", rows)
    settings = {"concurrent": CONCURRENT, "prompt_len": PROMPT_LEN, "output_len": OUTPUT_LEN, "rounds": args.rounds}
    write_json("end_to_end", settings, rows)


if __name__ == "__main__":
    main()
