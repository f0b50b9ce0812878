"""The runner against a server that sends known bytes: every backend, streams cut anywhere, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from sglang.serving_benchmark.backends import BACKENDS, Ask, Settings
from sglang.serving_benchmark.http_stream import HttpError, Server, send_json
from sglang.serving_benchmark.records import RequestRecord
from sglang.serving_benchmark.runner import Outcome, Runner, Target
from sglang.serving_benchmark.server_facts import ServerError, ask_facts, flush_cache, wait_ready
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Session, Turn, Workload, made_up
from support.fake_http_server import FakeServer, reply_of, stream_of

TIERS = {"device": 3, "host": 1}
TEXTS = ["", "Där", " is", " é", ""]
COUNTS = [1, 1, 2, 5, 6]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded")


def answers(backend: str, stream: bool) -> list[dict[str, Any]]:
    """Events, or one whole reply, of the text "Där is é" in 6 tokens."""
    if backend == "sglang":
        events = [
            {
                "text": "".join(TEXTS[: i + 1]),
                "output_ids": list(range(n)),
                "meta_info": {
                    "prompt_tokens": 9,
                    "completion_tokens": n,
                    "cached_tokens": 4,
                    "cached_tokens_details": TIERS,
                    "finish_reason": None,
                },
            }
            for i, n in enumerate(COUNTS)
        ]
        return events if stream else events[-1:]
    details = {"cached_tokens": 4, **({"cached_tokens_details": TIERS} if "sglang" in backend else {})}
    usage = [{"prompt_tokens": 9, "completion_tokens": n, "prompt_tokens_details": details} for n in COUNTS]
    kind = ("delta" if stream else "message") if "chat" in backend else None
    texts = TEXTS if stream else ["".join(TEXTS)]
    choices = [[{kind: {"content": text or None}} if kind else {"text": text}] for text in texts]
    found = [{"choices": each, "usage": use} for each, use in zip(choices, usage if stream else usage[-1:])]
    return [*found, {"choices": [], "usage": usage[-1]}] if stream else found


def target(server: Server, backend: str = "sglang", **settings: Any) -> Target:
    return Target(server, BACKENDS[backend], Settings("m", **settings))


def one(answer: bytes, vocabulary: Vocabulary, backend: str = "sglang", cut: int = 1 << 20) -> RequestRecord:
    async def ask() -> RequestRecord:
        async with FakeServer(lambda *_: answer, cut).running() as server:
            ticks = count()
            runner = Runner(target(server, backend), vocabulary, clock=lambda: float(next(ticks)))
            return await runner.ask_once(made_up(0, 8), 6)

    return asyncio.run(ask())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "cut"), [(1, 1 << 20), (7, 3), (11, 1), (1000, 1 << 20)])
def test_a_stream_is_read_wherever_it_is_cut(backend: str, size: int, cut: int, vocabulary: Vocabulary) -> None:
    record = one(stream_of(answers(backend, True), size), vocabulary, backend, cut)
    assert (record.error, record.text, record.output_len, record.prompt_len) == (None, "Där is é", 6, 9)
    assert record.cached_tokens == 4
    assert record.cached_tokens_by_tier == (TIERS if "sglang" in backend else None)
    assert record.ttft_s is not None and len(record.itl_s) == 1 + 3
    assert record.output_ids == (list(range(6)) if backend == "sglang" else None)
    assert record.ttft_s + sum(record.itl_s) <= record.latency_s


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_answer_comes_whole_without_a_stream(backend: str, vocabulary: Vocabulary) -> None:
    async def ask() -> tuple[RequestRecord, Any]:
        fake = FakeServer(lambda *_: reply_of(answers(backend, False)[0]))
        async with fake.running() as server:
            record = await Runner(target(server, backend, stream=False), vocabulary).ask_once(made_up(0, 8), 6)
        return record, fake.requests[0][1]

    record, body = asyncio.run(ask())
    assert body["stream"] is False and "stream_options" not in body
    assert (record.error, record.text, record.output_len, record.ttft_s) == (None, "Där is é", 6, None)
    assert record.cached_tokens == 4 and record.latency_s > 0


def test_times_are_those_of_the_pieces(vocabulary: Vocabulary) -> None:
    """One tick of the clock per piece: the start is 0, the comment 1, the events 2 to 6, [DONE] 7, the end 8."""
    events = answers("sglang", True)
    sizes = [len(b": a comment\n\n"), *(len(json.dumps(each)) + 8 for each in events), len(b"data: [DONE]\n\n")]
    whole = stream_of(events, 1 << 20)
    body = whole[whole.index(b": a") : -len(b"\r\n0\r\nx-trailer: 1\r\n\r\n")]
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert cuts[-1] == len(body)
    pieces = [body[a:b] for a, b in pairwise(cuts)]
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    record = one(head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n", vocabulary)
    assert record.start_s == 0 and record.ttft_s == 3 and record.latency_s == 8
    assert record.itl_s == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])


def error_event(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


PART = answers("sglang", True)[:3]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply_of({"object": "error", "message": "no such model"}, "404 Not Found"), "HTTP 404: no such model"),
        (reply_of(error_event("too long"), "400 Bad Request"), "HTTP 400: too long"),
        (reply_of({"detail": "gone"}, "410 Gone"), "HTTP 410: gone"),
        (reply_of(b"<html>", "502 Bad Gateway"), "HTTP 502"),
        (stream_of([*PART, error_event("out of memory")]), "out of memory"),
        (stream_of([*PART, {"object": "error", "message": "died"}]), "died"),
        (stream_of([*PART, b"{"]), "an answer that is not JSON"),
        (stream_of([*PART, {"choices": []}]), "an answer of another kind of server: choose another --backend"),
        (
            stream_of([{"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "timed out"}}}]),
            "timed out",
        ),
        (stream_of(PART, end=b""), "the server closed the connection in the middle of the answer"),
        (stream_of(PART, end=b"ff\r\nxx"), "the server closed the connection in the middle of the answer"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DON", "the stream ended without [DONE]"),
        (b"SSH-2.0-x\r\n", "what answers does not speak HTTP"),
        (b"", "the server closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "what answers does not speak HTTP"),
    ],
)
def test_what_goes_wrong_is_named(answer: bytes, error: str, vocabulary: Vocabulary) -> None:
    record = one(answer, vocabulary)
    assert record.error == error and not record.has_succeeded


def test_bodies_have_what_each_server_knows() -> None:
    settings = Settings("m", extra_body={"sampling_params": {"top_k": 5}, "user": "u"})
    native = BACKENDS["sglang"].request_body(Ask([1, 2], 4), settings)
    assert native["input_ids"] == [1, 2] and native["stream"] is True and native["user"] == "u"
    assert native["sampling_params"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_new_tokens": 4,
        "ignore_eos": True,
        "top_k": 5,
    }
    settings = replace(settings, extra_body={})
    for name, backend in BACKENDS.items():
        if name != "sglang":
            prompt: Any = [{"role": "user", "content": "x"}] if backend.is_chat else "x"
            body = backend.request_body(Ask(prompt, 4), settings)
            assert body["messages" if backend.is_chat else "prompt"] == prompt and body["max_tokens"] == 4
            assert body["model"] == "m" and body["stream_options"]["include_usage"]
            assert ("return_cached_tokens_details" in body) == ("sglang" in name)


def run(fake: FakeServer, workload: Workload, vocabulary: Vocabulary, backend: str, **more: Any) -> Outcome:
    sends_ids = more.pop("sends_ids", False)

    async def go() -> Outcome:
        async with fake.running() as server:
            to = replace(target(server, backend), sends_ids=sends_ids)
            return await Runner(to, vocabulary, **more).run(workload, [0.0] * len(workload.sessions))

    return asyncio.run(go())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_turn_has_what_came_before_with_the_real_answer(backend: str, vocabulary: Vocabulary) -> None:
    turns = tuple(Turn(made_up(key, 3), 6, delay_s=0.001 * key) for key in range(3))
    workload = Workload((Session(turns, made_up(9, 4)),))
    fake = FakeServer(lambda *_: stream_of(answers(backend, True)))
    outcome = run(fake, workload, vocabulary, backend, salt=1)
    assert [record.error for record in outcome.records] == [None] * 3 and outcome.num_unfinished == 0
    context, *texts = [made_up(key, n).text_in(vocabulary, 1) for key, n in ((9, 4), (0, 3), (1, 3), (2, 3))]
    bodies = [body for _, body in fake.requests]
    if BACKENDS[backend].is_chat:
        assert bodies[2]["messages"] == [
            {"role": "user", "content": context + texts[0]},
            {"role": "assistant", "content": "Där is é"},
            {"role": "user", "content": texts[1]},
            {"role": "assistant", "content": "Där is é"},
            {"role": "user", "content": texts[2]},
        ]
    else:
        name = "text" if backend == "sglang" else "prompt"
        assert [body[name] for body in bodies] == [
            context + texts[0],
            context + texts[0] + "Där is é" + texts[1],
            context + texts[0] + "Där is é" + texts[1] + "Där is é" + texts[2],
        ]


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_ids_go_on_with_the_ids_of_the_answer(backend: str, vocabulary: Vocabulary) -> None:
    workload = Workload((Session((Turn(made_up(0, 3), 6), Turn(made_up(1, 2), 6))),))
    fake = FakeServer(lambda *_: stream_of(answers(backend, True)))
    run(fake, workload, vocabulary, backend, sends_ids=True)
    answer = list(range(6)) if backend == "sglang" else vocabulary.encode("Där is é")
    sent = fake.requests[1][1]["input_ids" if backend == "sglang" else "prompt"]
    assert sent == [*made_up(0, 3).ids_in(vocabulary, 0), *answer, *made_up(1, 2).ids_in(vocabulary, 0)]


def test_a_failed_turn_ends_its_session_and_no_other(vocabulary: Vocabulary) -> None:
    good = stream_of(answers("sglang", True))
    numbers = count()
    fake = FakeServer(lambda *_: reply_of({}, "500 Oops") if next(numbers) == 0 else good)
    session = Session(tuple(Turn(made_up(key, 2), 6) for key in range(3)))
    outcome = run(fake, Workload((session, session)), vocabulary, "sglang", max_concurrency=1)
    assert sorted(record.error or "" for record in outcome.records) == ["", "", "", "HTTP 500"]
    assert outcome.num_not_sent == 2 and outcome.num_unfinished == 0


def test_no_more_are_under_way_than_allowed(vocabulary: Vocabulary) -> None:
    turn = Turn(made_up(0, 2), 6)
    most: list[int] = []
    for limit in (3, None):
        fake = FakeServer(lambda *_: stream_of(answers("sglang", True)), cut=5)
        outcome = run(fake, Workload((Session((turn,)),) * 12), vocabulary, "sglang", max_concurrency=limit)
        assert len(outcome.records) == 12
        most.append(fake.most_open)
    assert most[0] == 3 < most[1]


def test_an_interrupt_keeps_what_was_measured(vocabulary: Vocabulary) -> None:
    workload = Workload((Session((Turn(made_up(0, 2), 6),) * 5),) * 4)

    async def go() -> Outcome:
        stop = asyncio.Event()
        ended: list[RequestRecord] = []

        def on_end(record: RequestRecord) -> None:
            ended.append(record)
            if len(ended) == 6:
                stop.set()

        async with FakeServer(lambda *_: stream_of(answers("sglang", True))).running() as server:
            runner = Runner(target(server), vocabulary, on_end=on_end)
            return await runner.run(workload, [0.0, 0.0, 0.0, 3600.0], stop)

    outcome = asyncio.run(go())
    assert 6 <= len(outcome.records) < 15 and all(record.error is None for record in outcome.records)
    assert outcome.num_unfinished == 20 - len(outcome.records)


def test_a_run_ends_after_its_longest_duration(vocabulary: Vocabulary) -> None:
    async def go() -> Outcome:
        async with FakeServer(lambda *_: stream_of(answers("sglang", True))).running() as server:
            runner = Runner(target(server), vocabulary, max_duration_s=0.01)
            workload = Workload((Session((Turn(made_up(1, 4), 6),)),))
            return await runner.run(workload, [3600.0])

    outcome = asyncio.run(go())
    assert (outcome.records, outcome.num_unfinished) == ([], 1)


def test_nothing_that_answers_is_one_sentence(vocabulary: Vocabulary) -> None:
    async def go() -> None:
        async with FakeServer(lambda *_: b"").running() as server:
            pass
        with pytest.raises(HttpError, match="nothing answers at http://127"):
            await send_json(server, "GET", "/")
        told: list[str] = []
        with pytest.raises(ServerError, match=r"is not ready: nothing answers.*--base-url"):
            await wait_ready(server, 0.0, told.append)
        assert told == []

    asyncio.run(go())


FACTS = {
    "/v1/models": {"data": [{"id": "m", "root": "/dir", "max_model_len": 900}]},
    "/get_model_info": {"model_path": "/model", "tokenizer_path": "/tokenizer", "max_context_length": 800},
    "/get_server_info": {"max_req_input_len": 500},
}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (list(FACTS), ("m", "/tokenizer", 501)),
        (["/v1/models"], ("m", "/dir", 900)),
        (["/get_model_info"], (None, "/tokenizer", 800)),
        ([], (None, None, None)),
    ],
)
def test_a_server_is_asked_what_it_knows(paths: list[str], expected: tuple[Any, ...]) -> None:
    async def go() -> tuple[Any, ...]:
        fake = FakeServer(lambda path, _: reply_of(FACTS[path]) if path in paths else reply_of({}, "404 None"))
        async with fake.running() as server:
            await wait_ready(server, 0.0, print)
            facts = await ask_facts(server)
            assert all("Authorization: Bearer k" in head for head in fake.headers)
            return facts.model, facts.tokenizer, facts.max_total_len

    assert asyncio.run(go()) == expected


def test_a_busy_server_is_asked_again_to_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.serving_benchmark.server_facts._POLL_S", 0.0)
    replies = [reply_of({}, "400 Busy"), reply_of(b"Cache flushed.")]

    async def go() -> None:
        fake = FakeServer(lambda *_: replies[len(fake.requests) - 1])
        async with fake.running() as server:
            await flush_cache(server, "/flush_cache")
            assert [path for path, _ in fake.requests] == ["/flush_cache"] * 2
        async with FakeServer(lambda *_: reply_of({}, "404 None")).running() as server:
            with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE"):
                await flush_cache(server, "/reset_prefix_cache")

    asyncio.run(go())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a:1/v1/", "http://a:1"),
        ("https://a/x", "https://a:443/x"),
        ("http://[::1]:3", "http://[::1]:3"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert Server.from_url(url, {}).url == shown


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="'a:1' is no address"):
        Server.from_url("a:1", {})


def test_who_never_answers_is_not_waited_for_without_end(vocabulary: Vocabulary) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def ask() -> str | None:
        async with await asyncio.start_server(mute, "127.0.0.1", 0) as listening:
            server = Server("127.0.0.1", listening.sockets[0].getsockname()[1])
            with pytest.raises(ServerError, match="did not answer within 1 s"):
                await wait_ready(server, 0.0, lambda _: None)
            record = await Runner(target(server, timeout_s=0.1), vocabulary).ask_once(made_up(0, 5), 4)
            return record.error

    assert asyncio.run(ask()) == "no whole answer within 0.1 s (--request-timeout-sec)"


@pytest.mark.parametrize("models", [{"data": ["a"]}, {"data": {}}, {"data": []}, {}], ids=str)
def test_an_odd_list_of_models_names_none(models: dict[str, Any]) -> None:
    async def ask() -> str | None:
        async with FakeServer(lambda *_: reply_of(models)).running() as server:
            return (await ask_facts(server)).model

    assert asyncio.run(ask()) is None
