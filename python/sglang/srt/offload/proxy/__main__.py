"""The offload proxy, a process of its own beside the engine, one per host pool.

    python -m sglang.srt.offload.proxy --socket /run/user/1000/kv.sock --token-file token --store redis://10.0.0.2:6379
    python -m sglang.srt.offload.proxy --listen tcp://0.0.0.0:7070 --token-file token --store redis://10.0.0.2:6379

A server with --hicache-storage-backend remote starts one itself. A server with bluefield connects to a running one,
over its socket or from another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.proxy.server import ProxyServer
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.proxy_process import MIN_TOKEN_CHARS, STORE_VARIABLE, parse_tcp
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.utils.log import configure_logging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="where engines connect: a path, made with mode 0600")
    where.add_argument("--listen", help="where engines of other machines connect: tcp://address:port")
    where.add_argument("--fd", type=int, help="serve one engine over this connected socket, and end with it")
    parser.add_argument("--token-file", type=Path, help="a file with the token that engines must have")
    parser.add_argument(
        "--store",
        default=os.environ.get(STORE_VARIABLE, ""),
        help=f"URL of the store, redis://… or unix://…; better in {STORE_VARIABLE} if it has a password",
    )
    parser.add_argument(
        "--settings", default="{}", help="JSON: threads, cores, buffers, a profile (docs/guides/remote.md)"
    )
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args()
    configure_logging(args.log_level, "proxy")
    try:
        if not args.store:
            raise StoreError(
                f"no store is given: name its URL, redis://… or unix://…, in --store or {STORE_VARIABLE}"
            )
        settings = ProxySettings.from_config(_object(args.settings))
        address = StoreAddress.parse(args.store)
        token = _token(args.token_file) if args.token_file is not None else ""
        if args.fd is not None:
            # The engine drains first, then closes its end. If it is killed, the system closes its end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ProxyServer(settings, address, token).serve(socket.socket(fileno=args.fd))
            return
        if not token or (args.listen is not None and len(token) < MIN_TOKEN_CHARS):
            least = f" of at least {MIN_TOKEN_CHARS} characters" if args.listen is not None else ""
            flag = "--listen" if args.listen is not None else "--socket"
            raise StoreError(
                f"{flag} needs --token-file, with a token{least} in it: make one with openssl rand -hex 32"
            )
        if args.listen is not None:
            ProxyServer(settings, address, token).listen_tcp(parse_tcp(args.listen, "--listen"))
        else:
            ProxyServer(settings, address, token).listen(args.socket)
    except StoreError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise StoreError(f"--settings has to be a JSON object: {error}") from error
    if not isinstance(config, dict):
        raise StoreError('--settings has to be a JSON object, like {"receive_threads": 4}')
    return config


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise StoreError(f"--token-file cannot be read: {error}") from error


if __name__ == "__main__":
    main()
