"""Whatever the store gives back: `CodecError` or the right bytes, never a crash, never a byte beside the buffers."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np
import pytest
import xxhash
import zstandard

from sglang.srt.offload.codec import HEADER_BYTES, Codec, CodecError, PieceHeader, make_codec
from sglang.srt.offload.codec.entropy import EntropyCoder
from sglang.srt.offload.codec.header import write_header
from support.codec_cases import CONFIGS, CUT, KEY, SMALL, decode, encode, guarded, kv_block, normal_kv

# The fields of a header that are a reader's to know. What each may be changed to is a lie.
LIES = [
    ("codec_id", [0, 1, 2, 3, 255]),
    ("stored", [True, False]),
    ("piece", [1, 2**32 - 1]),
    ("key", [bytes(16)]),
    ("raw_bytes", [0, 1, SMALL.block_bytes - 2, SMALL.block_bytes + 2, 2**32 - 1]),
    ("mid_bytes", [0, 1, SMALL.block_bytes, 2**32 - 1]),
    ("payload_bytes", [0, 1, 2**32 - 1]),
    ("fingerprint", [0, 2**64 - 1]),
]


def resealed(header: PieceHeader, payload: np.ndarray) -> np.ndarray:
    """A stored piece with right checksums, whatever it says: what any client of the store may put there."""
    stored = np.empty(HEADER_BYTES + len(payload), np.uint8)
    stored[HEADER_BYTES:] = payload
    honest = dataclasses.replace(header, payload_bytes=len(payload))
    write_header(honest, stored)
    if header.payload_bytes != len(payload):
        fields = bytearray(stored[:56])
        struct.pack_into("<I", fields, 36, header.payload_bytes)
        stored[:64] = np.frombuffer(
            bytes(fields) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(fields))), np.uint8
        )
    return stored


def with_payload(codec: Codec, stored: np.ndarray, payload: bytes) -> np.ndarray:
    header = codec.parse(stored, 0, KEY)
    return resealed(dataclasses.replace(header, payload_bytes=len(payload)), np.frombuffer(payload, np.uint8))


def compressed(coder: EntropyCoder, data: np.ndarray) -> bytes:
    out = np.empty(len(data) + 1000, np.uint8)
    size = coder.compress_into(data, out)
    assert size is not None
    return bytes(out[:size])


@pytest.fixture(params=CONFIGS)
def piece(request) -> tuple[Codec, np.ndarray]:
    codec = make_codec(CONFIGS[request.param], SMALL)
    return codec, encode(codec, normal_kv(SMALL))


def test_every_byte_matters(piece):
    codec, stored = piece
    rng = np.random.default_rng(0)
    places = np.concatenate([np.arange(HEADER_BYTES), rng.integers(HEADER_BYTES, len(stored), 100)])
    for at in places.tolist():
        damaged = stored.copy()
        damaged[at] ^= rng.integers(1, 256, dtype=np.uint8)
        with pytest.raises(CodecError):
            decode(codec, damaged)


def test_every_length_matters(piece):
    codec, stored = piece
    longer = np.append(stored, np.zeros(1, np.uint8))
    for wrong in (stored[:0], stored[:63], stored[:64], stored[:-1], stored[: len(stored) // 2], longer):
        with pytest.raises(CodecError):
            decode(codec, wrong)


def test_noise_is_no_piece(piece):
    codec, _ = piece
    rng = np.random.default_rng(1)
    for size in (0, 1, 64, 65, 5000):
        with pytest.raises(CodecError):
            decode(codec, rng.integers(0, 256, size, dtype=np.uint8))


def test_a_header_that_lies_under_right_checksums_is_refused(piece):
    codec, stored = piece
    header, payload = codec.parse(stored, 0, KEY), stored[HEADER_BYTES:]
    assert np.array_equal(resealed(header, payload), stored)
    for field, values in LIES:
        for value in values:
            if value != getattr(header, field):
                with pytest.raises(CodecError):
                    decode(codec, resealed(dataclasses.replace(header, **{field: value}), payload))


def test_flags_and_bytes_that_mean_nothing_yet_are_refused(piece):
    """They may mean something to a later version."""
    codec, stored = piece
    for at, value in ((6, 2), (6, 3), (6, 128), (7, 1)):
        fields = stored[:56].copy()
        fields[at] = value
        seal = np.frombuffer(struct.pack("<Q", xxhash.xxh3_64_intdigest(fields.data)), np.uint8)
        with pytest.raises(CodecError):
            decode(codec, np.concatenate([fields, seal, stored[64:]]))


def test_a_piece_under_another_name_or_number_is_refused():
    codec = make_codec({}, CUT)
    raw = normal_kv(CUT)
    stored = encode(codec, raw, 1)
    assert np.array_equal(decode(codec, stored, 1), raw[slice(*CUT.piece(1))])
    for number, key in ((0, KEY), (2, KEY), (1, bytes(16))):
        with pytest.raises(CodecError):
            decode(codec, stored, number, key)


def test_no_codec_reads_the_pieces_of_another():
    raw = normal_kv(SMALL)
    others = {
        **CONFIGS,
        "more bins": {"codec": "binned", "bins": 254},
        "level 2": {"level": 2},
    }
    codecs = {name: make_codec(config, SMALL) for name, config in others.items()}
    # As many bytes, seen as another shape.
    codecs["another layout"] = make_codec({}, kv_block(2, 6, 4, 2, 16, "bfloat16"))
    codecs["another dtype"] = make_codec({}, kv_block(4, 3, 4, 2, 16, "float16"))
    assert len({codec.spec for codec in codecs.values()}) == len(codecs) - 2
    for writer in codecs.values():
        stored = encode(writer, raw)
        for reader in codecs.values():
            if reader is not writer:
                with pytest.raises(CodecError):
                    decode(reader, stored)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "raw"])
def test_a_bomb_is_refused(name: str):
    """A valid stream of 64 MiB where a few KiB belong, small enough to pass for a payload."""
    codec = make_codec(CONFIGS[name], SMALL)
    stored = encode(codec, normal_kv(SMALL))
    header = codec.parse(stored, 0, KEY)
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    bombs = {
        "zstd": zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20)),
        "deflate": compressor.compress(bytes(1 << 20)) + compressor.flush(),
    }
    bomb = bombs["zstd" if "coder=zstd" in codec.spec else "deflate"]
    prefix = bytes(header.raw_bytes - header.mid_bytes) if codec.name == "lossless" else b""
    assert len(prefix + bomb) < header.raw_bytes
    with pytest.raises(CodecError):
        decode(codec, with_payload(codec, stored, prefix + bomb))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "raw"])
def test_streams_that_are_short_cut_or_followed_by_something_are_refused(name: str):
    codec = make_codec(CONFIGS[name], SMALL)
    raw = normal_kv(SMALL)
    stored = encode(codec, raw)
    header = codec.parse(stored, 0, KEY)
    at = header.raw_bytes - header.mid_bytes if codec.name == "lossless" else 0
    prefix, stream = bytes(stored[HEADER_BYTES : HEADER_BYTES + at]), bytes(stored[HEADER_BYTES + at :])
    coder = codec._coder
    short, long = (compressed(coder, np.zeros(header.mid_bytes + n, np.uint8)) for n in (-1, 1))
    for wrong in (b"", stream[:-1], stream[:-9], stream[: len(stream) // 2], stream + b"\0", short, long):
        with pytest.raises(CodecError):
            decode(codec, with_payload(codec, stored, prefix + wrong))
    whole = with_payload(codec, stored, prefix + stream)
    assert np.array_equal(decode(codec, whole), decode(codec, stored))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "raw"])
@pytest.mark.parametrize("seed", range(3))
def test_damaged_streams_under_right_checksums(name: str, seed: int):
    """The decoders themselves, behind the checksums: any outcome but a crash or a write beside the buffers."""
    codec = make_codec(CONFIGS[name], SMALL)
    stored = encode(codec, normal_kv(SMALL))
    rng = np.random.default_rng(seed)
    outcomes = {"refused": 0, "decoded": 0}
    for _ in range(200):
        payload = stored[HEADER_BYTES:].copy()
        for at in rng.integers(0, len(payload), rng.integers(1, 4)).tolist():
            payload[at] ^= rng.integers(1, 256, dtype=np.uint8)
        if rng.random() < 0.2:
            payload = payload[: rng.integers(0, len(payload))]
        try:
            decode(codec, with_payload(codec, stored, bytes(payload)))
            outcomes["decoded"] += 1
        except CodecError:
            outcomes["refused"] += 1
    assert outcomes["refused"], outcomes


def test_scales_that_are_no_scales_are_refused():
    codec = make_codec({"codec": "binned"}, SMALL)
    stored = encode(codec, normal_kv(SMALL))
    header = codec.parse(stored, 0, KEY)
    for bad in (np.nan, np.inf, -np.inf, -1.0, 2.0**127):
        _, mid = guarded(header.mid_bytes)
        codec.decompress(stored, header, mid)
        mid[4:8] = np.frombuffer(np.float32(bad).tobytes(), np.uint8)
        with pytest.raises(CodecError):
            codec.dequantize(stored, header, mid, np.empty(header.raw_bytes, np.uint8))


def test_a_slot_that_is_too_small_is_a_bug_of_the_caller(piece):
    codec, stored = piece
    header = codec.parse(stored, 0, KEY)
    mid, out = np.empty(codec.mid_bytes(SMALL.block_bytes), np.uint8), np.empty(SMALL.block_bytes, np.uint8)
    with pytest.raises(AssertionError):
        codec.dequantize(stored, header, mid, out[:-2])
    if header.mid_bytes:
        with pytest.raises(AssertionError):
            codec.decompress(stored, header, mid[:-1])
    with pytest.raises(AssertionError):
        codec.encode(normal_kv(SMALL), 0, KEY, np.empty(SMALL.block_bytes, np.uint8))


# -- with a key -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_with_a_key_nothing_is_taken_that_was_not_written_with_it(name):
    """Also pieces whose checksums are right: those of a client that can write to the store, and knows all but the
    key."""
    mine, other, open_one = (make_codec(CONFIGS[name], SMALL, key) for key in (b"k" * 32, b"x" * 32, b""))
    raw = normal_kv(SMALL, 1)
    stored = encode(mine, raw)
    assert (decode(mine, stored) == decode(open_one, encode(open_one, raw))).all()
    assert len(stored) == len(encode(open_one, raw)) + 16 and mine.spec == open_one.spec + " mac=hmac-sha256"
    for foreign in (encode(other, raw), encode(open_one, raw), stored[:-1], stored[16:], stored[:20], stored[:0]):
        with pytest.raises(CodecError):
            mine.parse(foreign, 0, KEY)
    for at in range(0, len(stored), 1 + len(stored) // 50):
        damaged = stored.copy()
        damaged[at] ^= 1
        with pytest.raises(CodecError):
            mine.parse(damaged, 0, KEY)
    with pytest.raises(CodecError, match="key"):
        mine.parse(stored, 0, bytes(16))
    forged = stored.copy()
    header = dataclasses.replace(mine.parse(stored, 0, KEY), payload_bytes=len(stored) - HEADER_BYTES - 16)
    forged[:-16] = resealed(header, forged[HEADER_BYTES:-16] ^ np.uint8(1))
    with pytest.raises(CodecError, match="this deployment's secret"):
        mine.parse(forged, 0, KEY)
