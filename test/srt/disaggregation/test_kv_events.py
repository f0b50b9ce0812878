"""The wire format against bytes that upstream's own structs made, and the settings."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
    KVEventsConfig,
)
from sglang.srt.mem_cache.page_hashes import PageHashes
from sglang.srt.server_args import ServerArgs

# `msgspec.msgpack.encode` of SGLang 0.5.23's own structs with the values below.
GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009587a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392ffcf4000000000000000b1"
    "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f7261"
    "5f6964c0a66d656469756da347505589a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739105b1706172656e"
    "745f626c6f636b5f68617368ffa9746f6b656e5f696473920909aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756d"
    "aa4350555f50494e4e4544aa63616368655f73616c74a473616c74aa73657373696f6e5f6964a17383a474797065ac426c6f636b5265"
    "6d6f766564ac626c6f636b5f6861736865739105a66d656469756da44449534b83a474797065ac426c6f636b52656d6f766564ac626c"
    "6f636b5f6861736865739106a66d656469756da845585445524e414c81a474797065b0416c6c426c6f636b73436c656172656400"
)
BATCH = EventBatch(
    1.5,
    [
        BlockStored([-1, 1 << 62], None, [1, 2, 3, 70000], 2, None, medium="GPU"),
        BlockStored([5], -1, [9, 9], 2, None, medium="CPU_PINNED", cache_salt="salt", session_id="s"),
        BlockRemoved([5], medium="DISK"),
        BlockRemoved([6], medium="EXTERNAL"),
        AllBlocksCleared(),
    ],
    attn_dp_rank=0,
)
# Of vLLM 0.32, whose events have fields of their own.
VLLM = msgspec.msgpack.encode(
    [
        2.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [1],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "locality": "LOCAL",
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "STORAGE", "ownership": "tier"},
        ],
    ]
)


def test_bytes_are_upstreams():
    assert msgspec.msgpack.encode(BATCH) == GOLDEN
    assert msgspec.msgpack.decode(GOLDEN, type=KVEventBatch).events == BATCH.events


def test_a_subscriber_of_ours_reads_vllms_events():
    batch = msgspec.msgpack.decode(VLLM, type=KVEventBatch)
    assert batch.events == [
        BlockStored([7], None, [1], 1, None, medium="GPU"),
        BlockRemoved([7], medium="STORAGE"),
    ]


@pytest.mark.parametrize(
    ("salt", "extra_key", "format", "expected"),
    [
        (None, None, "default", [3817746824117602890, 1559216388253771014, -9039757289324305048]),
        ("salt", None, "default", [-48066477051406352, -5292934529232365351, 466122471349306595]),
        ("salt", "key", "dynamo", [-1466061835014195010, 2800728668113758917, -1820747224360335717]),
        (None, "key", "dynamo", [8485704561453476472, -6444541204441068735, 8839802508899655896]),
    ],
)
def test_hashes_are_upstreams(salt: str | None, extra_key: str | None, format: str, expected: list[int]):
    """As SGLang 0.5.23's own code computes them. Tokens in two parts give the same."""
    tokens = np.array([1, 2, 3, 70000, 5, 6], np.int32)
    names = PageHashes(2, salt, extra_key, format)
    whole = names.chain(names.first, tokens)
    assert names.published(whole) == expected
    front = names.chain(names.first, tokens[:2])
    rest = names.chain(front[-1].tobytes(), tokens[2:])
    assert names.published(front) + names.published(rest) == expected


def test_no_two_namespaces_share_hashes():
    tokens = np.arange(8, dtype=np.int32)
    for format in ("default", "dynamo"):
        found: set[int] = set()
        pairs = [(s, k) for s in (None, "a", "ab", "b") for k in (None, "a", "b", "bc", "c")]
        for salt, extra_key in pairs:
            names = PageHashes(4, salt, extra_key, format)
            found.update(names.published(names.chain(names.first, tokens)))
        assert len(found) == 2 * len(pairs)


def test_what_is_not_said_in_full():
    config = KVEventsConfig.from_cli('{"publisher": "zmq"}')
    assert config.is_on and config.endpoint == "tcp://127.0.0.1:5557"
    assert config.describe(16) == {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 16,
        "dp_size": 1,
    }
    replay = KVEventsConfig("zmq", "tcp://*:1", "tcp://*:2", topic="kv")
    assert replay.describe(1) == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 1,
        "topic": "kv",
        "block_size": 1,
        "dp_size": 1,
        "replay_endpoint_port_base": 2,
    }
    assert KVEventsConfig("zmq", "ipc:///tmp/events").describe(1) is None
    assert KVEventsConfig().describe(1) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "JSON object"),
        ("[]", "JSON object"),
        ('{"publisher": "kafka"}', "null, zmq, not 'kafka'"),
        ('{"format": "vllm"}', "default, dynamo, not 'vllm'"),
        ('{"endpoints": "x"}', "endpoints"),
        ('{"endpoint": "localhost:5557"}', "tcp://host:port"),
        ('{"endpoint": "tcp://*"}', "tcp://host:port"),
        ('{"endpoint": "tcp://*:99999"}', "tcp://host:port"),
        ('{"replay_endpoint": "tcp://1.2.3.4:5557"}', "ports of their own"),
        ('{"hwm": 0}', "hwm has to be at least 1"),
        ('{"topic": 3}', "topic"),
    ],
)
def test_a_bad_setting_tells_what_to_do(text: str, expected: str):
    with pytest.raises(ValueError, match="--kv-events-config") as refused:
        ServerArgs(model_path="embedded", kv_events_config=text or " ")
    assert expected in str(refused.value)
