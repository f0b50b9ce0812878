"""`make demo-peers`: a master whose conversations outgrow its memory borrows from two workers, and gives memory back.

It starts a master with the embedded model, two workers with models of other shapes and a router in front of them, as
a user would, and a server without a cache to compare with. The workers are idle and lend what the master lacks. Its
conversations come back from the lent memory. Then one worker gets many requests and takes its memory back. The tables
show the servers' own states. The demo fails unless memory was lent, used and taken back, and all the master's answers
equal those of the server without a cache.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.demo_common import (
    Part,
    Talk,
    Tiers,
    ask,
    connect,
    get_json,
    header,
    question,
    run,
    server,
    summarise,
    system_prompt,
    wait_ready,
)
from sglang.srt.configs.embedded_model import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, ensure_embedded_model

if TYPE_CHECKING:
    from openai import OpenAI

TIERS: Tiers = ("device", "peer", "host")
NAMES = ("Ada", "Ben", "Cho", "Dan")
# About one conversation on the device; the host has room for next to nothing.
DEVICE_TOKENS = 4096
MASTER = f"--hicache --max-total-tokens {DEVICE_TOKENS} --hicache-ratio 0.05 --peer-role master --peer-size 0.05"
# A worker keeps room for its longest request, so these are short.
WORKER = "--load-format dummy --context-length 1024 --peer-role worker --peer-window 2"
SLAB_MIB = "1"
# What the busy worker gets at once: together more than it has at home.
NUM_BUSY, BUSY_TOKENS = 12, 150
WAIT_S = 120.0

T = TypeVar("T")


def describe(num_layers: int, num_kv_heads: int, head_dim: int) -> str:
    return f"{num_layers} layers, {num_kv_heads} KV heads of {head_dim}"


@dataclass(frozen=True)
class Worker:
    """shape: what its config has in place of the embedded model's."""

    name: str
    shape: dict[str, Any]
    max_total_tokens: int
    page_size: int

    @property
    def model(self) -> str:
        layers, heads = self.shape["num_hidden_layers"], self.shape["num_key_value_heads"]
        return f"{describe(layers, heads, self.shape['head_dim'])}, pages of {self.page_size}"

    def write(self, folder: Path) -> Path:
        """The embedded model's files with another shape, and without weights."""
        embedded, path = ensure_embedded_model(), folder / self.name
        path.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(embedded / name, path / name)
        config = json.loads((embedded / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | self.shape))
        return path


def shape(num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 2 * num_heads * head_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


QUIET = Worker("quiet", shape(3, 4, 2, 16), max_total_tokens=10240, page_size=16)
BUSY = Worker("busy", shape(6, 8, 4, 16), max_total_tokens=5120, page_size=4)


def look(urls: dict[str, str]) -> dict[str, Any]:
    """Master or worker -> the part about peers of its state."""
    return {name: get_json(urls[name] + "/hicache/state")["peers"] for name in ("master", QUIET.name, BUSY.name)}


def wait_for(what: str, observe: Callable[[], T], true: Callable[[T], bool]) -> T:
    deadline = time.monotonic() + WAIT_S
    while not true(found := observe()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_S:g} s; instead there is {found}")
        time.sleep(0.05)
    return found


def is_lent(peers: dict[str, Any]) -> bool:
    """Whether both workers have lent, and the master has all of it."""
    lent = [peers[worker.name]["slabs"]["lent"] for worker in (QUIET, BUSY)]
    return all(lent) and [lender["slabs"]["held"] for lender in peers["master"]["lenders"]] == lent


def show(peers: dict[str, Any]) -> None:
    print("            slabs   at home   offered      lent   asked back")
    for worker in (QUIET, BUSY):
        slabs = peers[worker.name]["slabs"]
        print(
            f"{worker.name:<8} {sum(slabs.values()):>8} {slabs['home']:>9} {slabs['offered']:>9} {slabs['lent']:>9} "
            f"{slabs['asked_back']:>12}"
        )
    master = peers["master"]
    held = [lender["slabs"]["held"] for lender in master["lenders"]]
    size_mb = sum(held) * master["slab_bytes"] / 1e6
    parts = ", ".join(f"{n} from {worker.name}" for n, worker in zip(held, (QUIET, BUSY)))
    print(f"master   uses {sum(held)} slabs, {size_mb:.1f} MB: {parts}\n", flush=True)


def keep_busy(client: OpenAI, urls: dict[str, str]) -> tuple[dict[str, Any], float]:
    """Many requests at once to one worker: who had what when most was back at home, and the seconds they took."""
    questions = [" ".join(question(name, turn) for turn in (1, 2)) for name in NAMES * (NUM_BUSY // len(NAMES))]
    start = time.perf_counter()
    most: dict[str, Any] | None = None
    with ThreadPoolExecutor(NUM_BUSY) as pool:
        asked = [
            pool.submit(ask, client, [{"role": "user", "content": f"{i}. {text}"}], BUSY.name, BUSY_TOKENS)
            for i, text in enumerate(questions)
        ]
        while most is None or not all(each.done() for each in asked):
            peers = look(urls)
            if most is None or peers[BUSY.name]["slabs"]["home"] >= most[BUSY.name]["slabs"]["home"]:
                most = peers
            time.sleep(0.02)
    for each in asked:
        each.result()
    return most, time.perf_counter() - start


def start(stack: contextlib.ExitStack, folder: Path) -> dict[str, str]:
    """All servers at once, then the router. Each one's URL, once it answers."""
    endpoints = [f"ipc://{folder}/{worker.name}.peers" for worker in (QUIET, BUSY)]
    commands = {
        "reference": ["--model-path", "embedded", "--disable-radix-cache"],
        "master": ["--model-path", "embedded", *MASTER.split(), "--peer-endpoint", ",".join(endpoints)],
    }
    for worker, endpoint in zip((QUIET, BUSY), endpoints):
        sizes = ["--max-total-tokens", str(worker.max_total_tokens), "--page-size", str(worker.page_size)]
        model = ["--model-path", str(worker.write(folder)), "--served-model-name", worker.name]
        commands[worker.name] = [*model, *WORKER.split(), *sizes, "--peer-endpoint", endpoint]
    started: dict[str, tuple[Part, str]] = {}
    for name, flags in commands.items():
        slab = () if name == "reference" else ("--peer-slab-size", SLAB_MIB)
        started[name] = stack.enter_context(server(*flags, *slab, name=name))
    for part, url in started.values():
        wait_ready(part, url)
    urls = {name: url for name, (_, url) in started.items()}
    behind = [urls[name] for name in ("master", QUIET.name, BUSY.name)]
    part, urls["router"] = stack.enter_context(
        server("--worker-urls", *behind, module="sglang.router", name="router")
    )
    wait_ready(part, urls["router"])
    return urls


def main() -> int:
    began = time.perf_counter()
    print("Starting a master, two workers of other shapes, a router, and a server without a cache ...", flush=True)
    # Conversations that share nothing: each has a library of its own.
    talk = Talk(TIERS, {name: f"This is the library of {name}. {system_prompt()}" for name in NAMES})
    with tempfile.TemporaryDirectory(prefix="peers-demo-") as folder, contextlib.ExitStack() as stack:
        urls = start(stack, Path(folder))
        print(f"ready after {time.perf_counter() - began:.1f} s; watch the master at {urls['master']}/hicache")
        print(f"router        {urls['router']}, which sends a request to who serves its model")
        model = describe(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
        print(f"master        {model}, pages of 1; {DEVICE_TOKENS} tokens on the device")
        for worker in (QUIET, BUSY):
            sizes = f"{worker.max_total_tokens} tokens in slabs of {SLAB_MIB} MiB"
            print(f"worker {worker.name:<6} {worker.model}; {sizes}")
        print()
        client, cold = connect(urls["router"]), connect(urls["reference"])

        print("The master's conversations are longer than its device pool; what it has no room for comes from peers.")
        print(header(TIERS))
        talk.turn(1, client, cold)
        print("\nThe workers are idle, and lend what the master lacks.")
        show(wait_for("the workers lend, and the master borrows", lambda: look(urls), is_lent))
        print(header(TIERS))
        talk.turn(2, client, cold)
        print()

        print(f"The worker {BUSY.name} gets {NUM_BUSY} requests at once: it takes back what they need.")
        most, seconds = keep_busy(client, urls)
        show(most)
        print(f"All are answered after {seconds:.1f} s. The master computes what it has lost, and goes on.")
        print(header(TIERS))
        talk.turn(3, client, cold)
        print()

        print("Idle again, the worker lends again.")
        show(wait_for("the worker lends again", lambda: look(urls), is_lent))
        asked_back = get_json(urls[BUSY.name] + "/hicache/state")["counters"].get("slabs_asked_back", 0)
        withdrawn = get_json(urls["master"] + "/hicache/state")["counters"].get("slabs_withdrawn", 0)
    good = summarise(talk.pairs, TIERS, ["peer"])
    print(f"slabs           {asked_back} wanted back by the worker {BUSY.name}, {withdrawn} given back by the master")
    if not (asked_back and withdrawn):
        print("nothing was taken back: the demo expects some")
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 0 if good and asked_back and withdrawn else 1


if __name__ == "__main__":
    run(main)
