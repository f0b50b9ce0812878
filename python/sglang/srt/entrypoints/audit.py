"""`AuditLog`: a line of the log for each request that may change the server or other users' data.

Owns nothing. A route puts what it was asked for into `request.state.audit`. Neither prompts nor salts stand there: a
salt is a secret, and `shown_salt` names it so that only lines of one server can be compared.
"""

from __future__ import annotations

import hashlib
import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.auth import is_admin_path

logger = logging.getLogger("sglang.audit")
# Whatever --log-level is.
logger.setLevel(logging.WARNING)

_KEY = secrets.token_bytes(32)
# Characters of a line.
_MAX_SHOWN = 500


class AuditLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, status = scope.setdefault("state", {}), 0

        async def send_(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_)
        finally:
            path, method = scope["path"], scope["method"]
            changes = is_admin_path(path) and (method not in ("GET", "HEAD") or path == "/flush_cache")
            if changes or "audit" in state:
                host, port = scope.get("client") or ("?", 0)
                what = f" ({state['audit']})" if state.get("audit") else ""
                asked = _printable(f"{method} {path}{what}")
                logger.warning("AUDIT: %s from %s:%s: status %s", asked, host, port, status or "none")


def _printable(text: str) -> str:
    """One line of ASCII: a path holds what a client likes, and must not look like another line."""
    escaped = text.encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) <= _MAX_SHOWN else escaped[:_MAX_SHOWN] + "…"


def shown_salt(salt: str | None) -> str:
    """8 hex digits that stand for a salt as long as this process runs."""
    if not salt:
        return "no salt"
    return "salt " + hashlib.blake2b(salt.encode(errors="surrogatepass"), key=_KEY, digest_size=4).hexdigest()
