"""Everything at once: one server whose prompts come from device, peer, host, disk and remote store, all real, while
each of these parts is killed, stopped, slowed and brought back. Its answers are those that it computes without the
cache."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.all_tiers import AllTiers, borrowed_tokens, faults
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e

SOURCES = ("device", "peer", "host", "disk", "remote")
# Of the conversations, device, peer and host together hold two thirds, and the disk four fifths.
FLAGS = "--max-total-tokens 768 --hicache-ratio 0.6 --chunked-prefill-size 256 --hicache-load-or-recompute off"
DISK_TOKENS = 2000
NUM_CONVERSATIONS, NUM_TURNS = 6, 4
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 128, 90, 6
NUM_CLIENTS = 3
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


def hold_conversations(server: Server) -> list[list[Turn]]:
    """Conversations that begin with the same system prompt. No answer reads or fills the cache."""
    prompts = [random_ids(0, SYSTEM_TOKENS) for _ in range(NUM_CONVERSATIONS)]
    conversations: list[list[Turn]] = [[] for _ in prompts]
    for turn in range(NUM_TURNS):
        for i, prompt in enumerate(prompts):
            prompt += random_ids(1 + i * NUM_TURNS + turn, QUESTION_TOKENS)
        body = {"input_ids": prompts, "sampling_params": PARAMS, "return_logprob": True, "cache": "bypass"}
        replies = server.post("/generate", body)
        assert replies.status_code == 200, replies.text
        for prompt, conversation, reply in zip(prompts, conversations, replies.json()):
            conversation.append(Turn(list(prompt), reply["output_ids"], logprobs_of(reply)))
            prompt += reply["output_ids"]
    return conversations


@dataclass
class Seen:
    """What the clients have seen so far. most: sources of the reply with the most. The lock guards all of it."""

    num_begun: int = 0
    num_ended: int = 0
    slowest_s: float = 0.0
    most: frozenset[str] = frozenset()
    tokens: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Clients:
    """Threads, each of which holds conversations with the server, in an order of its own, until the context ends."""

    def __init__(self, server: Server, conversations: list[list[Turn]], seed: int) -> None:
        self.seen = Seen()
        self._server = server
        self._conversations = conversations
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"),)) for i in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random) -> None:
        client = httpx.Client(base_url=self._server.url, timeout=PATIENCE_S, verify=NO_TLS)
        for turn in itertools.chain.from_iterable(self._orders(rng)):
            if self._closed.is_set():
                client.close()
                return
            with self.seen.lock:
                self.seen.num_begun += 1
            began = time.monotonic()
            ask = rng.choices((self._ask, self._ask_in_a_stream, self._ask_twice, self._leave), (5, 3, 1, 1))[0]
            try:
                wrong = ask(client, turn)
            except Exception as error:
                wrong = f"{error!r}"
            with self.seen.lock:
                self.seen.num_ended += 1
                self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - began)
                if wrong:
                    self.seen.wrong.append(f"{ask.__name__}, {len(turn.prompt)} tokens: {wrong}")

    def _orders(self, rng: random.Random) -> Iterator[list[Turn]]:
        while True:
            yield rng.choice(self._conversations)[rng.randrange(NUM_TURNS) :]

    def _post(self, client: httpx.Client, turn: Turn, **params: Any) -> Any:
        body = {"input_ids": turn.prompt, "sampling_params": {**PARAMS, **params}, "return_logprob": True}
        reply = client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def _check(self, turn: Turn, reply: dict[str, Any]) -> str:
        found = reply["meta_info"]["cached_tokens_details"]
        with self.seen.lock:
            self.seen.tokens.update({source: found[source] for source in SOURCES})
            self.seen.most = max(self.seen.most, frozenset(filter(found.get, SOURCES)), key=len)
        if reply["output_ids"] != turn.output_ids:
            return f"{reply['output_ids']} is not {turn.output_ids}; cached: {found}"
        if max(abs(a - b) for a, b in zip(logprobs_of(reply), turn.logprobs, strict=True)) > TOLERANCE:
            return f"{logprobs_of(reply)} is not {turn.logprobs}; cached: {found}"
        return ""

    def _ask(self, client: httpx.Client, turn: Turn) -> str:
        return self._check(turn, self._post(client, turn))

    def _ask_twice(self, client: httpx.Client, turn: Turn) -> str:
        return "".join(self._check(turn, reply) for reply in self._post(client, turn, n=2))

    def _ask_in_a_stream(self, client: httpx.Client, turn: Turn) -> str:
        body = {"input_ids": turn.prompt, "sampling_params": PARAMS, "return_logprob": True, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines
        return self._check(turn, json.loads(lines[-2]))

    def _leave(self, client: httpx.Client, turn: Turn) -> str:
        body = {"input_ids": turn.prompt, "sampling_params": {**PARAMS, "max_new_tokens": 200}, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            next(response.iter_raw())
        return ""

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
    assert server.post("/flush_cache").status_code == 200
    assert [tier for tier in ("device", "peer", "host") if server.state()["tiers"][tier]["cached_tokens"]] == []
    assert what_is_left(server.state()) == []
    print("\n".join(line for line in server.output().splitlines() if "WARNING" in line or "ERROR" in line))
    server.send()
    assert server.wait() == 0, server.output()
    assert "Traceback" not in server.output() and "terminate" not in server.output(), server.output()
    server.assert_nothing_left()


@contextlib.contextmanager
def everything(folder: Path, seed: int, mixed: int, **options: Any) -> Iterator[tuple[AllTiers, Clients]]:
    """All parts, the server on them, and clients that have had prompts from all sources, one of them from `mixed` at
    the same time. At the end all sources serve prompts again, and the server stops with nothing left."""
    with AllTiers(folder, **options) as tiers:
        server = tiers.start_server(*FLAGS.split(), disk_tokens=DISK_TOKENS)
        server.wait_ready()
        conversations = hold_conversations(server)
        state = server.state()
        assert [tier for tier in SOURCES if state["tiers"][tier].get("cached_tokens")] == []
        with Clients(server, conversations, seed) as clients:
            clients.wait_until(
                lambda: len(clients.seen.most) >= mixed and all(clients.seen.tokens[s] for s in SOURCES)
            )
            yield tiers, clients
        with Clients(server, conversations, seed) as clients:
            clients.wait_for_tokens(*SOURCES)
            clients.wait_until(
                lambda: not any(server.state()["storage"][kind]["off"] for kind in ("reads", "writes"))
            )
        assert_nothing_is_left(server)


# As one step: what happens at the same time.
STEPS = (
    ("lender killed",),
    ("lender stopped",),
    ("store killed",),
    ("store stopped",),
    ("store slow",),
    ("proxy killed",),
    ("proxy stopped",),
    ("disk slow",),
    ("disk full",),
    ("disk gone",),
    ("lender killed", "store killed", "proxy killed", "disk deleted"),
    ("lender stopped", "store stopped", "proxy stopped", "disk hangs"),
)


def is_left_alone(server: Server) -> bool:
    """Whether the disk goes on without the remote store, or storage hangs as a whole."""
    state = server.state()
    return bool(state["tiers"]["remote"]["left_alone"] or state["storage"]["reads"]["off"])


def go_through(tiers: AllTiers, clients: Clients, names: tuple[str, ...]) -> None:
    known = faults(tiers)
    began, before = time.monotonic(), clients.seen.tokens.copy()
    clients.seen.slowest_s = 0.0
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(known[name]())
        if "lender killed" in names:
            clients.wait_until(lambda: borrowed_tokens(tiers.server) == 0)
        # A proxy that is stopped before it listens is out of reach, and nothing hangs.
        if "store stopped" in names and "proxy stopped" not in names:
            clients.wait_until(lambda: is_left_alone(tiers.server))
        clients.wait_for_answers(2)
    clients.wait_for_answers(1)
    took = f"{time.monotonic() - began:.1f} s, the slowest request {clients.seen.slowest_s:.1f} s"
    print(f"{', '.join(names)}: {took}, {dict(clients.seen.tokens - before)}", flush=True)


@pytest.mark.parametrize(
    "steps",
    [pytest.param(STEPS[-2:-1], id="all at once"), pytest.param(STEPS, id="each", marks=pytest.mark.slow)],
)
def test_all_sources_while_each_part_is_killed_stopped_and_slowed(
    steps: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    with everything(tmp_path, seed=1, mixed=4) as (tiers, clients):
        for names in steps:
            go_through(tiers, clients, names)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bluefield", "remote"])
@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
def test_all_sources_while_the_parts_fail_at_random(strict: bool, backend: str, tmp_path: Path) -> None:
    """SEED: of the faults, and of the clients. SOAK_S: how long they last."""
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    with everything(tmp_path, seed, mixed=5, strict=strict, backend=backend) as (tiers, clients):
        known = faults(tiers)
        end = time.monotonic() + float(os.environ.get("SOAK_S", "100"))
        while time.monotonic() < end:
            began, before = time.monotonic(), clients.seen.tokens.copy()
            clients.seen.slowest_s = 0.0
            # At most one of each part.
            chosen = {name.split()[0]: name for name in rng.sample(sorted(known), rng.choice((1, 1, 2, 4, 8)))}
            with contextlib.ExitStack() as stack:
                for name in chosen.values():
                    stack.enter_context(known[name]())
                    clients.wait_for_answers(rng.choice((-3, 0)))
                clients.wait_for_answers(rng.choice((0, 3, 20)))
            clients.wait_for_answers(rng.choice((-3, 0, 10)))
            took = f"{time.monotonic() - began:.1f} s, the slowest request {clients.seen.slowest_s:.1f} s"
            print(f"{', '.join(chosen.values())}: {took}, {dict(clients.seen.tokens - before)}", flush=True)
