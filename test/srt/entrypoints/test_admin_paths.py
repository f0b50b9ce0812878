"""What an administrator alone may do: routes and the paths that keys guard agree."""

from __future__ import annotations

from unittest.mock import Mock

from fastapi.routing import APIRoute

from sglang.srt.entrypoints import administration, auth
from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.server_args import ServerArgs

# A client may end its own requests.
OF_CLIENTS = {"/abort_request"}


def test_every_route_of_administration_needs_the_administrators_key() -> None:
    app = make_app(ServerArgs(model_path="embedded"), Mock(), {})
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    mine = [route for route in routes if route.endpoint.__module__ == administration.__name__]
    assert len(mine) > 10
    for route in mine:
        assert auth.is_admin_path(route.path) or route.path in OF_CLIENTS, "add the path to entrypoints/auth.py"
    guarded = {route.path for route in routes if auth.is_admin_path(route.path)}
    assert set(auth._READ_ONLY) <= guarded
