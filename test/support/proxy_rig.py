"""`ProxyRig`: a store, an offload proxy by itself, and engines that use it over one of three ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from sglang.srt.offload.proxy_process import STORE_VARIABLE
from sglang.srt.offload.store.embedded import EmbeddedStore
from support.children import child_environment, wait_until
from support.network import Elsewhere
from support.remote_fixture import PROXY, Remote

TOKEN = "5e7c" * 16
KINDS = ["shared memory", "tcp", "tcp elsewhere"]


class ProxyRig:
    """kind: of `KINDS`. there: the other machine, for the last of them, whose data plane is a program. limit_bytes:
    of the store."""

    def __init__(
        self, folder: Path, kind: str, there: Elsewhere | None, limit_bytes: int = 1 << 28, **settings: Any
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.there = there
        self.store = EmbeddedStore.start(folder / "store", limit_bytes)
        self.token = folder / "token"
        self.token.write_text(TOKEN + "\n")
        self.engines: list[Remote] = []
        self._port = 0
        self.start_proxy(**settings)

    @property
    def over_tcp(self) -> bool:
        return self.kind != "shared memory"

    @property
    def address(self) -> str:
        host = self.there.address if self.there is not None else "127.0.0.1"
        return f"tcp://{host}:{self._port}" if self.over_tcp else str(self.folder / "proxy.sock")

    def start_proxy(self, **settings: Any) -> None:
        log = self.folder / "proxy.log"
        if self.kind == "tcp elsewhere":
            settings = {"data_plane": "process", **settings}
        host = self.there.address if self.there is not None else "127.0.0.1"
        where = ["--listen", f"tcp://{host}:{self._port}"] if self.over_tcp else ["--socket", self.address]
        command = [sys.executable, "-m", "sglang.srt.offload.proxy", *where, "--token-file", str(self.token)]
        with log.open("w") as file:
            self.proxy = subprocess.Popen(
                [
                    *(self.there.command if self.there is not None else []),
                    *command,
                    "--settings",
                    msgspec.json.encode(PROXY | settings).decode(),
                ],
                env={**child_environment(), STORE_VARIABLE: f"unix://{self.store.address.endpoints[0].path}"},
                stderr=file,
            )
        wait_until(lambda: "listens on" in log.read_text() or self.proxy.poll() is not None, "the proxy to listen")
        text = log.read_text()
        assert "listens on" in text, text
        if self.over_tcp:
            self._port = int(text.split("tcp://")[1].split()[0].rsplit(":", 1)[1])

    def stop_proxy(self) -> None:
        self.proxy.kill()
        self.proxy.wait()

    def engine(self, **config: Any) -> Remote:
        values = {"proxy": self.address, "token_file": str(self.token), "hang_timeout_s": 1000.0, **config}
        one = Remote(self.folder, backend="bluefield", **values)
        self.engines.append(one)
        return one

    def close(self) -> None:
        for one in self.engines:
            one.close()
        self.stop_proxy()
        self.store.stop()
