"""What this engine serves and refuses, asked from the tables that the server itself uses. Stateless.

Nothing is listed here that the server knows already: only which struct stands for which of upstream's classes.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from fastapi.routing import APIRoute
from starlette.routing import Route

import sglang
from sglang.srt.disaggregation import kv_events
from sglang.srt.entrypoints.anthropic.protocol import UNSUPPORTED_MESSAGES, MessagesRequest
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.entrypoints.native import GenerateReqInput
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.responses_protocol import UNSUPPORTED_RESPONSES, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_embeddings import EmbeddingRequest
from sglang.srt.entrypoints.request_fields import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_EMBEDDING,
    UNSUPPORTED_GENERATE,
    UNSUPPORTED_NATIVE_SAMPLING,
    SamplingFields,
)
from sglang.srt.entrypoints.tokenization import DetokenizeRequest, TokenizeRequest
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.observability import http_metrics, metrics_collector
from sglang.srt.server_args import ServerArgs, make_parser

# Class of upstream -> the struct that stands for it here, and the fields that it refuses.
REQUESTS: dict[str, tuple[type[Any], Collection[str]]] = {
    "GenerateReqInput": (GenerateReqInput, UNSUPPORTED_GENERATE),
    "SamplingParams": (SamplingFields, UNSUPPORTED_NATIVE_SAMPLING),
    "ChatCompletionRequest": (ChatCompletionRequest, UNSUPPORTED_CHAT),
    "CompletionRequest": (CompletionRequest, UNSUPPORTED_COMPLETION),
    "EmbeddingRequest": (EmbeddingRequest, UNSUPPORTED_EMBEDDING),
    "TokenizeRequest": (TokenizeRequest, ()),
    "DetokenizeRequest": (DetokenizeRequest, ()),
    "ResponsesRequest": (ResponsesRequest, UNSUPPORTED_RESPONSES),
    "AnthropicMessagesRequest": (MessagesRequest, UNSUPPORTED_MESSAGES),
}
# Interface of upstream that plugins and routers are written against -> the class that has it here.
INTERFACES: dict[str, type] = {
    "HiCacheStorage": hicache_storage.HiCacheStorage,
    "HiCacheStorageConfig": hicache_storage.HiCacheStorageConfig,
    "HiCacheStorageExtraInfo": hicache_storage.HiCacheStorageExtraInfo,
    "PoolName": hicache_storage.PoolName,
    "PoolHitPolicy": hicache_storage.PoolHitPolicy,
    "PoolTransfer": hicache_storage.PoolTransfer,
    "PoolTransferResult": hicache_storage.PoolTransferResult,
    "HostKVCache": HostKVCache,
    "EventBatch": kv_events.KVEventBatch,
    "BlockStored": kv_events.BlockStored,
    "BlockRemoved": kv_events.BlockRemoved,
    "AllBlocksCleared": kv_events.AllBlocksCleared,
    "KVEventsConfig": kv_events.KVEventsConfig,
}


@functools.cache
def our_flags() -> Mapping[str, tuple[str, Collection[str]]]:
    """Flag or alias -> its default as a text, and its choices. Without the hidden negations of switches."""
    fields = {field.name: field for field in dataclasses.fields(ServerArgs)}
    found: dict[str, tuple[str, Collection[str]]] = {}
    for action in make_parser()._actions:
        field = fields.get(action.dest)
        default = "" if field is None or field.default is None else str(field.default)
        for flag in action.option_strings:
            if flag.startswith("--") and not flag.startswith("--no-"):
                found[flag] = default, tuple(action.choices or ())
    return found


@functools.cache
def our_endpoints() -> Mapping[str, Collection[str]]:
    """Path -> methods."""
    app = make_app(ServerArgs(model_path="m"), cast(Any, None), {})
    found: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute | Route):
            found.setdefault(route.path, set()).update(route.methods or ())
    return found


def our_files() -> list[str]:
    """Python files of the package, relative to it."""
    folder = Path(sglang.__file__ or "").parent
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


@functools.cache
def our_metrics() -> frozenset[str]:
    """Without the prefix, and without the suffix of counters."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (metrics_collector, http_metrics))
    names = set(re.findall(r'"sglang:(\w+)"', source))
    names |= {entry[0] for entry in (*metrics_collector._GAUGES, *metrics_collector._COUNTERS)}
    names |= {f"hicache_{entry[0]}" for entry in metrics_collector._PROXY}
    names |= set(re.findall(r'(?:_counter|_histogram|gauge)\(\s*"(\w+)"', source))
    names |= {"token_usage", "full_token_usage", "hicache_peer_copies_bytes", "hicache_peer_copies_refused"}
    return frozenset(names)


@functools.cache
def our_members(interface: str) -> Mapping[str, tuple[str, ...] | None]:
    """Public member -> a method's parameters, None for what is no method."""
    owner = INTERFACES[interface]
    if issubclass(owner, enum.Enum):
        return dict.fromkeys(owner.__members__)
    names = {name for name in dir(owner) if not name.startswith("_")}
    names |= {name for each in owner.__mro__ for name in inspect.get_annotations(each)}
    names |= _assigned_by(owner)
    found: dict[str, tuple[str, ...] | None] = {}
    for name in sorted(name for name in names if not name.startswith("_")):
        member = inspect.getattr_static(owner, name, None)
        found[name] = tuple(inspect.signature(member).parameters) if inspect.isfunction(member) else None
    return found


def _assigned_by(owner: type) -> set[str]:
    """Fields that its methods write."""
    return {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner))))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
