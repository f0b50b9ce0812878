"""The whole server around a fake scheduler: what clients see, and how it starts and ends.

The fake scheduler answers a prompt with the prompt's own tokens, over and over.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import socket
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from sglang.srt.entrypoints.openai.protocol import CompletionRequest, UsageOfChoices
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until


@pytest.fixture
def server(echo_server):
    return echo_server


@pytest.fixture(scope="module")
def slow():
    """50 tokens per second."""
    with Server(fake=["--delay-s", "0.02"]) as server:
        yield server


@pytest.fixture
def client(server):
    http_client = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http_client)


# Answers


TEXT = "Grüße 你好 🎉 to all"


def tokens_of(server, text):
    return server.post("/v1/completions", {"prompt": text}).json()["usage"]["prompt_tokens"]


def test_completion(client, server):
    n = tokens_of(server, TEXT)
    reply = client.completions.create(model="echo", prompt=TEXT, max_tokens=n, extra_body={"ignore_eos": True})
    # The echo begins with the prompt's begin-of-text, which is no text.
    assert reply.choices[0].text == TEXT
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens == n and reply.usage.completion_tokens == n
    assert reply.usage.prompt_tokens_details.cached_tokens == n // 2 + n // 4


def test_streamed_completion_is_the_same_text(slow):
    client = openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0)
    n = tokens_of(slow, TEXT)
    stream = client.completions.create(
        model="default", prompt=TEXT, max_tokens=n, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert len(chunks) > 3, "more than the last piece, the end and the usage"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == n
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_router_names_the_model_unknown_where_its_client_named_none(client):
    assert client.completions.create(model="unknown", prompt="one", max_tokens=1).usage.completion_tokens == 1


def test_several_prompts(client):
    reply = client.completions.create(model="echo", prompt=["one two", "three four"], max_tokens=4)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].text.startswith("one") and reply.choices[1].text.startswith("three")
    assert reply.usage.completion_tokens == 8
    stream = client.completions.create(model="echo", prompt=["one two", "three four"], max_tokens=4, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def test_token_ids_as_prompts(server):
    one = server.post("/v1/completions", {"prompt": [100, 101, 102], "max_tokens": 3}).json()
    two = server.post("/v1/completions", {"prompt": [[100, 101, 102], [100]], "max_tokens": 3}).json()
    assert one["choices"][0]["text"] == two["choices"][0]["text"]
    assert one["usage"]["prompt_tokens"] == 3 and two["usage"]["prompt_tokens"] == 4


def test_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    reply = client.chat.completions.create(model="echo", messages=messages, max_tokens=60)
    assert "Be brief." in reply.choices[0].message.content and TEXT in reply.choices[0].message.content
    stream = client.chat.completions.create(
        model="echo", messages=messages, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage == reply.usage


def test_content_in_parts_is_the_same_prompt_in_all_apis(server):
    """The template takes parts, and puts nothing between them."""

    def texts(kind):
        return [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]

    def ask(path, body, limit):
        return server.post(path, {**body, limit: 30}).json()

    def chat(content):
        body = {"messages": [{"role": "user", "content": content}]}
        return ask("/v1/chat/completions", body, "max_completion_tokens")["choices"][0]["message"]["content"]

    assert chat("ab") == chat(texts("text")) != chat("a b")
    body = {"input": [{"role": "user", "content": texts("input_text")}]}
    response = ask("/v1/responses", body, "max_output_tokens")
    assert response["output"][0]["content"][0]["text"] == chat("ab")
    body = {"messages": [{"role": "user", "content": texts("text")}]}
    assert ask("/v1/messages", body, "max_tokens")["content"][0]["text"] == chat("ab")


def test_tiers_of_cached_tokens(server):
    body = {"prompt": list(range(100, 120)), "max_tokens": 2, "return_cached_tokens_details": True}
    details = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 15, "cached_tokens_details": {"device": 10, "host": 5}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_sglext(server, path):
    """SGLang's field, which its own benchmark reads: once per reply, before the usage of a stream."""
    prompt = (
        {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": [[100] * 20, [101] * 8]}
    )
    body = {**prompt, "max_tokens": 4, "n": 2, "return_cached_tokens_details": True}
    reply = server.post(path, body).json()
    details = reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    assert reply["sglext"] == {"cached_tokens_details": details} and details["device"] > 0
    for options in ({"include_usage": True}, {"include_usage": False}, {"continuous_usage_stats": True}):
        events = server.events(path, body | {"stream_options": options})
        (at,) = [at for at, event in enumerate(events) if "sglext" in event]
        assert events[at]["sglext"] == reply["sglext"]
        assert at == len(events) - 1 - options.get("include_usage", False)
        # As SGLang's are in chats. Its benchmark looks for a choice in each event of completions.
        assert (events[at]["choices"] == []) == ("chat" in path)
    for none in ({**body, "return_cached_tokens_details": False}, {**prompt, "max_tokens": 1}):
        assert "sglext" not in server.post(path, none).json()
        assert not any("sglext" in event for event in server.events(path, none))


def test_sglext_always_has_upstreams_tiers():
    usage = UsageOfChoices(CompletionRequest(prompt="a", return_cached_tokens_details=True))
    chunk: Any = SimpleNamespace(cached_tokens_details={"device": 3})
    usage.add(0, chunk)
    assert usage.extension() == {"sglext": {"cached_tokens_details": {"device": 3, "host": 0}}}
    chunk = SimpleNamespace(cached_tokens_details={"device": 1, "host": 2, "disk": 3, "remote": 4})
    usage.add(0, chunk)
    found = {"device": 1, "host": 2, "disk": 3, "remote": 4, "storage": 7}
    assert usage.extension() == {"sglext": {"cached_tokens_details": found}}


def test_stop_strings(client, server):
    prompt = "alpha beta gamma delta"
    n = tokens_of(server, prompt)
    for stop in ("gamma", ["zzz", "ta ga"]):
        whole = client.completions.create(model="echo", prompt=prompt, max_tokens=n, stop=stop)
        pieces = list(client.completions.create(model="echo", prompt=prompt, max_tokens=n, stop=stop, stream=True))
        expected = prompt[: prompt.index(stop if isinstance(stop, str) else stop[1])]
        assert whole.choices[0].text == "".join(piece.choices[0].text for piece in pieces) == expected
        assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens < n
    assert server.post("/v1/completions", {"prompt": prompt, "stop": "gamma", "max_tokens": n}).json()["choices"][0][
        "matched_stop"
    ] == ("gamma")
    kept = server.post("/v1/completions", {"prompt": prompt, "stop": "gamma", "no_stop_trim": True, "max_tokens": n})
    assert kept.json()["choices"][0]["text"].endswith("gamma")


def test_a_stop_string_frees_the_request(slow):
    aborted = slow.state()["counters"]["aborted"]
    slow.post("/v1/completions", {"prompt": "alpha beta gamma delta", "stop": "beta", "max_tokens": 2000})
    wait_until(lambda: slow.state()["queues"]["running"] == 0)
    assert slow.state()["counters"]["aborted"] == aborted + 1


def test_stop_token_ids_and_eos(server):
    body = {"prompt": [100, 101, 102], "max_tokens": 9, "stop_token_ids": [102]}
    reply = server.post("/v1/completions", body).json()
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["choices"][0]["matched_stop"] == 102
    assert reply["usage"]["completion_tokens"] == 3
    beyond = {**body, "stop_token_ids": [9999, 1 << 90, 102], "min_tokens": 3}
    assert server.post("/v1/completions", beyond).json()["choices"] == reply["choices"], "others never come"
    reply = server.post("/v1/completions", {"prompt": [100, 1, 102], "max_tokens": 9}).json()
    assert reply["usage"]["completion_tokens"] == 2
    reply = server.post("/v1/completions", {"prompt": [100, 1, 102], "max_tokens": 9, "ignore_eos": True}).json()
    assert reply["usage"]["completion_tokens"] == 9


def test_generate(server):
    params = {"max_new_tokens": 5, "temperature": 0}
    one = server.post("/generate", {"input_ids": [100, 101, 102], "sampling_params": params, "rid": "mine"}).json()
    assert one["output_ids"] == [100, 101, 102, 100, 101]
    meta = one["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 5, 1)
    assert meta["cached_tokens_details"] == {"device": 1, "host": 0} and meta["e2e_latency"] > 0
    batch = server.post("/generate", {"text": ["one two", "three"], "sampling_params": params}).json()
    assert [reply["meta_info"]["completion_tokens"] for reply in batch] == [5, 5]


def test_streamed_generate_is_cumulative(slow):
    params = {"max_new_tokens": 5}
    events = slow.events("/generate", {"input_ids": [100, 101, 102], "sampling_params": params})
    assert [event["output_ids"] for event in events][-1] == [100, 101, 102, 100, 101]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(events))
    assert events[0]["meta_info"]["finish_reason"] is None
    events = slow.events("/generate", {"input_ids": [[100], [101]], "sampling_params": params})
    assert {event["index"] for event in events} == {0, 1}


def test_many_clients_at_once(server):
    def ask(i):
        text = f"client number {i} says {i * i}"
        return text, server.post("/v1/completions", {"prompt": text, "max_tokens": 60}).json()["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for text, answer in pool.map(ask, range(40)):
            assert answer.startswith(text)


def test_seeds(server):
    for seed in (7, 7, -1):
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "seed": seed})
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    *_, first, second, third, drawn = server.state()["seeds"]
    assert (first, second, third) == (7, 7, -1)
    assert isinstance(drawn, int)


# Refusals


@pytest.mark.parametrize(
    "path, body, status, words",
    [
        ("/v1/completions", {"prompt": [100] * 5000}, 400, ["5000", "4001"]),
        ("/v1/completions", {"prompt": [100] * 3000, "max_tokens": 2000}, 400, ["3000", "2000", "4001", "1001"]),
        ("/v1/completions", {"prompt": []}, 400, ["prompt"]),
        ("/v1/completions", {"prompt": [2048]}, 400, ["2048", "vocabulary"]),
        ("/v1/completions", {"prompt": [-1]}, 400, ["-1"]),
        ("/v1/completions", {"prompt": [1 << 80]}, 400, ["whole numbers"]),
        ("/v1/completions", {}, 400, ["prompt"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, ["max_tokens"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0},
            400,
            ["max_tokens is 0", "at least 1"],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
            400,
            ["max_completion_tokens is 0", "at least 1"],
        ),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5, -2]}, 400, ["stop_token_ids holds -2"]),
        ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, ["gpt-4", "echo"]),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, ["suffix"]),
        ("/v1/completions", {"prompt": "a", "n": 1000}, 400, ["n is 1000", "128"]),
        ("/v1/completions", {"prompt": ["a"] * 1000, "n": 100}, 400, ["100000 answers", "2048", "split it"]),
        ("/generate", {"input_ids": [[5]] * 1000, "sampling_params": {"n": 100}}, 400, ["answers", "2048"]),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, 400, ["best_of"]),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, 400, ["logprobs"]),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"2048": 1}}, 400, ["logit_bias", "2048"]),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"-1": 1}}, 400, ["logit_bias", "-1"]),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(1 << 90): 1}}, 400, ["logit_bias"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": None, "min_tokens": 9000}, 400, ["9000", "3999"]),
        ("/v1/chat/completions", {"messages": []}, 400, ["messages"]),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, 400, ["role"]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, ["content"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            ["image_url", "only text"],
        ),
        ("/generate", {}, 400, ["text or input_ids"]),
        ("/generate", {"text": "a", "sampling_params": {"max_tokens": 3}}, 400, ["max_tokens"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}},
            400,
            ["chat_template"],
        ),
        ("/generate", {"text": "a", "return_hidden_states": True}, 400, ["return_hidden_states"]),
        ("/generate", {"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}, 400, ["logprob_start_len"]),
        (
            "/generate",
            {"input_ids": [5], "return_logprob": True, "logprob_start_len": -2},
            400,
            ["logprob_start_len"],
        ),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 9999}, 400, ["top_logprobs_num"]),
        ("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [2048]}, 400, ["2048"]),
        ("/generate", {"text": ["a", "b"], "return_logprob": [True]}, 400, ["return_logprob"]),
        ("/tokenize", {}, 400, ["prompt"]),
        ("/tokenize", {"prompt": 5}, 400, ["prompt"]),
        ("/detokenize", {"tokens": [2048]}, 400, ["2048"]),
        ("/detokenize", {"tokens": ["a"]}, 400, ["tokens"]),
        ("/detokenize", {"tokens": [[1], 2]}, 400, ["tokens"]),
        ("/abort_request", {}, 400, ["rid"]),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, 400, ["sampling_params"]),
        ("/nowhere", {}, 404, ["Not Found"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_openais_shape(server, path, body, status, words, stream):
    response = server.post(path, {**body, "stream": stream})
    assert response.status_code == status
    error = response.json()
    assert error["object"] == "error" and error["code"] == status and error["type"] and "param" in error
    assert all(word in error["message"] for word in words), error["message"]


def test_malformed_json(server):
    for content in (b"{", b"[" * 100_000, b"\xff", b'{"prompt": "a", "temperature": NaN}'):
        response = server.post("/v1/completions", content=content)
        assert response.status_code == 400 and response.json()["object"] == "error"


def test_the_openai_client_raises_its_own_error(client):
    with pytest.raises(openai.BadRequestError, match="n is 0"):
        client.completions.create(model="echo", prompt="a", n=0)


# Information


def test_models_and_info(server, client):
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    assert server.get("/v1/models/other").status_code == 404
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
    assert server.get("/health").status_code == 200
    assert server.get("/model_info").json() == server.get("/get_model_info").json()
    model = server.get("/model_info").json()
    assert model["model_path"] == model["tokenizer_path"] == "embedded" and model["served_model_name"] == "echo"
    assert model["model_type"] == "llama" and model["architectures"] == ["LlamaForCausalLM"]
    info = server.get("/get_server_info").json()
    assert info["max_total_num_tokens"] == 4096 and info["page_size"] == 16
    assert info["served_model_name"] == "echo" and info["tokenizer_path"] == "embedded" and info["version"]
    state = info["internal_states"][0]
    assert state["tiers"]["device"]["total_tokens"] == state["memory_usage"]["token_capacity"] == 4096
    assert state["effective_max_running_requests_per_dp"] == 256


def test_metrics(server):
    server.post("/v1/completions", {"prompt": [100] * 8, "max_tokens": 3})
    text = server.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = {name.split("{")[0] for name in values}
    assert {
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:num_requests_total",
        "sglang:cached_tokens_total",
        "sglang:time_to_first_token_seconds_count",
        "sglang:inter_token_latency_seconds_bucket",
        "sglang:e2e_request_latency_seconds_sum",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:cache_hit_rate",
        "sglang:load_back_tokens_total",
        "sglang:prompt_tokens_histogram_bucket",
        "sglang:uncached_prompt_tokens_histogram_sum",
        "sglang:generation_tokens_histogram_count",
        "sglang:page_size",
        "sglang:full_token_usage",
        "sglang:realtime_tokens_total",
    } <= names
    assert float(values['sglang:token_usage{model_name="echo"}']) == 0.25
    assert float(values['sglang:hicache_host_total_tokens{model_name="echo"}']) == 8192
    assert float(values['sglang:hicache_host_used_tokens{model_name="echo"}']) == 92
    assert float(values['sglang:load_back_tokens_total{model_name="echo"}']) == 7
    assert float(values['sglang:evicted_tokens_total{model_name="echo"}']) == 0
    assert "sglang:gen_throughput" not in names, "the fake state has no such key"
    assert 'cache_source="host"' in text


def test_the_turns_of_a_conversation_are_tokenised_once(server):
    def reused() -> float:
        (line,) = [x for x in server.get("/metrics").text.splitlines() if x.startswith("sglang:tokenizer_reused")]
        return float(line.rsplit(" ", 1)[1])

    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{turn} {TEXT} " * 20})
        before = reused()
        for salt in ("a", "b"):
            body = {"messages": messages, "max_tokens": 1, "cache_salt": salt}
            assert server.post("/v1/chat/completions", body).status_code == 200
        assert (reused() > before) == (turn > 0)
    before = reused()
    assert server.post("/v1/chat/completions", {**body, "cache_salt": "c"}).status_code == 200
    assert reused() == before, "another tenant's"


def test_flush_cache(server, slow):
    assert server.post("/flush_cache").status_code == 200
    with httpx.stream(
        "POST", slow.url + "/generate", json=long_request(), timeout=PATIENCE_S, verify=NO_TLS
    ) as response:
        await_first(response)
        assert slow.post("/flush_cache").status_code == 400
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(slow.url + "/flush_cache?timeout=1000", timeout=0.2, verify=NO_TLS)
    # The request ends, as its client is gone.
    assert slow.post("/flush_cache?timeout=1000").status_code == 200


# Clients that leave


def long_request(stream=True):
    return {"text": "so long", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}, "stream": stream}


def await_first(response):
    """Reads one piece; the iterator stays alive with the response, as dropping it would hang up."""
    response.pieces = response.iter_raw()
    next(response.pieces)


def test_a_client_that_leaves_in_mid_stream_frees_its_request(slow):
    # Another test's client may have left just now.
    wait_until(lambda: slow.state()["queues"]["running"] == 0)
    before = slow.state()["counters"]["aborted"]
    with httpx.stream(
        "POST", slow.url + "/generate", json=long_request(), timeout=PATIENCE_S, verify=NO_TLS
    ) as response:
        await_first(response)
        assert slow.state()["queues"]["running"] == 1
    wait_until(lambda: slow.state()["queues"]["running"] == 0)
    assert slow.state()["counters"]["aborted"] == before + 1


def test_a_client_that_does_not_wait_frees_its_request(slow):
    before = slow.state()["counters"]["aborted"]
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        body = json.dumps(long_request(stream=False)).encode()
        sock.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: slow.state()["queues"]["running"] == 1)
    wait_until(lambda: slow.state()["queues"]["running"] == 0)
    assert slow.state()["counters"]["aborted"] == before + 1


@pytest.mark.parametrize("body", [{"rid": "mine"}, {"abort_all": True}])
def test_abort(slow, body):
    ask = {"messages": [{"role": "user", "content": "a"}], "rid": "mine", "n": 2, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.post, "/v1/chat/completions", ask)  # as long as the context: 80 s
        wait_until(lambda: slow.state()["queues"]["running"] == 2)
        slow.post("/abort_request", {"rid": "min"})
        assert slow.state()["queues"]["running"] == 2
        steps = slow.state()["counters"]["steps"]
        wait_until(lambda: slow.state()["counters"]["steps"] > steps + 12)  # some text is out, behind the role
        assert slow.post("/abort_request", body).status_code == 200
        reply = waiting.result().json()
    assert reply["id"] == "mine" and [choice["finish_reason"] for choice in reply["choices"]] == ["abort"] * 2
    assert reply["choices"][0]["message"]["content"]
    assert slow.state()["queues"]["running"] == 0


def test_leaving_one_stream_disturbs_no_other(slow):
    results = []

    def other():
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
        results.append(slow.post("/generate", body).json())

    thread = threading.Thread(target=other)
    thread.start()
    with httpx.stream(
        "POST", slow.url + "/generate", json=long_request(), timeout=PATIENCE_S, verify=NO_TLS
    ) as response:
        await_first(response)
    thread.join()
    assert results[0]["meta_info"]["completion_tokens"] == 40
