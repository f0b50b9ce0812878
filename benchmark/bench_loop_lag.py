"""How long the HTTP process's event loop keeps a client waiting while it does other clients' work.

    python benchmark/bench_loop_lag.py [--seconds S] [--cases NAME ...]

The server is real, with the embedded model. A process of its own asks for /health every 10 ms, over one connection,
and notes how long each answer took. /health waits for nothing but the event loop; where a call blocks the loop, or
Python's lock is held by a thread, the answer is late by that long. On a machine whose cores are shared, it is late
for want of a core too. Linux counts how long the loop's thread ran, and how long it was ready and had no core.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from bench_end_to_end import Server
from common import percentiles, print_table, write_json
from health_probe import PERIOD_S

FLAGS = ("--hicache", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
# No two grammars of a run are equal: results for those that were seen are remembered.
fresh = itertools.count()

Work = Callable[[Server], Awaitable[None]]


class Probe:
    """The process that asks. It begins at once."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("health_probe.py")), str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "asking\n"

    def end(self) -> list[float]:
        """Seconds of each answer."""
        out, _ = self._process.communicate("\n")
        found: list[float] = json.loads(out)
        return found


def thread_times(server: Server) -> tuple[float, float]:
    """Seconds in which the loop's thread ran, and in which it waited for a core, so far."""
    ran, waited, _ = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


async def post(server: Server, path: str, body: dict[str, Any], status: int | None = 200) -> httpx.Response:
    reply = await server.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert status is None or reply.status_code == status, reply.text[:300]
    return reply


async def stream(server: Server, path: str, body: dict[str, Any]) -> None:
    async with server.client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for _ in reply.aiter_raw():
            pass


async def idle(server: Server) -> None:
    await asyncio.sleep(1)


async def streams(server: Server) -> None:
    """64 streams of 128 tokens."""
    rng = np.random.default_rng(next(fresh))
    body = {"max_tokens": 128, "temperature": 0, "ignore_eos": True}
    prompts = [rng.integers(10, 2000, 64).tolist() for _ in range(64)]
    await asyncio.gather(*(stream(server, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts))


async def long_texts(server: Server) -> None:
    """Four texts of 1 MB: two as prompts, which are refused, two to tokenize."""
    texts = [f"{next(fresh)} The quick brown fox jumps. " * (1_000_000 // 29) for _ in range(4)]
    await asyncio.gather(
        *(post(server, "/v1/completions", {"prompt": text, "max_tokens": 1}, status=400) for text in texts[:2]),
        *(post(server, "/tokenize", {"prompt": text}) for text in texts[2:]),
    )


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def schema(num_fields: int) -> dict[str, Any]:
    """Fields with names of their own, 100 bytes each."""
    mark = next(fresh)
    fields = {f"field_{mark}_{i}": {"type": "string", "description": "Words " * 9} for i in range(num_fields)}
    return {"type": "object", "properties": fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}


async def many_tools(server: Server) -> None:
    """Four chats with 512 tools of 1.8 KB each, and four with a tool of 200 KB."""
    many = [[tool(f"f{i}", schema(16)) for i in range(512)] for _ in range(2)]
    large = [[tool("f", schema(2000))] for _ in range(2)]
    for tools in (*many, *large):
        for choice in ("auto", "required"):
            await post(server, "/v1/chat/completions", chat(tools=tools, tool_choice=choice), status=None)


async def useful_grammars(server: Server) -> None:
    """16 new schemas of ten fields at once."""
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema(10)}} for _ in range(16)]
    await asyncio.gather(*(post(server, "/v1/chat/completions", chat(response_format=each)) for each in formats))


async def hostile_grammars(server: Server) -> None:
    """Four new grammars that take seconds or much memory to compile."""
    mark = next(fresh)
    grammars = (
        {"regex": f"(a{{1,1000}}){{1,{1000 + mark}}}"},
        {"regex": "(" * (5000 + mark) + ")" * (5000 + mark)},
        {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 10**6 + mark}},
        {"json_schema": schema(2000)},
    )
    await asyncio.gather(*(post(server, "/v1/chat/completions", chat(**each), status=None) for each in grammars))


async def tool_calls(server: Server) -> None:
    """32 streamed chats of 128 tokens, each a call that a grammar forces."""
    tools = [tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})]
    body = chat(tools=tools, tool_choice="required") | {"max_tokens": 128}
    await asyncio.gather(*(stream(server, "/v1/chat/completions", body) for _ in range(32)))


async def embeddings(server: Server) -> None:
    """256 inputs of 64 tokens in a request."""
    rng = np.random.default_rng(next(fresh))
    await post(server, "/v1/embeddings", {"input": rng.integers(10, 2000, (256, 64)).tolist()})


async def many_completions(server: Server) -> None:
    """2,048 answers of four tokens with five log-probabilities each, in a request."""
    body = {"prompt": [f"{next(fresh)}" for _ in range(16)], "n": 128, "max_tokens": 4, "logprobs": 5}
    await post(server, "/v1/completions", body)


CASES: dict[str, Work] = {
    "idle": idle,
    "64 streams": streams,
    "texts of 1 MB": long_texts,
    "512 tools, 200 KB schemas": many_tools,
    "useful grammars": useful_grammars,
    "hostile grammars": hostile_grammars,
    "tool calls": tool_calls,
    "256 embeddings": embeddings,
    "2,048 completions": many_completions,
}


async def run(seconds: float, names: list[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    server = Server(*FLAGS)
    # The server ends connections that are idle for five seconds.
    limits = httpx.Limits(max_connections=128, keepalive_expiry=2)
    server.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=300, limits=limits)
    try:
        await server.ready()
        await useful_grammars(server)  # starts the processes that check grammars
        for name in names:
            work = CASES[name]
            await work(server)
            watch = Probe(server.port)
            start, runs, before = time.perf_counter(), 0, thread_times(server)
            while runs < 2 or time.perf_counter() - start < seconds:
                await work(server)
                runs += 1
            took = time.perf_counter() - start
            ran, waited = (now - then for now, then in zip(thread_times(server), before, strict=True))
            samples = await asyncio.get_running_loop().run_in_executor(None, watch.end)
            median, p99, worst = (each * 1e3 for each in percentiles(samples, 50, 99, 100))
            print(f"{name}: worst {worst:.0f} ms", flush=True)
            rows.append(
                {
                    "beside": name,
                    "median ms": median,
                    "p99 ms": p99,
                    "worst ms": worst,
                    "loop ran, %": 100 * ran / took,
                    "no core, %": 100 * waited / took,
                    "runs": runs,
                    "num_samples": len(samples),
                }
            )
    finally:
        await server.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    rows = asyncio.run(run(args.seconds, args.cases))
    print_table("How late /health is", rows)
    write_json("loop_lag", {"seconds": args.seconds, "period_s": PERIOD_S}, rows)


if __name__ == "__main__":
    main()
