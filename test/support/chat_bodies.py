"""Bodies of chats for fuzzing, as hypothesis's strategies: tools, grammars and histories in OpenAI's and Anthropic's
forms, and texts as models write them.

`BODIES` has them by group. A group is a path, or a path and a word for one of several groups of that path.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from support.http_bodies import body, junk, mostly, numbers, of, prompts, tokens, words

Strategy = st.SearchStrategy


def record(_odds: int = 16, _optional: dict[str, Strategy] | None = None, **fields: Strategy) -> Strategy:
    """An object, each of whose values is junk now and then, as is the whole."""
    optional = {name: mostly(value, _odds) for name, value in (_optional or {}).items()}
    made = st.fixed_dictionaries({name: mostly(value, _odds) for name, value in fields.items()}, optional=optional)
    return mostly(made, 4 * _odds)


def lists(one: Strategy, least: int = 0, most: int = 3) -> Strategy:
    return mostly(st.lists(one, min_size=least, max_size=most), 24)


def just(*values: Any) -> Strategy:
    return st.sampled_from(values)


# Few names, so that they meet each other. Odd ones are rare.
names = st.one_of(
    just("f", "g", "get_weather", "f", "g"),
    just("f", "name", "a.b-c", "x" * 128, "f" * 129, "", "é", "a b", "\0", "\u202ef", '"', "__class__", "<f>"),
)
good_names = just("f", "g", "get_weather", "a.b-c")
keys = st.one_of(just("a", "b", "city"), just("a", "", "é", "a\0", "$ref", "type", "\u202e", '"', "k" * 300))
short = st.one_of(just("", "a", "Paris", "x y"), words)

# Schemas

small_sizes = just(0, 1, 2, 5, 20)
_leaves = st.one_of(
    just({"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}),
    just({}, True, {"enum": ["a", "b"]}, {"const": 1}, {"type": ["string", "null"]}, {"$ref": "#/$defs/d"}),
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": small_sizes}, optional={"minLength": small_sizes}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": just("a+", "^[a-z]{1,3}$", "(", "\\d", "[")}),
    st.fixed_dictionaries({"type": st.just("string"), "format": just("date", "email", "uri", "bogus")}),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": just(0, -5, 10), "maximum": just(9, 100, -3)}),
    st.fixed_dictionaries({"enum": st.lists(st.one_of(words, numbers), max_size=3)}),
    st.fixed_dictionaries({"const": junk}),
    just({"type": "bogus"}, {"enum": []}, {"$ref": "#"}, {"$ref": "https://example.com/x"}, {"$ref": 5}, False),
)


def _schemas(inner: Strategy) -> Strategy:
    properties = st.dictionaries(keys, inner, max_size=3)
    more: dict[str, Strategy] = {
        "required": mostly(st.lists(keys, max_size=2)),
        "additionalProperties": st.one_of(st.booleans(), inner),
        "$defs": mostly(st.fixed_dictionaries({"d": inner})),
        "description": mostly(short),
        "patternProperties": st.dictionaries(just("^a", "b+"), inner, max_size=1),
    }
    arrays: dict[str, Strategy] = {"minItems": small_sizes, "maxItems": small_sizes, "prefixItems": st.lists(inner)}
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": mostly(properties)}, optional=more),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional=arrays),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=2)}),
    )


schemas = st.recursive(_leaves, _schemas, max_leaves=5)
parameters = st.one_of(
    just(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"type": "object", "properties": {"n": {"enum": ["x", "y"]}}, "additionalProperties": False},
        {"type": "object", "properties": {}},
        {},
    ),
    st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(keys, schemas, max_size=2)}),
    schemas,
)
# None of them takes long to compile: the slow variant has those that do.
regexes = just("a|b", "[a-c]{1,3}", "(", "a{2,1}", "", "\\p{L}", "(?=a)", "\0", "é+", "a*?", "[\\", "x" * 2000)
ebnfs = just(
    'root ::= "a" | "b"', "root ::= root", "root ::= ", "x ::= 1", '"', "", 'root ::= "a" nothing', "root ::= ["
)
HOSTILE = [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(" * 5000 + ")" * 5000},
    {"ebnf": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"json_schema": {"type": "string", "maxLength": 10**7}},
    {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 10**6}},
    {"json_schema": {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(5000)}}},
    {"json_schema": {"enum": [str(i) * 20 for i in range(5000)]}},
]
tags = st.one_of(
    st.fixed_dictionaries(
        {
            "structures": lists(record(begin=just("<f>", ""), schema=schemas, end=just("</f>", ""))),
            "triggers": lists(just("<f", "", "<")),
        }
    ),
    st.fixed_dictionaries(
        {
            "format": st.one_of(
                record(type=st.just("json_schema"), json_schema=schemas),
                record(type=st.just("const_string"), value=short),
                record(type=st.just("regex"), pattern=regexes),
                record(type=st.just("grammar"), grammar=ebnfs),
                record(type=just("any_text", "bogus", "or", "sequence"), _optional={"elements": junk}),
                record(type=st.just("tag"), begin=short, content=record(type=st.just("any_text")), end=short),
            )
        }
    ),
)
response_formats = st.one_of(
    just({"type": "text"}, {"type": "json_object"}),
    record(type=st.just("json_schema"), json_schema=record(name=names, schema=schemas, _optional={"strict": junk})),
    tags.map(lambda tag: {"type": "structural_tag", **tag}),
)

# Tools and the choice among them

flags = just(True, False)
functions = record(
    name=names, _optional={"description": short, "parameters": parameters, "strict": flags, "more": junk}, _odds=24
)
tools = lists(record(type=st.just("function"), function=functions, _odds=24), least=1)
named_choices = record(type=st.just("function"), function=record(name=good_names))
choices = st.one_of(just("auto", "required", "none", "required"), just("auto", "any", "f"), named_choices)
arguments = just("{}", '{"a": true}', '{"a": 1, "a": 2}', '{"a": NaN}', '{"a', "", "[]", "null", '"x"', "{" * 2000)
call_ids = st.one_of(just("call_1", "call_2", "abcdefghi"), words)
CHOICES: dict[str, Strategy] = {
    "tool_choice": choices,
    "tools": tools,
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(
        just("enable_thinking", "tools", "reasoning_effort", "x"), junk, max_size=1
    ),
}


def with_some(base: dict[str, Strategy], more: dict[str, Strategy], odds: int = 16) -> Strategy:
    """The fields of the base, and some of the others."""
    optional = {name: mostly(value, odds) for name, value in more.items() if name not in base}
    return st.fixed_dictionaries({name: mostly(value, odds) for name, value in base.items()}, optional=optional)


# Chats

parts = lists(
    st.one_of(record(type=st.just("text"), text=short), record(type=just("image_url", "text", 5), text=short))
)
calls = lists(
    record(id=call_ids, type=st.just("function"), function=record(name=good_names, arguments=arguments)), most=2
)
messages = st.one_of(
    record(role=just("user", "system", "developer", "nobody"), content=st.one_of(short, parts)),
    record(role=st.just("assistant"), content=short, _optional={"tool_calls": calls, "reasoning_content": short}),
    record(
        role=st.just("tool"), content=st.one_of(short, parts), _optional={"tool_call_id": call_ids, "name": names}
    ),
)
# An answer to a forced call may be whole within 40 tokens.
limits = st.one_of(tokens, just(16, 40))
streams = st.booleans()
history = lists(messages, least=1, most=4)
chats_with_tools = with_some(
    {"messages": history, "tools": tools, "max_tokens": limits, "stream": streams},
    {
        **CHOICES,
        "response_format": response_formats,
        "separate_reasoning": st.booleans(),
        "stream_reasoning": st.booleans(),
        "continue_final_message": st.booleans(),
        "n": just(1, 2),
        "logprobs": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "functions": junk,
        "function_call": junk,
        "reasoning_effort": junk,
    },
    48,
)
grammars = st.one_of(
    st.fixed_dictionaries({"response_format": response_formats}),
    st.fixed_dictionaries({"regex": mostly(regexes)}),
    st.fixed_dictionaries({"ebnf": mostly(ebnfs)}),
    st.fixed_dictionaries({"json_schema": mostly(schemas)}),
    st.fixed_dictionaries({"json_schema": just('{"type": "integer"}', "{", "5", "null", "[]"), "regex": regexes}),
    st.fixed_dictionaries({"structural_tag": tags}),
)
chats_with_grammars = st.tuples(
    with_some(
        {"messages": lists(messages, 1, 2), "max_tokens": limits, "stream": streams}, {"min_tokens": tokens}, 32
    ),
    grammars,
).map(lambda both: {**both[0], **both[1]})

# Responses

input_parts = lists(
    st.one_of(
        record(type=just("input_text", "output_text", "text"), text=short),
        record(type=just("refusal", "input_image", "input_file", 5), _optional={"refusal": short, "text": short}),
    )
)
summaries = lists(record(type=just("summary_text", "reasoning_text"), text=short))
items = st.one_of(
    record(role=just("user", "developer", "system", "assistant", "x"), content=st.one_of(short, input_parts)),
    record(type=st.just("message"), role=just("user", "assistant"), content=input_parts, _optional={"id": words}),
    record(type=st.just("reasoning"), _optional={"summary": summaries, "content": summaries, "id": words}),
    record(type=st.just("function_call"), name=good_names, arguments=arguments, _optional={"call_id": call_ids}),
    record(type=st.just("function_call_output"), output=st.one_of(short, input_parts), call_id=call_ids),
    record(type=just("web_search_call", "item_reference", "computer_call", "", 5), _optional={"id": words}),
)
flat_tools = lists(
    record(
        type=just("function", "function", "function", "web_search", "custom"),
        name=names,
        _optional={"description": short, "parameters": parameters, "strict": st.one_of(flags, st.none())},
        _odds=24,
    ),
    least=1,
)
text_formats = st.one_of(
    just({"type": "text"}, {"type": "json_object"}),
    record(type=st.just("json_schema"), name=names, schema=schemas, _optional={"strict": flags}),
)
responses = with_some(
    {"input": st.one_of(short, lists(items, 1, 4)), "max_output_tokens": limits, "stream": streams},
    {
        **CHOICES,
        "tools": flat_tools,
        "tool_choice": st.one_of(just("auto", "required", "none"), record(type=st.just("function"), name=good_names)),
        "instructions": short,
        "text": record(_optional={"format": text_formats, "verbosity": junk}),
        "reasoning": record(_optional={"effort": just("none", "low", "x"), "summary": junk}),
        "metadata": junk,
        "include": lists(words),
        "store": st.booleans(),
        "previous_response_id": junk,
        "temperature": just(0, 1, 0.5),
        "rid": words,
        "top_logprobs": junk,
    },
    48,
)

# Messages

text_blocks = record(type=st.just("text"), text=short, _optional={"cache_control": junk})
user_blocks = st.one_of(
    text_blocks,
    record(
        type=st.just("tool_result"),
        tool_use_id=call_ids,
        _optional={"content": st.one_of(short, lists(text_blocks)), "is_error": flags},
    ),
    record(type=just("image", "document", "tool_result", "x", 5), _optional={"source": junk}),
)
answer_blocks = st.one_of(
    text_blocks,
    record(type=st.just("tool_use"), id=call_ids, name=good_names, input=st.dictionaries(keys, junk, max_size=2)),
    record(type=st.just("thinking"), thinking=short, _optional={"signature": words}),
    record(type=just("redacted_thinking", "server_tool_use"), _optional={"data": words}),
)
turns = st.one_of(
    record(role=just("user", "user", "system", "x"), content=st.one_of(short, lists(user_blocks))),
    record(role=st.just("assistant"), content=st.one_of(short, lists(answer_blocks))),
)
their_tools = lists(
    record(
        name=names,
        _optional={"description": short, "input_schema": parameters, "strict": flags, "type": just("custom", "bash")},
        _odds=24,
    ),
    least=1,
)
_messages = {"messages": lists(turns, 1, 4), "max_tokens": limits}
_messages_more: dict[str, Strategy] = {
    **CHOICES,
    "tools": their_tools,
    "tool_choice": record(
        type=just("auto", "any", "none", "tool", "x"),
        _optional={"name": good_names, "disable_parallel_tool_use": flags},
    ),
    "system": st.one_of(short, lists(text_blocks)),
    "thinking": record(type=just("enabled", "disabled", "adaptive"), _optional={"budget_tokens": numbers}),
    "output_config": record(_optional={"format": record(type=st.just("json_schema"), schema=schemas)}),
    "stop_sequences": lists(short),
    "metadata": junk,
    "top_k": just(1, 5),
    "temperature": just(0, 1),
    "container": junk,
    "mcp_servers": junk,
}
anthropic_messages = with_some({**_messages, "stream": streams}, _messages_more, 48)

# Texts as models write them, of every format, whole and broken

pieces = st.one_of(
    just("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": ', "{}"),
    just("<function=f>", "<function=", "</function>", "<parameter=a>", "</parameter>", "\n", "[", "]", ",", ";", "}"),
    just("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abcdefghi", "f", "[f(a=1), g()]", "[f(", "a=", "'", '"', "\\", ")"),
    just("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>", "<thi", "1e999", "9" * 5000),
    just("(" * 3000, "[" * 3000, '{"a":' * 3000, "-" * 3000, "[f(a=" + "[" * 500, "f" * 3000, "[f(a=1e999)]"),
    just(
        "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "analysis", "to=functions.f", "<|"
    ),
    words,
)
answers = st.lists(pieces, max_size=12).map("".join)
parser_names = just("qwen3_coder", "qwen25", "hermes", "mistral", "pythonic", "llama3", "gpt-oss", "auto", "x", None)

inputs = st.one_of(prompts, prompts, short)
BODIES: dict[str, Strategy] = {
    "/v1/chat/completions tools": chats_with_tools,
    "/v1/chat/completions grammars": chats_with_grammars,
    "/v1/responses": responses,
    "/v1/messages": anthropic_messages,
    "/v1/messages/count_tokens": with_some(_messages, _messages_more, 48),
    "/v1/embeddings": body(
        {"input": of(inputs)},
        ["model", "encoding_format", "dimensions", "user", "rid", "extra_key", "cache_salt", "cache", "priority"],
    ),
    "/parse_function_call": st.fixed_dictionaries(
        {"text": mostly(answers), "tools": tools}, optional={"tool_call_parser": mostly(parser_names)}
    ),
    "/separate_reasoning": st.fixed_dictionaries(
        {"text": mostly(answers)},
        optional={
            "reasoning_parser": mostly(just("deepseek-r1", "qwen3", "qwen3-thinking", "gpt-oss", "auto", "x", None))
        },
    ),
}

_FUNCTION = {
    "name": "f",
    "description": "a",
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}
# Bodies with a value in every place that is looked at.
EXAMPLES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "yes"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 2,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}], "content": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        ],
        "instructions": "a",
        "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "max_output_tokens": 2,
        "stream": True,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": True}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a"}]}],
            },
        ],
        "tools": [{"name": "f", "description": "a", "input_schema": _FUNCTION["parameters"], "strict": True}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "max_tokens": 2,
    },
    "/parse_function_call": {
        "text": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_call_parser": "hermes",
    },
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
}
