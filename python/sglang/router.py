"""`python -m sglang.router --worker-urls URL URL …`: one address in front of several servers.

A request goes to a server of the model that it names. Of several such servers, the one with the least demand gets it.
The router owns its picture of each server. It never changes a byte of a request's or a reply's body, and keeps none.

    every CHECK_INTERVAL_S: /health, /v1/models, /hicache/state ──► up or not, its models, tokens queued and running
    a request ──► the servers of its model that are up, least demand first ──► the first that takes it ──► relayed
    an abort  ──► all servers ──► one reply

A server's HTTP process answers /health by itself. /hicache/state goes through the scheduler and the detokenizer, and
is late where one of them hangs.

A server that refuses the connection, or answers 503 because it drains or its queue is full, has not begun the
request. The next server is asked. Any other failure is passed on to the client, because the request may have been
carried out.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.anthropic.serving import ANTHROPIC_STREAM
from sglang.srt.entrypoints.auth import require
from sglang.srt.entrypoints.http_limits import KEEP_ALIVE_S, Front, LimitedProtocol
from sglang.srt.entrypoints.http_routes import ANY_MODEL, PrintablePaths, add_errors
from sglang.srt.entrypoints.http_server import DRAIN_TIMEOUT_S, HttpServer, allow_connections, bind, listen, url
from sglang.srt.entrypoints.missing_endpoints import missing_endpoint
from sglang.srt.entrypoints.openai.serving_responses import RESPONSES_STREAM
from sglang.srt.entrypoints.request_fields import decode_body
from sglang.srt.entrypoints.request_scope import REQUEST_ID_HEADER, RequestScope
from sglang.srt.entrypoints.streams import OPENAI_STREAM, unless_disconnected
from sglang.srt.server_args import OneSentenceParser
from sglang.srt.utils.api_key import KEY_RULE, is_key
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.log import REQUEST_ID, configure_logging

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 5.0
# A busy machine may be late now and then.
MAX_MISSES = 3
# A scheduler answers between two steps, and no step takes this many looks, some two minutes.
MAX_STEP_MISSES = 20
_FORWARDED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/generate", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    *("/parse_function_call", "/separate_reasoning"),
)
# How an error ends a stream; OPENAI_STREAM for other paths.
_STREAM_FORMS = {"/v1/responses": RESPONSES_STREAM, "/v1/messages": ANTHROPIC_STREAM}
# Estimates the length of a prompt that is not tokenized yet.
_BYTES_PER_TOKEN = 4
# Headers of one connection, not of a message (RFC 9110, section 7.6.1).
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
# Headers that the client library sets itself, because it has the whole body; and the id, which may be drawn here.
_ID = REQUEST_ID_HEADER.encode()
_SET_ANEW = {b"host", b"content-length", b"expect", _ID}

logger = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Card:
    """A model's entry in a server's /v1/models."""

    # The path of the model, if it is a text: the server takes it for a name of the model.
    root: object
    json: msgspec.Raw


@dataclass
class Backend:
    """What the router knows of a server."""

    # Without a user and a password, because clients and the log see it.
    url: str
    # The user and the password of the URL that was given.
    auth: tuple[str, str] | None = field(default=None, repr=False)
    # By model, as last seen.
    cards: dict[str, Card] = field(default_factory=dict)
    # Tokens that waited or ran on the server when it was last asked.
    queued_tokens: int = 0
    # Estimated tokens of the requests that the router sent and that are not answered to the end.
    sent_tokens: int = 0
    # Requests that the router sent there, ever.
    num_requests: int = 0
    # Why the server gets no requests; None while it is up.
    problem: str | None = "it has not answered yet"
    # Looks in a row that ran out of time.
    misses: int = 0
    # Whether the last of them reached the server, but not its scheduler.
    is_silent: bool = False

    @classmethod
    def at(cls, url: str) -> Backend:
        parsed = httpx.URL(url)
        auth = (parsed.username, parsed.password) if parsed.userinfo else None
        return cls(str(parsed.copy_with(username=None, password=None)).rstrip("/"), auth)

    def card_of(self, model: str) -> Card | None:
        """model: a name or a path."""
        return self.cards.get(model) or next((card for card in self.cards.values() if card.root == model), None)

    @property
    def demand(self) -> int:
        """In tokens. A request that was sent before the server was last asked counts twice, on every server."""
        return self.queued_tokens + self.sent_tokens

    @contextmanager
    def counted(self, num_tokens: int) -> Iterator[None]:
        self.num_requests += 1
        self.sent_tokens += num_tokens
        try:
            yield
        finally:
            self.sent_tokens -= num_tokens

    def set_problem(self, problem: str | None) -> None:
        if problem is not None and self.problem is None:
            logger.warning("%s is left out: %s", self.url, problem)
        elif problem is None and self.problem is not None:
            logger.info("%s is up and serves %s", self.url, ", ".join(map(repr, self.cards)))
        self.problem = problem
        self.misses = 0
        self.is_silent = False

    def note_miss(self, what: str, is_silent: bool) -> None:
        misses = self.misses + 1
        if misses >= MAX_MISSES:
            self.set_problem(f"{what}, {misses} times in a row")
        self.misses, self.is_silent = misses, is_silent

    @property
    def may_be_busy(self) -> bool:
        """Whether it may be in a long step, and not hang. Then it gets the requests that no other server takes."""
        return self.is_silent and self.misses < MAX_STEP_MISSES

    @property
    def is_usable(self) -> bool:
        return self.problem is None or self.may_be_busy

    def shown(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "is_healthy": self.problem is None,
            "problem": self.problem,
            "models": list(self.cards),
            "demand_tokens": self.demand,
            "requests": self.num_requests,
        }


class Router:
    """urls: the servers. api_key: the servers' key, for the router's own questions. The router asks its own clients
    for the same key where they ask for the same information. Clients' requests are passed on with the clients' own
    keys. Enter the router before `app` is served."""

    def __init__(self, urls: Sequence[str], api_key: str | None = None) -> None:
        self.backends = list({backend.url: backend for backend in map(Backend.at, urls)}.values())
        self._api_key = api_key
        # Servers close idle connections after KEEP_ALIVE_S. Half of that is the limit here, so that no closing
        # connection is used. Proxies of the environment are ignored.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CHECK_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S / 2),
            trust_env=False,
        )
        self._watch: list[asyncio.Task[None]] = []
        self.app = FastAPI(title="Router", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_middleware(PrintablePaths)
        for path in _FORWARDED:
            self.app.add_api_route(path, self._forward, methods=["POST"])
        self.app.add_api_route("/generate", self._forward, methods=["PUT"])
        self.app.add_api_route("/abort_request", self._abort, methods=["POST"])
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/models/{model:path}", self._model)
        self.app.add_api_route("/workers", self._workers)
        self.app.add_api_route("/health", self._health)
        add_errors(self.app, self._missing)

    async def __aenter__(self) -> Router:
        await asyncio.gather(*(self.check(backend) for backend in self.backends))
        self._watch = [asyncio.create_task(self._check_forever(backend)) for backend in self.backends]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watch:
            task.cancel()
        await asyncio.gather(*self._watch, return_exceptions=True)
        await self._client.aclose()

    # -- servers ------------------------------------------------------------------------------------------------

    async def _check_forever(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check(backend)

    async def check(self, backend: Backend) -> None:
        """Ask a server for its health, models and demand."""
        reached = False
        try:
            health = await self._ask(backend, "/health")
            if health.status_code != 200:
                return backend.set_problem(f"/health answers with status {health.status_code}")
            models = await self._ask(backend, "/v1/models")
            if models.status_code == 401:
                return backend.set_problem("it wants its key: start the router with --api-key")
            backend.cards = _read_cards(models)
            reached = True
            state = await self._ask(backend, "/hicache/state")
            if state.status_code == 503:
                return backend.note_miss("/hicache/state answers with status 503", is_silent=True)
            backend.queued_tokens = _queued_tokens(state)
            backend.set_problem(None)
        except (httpx.TimeoutException, TimeoutError):
            who = "its scheduler or detokenizer" if reached else "it"
            backend.note_miss(f"{who} has not answered within {CHECK_TIMEOUT_S:g} s", is_silent=reached)
        except httpx.HTTPError as error:
            backend.set_problem(_unreachable(error))
        except RequestError:
            backend.set_problem("its /v1/models does not answer as an OpenAI-compatible server does")
        except Exception as error:
            # The next check has to come in any case: without it the server would stay as it is for ever.
            problem = "its check failed: the router's log has the reason"
            if backend.problem != problem:
                logger.warning("the check of %s failed", backend.url, exc_info=error)
            backend.set_problem(problem)

    async def _ask(self, backend: Backend, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        # The client's own limit is for each piece of an answer.
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await self._client.get(backend.url + path, headers=headers, auth=backend.auth)

    def _usable_servers(self, model: str | None) -> list[Backend]:
        """Servers of the model that are up. Where none is up, those that may be busy. model: as a server takes it, a
        name, a path or one of ANY_MODEL. Raises RequestError."""
        models = sorted({name for backend in self.backends for name in backend.cards})
        names = ", ".join(models)
        serving = self.backends
        if model and (model in models or model not in ANY_MODEL):
            # A name goes first: servers with different names may share a path.
            serving = [backend for backend in self.backends if model in backend.cards]
            serving = serving or [backend for backend in self.backends if backend.card_of(model)]
            # A server that has not listed its models yet may serve this one.
            serving += [backend for backend in self.backends if not backend.cards]
            if not serving:
                raise _unknown_model(model, names)
        elif len(models) > 1:
            raise RequestError(f"name a model; the models here are: {names}", param="model")
        found = [b for b in serving if b.problem is None] or [b for b in serving if b.may_be_busy]
        if not found:
            raise _none_usable(model, [f"{backend.url}: {backend.problem}" for backend in serving])
        return found

    # -- routes -------------------------------------------------------------------------------------------------

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        model = decode_body(body).get("model")
        if not isinstance(model, str | None):
            raise RequestError("model must be a text", param="model")
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        # The one with the least demand first, those that are late with an answer last.
        candidates = sorted(self._usable_servers(model), key=lambda b: (b.misses > 0, b.demand))
        refusals = []
        for backend in candidates:
            asked = _copy(request, backend.url + target, body)
            async with AsyncExitStack() as stack:
                stack.enter_context(backend.counted(1 + len(body) // _BYTES_PER_TOKEN))
                try:
                    reply = await unless_disconnected(
                        request.receive, self._client.send(asked, stream=True, auth=backend.auth)
                    )
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    backend.set_problem(_unreachable(error))
                    refusals.append(f"{backend.url}: {backend.problem}")
                    continue
                except httpx.HTTPError as error:
                    logger.warning("%s took a request and broke off: %r", backend.url, error)
                    raise RequestError("the server that took the request has broken off", 502) from error
                if reply is None:
                    return Response(status_code=499)
                stack.push_async_callback(reply.aclose)
                if reply.status_code == 503 and backend is not candidates[-1]:
                    refusals.append(f"{backend.url}: it answers with status 503")
                    continue
                return _Relay(reply, stack.pop_all())
        raise _none_usable(model, refusals)

    async def _abort(self, request: Request) -> Response:
        """Ask all servers, because the router does not know which one has the request. Those that are left out may
        have it still."""
        body = await request.body()

        async def ask(backend: Backend) -> httpx.Response | httpx.HTTPError:
            asked = _copy(request, backend.url + request.url.path, body)
            asked.extensions["timeout"] = httpx.Timeout(CHECK_TIMEOUT_S).as_dict()
            try:
                return await self._client.send(asked, auth=backend.auth)
            except httpx.HTTPError as error:
                return error

        found = await asyncio.gather(*map(ask, self.backends))
        # Where the connection is refused, no server runs.
        unknown = [
            backend.url
            for backend, reply in zip(self.backends, found)
            if isinstance(reply, httpx.HTTPError) and not isinstance(reply, httpx.ConnectError)
        ]
        if unknown:
            where = ", ".join(unknown)
            raise RequestError(f"{where} did not answer: the request may go on there; try again later", 502)
        replies = [reply for reply in found if isinstance(reply, httpx.Response)]
        if not replies:
            raise _none_usable(None, [f"{backend.url}: it cannot be reached" for backend in self.backends])
        # Servers may have different keys: what one has done counts.
        best = min(replies, key=lambda reply: reply.status_code)
        return Response(best.content, best.status_code, media_type=best.headers.get("content-type"))

    def _missing(self, path: str) -> str:
        return missing_endpoint(path) or f"the router does not pass on {path}: ask a server, /workers lists them"

    async def _models(self, request: Request) -> Response:
        require(request, self._api_key)
        up = [backend for backend in reversed(self.backends) if backend.is_usable]
        cards = {name: card.json for backend in up for name, card in backend.cards.items()}
        return _json_response({"object": "list", "data": [cards[name] for name in sorted(cards)]})

    async def _model(self, request: Request, model: str) -> Response:
        require(request, self._api_key)
        first = self._usable_servers(model)[0]
        return _json_response((first.card_of(model) or next(iter(first.cards.values()))).json)

    async def _workers(self, request: Request) -> Response:
        require(request, self._api_key)
        return JSONResponse({"workers": [backend.shown() for backend in self.backends]})

    async def _health(self) -> Response:
        return Response(status_code=200 if any(backend.is_usable for backend in self.backends) else 503)


class _Relay(Response):
    """A server's reply, relayed as it comes. stack: closed when the reply ends, for any reason."""

    def __init__(self, reply: httpx.Response, stack: AsyncExitStack) -> None:
        self._reply = reply
        self._stack = stack
        self.status_code = reply.status_code
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        reply = self._reply
        headers = _passed_on(reply.headers.raw, set())
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        num_events, last = 0, b""
        try:
            async for data in reply.aiter_raw():
                # An empty line ends an event, and may come in two pieces.
                num_events, last = num_events + (last + data).count(b"\n\n"), data[-1:]
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except httpx.HTTPError as error:
            logger.warning("%s broke off a reply: %r", reply.request.url, error)
            if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                return  # not ended: the connection is closed, and the client sees that something is missing
            form = _STREAM_FORMS.get(reply.request.url.path, OPENAI_STREAM)
            event = form.error(RequestError("the server that answered has broken off", 502))
            if "sequence_number" in event:
                event["sequence_number"] = num_events
            # In an event, perhaps.
            broken = b"\n\n" + form.encode(event) + form.end
            await send({"type": "http.response.body", "body": broken, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _unreachable(error: httpx.HTTPError) -> str:
    why = "its reply is cut off or not HTTP"
    if isinstance(error, httpx.ConnectTimeout):
        why = f"no connection within {CHECK_TIMEOUT_S:g} s"
    elif isinstance(error, httpx.ConnectError):
        why = str(error)
    return f"it cannot be reached ({why})"


def _unknown_model(model: str, names: str) -> RequestError:
    return RequestError(f"the model {model!r} is not served here; the models here are: {names}", 404, param="model")


def _none_usable(model: str | None, problems: Sequence[str]) -> RequestError:
    what = f"no server of the model {model!r}" if model else "no server"
    return RequestError(f"{what} can be used ({'; '.join(problems)}): start a server, or try again later", 503)


def _copy(request: Request, url: str, body: bytes) -> httpx.Request:
    """The request as a server gets it."""
    headers = [*_passed_on(request.headers.raw, _SET_ANEW), (_ID, REQUEST_ID.get().encode())]
    return httpx.Request(request.method, url, headers=headers, content=body)


def _passed_on(headers: Headers, also_dropped: set[bytes]) -> Headers:
    named = {
        name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")
    }
    dropped = _HOP_BY_HOP | also_dropped | named
    return [(key.lower(), value) for key, value in headers if key.lower() not in dropped]


def _read_cards(reply: httpx.Response) -> dict[str, Card]:
    """Of the models whose names are texts. Raises RequestError if there are none."""
    cards = decode_body(reply.content).get("data")
    found = {
        # Encoded here: what is nested too deeply is noticed before a client asks.
        card["id"]: Card(card.get("root"), msgspec.Raw(msgspec.json.encode(card)))
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict) and isinstance(card.get("id"), str) and card["id"]
    }
    if not found:
        raise RequestError("no models")
    return found


def _queued_tokens(reply: httpx.Response) -> int:
    """0 of a server that does not tell."""
    try:
        state = decode_body(reply.content)
        used, queued = state["tiers"]["device"]["used_tokens"], state["transient"]["in_queue_tokens"]
    except (RequestError, LookupError, TypeError):
        return 0
    return used + queued if isinstance(used, int) and isinstance(queued, int) else 0


def _json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def make_server(router: Router) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            RequestScope(Front(router.app)),
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(DRAIN_TIMEOUT_S),
        )
    )


async def serve(host: str, port: int, router: Router) -> None:
    """Until SIGTERM or SIGINT; running requests get DRAIN_TIMEOUT_S to finish, or until the second one. Raises
    StartupError."""
    sock, server = bind(host, port), make_server(router)

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with router:
        listen(sock, host, port)
        up = sum(backend.problem is None for backend in router.backends)
        logger.info("The router is ready at %s: %d of %d servers are up", url(host, port), up, len(router.backends))
        await server.serve(sockets=[sock])


def _is_server_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
        url.host.encode("idna")  # as the resolver does
    except (httpx.InvalidURL, UnicodeError):
        return False
    # A path with @ is the rest of a password with a slash.
    has_more = bool(url.query or url.fragment) or "@" in url.path
    port = 80 if url.port is None else url.port
    return url.scheme in ("http", "https") and url.host != "" and 1 <= port <= 65535 and not has_more


def main() -> None:
    parser = OneSentenceParser(prog="python -m sglang.router", description="One address for several servers.")
    parser.add_argument("--worker-urls", nargs="+", required=True, metavar="URL", help="servers, as http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on")
    parser.add_argument("--api-key", help="the servers' key, where they have one")
    args = parser.parse_args()
    if not 1 <= args.port <= 65535:
        parser.error(f"--port is {args.port}, but it must be from 1 to 65535")
    if args.api_key is not None and not is_key(args.api_key):
        parser.error(f"--api-key must be {KEY_RULE}")
    for each in args.worker_urls:
        if not _is_server_url(each):
            shown = each.rpartition("@")[2]  # without a password
            parser.error(f"{shown!r} is no URL of a server: write it as http://HOST:PORT")
    configure_logging("info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request otherwise
    allow_connections()
    try:
        asyncio.run(serve(args.host, args.port, Router(args.worker_urls, args.api_key)))
    except StartupError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
