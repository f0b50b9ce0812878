"""Answers with tool calls in each format, what they hold, and chat templates that write them.

The templates are our own. They write calls as the published ones do that the detectors name as their sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jinja2

from sglang.srt.function_call.core_types import StreamingParseResult, Tool

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "filter": {"type": "object"},
        "tags": {"type": ["array", "null"]},
        "unit": {"enum": ["C", "F"]},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS = (Tool("get_weather", WEATHER_SCHEMA), Tool("get-time", {"type": "object", "properties": {}}), Tool("f", {}))

_CHATML_END = "<|im_end|>\n"
_HERMES_CALLS = (
    '{% for call in message.tool_calls %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \''
    " + (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
)
_ELEMENT_CALLS = (
    "{% for call in message.tool_calls %}{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"
)


def _chatml(calls: str, opening: str = "") -> str:
    return (
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}"
        "{% endif %}"
        "{{ message.content }}" + calls + "{{ '" + _CHATML_END.replace("\n", "\\n") + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}" + opening + "{% endif %}"
    )


def _mistral(calls: str) -> str:
    return (
        "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
        "{% else %}{{ message.content }}{% if message.tool_calls %}"
        + calls
        + "{% endif %}</s>{% endif %}{% endfor %}"
    )


_LLAMA_HEAD = "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
# With the rules of the published one: a message has one call, and a reasoning or a text beside it, and results are of
# the last call.
_HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|># Tools' }}{% for tool in tools %}"
    "{{ '// ' + tool.function.description + ' type ' + tool.function.name }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary' }}"
    "{{ '<|message|>' + (message.content | tojson) + '<|end|>' }}"
    "{% elif message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{% if message.content and message.thinking %}{{ raise_exception('Cannot pass both') }}{% endif %}"
    "{% if message.content or message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' +"
    " (message.content or message.thinking) + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ (call.arguments | tojson) + '<|call|>' }}{% set last.name = call.name %}"
    "{% elif message.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Name -> (a value of --tool-call-parser, a template).
TEMPLATES: dict[str, tuple[str, str]] = {
    "qwen2.5": ("qwen25", _chatml(_HERMES_CALLS)),
    "qwen3-coder": ("qwen3_coder", _chatml(_ELEMENT_CALLS)),
    "mistral-v3": (
        "mistral",
        _mistral(
            '[TOOL_CALLS] [{% for call in message.tool_calls %}{{ \'{"name": "\' + call.function.name + \'", '
            '"arguments": \' + (call.function.arguments | tojson) + \', "id": "\' + call.id + \'"}\' }}'
            "{% if not loop.last %}, {% endif %}{% endfor %}]"
        ),
    ),
    "mistral-v11": (
        "mistral",
        _mistral(
            "{% for call in message.tool_calls %}{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id +"
            " '[ARGS]' + (call.function.arguments | tojson) }}{% endfor %}"
        ),
    ),
    "mistral-v13": (
        "mistral",
        _mistral(
            "{% for call in message.tool_calls %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' +"
            " (call.function.arguments | tojson) }}{% endfor %}"
        ),
    ),
    "llama-3.1": (
        "llama3",
        "{# role ipython #}{% for message in messages %}" + _LLAMA_HEAD + "{{ message.content }}"
        '{% for call in message.tool_calls %}{{ \'{"name": "\' + call.function.name + \'", "parameters": \' +'
        " (call.function.arguments | tojson) + '}' }}{% if not loop.last %}; {% endif %}{% endfor %}<|eot_id|>"
        "{% endfor %}",
    ),
    "llama-3.2": (
        "pythonic",
        "{# [func_name1(params_name1=params_value1)] #}{% for message in messages %}"
        + _LLAMA_HEAD
        + "{{ message.content }}{% if message.tool_calls %}[{% for call in message.tool_calls %}"
        "{{ call.function.name }}({% for key, value in call.function.arguments | items %}"
        "{{ key }}={{ value | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
        "<|eot_id|>{% endfor %}",
    ),
    "gpt-oss": ("gpt-oss", _HARMONY),
}
ENDS = ("<|im_end|>", "</s>", "<|eot_id|>", "<|call|>")


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """As transformers renders it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template).render(messages=messages, **variables)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True)
class Example:
    parser: str
    text: str
    content: str
    # (name, arguments as text).
    calls: tuple[tuple[str, str], ...] = ()


def _in_marks(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


_CALL = '{"name": "f", "arguments": {"a": 1}}'
_WHOLE = ("f", '{"a": 1}')
_ODD = r'{"a": "é🎉 </tool_call> [TOOL_CALLS] \"}{][ \\", "b": [[{}], {"c": "\u00e9\ud83c\udf89"}], "d": -1.5e3}'
_ODD_CALL = f'{{"name": "f", "arguments": {_ODD}}}'

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

EXAMPLES = (
    # Qwen 2.5, Qwen 3, Hermes
    Example("qwen25", f"Let me look.\n{_in_marks(_CALL)}", "Let me look.", (_WHOLE,)),
    Example("qwen25", f"{_in_marks(_CALL)}\n{_in_marks(_ODD_CALL)}\n", "", (_WHOLE, ("f", _ODD))),
    Example("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", (_WHOLE,)),
    Example("hermes", '\n<tool_call>\n{ "arguments": {"a": 1}, "name": "f"}\n</tool_call> ', "", (_WHOLE,)),
    Example("qwen", f"<tool_call>\n{_CALL}\n{_CALL}\n</tool_call>", "", (_WHOLE, _WHOLE)),
    Example("qwen25", f"  A\n\n{_in_marks(_CALL)}\nB \n", "  A\n\n\nB \n", (_WHOLE,)),
    Example("qwen25", f"\n{_in_marks(_CALL)}\n\nB", "B", (_WHOLE,)),
    Example("qwen25", _in_marks('{"name": "no_tool", "arguments": {}}'), "", (("no_tool", "{}"),)),
    Example("qwen25", _in_marks('{"name": "f"}'), "", (("f", "{}"),)),
    Example("qwen25", _in_marks('{"name": "f", "arguments": null}'), "", (("f", "{}"),)),
    Example("qwen25", _in_marks(r'{"name": "f", "arguments": "{\"a\": 1}"}'), "", (_WHOLE,)),
    Example("qwen25", f"{_in_marks('no call')} {_in_marks(_CALL)}", _in_marks("no call"), (_WHOLE,)),
    Example("qwen25", _in_marks('{"name": 3, "arguments": {}}'), _in_marks('{"name": 3, "arguments": {}}')),
    Example("qwen25", _in_marks(f'{_CALL[:-1]}, "arguments": {{"b": 2}}}}'), "", (_WHOLE,)),
    Example("qwen25", _in_marks('{"name": "f", "arguments": 3}'), _in_marks('{"name": "f", "arguments": 3}')),
    Example("qwen25", "<tool_call>" * 3 + _CALL, "<tool_call>" * 2, (_WHOLE,)),
    Example("qwen25", '<tool_call>\n{"name": "f", "arguments": {"a": "un', "", (("f", '{"a": "un'),)),
    Example("qwen25", f"<tool_call>\n{_CALL}\n</tool_", "", (_WHOLE,)),
    Example("qwen25", f"<tool_call>\n{_CALL}", "", (_WHOLE,)),
    Example("qwen25", '<tool_call>\n{"name": "f', '<tool_call>\n{"name": "f'),
    Example(
        "qwen25",
        f'<tool_call>{{"name": "f", "arguments": {{"a": </tool_call>{_in_marks(_CALL)}',
        "</tool_call>",
        (("f", '{"a": '), _WHOLE),
    ),
    Example("qwen25", "a <tool", "a <tool"),
    Example("qwen25", "  \n", "  \n"),
    Example("qwen25", "", ""),
    # Llama 3
    Example("llama3", '{"name", "name": "f", "parameters": {}}', '{"name", "name": "f", "parameters": {}}'),
    Example("llama3", '{"name": "f", "parameters": {"a": 1}}', "", (_WHOLE,)),
    Example("llama3", f'\n{{"name": "f", "parameters": {_ODD}}};', "", (("f", _ODD),)),
    Example("llama3", f"{_CALL}; {_CALL};\n{_CALL}", "", (_WHOLE,) * 3),
    Example("llama3", f"{_CALL} ;\n{_CALL}", "", (_WHOLE,) * 2),
    Example("llama3", f"<|python_tag|>{_CALL}; {_CALL}<|python_tag|>{_CALL}", "", (_WHOLE,) * 3),
    Example("llama3", f"A <|python_tag|>{_CALL} B", "A  B", (_WHOLE,)),
    Example("llama3", '<|python_tag|>{"name": "no_tool", "parameters": {}}', "", (("no_tool", "{}"),)),
    Example("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", (_WHOLE,)),
    Example("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Example("llama3", '{"answer": 3, "name": "f"}', '{"answer": 3, "name": "f"}'),
    Example("llama3", f"Call {_CALL}", f"Call {_CALL}"),
    Example("llama3", '<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")'),
    Example("llama3", '{"name": "f", "parameters": {"a": "un', "", (("f", '{"a": "un'),)),
    Example("llama3", f"{_CALL}; {_CALL[:12]}", f"; {_CALL[:12]}", (_WHOLE,)),
    # Mistral
    Example("mistral", f"[TOOL_CALLS] [{_CALL}, {_ODD_CALL}]", "", (_WHOLE, ("f", _ODD))),
    Example("mistral", f'A[TOOL_CALLS][{_CALL[:-1]}, "id": "abcdefghi"}}]', "A", (_WHOLE,)),
    Example("mistral", f"[TOOL_CALLS]{_CALL}", "", (_WHOLE,)),
    Example(
        "mistral",
        f'[TOOL_CALLS]f[ARGS]{{"a": 1}}[TOOL_CALLS]get-time[CALL_ID]abcdefghi[ARGS]{_ODD}',
        "",
        (_WHOLE, ("get-time", _ODD)),
    ),
    Example("mistral", '[TOOL_CALLS]f[ARGS]{"a": [[TOOL_CALLS]f[ARGS]{"a": 1}', "", (("f", '{"a": ['), _WHOLE)),
    Example("mistral", "[TOOL_CALLS]f[ARGS]no", "[TOOL_CALLS]f[ARGS]no"),
    Example("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []"),
    Example("mistral", f"[TOOL_CALLS] [ {_CALL} ]", "", (_WHOLE,)),
    Example("mistral", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}"),
    Example("mistral", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR"),
    Example("mistral", f"[TOOL_CALLS] [{_CALL}, nothing]", ", nothing]", (_WHOLE,)),
    Example("mistral", f"[TOOL_CALLS] [{_CALL}", "", (_WHOLE,)),
    # Python
    Example("pythonic", "<|python_start|> [f(a=1)]<|python_end|>", "", (_WHOLE,)),
    Example("pythonic", '[f(from="a, in=3", in = None)]', "", (("f", '{"from": "a, in=3", "in": null}'),)),
    Example("pythonic", "[f(a=[from=1])]", "[f(a=[from=1])]"),
    Example("pythonic", "[f(a=1), get-time()]", "", (_WHOLE, ("get-time", "{}"))),
    Example("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", (_WHOLE,)),
    Example("pythonic", "I call [f(a=1)] now", "I call  now", (_WHOLE,)),
    Example(
        "pythonic",
        "[get_weather(city='a)]\\'\"(', days=-3, metric=true, filter={'k': [None, False]}, tags=null)]",
        "",
        (
            (
                "get_weather",
                '{"city": "a)]\'\\"(", "days": -3, "metric": true, "filter": {"k": [null, false]}, "tags": null}',
            ),
        ),
    ),
    Example("pythonic", "[1] and [no_tool(a=1)]", "[1] and [no_tool(a=1)]"),
    Example("pythonic", "[f(1)] [f(a=b)] [f(**c)]", "[f(1)] [f(a=b)] [f(**c)]"),
    Example("pythonic", "[f(a=1), f(2)]", ", f(2)]", (_WHOLE,)),
    Example("pythonic", "[f(a=1),]", "", (_WHOLE,)),
    Example("pythonic", "[f(a=\\\n1)]", "", (_WHOLE,)),
    Example("pythonic", "[f(a=-(1))] [f(a=f(a=1))]", "[f(a=f(a=1))]", (("f", '{"a": -1}'),)),
    Example("pythonic", "[f(a=1", "[f(a=1"),
    # Qwen3-Coder
    Example(
        "qwen3_coder",
        "A\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=filter>\n{"k": [1]}\n</parameter>\n<parameter=tags>\nnull\n'
        "</parameter>\n<parameter=share>\n2\n</parameter>\n<parameter=unit> F\n\n</parameter>\n"
        "</function>\n</tool_call>",
        "A",
        (
            (
                "get_weather",
                '{"city": "12", "days": 12, "metric": true, "filter": {"k": [1]}, "tags": null, "share": 2, '
                '"unit": "F"}',
            ),
        ),
    ),
    Example("qwen3_coder", "<function=f><parameter=b>x</parameter></function> B", "B", (("f", '{"b": "x"}'),)),
    Example("qwen3_coder", "<function=no_tool></function>", "<function=no_tool></function>"),
    Example("qwen3_coder", "<tool_call>\n<function=no_tool>\n</function>\n</tool_call>", "", (("no_tool", "{}"),)),
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=no_tool>\n<parameter=a>\n12\n</parameter>\n</function>",
        "",
        (("no_tool", '{"a": "12"}'),),
    ),
    Example(
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=b>\n\n <a>\n</parameter> "é\\n\n\n</parameter>\n'
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=get-time>\n</function>\n</tool_call>",
        "",
        (("f", '{"b": "\\n <a>\\n</parameter> \\"é\\\\n\\n"}'), ("get-time", "{}")),
    ),
    Example(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>",
        "",
        (("get_weather", '{"days": "many"}'),),
    ),
    Example("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\ncut </para", "", (("f", '{"b": "cut '),)),
    Example("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\ncut\n", "", (("f", '{"b": "cut\\n'),)),
    Example(
        "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>\n</func", "", (("f", '{"b": "x"}'),)
    ),
    Example("qwen3_coder", "<tool_call>\n<function=f>\nwhat?", "what?", (("f", "{}"),)),
    Example("qwen3_coder", "<function=f><parameter=a b>x</parameter></function>", "", (("f", '{"a b": "x"}'),)),
    Example("qwen3_coder", "<function=f>\n<parameter=a\nb>x", "<parameter=a\nb>x", (("f", "{"),)),
    Example("qwen3_coder", "<tool_call>\n<func", "<tool_call>\n<func"),
    Example("qwen3_coder", "<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>"),
    # gpt-oss. Without a parser of its own the reasoning is text.
    Example("gpt-oss", f"{_ANALYSIS}Rain?{_NEXT}{_FINAL}It rains.<|return|>", "Rain?\n\nIt rains."),
    Example("gpt-oss", f"{_FINAL}It rains.", "It rains."),
    Example("gpt-oss", f'{_ANALYSIS}Rain?{_NEXT}{_TO_F}{{"a": 1}}<|call|>', "Rain?", (_WHOLE,)),
    Example("gpt-oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", (_WHOLE,)),
    Example("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a": 1}', "", (_WHOLE,)),
    Example("gpt-oss", '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}', "", (_WHOLE,)),
    Example(
        "gpt-oss", '<|start|>assistant<|channel|>analysis to=functions.f code<|message|> {"a": 1}', "", (_WHOLE,)
    ),
    Example("gpt-oss", '<|channel|>commentary to=f <|constrain|>json<|message|>{"a": 1}\n', "", (_WHOLE,)),
    Example("gpt-oss", f"{_TO_F}{_ODD}{_NEXT}{_TO_F}{{}}<|call|>", "", (("f", _ODD), ("f", "{}"))),
    Example("gpt-oss", "<|channel|>commentary to=functions.no_tool<|message|>{}", "", (("no_tool", "{}"),)),
    Example("gpt-oss", "<|channel|>commentary to=python code<|message|>print(1)<|call|>", "print(1)"),
    Example("gpt-oss", f"<|channel|>commentary<|message|>Let me.{_NEXT}{_TO_F}{{}}", "Let me.", (("f", "{}"),)),
    Example("gpt-oss", f'{_TO_F}{{"a": 1}}<|call|><|start|>assistant{_FINAL}Well.', "Well.", (_WHOLE,)),
    Example("gpt-oss", f'{_TO_F}{{"a": "un', "", (("f", '{"a": "un'),)),
    Example("gpt-oss", f'{_TO_F}{{"a": <|call|>', "", (("f", '{"a": '),)),
    Example("gpt-oss", f"{_TO_F}<|call|>", "", (("f", "{}"),)),
    Example("gpt-oss", f"{_TO_F}no JSON<|call|>", "no JSON"),
    Example("gpt-oss", _TO_F, ""),
    Example("gpt-oss", _TO_F[:-5], ""),
    Example("gpt-oss", "to=functions.f", ""),
    Example("gpt-oss", f"{_FINAL}a < b and c <|re", "a < b and c "),
    Example("gpt-oss", f"{_FINAL}if a <", "if a <"),
    Example("gpt-oss", " No header.\n", " No header.\n"),
    Example("gpt-oss", f"{_FINAL} A\n<|end|>\n<|start|>assistant{_FINAL}B \n", " A\n\n\nB \n"),
    Example("gpt-oss", f"{_FINAL}A<|message|>B<|constrain|>C{_FINAL}D<|end|>E<|end|><|end|>", "A\n\nB\n\nD\n\nE"),
    Example("gpt-oss", "<|start|><|start|><|channel|><|message|>", ""),
    Example("gpt-oss", "", ""),
)


def shown(result: StreamingParseResult) -> tuple[str, tuple[tuple[str | None, str], ...]]:
    """A joined result as an example has it."""
    return result.normal_text, tuple((call.name, call.parameters) for call in result.calls)
