"""The commands of `python -m sglang.cli hicache`, by name. Most ask one endpoint of the server. Stateless."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sglang.cli import advise
from sglang.cli.server import CommandError, Server, add_server, check_number, shown


@dataclass(frozen=True)
class Command:
    """run: its docstring is what `--help` shows. arguments: adds those that are the command's own."""

    run: Callable[[argparse.Namespace], str]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.arguments(parser)
        add_server(parser)


def _state(args: argparse.Namespace) -> str:
    """show the cache's state, or one part of it"""
    state = Server(args).ask_object("GET", "/hicache/state")
    if args.part is None:
        return shown(state)
    if args.part not in state:
        raise CommandError(f"the state has no part {args.part!r}; it has {', '.join(state)}")
    return shown(state[args.part])


def _flush(args: argparse.Namespace) -> str:
    """drop everything that device, peers and host have cached; the server has to be idle"""
    return shown(Server(args).ask("POST", "/flush_cache", patience_s=None))


def _attach(args: argparse.Namespace) -> str:
    """attach a storage backend"""
    body = {
        "hicache_storage_backend": args.backend,
        "hicache_storage_backend_extra_config_json": args.config,
        "hicache_storage_prefetch_policy": args.prefetch_policy,
        "hicache_write_policy": args.write_policy,
    }
    given = {k: v for k, v in body.items() if v is not None}
    return shown(Server(args).ask("PUT", "/hicache/storage-backend", given, patience_s=None))


def _detach(args: argparse.Namespace) -> str:
    """detach the storage backend; what it has stays there"""
    return shown(Server(args).ask("DELETE", "/hicache/storage-backend", patience_s=None))


def _clear(args: argparse.Namespace) -> str:
    """forget all blocks of this model in the storage backend"""
    return shown(Server(args).ask("POST", "/hicache/storage-backend/clear", patience_s=None))


def _tiers(args: argparse.Namespace) -> str:
    """show which tiers are on"""
    return shown(Server(args).ask_object("GET", "/hicache/tiers"))


def _tier(args: argparse.Namespace) -> str:
    """turn a tier's reads or writes on or off"""
    body = {what: value == "on" for what in ("reads", "writes") if (value := getattr(args, what)) is not None}
    return shown(Server(args).ask("PUT", f"/hicache/tiers/{_quoted(args.tier)}", body))


def _policies(args: argparse.Namespace) -> str:
    """show the policies, or change them: NAME=VALUE …, by the names of the flags"""
    if not args.changes:
        return shown(Server(args).ask_object("GET", "/hicache/policies"))
    wanted: dict[str, Any] = {}
    for change in args.changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise CommandError(f"{change!r} is no NAME=VALUE, like hicache_load_ratio=auto")
        found = _json_or_text(value)
        if not isinstance(found, int | float):
            found = value
        if isinstance(found, float):
            check_number(name, found, 0)
        wanted[name.strip().lstrip("-").replace("-", "_")] = found
    return shown(Server(args).ask_object("PUT", "/hicache/policies", wanted))


def _json_or_text(text: str) -> Any:
    """What the JSON stands for, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _retain(args: argparse.Namespace) -> str:
    """keep the beginning of prompts in the cache for a while, as if it were used again and again"""
    check_number("--ttl", args.ttl, 0)
    body = {**_tenant(args), "text": _read(args.prompt), "ttl_s": args.ttl}
    return shown(Server(args).ask("PUT", _path("retention", args.name), body))


def _release(args: argparse.Namespace) -> str:
    """keep a prefix no longer"""
    return shown(Server(args).ask("DELETE", _path("retention", args.name)))


def _retained(args: argparse.Namespace) -> str:
    """show the prefixes that are kept"""
    return shown(Server(args).ask_object("GET", "/hicache/retention"))


def _label(args: argparse.Namespace) -> str:
    """name the beginning of prompts on the live page; it is not kept for that"""
    body = {**_tenant(args), "text": _read(args.prompt)}
    return shown(Server(args).ask("PUT", _path("labels", args.name), body))


def _unlabel(args: argparse.Namespace) -> str:
    """drop a label of the live page"""
    return shown(Server(args).ask("DELETE", _path("labels", args.name)))


def _labels(args: argparse.Namespace) -> str:
    """show the labels of prefixes"""
    return shown(Server(args).ask_object("GET", "/hicache/labels"))


def _warm(args: argparse.Namespace) -> str:
    """compute prompts, so that the cache has them before the first request"""
    prompts = [_read(file) for file in args.prompts]
    if args.lines:
        prompts = [_prompt(line) for text in prompts for line in text.splitlines() if line.strip()]
    body = {**_tenant(args), "prompts": prompts}
    return shown(Server(args).ask_object("POST", "/hicache/warm", body, patience_s=None))


def _prompt(line: str) -> Any:
    """A line of a file: JSON as the endpoint takes it, else a text."""
    value = _json_or_text(line)
    return value if isinstance(value, str | list | dict) else line


def _erase(args: argparse.Namespace) -> str:
    """drop all that requests with a cache_salt have left, on every tier, disk and remote too"""
    body = {"cache_salt": _salt(args), "abort_requests": args.abort_requests}
    return shown(Server(args).ask_object("POST", "/hicache/erase", body, patience_s=None))


def _quota(args: argparse.Namespace) -> str:
    """show or set how many tokens requests with a cache_salt may have cached: TIER=TOKENS …"""
    body: dict[str, Any] = {"cache_salt": _salt(args)}
    if args.none:
        body["tokens"] = {}
    elif args.limits:
        body["tokens"] = {}
        for limit in args.limits:
            tier, _, tokens = limit.partition("=")
            # What has more digits is beyond each tier, and Python reads no number of thousands.
            if not tokens.isdecimal() or len(tokens) > 18:
                raise CommandError(f"{limit!r} is no TIER=TOKENS, like host=100000")
            body["tokens"][tier] = int(tokens)
    return shown(Server(args).ask_object("PUT", "/hicache/quotas", body, patience_s=None))


def _path(kind: str, name: str) -> str:
    # In a path these mean another one.
    if name in ("", ".", ".."):
        raise CommandError(f"{name!r} is no name for a prefix: give another one")
    return f"/hicache/{kind}/{_quoted(name)}"


def _quoted(name: str) -> str:
    try:
        return quote(name, safe="")
    except UnicodeEncodeError:
        raise CommandError(f"{name!r} is no name in UTF-8: give another one") from None


def _read(file: str) -> str:
    """The text of a file; - for standard input."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error


def _salt(args: argparse.Namespace) -> str:
    return _read(args.salt_file).rstrip("\n") if args.salt_file else args.salt


def _tenant(args: argparse.Namespace) -> dict[str, str]:
    fields = {"cache_salt": _salt(args), "extra_key": args.extra_key}
    return {name: value for name, value in fields.items() if value}


def _add_salt(parser: argparse.ArgumentParser, is_required: bool) -> None:
    which = parser.add_mutually_exclusive_group(required=is_required)
    which.add_argument("--salt", default="", help="the requests' cache_salt; other users of this machine see it")
    which.add_argument("--salt-file", help="a file with it; - for standard input")


def _add_tenant(parser: argparse.ArgumentParser) -> None:
    _add_salt(parser, is_required=False)
    parser.add_argument("--extra-key", default="", help="the requests' extra_key")


def _state_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", nargs="?", help="of the state, such as tiers, storage or lost_hits")


def _attach_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", help="as for --hicache-storage-backend")
    parser.add_argument("config", nargs="?", help="JSON, as for --hicache-storage-backend-extra-config")
    parser.add_argument("--prefetch-policy", help="as for --hicache-storage-prefetch-policy")
    parser.add_argument("--write-policy", help="as for --hicache-write-policy")


def _tier_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tier", help="device, peer, host, disk or remote")
    parser.add_argument("--reads", choices=("on", "off"))
    parser.add_argument("--writes", choices=("on", "off"))


def _policies_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE", help="such as hicache_load_ratio=auto")


def _retain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="by which it is released, or kept longer")
    parser.add_argument("prompt", help="a file with the text; - for standard input")
    parser.add_argument("--ttl", type=float, required=True, help="seconds from now")
    _add_tenant(parser)


def _release_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name")


def _label_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="that the live page shows")
    parser.add_argument("prompt", help="a file with the text; - for standard input")
    _add_tenant(parser)


def _warm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", help="files, a text each; - for standard input")
    parser.add_argument(
        "--lines", action="store_true", help='each line is a prompt: a text, or JSON such as {"messages": […]}'
    )
    _add_tenant(parser)


def _erase_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--abort-requests", action="store_true", help="end requests with it that are under way")
    _add_salt(parser, is_required=True)


def _quota_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("limits", nargs="*", metavar="TIER=TOKENS", help="of other tiers there is no limit")
    parser.add_argument("--none", action="store_true", help="remove the quota")
    _add_salt(parser, is_required=True)


HICACHE = {
    "advise": Command(advise.run, advise.add_arguments),
    "state": Command(_state, _state_arguments),
    "flush": Command(_flush),
    "attach": Command(_attach, _attach_arguments),
    "detach": Command(_detach),
    "clear": Command(_clear),
    "tiers": Command(_tiers),
    "tier": Command(_tier, _tier_arguments),
    "policies": Command(_policies, _policies_arguments),
    "retain": Command(_retain, _retain_arguments),
    "release": Command(_release, _release_arguments),
    "retained": Command(_retained),
    "label": Command(_label, _label_arguments),
    "unlabel": Command(_unlabel, _release_arguments),
    "labels": Command(_labels),
    "warm": Command(_warm, _warm_arguments),
    "erase": Command(_erase, _erase_arguments),
    "quota": Command(_quota, _quota_arguments),
}
