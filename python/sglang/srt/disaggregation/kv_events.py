"""KV events: what of which prompt is on which tier, as upstream SGLang and vLLM publish it for routers.

The names, the encoding and the hashes are upstream's (SGLang 0.5.23), so that its consumers read them. A message has
three frames: the topic, the sequence number (8 bytes, big-endian), and an `EventBatch` in MessagePack: an array of
the time, the events, and the data-parallel rank. An event is a map without the fields that have their default.

Holds no state, and loads nothing heavy, as the command line is read with it. The hashes are in
mem_cache/page_hashes.py.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

FORMATS = ("default", "dynamo")
PUBLISHERS = ("null", "zmq")


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """ts: seconds since 1970."""

    ts: float
    events: Sequence[KVCacheEvent]
    attn_dp_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Tagged with the name of its class, under `type`."""


class BlockStored(KVCacheEvent):
    """Blocks that follow each other, of block_size tokens each. parent_block_hash: of the block before them; None at
    the beginning of a prompt. medium: see `MEDIA`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Sent before all that is in memory, for subscribers that missed some. A flush removes block by block."""


class KVEventBatch(EventBatch):
    """As a subscriber decodes it."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


# By tier's name. Upstream has no peers.
MEDIA = {"device": "GPU", "peer": "PEER", "host": "CPU_PINNED", "disk": "DISK", "remote": "EXTERNAL"}


# -- settings -------------------------------------------------------------------------------------------------------


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """--kv-events-config. bind: whether the socket binds its endpoint; None: if that is a wildcard, loopback, ipc or
    inproc address. buffer_steps: batches that are kept for replay. hwm: batches that are kept for a subscriber that
    does not keep up. max_queue_size: batches that wait for the thread that sends them."""

    publisher: str = "null"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    format: str = "default"

    @classmethod
    def from_cli(cls, text: str) -> KVEventsConfig:
        """Raises ValueError with what to do."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            example = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}'
            raise ValueError(f"has to be a JSON object such as {example}: {error}") from error
        config.check()
        return config

    def check(self) -> None:
        for name, value, known in (("publisher", self.publisher, PUBLISHERS), ("format", self.format, FORMATS)):
            if value not in known:
                raise ValueError(f"{name} has to be one of {', '.join(known)}, not {value!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} has to be at least 1")
        endpoints = [self.endpoint, *([self.replay_endpoint] if self.replay_endpoint is not None else [])]
        for endpoint in endpoints:
            Address.parse(endpoint)
        if len({Address.parse(each).port or each for each in endpoints}) < len(endpoints):
            raise ValueError("endpoint and replay_endpoint need ports of their own")

    @property
    def is_on(self) -> bool:
        return self.publisher != "null"

    def describe(self, block_size: int) -> dict[str, Any] | None:
        """For /server_info: where a consumer subscribes. None if it cannot over TCP."""
        address = Address.parse(self.endpoint)
        if not self.is_on or address.port is None:
            return None
        described: dict[str, Any] = {
            "publisher": self.publisher,
            "endpoint_host": address.host,
            "endpoint_port_base": address.port,
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": 1,
        }
        if self.replay_endpoint is not None and (port := Address.parse(self.replay_endpoint).port) is not None:
            described["replay_endpoint_port_base"] = port
        return described


@dataclass(frozen=True)
class Address:
    """Of a ZeroMQ endpoint. port: None if it is not TCP."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, endpoint: str) -> Address:
        """Raises ValueError."""
        if endpoint.startswith(("ipc://", "inproc://")):
            return cls("", None)
        parts = urlsplit(endpoint)
        host, _, port = parts.netloc.rpartition(":")
        if parts.scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or parts.path:
            raise ValueError(f"{endpoint!r} has to be tcp://host:port, ipc://path or inproc://name")
        return cls(host, int(port))

    @property
    def is_wildcard(self) -> bool:
        return self.host in ("*", "0.0.0.0", "::", "[::]")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.port is None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
