"""What may be said about a proxy's resources, and every sentence that refuses."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.proxy.settings import ProxySettings


def test_what_nobody_said():
    settings = ProxySettings.from_config({})
    assert settings == ProxySettings()
    assert settings.engine == "software" and settings.pipelined and settings.preallocated


def test_the_profile_of_the_paper():
    settings = ProxySettings.from_config({"profile": "bluefield-3", "poll_us": 20})
    assert (settings.receive_threads, settings.dequantize_threads) == (2, 14)
    assert (settings.compressed_buffer_bytes, settings.dequantized_buffer_bytes) == (256 << 20, 512 << 20)
    assert settings.poll_us == 20 and not settings.direct
    assert not set(settings.cores["receive"]) & set(settings.cores["dequantize"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"profile": "bluefield-9"}, "none of host, bluefield-3"),
        ({"no_such": 1}, "no_such is no setting"),
        ({"ttl_s": -1}, "have to be at least 0"),
        ({"max_write_gbps": -0.5}, "have to be at least 0"),
        ({"receive_threads": 0}, "receive_threads has to be from 1"),
        ({"receive_threads": "2"}, "has to be like 2"),
        ({"receive_threads": True}, "has to be like 2"),
        ({"pipelined": 1}, "has to be like True"),
        ({"compressed_buffer_bytes": 1 << 20}, "at least"),
        ({"engine": "doca"}, "none of software, emulated"),
        ({"cores": {"network": [1]}}, "cores names network"),
        ({"rates_gbps": {"write": 1}}, "rates_gbps names write"),
        ({"rates_gbps": {"receive": 0}}, "above 0"),
        ({"profile": ["host"]}, "none of host"),
        ({"cores": {"receive": "a"}}, "lists of core numbers"),
        ({"cores": {"receive": [1024]}}, "core numbers below 1024"),
        ({"cores": {"receive": []}}, "lists of core numbers"),
        ({"rates_gbps": {"receive": "fast"}}, "numbers by stage"),
        ({"window": 0}, "at least 1"),
        ({"store_timeout_s": 0}, "above 0"),
    ],
)
def test_what_is_refused(config, says):
    with pytest.raises(StoreError, match=says):
        ProxySettings.from_config(config)
