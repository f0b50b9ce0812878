"""Reads upstream's names from its source text, with `ast`. Nothing of upstream is imported or run. Stateless.

Where upstream keeps what is written here once. A file or a class that upstream moved makes `read_sources` fail with
its name, so that a table never shrinks in silence.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SERVER_ARGS = "srt/server_args.py"
FLAG_FOLDER = "srt/arg_groups/fields/"
CHOICES = "srt/arg_groups/choices.py"
METRIC_PREFIX = "sglang:"
# The server's, and those of the HTTP servers beside it: of encoders, of a start that waits, of weights.
ROUTE_FILES = (
    "srt/entrypoints/http_server.py",
    "srt/entrypoints/v1_loads.py",
    "srt/entrypoints/elastic_ep.py",
    "srt/entrypoints/engine_info_bootstrap_server.py",
    "srt/disaggregation/encoder/http_server.py",
    "srt/distributed/gated_launch.py",
)
# FastAPI adds these, and the last is mounted.
_ROUTES_WITHOUT_DECORATOR = {
    "/docs": ["GET", "HEAD"],
    "/docs/oauth2-redirect": ["GET", "HEAD"],
    "/openapi.json": ["GET", "HEAD"],
    "/redoc": ["GET", "HEAD"],
    "/metrics": ["GET"],
}
REQUEST_CLASSES = {
    "GenerateReqInput": "srt/managers/io_struct.py",
    "SamplingParams": "srt/sampling/sampling_params.py",
    "ChatCompletionRequest": "srt/entrypoints/openai/protocol.py",
    "CompletionRequest": "srt/entrypoints/openai/protocol.py",
    "EmbeddingRequest": "srt/entrypoints/openai/protocol.py",
    "TokenizeRequest": "srt/entrypoints/openai/protocol.py",
    "DetokenizeRequest": "srt/entrypoints/openai/protocol.py",
    "ResponsesRequest": "srt/entrypoints/openai/protocol.py",
    "AnthropicMessagesRequest": "srt/entrypoints/anthropic/protocol.py",
}
# What plugins of storage, routers and the scheduler are written against.
INTERFACES = {
    "HiCacheStorage": "srt/mem_cache/hicache_storage.py",
    "HiCacheStorageConfig": "srt/mem_cache/hicache_storage.py",
    "HiCacheStorageExtraInfo": "srt/mem_cache/hicache_storage.py",
    "PoolName": "srt/mem_cache/hicache_storage.py",
    "PoolHitPolicy": "srt/mem_cache/hicache_storage.py",
    "PoolTransfer": "srt/mem_cache/hicache_storage.py",
    "PoolTransferResult": "srt/mem_cache/hicache_storage.py",
    "HostKVCache": "srt/mem_cache/pool_host/base.py",
    "EventBatch": "srt/disaggregation/kv_events.py",
    "BlockStored": "srt/disaggregation/kv_events.py",
    "BlockRemoved": "srt/disaggregation/kv_events.py",
    "AllBlocksCleared": "srt/disaggregation/kv_events.py",
    "KVEventsConfig": "srt/disaggregation/kv_events.py",
    "StorageMedium": "srt/disaggregation/kv_events.py",
    "BasePrefixCache": "srt/mem_cache/base_prefix_cache.py",
}
_VERBS = ("get", "post", "put", "delete", "head", "patch")


class UnreadableError(Exception):
    """The message tells what to do."""


@dataclass(frozen=True)
class Sources:
    """files: names relative to the package. text: the text of one."""

    version: str
    files: Sequence[str]
    text: Callable[[str], str]

    def tree(self, name: str) -> ast.Module:
        if name not in self.files:
            raise UnreadableError(
                f"upstream {self.version} has no file {name}: find where it moved, and change sglang/rebase/reader.py"
            )
        return ast.parse(self.text(name))

    def class_members(self, file: str, name: str, with_methods: bool) -> dict[str, str]:
        classes = {node.name: node for node in ast.walk(self.tree(file)) if isinstance(node, ast.ClassDef)}
        if name not in classes:
            raise UnreadableError(
                f"upstream {self.version} has no class {name} in {file}: find its successor, and change "
                "sglang/rebase/reader.py"
            )
        return dict(_members(classes, name, with_methods))


def read_sources(sources: Sources) -> dict[str, Any]:
    """The fields of `UpstreamNames`, as plain values."""
    return {
        "version": sources.version,
        "flags": read_flags(sources),
        "endpoints": read_endpoints(sources),
        "fields": {
            name: list(sources.class_members(file, name, with_methods=False))
            for name, file in REQUEST_CLASSES.items()
        },
        "metrics": read_metrics(sources),
        "members": {name: sources.class_members(file, name, with_methods=True) for name, file in INTERFACES.items()},
        "files": list(sources.files),
    }


# -- flags ------------------------------------------------------------------------------------------------------


def read_flags(sources: Sources) -> dict[str, dict[str, Any]]:
    """Fields annotated `A[type, help or Arg(...)]`, and calls of `add_argument`."""
    constants = _constants(sources.tree(CHOICES), {}) if CHOICES in sources.files else {}
    flags: dict[str, dict[str, Any]] = {"--help": {}}
    for name in [*(each for each in sources.files if each.startswith(FLAG_FOLDER)), SERVER_ARGS]:
        tree = sources.tree(name)
        known = _constants(tree, constants)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign):
                        flags.update(_annotated_flag(statement, known))
            elif isinstance(node, ast.Call) and _called(node) == "add_argument":
                names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
                options = {each.arg: each.value for each in node.keywords if each.arg}
                if names and names[0].startswith("--"):
                    flags.update(_entries(names, options.get("default"), options, known))
    return dict(sorted(flags.items()))


def _annotated_flag(statement: ast.AnnAssign, known: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    kind = statement.annotation
    if not (isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in ("A", "Annotated")):
        return {}
    if not (isinstance(kind.slice, ast.Tuple) and isinstance(statement.target, ast.Name)):
        return {}
    base, *rest = kind.slice.elts
    args = next((each for each in rest if isinstance(each, ast.Call) and _called(each) == "Arg"), None)
    if args is None and not any(isinstance(each, ast.Constant | ast.JoinedStr | ast.BinOp) for each in rest):
        return {}
    options = {each.arg: each.value for each in args.keywords if each.arg} if args else {}
    if isinstance(no_cli := options.get("no_cli"), ast.Constant) and no_cli.value:
        return {}
    cli_name = options.get("cli_name")
    name = str(cli_name.value) if isinstance(cli_name, ast.Constant) else "--" + statement.target.id.replace("_", "-")
    if "choices" not in options and (literal := _literal_of(base)) is not None:
        options["choices"] = literal
    return _entries([name, *(_strings(options.get("aliases"), known) or ())], statement.value, options, known)


def _entries(
    names: list[str], default: ast.expr | None, options: dict[str, ast.expr], known: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """The flag and its aliases."""
    facts: dict[str, Any] = {}
    if default is not None and not (isinstance(default, ast.Constant) and default.value is None):
        facts["default"] = str(default.value) if isinstance(default, ast.Constant) else ast.unparse(default)
    if (choices := _strings(options.get("choices"), known)) is not None:
        facts["choices"] = choices
    return {names[0]: facts, **{alias: {**facts, "alias_of": names[0]} for alias in names[1:]}}


def _literal_of(kind: ast.expr) -> ast.expr | None:
    """The values of a Literal, also of an optional one."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            return node.slice if isinstance(node.slice, ast.Tuple) else ast.Tuple([node.slice], ast.Load())
    return None


def _strings(node: ast.expr | None, known: dict[str, list[str]]) -> list[str] | None:
    """None where the list is computed."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _strings(node.left, known), _strings(node.right, known)
        return None if left is None or right is None else left + right
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return None
    found: list[str] = []
    for each in node.elts:
        inner = _strings(each.value, known) if isinstance(each, ast.Starred) else _constant(each)
        if inner is None:
            return None
        found += inner
    return found


def _constant(node: ast.expr) -> list[str] | None:
    if not isinstance(node, ast.Constant):
        return None
    return [] if node.value is None else [str(node.value)]


def _constants(tree: ast.Module, known: dict[str, list[str]]) -> dict[str, list[str]]:
    """Beside the known ones: lists of texts at the top of a module, which may be made of earlier ones."""
    found = dict(known)
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        values = _strings(node.value, found) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if values is not None and isinstance(target, ast.Name):
            found[target.id] = values
    return found


# -- endpoints --------------------------------------------------------------------------------------------------


def read_endpoints(sources: Sources) -> dict[str, list[str]]:
    found = {path: set(methods) for path, methods in _ROUTES_WITHOUT_DECORATOR.items()}
    for name in ROUTE_FILES:
        for node in ast.walk(sources.tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    if route := _route(decorator):
                        found.setdefault(route[0], set()).update(route[1])
    return {path: sorted(found[path]) for path in sorted(found)}


def _route(decorator: ast.expr) -> tuple[str, list[str]] | None:
    if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.args):
        return None
    verb, path = decorator.func.attr, _path_of(decorator.args[0])
    if path is None or ast.unparse(decorator.func.value) not in ("app", "router"):
        return None
    if verb in _VERBS or verb == "websocket":
        return path, [verb.upper()]
    if verb != "api_route":
        return None
    methods = next((each.value for each in decorator.keywords if each.arg == "methods"), None)
    return path, _strings(methods, {}) or ["GET"]


def _path_of(node: ast.expr) -> str | None:
    """A text, or the default of `os.environ.get(NAME, default)`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value.startswith("/") else None
    if isinstance(node, ast.Call) and _called(node) in ("get", "getenv") and len(node.args) == 2:
        return _path_of(node.args[1])
    return None


# -- metrics ----------------------------------------------------------------------------------------------------


def read_metrics(sources: Sources) -> list[str]:
    """Texts `sglang:...` where they are the first argument of a call, or its `name`."""
    found: set[str] = set()
    for name in sources.files:
        if name.startswith("srt/") and f'"{METRIC_PREFIX}' in (text := sources.text(name)):
            found.update(_metrics_in(ast.parse(text)))
    return sorted(found)


def _metrics_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for each in (*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")):
                text = each.value if isinstance(each, ast.Constant) else None
                head, prefix, name = str(text).partition(METRIC_PREFIX)
                if not head and prefix and name.isidentifier():
                    yield str(text)


# -- classes ----------------------------------------------------------------------------------------------------


def _members(classes: dict[str, ast.ClassDef], name: str, with_methods: bool) -> Iterator[tuple[str, str]]:
    """Public fields, constants of an enum, and methods, of a class and of its bases in the same module."""
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes and base.id != name:
            yield from _members(classes, base.id, with_methods)
    is_enum = any("Enum" in ast.unparse(base) for base in classes[name].bases)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
                yield node.target.id, ""
        elif is_enum and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ast.unparse(node.value)
        elif isinstance(node, ast.FunctionDef) and with_methods and not node.name.startswith("_"):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield node.name, f"({ast.unparse(node.args)}){returns}"


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
