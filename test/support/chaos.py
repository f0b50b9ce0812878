"""Chaos: one real server on device, peer, host, disk and remote store, with a router in front of it. Clients ask a
seeded mix of requests while its parts are killed, stopped, slowed, filled and damaged, in a seeded order. Every
answer is compared with the one that the server computes without its cache. At the end nothing may be left over.

    python -m support.chaos --seed 7 --minutes 5      what make chaos runs

A failure leaves the plan, the logs and the server's state in build/chaos-SEED, and the command that runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.all_tiers import ADMIN, SOURCES, AllTiers, faults
from support.server_fixture import NO_TLS, PATIENCE_S, Server, free_port, wait_until

# Of the conversations, device, peer and host together hold two thirds, and the disk four fifths.
FLAGS = "--max-total-tokens 768 --hicache-ratio 0.6 --chunked-prefill-size 256 --hicache-load-or-recompute off"
DISK_TOKENS = 2000
NUM_CONVERSATIONS, NUM_TURNS = 6, 4
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 128, 90, 6
# Three chunks of prefill.
NUM_LONG, LONG_TOKENS = 2, 620
NUM_CLIENTS = 3
TENANTS = ("one", "two")
SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
    "required": ["open", "days"],
    "additionalProperties": False,
}
PARAMS = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
# Of log-probabilities: launches of other sizes round otherwise.
TOLERANCE = 1e-3


def random_ids(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 1900) for _ in range(size)]


@dataclass(frozen=True)
class Turn:
    """A prompt, and the answer without the cache."""

    prompt: list[int]
    output_ids: list[int]
    logprobs: list[float]


def logprobs_of(reply: dict[str, Any]) -> list[float]:
    return [each[0] for each in reply["meta_info"]["output_token_logprobs"]]


@dataclass(frozen=True)
class Chat:
    """A chat, and the answer without the cache."""

    body: dict[str, Any]
    text: str


@dataclass(frozen=True)
class References:
    """What clients ask, with the answers. No answer has read or filled the cache."""

    conversations: list[list[Turn]]
    long: list[Turn]
    chats: list[Chat]


def uncached_turns(server: Server, prompts: list[list[int]]) -> list[Turn]:
    body = {"input_ids": prompts, "sampling_params": PARAMS, "return_logprob": True, "cache": "bypass"}
    replies = server.post("/generate", body)
    assert replies.status_code == 200, replies.text
    return [
        Turn(list(prompt), reply["output_ids"], logprobs_of(reply)) for prompt, reply in zip(prompts, replies.json())
    ]


def hold_conversations(server: Server) -> list[list[Turn]]:
    """Conversations that begin with the same system prompt."""
    prompts = [random_ids(0, SYSTEM_TOKENS) for _ in range(NUM_CONVERSATIONS)]
    conversations: list[list[Turn]] = [[] for _ in prompts]
    for turn in range(NUM_TURNS):
        for i, prompt in enumerate(prompts):
            prompt += random_ids(1 + i * NUM_TURNS + turn, QUESTION_TOKENS)
        for prompt, conversation, held in zip(prompts, conversations, uncached_turns(server, prompts)):
            conversation.append(held)
            prompt += held.output_ids
    return conversations


def hold_chats(server: Server) -> list[Chat]:
    """Of two turns each, the second one under a schema."""
    chats = []
    for name in ("reader", "teacher"):
        messages = [{"role": "user", "content": f"I am a {name}. " + "When does the library open, and why? " * 3}]
        for params in (
            {"max_tokens": 10, "ignore_eos": True},
            {
                "max_tokens": 24,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            },
        ):
            body = {"messages": list(messages), "temperature": 0, **params}
            reply = server.post("/v1/chat/completions", {**body, "cache": "bypass"})
            assert reply.status_code == 200, reply.text
            text = reply.json()["choices"][0]["message"]["content"]
            chats.append(Chat(body, text))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Tell me as JSON."}]
    return chats


def hold_all(server: Server) -> References:
    long = uncached_turns(server, [random_ids(1000 + i, LONG_TOKENS) for i in range(NUM_LONG)])
    return References(hold_conversations(server), long, hold_chats(server))


@dataclass
class Seen:
    """What the clients have seen so far. most: sources of the reply with the most. The lock guards all of it."""

    num_begun: int = 0
    num_ended: int = 0
    slowest_s: float = 0.0
    most: frozenset[str] = frozenset()
    tokens: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Clients:
    """Threads, each of which asks in an order of its own, until the context ends. url: of a router before the server.
    drops_salts: it passes extra_key alone."""

    def __init__(
        self, server: Server, references: References, seed: int, url: str = "", drops_salts: bool = False
    ) -> None:
        self.seen = Seen()
        self._server = server
        self._url = url or server.url
        self._salt = "extra_key" if drops_salts else "cache_salt"
        self._references = references
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"),)) for i in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random) -> None:
        client = httpx.Client(base_url=self._url, timeout=PATIENCE_S, verify=NO_TLS)
        kinds: dict[Callable[..., str], int] = {
            self._ask: 10,
            self._ask_in_a_stream: 6,
            self._ask_twice: 2,
            self._ask_as_a_tenant: 3,
            self._ask_as_a_new_tenant: 1,
            self._leave: 2,
            self._abort: 2,
            self._chat: 4,
        }
        for turn in itertools.chain.from_iterable(self._orders(rng)):
            if self._closed.is_set():
                client.close()
                return
            with self.seen.lock:
                self.seen.num_begun += 1
            began = time.monotonic()
            ask = rng.choices(list(kinds), list(kinds.values()))[0]
            try:
                wrong = ask(client, turn, rng)
            except Exception as error:
                wrong = f"{error!r}"
            with self.seen.lock:
                self.seen.num_ended += 1
                self.seen.kinds[ask.__name__.strip("_")] += 1
                self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - began)
                if wrong:
                    self.seen.wrong.append(f"{ask.__name__}, {len(turn.prompt)} tokens: {wrong}")

    def _orders(self, rng: random.Random) -> Iterator[list[Turn]]:
        while True:
            if rng.random() < 0.1:
                yield [rng.choice(self._references.long)]
            yield rng.choice(self._references.conversations)[rng.randrange(NUM_TURNS) :]

    def _post(self, client: httpx.Client, turn: Turn, fields: dict[str, Any] | None = None, **params: Any) -> Any:
        body = {"input_ids": turn.prompt, "sampling_params": {**PARAMS, **params}, "return_logprob": True}
        body |= fields or {}
        reply = client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def _check(self, turn: Turn, reply: dict[str, Any]) -> str:
        found = reply["meta_info"]["cached_tokens_details"]
        with self.seen.lock:
            # Without storage an answer does not name its tiers.
            self.seen.tokens.update({source: found.get(source, 0) for source in SOURCES})
            self.seen.most = max(self.seen.most, frozenset(filter(found.get, SOURCES)), key=len)
        if reply["output_ids"] != turn.output_ids:
            return f"{reply['output_ids']} is not {turn.output_ids}; cached: {found}"
        if max(abs(a - b) for a, b in zip(logprobs_of(reply), turn.logprobs, strict=True)) > TOLERANCE:
            return f"{logprobs_of(reply)} is not {turn.logprobs}; cached: {found}"
        return ""

    def _ask(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        return self._check(turn, self._post(client, turn))

    def _ask_twice(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        return "".join(self._check(turn, reply) for reply in self._post(client, turn, n=2))

    def _ask_in_a_stream(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        body = {"input_ids": turn.prompt, "sampling_params": PARAMS, "return_logprob": True, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines
        return self._check(turn, json.loads(lines[-2]))

    def _leave(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        body = {"input_ids": turn.prompt, "sampling_params": {**PARAMS, "max_new_tokens": 100}, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            next(response.iter_raw())
        return ""

    def _abort(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        rid = f"{rng.getrandbits(64):x}"
        body = {"input_ids": turn.prompt, "sampling_params": {**PARAMS, "max_new_tokens": 100}, "stream": True}
        with client.stream("POST", "/generate", json={**body, "rid": rid}) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            next(lines)
            # Routers do not pass it on.
            assert self._server.post("/abort_request", {"rid": rid}).status_code == 200
            *_, last, done = (line.removeprefix("data: ") for line in lines if line)
        assert done == "[DONE]", done
        event = json.loads(last)
        if "error" in event:
            return "" if event["error"]["code"] == 499 else f"aborted: {event}"
        output_ids = event["output_ids"][:ANSWER_TOKENS]
        is_end = event["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        return "" if is_end and output_ids == turn.output_ids[: len(output_ids)] else f"aborted: {event}"

    def _ask_as_a_tenant(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        return self._check(turn, self._post(client, turn, {self._salt: rng.choice(TENANTS)}))

    def _ask_as_a_new_tenant(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        reply = self._post(client, turn, {self._salt: f"{rng.getrandbits(64):x}"})
        found = reply["meta_info"]["cached_tokens_details"]
        return f"a new tenant finds {found}" if any(found.values()) else self._check(turn, reply)

    def _chat(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        chat = rng.choice(self._references.chats)
        if rng.random() < 0.5:
            reply = client.post("/v1/chat/completions", json=chat.body)
            assert reply.status_code == 200, reply.text
            text = reply.json()["choices"][0]["message"]["content"]
        else:
            with client.stream("POST", "/v1/chat/completions", json={**chat.body, "stream": True}) as response:
                assert response.status_code == 200, response.read()
                *lines, done = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            assert done == "[DONE]", done
            deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
        return "" if text == chat.text else f"{text!r} is not {chat.text!r}"

    def assert_right(self) -> None:
        with self.seen.lock:
            assert not self.seen.wrong, "\n".join(self.seen.wrong)

    def wait_until(self, true: Callable[[], bool]) -> None:
        def is_over() -> bool:
            self.assert_right()
            assert self._server.process.poll() is None
            return true()

        wait_until(is_over, 3 * PATIENCE_S)

    def wait_for_answers(self, number: int) -> None:
        """To requests that begin now: those under way end meanwhile, or some of them do."""
        with self.seen.lock:
            enough = self.seen.num_begun + number
        self.wait_until(lambda: self.seen.num_ended >= enough)

    def wait_for_tokens(self, *sources: str) -> None:
        """Until prompts come from them, from now on."""
        with self.seen.lock:
            before = self.seen.tokens.copy()
        self.wait_until(lambda: all(self.seen.tokens[source] > before[source] for source in sources))

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is under way."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not [thread for thread in self._threads if thread.is_alive()], "a request does not end"
        self.assert_right()


def what_is_left(state: dict[str, Any]) -> list[str]:
    """What an idle server holds on to and should not."""
    left = [f"{name} {number}" for name, number in (state["queues"] | state["transient"]).items() if number]
    for tier, numbers in state["tiers"].items():
        pages = numbers.get("pages", {})
        left += [f"{tier}: {pages[kind]} {kind}" for kind in ("held", "filling", "pending_free") if pages.get(kind)]
        left += [f"{tier}: {numbers['used_tokens']} used"] if numbers.get("used_tokens") else []
    left += [f"{link} in flight" for link, numbers in state["links"].items() if numbers["operations_in_flight"]]
    storage = state["storage"]
    left += [f"{name} {storage[name]}" for name in ("fetching_tokens", "storing_tokens") if storage[name]]
    left += [f"{name} off: {storage[name]['reason']}" for name in ("reads", "writes") if storage[name]["off"]]
    left += [f"{lender} not connected" for lender in state["peers"]["lenders"] if not lender["connected"]]
    return left


def assert_nothing_is_left(server: Server) -> None:
    """Of requests, of transfers, of cached pages after a flush; and of the server after its end."""

    def is_nothing_left() -> bool:
        left = what_is_left(server.state())
        if any(" off: " in each for each in left):
            # Storage is tried with the block of a prompt, and no client asks any more.
            body = {"input_ids": random_ids(len(left), 300), "sampling_params": PARAMS}
            assert server.post("/generate", body).status_code == 200
        return not left

    with contextlib.suppress(AssertionError):
        wait_until(is_nothing_left)
    assert what_is_left(server.state()) == []
    assert server.post("/flush_cache", headers=ADMIN).status_code == 200
    assert [tier for tier in ("device", "peer", "host") if server.state()["tiers"][tier]["cached_tokens"]] == []
    assert what_is_left(server.state()) == []
    print("\n".join(line for line in server.output().splitlines() if "WARNING" in line or "ERROR" in line))
    server.send()
    assert server.wait() == 0, server.output()
    assert "Traceback" not in server.output() and "terminate" not in server.output(), server.output()
    server.assert_nothing_left()


# ERROR lines that faults explain: a proxy that hangs is killed with such a line.
_EXPECTED_ERRORS = re.compile(r"proxy")


def unexpected_lines(log: str) -> list[str]:
    """Of a log: what no fault explains."""
    return [
        line
        for line in log.splitlines()
        if re.search(r"Traceback|terminate called|Exception|Segmentation", line)
        or (" ERROR" in line and not _EXPECTED_ERRORS.search(line))
    ]


def held_by(server: Server, disk: Path) -> Counter[str]:
    """Descriptors of all processes of the server by kind, and mappings of shared memory. Without connections and the
    disk tier's files, which come and go; of each folder that was deleted it keeps one file open (`SharedChanges`)."""
    held: Counter[str] = Counter()
    parent = psutil.Process(server.process.pid)
    for process in (parent, *parent.children(recursive=True)):
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if not target.startswith((str(disk), "socket:")) and not target.endswith("/changes (deleted)"):
                        held[re.sub(r"\d+", "", target.rsplit("/", 1)[-1])] += 1
            maps = (folder / "maps").read_text().splitlines()
            held["shared memory"] += sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
    return held


ROUTERS = {"none": "", "sglang": "sglang.router", "sglang-router": "sglang_router.launch_router"}


def found_router() -> str:
    """SGLang's own where it is installed."""
    return "sglang-router" if importlib.util.find_spec("sglang_router") else "sglang"


class Router:
    """A router of ROUTERS before the server, in a process of its own."""

    def __init__(self, name: str, server: Server, folder: Path) -> None:
        self._log = folder / "router.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", ROUTERS[name], "--worker-urls", server.url, "--port", str(port)]
        if name == "sglang-router":
            command += ["--host", "127.0.0.1", "--prometheus-port", str(free_port())]
            command += ["--worker-startup-check-interval", "1"]
        with self._log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
            workers = httpx.get(f"{self.url}/workers", timeout=PATIENCE_S, verify=NO_TLS).json()["workers"]
            return [worker["is_healthy"] for worker in workers] == [True]
        return False

    def end(self) -> None:
        self._process.terminate()
        assert self._process.wait(PATIENCE_S) in (0, -signal.SIGTERM), self._log.read_text()
        assert "Traceback" not in self._log.read_text(), self._log.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Config:
    """What of a run a seed does not decide. steps and minutes: the run ends with the first that is reached."""

    seed: int
    steps: int = 1_000_000
    minutes: float = 1e9
    # Tiers that one prompt has come from before the first fault.
    mixed: int = 5
    router: str = "none"
    # The lender copies for the server.
    strict: bool = False
    backend: str = "bluefield"
    # The disk tier's file system is small, and can be filled, where this user may mount one.
    small_disk: bool = False


@dataclass(frozen=True)
class Step:
    """names: of `faults`, which begin one after the other. Waits are numbers of answers; negative ones are none."""

    names: tuple[str, ...]
    waits: tuple[int, ...]
    wait_during: int
    wait_after: int


def plan(seed: int, known: list[str]) -> Iterator[Step]:
    rng = random.Random(seed)
    while True:
        # At most one of each part.
        names = {name.split()[0]: name for name in rng.sample(known, rng.choice((1, 1, 2, 4, 8)))}
        # A store that hangs ends no detach.
        chosen = tuple(names.values()) if "storage" not in names else (names["storage"],)
        waits = tuple(rng.choice((-3, 0)) for _ in chosen)
        yield Step(chosen, waits, rng.choice((0, 3, 20)), rng.choice((-3, 0, 10)))


@contextlib.contextmanager
def everything(folder: Path, config: Config) -> Iterator[tuple[AllTiers, Clients]]:
    """All parts, the server on them, and clients that have had prompts from all sources, one of them from
    `config.mixed` at the same time. At the end all sources serve prompts again, and the server stops with nothing
    left."""
    with contextlib.ExitStack() as stack:
        tiers = stack.enter_context(AllTiers(folder, config.strict, config.backend, config.small_disk))
        server = tiers.start_server(*FLAGS.split(), disk_tokens=DISK_TOKENS)
        server.wait_ready()
        references = hold_all(server)
        state = server.state()
        assert [tier for tier in SOURCES if state["tiers"][tier].get("cached_tokens")] == []
        router = Router(config.router, server, folder) if config.router != "none" else None
        if router is not None:
            stack.callback(router.close)
        url, drops_salts = router.url if router else "", config.router == "sglang-router"
        with Clients(server, references, config.seed, url, drops_salts) as clients:
            clients.wait_until(
                lambda: len(clients.seen.most) >= config.mixed and all(clients.seen.tokens[s] for s in SOURCES)
            )
            before = held_by(server, tiers.disk.folder)
            yield tiers, clients
        kinds = clients.seen.kinds
        with Clients(server, references, config.seed, url, drops_salts) as clients:
            clients.wait_for_tokens(*SOURCES)
            clients.wait_until(
                lambda: not any(server.state()["storage"][kind]["off"] for kind in ("reads", "writes"))
            )
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not held_by(server, tiers.disk.folder) - before, 30)
        more = held_by(server, tiers.disk.folder) - before
        assert not more, f"more is held than before: {more}, {before}"
        print(f"requests: {dict(kinds + clients.seen.kinds)}", flush=True)
        if router is not None:
            router.end()
        assert_nothing_is_left(server)
        assert not unexpected_lines(server.output()), unexpected_lines(server.output())


def take_step(tiers: AllTiers, clients: Clients, step: Step) -> None:
    known = faults(tiers)
    began, before = time.monotonic(), clients.seen.tokens.copy()
    clients.seen.slowest_s = 0.0
    print(f"{', '.join(step.names)} ...", end=" ", flush=True)
    with contextlib.ExitStack() as stack:
        for name, wait in zip(step.names, step.waits):
            stack.enter_context(known[name]())
            clients.wait_for_answers(wait)
        clients.wait_for_answers(step.wait_during)
    clients.wait_for_answers(step.wait_after)
    took = f"{time.monotonic() - began:.1f} s, the slowest request {clients.seen.slowest_s:.1f} s"
    print(f"{took}, {dict(clients.seen.tokens - before)}", flush=True)


def run(folder: Path, config: Config) -> None:
    print(f"{config}", flush=True)
    taken: list[Step] = []
    tiers: AllTiers | None = None
    try:
        with everything(folder, config) as (tiers, clients):
            end = time.monotonic() + 60 * config.minutes
            for step in itertools.islice(plan(config.seed, sorted(faults(tiers))), config.steps):
                if time.monotonic() > end:
                    break
                taken.append(step)
                take_step(tiers, clients, step)
    except BaseException as error:
        _keep(folder, config, taken, tiers, error)
        raise


def _keep(folder: Path, config: Config, taken: list[Step], tiers: AllTiers | None, error: BaseException) -> None:
    kept = Path("build") / f"chaos-{config.seed}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    again = f"PYTHONPATH=test python -m support.chaos --seed {config.seed} --steps {max(1, len(taken))}"
    again += f" --router {config.router} --backend {config.backend}" + (" --strict" if config.strict else "")
    text = [again, repr(config), *map(repr, taken), f"{type(error).__name__}: {error}"]
    (kept / "plan").write_text("\n".join(text) + "\n")
    for log in (*folder.glob("*.log"), *folder.glob("proxy/log")):
        shutil.copy(log, kept / log.name)
    if tiers is not None:
        (kept / "server.log").write_text(tiers.last_output)
        (kept / "state.json").write_text(tiers.last_state)
    print(f"\nfailed; see {kept}. Again: {again}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the plan, if it is to end before")
    parser.add_argument("--router", choices=ROUTERS, default=found_router())
    parser.add_argument("--backend", choices=("bluefield", "remote"), default="bluefield")
    parser.add_argument("--strict", action="store_true", help="the lender copies for the server")
    args = parser.parse_args()
    config = Config(args.seed, args.steps, args.minutes, 5, args.router, args.strict, args.backend, True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run(Path(folder), config)


if __name__ == "__main__":
    main()
