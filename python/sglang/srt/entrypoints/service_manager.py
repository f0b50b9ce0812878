"""Tells a service manager what state the server is in, by systemd's protocol sd_notify(3). Stateless.

The manager names its socket in NOTIFY_SOCKET. Without it nothing is done.
"""

from __future__ import annotations

import logging
import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"

logger = logging.getLogger(__name__)


def notify(state: str, status: str) -> None:
    """status: one line that the manager shows. A manager that cannot be told is logged, and stops no server."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name without a file, which begins with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            # A full socket is no reason to keep clients waiting.
            sock.setblocking(False)
            sock.sendto(f"{state}\nSTATUS={status}\n".encode(), address)
    except OSError as error:
        logger.warning("the service manager was not told %s: %s", state, error.strerror)
