"""What a request may say: accepted, refused by name, ignored."""

from __future__ import annotations

import json

import pytest

from sglang.rebase.ours import REQUESTS
from sglang.rebase.upstream_names import RECORDED, load_names
from sglang.srt.entrypoints import request_fields
from sglang.srt.entrypoints.native import GenerateReqInput, sampling_fields
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.request_fields import (
    MAX_ANSWERS,
    MAX_COMPARED,
    MAX_WARNINGS,
    SamplingFields,
    check_fields,
    check_prompts,
    convert,
    decode_body,
    namespace,
    sampling_params,
    split_prompts,
)
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.utils.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
ON = {"thinking": True, "enable_thinking": True}
OFF = {"thinking": False, "enable_thinking": False}
NONE = {**OFF, "reasoning_effort": "none"}


def chat(**fields) -> ChatCompletionRequest:
    return convert({"messages": MESSAGES, **fields}, ChatCompletionRequest, request_fields.UNSUPPORTED_CHAT)


def completion(**fields) -> CompletionRequest:
    return convert({"prompt": "a", **fields}, CompletionRequest, request_fields.UNSUPPORTED_COMPLETION)


@pytest.mark.parametrize(
    "fields, variables",
    [
        ({}, {}),
        ({"reasoning_effort": None, "chat_template_kwargs": {"x": 1}}, {"x": 1}),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"x": 1}}, {**ON, "reasoning_effort": "high", "x": 1}),
        ({"reasoning_effort": "none"}, NONE),
        ({"reasoning_effort": "None"}, NONE),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {**NONE, "enable_thinking": True},
        ),
        ({"reasoning_effort": 0.5}, {**ON, "reasoning_effort": 0.5}),
        ({"reasoning_effort": 0}, {**ON, "reasoning_effort": 0.0}),
        ({"reasoning_effort": "0.5"}, {**ON, "reasoning_effort": 0.5}),
        ({"reasoning": {}}, {}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {**ON, "reasoning_effort": "low"}),
        ({"reasoning": {"effort": None, "reasoning_effort": 0.25}}, {**ON, "reasoning_effort": 0.25}),
        ({"reasoning": {"effort": "none", "enabled": True}}, NONE),
        ({"reasoning": {"effort": "low", "enabled": False}}, OFF),
        ({"reasoning": {"enabled": True}}, ON),
        ({"reasoning": {"enable": "yes"}}, ON),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"enabled": "off"}}, OFF),
        ({"reasoning": {"enabled": True}, "chat_template_kwargs": OFF}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, ON),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, OFF),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": ON}, ON),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "none"}, NONE),
        ({"thinking": {}, "reasoning": {"enabled": True}}, ON),
        ({"thinking": True, "reasoning_effort": "high"}, {**ON, "reasoning_effort": "high"}),
        ({"thinking": False}, OFF),
    ],
)
def test_the_effort_is_a_variable_of_the_template_and_the_clients_own_go_first(fields, variables):
    assert chat(**fields).template_variables == variables


@pytest.mark.parametrize(
    "fields",
    [{"thinking": {"type": "bogus"}}, {"thinking": {"type": "ENABLED"}}, {"thinking": {"type": []}}]
    + [{"reasoning": {"enabled": enabled}} for enabled in ([], {}, 0.5)],
)
def test_a_switch_of_reasoning_is_on_or_off(fields):
    with pytest.raises(RequestError) as error:
        _ = chat(**fields).template_variables
    assert error.value.param == next(iter(fields))


@pytest.mark.parametrize("effort", [True, 1, -0.1, 0.995, "nan", "", "x" * 100, [], {}, 10**400])
def test_an_effort_is_a_text_or_a_number_below_one(effort):
    with pytest.raises(RequestError) as error:
        _ = chat(reasoning={"effort": effort}).template_variables
    assert error.value.param == "reasoning" and "a number from 0 to 0.99" in error.value.message
    with pytest.raises(RequestError) as error:
        _ = chat(reasoning_effort=effort).template_variables
    assert error.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"3", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe", b'{"a":' * 50_000, b'{"t": 1e999}'],
)
def test_a_body_that_is_no_json_object(body):
    with pytest.raises(RequestError) as error:
        decode_body(body)
    assert error.value.status_code == 400
    assert error.value.body()["object"] == "error"


@pytest.mark.parametrize("text", [r"\ud83d", r"a \ud83d b", r"\ud83d\u0041", r"\ude00"])
def test_a_body_with_half_of_a_surrogate_pair(text: str) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        decode_body(f'{{"prompt": "{text}"}}'.encode())
    assert decode_body(rb'{"prompt": "\ud83d\ude00"}') == {"prompt": "\U0001f600"}
    with pytest.raises(RequestError, match="truncated"):
        decode_body(rb'{"prompt": "\uD83D\uDE00"')
    with pytest.raises(RequestError, match="json_schema is not valid JSON: it has half of a surrogate pair"):
        sampling_params(sampling_fields({"json_schema": f'{{"const": "{text}"}}'}))


@pytest.mark.parametrize(
    "field, value",
    [
        ("functions", [{"name": "f"}]),
        ("stop_regex", "a+"),
        ("return_hidden_states", True),
        ("lora_path", "x"),
    ],
)
def test_what_upstream_has_and_we_do_not_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as error:
        chat(**{field: value})
    assert error.value.param == field


def test_values_that_ask_for_nothing_pass():
    chat(n=1, logprobs=False, frequency_penalty=0.0, tools=[], tool_choice="none", response_format={"type": "text"})
    chat(n=None, logit_bias={}, repetition_penalty=1, min_p=0, regex=None, stop_regex=[])
    chat(data_parallel_rank=0, routed_dp_rank=0)  # as sglang-router sends it with --dp-aware


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "fields, kind, source",
    [
        (
            {"response_format": {"type": "json_object"}},
            "json_schema",
            {"type": "object", "additionalProperties": True},
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
            "structural_tag",
            {"type": "structural_tag", "structures": [], "triggers": ["<"]},
        ),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
    ],
)
def test_formats_become_grammars(fields, kind, source):
    for params in (chat(**fields).sampling_params(5), completion(**fields).sampling_params(5)):
        assert params.grammar.kind == kind and json.loads(params.grammar.source) == source


@pytest.mark.parametrize(
    "guided, structured, kind, source",
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": "{}"}, {"json": "{}"}, "json_schema", "{}"),
        ({"guided_regex": "a+"}, {"regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        (
            {"guided_choice": ["yes", 'a "b" \\\n', "é", ""]},
            {"choice": ["yes", 'a "b" \\\n', "é", ""]},
            "ebnf",
            'root ::= "yes" | "a \\"b\\" \\\\\\n" | "é" | ""',
        ),
        (
            {"response_format": {"type": "json_object"}},
            {"json_object": True},
            "json_schema",
            '{"type":"object","additionalProperties":true}',
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            {"structural_tag": {"type": "structural_tag"}},
            "structural_tag",
            '{"type":"structural_tag"}',
        ),
    ],
)
def test_the_grammars_of_vllm(guided, structured, kind, source):
    for fields in (guided, {"structured_outputs": {**structured, "disable_fallback": True}}):
        for request in (chat(**fields), completion(**fields)):
            assert request.sampling_params(5).grammar == GrammarSpec(kind, source)
    nothing = {"json": None, "json_object": False, "disable_any_whitespace": False}
    assert chat(structured_outputs=nothing, guided_choice=None).sampling_params(5).grammar is None
    assert completion(include_stop_str_in_output=True).sampling_params(5).no_stop_trim
    assert completion(no_stop_trim=True).sampling_params(5).no_stop_trim
    assert not completion(include_stop_str_in_output=False).sampling_params(5).no_stop_trim


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"guided_json": SCHEMA, "json_schema": SCHEMA}, ["json_schema", "guided_json"]),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, ["response_format", "guided_choice"]),
        ({"structured_outputs": {"json": SCHEMA}, "regex": "a"}, ["regex", "structured_outputs.json"]),
        (
            {"structured_outputs": {"grammar": "a", "choice": ["a"]}},
            ["structured_outputs.grammar", "structured_outputs.choice"],
        ),
    ],
)
def test_one_grammar_is_the_most(fields, names):
    with pytest.raises(RequestError, match=f"^{' and '.join(names)} exclude each other: give one of them$") as error:
        chat(**fields).sampling_params(5)
    assert error.value.param == names[0].partition(".")[0]


def test_patterns_and_rules_become_grammars():
    assert chat(regex="a+").sampling_params(5).grammar == GrammarSpec("regex", "a+")
    assert completion(ebnf='root ::= "a"').sampling_params(5).grammar == GrammarSpec("ebnf", 'root ::= "a"')
    native = sampling_params(sampling_fields({"structural_tag": {"type": "structural_tag"}}))
    assert native.grammar == GrammarSpec("structural_tag", '{"type":"structural_tag"}')
    for free in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "regex": None}):
        assert chat(**free).sampling_params(5).grammar is None


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": ["text"]}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": "{}"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "json_schema": "{}"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_choice": ["a\0"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs"),
        ({"regex": "a", "ebnf": "b"}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ],
)
def test_formats_that_are_refused(fields, param):
    with pytest.raises(RequestError) as error:
        chat(**fields).sampling_params(5)
    assert error.value.param == param


@pytest.mark.parametrize(
    "fields, kind, name",
    [
        ({"guided_regex": "("}, "regex", "guided_regex"),
        ({"guided_choice": ["a"]}, "ebnf", "guided_choice"),
        ({"structured_outputs": {"grammar": "root"}}, "ebnf", "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "json_schema", "response_format"),
        ({"regex": "("}, "regex", "regex"),
    ],
)
def test_errors_of_a_grammar_name_the_field_that_was_sent(fields, kind, name):
    named = chat(**fields).named(RequestError(f"{kind} is not usable: why", param=kind))
    assert (named.message, named.param) == (f"{name} is not usable: why", name.partition(".")[0])
    cut = chat(**fields).named(RequestError("why", param=kind))
    assert cut.message == ("why" if name == kind else f"{name}: why")
    other = RequestError("too long", param="prompt")
    assert chat(**fields).named(other) is other


def test_unknown_fields_are_ignored():
    assert chat(store=True, metadata={"a": 1}, what_is_this=[1]).messages == MESSAGES


def warnings(strict: bool = False, **fields) -> list[str]:
    return check_fields(fields, ChatCompletionRequest, request_fields.UNSUPPORTED_CHAT, strict)


@pytest.mark.parametrize(
    "name, likely",
    [
        ("temperatur", "temperature"),
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("top_P", "top_p"),
        ("maxTokens", "max_tokens"),
        ("stops", "stop"),
        ("respons_format", "response_format"),
        ("mesages", "messages"),
    ],
)
def test_a_misspelt_field_is_named(name, likely):
    assert warnings(messages=MESSAGES, **{name: 1}) == [
        f"the field '{name}' is not known and was ignored: did you mean '{likely}'?"
    ]
    with pytest.raises(RequestError, match=f"no field '{name}': did you mean '{likely}'") as error:
        warnings(strict=True, **{name: 1})
    assert error.value.param == name and error.value.status_code == 400


def test_fields_of_tables_are_checked_too():
    (warning,) = warnings(stream_options={"include_usge": True, "other": 1})
    assert "'stream_options.include_usge'" in warning and "'stream_options.include_usage'" in warning
    with pytest.raises(RequestError, match=r"stream_options\.other"):
        warnings(strict=True, stream_options={"other": 1})
    assert warnings(strict=True, stream_options={"include_usage": True}) == warnings(stream_options=3) == []
    with pytest.raises(RequestError, match="no field 'temperatur': did you mean 'temperature'"):
        sampling_fields({"temperatur": 1})


def test_fields_of_other_engines_are_no_misspellings():
    others = """
        store metadata service_tier prediction audio verbosity prompt_cache_key safety_identifier
        web_search_options top_a typical_p repeat_penalty num_ctx keep_alive provider kv_transfer_params"""
    for name in others.split():
        assert warnings(**{name: 1}) == []
        with pytest.raises(RequestError, match=f"no field '{name}'$"):
            warnings(strict=True, **{name: 1})


@pytest.mark.parametrize(
    "name, value, default",
    [
        ("allowed_token_ids", [1], []),
        ("bad_words", ["a"], []),
        ("prompt_logprobs", 0, None),
        ("truncate_prompt_tokens", 5, None),
        ("return_tokens_as_token_ids", True, False),
        ("add_special_tokens", True, False),
        ("documents", [{"text": "a"}], []),
        ("chat_template", "a", None),
        ("include_reasoning", False, True),
        ("use_beam_search", True, False),
        ("length_penalty", 0.5, 1.0),
        ("guided_whitespace_pattern", " ", None),
        ("thinking_token_budget", 5, None),
        ("logits_processors", ["a"], []),
        ("detokenize", False, True),
        ("echo", True, False),
    ],
)
def test_a_field_that_changes_an_answer_of_vllm_is_named(name, value, default):
    (warning,) = warnings(**{name: value})
    assert warning == f"the field '{name}' is not known and was ignored: vLLM serves it, and this engine does not"
    assert warnings(strict=True, **{name: default}) == warnings(strict=True, **{name: None}) == []
    with pytest.raises(RequestError, match=f"no field '{name}': vLLM serves it") as error:
        warnings(strict=True, **{name: value})
    assert error.value.param == name
    for special, number in ((False, 1), (True, 0)):
        asked = {"prompt": "a", "add_special_tokens": special}
        assert len(check_fields(asked, CompletionRequest, {}, False)) == number, "completions have them"


def test_names_from_clients_are_made_harmless():
    (warning,) = warnings(**{"temper\r\nature": 1})
    assert warning.startswith("the field 'temper??ature' ")
    (warning,) = warnings(**{"tempërature": 1})
    assert warning.startswith("the field 'temp?rature' ")
    assert warnings(**{"x" * 10_000: 1, "": 1, "\0": 1}) == []
    with pytest.raises(RequestError) as error:
        warnings(strict=True, **{"\n" * 10_000: 1})
    assert len(error.value.message) < 200 and len(error.value.param) == 64


def test_long_names_are_not_kept():
    size = request_fields._did_you_mean.cache_info().currsize
    for name in ("x" * 10_000, "y" * 65):
        assert warnings(**{name: 1}) == []
        with pytest.raises(RequestError) as error:
            sampling_fields({name: 1})
        assert len(error.value.message) < 200
    assert request_fields._did_you_mean.cache_info().currsize == size


def test_of_equally_alike_names_the_one_with_the_same_first_letter_is_meant():
    assert "did you mean 'stop'?" in warnings(stopp=1)[0]
    assert "did you mean 'top_p'?" in warnings(top_pp=1)[0]


def test_too_many_prompts_are_refused_before_each_is_looked_at():
    lengths: list[int] = []

    def refused(prompts) -> bool:
        try:
            check_prompts({"prompt": prompts}, ["prompt"], lengths.append)
        except RequestError as error:
            assert "split it" in error.message
            return True
        return False

    assert refused(["a"] * (MAX_ANSWERS + 1)) and refused([[5]] * (MAX_ANSWERS + 1)) and not lengths
    assert not refused(["a"] * MAX_ANSWERS) and not lengths
    assert not refused([5] * 10_000) and not refused([[5], [5, 6], "a"]) and lengths == [10_000, 1, 2]
    assert not any(refused(prompt) for prompt in (None, "a", [], {}))


def test_few_of_many_unknown_fields_are_looked_at(monkeypatch):
    seen = []
    monkeypatch.setattr(request_fields, "did_you_mean", lambda name, known: seen.append(name) or "")
    assert warnings(**{f"unknown{i}": 1 for i in range(100_000)}) == []
    assert len(seen) == MAX_COMPARED
    monkeypatch.undo()
    assert len(warnings(**{f"temperature{i}": 1 for i in range(100)})) == MAX_WARNINGS


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1, 2]}, "stop"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
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
        ({"max_new_tokens": -5}, "max_new_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"sampling_seed": 1 << 70}, "seed"),
        ({"n": 0}, "n is 0"),
        ({"n": 129}, "from 1 to 128"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"stop_token_ids": [5] * 2000}, "at most 1024 ids"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "at most 1024 tokens"),
    ],
)
def test_parameters_out_of_range(fields, word):
    with pytest.raises(RequestError, match=word):
        sampling_params(SamplingFields(**fields))


def test_parameters_and_their_defaults():
    assert sampling_params(SamplingFields()) == SamplingParams()
    for spaces in (False, True):
        assert sampling_params(sampling_fields({"spaces_between_special_tokens": spaces})) == SamplingParams()
    params = sampling_params(SamplingFields(temperature=1e-9, stop="a", stop_token_ids=[1], sampling_seed=-3))
    assert (params.temperature, params.stop, params.stop_token_ids, params.sampling_seed) == (0.0, ("a",), (1,), -3)


def test_openais_names_in_messages():
    for fields, name in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 1 << 64}, "seed"),
    ):
        req = chat(**fields)
        with pytest.raises(RequestError, match=f"^{name} is") as error:
            req.sampling_params(req.max_tokens, least_new_tokens=1)
        assert error.value.param == name


def test_openais_logit_bias_has_strings_for_keys():
    assert chat(logit_bias={"5": 1, "7": -2.5}).sampling_params(None).logit_bias == {5: 1.0, 7: -2.5}
    with pytest.raises(RequestError, match="logit_bias"):
        chat(logit_bias={"five": 1})


def test_logprobs_of_chats_and_completions():
    assert chat().logprob_spec() is None and chat(logprobs=False, top_logprobs=0).logprob_spec() is None
    assert chat(logprobs=True, top_logprobs=3).logprob_spec() == LogprobSpec(top=3)
    for wrong in (
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ):
        with pytest.raises(RequestError, match="top_logprobs") as error:
            chat(**wrong).logprob_spec()
        assert error.value.param == "top_logprobs"
    assert completion().logprob_spec() is None
    assert completion(logprobs=0).logprob_spec() == LogprobSpec()
    assert completion(logprobs=2, echo=True).logprob_spec() == LogprobSpec(top=2, prompt_from=0)
    with pytest.raises(RequestError, match="logprobs is 21"):
        completion(logprobs=21).logprob_spec()


def test_best_of_only_if_it_changes_nothing():
    completion(best_of=1).check_best_of()
    completion(best_of=3, n=3).check_best_of()
    with pytest.raises(RequestError, match="best_of"):
        completion(best_of=3).check_best_of()


def test_a_stream_interval_of_one_asks_for_nothing():
    """Upstream's bench_one_batch_server sends it."""
    assert sampling_fields({"stream_interval": 1}) == SamplingFields()
    with pytest.raises(RequestError, match="stream_interval is not supported"):
        sampling_fields({"stream_interval": 2})


def test_native_parameters_are_strict():
    fields = sampling_fields({"max_new_tokens": 5, "n": 2, "min_p": 0.5, "logit_bias": {"3": 1}})
    assert (fields.max_new_tokens, fields.n, fields.min_p, fields.logit_bias) == (5, 2, 0.5, {3: 1.0})
    for wrong in ({"max_tokens": 5}, {"json_schema": 3}, {"top_k": "a"}, {"ignore_eos": 3}, {"stop_regex": "a"}):
        with pytest.raises(RequestError):
            sampling_fields(wrong)


UPSTREAM = load_names(str(RECORDED)).fields


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_upstreams_is_served_or_refused(name):
    kind, refused = REQUESTS[name]
    assert not set(kind.__struct_fields__) & set(refused)
    assert set(UPSTREAM[name]) - set(kind.__struct_fields__) - set(refused) <= request_fields.NOTHING_TO_DO
    assert check_fields(dict.fromkeys(UPSTREAM[name], 1), kind, refused, strict=True) == []


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
    assert completion().max_tokens == 16
    with pytest.raises(RequestError, match="suffix"):
        completion(suffix="b")


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
