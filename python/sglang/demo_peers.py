"""`make demo-peers`: what a master gains from memory that it borrows, and what lending costs a worker.

It starts servers as a user would: a master with the embedded model, two workers with models of other shapes, and a
router in front of them. Three servers are there to compare with: one with the master's flags and one with a worker's
flags, both without peers, and one without a cache.

1. The master's conversations outgrow its memory. The workers are idle and lend what it lacks.
2. One worker gets many requests and reclaims its memory.
3. The master gets a prompt for which it has no room without peers.
4. The worker has conversations of its own, first while its memory is lent, then with an idle master.

The tables show the servers' own numbers; the last one has gains and cost. `demo_peers_report.py` has the aims, of
which the demo fails if one is missed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.demo_common import (
    Answer,
    Messages,
    Part,
    ask,
    connect,
    get_json,
    question,
    run,
    server,
    system_prompt,
    wait_ready,
)
from sglang.demo_peers_report import (
    LongPrompt,
    Outcome,
    Slabs,
    Turn,
    Work,
    first_token_ms,
    found,
    longest_wait_s,
    problems,
    table,
)
from sglang.srt.configs.embedded_model import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, ensure_embedded_model

if TYPE_CHECKING:
    from openai import OpenAI

NAMES = ("Ada", "Ben", "Cho", "Dan")
# Of the rules in the prompt that each conversation begins with.
NUM_RULES = 18
# About one conversation on the device; the host has room for next to nothing. A model so small often computes sooner
# than it loads, so it is told to load.
DEVICE_TOKENS = 3072
MASTER = (
    f"--model-path embedded --hicache --max-total-tokens {DEVICE_TOKENS} --page-size 1 --hicache-ratio 0.05 "
    "--hicache-load-or-recompute off --chunked-prefill-size 256 --layer-stream 2 --layer-stream-tokens 512"
)
SLAB_MIB = 1
# Slabs, of which the idle workers lend more.
NUM_BORROWED = 16
BORROWS = f"--peer-role master --peer-slab-size {SLAB_MIB} --peer-size {NUM_BORROWED * (SLAB_MIB << 20) / 1e9}"
# A worker keeps room for its longest request, so these are short.
WORKER = "--load-format dummy --context-length 1024"
LENDS = f"--peer-role worker --peer-slab-size {SLAB_MIB} --peer-window 5"
# What the busy worker gets at once: together more than it has at home.
NUM_BUSY, BUSY_TOKENS = 12, 150
# Who has conversations with a worker, and the tokens of an answer. In each of so many rounds they are new.
WORK_NAMES, WORK_TOKENS = ("Eve", "Fay", "Gus", "Hal", "Ida"), 16
NUM_LENT_ROUNDS, NUM_IDLE_ROUNDS = 2, 3
# Of the answer to the long prompt.
LONG_TOKENS = 8
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

    @property
    def sizes(self) -> list[str]:
        return ["--max-total-tokens", str(self.max_total_tokens), "--page-size", str(self.page_size)]

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


# The busy worker's flags without peers.
TWIN = "busy-alone"


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


class Talk:
    """The master's conversations, which go on on three servers. They share nothing: each has a library of its own."""

    def __init__(self, client: OpenAI) -> None:
        self.turns: list[Turn] = []
        self._client = client
        self._conversations: dict[str, Messages] = {
            name: [{"role": "system", "content": f"This is the library of {name}. {system_prompt(NUM_RULES)}"}]
            for name in NAMES
        }

    def turn(self, number: int) -> None:
        """Ask each conversation's next question, one after another."""
        print("              prompt    tokens found    found at    first token, ms    three")
        print("turn  who     tokens   alone   master      peers     alone   master    answers")
        for name, messages in self._conversations.items():
            messages.append({"role": "user", "content": question(name, number)})
            # Neither of the two is always first.
            order = ("alone", "master") if len(self.turns) % 2 else ("master", "alone")
            answers = {model: ask(self._client, messages, model) for model in ("uncached", *order)}
            turn = Turn(number, **answers)
            self.turns.append(turn)
            messages.append({"role": "assistant", "content": turn.uncached.text})
            print(
                f"{number:<5} {name:<6} {turn.master.prompt_tokens:>7} {found([turn.alone]):>7} "
                f"{found([turn.master]):>8} {turn.master.tiers.get('peer', 0):>10} {turn.alone.ttft_s * 1e3:>9.0f} "
                f"{turn.master.ttft_s * 1e3:>8.0f}    {'equal' if turn.is_same else 'DIFFER'}",
                flush=True,
            )
        print()


def keep_busy(client: OpenAI, urls: dict[str, str]) -> tuple[dict[str, Any], float]:
    """Many requests at once to one worker: who had what when most was back at home, and the longest wait for a
    slab, in seconds."""
    questions = [" ".join(question(name, turn) for turn in (1, 2)) for name in NAMES * (NUM_BUSY // len(NAMES))]
    samples: list[tuple[float, int, int]] = []
    most: dict[str, Any] | None = None
    with ThreadPoolExecutor(NUM_BUSY) as pool:
        asked = [
            pool.submit(ask, client, [{"role": "user", "content": f"{i}. {text}"}], BUSY.name, BUSY_TOKENS)
            for i, text in enumerate(questions)
        ]
        while most is None or not all(each.done() for each in asked):
            state = get_json(urls[BUSY.name] + "/hicache/state")
            slabs, asked_back = state["peers"]["slabs"], state["counters"].get("slabs_asked_back", 0)
            samples.append((time.perf_counter(), asked_back, slabs["asked_back"]))
            if most is None or slabs["home"] > most[BUSY.name]["slabs"]["home"]:
                most = look(urls)
            time.sleep(0.02)
    for each in asked:
        each.result()
    return most, longest_wait_s(samples)


def ask_long(client: OpenAI, urls: dict[str, str]) -> LongPrompt:
    """About the longest prompt that the master accepts, to the master with and without peers."""
    from openai import BadRequestError
    from tokenizers import Tokenizer

    alone, master = (get_json(urls[name] + "/get_server_info")["max_req_input_len"] for name in ("alone", "master"))
    tokenizer = Tokenizer.from_file(str(ensure_embedded_model() / "tokenizer.json"))
    # The chat template adds some tokens, and some rules are longer than others.
    tokens_per_rule = len(tokenizer.encode(system_prompt(200)).ids) / 200
    rules = system_prompt(int((master - LONG_TOKENS - 200) / tokens_per_rule))
    messages: Messages = [{"role": "user", "content": f"{rules}\nWhich rules are mine?"}]
    refusal = ""
    try:
        ask(client, messages, "alone", LONG_TOKENS)
    except BadRequestError as error:
        refusal = f"status {error.status_code}, {error.message.split(' - ', 1)[-1]}"
    uncached = ask(client, messages, "uncached", LONG_TOKENS)
    return LongPrompt(alone, master, refusal, uncached, ask(client, messages, "master", LONG_TOKENS))


def work(client: OpenAI, number: int) -> Work:
    """A round of a worker's own conversations: all first turns, then all second ones. Each is asked of both workers,
    one after the other, so that what else the machine does hits both alike."""
    talks: dict[tuple[str, str], Messages] = {}
    second: dict[str, list[Answer]] = {BUSY.name: [], TWIN: []}
    for turn in (1, 2):
        for i, who in enumerate(WORK_NAMES):
            for name in (BUSY.name, TWIN) if (number + i) % 2 else (TWIN, BUSY.name):
                messages = talks.setdefault((who, name), [])
                messages.append({"role": "user", "content": question(f"{who} {number}", turn)})
                answer = ask(client, messages, name, WORK_TOKENS)
                messages.append({"role": "assistant", "content": answer.text})
                if turn == 2:
                    second[name].append(answer)
    return Work(tuple(second[BUSY.name]), tuple(second[TWIN]))


def start(stack: contextlib.ExitStack, folder: Path) -> dict[str, str]:
    """All servers at once, then the router. Each one's URL, once it answers. A server's name is that of its model."""
    endpoints = [f"ipc://{folder}/{worker.name}.peers" for worker in (QUIET, BUSY)]
    commands = {
        "uncached": ["--model-path", "embedded", "--disable-radix-cache"],
        "alone": MASTER.split(),
        "master": [*MASTER.split(), *BORROWS.split(), "--peer-endpoint", ",".join(endpoints)],
    }
    for worker, endpoint in zip((QUIET, BUSY), endpoints):
        flags = ["--model-path", str(worker.write(folder)), *WORKER.split(), *worker.sizes]
        commands[worker.name] = [*flags, *LENDS.split(), "--peer-endpoint", endpoint]
    commands[TWIN] = flags
    started: dict[str, tuple[Part, str]] = {}
    for name, flags in commands.items():
        started[name] = stack.enter_context(server(*flags, "--served-model-name", name, name=f"server {name}"))
    for part, url in started.values():
        wait_ready(part, url)
    urls = {name: url for name, (_, url) in started.items()}
    part, urls["router"] = stack.enter_context(
        server("--worker-urls", *urls.values(), module="sglang.router", name="router")
    )
    wait_ready(part, urls["router"])
    return urls


def introduce(urls: dict[str, str]) -> None:
    print(f"router      {urls['router']}, which sends a request to the server of its model")
    model = describe(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
    print(f"master      {model}, pages of 1; {DEVICE_TOKENS} tokens on the device")
    for worker in (QUIET, BUSY):
        print(f"{worker.name:<11} a worker: {worker.model}; {worker.max_total_tokens} tokens on the device")
    print("alone       the master's flags without peers")
    print(f"{TWIN:<11} the flags of {BUSY.name} without peers")
    print("uncached    the master's model without a cache\n", flush=True)


def work_in_rounds(client: OpenAI, urls: dict[str, str]) -> tuple[Work, Work]:
    """A worker's own conversations, in the rounds before it has back what it lent, and in those after that."""

    def slabs_at_home() -> int:
        return look(urls)[BUSY.name]["slabs"]["home"]

    print("         slabs of busy at home    tokens found in second turns      first token, median ms")
    print(f"round    before          after        busy       {TWIN}         busy    {TWIN}")
    rounds: list[Work] = []
    for number in range(NUM_LENT_ROUNDS + NUM_IDLE_ROUNDS):
        if number == NUM_LENT_ROUNDS - 1:
            wait_for("the master is idle", lambda: look(urls)["master"]["slab_value_s"], lambda value: not value)
            print("The master has been idle for ten seconds: what it borrowed is worth nothing to it now.")
        before = slabs_at_home()
        rounds.append(done := work(client, number))
        print(
            f"{number + 1:<5} {before:>9} {slabs_at_home():>14} {found(done.lends):>11} {found(done.alone):>16} "
            f"{first_token_ms(done.lends):>12.0f} {first_token_ms(done.alone):>13.0f}",
            flush=True,
        )
    print()
    lent, idle = rounds[:NUM_LENT_ROUNDS], rounds[NUM_LENT_ROUNDS:]
    return sum(lent, Work()), sum(idle, Work())


def main() -> int:
    began = time.perf_counter()
    print("Starting a master, two workers, three servers to compare with, and a router ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="peers-demo-") as folder, contextlib.ExitStack() as stack:
        urls = start(stack, Path(folder))
        print(f"ready after {time.perf_counter() - began:.1f} s; watch the master at {urls['master']}/hicache\n")
        introduce(urls)
        client = connect(urls["router"], "uncached")
        for name in ("alone", "master", BUSY.name, TWIN):
            connect(urls["router"], name)

        print("1. The master's conversations are longer than its device pool. What it evicts is lost at first.")
        talk = Talk(client)
        talk.turn(1)
        print("The workers are idle, and lend what the master lacks.")
        show(wait_for("the workers lend, and the master borrows", lambda: look(urls), is_lent))
        for number in (2, 3, 4):
            talk.turn(number)

        print(f"2. The worker {BUSY.name} gets {NUM_BUSY} requests at once: it reclaims what they need.")
        most, longest_s = keep_busy(client, urls)
        show(most)
        print("The master computes what it has lost, and goes on.")
        talk.turn(5)

        print("3. Idle again, the worker lends again. A prompt comes that is longer than the master's own memory.")
        show(wait_for("the worker lends again", lambda: look(urls), is_lent))
        long = ask_long(client, urls)
        print(textwrap.fill(f"alone   {long.refusal}", 96, subsequent_indent=" " * 8))
        print(f"master  answers after {long.master.seconds:.1f} s\n", flush=True)

        print(f"4. The worker {BUSY.name} has conversations of its own, and so has {TWIN}, which lends nothing.")
        work_lent, work_idle = work_in_rounds(client, urls)
        counters = get_json(urls[BUSY.name] + "/hicache/state")["counters"]
        withdrawn = get_json(urls["master"] + "/hicache/state")["counters"].get("slabs_withdrawn", 0)
    slabs = Slabs(counters.get("slabs_lent", 0), counters.get("slabs_asked_back", 0), withdrawn, longest_s)
    outcome = Outcome(talk.turns, long, work_lent, work_idle, slabs)
    print("\n".join(table(outcome)))
    same = sum(turn.is_same for turn in talk.turns)
    print(f"\nanswers to {same} of {len(talk.turns)} questions equal those of the server without a cache")
    missed = problems(outcome)
    for problem in missed:
        print(f"FAILED: {problem}")
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    run(main)
