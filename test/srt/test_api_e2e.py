"""The API over the real engine: what can be compared with transformers is, to the number."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import shutil
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from sglang.srt.configs.embedded_model import ensure_embedded_model
from support.server_fixture import PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e

VOCAB = 2048
LONG = 30_000
PROMPT = [300, 411, 522, 633, 744, 855, 966]


class World:
    """A small model with strong opinions, in transformers and behind a server with a host tier."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            initializer_range=0.3,
            eos_token_id=1,
        )
        self.hf = AutoModelForCausalLM.from_config(config).eval()
        self.hf.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(ensure_embedded_model()) / name, path / name)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        # Random weights would fill an answer with white space, which JSON allows.
        flags = ("--hicache", "--served-model-name", "tiny", "--constrained-json-max-whitespace-cnt", "1")
        self.server = Server(*flags, model=str(path))
        self.client = openai.OpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """(len(tokens), VOCAB): row i says what comes after token i."""
        with torch.inference_mode():
            return self.hf(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def generate(self, ids: list[int] = PROMPT, *, tokens: int = 10, body: dict | None = None, **params) -> dict:
        params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens, **params}
        response = self.server.post("/generate", {"input_ids": ids, "sampling_params": params, **(body or {})})
        assert response.status_code == 200, response.text
        return response.json()

    def counted(self, name: str) -> float:
        (line,) = [x for x in self.server.get("/metrics").text.splitlines() if x.startswith(f"sglang:{name}{{")]
        return float(line.split()[-1])

    def running(self) -> int:
        queues = self.server.state()["queues"]
        return queues["running"] + queues["waiting"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("model"))
    with world.server:
        yield world


def near(value) -> object:
    return pytest.approx(value, abs=2e-4)


@pytest.mark.parametrize("start", [0, 3, len(PROMPT), -1])
def test_logprobs_of_generate_are_transformers(world, start):
    body = {
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 9],
        "return_text_in_logprobs": True,
    }
    for _ in range(2):  # the second time from the cache
        reply = world.generate(body=body)
        meta, whole = reply["meta_info"], PROMPT + reply["output_ids"]
        expected = world.logprobs(whole)
        first = start if start >= 0 else len(PROMPT)
        assert len(meta["input_token_logprobs"]) == len(PROMPT) - first
        for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            assert len(meta["input_" + name]) == len(PROMPT) - first and len(meta["output_" + name]) == 10
            for at, found in enumerate(meta["input_" + name] + meta["output_" + name], first):
                if at == 0:
                    assert found == ([None, PROMPT[0], world.tokenizer.decode(PROMPT[0])] if "en_l" in name else None)
                    continue
                row = expected[at - 1]
                triples = [found] if name == "token_logprobs" else found
                ids = [triple[1] for triple in triples]
                if name == "token_logprobs":
                    assert ids == [whole[at]]
                elif name == "top_logprobs":
                    assert [triple[0] for triple in triples] == near(row.topk(3).values.tolist())
                else:
                    assert ids == [5, 9]
                assert [triple[0] for triple in triples] == near(row[ids].tolist())
                assert [triple[2] for triple in triples] == [world.tokenizer.decode(token) for token in ids]


def test_a_prompt_without_an_answer(world):
    """Its log-probabilities are those before an answer, and it is cached and counted all the same."""
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    before = [world.counted(name) for name in names]
    prompt = list(reversed(PROMPT))
    expected = world.logprobs(prompt)
    for stream in (False, True):
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": stream,
        }
        text = world.server.post("/generate", body).text
        reply = json.loads(text.split("data: ")[-2] if stream else text)
        meta = reply["meta_info"]
        assert (reply["text"], reply["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["output_token_logprobs"] == []
        found = [entry[0] for entry in meta["input_token_logprobs"]]
        assert found[1:] == near([float(expected[i - 1, prompt[i]]) for i in range(1, len(prompt))])
    plain = world.generate(prompt, tokens=0)
    assert plain["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert [world.counted(name) - b for name, b in zip(names, before)] == [3 * len(prompt), 0, 3]
    echoed = world.client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    assert len(echoed.choices[0].logprobs.tokens) == len(prompt) and echoed.usage.completion_tokens == 0
    assert echoed.choices[0].text == world.tokenizer.decode(prompt)
    assert world.running() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_but_the_first_has_a_latency(world, stream):
    before = world.counted("inter_token_latency_seconds_count")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 10, "ignore_eos": True}, "stream": stream}
    assert world.server.post("/generate", body).status_code == 200
    assert world.counted("inter_token_latency_seconds_count") - before == 9


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_tells_why_tokens_were_computed(world, stream):
    prompt = [PROMPT[1], *PROMPT]
    whole = world.generate(prompt)["text"]
    stop, params = whole[4:6], {"temperature": 0, "ignore_eos": True, "max_new_tokens": 200}
    body = {"input_ids": prompt, "sampling_params": {**params, "stop": stop}, "stream": stream}
    text = world.server.post("/generate", {**body, "return_computed_tokens_details": True}).text
    meta = json.loads(text.split("data: ")[-2] if stream else text)["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert sum(meta["computed_tokens_details"].values()) == len(prompt) - meta["cached_tokens"] > 0


def test_echoed_logprobs_are_transformers(world):
    """As evaluation harnesses ask: the log-probability of a text, nothing generated that matters."""
    reply = world.client.completions.create(
        model="tiny", prompt=[PROMPT, PROMPT[:3]], max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    for choice, prompt in zip(reply.choices, [PROMPT, PROMPT[:3]]):
        found = choice.logprobs
        n = len(prompt)
        assert found.tokens[:n] == [world.tokenizer.decode(token) for token in prompt]
        row = world.logprobs(prompt)
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1:n] == near([float(row[i - 1, prompt[i]]) for i in range(1, n)])
        for i in range(1, n):
            assert max(found.top_logprobs[i].values()) == near(float(row[i - 1].max()))
        assert choice.text.startswith(world.tokenizer.decode(prompt))
        for token, offset in zip(found.tokens, found.text_offset):
            assert choice.text[offset:].startswith(token.rstrip("\ufffd"))


def test_chat_logprobs_are_transformers(world):
    messages = [{"role": "user", "content": "Say 你好 🎉"}]
    ask = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "logprobs": True}
    reply = world.client.chat.completions.create(**ask, top_logprobs=2, extra_body={"ignore_eos": True})
    prompt = world.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens == 12
    greedy = list(prompt)
    for entry in content:
        row = world.logprobs(greedy)[-1]
        token = int(row.argmax())
        assert entry.logprob == near(float(row[token]))
        assert [top.logprob for top in entry.top_logprobs] == near(row.topk(2).values.tolist())
        greedy.append(token)
    special = set(world.tokenizer.all_special_tokens)
    data = b"".join(bytes(entry.bytes) for entry in content if entry.token not in special)
    assert data.decode(errors="replace") == reply.choices[0].message.content

    stream = world.client.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == reply.choices[0].message.content
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


@pytest.mark.parametrize("frequency, presence, repetition", [(0.7, 0.0, 1.0), (0.5, -0.4, 1.3), (0.0, 1.5, 0.8)])
def test_penalties_and_biases_are_transformers(world, frequency, presence, repetition):
    said: list[int] = []
    banned = world.generate()["output_ids"][0]
    for _ in range(12):
        with torch.no_grad():
            logits = world.hf(torch.tensor([PROMPT + said])).logits[0, -1]
        for token in set(said):
            value = float(logits[token])
            value = value / repetition if value > 0 else value * repetition
            logits[token] = value - frequency * said.count(token) - presence
        logits[banned] -= 100
        said.append(int(logits.argmax()))
    reply = world.client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias={str(banned): -100},
        logprobs=0,
        extra_body={"repetition_penalty": repetition, "ignore_eos": True},
    )
    assert reply.choices[0].logprobs.tokens == [world.tokenizer.decode(token) for token in said]
    answer = world.generate(
        tokens=12,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias={str(banned): -100},
    )
    assert answer["output_ids"] == said


def test_minimum_lengths(world):
    eager = {"ignore_eos": False, "logit_bias": {"1": 100}}
    assert world.generate(**eager)["output_ids"] == [1]
    ids = world.generate(**eager, min_new_tokens=6)["output_ids"]
    assert len(ids) == 7 and ids[-1] == 1 and 1 not in ids[:-1]


def test_several_answers_are_drawn_from_seeds_in_a_row(world):
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}
    three = world.client.completions.create(**ask, n=3, seed=40)
    texts = [choice.text for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert three.usage.prompt_tokens == len(PROMPT) and three.usage.completion_tokens <= 24
    assert texts == [world.client.completions.create(**ask, seed=40 + i).choices[0].text for i in range(3)]
    streamed = ["", "", ""]
    for chunk in world.client.completions.create(**ask, n=3, seed=40, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    replies = world.generate(tokens=8, temperature=1.0, n=3, sampling_seed=40, ignore_eos=False)
    assert [reply["text"] for reply in replies] == texts


def test_salts_share_no_cache(world):
    prompt = list(range(400, 460))

    def cached(**extra):
        return world.generate(prompt, tokens=1, body=extra)["meta_info"]["cached_tokens"]

    assert cached() == 0 and cached() == len(prompt) - 1
    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") == len(prompt) - 1
    assert cached(cache_salt="a", extra_key="b") == 0


def test_abort_frees_the_request_and_answers_with_its_text(world):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = {"rid": "mine"}
        # Half a minute's tokens: none is done before it is aborted.
        waiting = [pool.submit(world.generate, tokens=LONG, body=body) for _ in range(2)]
        wait_until(lambda: world.running() == 2)
        assert world.server.post("/abort_request", {"rid": "other"}).status_code == 200
        assert world.running() == 2
        assert world.server.post("/abort_request", {"rid": "mine"}).status_code == 200
        for reply in (each.result() for each in waiting):
            assert reply["meta_info"]["finish_reason"]["type"] == "abort" and reply["meta_info"]["id"] == "mine"
            assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < LONG
    assert world.running() == 0


def test_health_generate(world):
    before = world.server.state()["counters"]["requests"]
    assert world.server.get("/health_generate").status_code == 200
    assert world.server.state()["counters"]["requests"] == before + 1


def test_64_mixed_requests_leave_nothing_behind(world):
    client = openai.AsyncOpenAI(base_url=world.server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    ids = world.generate(tokens=20)["output_ids"]

    async def one(i: int) -> None:
        if i % 4 == 0:
            reply = await client.completions.create(
                model="tiny", prompt=[PROMPT, [7, 8]], max_tokens=9, n=2, seed=i, echo=i % 8 == 0, logprobs=i % 3
            )
            assert len(reply.choices) == 4 and all(choice.logprobs.tokens for choice in reply.choices)
        elif i % 4 == 1:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"number {i} 你好"}],
                max_tokens=30,
                stream=True,
                n=2,
                logprobs=i % 8 == 1,
                frequency_penalty=0.3,
                extra_body={"min_p": 0.05, "min_tokens": 5},
            )
            chunks = [chunk async for chunk in stream]
            assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks) == 2
            assert i % 8 != 1 or any(chunk.choices[0].logprobs for chunk in chunks)
        elif i % 4 == 2:
            stream = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=800, stream=True)
            await anext(aiter(stream))
            await stream.close()  # leaves in mid-stream
        else:
            text = world.tokenizer.decode(ids)
            stop = text[len(text) // 2 :][:2]
            reply = await client.completions.create(
                model="tiny",
                prompt=PROMPT,
                max_tokens=20,
                temperature=0,
                stop=[stop],
                extra_body={"ignore_eos": True},
            )
            assert reply.choices[0].text == text[: text.index(stop)]
            assert reply.choices[0].finish_reason == "stop"

    async def main() -> None:
        await asyncio.gather(*(one(i) for i in range(64)))
        await client.close()

    asyncio.run(main())
    wait_until(lambda: world.running() == 0)
    pages = world.server.state()["tiers"]["device"]["pages"]
    assert pages["held"] == 0
    assert world.server.get("/flush_cache").status_code == 200
    wait_until(lambda: world.server.state()["tiers"]["device"]["pages"]["pending_free"] == 0)
    state = world.server.state()
    assert state["tiers"]["device"]["free_pages"] == state["tiers"]["device"]["num_pages"]


# Structured output. The model's weights are random: only the grammar can make these answers.

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
}


def test_a_schema_holds_whole_streamed_and_for_several_answers(world):
    fields = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        "extra_body": {"regex": None},
    }
    reply = world.client.chat.completions.create(**fields, n=3, temperature=1.0, seed=4)
    chunks = list(world.client.chat.completions.create(**fields, temperature=0, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    for text in [streamed, *(choice.message.content for choice in reply.choices)]:
        person = json.loads(text)
        assert sorted(person) == ["age", "name"] and len(person["name"]) <= 5 and 0 <= person["age"] <= 99
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_patterns_rules_and_tags(world):
    assert re.fullmatch(r"[0-9]{3}-[xyz]{2}", world.generate(tokens=50, regex=r"[0-9]{3}-[xyz]{2}")["text"])
    assert world.generate(tokens=50, ebnf='root ::= "yes" | "no"')["text"] in ("yes", "no")
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<a>",
            "content": {"type": "json_schema", "json_schema": PERSON},
            "end": "</a>",
        },
    }
    text = world.generate(tokens=200, structural_tag=tag)["text"]
    assert text.startswith("<a>") and text.endswith("</a>") and "age" in json.loads(text[3:-4])
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<b>", "schema": PERSON, "end": "</b>"}],
        "triggers": ["<b>"],
    }
    assert world.generate(tokens=20, structural_tag=json.dumps(older))["text"]


def test_one_of_several_texts(world):
    choices = ['He said "no".\n', "C:\\new", "é 你好 🎉"]
    for fields in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        body = {"prompt": "a", "max_tokens": 60, "temperature": 3, **fields}
        for seed in range(4):
            reply = world.server.post("/v1/completions", {**body, "seed": seed})
            assert reply.json()["choices"][0]["text"] in choices, reply.text
    messages = [{"role": "user", "content": "a"}]
    asked = {"messages": messages, "max_tokens": 60, "structured_outputs": {"regex": "[0-9]{3}"}}
    text = world.server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    assert re.fullmatch("[0-9]{3}", text)
    refused = world.server.post("/v1/completions", {"prompt": "a", "guided_grammar": "start: NUMBER"})
    assert refused.status_code == 400 and refused.json()["message"].startswith("guided_grammar is not usable")


@pytest.mark.parametrize(
    "field, value",
    [
        ("regex", "(a"),
        ("ebnf", "root ::= nothing"),
        ("json_schema", {"type": "nonsense"}),
        ("json_schema", {"$ref": "https://example.com/a.json"}),
        ("structural_tag", {"type": "structural_tag"}),
        ("structural_tag", {"structures": [{}], "triggers": []}),
        ("structural_tag", []),
    ],
)
def test_grammars_that_are_refused(world, field, value):
    reply = world.server.post("/generate", {"text": "a", "sampling_params": {field: value}})
    assert reply.status_code == 400 and field in reply.json()["message"], reply.text
    assert reply.json()["param"] == field or field == "structural_tag"
    assert world.running() == 0


def test_embeddings_are_transformers_last_hidden_states(world):
    texts = ["The library opens at nine.", "Good morning."]
    reply = world.client.embeddings.create(model="tiny", input=texts)
    for text, each in zip(texts, reply.data):
        ids = torch.tensor([world.tokenizer.encode(text)])
        with torch.inference_mode():
            wanted = world.hf.base_model(ids).last_hidden_state[0, -1]
        assert torch.allclose(torch.tensor(each.embedding), torch.nn.functional.normalize(wanted, dim=-1), atol=1e-4)
    assert reply.usage.prompt_tokens == sum(len(world.tokenizer.encode(text)) for text in texts)
    short = world.client.embeddings.create(model="tiny", input=texts[0], dimensions=8, encoding_format="float")
    front = torch.tensor(reply.data[0].embedding[:8])
    assert torch.allclose(
        torch.tensor(short.data[0].embedding), torch.nn.functional.normalize(front, dim=-1), atol=1e-5
    )
    ids = world.server.post("/v1/embeddings", {"input": world.tokenizer.encode(texts[1])}).json()
    assert ids["data"][0]["embedding"] == pytest.approx(reply.data[1].embedding, abs=1e-5)
    for wrong, param in (
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4000}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [[]]}, None),
        ({}, None),
    ):
        refused = world.server.post("/v1/embeddings", wrong)
        assert refused.status_code == 400 and refused.json()["param"] == param, refused.text
