from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang.srt.utils.chat_template import all_chat_templates, check_chat_template, own_templates, read_chat_template
from sglang.srt.utils.child_process import StartupError


def write_config(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_the_templates_of_a_tokenizer(tmp_path: Path) -> None:
    assert own_templates(tmp_path) == {}
    write_config(tmp_path, "a")
    assert own_templates(tmp_path) == {"default": "a"}
    write_config(tmp_path, [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    assert own_templates(tmp_path) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert own_templates(tmp_path) == {"default": "c", "tool_use": "b", "rag": "d"}
    assert read_chat_template("tool_use", tmp_path) == "b"


def test_a_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    assert read_chat_template(str(file), tmp_path) == "{{ messages }}é"
    check_chat_template(str(file), tmp_path)
    file.write_text("{% for m in messages %}{% break %}{% endfor %}")
    check_chat_template(str(file), tmp_path)
    file.write_text("{% generation %}{{ messages }}{% endgeneration %}")
    check_chat_template(str(file), tmp_path)
    file.write_text("\n{% for m in messages %}")
    with pytest.raises(StartupError, match="is no Jinja template: line 2"):
        check_chat_template(str(file), tmp_path)
    file.write_text("{{ raise_exception(strftime_now('%d') | tojson(indent=1)) }}")
    check_chat_template(str(file), tmp_path)
    for broken in ("{{ m.content | nofilter }}", "{% generation %}{{ 1 is odder }}{% endgeneration %}"):
        file.write_text(broken)
        with pytest.raises(StartupError, match=r"is no Jinja template: line 1, No (filter|test) named"):
            check_chat_template(str(file), tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="cannot be read"):
        check_chat_template(str(file), tmp_path)


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    write_config(tmp_path, [{"name": "tool_use", "template": "b"}, {"name": "rag", "template": "b"}])
    with pytest.raises(
        StartupError, match="neither a file nor one of the tokenizer's templates, which are: rag, tool_"
    ):
        check_chat_template("llama-2", tmp_path)


def test_all_templates_as_one_text() -> None:
    assert all_chat_templates(SimpleNamespace(chat_template=None)) == ""
    assert all_chat_templates(SimpleNamespace(chat_template="a")) == "a"
    assert all_chat_templates(SimpleNamespace(chat_template={"default": "a", "rag": "b"})) == "a\nb"
