"""The relay: a process beside an engine whose offload proxy is on another machine.

    python -m sglang.srt.offload.relay --proxy tcp://10.0.0.3:7070 --fd 7

The engine starts it and sees a proxy. It has the engine's host pool mapped, and is the only one that writes into the
pages of a fetch: it copies what the proxy sends for one that is still open, and drops everything else. Therefore
pages are the engine's again at once when a fetch is given up or the proxy is silent.

    engine ◄── Unix socket: messages, the pool ──► relay ◄── TCP: messages, bytes of blocks ──► proxy
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import numpy as np

from sgl_kernel.kvplane import FrameError, FrameReceiver
from sglang.srt.mem_cache.block_keys import KEY_BYTES
from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload import wire
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.frames import FrameConnection, WrongKeyError
from sglang.srt.offload.proxy.channel import LocalChannel, SessionRefusedError
from sglang.srt.offload.proxy.origin import PoolPages
from sglang.srt.offload.proxy_process import KEY_VARIABLE, parse_tcp
from sglang.srt.offload.store.address import Endpoint
from sglang.srt.utils.log import configure_logging

_CONNECT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Relay:
    """engine: the channel to it. secret: the key that is shared with the proxy."""

    def __init__(self, engine: LocalChannel, endpoint: Endpoint, secret: bytes) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._secret = secret
        # Held while pages are read, and while operations end.
        self._lock = threading.Lock()
        self._puts: dict[int, PoolPages] = {}
        # Operations that were given up, and whose answers are still to come from the proxy.
        self._given_up: set[int] = set()

    def run(self) -> None:
        """Until either side has gone. Raises WireError if the engine never came."""
        try:
            hello = self._engine.begin()
            self._layout = BlockLayout.from_dict(hello.layout)
            self._engine.attach(hello, self._layout)
            frames, welcome = self._connect(hello)
            self._receiver = self._receiver_of(frames)
        except SessionRefusedError as error:
            self._engine.send(wire.Refused(str(error)))
            self._engine.close()
            return
        reader = threading.Thread(target=self._read_proxy, args=(frames,), name="proxy", daemon=True)
        reader.start()
        try:
            self._engine.send(welcome)
            while True:
                self._pass_to_proxy(frames, self._engine.receive())
        except wire.WireError as error:
            logger.debug("the session ends: %s", error)
        frames.shut()
        reader.join()
        self._receiver.close()
        frames.close()
        # After the last write into pages.
        self._engine.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _connect(self, hello: wire.Hello) -> tuple[FrameConnection, wire.Welcome]:
        """Raises SessionRefusedError."""
        where = f"tcp://{self._endpoint}"
        try:
            sock = socket.create_connection((self._endpoint.host, self._endpoint.port), _CONNECT_TIMEOUT_S)
        except OSError as error:
            raise SessionRefusedError(f'there is none at {where} ({error}): start it, or correct "proxy"') from error
        try:
            frames = FrameConnection(sock, self._secret, is_proxy=False)
        except wire.WireError as error:
            raise SessionRefusedError(f"{where}: {error}") from error
        try:
            frames.send(msgspec.structs.replace(hello, token="", mac_key=frames.masked(hello.mac_key)))
            answer = wire.decode(frames.receive().payload, wire.Welcome | wire.Refused)
        except WrongKeyError:
            frames.close()
            raise SessionRefusedError(f"the proxy at {where} has another token: use the same token_file") from None
        except wire.WireError as error:
            frames.close()
            raise SessionRefusedError(f"{where}: {error}") from error
        if isinstance(answer, wire.Refused):
            frames.close()
            raise SessionRefusedError(answer.reason)
        return frames, answer

    def _receiver_of(self, frames: FrameConnection) -> FrameReceiver:
        """Raises SessionRefusedError."""
        layout = self._layout
        try:
            return FrameReceiver(
                *frames.hand_over_receiving(),
                self._engine.memory,
                block_bytes=layout.block_bytes,
                page_bytes=layout.page.page_bytes,
                pages_per_block=layout.num_pages,
                piece_bytes=layout.piece_bytes,
                num_pieces=layout.num_pieces,
            )
        except (OSError, subprocess.SubprocessError) as error:
            frames.close()
            raise SessionRefusedError(f"the relay beside the engine cannot work: {error}") from error

    def _pass_to_proxy(self, frames: FrameConnection, message: wire.ToProxy) -> None:
        if isinstance(message, wire.Get | wire.Put):
            pages = self._engine.pages(message, len(message.keys) // KEY_BYTES)
            if isinstance(message, wire.Get):
                self._receiver.open(message.id, pages.pages)
            else:
                with self._lock:
                    self._puts[message.id] = pages
            message = msgspec.structs.replace(message, pages=b"")
        elif isinstance(message, wire.Cancel):
            self._give_up(message.id)
        frames.send(message)

    def _read_proxy(self, frames: FrameConnection) -> None:
        try:
            while True:
                message = wire.decode(self._receiver.receive(), wire.ToEngine | wire.Pull)
                if isinstance(message, wire.Pull):
                    self._send_pulled(frames, message)
                elif isinstance(message, wire.Done):
                    self._end(message)
                else:
                    self._engine.send(message)
        except (wire.WireError, FrameError) as error:
            # The engine reports the lost session, once a minute.
            logger.debug("the connection to the proxy at tcp://%s ends: %s", self._endpoint, error)
        finally:
            self._engine.shut()

    def _send_pulled(self, frames: FrameConnection, pull: wire.Pull) -> None:
        data = None
        with self._lock:
            pages = self._puts.get(pull.id)
            if pages is not None:
                if not (
                    0 <= pull.start < pull.end <= self._layout.block_bytes and 0 <= pull.block < len(pages.pages)
                ):
                    raise wire.WireError("the proxy asks for bytes of no block of the operation")
                # A copy, because the pages may be given up while it is sent.
                data = np.concatenate(pages.runs(pull.block, pull.start, pull.end))
        if data is None:
            frames.send(wire.NoData(pull.id))
        else:
            frames.send_data(pull.id, pull.block, pull.start, data)

    def _end(self, done: wire.Done) -> None:
        with self._lock:
            if done.id in self._given_up:
                self._given_up.remove(done.id)
                return
            self._puts.pop(done.id, None)
            if (num := self._receiver.end(done.id)) is not None:
                # What has not come does not count.
                done = wire.Done(done.id, min(done.count, num))
        self._engine.send(done)

    def _give_up(self, id: int) -> None:
        """Answer an operation, whose pages are the engine's at once. Nothing if it has been answered."""
        with self._lock:
            if self._receiver.end(id) is None and self._puts.pop(id, None) is None:
                return
            self._given_up.add(id)
        self._engine.send(wire.Done(id, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxy", required=True, help="where the proxy listens: tcp://host:port")
    parser.add_argument("--fd", type=int, required=True, help="the engine's connected socket")
    args = parser.parse_args()
    configure_logging("info", "relay")
    # The engine drains first, then closes its end. If it is killed, the system closes its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        endpoint = parse_tcp(args.proxy, "--proxy")
    except StoreError as error:
        sys.exit(f"error: {error}")
    engine = LocalChannel(socket.socket(fileno=args.fd), token="")
    Relay(engine, endpoint, os.environ[KEY_VARIABLE].encode()).run()


if __name__ == "__main__":
    main()
