"""Memory, descriptors and threads of a server over time, under requests of all kinds.

    PYTHONPATH=test python benchmark/bench_server_memory.py [--minutes 40] [--clients 4] [--seed 1]

The server has the embedded model, a small device, host, disk and store, and streams layers. What a server might keep
for ever is new in each request: salts, sessions, names, grammars and schemas, requests that are given up, wrong ones.
Prints of each process its resident memory that is not shared, its descriptors and its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import psutil
from common import print_table, write_json

from support.chaos_bodies import WRONG, bodies, drawn_fields
from support.server_fixture import Server

_KEY = "administrator"
_FLAGS = (
    *("--hicache", "--hicache-size", "0.02", "--max-total-tokens", "6000", "--chunked-prefill-size", "512"),
    *("--layer-stream", "2", "--tool-call-parser", "hermes", "--hicache-storage-backend", "file,remote"),
)
# A client gives some requests up after so many seconds.
_SHORT_S = (0.01, 0.05)
_SAMPLES = 4


class Clients:
    """base: the server's URL. Prompts share the beginnings of a few texts."""

    def __init__(self, base: str, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._texts = [self._tokens(self._random.choice((60, 200, 500, 900))) for _ in range(24)]
        self._http = httpx.AsyncClient(base_url=base, timeout=60, headers={"authorization": f"Bearer {_KEY}"})
        self._next = 0

    def _tokens(self, n: int) -> list[int]:
        return [self._random.randrange(256, 500) for _ in range(n)]

    def _prompt(self) -> list[int]:
        text = self._random.choice(self._texts)
        return text[: self._random.randrange(10, len(text) + 1)] + self._tokens(self._random.randrange(1, 40))

    async def run(self, until: float) -> None:
        """Requests, one after another."""
        asked: list[tuple[int, Callable[[str], Awaitable[httpx.Response]]]] = [
            (30, self._any_api),
            (10, self._wrong),
            (15, self._stream_that_is_left),
            (10, self._grammar),
            (6, self._schema),
            (8, self._given_up),
            (8, self._label),
            (5, self._erase),
            (2, self._flush),
            (3, self._metrics),
            (3, self._tokenize),
        ]
        weights, kinds = zip(*asked)
        while time.monotonic() < until:
            self._next += 1
            (ask,) = self._random.choices(kinds, weights)
            try:
                reply = await ask(f"n{self._next}")
                self.outcomes[f"{ask.__name__.strip('_')} {reply.status_code}"] += 1
            except httpx.TransportError as error:
                self.outcomes[f"{ask.__name__.strip('_')} {type(error).__name__}"] += 1

    async def close(self) -> None:
        await self._http.aclose()

    async def _any_api(self, name: str) -> httpx.Response:
        path, body = self._random.choice(bodies([self._prompt() for _ in range(3)], 0.8))
        fields = drawn_fields(self._random) if path in ("/v1/completions", "/generate") else {}
        return await self._http.post(path, json={**body, **fields})

    async def _wrong(self, name: str) -> httpx.Response:
        path, body = self._random.choice(WRONG)
        return await self._http.post(path, json=body)

    async def _stream_that_is_left(self, name: str) -> httpx.Response:
        body = {"prompt": self._prompt(), "max_tokens": self._random.randrange(1, 60), "stream": True}
        async with self._http.stream("POST", "/v1/completions", json={**body, "cache_salt": name}) as reply:
            async for _ in reply.aiter_lines():
                if self._random.random() < 0.05:
                    break
        return reply

    async def _grammar(self, name: str) -> httpx.Response:
        params = {"regex": f"[a-{self._random.choice('bcdefgh')}]{{{self._random.randrange(1, 30)}}}{name}"}
        body = {"text": "hello there", "rid": name, "sampling_params": {**params, "max_new_tokens": 12}}
        return await self._http.post("/generate", json=body)

    async def _schema(self, name: str) -> httpx.Response:
        schema = {"name": "answer", "schema": {"type": "object", "properties": {name: {"type": "integer"}}}}
        body = {"messages": [{"role": "user", "content": "x" * self._random.randrange(1, 300)}], "max_tokens": 20}
        form = {"type": "json_schema", "json_schema": schema}
        return await self._http.post("/v1/chat/completions", json={**body, "user": name, "response_format": form})

    async def _given_up(self, name: str) -> httpx.Response:
        body = {"input_ids": self._prompt(), "session_id": name, "sampling_params": {"max_new_tokens": 5}}
        return await self._http.post("/generate", json=body, timeout=self._random.choice(_SHORT_S))

    async def _label(self, name: str) -> httpx.Response:
        await self._http.put(f"/hicache/labels/{name}", json={"input_ids": self._prompt()})
        return await self._http.delete(f"/hicache/labels/{name}")

    async def _erase(self, name: str) -> httpx.Response:
        return await self._http.post("/hicache/erase", json={"cache_salt": f"n{self._random.randrange(self._next)}"})

    async def _flush(self, name: str) -> httpx.Response:
        return await self._http.post("/flush_cache")

    async def _metrics(self, name: str) -> httpx.Response:
        return await self._http.get("/metrics")

    async def _tokenize(self, name: str) -> httpx.Response:
        return await self._http.post("/tokenize", json={"prompt": f"{name} " * self._random.randrange(1, 200)})


def sample(server: psutil.Process) -> dict[int, tuple[str, float, int, int]]:
    """By process: its name, MB of resident memory that is not shared, descriptors, threads."""
    found = {}
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_info()
            used = (memory.rss - memory.shared) / 1e6
            found[process.pid] = (_name(process), used, process.num_fds(), process.num_threads())
    return found


def _name(process: psutil.Process) -> str:
    """The last part of its module's name, or of its program's."""
    command = process.cmdline()
    module = command[command.index("-m") + 1] if "-m" in command else process.name()
    return module.rpartition(".")[2]


def _before_and_after(numbers: list[int]) -> str:
    return f"{numbers[0]} → {numbers[-1]}"


async def drive(base: str, server: psutil.Process, minutes: float, num_clients: int, seed: int) -> dict[str, Any]:
    clients, until = Clients(base, seed), time.monotonic() + 60 * minutes
    work = [asyncio.create_task(clients.run(until)) for _ in range(num_clients)]
    # After a warm-up, and then in equal parts.
    warm_up_s = min(60.0, 10 * minutes)
    samples = []
    for at in range(_SAMPLES):
        left_s = until - time.monotonic()
        await asyncio.sleep(warm_up_s if at == 0 else left_s / (_SAMPLES - at))
        samples.append((sum(clients.outcomes.values()), sample(server)))
    await asyncio.gather(*work)
    await clients.close()
    first = samples[0][1]
    rows = [
        {
            "process": first[pid][0],
            **{f"MB, {n}": each[pid][1] for n, each in samples if pid in each},
            "descriptors": _before_and_after([each[pid][2] for _, each in samples if pid in each]),
            "threads": _before_and_after([each[pid][3] for _, each in samples if pid in each]),
        }
        for pid in first
    ]
    return {"rows": rows, "outcomes": dict(sorted(clients.outcomes.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stores = {"file": {"path": folder, "limit_gb": 0.05, "segment_mb": 4}, "remote": {"limit_gb": 0.03}}
        config = msgspec.json.encode(stores).decode()
        flags = [*_FLAGS, "--admin-api-key", _KEY, "--hicache-storage-backend-extra-config", config]
        with Server(*flags) as server:
            process = psutil.Process(server.process.pid)
            found = asyncio.run(drive(server.url, process, args.minutes, args.clients, args.seed))
    print_table("Memory that is not shared, by requests before", found["rows"])
    print(found["outcomes"])
    write_json("server_memory", vars(args), found["rows"], outcomes=found["outcomes"])


if __name__ == "__main__":
    main()
