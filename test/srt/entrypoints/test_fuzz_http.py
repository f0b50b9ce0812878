"""The HTTP schema under fire: bodies of upstream's field names with valid, odd and absurd values, against the real
engine with small pools, a host tier, and parsers of calls and reasoning. Nothing may be a 5xx, every refusal has the
shape of its API, every stream ends as its API has it, nothing is left or leaked.

The cases are the same on every run. `pytest -m slow` runs many more, with every parser.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sglang.srt.constrained.grammar_checker import LANES
from sglang.srt.entrypoints.anthropic.protocol import PATHS as ANTHROPIC_PATHS
from sglang.srt.entrypoints.http_limits import KEEP_ALIVE_S
from support import chat_bodies, http_bodies
from support.http_bodies import as_json, junk, words
from support.server_fixture import PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e

settings.register_profile(
    "http",
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
CASES = settings(settings.get_profile("http"), max_examples=66)
MANY_CASES = settings(settings.get_profile("http"), max_examples=2_000)

BODIES = {**http_bodies.BODIES, **chat_bodies.BODIES}
# The more of a group's code other groups reach, the fewer cases it needs.
SHARES = {
    "/tokenize": 4,
    "/detokenize": 4,
    "/abort_request": 2,
    "/v1/chat/completions tools": 2,
    "/v1/chat/completions grammars": 4,
    "/v1/responses": 3,
    "/v1/messages": 3,
    "/v1/messages/count_tokens": 6,
    "/v1/embeddings": 5,
    "/parse_function_call": 2,
    "/separate_reasoning": 6,
}
# --tool-call-parser, --reasoning-parser.
PARSERS = [
    ("hermes", "qwen3"),
    ("qwen3_coder", "deepseek-r1"),
    ("mistral", "qwen3-thinking"),
    ("pythonic", "qwen3"),
    ("llama3", "deepseek-r1"),
]
# Shows what models' templates show of a conversation. The embedded model's own leaves tools out.
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}<|im_end|>{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}
{%- if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
# What the server may have more at the end than after its first requests: threads of its pools and a process for each
# slower lane of grammars, which start when they are needed.
MAX_MORE_CHILDREN, MAX_MORE_THREADS, MAX_MORE_FDS = len(LANES) - 1, 16, 16
# Caches of the fuzz's own texts, grammars and pages are bounded. A leak of a kilobyte for each request is not.
MAX_MORE_BYTES = 256 << 20

WRONG = [5, "x", [], {}, None, True, [5], {"a": 5}, 1e308, "\1nest list 990", "\1nest object 980"]

CHAT_ENDS = {"stop", "length", "tool_calls"}
RESPONSE_ENDS = {"response.completed", "response.incomplete", "error"}
MESSAGE_ENDS = {"end_turn", "max_tokens", "tool_use", "stop_sequence"}


class Target:
    """A server with one connection that is kept open."""

    def __init__(self, parsers: tuple[str, str], folder: Path) -> None:
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        # 512 tokens of cache: a request without a limit ends soon, and most prompts evict something.
        flags = "--hicache --max-total-tokens 512 --chunked-prefill-size 16 --log-level warning"
        tools, reasoning = parsers
        flags += f" --tool-call-parser {tools} --reasoning-parser {reasoning} --chat-template {template}"
        self.server = Server(*flags.split())
        self.connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        # When the last request was sent.
        self.sent_at = 0.0
        self.statuses: Counter[int] = Counter()

    def exchange(
        self, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self.connection.request(method, path, content, headers)
            response = self.connection.getresponse()
            return response, response.read()
        except BaseException:
            # Within a request, a connection takes no other request. The next one opens it anew.
            self.connection.close()
            raise

    def post(self, path: str, content: bytes) -> None:
        self.send("POST", path, content, {"content-type": "application/json"})

    def send(self, method: str, path: str, content: bytes, headers: dict[str, str]) -> None:
        """Sends it and checks what every answer must be."""
        before, self.sent_at = self.sent_at, time.monotonic()
        try:
            response, data = self.exchange(method, path, content, headers)
        except ConnectionError:
            # The server ends a connection that is idle for KEEP_ALIVE_S. On a busy machine this process is idle so
            # long. Any other end is a fault.
            if time.monotonic() - before < KEEP_ALIVE_S:
                raise
            response, data = self.exchange(method, path, content, headers)
        self.statuses[response.status] += 1
        assert response.status < 500, (response.status, data, method, path, content)
        route = path.partition("?")[0]
        if method == "HEAD":
            assert data == b""
        elif response.status >= 400:
            check_refusal(route, response.status, data)
        elif response.getheader("content-type", "").startswith("text/event-stream"):
            STREAMS.get(route, check_openai_stream)(data)
        elif route in WHOLE:
            WHOLE[route](json.loads(data))

    def quiet(self) -> bool:
        state = self.server.state()
        tiers = state["tiers"].values()
        busy = [tier["pages"][name] for tier in tiers for name in tier["pages"] if name not in ("free", "cached")]
        return not any(state["queues"].values()) and not any(busy)

    def resources(self) -> tuple[int, int, int, int]:
        """Children, threads, file descriptors, and bytes of the processes that are always there. Those that check
        grammars come and go, and share memory; they have limits of their own."""
        main = psutil.Process(self.server.process.pid)
        every = [main, *main.children(recursive=True)]
        threads, fds = (sum(getattr(each, what)() for each in every) for what in ("num_threads", "num_fds"))
        lasting = [main, *self.server.children]
        return len(every) - 1, threads, fds, sum(each.memory_info().rss for each in lasting)


def check_refusal(path: str, status: int, data: bytes) -> None:
    error = json.loads(data)
    if path in ANTHROPIC_PATHS:
        assert set(error) == {"type", "error"} and error["type"] == "error", (path, error)
        assert set(error["error"]) == {"type", "message"} and error["error"]["type"].endswith(("_error", "_large"))
        check_sentence(error["error"]["message"])
    else:
        check_error(error, status)


def check_error(error: dict[str, Any], status: int) -> None:
    assert set(error) == {"object", "message", "type", "param", "code"}, error
    assert error["object"] == "error" and error["code"] == status and 400 <= status < 500, error
    check_sentence(error["message"])
    assert isinstance(error["type"], str) and isinstance(error["param"], str | None)


def check_sentence(message: Any) -> None:
    assert isinstance(message, str) and " " in message and len(message) < 1200
    assert "internal error" not in message and "Traceback" not in message


def check_openai_stream(data: bytes) -> None:
    events = data.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        value = json.loads(event.removeprefix(b"data: "))
        if "error" in value:
            check_error(value["error"], value["error"]["code"])


def named_events(data: bytes) -> list[dict[str, Any]]:
    events = data.split(b"\n\n")
    assert events.pop() == b""
    made = []
    for event in events:
        name, value = event.split(b"\n")
        made.append(json.loads(value.removeprefix(b"data: ")))
        assert name == b"event: " + made[-1]["type"].encode()
    return made


def check_responses_stream(data: bytes) -> None:
    events = named_events(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] in RESPONSE_ENDS, events[-1]
    assert not [event for event in events[:-1] if event["type"] in RESPONSE_ENDS]
    if events[-1]["type"] == "error":
        check_sentence(events[-1]["message"])
    else:
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == items
        check_response(events[-1]["response"])


def check_messages_stream(data: bytes) -> None:
    events = named_events(data)
    if events[-1]["type"] == "error":
        check_sentence(events[-1]["error"]["message"])
        return
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[-2]["type"] == "message_delta" and events[-2]["delta"]["stop_reason"] in MESSAGE_ENDS
    num_blocks, is_open = 0, False
    for event in events[1:-2]:
        is_start = event["type"] == "content_block_start"
        assert is_open is not is_start, events
        num_blocks += is_start
        is_open = event["type"] != "content_block_stop"
        assert event["index"] == num_blocks - 1
    assert not is_open


def check_chat(reply: dict[str, Any]) -> None:
    for choice in reply["choices"]:
        assert choice["finish_reason"] in CHAT_ENDS
        calls = choice["message"].get("tool_calls", [])
        assert [call["index"] for call in calls] == list(range(len(calls)))
        assert len({call["id"] for call in calls}) == len(calls)
        for call in calls:
            assert call["function"]["name"] and isinstance(call["function"]["arguments"], str)
    assert reply["usage"]["completion_tokens"] >= len(reply["choices"])


def check_response(reply: dict[str, Any]) -> None:
    assert reply["object"] == "response" and reply["status"] in ("completed", "incomplete")
    for item in reply["output"]:
        assert item["type"] in ("message", "reasoning", "function_call")


def check_message(reply: dict[str, Any]) -> None:
    assert reply["type"] == "message" and reply["stop_reason"] in MESSAGE_ENDS
    for block in reply["content"]:
        assert block["type"] in ("text", "thinking", "tool_use")
        assert block["type"] != "tool_use" or isinstance(block["input"], dict)


def check_calls(reply: dict[str, Any]) -> None:
    assert isinstance(reply["normal_text"], str)
    for call in reply["calls"]:
        assert call["name"] and isinstance(call["parameters"], str)


STREAMS: dict[str, Callable[[bytes], None]] = {
    "/v1/responses": check_responses_stream,
    "/v1/messages": check_messages_stream,
}
WHOLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "/v1/chat/completions": check_chat,
    "/v1/responses": check_response,
    "/v1/messages": check_message,
    "/parse_function_call": check_calls,
}
WARM_UP = [
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "regex": "a", "max_tokens": 1}'),
    ("/v1/embeddings", b'{"input": ["a", "b"]}'),
    ("/generate", b'{"text": "a", "sampling_params": {"max_new_tokens": 2}, "return_logprob": true}'),
]


@pytest.fixture(scope="module")
def target(request, tmp_path_factory):
    target = Target(request.param, tmp_path_factory.mktemp("fuzz"))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(2 * limit)  # replies repeat some fields of their requests, within more levels
    with target.server:
        for path, content in WARM_UP:
            target.post(path, content)
        assert target.statuses == {200: len(WARM_UP)}
        before = target.resources()
        yield target
        target.statuses.clear()
        for path, content in WARM_UP:
            target.post(path, content)
        assert target.statuses == {200: len(WARM_UP)}
        wait_until(target.quiet)
        more = [now - then for now, then in zip(target.resources(), before, strict=True)]
        limits = [MAX_MORE_CHILDREN, MAX_MORE_THREADS, MAX_MORE_FDS, MAX_MORE_BYTES]
        assert all(each <= limit for each, limit in zip(more, limits, strict=True)), (more, limits)
        assert target.server.post("/flush_cache").status_code == 200
        assert target.server.process.poll() is None
        sys.setrecursionlimit(limit)
        output = target.server.output()
        assert "Traceback" not in output and "ERROR" not in output, output[-3000:]


def hammer(target: Target, group: str, how_many: settings) -> None:
    path = group.partition(" ")[0]
    share = settings(how_many, max_examples=how_many.max_examples // SHARES.get(group, 1))

    @share
    @given(BODIES[group])
    def run(body: Any) -> None:
        target.post(path, as_json(body))

    target.statuses.clear()
    run()
    # Bodies reach what is behind the checks, and the checks.
    least = share.max_examples // 10
    assert target.statuses[200] > 0 and target.statuses[400] > least, target.statuses


one_server = pytest.mark.parametrize("target", PARSERS[:1], indirect=True, ids=" ".join)


@one_server
@pytest.mark.parametrize("group", BODIES)
def test_bodies(target, group):
    hammer(target, group, CASES)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all values within a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [place for key, each in inner for place in places(each, (*at, key))]


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    made = dict(value) if isinstance(value, dict) else list(value)
    made[at[0]] = replaced(value[at[0]], at[1:], new)
    return made


@one_server
@pytest.mark.parametrize("path", chat_bodies.EXAMPLES)
def test_a_wrong_type_in_every_place(target, path):
    whole = chat_bodies.EXAMPLES[path]
    target.statuses.clear()
    target.post(path, as_json(whole))
    assert target.statuses == {200: 1}
    for number, place in enumerate(places(whole)):
        target.post(path, as_json(replaced(whole, place, WRONG[number % len(WRONG)])))


@pytest.mark.slow
@one_server
@pytest.mark.parametrize("path", chat_bodies.EXAMPLES)
def test_every_wrong_type_in_every_place(target, path):
    whole = chat_bodies.EXAMPLES[path]
    nests = [f"\1nest {kind} {depth}" for kind in ("list", "object") for depth in range(880, 1000, 8)]
    for place in places(whole):
        for new in (*WRONG, *nests):
            target.post(path, as_json(replaced(whole, place, new)))


@one_server
@settings(CASES, max_examples=100)
@given(group=st.sampled_from(list(BODIES)), data=st.data())
def test_damaged_json(target, group, data):
    content = bytearray(as_json(data.draw(BODIES[group])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 4))
        splice = st.one_of(
            st.binary(max_size=3), st.sampled_from([b"\\ud800", b"\\u0000", b"[" * 2000, b'{"a":' * 2000])
        )
        content[at : at + cut] = data.draw(splice)
    target.post(group.partition(" ")[0], bytes(content))


header_values = st.one_of(
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_categories=["Cc"]), max_size=20),
    st.sampled_from(["", "x" * 3000, "\xff", "'\"", "{}", "-1", "1" * 400, "\t"]),
)
content_types = st.sampled_from(
    [
        "application/json",
        "application/json; charset=utf-8",
        "text/plain",
        "application/xml",
        "",
        ";",
        "multipart/form-data",
    ]
)
header_names = st.sampled_from(
    ["x-request-id", "x-session-id", "traceparent", "accept", "accept-encoding", "authorization", "x-api-key"]
    + ["anthropic-version", "cookie", "x-forwarded-for", "origin", "user-agent", "range", "if-none-match"]
)
methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "FOO"])
OTHER_PATHS = ["/", "/health", "/v1/models", "/v1/models/x", "/docs", "/openapi.json", "/metrics", "/get_server_info"]
OTHER_PATHS += ["/hicache/tiers", "/hicache/tiers/x", "/hicache/storage-backend", "/model_info", "/flush_cache", "//"]
tails = st.sampled_from(["", "/", "?", "?a=b&a=%00", "/%00", "/..", "?stream=%ff", "/" + "x" * 2000, "%2e%2e/%2e"])


@one_server
@settings(CASES, max_examples=100)
@given(data=st.data())
def test_methods_paths_and_headers(target, data):
    group = data.draw(st.sampled_from([*BODIES, *OTHER_PATHS]))
    path = group.partition(" ")[0] + data.draw(tails)
    headers = data.draw(st.dictionaries(header_names, header_values, max_size=3))
    if data.draw(st.booleans()):
        headers["content-type"] = data.draw(content_types)
    # Bodies that would take long, or the server down, are none that these paths know.
    body = data.draw(st.one_of(st.just({"messages": 5}), st.dictionaries(words, junk, max_size=2)))
    target.send(data.draw(methods), path, as_json(body), headers)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@one_server
@pytest.mark.parametrize("group", BODIES)
def test_many_more_bodies(target, group):
    hammer(target, group, MANY_CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", PARSERS[1:], indirect=True, ids=" ".join)
@pytest.mark.parametrize("group", ["/v1/chat/completions tools", "/v1/responses", "/v1/messages"])
def test_other_parsers(target, group):
    hammer(target, group, settings(MANY_CASES, max_examples=500))


@pytest.mark.slow
@one_server
@pytest.mark.parametrize("number", range(len(chat_bodies.HOSTILE)))
def test_hostile_grammars(target, number):
    """They are refused or served. The process that checks them may die of it, and no other."""
    grammar = chat_bodies.HOSTILE[number]
    for body in (grammar, {**grammar, "tools": [{"type": "function", "function": {"name": "f"}}]}):
        content = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **body}
        target.post("/v1/chat/completions", json.dumps(content).encode())
