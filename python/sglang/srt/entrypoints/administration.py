"""Routes that change the server, or what other users have cached. Owns nothing.

What may be asked for, and what stands in the way, is decided by the scheduler (managers/cache_admin.py and
storage_admin.py).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from sglang.srt.entrypoints.audit import shown_salt
from sglang.srt.entrypoints.auth import require_a_key, require_admin
from sglang.srt.entrypoints.openai.chat_messages import template_messages
from sglang.srt.entrypoints.request_bodies import parsed
from sglang.srt.entrypoints.request_fields import check_name, namespace
from sglang.srt.entrypoints.streams import unless_disconnected
from sglang.srt.managers.io_struct import ControlReqOutput
from sglang.srt.managers.tokenizer_manager import GenerateRequest, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError

MAX_WARMED = 1024
# Of a limit or a threshold. Messages to the scheduler have integers of 64 bits.
MAX_TOKENS = 1 << 62


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = False


class AttachStorageRequest(msgspec.Struct, frozen=True, kw_only=True):
    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None


class _Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A field that is not known is refused: what it asks for would be left out of a change."""


class SwitchTierRequest(_Change, frozen=True, kw_only=True):
    reads: bool | None = None
    writes: bool | None = None


class PoliciesRequest(_Change, frozen=True, kw_only=True):
    """By the names of the flags; what is left out stays."""

    schedule_policy: str | None = None
    radix_eviction_policy: str | None = None
    hicache_write_policy: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_load_ratio: float | Literal["auto"] | None = None
    hicache_deferral_threshold: int | None = None
    hicache_bubble_filling: bool | Literal["on", "off", "decode"] | None = None
    hicache_load_or_recompute: bool | Literal["on", "off"] | None = None


class Prefix(_Change, frozen=True, kw_only=True):
    """The beginning of prompts: one of the three."""

    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class RetainRequest(Prefix, frozen=True, kw_only=True):
    ttl_s: float
    cache_salt: str | None = None
    extra_key: str | None = None


class LabelRequest(Prefix, frozen=True, kw_only=True):
    cache_salt: str | None = None
    extra_key: str | None = None


class WarmRequest(_Change, frozen=True, kw_only=True):
    prompts: list[str | list[int] | Prefix]
    cache_salt: str | None = None
    extra_key: str | None = None


class EraseRequest(_Change, frozen=True, kw_only=True):
    cache_salt: str
    abort_requests: bool = False


class QuotaRequest(_Change, frozen=True, kw_only=True):
    """tokens: by tier; empty for no quota, None to look only."""

    cache_salt: str
    tokens: dict[str, int] | None = None


def add_administration(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    _add_cache(app, manager)
    _add_tiers(app, args, manager)
    _add_policies(app, args, manager)
    _add_prefixes(app, args, manager)
    _add_tenants(app, args, manager)

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        req = await parsed(request, args, AbortRequest)
        if req.abort_all:
            request.state.audit = "all requests"
            require_admin(request, args)
        elif not req.rid:
            raise RequestError("give the rid of a request, or abort_all", param="rid")
        manager.abort(None if req.abort_all else req.rid)
        return Response()


def _add_cache(app: FastAPI, manager: TokenizerManager) -> None:
    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        timeout_s = _timeout_s(request.query_params.get("timeout", "0"))
        result = await unless_disconnected(request.receive, manager.flush_cache(timeout_s))
        return Response(status_code=499) if result is None else _done(result, "Cache flushed.")

    @app.get("/hicache/sample")
    async def hicache_sample() -> Response:
        return Response(msgspec.json.encode(manager.prefixes.state()), media_type="application/json")


def _add_tiers(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    @app.put("/hicache/storage-backend")
    async def attach_hicache_storage_backend(request: Request) -> Response:
        require_a_key(args)
        req = await parsed(request, args, AttachStorageRequest)
        request.state.audit = req.hicache_storage_backend
        result = await manager.control.attach_hicache_storage(
            req.hicache_storage_backend,
            req.hicache_storage_backend_extra_config_json or "",
            req.hicache_storage_prefetch_policy or args.hicache_storage_prefetch_policy,
            req.hicache_write_policy or args.hicache_write_policy,
        )
        return _done(result, "HiCache storage backend attached.")

    @app.delete("/hicache/storage-backend")
    async def detach_hicache_storage_backend() -> Response:
        require_a_key(args)
        return _done(await manager.control.detach_hicache_storage(), "HiCache storage backend detached.")

    @app.post("/hicache/storage-backend/clear")
    async def clear_hicache_storage_backend() -> Response:
        require_a_key(args)
        result = await manager.control.clear_hicache_storage()
        # A result: there is something, and it was not cleared.
        return _done(result, "HiCache storage backend cleared.", 409 if result.result else 400)

    @app.get("/hicache/storage-backend")
    async def hicache_storage_backend() -> dict[str, Any]:
        storage = (await manager.get_internal_state())["storage"] or {}
        return {
            "hicache_storage_backend": storage.get("backend"),
            "hicache_storage_prefetch_policy": storage.get("prefetch_policy"),
            "hicache_write_policy": storage.get("write_policy", args.hicache_write_policy),
        }

    @app.get("/hicache/tiers")
    async def hicache_tiers() -> dict[str, Any]:
        switches: dict[str, Any] = (await manager.get_internal_state())["switches"]
        return switches

    @app.put("/hicache/tiers/{tier}")
    async def switch_hicache_tier(tier: str, request: Request) -> Response:
        require_a_key(args)
        req = await parsed(request, args, SwitchTierRequest)
        if req.reads is None and req.writes is None:
            raise RequestError('give "reads" or "writes", each true or false', param="reads")
        request.state.audit = ", ".join(f"{k} {v}" for k, v in msgspec.structs.asdict(req).items() if v is not None)
        result = await manager.control.switch_tier(tier, req.reads, req.writes)
        return _done(result, f"The tier {tier} is switched.")


def _add_policies(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    # What a switch is if it is not off.
    on = {
        "hicache_bubble_filling": "decode" if args.hicache_bubble_filling == "decode" else "on",
        "hicache_load_or_recompute": "on",
    }

    async def policies() -> dict[str, Any]:
        """Under the names and with the values of flags."""
        found: dict[str, Any] = (await manager.get_internal_state())["admin"]["policies"]
        found |= {name: value if found[name] else "off" for name, value in on.items()}
        return found

    @app.get("/hicache/policies")
    async def hicache_policies() -> dict[str, Any]:
        return await policies()

    @app.put("/hicache/policies")
    async def set_hicache_policies(request: Request) -> Response:
        require_a_key(args)
        req = await parsed(request, args, PoliciesRequest)
        wanted = {name: value for name, value in msgspec.structs.asdict(req).items() if value is not None}
        if not wanted:
            raise RequestError(f"name a policy: one of {', '.join(PoliciesRequest.__struct_fields__)}")
        for name in ("hicache_load_ratio", "hicache_deferral_threshold"):
            if isinstance(value := wanted.get(name), int | float) and not 0 <= value <= MAX_TOKENS:
                raise RequestError(f"{name} must be a number from 0 to {MAX_TOKENS}", param=name)
        for name, value_on in on.items():
            if isinstance(value := wanted.get(name), str):
                if value not in (value_on, "off"):
                    raise RequestError(f"{name} is {value_on} or off here: start the server with {value}", param=name)
                wanted[name] = value != "off"
        request.state.audit = ", ".join(f"{name} {value}" for name, value in wanted.items())
        result = await manager.control.set_policies(wanted)
        return JSONResponse(await policies()) if result.success else _done(result, "")


def _add_prefixes(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    @app.get("/hicache/retention")
    async def hicache_retention() -> dict[str, Any]:
        return {"prefixes": (await manager.get_internal_state())["admin"]["retention"]}

    @app.put("/hicache/retention/{name:path}")
    async def retain_hicache_prefix(name: str, request: Request) -> Response:
        require_a_key(args)
        _check_prefix_name(name)
        req = await parsed(request, args, RetainRequest)
        if not req.ttl_s > 0:
            raise RequestError(
                "ttl_s must be above 0: send DELETE to this path to keep the prefix no longer", param="ttl_s"
            )
        where = namespace(req.cache_salt, req.extra_key)
        ids = await _ids_of(req, where, manager)
        request.state.audit = f"{len(ids)} tokens for {req.ttl_s:g} s, {shown_salt(req.cache_salt)}"
        result = await manager.control.retain_prefix(name, where, ids, req.ttl_s)
        return _done(result, f"{len(ids)} tokens are kept for {req.ttl_s:g} s.")

    @app.delete("/hicache/retention/{name:path}")
    async def release_hicache_prefix(name: str) -> Response:
        require_a_key(args)
        return _done(await manager.control.retain_prefix(name, "", (), 0.0), f"{name} is kept no longer.", 404)

    @app.get("/hicache/labels")
    async def hicache_labels() -> dict[str, Any]:
        return {"labels": (await manager.get_internal_state())["admin"]["labels"]}

    @app.put("/hicache/labels/{name:path}")
    async def label_hicache_prefix(name: str, request: Request) -> Response:
        require_a_key(args)
        _check_prefix_name(name)
        req = await parsed(request, args, LabelRequest)
        where = namespace(req.cache_salt, req.extra_key)
        ids = await _ids_of(req, where, manager)
        request.state.audit = f"{len(ids)} tokens, {shown_salt(req.cache_salt)}"
        return _done(
            await manager.control.label_prefix(name, where, ids), f"{len(ids)} tokens have the label {name}."
        )

    @app.delete("/hicache/labels/{name:path}")
    async def unlabel_hicache_prefix(name: str) -> Response:
        require_a_key(args)
        result = await manager.control.label_prefix(name, "", ())
        return _done(result, f"No prefix has the label {name} any more.", 404)

    @app.post("/hicache/warm")
    async def warm_hicache(request: Request) -> Response:
        require_a_key(args)
        req = await parsed(request, args, WarmRequest)
        if not 0 < len(req.prompts) <= MAX_WARMED:
            raise RequestError(f"give 1 to {MAX_WARMED} prompts, not {len(req.prompts)}", param="prompts")
        where = namespace(req.cache_salt, req.extra_key)
        request.state.audit = f"{len(req.prompts)} prompts, {shown_salt(req.cache_salt)}"
        found = await unless_disconnected(request.receive, _warm(req, where, manager))
        return Response(status_code=499) if found is None else JSONResponse({"prompts": found})


def _add_tenants(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    @app.post("/hicache/erase")
    async def erase_hicache_salt(request: Request) -> Response:
        require_a_key(args)
        req = await parsed(request, args, EraseRequest)
        request.state.audit = shown_salt(req.cache_salt) + (", aborting requests" if req.abort_requests else "")
        _check_salt(req.cache_salt)
        return _result(await manager.control.erase_salt(req.cache_salt, req.abort_requests))

    @app.put("/hicache/quotas")
    async def set_hicache_quota(request: Request) -> Response:
        require_a_key(args)
        req = await parsed(request, args, QuotaRequest)
        limits = "looked at" if req.tokens is None else ", ".join(f"{k} {v}" for k, v in req.tokens.items()) or "none"
        request.state.audit = f"{shown_salt(req.cache_salt)}: {limits}"
        _check_salt(req.cache_salt)
        if req.tokens is not None and not all(0 <= limit <= MAX_TOKENS for limit in req.tokens.values()):
            raise RequestError(f"a quota is 0 to {MAX_TOKENS} tokens: leave a tier out for no limit", param="tokens")
        return _result(await manager.control.set_quota(req.cache_salt, req.tokens))


def _timeout_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RequestError(f"timeout is {text[:40]!r}, but it must be a number of seconds from 0", param="timeout")
    return seconds


def _check_prefix_name(name: str) -> None:
    check_name(name, "name")
    if not name.isprintable():
        raise RequestError(f"{name!r} is no name for a prefix: it holds characters that are not shown", param="name")
    # Clients resolve these dots, so that the prefix could not be released by its name.
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise RequestError(f"{name!r} is no name for a prefix: no part of it is empty, . or ..", param="name")


def _check_salt(salt: str) -> None:
    check_name(salt, "cache_salt")
    if not salt:
        raise RequestError("cache_salt must not be empty: what has none is shared by all", param="cache_salt")


async def _ids_of(prefix: Prefix, where: str, manager: TokenizerManager) -> list[int]:
    """The token ids of a prefix in a namespace."""
    prompt, is_chat = await _prompt_of(prefix, manager)
    ids: list[int] = (await manager.prompt_ids(prompt, add_special_tokens=not is_chat, namespace=where)).tolist()
    return ids


async def _prompt_of(prefix: Prefix, manager: TokenizerManager) -> tuple[str | list[int], bool]:
    """The prompt, and whether it was a conversation, whose template has all special tokens."""
    given = [each for each in (prefix.text, prefix.input_ids, prefix.messages) if each is not None]
    if len(given) != 1:
        raise RequestError("give one of text, input_ids and messages", param="text")
    if prefix.messages is not None:
        messages = template_messages(prefix.messages, manager.chat_format)
        return await manager.render_chat(messages, {}, continue_final=False), True
    return prefix.text if prefix.text is not None else prefix.input_ids or [], False


async def _warm(req: WarmRequest, where: str, manager: TokenizerManager) -> list[dict[str, int]]:
    """Compute what the cache lacks of the prompts, one after another, so that other requests go on beside them."""
    found = []
    for each in req.prompts:
        prompt, is_chat = await _prompt_of(each, manager) if isinstance(each, Prefix) else (each, False)
        warming = GenerateRequest(
            prompt=prompt,
            params=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            add_special_tokens=not is_chat,
            extra_key=where,
        )
        async for chunk in manager.generate(warming):
            found.append({"prompt_tokens": chunk.prompt_tokens, "cached_tokens": chunk.cached_tokens})
    return found


def _done(result: ControlReqOutput, what: str, failure: int = 400) -> Response:
    """failure: the status if it was not done."""
    if not result.success:
        raise RequestError(result.message, failure)
    return PlainTextResponse(what + "\n")


def _result(result: ControlReqOutput) -> Response:
    if not result.success:
        error = RequestError(result.message, 409 if result.result else 400)
        return JSONResponse({**error.body(), **result.result}, error.status_code)
    return JSONResponse(result.result)
