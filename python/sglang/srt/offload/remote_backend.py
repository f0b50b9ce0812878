"""The storage backends "remote" and "bluefield": their settings, and how the remote tier of one rank is opened.

With `remote` the server starts an offload proxy, and a store where no URL is given. With `bluefield` it connects to a
proxy that was started separately, here or on another machine. The checks start and connect nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.storage.registry import CONFIG_FLAG, StorageBackend, StoreParams
from sglang.srt.offload.codec.registry import check_codec, is_lossy_codec
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.proxy_process import MIN_TOKEN_CHARS, OtherProxy, ProxyElsewhere, parse_tcp
from sglang.srt.offload.remote_store import OwnProxySettings, RemoteSettings, open_remote_store
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.utils.registry import BOOLEAN, OBJECT, STRING, Kind, Option, is_number

# `check_codec` checks its settings, and the proxy what depends on the model's shape, as it makes the codec.
_CODEC = Kind("the name of a codec or a JSON object", lambda value: isinstance(value, str | dict))
# A proxy is asked every half second.
_SILENCE = Kind("a number from 2 up to 1e9", lambda value: is_number(value) and 2 <= value < 1e9)
_STORE_GB = Kind(
    "0, or a number from 0.01 up to 1e9", lambda value: is_number(value) and (value == 0 or 0.01 <= value < 1e9)
)
_SHARED_OPTIONS = (
    Option("codec", _CODEC, "lossless", "a codec's name, or an object with its settings, as below"),
    Option(
        "hang_timeout_s",
        _SILENCE,
        10.0,
        "seconds of silence after which a started proxy is replaced and another is reported",
    ),
    Option("synchronous", BOOLEAN, False, "wait for each read, as a baseline for measurements"),
)


class _ProxyBackend(StorageBackend):
    """What both have in common."""

    takes_regions = True

    def check(self, config: Mapping[str, Any]) -> None:
        self.settings(config)

    def open(self, params: StoreParams) -> BlockStore:
        return open_remote_store(self.name, self.settings(params.config), params)

    def is_lossy(self, config: Mapping[str, Any]) -> bool:
        return is_lossy_codec(config.get("codec", "lossless"))

    def settings(self, config: Mapping[str, Any]) -> RemoteSettings:
        """Raises StoreError."""
        values = self.values(config)
        codec = values["codec"]
        try:
            check_codec({"codec": codec} if isinstance(codec, str) else codec)
        except ValueError as error:
            raise StoreError(f"--hicache-storage-backend {self.name}: {error}") from None
        return RemoteSettings(
            codec=codec,
            hang_s=float(values["hang_timeout_s"]),
            is_synchronous=values["synchronous"],
            proxy=self.proxy(values),
        )

    @abstractmethod
    def proxy(self, values: dict[str, Any]) -> OwnProxySettings | OtherProxy | ProxyElsewhere:
        """Raises StoreError."""


class RemoteBackend(_ProxyBackend):
    options = (
        Option("url", STRING, "", "where the store is", "none, so that the server starts a store"),
        Option(
            "limit_gb",
            _STORE_GB,
            0.0,
            "memory in GB (1e9 bytes) of a store that the server starts, over all ranks",
            "a quarter of the free memory",
        ),
        Option("proxy", OBJECT, {}, "settings of the offload proxy"),
        Option("in_process", BOOLEAN, False, "run the proxy in the scheduler's process, as a baseline"),
        *_SHARED_OPTIONS,
    )

    def proxy(self, values: dict[str, Any]) -> OwnProxySettings:
        # Checked here rather than in the proxy's process, so that the user gets one sentence.
        ProxySettings.from_config(values["proxy"])
        if values["url"]:
            StoreAddress.parse(values["url"])
        return OwnProxySettings(values["url"], values["proxy"], values["in_process"], float(values["limit_gb"]))


class BluefieldBackend(_ProxyBackend):
    options = (
        Option(
            "proxy", STRING, "", "the running proxy: the path of its socket, or tcp://host:port elsewhere", "required"
        ),
        Option(
            "token_file", STRING, "", "the file with the proxy's token; over TCP it is the shared key", "required"
        ),
        *_SHARED_OPTIONS,
    )

    def proxy(self, values: dict[str, Any]) -> OtherProxy | ProxyElsewhere:
        if not values["proxy"] or not values["token_file"]:
            raise StoreError(
                f'{self.flag} needs {{"proxy": "/path/to/proxy.sock", "token_file": "…"}} in {CONFIG_FLAG}: the '
                "socket of a running sglang.srt.offload.proxy, or its tcp://host:port, and its token"
            )
        try:
            token = Path(values["token_file"]).read_text().strip()
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.flag}: token_file cannot be read: {error}") from error
        if not token.isprintable():
            raise StoreError(
                f"{self.flag}: token_file has to hold printable characters: make one with openssl rand -hex 32"
            )
        if "://" not in values["proxy"]:
            return OtherProxy(Path(values["proxy"]), token)
        endpoint = parse_tcp(values["proxy"], '"proxy"')
        if len(token) < MIN_TOKEN_CHARS:
            raise StoreError(
                f"{self.flag}: the token of a proxy elsewhere has to have at least {MIN_TOKEN_CHARS} characters: "
                "make one with openssl rand -hex 32, for both sides"
            )
        return ProxyElsewhere(endpoint, token)
