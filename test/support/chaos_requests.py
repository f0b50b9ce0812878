"""What the clients of a chaos ask. Each answer is compared with the one that the server computes without a cache."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from support.all_tiers import SOURCES
from support.chaos_bodies import WRONG, bodies, difference, drawn_fields
from support.chaos_mixes import Mix
from support.chaos_streams import can_stream, joined, parts_of
from support.gate import Gate
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

NUM_CONVERSATIONS, NUM_TURNS = 6, 4
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 128, 90, 6
# Three chunks of prefill.
NUM_LONG, LONG_TOKENS = 2, 600
# Where they may be longer than the device.
STREAMED_TOKENS = 1000
# The same, and where they may be longer than device, peers and host.
SWAPPED_TOKENS = 2200
NUM_CLIENTS = 3
TENANTS = ("one", "two")
SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
    "required": ["open", "days"],
    "additionalProperties": False,
}
PARAMS = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
# Reasons for a status 503, where requests may be longer than the device.
_NO_ROOM = re.compile(r"peers have not lent|no tier has room|with all that the peers can lend|there is no room")


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
    # Path, body and reply.
    others: list[tuple[str, dict[str, Any], Any]]
    # Of log-probabilities: launches of other sizes round otherwise.
    tolerance: float


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


def hold_others(
    server: Server, prompts: list[list[int]], temperature: float
) -> list[tuple[str, dict[str, Any], Any]]:
    held = []
    for path, body in bodies(prompts, temperature):
        body = {"model": "embedded", **body}
        reply = server.post(path, {**body, "cache": "bypass"})
        assert reply.status_code == 200, reply.text
        held.append((path, body, reply.json()))
    return held


def hold_all(server: Server, mix: Mix) -> References:
    long_tokens = SWAPPED_TOKENS if mix.swaps else STREAMED_TOKENS if mix.streams else LONG_TOKENS
    long = uncached_turns(server, [random_ids(1000 + i, long_tokens) for i in range(NUM_LONG)])
    conversations = hold_conversations(server)
    prompts = [conversation[i].prompt for i, conversation in enumerate(conversations[:3])]
    # Where KV is rounded, a draw may fall to another token now and then.
    others = hold_others(server, prompts, temperature=0.0 if mix.rounds else 0.8)
    return References(conversations, long, hold_chats(server), others, tolerance=0.1 if mix.rounds else 1e-3)


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


class NoRoomError(Exception):
    """A request that is longer than the device found no room, as the reply tells."""


class Clients:
    """Threads, each of which asks in an order of its own, until the context ends. servers: the first has all tiers.
    url: of a router before them. drops_salts: it passes extra_key alone."""

    def __init__(
        self,
        servers: Sequence[Server],
        references: References,
        seed: int,
        url: str = "",
        drops_salts: bool = False,
    ) -> None:
        self.seen = Seen()
        self._servers = servers
        self._server = servers[0]
        self._url = url
        self._salt = "extra_key" if drops_salts else "cache_salt"
        self._references = references
        self._closed = threading.Event()
        # Closed while the server is restarted, unless a router knows of another one.
        self.gate = Gate()
        self.is_restarting = False
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"), servers[i % len(servers)]))
            for i in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random, server: Server) -> None:
        client = httpx.Client(base_url=self._url or server.url, timeout=PATIENCE_S, verify=NO_TLS)
        kinds: dict[Callable[..., str], int] = {
            self._ask: 10,
            self._ask_in_a_stream: 6,
            self._ask_twice: 2,
            self._ask_as_a_tenant: 3,
            self._ask_as_a_new_tenant: 1,
            self._leave: 2,
            self._abort: 2,
            self._chat: 4,
            self._ask_another_way: 4,
            self._ask_another_way_in_a_stream: 4,
            self._ask_with_fields: 4,
            self._ask_without_answer: 1,
            self._ask_for_many: 1,
            self._vanish: 3,
            self._hang_up: 1,
            self._ask_wrongly: 1,
        }
        for turn in itertools.chain.from_iterable(self._orders(rng)):
            if self._closed.is_set():
                client.close()
                return
            ask = rng.choices(list(kinds), list(kinds.values()))[0]
            with self.gate.passed():
                with self.seen.lock:
                    self.seen.num_begun += 1
                began = time.monotonic()
                self.note(ask.__name__, partial(ask, client, turn, rng))
            with self.seen.lock:
                self.seen.num_ended += 1
                self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - began)

    def note(self, name: str, act: Callable[[], str]) -> None:
        """Act, and note what is wrong, if anything."""
        try:
            wrong = act()
        except NoRoomError:
            name, wrong = "(no room)", ""
        except Exception as error:
            wrong = f"{error!r}"
        with self.seen.lock:
            self.seen.kinds[name.strip("_")] += 1
            if wrong:
                self.seen.wrong.append(f"{name}: {wrong}")

    def _orders(self, rng: random.Random) -> Iterator[list[Turn]]:
        while True:
            if rng.random() < 0.1:
                yield [rng.choice(self._references.long)]
            yield rng.choice(self._references.conversations)[rng.randrange(NUM_TURNS) :]

    def post(self, client: httpx.Client, turn: Turn, fields: dict[str, Any] | None = None, **params: Any) -> Any:
        body = {"input_ids": turn.prompt, "sampling_params": {**PARAMS, **params}, "return_logprob": True}
        body |= fields or {}
        reply = client.post("/generate", json=body)
        if reply.status_code == 503 and _NO_ROOM.search(reply.text):
            raise NoRoomError
        assert reply.status_code == 200, reply.text
        return reply.json()

    def check(self, turn: Turn, reply: dict[str, Any]) -> str:
        found = reply["meta_info"]["cached_tokens_details"]
        with self.seen.lock:
            # Without storage an answer does not name its tiers.
            self.seen.tokens.update({source: found.get(source, 0) for source in SOURCES})
            self.seen.most = max(self.seen.most, frozenset(filter(found.get, SOURCES)), key=len)
        if reply["output_ids"] != turn.output_ids:
            return f"{reply['output_ids']} is not {turn.output_ids}; cached: {found}"
        if (
            max(abs(a - b) for a, b in zip(logprobs_of(reply), turn.logprobs, strict=True))
            > self._references.tolerance
        ):
            return f"{logprobs_of(reply)} is not {turn.logprobs}; cached: {found}"
        return ""

    def _ask(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        return self.check(turn, self.post(client, turn))

    def _ask_twice(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        return "".join(self.check(turn, reply) for reply in self.post(client, turn, n=2))

    def _ask_in_a_stream(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        body = {"input_ids": turn.prompt, "sampling_params": PARAMS, "return_logprob": True, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        if _NO_ROOM.search("".join(lines)):
            raise NoRoomError
        assert lines[-1] == "[DONE]", lines
        return self.check(turn, json.loads(lines[-2]))

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
            lines = filter(None, response.iter_lines())
            # On a busy machine it may be the last one, too.
            first = next(lines)
            # Routers do not pass it on.
            for server in self._servers:
                with self._unless_restarting():
                    assert server.post("/abort_request", {"rid": rid}).status_code == 200
            *_, last, done = (line.removeprefix("data: ") for line in (first, *lines))
        assert done == "[DONE]", done
        event = json.loads(last)
        if "error" in event:
            return "" if event["error"]["code"] == 499 else f"aborted: {event}"
        output_ids = event["output_ids"][:ANSWER_TOKENS]
        is_end = event["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        return "" if is_end and output_ids == turn.output_ids[: len(output_ids)] else f"aborted: {event}"

    @contextlib.contextmanager
    def _unless_restarting(self) -> Iterator[None]:
        """A server that is asked without the router may be away."""
        try:
            yield
        except (AssertionError, OSError, httpx.TransportError):
            if not self.is_restarting:
                raise

    def _ask_as_a_tenant(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        return self.check(turn, self.post(client, turn, {self._salt: rng.choice(TENANTS)}))

    def _ask_as_a_new_tenant(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        reply = self.post(client, turn, {self._salt: f"{rng.getrandbits(64):x}"})
        found = reply["meta_info"]["cached_tokens_details"]
        return f"a new tenant finds {found}" if any(found.values()) else self.check(turn, reply)

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

    def _ask_another_way(self, client: httpx.Client, _: Turn, rng: random.Random) -> str:
        path, body, wanted = rng.choice(self._references.others)
        reply = client.post(path, json=body | drawn_fields(rng))
        assert reply.status_code == 200, f"{path}: {reply.text}"
        return difference(reply.json(), wanted, self._references.tolerance, path)

    def _ask_another_way_in_a_stream(self, client: httpx.Client, _: Turn, rng: random.Random) -> str:
        path, body, wanted = rng.choice([each for each in self._references.others if can_stream(each[0])])
        with client.stream("POST", path, json=body | {"stream": True} | drawn_fields(rng)) as response:
            assert response.status_code == 200, f"{path}: {response.read()!r}"
            found = joined(path, list(response.iter_lines()))
        return difference(found, parts_of(path, wanted), self._references.tolerance, f"{path} in a stream")

    def _ask_with_fields(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        return self.check(turn, self.post(client, turn, drawn_fields(rng)))

    def _ask_without_answer(self, client: httpx.Client, turn: Turn, _: random.Random) -> str:
        output_ids = self.post(client, turn, max_new_tokens=0)["output_ids"]
        return f"an answer without tokens: {output_ids}" if output_ids else ""

    def _ask_for_many(self, client: httpx.Client, turn: Turn, rng: random.Random) -> str:
        """A list of prompts, some of them twice."""
        turns = [turn, *rng.choices(rng.choice(self._references.conversations), k=3)]
        replies = self.post(client, turn, {"input_ids": [each.prompt for each in turns]})
        return "".join(self.check(each, reply) for each, reply in zip(turns, replies, strict=True))

    def _vanish(self, client: httpx.Client, _: Turn, rng: random.Random) -> str:
        """In the middle of a stream."""
        path, body, _wanted = rng.choice([each for each in self._references.others if can_stream(each[0])])
        with client.stream("POST", path, json=body | {"stream": True} | drawn_fields(rng)) as response:
            assert response.status_code == 200, f"{path}: {response.read()!r}"
            for _chunk in itertools.islice(response.iter_raw(), rng.choice((0, 1, 3))):
                pass
        return ""

    def _hang_up(self, _client: httpx.Client, _: Turn, rng: random.Random) -> str:
        """In the middle of a body, or before the answer."""
        path, body, _wanted = rng.choice(self._references.others)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        with self._unless_restarting(), socket.create_connection(("127.0.0.1", self._server.port)) as sock:
            sock.sendall(head.encode() + b"\r\n" + data[: rng.choice((len(data) // 2, len(data)))])
            time.sleep(rng.choice((0.0, 0.05)))
        return ""

    def _ask_wrongly(self, client: httpx.Client, _: Turn, rng: random.Random) -> str:
        path, body = rng.choice(WRONG)
        reply = client.post(path, json={"model": "embedded", **body})
        return "" if 400 <= reply.status_code < 500 else f"{path} {body}: {reply.status_code} {reply.text}"

    def assert_right(self) -> None:
        with self.seen.lock:
            assert not self.seen.wrong, "\n".join(self.seen.wrong)

    def wait_until(self, true: Callable[[], bool]) -> None:
        def is_over() -> bool:
            self.assert_right()
            assert self.is_restarting or all(server.process.poll() is None for server in self._servers)
            return true()

        wait_until(is_over, 3 * PATIENCE_S)

    def wait_for_answers(self, number: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """To requests that begin now: those under way end meanwhile, or some of them do. is_over: wait no longer."""
        with self.seen.lock:
            enough = self.seen.num_begun + number
        self.wait_until(lambda: self.seen.num_ended >= enough or is_over())

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
