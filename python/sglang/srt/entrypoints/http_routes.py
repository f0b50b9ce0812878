"""The HTTP server's routes: which function answers which path. Owns nothing.

A reply that takes a while goes through streams.answer, which notices clients that leave.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import sglang
from sglang.srt.entrypoints.administration import add_administration
from sglang.srt.entrypoints.anthropic.protocol import UNSUPPORTED_MESSAGES, MessagesRequest
from sglang.srt.entrypoints.anthropic.serving import ANTHROPIC_STREAM, count_tokens, serve_messages
from sglang.srt.entrypoints.audit import AuditLog
from sglang.srt.entrypoints.auth import ApiKeyMiddleware
from sglang.srt.entrypoints.error_bodies import error_body
from sglang.srt.entrypoints.health_probe import wait_for_token
from sglang.srt.entrypoints.hicache_page import hicache_page
from sglang.srt.entrypoints.loads import check_loads_query, get_load, loads
from sglang.srt.entrypoints.missing_endpoints import missing_endpoint
from sglang.srt.entrypoints.native import GenerateReqInput, serve_generate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.responses_protocol import UNSUPPORTED_RESPONSES, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import serve_chat
from sglang.srt.entrypoints.openai.serving_completions import serve_completions
from sglang.srt.entrypoints.openai.serving_embeddings import EmbeddingRequest, serve_embeddings
from sglang.srt.entrypoints.openai.serving_responses import RESPONSES_STREAM, serve_responses
from sglang.srt.entrypoints.parsing import (
    ParseFunctionCallReq,
    SeparateReasoningReqInput,
    parse_function_call,
    separate_reasoning,
)
from sglang.srt.entrypoints.request_bodies import parsed
from sglang.srt.entrypoints.request_fields import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_EMBEDDING,
    UNSUPPORTED_GENERATE,
    check_prompts,
)
from sglang.srt.entrypoints.server_info import model_info, server_info
from sglang.srt.entrypoints.streams import answer, unless_disconnected
from sglang.srt.entrypoints.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)
Generation = TypeVar(
    "Generation", ChatCompletionRequest, CompletionRequest, GenerateReqInput, ResponsesRequest, MessagesRequest
)


def make_app(args: ServerArgs, manager: TokenizerManager, ready_info: dict[str, Any]) -> FastAPI:
    app = FastAPI(title="SGLang-compatible engine", version=sglang.__version__)
    app.add_middleware(PrintablePaths)
    app.add_middleware(WarningHeaders)
    if args.api_key is not None or args.admin_api_key is not None:
        app.add_middleware(ApiKeyMiddleware, args=args)
    app.add_middleware(AuditLog)
    _add_generation(app, args, manager)
    _add_tokenization(app, args, manager)
    _add_information(app, args, manager, ready_info)
    add_administration(app, args, manager)
    add_errors(app)
    return app


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# What clients name where there is nothing to choose. sglang-router and smg add the second where a client names none.
ANY_MODEL = ("default", "unknown")


def _check_model(args: ServerArgs, name: str | None) -> None:
    if name and name not in (args.model_name, args.model_path, *ANY_MODEL):
        raise RequestError(f"the model {name!r} is not served here, {args.model_name!r} is", 404, param="model")


async def _parsed_generation(
    request: Request,
    args: ServerArgs,
    kind: type[Generation],
    unsupported: Mapping[str, Sequence[Any]],
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Generation:
    """As `parsed`. The header x-session-id stands for the field session_id where the body has none."""
    req = await parsed(request, args, kind, unsupported, check)
    given = request.headers.get("x-session-id")
    if given and not req.session_id:
        return msgspec.structs.replace(req, session_id=given)
    return req


class PrintablePaths:
    """Refuses paths with control characters. Starlette's routes also match a path that ends with a line break, which
    is not the path that keys are asked for, and not the name of what is to be changed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _CONTROL.search(scope["path"]):
            await self._app(scope, receive, send)
            return
        shown = scope["path"].encode("unicode_escape").decode("ascii")[:200]
        error = RequestError(f"there is no path {shown} here: leave out the control characters, such as %0a", 404)
        await JSONResponse(error_body(scope["path"], error), status_code=404)(scope, receive, send)


class WarningHeaders:
    """Puts a request's warnings into the head of its reply, for a whole reply, a stream and an error alike."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})

        async def send_(message: Message) -> None:
            if message["type"] == "http.response.start" and (warnings := state.get("warnings")):
                headers = [(b"warning", warning_header(each).encode("ascii")) for each in warnings]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await self._app(scope, receive, send_)


def warning_header(text: str) -> str:
    """The header by which Kubernetes warns of unknown fields: RFC 7234's code 299 and a quoted text. text: printable
    ASCII."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 - "{quoted}"'


def _add_generation(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    def check(*names: str) -> Callable[[dict[str, Any]], None]:
        """Of the length alone, as the request's other fields are not read yet."""
        return lambda body: check_prompts(body, names, lambda n: manager.check_prompt_length(n, has_answer=False))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        req = await _parsed_generation(request, args, ChatCompletionRequest, UNSUPPORTED_CHAT)
        _check_model(args, req.model)
        return await answer(request.receive, serve_chat(req, manager, args.model_name), bool(req.stream))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        req = await _parsed_generation(request, args, ResponsesRequest, UNSUPPORTED_RESPONSES)
        _check_model(args, req.model)
        events = serve_responses(req, manager, args.model_name)
        return await answer(request.receive, events, bool(req.stream), RESPONSES_STREAM)

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        req = await _parsed_generation(request, args, MessagesRequest, UNSUPPORTED_MESSAGES)
        _check_model(args, req.model)
        events = serve_messages(req, manager, args.model_name)
        return await answer(request.receive, events, bool(req.stream), ANTHROPIC_STREAM)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens_(request: Request) -> Response:
        req = await parsed(request, args, MessagesRequest, UNSUPPORTED_MESSAGES)
        _check_model(args, req.model)
        found = await unless_disconnected(request.receive, count_tokens(req, manager))
        return Response(status_code=499) if found is None else JSONResponse(found)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        req = await _parsed_generation(request, args, CompletionRequest, UNSUPPORTED_COMPLETION, check("prompt"))
        _check_model(args, req.model)
        return await answer(request.receive, serve_completions(req, manager, args.model_name), bool(req.stream))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        req = await parsed(request, args, EmbeddingRequest, UNSUPPORTED_EMBEDDING, check("input"))
        _check_model(args, req.model)
        return await answer(request.receive, serve_embeddings(req, manager, args.model_name), stream=False)

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        req = await _parsed_generation(
            request, args, GenerateReqInput, UNSUPPORTED_GENERATE, check("text", "input_ids")
        )
        return await answer(request.receive, serve_generate(req, manager), bool(req.stream))


def _add_tokenization(app: FastAPI, args: ServerArgs, manager: TokenizerManager) -> None:
    async def reply(request: Request, work: Awaitable[bytes]) -> Response:
        data = await unless_disconnected(request.receive, work)
        return Response(status_code=499) if data is None else Response(data, media_type="application/json")

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize_(request: Request) -> Response:
        req = await parsed(request, args, TokenizeRequest)
        _check_model(args, req.model)
        return await reply(request, tokenize(req, manager))

    @app.post("/parse_function_call")
    async def parse_function_call_(request: Request) -> Response:
        req = await parsed(request, args, ParseFunctionCallReq)
        manager.check_answer_length(req.text)
        return JSONResponse(await manager.threads.run(parse_function_call, req, manager.chat_format))

    @app.post("/separate_reasoning")
    async def separate_reasoning_(request: Request) -> Response:
        req = await parsed(request, args, SeparateReasoningReqInput)
        manager.check_answer_length(req.text)
        return JSONResponse(await manager.threads.run(separate_reasoning, req, manager.chat_format))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize_(request: Request) -> Response:
        req = await parsed(request, args, DetokenizeRequest)
        _check_model(args, req.model)
        return await reply(request, detokenize(req, manager))


def _add_information(app: FastAPI, args: ServerArgs, manager: TokenizerManager, ready_info: dict[str, Any]) -> None:
    created = int(time.time())
    started = time.monotonic()

    def model_card() -> dict[str, Any]:
        return {
            "id": args.model_name,
            "object": "model",
            "created": created,
            "owned_by": "sglang",
            "root": args.model_path,
            "parent": None,
            "max_model_len": manager.context_length,
        }

    @app.get("/")
    async def about() -> dict[str, Any]:
        return {
            "name": app.title,
            "version": sglang.__version__,
            "model": args.model_name,
            "endpoints": sorted({route.path for route in app.routes if isinstance(route, APIRoute)}),
            "openapi": app.openapi_url,
            "docs": app.docs_url,
        }

    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if manager.is_ready else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        await wait_for_token(manager)
        return Response()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if not model:
            return await models()
        _check_model(args, model)
        return JSONResponse(model_card())

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info_() -> Response:
        return JSONResponse(model_info(args, ready_info, manager.context_length))

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info_() -> Response:
        info = server_info(args, ready_info, await manager.get_internal_state())
        info["uptime_seconds"] = time.monotonic() - started
        return Response(msgspec.json.encode(info), media_type="application/json")

    @app.get("/get_load")
    async def get_load_() -> list[dict[str, int]]:
        return get_load(await manager.get_internal_state())

    @app.get("/v1/loads")
    async def loads_(request: Request) -> dict[str, Any]:
        check_loads_query(request.query_params)
        return loads(await manager.get_internal_state(), args, ready_info, manager.metrics.cache_hit_rate)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await manager.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/hicache/state")
    async def hicache_state() -> Response:
        about = {"model_name": args.model_name, "uptime_seconds": round(time.monotonic() - started, 1)}
        state = about | await manager.get_internal_state()
        return Response(msgspec.json.encode(state), media_type="application/json")

    @app.get("/hicache/history")
    async def hicache_history(request: Request) -> Response:
        since = _seconds(request.query_params.get("since", "0"))
        return Response(msgspec.json.encode(manager.history.reply(since)), media_type="application/json")

    @app.get("/get_hicache_l3_cache_layout")
    async def get_hicache_l3_cache_layout() -> dict[str, Any]:
        """As upstream answers where a router cannot name the objects of storage by itself."""
        storage = (await manager.get_internal_state())["storage"] or {}
        return {
            "enabled": False,
            "backend": storage.get("backend"),
            "page_size": ready_info["page_size"],
            "hicache_object_layout": {"pools": []},
            "reason": "names of blocks are keyed, and their bytes opaque" if storage else "storage is not attached",
        }

    @app.get("/hicache")
    async def hicache() -> Response:
        return hicache_page()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise RequestError(f"since is {text!r}, but it must be a Unix time in seconds", param="since")
    return seconds


def add_errors(app: FastAPI, missing: Callable[[str], str | None] = missing_endpoint) -> None:
    """missing: the sentence for a path that is not here."""

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        body = error_body(request.url.path, error)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        sentence = missing(request.url.path) if error.status_code == 404 else None
        body = error_body(request.url.path, RequestError(sentence or str(error.detail), error.status_code))
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(request.url.path, RequestError("internal error", 500)), status_code=500)
