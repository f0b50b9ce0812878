"""The bodies of requests as structs. Stateless."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from sglang.srt.entrypoints.request_fields import check_fields, convert, decode_body
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that was sent. A content type other than JSON is refused: a web page can make a browser send
    text to this server, but not JSON. A request without a content type is taken as JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"the body's content type is {kind!r}, but it must be application/json", 415)
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestError(f"the body's content encoding is {coding!r}: send it as it is", 415)
    return decode_body(await request.body())


async def parsed(
    request: Request,
    args: ServerArgs,
    kind: type[T],
    unsupported: Mapping[str, Sequence[Any]] = {},
    check: Callable[[dict[str, Any]], None] | None = None,
) -> T:
    """The body as a struct. check: raises RequestError before anything else looks at the body."""
    body = await body_of(request)
    if check is not None:
        check(body)
    request.state.warnings = check_fields(body, kind, unsupported, args.strict_fields)
    return convert(body, kind, unsupported)
