"""What may be said about a proxy's resources, and every sentence that refuses."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.proxy import settings
from sglang.srt.offload.proxy.plane import Plane
from sglang.srt.offload.proxy.settings import ProxySettings
from sglang.srt.offload.proxy_process import OwnProxy


def test_what_nobody_said():
    made = ProxySettings.from_config({})
    assert made == ProxySettings()
    assert made.engine == "software" and made.pipelined and made.preallocated


def test_the_profile_of_the_paper():
    made = ProxySettings.from_config({"profile": "bluefield-3", "poll_us": 20})
    assert (made.receive_threads, made.dequantize_threads) == (2, 14)
    assert (made.compressed_buffer_bytes, made.dequantized_buffer_bytes) == (256 << 20, 512 << 20)
    assert made.poll_us == 20 and not made.direct
    assert not set(made.cores["receive"]) & set(made.cores["dequantize"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"profile": "bluefield-9"}, "none of host, bluefield-3"),
        ({"no_such": 1}, "no_such is no setting"),
        ({"ttl_s": -1}, "ttl_s has to be at least 0"),
        ({"max_write_gbps": -0.5}, "max_write_gbps have to be 0, or from 0.01"),
        ({"receive_threads": 0}, "receive_threads has to be from 1"),
        ({"receive_threads": "2"}, "has to be like 2"),
        ({"receive_threads": True}, "has to be like 2"),
        ({"pipelined": 1}, "has to be like True"),
        ({"compressed_buffer_bytes": 1 << 20}, "at least"),
        ({"engine": "doca"}, "none of software, emulated"),
        ({"cores": {"network": [1]}}, "cores names network"),
        ({"rates_gbps": {"write": 1}}, "rates_gbps names write"),
        ({"rates_gbps": {"receive": 0}}, "rates_gbps have to be from 0.01"),
        ({"profile": ["host"]}, "none of host"),
        ({"cores": {"receive": "a"}}, "lists of core numbers"),
        ({"cores": {"receive": [1024]}}, "core numbers below 1024"),
        ({"cores": {"receive": []}}, "lists of core numbers"),
        ({"rates_gbps": {"receive": "fast"}}, "numbers by stage"),
        ({"window": 0}, "window has to be from 1 to 64"),
        ({"store_timeout_s": 0}, "above 0"),
        ({"window": 65}, "window has to be from 1 to 64"),
        ({"window": 10**12}, "window has to be from 1 to 64"),
        ({"compressed_buffer_bytes": (1 << 40) + 1}, "compressed_buffer_bytes has to be at most 1099511627776"),
        ({"rates_gbps": {"receive": 1e-300}}, "rates_gbps have to be from 0.01 to 1000000"),
        ({"rates_gbps": {"receive": 10**400}}, "rates_gbps have to be from 0.01 to 1000000"),
        ({"max_read_gbps": 10**400}, "max_read_gbps and max_write_gbps have to be 0, or from 0.01 to 1000000"),
        ({"max_write_gbps": 1e-12}, "max_read_gbps and max_write_gbps have to be 0, or from 0.01 to 1000000"),
        ({"poll_us": 10**400}, "poll_us has to be from 0 to 1000000"),
        ({"poll_us": float("inf")}, "poll_us has to be from 0 to 1000000"),
    ],
)
def test_what_is_refused(config, says):
    with pytest.raises(StoreError, match=says):
        ProxySettings.from_config(config)


def test_buffers_for_which_there_is_no_memory(monkeypatch):
    monkeypatch.setattr(settings, "available_memory", lambda: 60 << 20)
    small = ProxySettings(**dict.fromkeys(settings._BUFFERS, 20 << 20))
    small.check_memory()
    large = ProxySettings(**dict.fromkeys(settings._BUFFERS, 20 << 20) | {"dequantized_buffer_bytes": 1 << 40})
    # Each place where a proxy starts.
    for start in (large.check_memory, lambda: Plane(large)):
        with pytest.raises(StoreError, match=r"take 1099\.\d\d GB, and 62\.91 MB .* lower compressed_buffer_bytes, "):
            start()
    place = OwnProxy("redis://host", {"dequantized_buffer_bytes": 1 << 40})
    with pytest.raises(StoreError, match="lower compressed_buffer_bytes"):
        place.connect()
    assert place.pid is None
