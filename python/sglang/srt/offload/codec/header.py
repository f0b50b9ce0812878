"""The header of a stored piece: its codec, its block and place in it, and checksums.

A reader knows what it asked for and takes no size from the header. Each field must equal the value that the reader
computes; otherwise the piece is refused with `CodecError` before anything is decoded. A process that can write to the
store can therefore feed wrong values under right checksums, but no wrong size; and no values at all where pieces are
authenticated: a tag follows the payload then, HMAC-SHA256 of header and payload, cut to 16 bytes.

    offset  bytes  field
    0       4      magic "SGKV"
    4       1      version of this header
    5       1      codec id
    6       1      flags: 1 = STORED, the payload is the raw bytes
    7       1      0
    8       4      piece index
    12      16     key: the name of the block
    28      4      raw bytes: of the piece
    32      4      mid bytes: what `decompress` writes
    36      4      payload bytes
    40      8      fingerprint of codec, settings and layout
    48      8      xxh3_64 of the payload
    56      8      xxh3_64 of bytes 0..56
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

MAGIC = b"SGKV"
VERSION = 1
STORED = 1
KEY_BYTES = 16

_FIELDS = struct.Struct("<4sBBBxI16sIIIQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
assert HEADER_BYTES == 64

TAG_BYTES = 16


def tag_of(piece: np.ndarray, mac_key: bytes) -> bytes:
    """piece: (n,) uint8, header and payload."""
    return hmac.new(mac_key, piece.data, hashlib.sha256).digest()[:TAG_BYTES]


class CodecError(Exception):
    """A stored piece is not as expected: damaged, foreign, or written with other settings. Recompute it."""


@dataclass(frozen=True)
class PieceHeader:
    codec_id: int
    stored: bool
    piece: int
    key: bytes
    raw_bytes: int
    mid_bytes: int
    payload_bytes: int
    fingerprint: int


def write_header(header: PieceHeader, out: np.ndarray) -> None:
    """out: (HEADER_BYTES + payload_bytes,) uint8 that holds the payload already."""
    assert len(header.key) == KEY_BYTES, f"a key of {len(header.key)} bytes"
    assert len(out) == HEADER_BYTES + header.payload_bytes
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.codec_id,
        STORED if header.stored else 0,
        header.piece,
        header.key,
        header.raw_bytes,
        header.mid_bytes,
        header.payload_bytes,
        header.fingerprint,
        xxhash.xxh3_64_intdigest(out[HEADER_BYTES:].data),
    )
    packed = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    out[:HEADER_BYTES] = np.frombuffer(packed, np.uint8)


def parse_header(
    stored: np.ndarray,
    *,
    codec_id: int,
    fingerprint: int,
    piece: int,
    key: bytes,
    raw_bytes: int,
    mid_bytes: int,
) -> PieceHeader:
    """Check a stored piece, (n,) uint8, header and payload, against what the reader expects. CodecError if anything
    differs. mid_bytes: expected unless the piece is STORED, where it is 0."""
    if len(stored) < HEADER_BYTES:
        raise CodecError(f"{len(stored)} bytes are no stored piece")
    fields = bytes(stored[: _FIELDS.size])
    (checksum,) = _CHECKSUM.unpack(bytes(stored[_FIELDS.size : HEADER_BYTES]))
    magic, version, codec, flags, at, name, raw, mid, payload, made_by, payload_checksum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise CodecError("not a stored piece: the magic is missing")
    if version != VERSION:
        raise CodecError(f"a piece of version {version}, this reads {VERSION}")
    if checksum != xxhash.xxh3_64_intdigest(fields) or fields[7]:
        raise CodecError("the header is damaged")
    is_stored = flags == STORED
    payload_expected = len(stored) - HEADER_BYTES
    checks = (
        ("codec", codec, codec_id),
        ("flags", flags, STORED if is_stored else 0),
        ("piece", at, piece),
        ("key", name, key),
        ("settings or layout", made_by, fingerprint),
        ("raw bytes", raw, raw_bytes),
        ("mid bytes", mid, 0 if is_stored else mid_bytes),
        ("payload bytes", payload, raw_bytes if is_stored else payload_expected),
        ("payload bytes", payload, payload_expected),
    )
    for what, found, expected in checks:
        if found != expected:
            raise CodecError(f"{what}: found {found!r}, expected {expected!r}")
    if payload_checksum != xxhash.xxh3_64_intdigest(stored[HEADER_BYTES:].data):
        raise CodecError("the payload is damaged")
    return PieceHeader(codec, is_stored, at, name, raw, mid, payload, made_by)
