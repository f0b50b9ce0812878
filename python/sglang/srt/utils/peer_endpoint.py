"""Where a lender listens: at an address that only this machine can reach and, with ipc, only this user.

Owns the checks of `--peer-endpoint`. Opens no socket that it keeps.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat

from sglang.srt.utils import unix_sockets


class PeerError(Exception):
    """Peers cannot be used as they were set up; the message is a sentence with what to do about it."""


def check_endpoint(endpoint: str) -> None:
    """endpoint: tcp://127.0.0.1:5600, or ipc:///run/user/1000/kv/peers in a directory with mode 0700. Raises
    PeerError."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not (port.isdecimal() and int(port) < 1 << 16 and _is_loopback(host)):
            raise PeerError(f"--peer-endpoint {endpoint}: peers share memory, so only loopback: tcp://127.0.0.1:PORT")
    elif scheme == "ipc":
        _check_path(endpoint, rest)
    else:
        raise PeerError(f"--peer-endpoint {endpoint}: give tcp://127.0.0.1:PORT or ipc:///DIRECTORY/NAME")


def of_rank(endpoint: str, rank: int) -> str:
    """Where a rank listens: rank 0 at the endpoint itself, other ranks at the ports, or names, that follow it."""
    scheme, _, rest = endpoint.partition("://")
    if rank == 0 or not rest:
        return endpoint
    if scheme != "tcp":
        return f"{endpoint}.{rank}"
    host, _, port = rest.rpartition(":")
    return f"tcp://{host}:{int(port) + rank}" if port.isdecimal() else endpoint


def check_unused(endpoint: str) -> None:
    """Raises PeerError if another process listens at an ipc endpoint: ZeroMQ itself would take it away."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except OSError:
            return
    raise PeerError(f"--peer-endpoint {endpoint}: another worker listens there; give each its own")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _check_path(endpoint: str, path: str) -> None:
    directory = os.path.dirname(path)
    if not os.path.isabs(path) or not unix_sockets.fits(path):
        raise PeerError(
            f"--peer-endpoint {endpoint}: give an absolute path of at most {unix_sockets.MAX_PATH_BYTES} bytes"
        )
    try:
        found = os.stat(directory)
    except OSError as error:
        raise PeerError(f"--peer-endpoint {endpoint}: {error}; make it with mkdir -m 700 {directory}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PeerError(
            f"--peer-endpoint {endpoint}: others may enter {directory}; "
            "choose a directory of your own, made with mkdir -m 700"
        )
