"""Writes docs/reference/flags.md from `ServerArgs`.

    python -m sglang.srt.flag_reference docs/reference/flags.md

Owns nothing; a test fails where the page differs from what this makes.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from sglang.srt.server_args import GROUPS, ServerArgs, default_text, flag_name

_INTRO = """# Flags

Flags of `python -m sglang.launch_server`, in the groups of `--help`. A flag that is not listed here is refused.
`sglang.Engine` takes the same settings by keyword: `--page-size` is `page_size`.

This page is generated: change `python/sglang/srt/server_args.py`, then run `make docs`.
"""


def render() -> str:
    return _INTRO + "".join(_section(title) for title in GROUPS)


def _section(title: str) -> str:
    rows = "".join(_row(field) for field in dataclasses.fields(ServerArgs) if field.metadata["group"] == title)
    return f"\n## {title}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}"


def _row(field: dataclasses.Field) -> str:
    names = ", ".join(f"`{name}`" for name in (flag_name(field.name), *field.metadata["aliases"]))
    default = default_text(field)
    is_value = field.default is not None and field.default is not False
    if default and (is_value or default.startswith("--")):
        default = f"`{default}`"
    meaning = field.metadata["help"]
    sentence = meaning[0].upper() + meaning[1:] + "."
    if choices := field.metadata["choices"]:
        sentence += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    return f"| {names} | {default or '-'} | {sentence} |\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m sglang.srt.flag_reference FILE")
    Path(sys.argv[1]).write_text(render())
