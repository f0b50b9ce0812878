"""`make demo-tiers`: one server on all five tiers at once, whose parts are killed and stopped while questions go on.

It starts as a user would: a worker that lends memory, a Redis store, an offload proxy, a server that uses them and a
disk, and a server without a cache to compare with. Each line is a question, and shows from which tiers the tokens of
its prompt came. Then each part is killed or stopped, and brought back. The demo fails unless tokens came from all
five tiers, came again from what was brought back, and all answers equal those of the server without a cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.demo_common import (
    Answer,
    Messages,
    Part,
    ask,
    connect,
    free_port,
    get_json,
    listens,
    post,
    run,
    server,
    summarise,
    wait_ready,
)
from sglang.srt.offload.store.embedded import server_binary

if TYPE_CHECKING:
    from openai import OpenAI

TIERS = ("device", "peer", "host", "disk", "remote")
LETTERS = dict(zip(TIERS, "DPHKR"))
NAMES = ("Ada", "Ben", "Cho", "Dan", "Eve", "Fay")
TURNS = 3
# Each tier holds a part of what the conversations have together.
DEVICE_TOKENS, DISK_TOKENS = 1536, 2048
HOST_RATIO = 0.5
SLAB_MIB, NUM_SLABS = 1, 1
WORKER = "--max-total-tokens 4096 --context-length 1024 --peer-role worker --peer-window 2"
# Tokens per block of storage.
BLOCK_TOKENS = 32
# Bytes of a token's KV in the embedded model.
TOKEN_BYTES = 2048
BAR = 32
# The most questions until what is expected has come from a tier, and the most seconds until a part is back.
PATIENCE, WAIT_S = 100, 120.0


@dataclass(frozen=True)
class Parts:
    """What the server with the cache stands on."""

    worker: Part
    worker_url: str
    store: Part
    store_socket: Path
    proxy: Part
    proxy_socket: Path
    disk: Path

    def start_worker(self) -> None:
        self.worker.start()
        wait_ready(self.worker, self.worker_url)

    def start_store(self) -> None:
        self.store.start()
        self.store.wait_until(lambda: listens(self.store_socket))

    def start_proxy(self) -> None:
        self.proxy.start()
        self.proxy.wait_until(lambda: listens(self.proxy_socket))

    def delete_files(self) -> None:
        for path in self.disk.rglob("*.kv"):
            path.unlink(missing_ok=True)


def make_parts(folder: Path) -> Parts:
    """None of them is started."""
    python, port = sys.executable, free_port()
    (folder / "token").write_text(secrets.token_hex())
    (folder / "token").chmod(0o600)
    store_socket, proxy_socket = folder / "store.sock", folder / "proxy.sock"
    worker = [*WORKER.split(), "--peer-slab-size", str(SLAB_MIB), "--peer-endpoint", f"ipc://{folder}/peers"]
    store = [
        "--port",
        "0",
        "--unixsocket",
        str(store_socket),
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    buffers = {f"{name}_buffer_bytes": 12 << 20 for name in ("compressed", "decompressed", "dequantized")}
    proxy = ["--socket", str(proxy_socket), "--token-file", str(folder / "token"), "--settings", json.dumps(buffers)]
    return Parts(
        Part(
            "worker",
            [python, "-m", "sglang.launch_server", "--model-path", "embedded", "--port", str(port), *worker],
        ),
        f"http://127.0.0.1:{port}",
        Part("store", [str(server_binary()), *store]),
        store_socket,
        Part(
            "proxy",
            [python, "-m", "sglang.srt.offload.proxy", *proxy],
            {"SGLANG_OFFLOAD_STORE": f"unix://{store_socket}"},
        ),
        proxy_socket,
        folder / "kv",
    )


def flags_of_server(folder: Path, parts: Parts) -> list[str]:
    config = {
        "block_tokens": BLOCK_TOKENS,
        "prefetch_threshold": BLOCK_TOKENS,
        "file": {
            "path": str(parts.disk),
            "limit_gb": DISK_TOKENS * TOKEN_BYTES / 1e9,
            "segment_mb": 4 * BLOCK_TOKENS * TOKEN_BYTES / 1e6,
        },
        "bluefield": {"proxy": str(parts.proxy_socket), "token_file": str(folder / "token")},
    }
    # A model so small computes sooner than it loads; the demo is about where tokens come from.
    flags = ["--model-path", "embedded", "--hicache", "--hicache-load-or-recompute", "off"]
    flags += ["--max-total-tokens", str(DEVICE_TOKENS), "--page-size", "1", "--hicache-ratio", str(HOST_RATIO)]
    flags += ["--peer-role", "master", "--peer-endpoint", f"ipc://{folder}/peers"]
    flags += ["--peer-slab-size", str(SLAB_MIB), "--peer-size", str(NUM_SLABS * (SLAB_MIB << 20) / 1e9)]
    flags += ["--hicache-storage-backend", "file,bluefield"]
    return [*flags, "--hicache-storage-backend-extra-config", json.dumps(config)]


def system_prompt() -> str:
    rooms = ("the tower", "the archive", "the garden", "the hall", "the cellar")
    rules = [
        f"Rule {i}: who enters {rooms[i % 5]} signs page {3 * i} and leaves before hour {7 + i}." for i in range(12)
    ]
    return "You help at the desk of a library. These are its rules.\n" + "\n".join(rules)


def question(name: str, turn: int) -> str:
    visits = [f"On day {turn * 7 + i} I read page {turn * 31 + i * 3} of book {i + 2}." for i in range(6)]
    return f"I am {name}, here for time {turn}. " + " ".join(visits) + " Which rules are mine?"


def bar(answer: Answer) -> str:
    """Of fixed length: a letter for each share of the prompt that a tier gave, a dot for what was computed."""
    drawn = "".join(
        letter * round(BAR * answer.tiers.get(tier, 0) / answer.prompt_tokens) for tier, letter in LETTERS.items()
    )
    return f"{drawn[:BAR]:.<{BAR}}"


class Library:
    """Six people who ask; both servers answer. pairs: (cold, warm) answers."""

    def __init__(self, warm: OpenAI, cold: OpenAI) -> None:
        self.pairs: list[tuple[Answer, Answer]] = []
        self._warm, self._cold = warm, cold
        self._conversations: dict[str, Messages] = {}
        self._turns: Counter[str] = Counter()
        self._names = self._in_turn()

    def _in_turn(self) -> Iterator[str]:
        """In rounds, each in another order."""
        rng = random.Random(1)
        while True:
            yield from rng.sample(NAMES, len(NAMES))

    def header(self) -> None:
        where = "where its tokens came from"
        print(f"who   prompt  {where:<{BAR}}  device  peer  host  disk  remote  computed  first token  same")

    def ask(self) -> Answer:
        """The next question. After some turns a person begins anew, with what was asked before."""
        name = next(self._names)
        turn = self._turns[name] = self._turns[name] % TURNS + 1
        if turn == 1:
            self._conversations[name] = [{"role": "system", "content": system_prompt()}]
        messages = self._conversations[name]
        messages.append({"role": "user", "content": question(name, turn)})
        warm, cold = ask(self._warm, messages), ask(self._cold, messages)
        messages.append({"role": "assistant", "content": warm.text})
        self.pairs.append((cold, warm))
        found = [warm.tiers.get(tier, 0) for tier in TIERS]
        numbers = "{:>8}{:>6}{:>6}{:>6}{:>8}".format(*found)
        same = "yes" if cold.text == warm.text else "NO"
        print(
            f"{name:<5} {warm.prompt_tokens:>6}  {bar(warm)}{numbers}{warm.prompt_tokens - sum(found):>10}"
            f"{warm.ttft_s * 1e3:>10.0f} ms  {same}",
            flush=True,
        )
        return warm

    def ask_until(self, tiers: tuple[str, ...], least: int) -> bool:
        """Ask until each of the tiers has given tokens, and at least so many questions."""
        missing = set(tiers)
        for number in range(PATIENCE):
            if number >= least and not missing:
                return True
            answer = self.ask()
            missing = {tier for tier in missing if not answer.tiers.get(tier, 0)}
        print(f"no tokens came from {', '.join(sorted(missing))} within {PATIENCE} questions: the demo expects some")
        return not missing


def wait_for(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.05)


def show_sizes(state: dict[str, Any]) -> None:
    sizes = {"device": state["tiers"]["device"]["total_tokens"]}
    # The most that it may borrow; at first it has nothing.
    sizes["peer"] = NUM_SLABS * (SLAB_MIB << 20) // state["page_bytes"] * state["page_size"]
    sizes["host"] = state["tiers"]["host"]["total_tokens"]
    sizes["disk"] = state["tiers"]["disk"]["limit_bytes"] // state["page_bytes"] * state["page_size"]
    parts = ", ".join(f"{tier} {tokens}" for tier, tokens in sizes.items())
    print(f"room in tokens: {parts}, remote all; 6 conversations need about 3200")
    letters = ", ".join(f"{letter} {tier}" for tier, letter in LETTERS.items())
    print(f"in the bars: {letters}, . computed\n", flush=True)


def go_through_faults(
    library: Library, parts: Parts, knows_worker: Callable[[], bool], flush: Callable[[], object]
) -> bool:
    """flush: empties device, peers and host. Returns whether tokens came again from each part that came back."""
    good = True

    def step(
        what: str, fault: Callable[[], None], back: str, repair: Callable[[], None], tiers: tuple[str, ...]
    ) -> None:
        nonlocal good
        print(f"\n{what}")
        fault()
        library.header()
        library.ask_until((), 3)
        print(back, flush=True)
        repair()
        good &= library.ask_until(tiers, 2)

    def start_worker() -> None:
        parts.start_worker()
        wait_for("the server finds the worker again", knows_worker)

    def kill_all() -> None:
        for part in (parts.worker, parts.store, parts.proxy):
            part.kill()
        parts.delete_files()

    def start_all() -> None:
        parts.start_store()
        parts.start_proxy()
        start_worker()
        flush()

    step(
        "The worker is killed (SIGKILL): what only its memory had is on other tiers, or computed.",
        parts.worker.kill,
        "It is started again, and lends.",
        start_worker,
        ("peer",),
    )
    step(
        "The store is killed: the disk has some of what it had, and the rest is computed.",
        parts.store.kill,
        "It is started again, empty: what is computed is stored again.",
        parts.start_store,
        ("remote",),
    )
    step(
        "The store stands still (SIGSTOP): requests wait for it at most about a second, then leave it alone.",
        parts.store.pause,
        "It goes on (SIGCONT).",
        parts.store.resume,
        ("remote",),
    )
    step(
        "The offload proxy is killed: no blocks come from the store.",
        parts.proxy.kill,
        "It is started again; the server connects by itself.",
        parts.start_proxy,
        ("remote",),
    )
    step(
        "The disk's files are deleted.",
        parts.delete_files,
        "New blocks are written to new files.",
        lambda: None,
        ("disk",),
    )
    step(
        "Worker, store and proxy are killed, and the disk's files deleted, at the same time.",
        kill_all,
        "All are started again, and memory is emptied, too (/flush_cache): everything begins anew.",
        start_all,
        TIERS,
    )
    return good


def main() -> int:
    began = time.perf_counter()
    print(
        "Starting a worker, a store, an offload proxy, a server on all tiers, and a server without a cache ...",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="tiers-demo-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.chmod(folder, 0o700)
        parts = make_parts(folder)
        for part in (parts.worker, parts.store, parts.proxy):
            stack.callback(part.close)
        parts.start_store()
        parts.start_proxy()
        parts.worker.start()
        cold, cold_url = stack.enter_context(
            server("--model-path", "embedded", "--disable-radix-cache", name="server without a cache")
        )
        warm, warm_url = stack.enter_context(server(*flags_of_server(folder, parts)))
        wait_ready(parts.worker, parts.worker_url)
        wait_ready(cold, cold_url)
        wait_ready(warm, warm_url)

        def state() -> dict[str, Any]:
            return get_json(warm_url + "/hicache/state")

        def knows_worker() -> bool:
            """It lends what the server asks for as it needs it."""
            return bool(state()["peers"]["lenders"][0]["connected"])

        wait_for("the server finds the worker", knows_worker)
        print(f"ready after {time.perf_counter() - began:.1f} s; watch the cache at {warm_url}/hicache")
        show_sizes(state())
        library = Library(connect(warm_url), connect(cold_url))
        print("Six people ask. What the device has no room for goes to the other tiers.")
        library.header()
        good = library.ask_until(TIERS, len(NAMES) * TURNS)
        good &= go_through_faults(library, parts, knows_worker, lambda: post(warm_url + "/flush_cache"))
        print()
    good &= summarise(library.pairs, TIERS, TIERS)
    most = max(sum(tier in answer.tiers and answer.tiers[tier] > 0 for tier in TIERS) for _, answer in library.pairs)
    print(f"one prompt      came from {most} tiers at the same time")
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    run(main)
