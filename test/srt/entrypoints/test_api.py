"""What the API's fields do to a reply, around the fake scheduler: its tokens and their log-probabilities are known.

Token t has log-probability -t / 1000, and the likeliest tokens are t, t + 1 and so on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import random
import re
from typing import Any

import httpx
import openai
import pytest
from tokenizers import decoders
from transformers import AutoTokenizer

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.entrypoints.openai.logprobs import LogprobStream
from sglang.srt.sampling.logprob_types import TokenLogprob
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.token_texts import TokenTexts
from support.one_word import OneWord
from support.server_fixture import NO_TLS, PATIENCE_S, wait_until
from support.tokenizers_by_hand import byte_level_bpe, llama_bpe, metaspace_bpe

TEXT = "Grüße 你好 🎉 to all"


@pytest.fixture
def server(echo_server):
    return echo_server


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(ensure_embedded_model()))


@pytest.fixture
def client(server):
    http_client = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http_client)


# Several answers


def test_several_answers_to_several_prompts(client):
    ask = {"model": "echo", "prompt": [[100, 101], [200, 201, 202]], "max_tokens": 4, "n": 2}
    reply = client.completions.create(**ask)
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert reply.usage.prompt_tokens == 5, "once for each prompt"
    assert reply.usage.completion_tokens == 16 and reply.usage.total_tokens == 21
    assert reply.usage.prompt_tokens_details.cached_tokens == 1 + 1
    streamed = [""] * 4
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts and chunks[-1].usage == reply.usage and chunks[-1].choices == []


def test_several_answers_in_a_chat(client, server):
    ask = {"model": "echo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 30, "n": 3, "seed": 5}
    reply = client.chat.completions.create(**ask)
    assert server.state()["seeds"][-3:] == [5, 6, 7]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    for index in range(3):
        mine = [choice for choice in chunks if choice.index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "length"
        assert all(choice.finish_reason is None for choice in mine[:-1])
        assert "".join(choice.delta.content or "" for choice in mine) == reply.choices[index].message.content


def test_several_answers_of_generate(server):
    params = [{"n": 2, "max_new_tokens": 2}, {"max_new_tokens": 1}]
    body = {"input_ids": [[100, 101], [200]], "sampling_params": params}
    replies = server.post("/generate", {**body, "rid": ["x", "y"]}).json()
    assert [reply["output_ids"] for reply in replies] == [[100, 101], [100, 101], [200]]
    assert [reply["meta_info"]["id"] for reply in replies] == ["x", "x", "y"]
    events = server.events("/generate", body)
    assert {event["index"] for event in events} == {0, 1, 2}
    single = server.post("/generate", {"input_ids": [100], "sampling_params": {"n": 2, "max_new_tokens": 1}}).json()
    assert len(single) == 2


SESSION_BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": [100], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/generate": {"input_ids": [100], "sampling_params": {"max_new_tokens": 1}},
}
# Where a reply has its text.
TEXT_FIELDS = {"/generate": "text", "/v1/messages": "content", "/v1/responses": "output"}


@pytest.mark.parametrize("path", SESSION_BODIES)
def test_a_session_is_named_by_body_or_header(server, path):
    """The body wins, an empty name is none, and the reply is the same."""
    header = {"x-session-id": "of the header"}
    asked = [({}, {}), ({}, header), ({"session_id": "of the body"}, {}), ({"session_id": "of the body"}, header)]
    asked += [({"session_id": ""}, {}), ({"session_id": None}, header)]
    texts = set()
    for fields, headers in asked:
        reply = server.post(path, SESSION_BODIES[path] | fields, headers=headers)
        assert reply.status_code == 200 and "warning" not in reply.headers
        text = json.dumps(reply.json()[TEXT_FIELDS.get(path, "choices")])
        texts.add(re.sub(r"_[0-9a-f]{32}_", "", text))  # names of items are new each time
    found = server.state()["session_ids"][-len(asked) :]
    assert found == ["", "of the header", "of the body", "of the body", "", "of the header"]
    assert len(texts) == 1


@pytest.mark.parametrize("path", SESSION_BODIES)
def test_the_name_of_a_session_is_bounded(server, path):
    long = "x" * 1025
    for fields, headers in (({"session_id": long}, {}), ({}, {"x-session-id": long}), ({"session_id": 5}, {})):
        reply = server.post(path, SESSION_BODIES[path] | fields, headers=headers)
        assert reply.status_code == 400
        assert "session_id" in reply.text


def test_usage_in_every_chunk(client):
    chunks = list(
        client.completions.create(
            model="echo",
            prompt=[100, 101],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3 and all(chunk.usage.prompt_tokens == 2 for chunk in chunks)


def test_the_asynchronous_client(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": TEXT}], max_tokens=20, stream=True, logprobs=True
            )
            chunks = [chunk async for chunk in stream]
            reply = await client.completions.create(model="echo", prompt=[100], max_tokens=2, logprobs=1, user="me")
            return chunks, reply

    chunks, reply = asyncio.run(main())
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices[0].logprobs) == 20
    assert reply.choices[0].logprobs.token_logprobs == [-0.1, -0.1]


# Log-probabilities


def test_chat_logprobs(client, tokenizer):
    reply = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "a"}], max_tokens=6, logprobs=True, top_logprobs=2
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    ids = list(ids["input_ids"] if hasattr(ids, "keys") else ids)[:6]
    for entry, token in zip(reply.choices[0].logprobs.content, ids, strict=True):
        assert entry.token == tokenizer.decode(token) and entry.logprob == -token / 1000
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert [top.logprob for top in entry.top_logprobs] == [-token / 1000, -(token + 1) / 1000]


def test_characters_do_not_break_with_logprobs(client, tokenizer):
    """A token that is part of a character has its bytes, and its entry comes with the whole character."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [token for token in ids if "\ufffd" in tokenizer.decode(token)]
    assert len(parts) > 4
    ask = {"model": "echo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 60, "logprobs": True}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    text, data = "", b""
    for choice in chunks:
        piece = choice.delta.content or ""
        assert "\ufffd" not in piece
        text += piece
        for entry in choice.logprobs.content if choice.logprobs else []:
            data += b"" if entry.token in special else bytes(entry.bytes)
        assert choice.finish_reason or data.decode() == text
    assert TEXT in text


@pytest.mark.parametrize("seed", range(8))
def test_log_probabilities_wait_for_their_text(tokenizer, seed):
    """Whatever the pieces: what has gone out never runs ahead of the text, and is its tokens once all is out."""
    rng = random.Random(seed)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT * 3) + [1]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    stream = LogprobStream(texts, skip_special_tokens=True)
    sent, taken, at = "", [], 0
    while at < len(ids):
        size = rng.randint(1, 4)
        entries = [TokenLogprob(token, -1.0) for token in ids[at : at + size]]
        at += size
        known = tokenizer.decode(ids[:at], skip_special_tokens=True).rstrip("\ufffd")
        held = rng.randint(0, 3)  # as if it might become a stop string
        piece = whole[len(sent) : max(len(sent), len(known) - held)] if at < len(ids) else whole[len(sent) :]
        sent += piece
        placed = stream.take(entries, piece, final=at >= len(ids))
        assert piece or at >= len(ids) or not placed
        for start, entry in placed:
            taken.append(entry.token)
            if not texts.is_special(entry.token) and "\ufffd" not in texts.text(entry.token):
                assert sent[start:].startswith(texts.text(entry.token))
    assert taken == ids


@pytest.mark.parametrize("make", [llama_bpe, metaspace_bpe, byte_level_bpe])
@pytest.mark.parametrize("skip", [True, False])
def test_places_in_an_echo_without_its_first_space(make, skip):
    """Of ids: decoders of sentencepiece's kind drop that space."""
    tokenizer = make()
    tokenizer.backend_tokenizer.decoder = (
        decoders.ByteLevel()
        if make is byte_level_bpe
        else decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )
    prompt, answer = tokenizer.encode("the ab", add_special_tokens=False), tokenizer.encode("a the")[1:]
    texts = TokenTexts(tokenizer)
    echoed = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = echoed + "".join(texts.text(token) for token in answer)
    stream = LogprobStream(texts, skip)
    stream.begin_with_prompt([TokenLogprob(token, -1.0) for token in prompt], echoed, None)
    placed = stream.take([TokenLogprob(token, -1.0) for token in answer], whole, final=True)
    assert [entry.token for _, entry in placed] == prompt + answer
    for start, entry in placed:
        assert whole[start:].startswith(texts.text(entry.token).lstrip() if start == 0 else texts.text(entry.token))


def test_completion_logprobs(client):
    ask = {"model": "echo", "prompt": [1000, 1001, 1002], "max_tokens": 4}
    found = client.completions.create(**ask, logprobs=2).choices[0].logprobs
    assert found.token_logprobs == [-1.0, -1.001, -1.002, -1.0]
    assert list(found.top_logprobs[0].values()) == [-1.0, -1.001] and found.tokens[0] in found.top_logprobs[0]
    assert found.text_offset[0] == 0
    none = client.completions.create(**ask, logprobs=0).choices[0].logprobs
    assert none.token_logprobs == found.token_logprobs and none.top_logprobs is None
    assert client.completions.create(**ask).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", [TEXT, "Good<|im_end|> morning", [100, 101, 102], [0, 300, 301, 3, 302]])
def test_echo(client, tokenizer, prompt, skip, stream):
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    answer = tokenizer.decode(ids, skip_special_tokens=skip)
    shown = prompt if isinstance(prompt, str) else answer
    ask = {"model": "echo", "prompt": prompt, "max_tokens": len(ids), "echo": True}
    ask["extra_body"] = {"skip_special_tokens": skip, "ignore_eos": True}
    for logprobs in (None, 1):
        reply = client.completions.create(**ask, logprobs=logprobs, stream=stream)
        choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
        text = "".join(choice.text for choice in choices)
        assert text == shown + answer
        if logprobs is None:
            assert all(choice.logprobs is None for choice in choices)
            continue
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        values = [value for choice in choices for value in choice.logprobs.token_logprobs]
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
        assert tokens == [tokenizer.decode(token) for token in ids + ids]
        assert values == [None] + [-token / 1000 for token in (ids + ids)[1:]]
        special = set(tokenizer.all_special_tokens)
        # The text of each token stands at its place. That of a special token may not be in the text.
        at = 0
        for number, (token, offset) in enumerate(zip(tokens, offsets, strict=True)):
            assert offset == at or "\ufffd" in token
            in_prompt = number < len(ids) and isinstance(prompt, str)
            there = token != "<|begin_of_text|>" if in_prompt else not skip
            if token not in special or there:
                assert "\ufffd" in token or text[offset:].startswith(token)
                at = offset + len(token)


def test_logprobs_end_with_the_stop_string(client, tokenizer):
    prompt = "alpha beta gamma delta"
    n = len(tokenizer.encode(prompt))
    for stream in (False, True):
        reply = client.completions.create(
            model="echo", prompt=prompt, max_tokens=n, stop="gam", logprobs=1, stream=stream
        )
        choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
        assert "".join(choice.text for choice in choices) == "alpha beta "
        joined = "".join(token for choice in choices for token in choice.logprobs.tokens)
        assert joined.removeprefix("<|begin_of_text|>").startswith("alpha beta ga")
        assert "delta" not in joined


def test_logprobs_of_generate(server, tokenizer):
    body = {
        "input_ids": [[100, 101, 102], [200]],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": [True, False],
        "logprob_start_len": [1, -1],
        "top_logprobs_num": 1,
        "token_ids_logprob": [[7], None],
        "return_text_in_logprobs": True,
    }
    one, two = (reply["meta_info"] for reply in server.post("/generate", body).json())
    text = tokenizer.decode
    assert one["input_token_logprobs"] == [[-0.101, 101, text(101)], [-0.102, 102, text(102)]]
    assert one["output_token_logprobs"] == [[-0.1, 100, text(100)], [-0.101, 101, text(101)]]
    assert one["output_top_logprobs"] == [[[-0.1, 100, text(100)]], [[-0.101, 101, text(101)]]]
    assert one["input_token_ids_logprobs"] == [[[-0.007, 7, text(7)]]] * 2
    assert not any("logprobs" in name for name in two)
    streamed = server.events(
        "/generate",
        {
            **body,
            "input_ids": [100, 101, 102],
            **{"return_logprob": True, "logprob_start_len": 1, "token_ids_logprob": [7]},
        },
    )
    for name in one:
        if "logprobs" in name:
            assert streamed[-1]["meta_info"][name] == one[name], "each event holds all of it so far"


# Tokenising, aborts, keys


def test_tokenize_and_detokenize(server, tokenizer):
    for prefix in ("", "/v1"):
        reply = server.post(prefix + "/tokenize", {"prompt": TEXT}).json()
        ids = tokenizer.encode(TEXT)
        assert reply == {"tokens": ids, "count": len(ids), "max_model_len": 32768}
        plain = server.post(prefix + "/tokenize", {"prompt": [TEXT, "a"], "add_special_tokens": False}).json()
        assert plain["tokens"][0] == ids[1:] and plain["count"] == [len(ids) - 1, len(plain["tokens"][1])]
        assert server.post(prefix + "/detokenize", {"tokens": ids}).json() == {"text": TEXT}
        body = {"tokens": [ids, [100]], "skip_special_tokens": False}
        assert server.post(prefix + "/detokenize", body).json()["text"][0] == "<|begin_of_text|>" + TEXT
    assert server.post("/tokenize", {"prompt": "a", "model": "other"}).status_code == 404


def test_a_conversation_is_tokenized_as_a_chat_is(server, tokenizer):
    messages = [{"role": "user", "content": "Good morning"}, {"role": "assistant", "content": "Good"}]

    def ids(**fields: Any) -> list[int]:
        replies = [
            server.post(path, {"messages": messages, **fields}).json() for path in ("/tokenize", "/v1/tokenize")
        ]
        assert replies[0] == replies[1] and replies[0]["count"] == len(replies[0]["tokens"])
        return replies[0]["tokens"]

    def rendered(**fields: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages, return_dict=False, **fields)

    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert ids() == ids(add_special_tokens=True) == rendered(add_generation_prompt=True)
    assert len(ids()) == chat["usage"]["prompt_tokens"]
    assert ids(add_generation_prompt=False) == rendered()
    for fields in ({}, {"add_generation_prompt": False}):  # the second as vLLM has it
        assert ids(continue_final_message=True, **fields) == rendered(continue_final_message=True)
    special = tokenizer.encode("")
    assert ids(add_generation_prompt=False, add_special_tokens=True) == special + rendered()
    closed = server.post("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False}).json()
    assert closed["usage"]["prompt_tokens"] == len(rendered())
    for body in ({}, {"prompt": "a", "messages": messages}):
        error = server.post("/tokenize", body).json()
        assert error["param"] == "prompt" and error["message"] == "give either prompt or messages"


def test_health_generate(server):
    before = server.state()["counters"]["requests"]
    assert server.get("/health_generate").status_code == 200
    assert server.state()["counters"]["requests"] == before + 1


def statuses(key: str | None, **flags: str) -> list[int]:
    """Of the application alone."""
    app = make_app(ServerArgs(model_path="m", **flags), OneWord(), {})
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    ask = [
        ("GET", "/health", None),
        ("GET", "/health_generate", None),
        ("GET", "/v1/models", None),
        ("POST", "/generate", {"input_ids": [100], "sampling_params": {"max_new_tokens": 1}}),
        ("GET", "/metrics", None),
        ("GET", "/nowhere", None),
        ("POST", "/abort_request", {"rid": "x"}),
        ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/flush_cache", None),
    ]

    async def main() -> list[int]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", headers=headers
        ) as client:
            return [(await client.request(method, path, json=body)).status_code for method, path, body in ask]

    return asyncio.run(main())


def test_one_key():
    opened = [200, 200, 200, 200, 200, 404, 200, 200, 200]
    closed = [200, 200, 401, 401, 401, 401, 401, 401, 401]
    assert statuses(None, api_key="secret") == statuses("wrong", api_key="secret") == closed
    assert statuses("secret", api_key="secret") == opened


def test_an_admin_key():
    both = {"api_key": "user", "admin_api_key": "root"}
    assert statuses("user", **both) == [200, 200, 200, 200, 200, 404, 200, 401, 401]
    assert statuses("root", **both)[-1] == 200 and statuses("root", **both)[2] == 401
    assert statuses(None, admin_api_key="root") == [200, 200, 200, 200, 200, 404, 200, 401, 401]
    assert statuses("root", admin_api_key="root") == [200, 200, 200, 200, 200, 404, 200, 200, 200]


def test_keys_are_shown_nowhere(keyed_server):
    server = keyed_server
    assert server.post("/generate", {"text": "a"}).json()["object"] == "error"
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    info = httpx.get(
        server.url + "/get_server_info", headers={"Authorization": "Bearer user"}, timeout=PATIENCE_S, verify=NO_TLS
    ).json()
    assert info["api_key"] is None and info["admin_api_key"] is None
    assert len(server.children) == 2
    for child in server.children:
        assert not {"SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"} & child.environ().keys()
        # No settings either, which may have a store's password.
        assert not any("model_path" in word for word in child.cmdline())


# Bad input


JUNK = [
    *(None, True, False, 0, 1, -1, 5, 1 << 31, 1 << 63, -(1 << 80), 10**300, 0.5, -0.5, 1e308),
    *("", "a", "é🎉", "x" * 3000, [], {}, [1], ["a"], [None], [[1]], [[]], [1 << 70], {"5": 1}, {"a": 1}, {"5": 1e9}),
    *([{}], [{"role": "user"}], {"type": "text"}, {"include_usage": 1}, [{"role": "user", "content": "a"}]),
]
FIELDS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "nobody"},
}
NAMES = """
    model n max_tokens max_completion_tokens min_tokens seed stop stop_token_ids stream stream_options
    temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias logprobs
    top_logprobs echo best_of ignore_eos skip_special_tokens rid extra_key cache_salt user messages prompt
    chat_template_kwargs suffix tools continue_final_message text input_ids sampling_params return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs tokens add_special_tokens
    abort_all response_format
"""
SAMPLING = """
    n max_new_tokens min_new_tokens temperature top_p top_k min_p frequency_penalty presence_penalty stop
    repetition_penalty logit_bias stop_token_ids ignore_eos skip_special_tokens no_stop_trim sampling_seed
"""


def test_junk_gets_an_answer_and_disturbs_nothing(server):
    """1,000 bodies with random fields of random values: never a 5xx, and every error has its shape."""
    rng = random.Random(11)

    def ask(body):
        path, fields = body
        with_stream = fields.get("stream") is True
        reply = http.post(server.url + path, content=json.dumps(fields))
        assert reply.status_code in (200, 400, 404), (path, fields, reply.text)
        if reply.status_code != 200:
            assert reply.json()["object"] == "error" and reply.json()["message"], (path, fields)
        elif with_stream and path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            assert reply.text.endswith("data: [DONE]\n\n") and "internal error" not in reply.text, (path, fields)

    bodies = []
    for _ in range(1000):
        path = rng.choice(list(FIELDS))
        fields = dict(FIELDS[path])
        for name in rng.sample(NAMES.split(), rng.choice([1, 1, 2, 3])):
            fields[name] = rng.choice(JUNK)
        if path == "/generate" and rng.random() < 0.5:
            fields["sampling_params"] = {"max_new_tokens": 2, rng.choice(SAMPLING.split()): rng.choice(JUNK)}
        if fields.get("max_tokens", 2) is None or fields.get("abort_all"):
            continue  # a whole context of answer; everybody's end
        bodies.append((path, fields))
    with httpx.Client(timeout=PATIENCE_S, verify=NO_TLS) as http, concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, bodies))
    wait_until(lambda: server.state()["queues"]["running"] == 0)
    assert server.get("/health_generate").status_code == 200
