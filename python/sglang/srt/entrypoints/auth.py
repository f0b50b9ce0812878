"""API keys in front of the routes: which key which path needs. Stateless; knows routes by their paths alone.

    --api-key      guards every path but /health, /health_generate, /ping and /hicache, a page without data
    --admin-api-key  guards, in its place, the paths that change the server or other users' requests

With --api-key alone it opens those too; with --admin-api-key alone the other paths are open.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.error_bodies import error_body
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError

_OPEN = ("/health", "/health_generate", "/ping", "/hicache")
_ADMIN = "/flush_cache"
# Everything below this path but what is only read.
_ADMIN_BELOW = "/hicache/"
_READ_ONLY = ("/hicache/state", "/hicache/history", "/hicache/tiers", "/hicache/policies")


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, args: ServerArgs) -> None:
        self._app = app
        self._args = args

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            try:
                if is_admin_path(scope["path"]) and not (scope["path"] in _READ_ONLY and scope["method"] == "GET"):
                    require_admin(Request(scope), self._args)
                else:
                    require(Request(scope), self._args.api_key)
            except RequestError as error:
                response = JSONResponse(
                    error_body(scope["path"], error),
                    status_code=error.status_code,
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_admin_path(path: str) -> bool:
    return path == _ADMIN or path.startswith(_ADMIN_BELOW)


def require_admin(request: Request, args: ServerArgs) -> None:
    require(request, args.admin_api_key or args.api_key)


def require_a_key(args: ServerArgs) -> None:
    """For actions that must not be open to all: a storage plugin is code that this server runs, and what tenants have
    cached is theirs."""
    if not (args.admin_api_key or args.api_key):
        raise RequestError("this is done only on a server that has a key: start it with --admin-api-key", 400)


def require(request: Request, key: str | None) -> None:
    if not _has(request, key):
        raise RequestError("the Authorization header must be 'Bearer' and this server's key", 401)


def _has(request: Request, key: str | None) -> bool:
    if key is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if not given and (found := request.headers.get("x-api-key")):  # Anthropic's clients
        scheme, given = "bearer", found
    # Compared in constant time. The time of a refusal must not tell how much of the key was right.
    right = hmac.compare_digest(given.strip().encode(), key.encode())
    return right and scheme.lower() == "bearer"
