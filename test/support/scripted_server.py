"""A server whose model gives the answers that a test has set, with a chat template that knows tools and reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from tokenizers import Tokenizer

from sglang.srt.configs.embedded_model import ensure_embedded_model
from support.server_fixture import Server
from support.tool_texts import TEMPLATES, WEATHER_SCHEMA

SEED = 23
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER_SCHEMA}},
    {"type": "function", "function": {"name": "f", "strict": True}},
]
BROKEN: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/nowhere"}}}}}
]
ASKED: Any = [{"role": "user", "content": "Weather?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FIRST, SECOND = '{"city": "Zürich 🎉", "days": 2}', "{}"
CALLS = "".join(
    f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (("get_weather", FIRST), ("f", SECOND))
)


class Scripted:
    """A server whose model gives the answer that a test has set."""

    def __init__(self, server: Server, script: Path) -> None:
        self.server = server
        self.client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        self._script = script
        self._tokenizer = Tokenizer.from_file(str(ensure_embedded_model() / "tokenizer.json"))

    def answer(self, text: str) -> int:
        """Returns the number of its tokens, without the last one, which ends it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._script.write_text(json.dumps(ids))
        return len(ids)

    def ask(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**{"model": "default", "messages": ASKED, "seed": SEED, **fields})

    def prompt(self) -> str:
        """The last one that the scheduler got."""
        return str(self._tokenizer.decode(self.server.state()["prompts"][-1], skip_special_tokens=False))

    def grammar(self) -> Any:
        return self.server.state()["grammars"][-1]


def scripted_server(folder: Path) -> Iterator[Scripted]:
    """folder: an empty one."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATES["qwen2.5"][1] + "{# </think> #}")
    script = folder / "script.json"
    flags = ["--chat-template", str(template), "--tool-call-parser", "auto", "--reasoning-parser", "auto"]
    flags += ["--default-chat-template-kwargs", '{"name": "x"}']
    with Server(*flags, fake=["--script", str(script)]) as server:
        yield Scripted(server, script)
