"""`GET /hicache`: the page that shows `GET /hicache/state`, live. Owns the file's bytes and its content policy.

The page holds no data and is served without a key. Its policy allows exactly the script and the style that are in the
file, and requests to this server. Text of the state can therefore neither run nor be sent to another server.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi.responses import Response

_FILE = Path(__file__).with_name("hicache_page.html")


@functools.cache
def _page() -> tuple[bytes, str]:
    """The file and its content security policy."""
    text = _FILE.read_text(encoding="utf-8")

    def hash_of(tag: str) -> str:
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {hash_of('script')}; style-src {hash_of('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def hicache_page() -> Response:
    body, policy = _page()
    return Response(
        body,
        media_type="text/html; charset=utf-8",
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )
