"""Writes of an engine on another machine, whose bytes are asked for piece by piece."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.offload import wire
from sglang.srt.offload.proxy.tcp_channel import TcpChannel
from support.codec_cases import kv_block

LAYOUT = kv_block(6, 1, 4, 2, 8, "float32", max_piece_bytes=512)
NUM = LAYOUT.num_pieces
PUT = wire.Put(3, b"k" * 16, b"")


@pytest.mark.parametrize("order", [range(6), (1, 0, 3, 2, 5, 4), (2, 1, 0, 5, 4, 3)])
def test_each_piece_is_asked_for_once(order: Any):
    """Several threads read pieces of a block, and one may overtake another."""
    assert NUM == 6
    pulled: list[int] = []

    def pull(message: wire.Pull) -> None:
        pulled.append(message.start // LAYOUT.piece_bytes)
        origin.take(message.block, message.start, np.full(message.end - message.start, pulled[-1], np.uint8))

    channel = TcpChannel(SimpleNamespace(send=pull), 120.0)  # type: ignore[arg-type]
    channel.attach(None, LAYOUT)  # type: ignore[arg-type]
    origin: Any = channel.origin(PUT, 1)
    for index in order:
        start, end = LAYOUT.piece(index)
        assert (origin.read(0, start, end, np.empty(0, np.uint8)) == index).all()
    assert pulled == list(range(NUM)) and not origin._pulled


def test_a_key_that_is_too_long_to_be_masked_ends_the_session():
    hello = wire.Hello(
        token="", num_pages=1, pool_bytes=1, layout={}, codec={}, namespace=b"", mac_key=bytes(wire.MAC_KEY_BYTES + 1)
    )
    frames = SimpleNamespace(receive=lambda: SimpleNamespace(payload=wire.encode(hello)))
    with pytest.raises(wire.WireError, match="too long"):
        TcpChannel(frames, 120.0).receive_hello()  # type: ignore[arg-type]


def test_a_write_that_was_answered_keeps_no_memory():
    channel = TcpChannel(SimpleNamespace(send=lambda message: None), 120.0)  # type: ignore[arg-type]
    channel.attach(None, LAYOUT)  # type: ignore[arg-type]
    channel.origin(PUT, 1)
    channel.send(wire.Stats({}))
    assert list(channel._origins) == [PUT.id]
    channel.send(wire.Done(PUT.id, 1))
    assert not channel._origins
