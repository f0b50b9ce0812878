"""What an administrator alone may do is listed twice, as routes and as paths that keys guard: the lists agree."""

from __future__ import annotations

from unittest.mock import Mock

from fastapi.routing import APIRoute

from sglang.srt.entrypoints import auth
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.server_args import ServerArgs

# A client may end its own requests, and read which tiers are used.
OF_CLIENTS = {"/abort_request", "/hicache/tiers"}


def test_every_route_of_administration_needs_the_administrators_key() -> None:
    app = make_app(ServerArgs(model_path="embedded"), Mock(), {})
    administration = {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "_add_administration" in route.endpoint.__qualname__
    }
    guarded = {*auth._ADMIN, auth._ADMIN_BELOW + "{tier}"}
    assert administration - OF_CLIENTS == guarded, "add the new path to _ADMIN in entrypoints/auth.py"
