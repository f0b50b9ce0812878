"""KV events of a real server: a subscriber that comes late has what the tiers have, whatever was asked before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zmq

from sglang.srt.mem_cache.page_hashes import PageHashes
from support.kv_subscriber import KvSubscriber
from support.server_fixture import PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e


def replay(context: zmq.Context, port: int, subscriber: KvSubscriber) -> None:
    """Take what the subscriber lacks."""
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = int(1000 * PATIENCE_S)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"", subscriber.next.to_bytes(8, "big")])
    while (frames := socket.recv_multipart())[3]:
        subscriber.take(frames[2], frames[3])
    socket.close()


def test_a_subscriber_that_comes_late_has_what_the_tiers_have(small_server: Server) -> None:
    server = small_server
    told = server.get("/server_info").json()["kv_events"]
    ports = told.pop("endpoint_port_base"), told.pop("replay_endpoint_port_base")
    assert 0 < ports[0] != ports[1] > 0
    assert told == {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "topic": "",
        "block_size": 1,
        "dp_size": 1,
    }
    rng = random.Random(3)
    context, subscriber = zmq.Context(), KvSubscriber()
    prompts = [[rng.randrange(300, 1900) for _ in range(300)] for _ in range(5)]

    def is_up_to_date() -> bool:
        """Of each tier as many tokens as it tells."""
        replay(context, ports[1], subscriber)
        tiers = server.state()["tiers"]
        found = {medium: len(blocks) for medium, blocks in subscriber.blocks.items()}
        media = {"GPU": "device", "CPU_PINNED": "host", "DISK": "disk"}
        return all(found.get(medium, 0) == tiers[tier]["cached_tokens"] for medium, tier in media.items())

    # More than the device has, so that pages leave it, and come back.
    for prompt in prompts * 2:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        assert server.post("/generate", body).status_code == 200
    wait_until(is_up_to_date)
    assert not subscriber.gaps and not subscriber.orphans
    # The hashes are those that a router makes of the prompt.
    names = PageHashes(1, None, None, "default")
    hashes = names.published(names.chain(names.first, np.array(prompts[-1], np.int32)))
    assert subscriber.blocks["GPU"].issuperset(hashes)
    on_disk = set(subscriber.blocks["DISK"])
    assert on_disk and server.post("/flush_cache").status_code == 200
    wait_until(is_up_to_date)
    assert (subscriber.blocks["GPU"], subscriber.blocks["CPU_PINNED"]) == (set(), set())
    assert subscriber.blocks["DISK"] == on_disk
    context.destroy(linger=0)
