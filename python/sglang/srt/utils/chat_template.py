"""Chat templates: those of a tokenizer, and the one that --chat-template names. Reads files; renders nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.utils.child_process import StartupError

# How transformers calls the template that has no name.
DEFAULT = "default"


def all_chat_templates(tokenizer: Any) -> str:
    """All of a model's templates as one text."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def read_chat_template(named: str, tokenizer_dir: str | Path) -> str:
    """named: a file, or one of the templates in the tokenizer's directory. Raises StartupError."""
    path = Path(named).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--chat-template {named} cannot be read ({error}): name a text file") from None
    own = own_templates(Path(tokenizer_dir))
    if named in own:
        return own[named]
    names = ", ".join(sorted(own)) or "none"
    raise StartupError(
        f"--chat-template {named} is neither a file nor one of the tokenizer's templates, which are: {names}"
    )


def check_chat_template(named: str, tokenizer_dir: str | Path) -> None:
    """Raises StartupError for a template that is not there, or that transformers cannot compile."""
    import jinja2  # only where the flag is given
    from transformers.utils.chat_template_utils import _compile_jinja_template  # with its filters, tags and globals

    text = read_chat_template(named, tokenizer_dir)
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateSyntaxError as error:  # unknown filters and tests too
        raise StartupError(f"--chat-template {named} is no Jinja template: line {error.lineno}, {error}") from None
    except ImportError as error:  # jinja2 is missing or old
        raise StartupError(f"--chat-template {named} cannot be used: {error}") from None


def own_templates(tokenizer_dir: Path) -> dict[str, str]:
    """Name -> template, in each of the places where transformers keeps them."""
    found: dict[str, str] = {}
    try:
        config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, str):
        found[DEFAULT] = template
    for entry in template if isinstance(template, list) else ():
        if isinstance(entry, dict) and "name" in entry and "template" in entry:
            found[str(entry["name"])] = str(entry["template"])
    files = {DEFAULT: tokenizer_dir / "chat_template.jinja"}
    files |= {path.stem: path for path in (tokenizer_dir / "additional_chat_templates").glob("*.jinja")}
    for name, path in files.items():
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    return found
