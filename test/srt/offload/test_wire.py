"""The frames between engine and proxy, over a real socket."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from sglang.srt.offload import wire
from sglang.srt.utils.shared_memory import SharedMemory


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def hello() -> wire.Hello:
    return wire.Hello(token="t", num_pages=1, pool_bytes=4096, layout={}, codec={}, namespace=b"n")


def test_messages_arrive_as_they_were_sent(pair):
    one, other = pair
    for message in (wire.Get(3, b"k" * 16, b"p" * 4), wire.Exists(4, b""), wire.Cancel(3), wire.GetStats()):
        wire.send(one, message)
        assert wire.receive(other, wire.ToProxy) == (message, [])


def test_memory_comes_with_the_first_message(pair):
    one, other = pair
    memory = SharedMemory.allocate(8192, "test")
    memory.memory[:] = 5
    wire.send(one, hello(), (memory.fd,))
    message, fds = wire.receive(other, wire.Hello, max_fds=1)
    assert message == hello() and len(fds) == 1
    theirs = SharedMemory(fds[0], 8192)
    theirs.memory[17] = 9
    assert memory.memory[17] == 9 and theirs.memory[0] == 5
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 0)  # who maps it relies on its size


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack("<I", 1 << 31), "is no message"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not a message"),
        (struct.pack("<I", 1) + b"\x90", "not a message"),
        (struct.pack("<I", 100) + b"cut", "has gone"),
        (b"\x01", "has gone"),
        (b"", "has gone"),
    ],
)
def test_what_is_no_message(pair, data, says):
    one, other = pair
    one.sendall(data)
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(wire.WireError, match=says):
        wire.receive(other, wire.ToProxy)


@pytest.mark.parametrize(
    "data", [struct.pack("<I", 100) + b"cut", struct.pack("<I", 1) + b"\x90", b"\xff" * 4, b"\1"]
)
def test_memory_that_comes_with_no_message_is_given_back(pair, data):
    """The writing end of a pipe: its reader sees the end when no process has it any more."""
    one, other = pair
    reader, writer = os.pipe()
    socket.send_fds(one, [data], [writer])
    os.close(writer)
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(wire.WireError):
        wire.receive(other, wire.Hello, max_fds=1)
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_message_of_another_kind_is_refused(pair):
    one, other = pair
    wire.send(one, wire.Done(1, 2))
    with pytest.raises(wire.WireError, match="not a message"):
        wire.receive(other, wire.ToProxy)


def test_who_has_gone_cannot_be_written_to(pair):
    one, other = pair
    other.close()
    with pytest.raises(wire.WireError, match="has gone"):
        for _ in range(100):
            wire.send(one, wire.Cancel(1))
