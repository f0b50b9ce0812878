"""Whose messages a template takes as lists of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from sglang.srt.parser.chat_format import find_roles_of_parts
from support.tokenizer_manager_harness import Harness, run
from support.tokenizers_by_hand import fast

TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# As Qwen2-VL's.
LISTS = """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
# As Gemma 3's: of the system's message the first part alone.
FIRST_PART = (
    """{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{{ messages[0].content }}
{%- else %}{{ messages[0].content[0].text }}{% endif %}{% set messages = messages[1:] %}{% endif %}"""
    + LISTS
)
# As Llama 3.2's: with tools, the first message of the user is taken for a text.
TEXTS_WITH_TOOLS = (
    """{% if tools %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}""" + LISTS
)
NO_SYSTEM = "{% if messages[0].role != 'user' %}{{ raise_exception('the first is the user') }}{% endif %}" + LISTS


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (TEXTS, ""),
        (LISTS, "system developer user"),
        (LISTS.replace("{{ part.text }}", "{{ part.text | trim }}\n"), "system developer user"),
        (FIRST_PART, "developer user"),
        (TEXTS_WITH_TOOLS, ""),
        (NO_SYSTEM, "user"),
        ("{{ messages[0].content + 'a' }}", ""),
        ("{{ messages[0].content | tojson }}", ""),
        ("no messages", ""),
    ],
)
def test_roles_of_parts(template: str, roles: str) -> None:
    tokenizer = fast(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), template)

    def render(messages: list[dict[str, Any]], tools: Sequence[Any] | None) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    assert find_roles_of_parts(render) == set(roles.split())


def test_a_server_tries_its_template() -> None:
    async def test(h: Harness) -> None:
        assert h.manager.chat_format.roles_of_parts == {"system", "developer", "user"}
        parts = [{"type": "text", "text": text} for text in ("a", "b")]
        assert await h.manager.render_chat([{"role": "user", "content": parts}], {}, False) == "<user>ab"

    run(test, tokenizer=fast(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), LISTS))
