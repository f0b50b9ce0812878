"""Writes docs/reference/flags.md from `ServerArgs`, and docs/reference/storage.md from the registries of storage.

    python -m sglang.srt.flag_reference docs/reference

Owns nothing; a test fails where a page differs from what this makes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.managers.startup.storage import COMMON_OPTIONS
from sglang.srt.mem_cache.storage.registry import STORAGE_BACKENDS, storage_backend
from sglang.srt.mem_cache.transfer import TIER_NAMES
from sglang.srt.offload.codec.registry import CODECS, codec_class
from sglang.srt.server_args import GROUPS, ServerArgs, default_text, flag_name, help_text
from sglang.srt.utils.registry import Option, shown

_FLAGS_INTRO = """# Flags

Flags of `python -m sglang.launch_server`, in the groups of `--help`. A flag that is not listed here is refused.
`sglang.Engine` takes the same settings by keyword: `--page-size` is `page_size`. The server also reads them from the
YAML file of `--config`, and from variables such as `SGLANG_PAGE_SIZE`. The command line comes before the variables,
and these before the file. `no-` before a switch turns it off, as in `--no-hicache`.

This page is generated: change `python/sglang/srt/server_args.py`, then run `make docs`.
"""
_STORAGE_INTRO = """# Storage options

Keys of `--hicache-storage-backend-extra-config`, which is JSON, or `@` and the name of a file with JSON. What they
are for is in [storage](../guides/storage.md), [remote](../guides/remote.md) and [plugins](../guides/plugins.md). With
two backends the options of each stand under its name. A key that is not listed here is refused, except by `dynamic`,
which gives all keys to the plugin but the options of every backend.

This page is generated: change the options in the code, then run `make docs`.
"""


def render_flags() -> str:
    return _FLAGS_INTRO + "".join(_flags_section(title) for title in GROUPS)


def render_storage() -> str:
    tiers = "".join(
        f"| `{name}` | {TIER_NAMES[entry.tier]} | {_capitalised(entry.summary)} |\n"
        for name, entry in STORAGE_BACKENDS.items()
    )
    parts = [
        _STORAGE_INTRO,
        f"\n## Backends\n\n| name | tier | where the KV cache is |\n|---|---|---|\n{tiers}",
        f"\n## Options of every backend\n\n{_options_table(COMMON_OPTIONS)}",
        *(
            f"\n## Options of `{name}`\n\n{_options_table(storage_backend(name).options)}"
            for name in STORAGE_BACKENDS
        ),
        f"\n## Codecs\n\nOf the remote tier, with their settings.\n{''.join(map(_codec_section, CODECS))}",
    ]
    return "".join(parts)


def _flags_section(title: str) -> str:
    rows = "".join(_flag_row(field) for field in dataclasses.fields(ServerArgs) if field.metadata["group"] == title)
    return f"\n## {title}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}"


def _flag_row(field: dataclasses.Field[Any]) -> str:
    names = ", ".join(f"`{name}`" for name in (flag_name(field.name), *field.metadata["aliases"]))
    default = default_text(field)
    is_value = field.default is not None and field.default is not False
    if default and (is_value or default.startswith("--")):
        default = f"`{default}`"
    sentence = _capitalised(help_text(field)) + "."
    if choices := field.metadata["choices"]:
        sentence += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    return f"| {names} | {default or '-'} | {sentence} |\n"


def _codec_section(name: str) -> str:
    codec = codec_class(name)
    table = f"\n{_options_table(codec.options)}" if codec.options else ""
    kind = "lossy" if codec.lossy else "lossless"
    return f"\n### `{name}`\n\nThis codec is {kind}. A read gives {codec.summary}.\n{table}"


def _options_table(options: Sequence[Option]) -> str:
    rows = "".join(
        f"| `{option.name}` | {option.kind.words} | {_default_of(option)} | {_capitalised(option.help)}. |\n"
        for option in options
    )
    return f"| key | value | default | meaning |\n|---|---|---|---|\n{rows}"


def _default_of(option: Option) -> str:
    return option.unset or f"`{shown(option.default)}`"


def _capitalised(text: str) -> str:
    return (text[0].upper() + text[1:]).replace("|", "\\|")


def write_pages(folder: Path) -> None:
    (folder / "flags.md").write_text(render_flags())
    (folder / "storage.md").write_text(render_storage())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m sglang.srt.flag_reference FOLDER")
    write_pages(Path(sys.argv[1]))
