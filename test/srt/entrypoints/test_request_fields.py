"""What a request may say: accepted, refused by name, ignored."""

from __future__ import annotations

import pytest

from sglang.srt.entrypoints import request_fields
from sglang.srt.entrypoints.native import GenerateReqInput, native_sampling_params
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.request_fields import convert, decode_body, namespace, sampling_params, split_prompts
from sglang.srt.utils.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields) -> ChatCompletionRequest:
    return convert({"messages": MESSAGES, **fields}, ChatCompletionRequest, request_fields.UNSUPPORTED_CHAT)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"3", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe", b'{"a":' * 50_000, b'{"t": 1e999}'],
)
def test_a_body_that_is_no_json_object(body):
    with pytest.raises(RequestError) as error:
        decode_body(body)
    assert error.value.status_code == 400
    assert error.value.body()["object"] == "error"


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("min_p", 0.1),
        ("min_tokens", 4),
        ("regex", "a+"),
        ("lora_path", "x"),
        ("priority", 1),
    ],
)
def test_what_upstream_has_and_we_do_not_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as error:
        chat(**{field: value})
    assert error.value.param == field


def test_values_that_ask_for_nothing_pass():
    chat(n=1, logprobs=False, frequency_penalty=0.0, tools=[], tool_choice="none", response_format={"type": "text"})
    chat(n=None, logit_bias={}, repetition_penalty=1.0, min_p=0, regex=None)


def test_unknown_fields_are_ignored():
    assert chat(store=True, metadata={"a": 1}, what_is_this=[1]).messages == MESSAGES


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1, 2]}, "stop"),
        ({"stream": 1}, "stream"),
        ({"messages": "hi"}, "messages"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options"),
    ],
)
def test_a_wrong_type_names_the_field(fields, param):
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -5}, "max_new_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"sampling_seed": 1 << 70}, "seed"),
    ],
)
def test_parameters_out_of_range(fields, word):
    with pytest.raises(RequestError, match=word):
        sampling_params(**fields)


def test_parameters_and_their_defaults():
    params = sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, -1, ())
    params = sampling_params(temperature=1e-9, stop="a", stop_token_ids=[1], sampling_seed=-3)
    assert (params.temperature, params.stop, params.stop_token_ids, params.sampling_seed) == (0.0, ("a",), (1,), -3)


def test_native_parameters_are_strict():
    assert native_sampling_params({"max_new_tokens": 5, "n": 1, "min_p": 0.0}).max_new_tokens == 5
    for wrong in ({"max_tokens": 5}, {"n": 2}, {"json_schema": "{}"}, {"top_k": "a"}, {"ignore_eos": None}):
        with pytest.raises(RequestError):
            native_sampling_params(wrong)


@pytest.mark.parametrize(
    "prompt, prompts",
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts(prompt, prompts):
    assert split_prompts(prompt, "prompt") == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], ["a", [1]], [True]])
def test_mixed_or_empty_prompts(prompt):
    with pytest.raises(RequestError):
        split_prompts(prompt, "prompt")


def test_completion_defaults_to_16_tokens():
    req = convert({"prompt": "a"}, CompletionRequest, request_fields.UNSUPPORTED_COMPLETION)
    assert req.max_tokens == 16
    with pytest.raises(RequestError, match="echo"):
        convert({"prompt": "a", "echo": True}, CompletionRequest, request_fields.UNSUPPORTED_COMPLETION)


def test_batches_of_generate():
    assert not GenerateReqInput(text="a").is_batch()
    assert GenerateReqInput(text=["a"]).is_batch()
    assert not GenerateReqInput(input_ids=[1, 2]).is_batch()
    assert GenerateReqInput(input_ids=[[1, 2]]).is_batch()


def test_namespaces_never_meet():
    assert namespace(None, None) == namespace("", "") == ""
    keys = {
        namespace(*pair) for pair in [("a", None), (None, "a"), ("a", "b"), ("ab", None), ("b", "a"), ('a","', "")]
    }
    assert len(keys) == 6
