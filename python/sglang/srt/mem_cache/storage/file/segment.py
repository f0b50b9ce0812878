"""The format of a segment, the file in which `HiCacheFile` keeps blocks: a header, a table, slots of one size.

Pure: bytes in, bytes out. Opens no file, and knows neither the index nor when a segment goes.

    0        4 KiB                   data_offset
    | header | table: 64 B per slot | slot 0 | slot 1 | ... | slot num_slots - 1 |
      magic    magic, version         payload: the block's pages, page-first, then zeros up to 4 KiB
      version  namespace, key
      namespace  checksum of the payload
      shape    checksum of this entry
      checksum

A block exists when its entry verifies and its payload has the entry's checksum. The entry is written after the
payload, so a process killed in between leaves a slot that counts as free. What a power cut leaves is found by the
checksums: the table's when the store opens, the payload's at each read. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

VERSION = 1
# Of the header, of the table and of each slot, so that reads and writes may go past the page cache.
ALIGNMENT = 4096
KEY_BYTES = 16
CHECKSUM_BYTES = 16
ENTRY_BYTES = 64
MAX_SLOTS = 1 << 20

_SEGMENT_MAGIC = b"HiCacheS"
_ENTRY_MAGIC = b"HiCB"
# magic, version, block_tokens, page_size, num_slots, page_bytes, payload_bytes, namespace; then their xxh3_64.
_HEADER = struct.Struct("<8sIIIIQQ32s")
# magic, version, payload_bytes, start of the namespace, key, checksum; then their xxh3_64, seeded by the slot.
_ENTRY = struct.Struct("<4sIQ8s16s16s")
_U64 = struct.Struct("<Q")

_ROW = np.dtype(
    [
        ("fixed", "V24"),
        ("key", f"V{KEY_BYTES}"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("entry_checksum", "<u8"),
    ]
)
assert _ENTRY.size + _U64.size == ENTRY_BYTES == _ROW.itemsize


class SegmentError(Exception):
    """A file is not a segment of this namespace and version; the message has the reason."""


@dataclass(frozen=True)
class Table:
    """What the entries of a segment say, up to the last one that was written. slots: those whose entries verify;
    keys, checksums: of all slots, one after the other; num_bad: entries that were written and do not verify.

    An entry that is all zeros was never written, or its block was forgotten.
    """

    slots: list[int]
    keys: bytes
    checksums: bytes
    num_bad: int


@dataclass(frozen=True)
class SegmentLayout:
    """Where things lie in a segment.

    namespace: 32 bytes, the digest of all that two blocks must share to be interchangeable. page_bytes: of one page,
    K and V of all layers. num_slots: the only number in which segments of one folder may differ.
    """

    namespace: bytes
    block_tokens: int
    page_size: int
    page_bytes: int
    num_slots: int

    @property
    def payload_bytes(self) -> int:
        return self.block_tokens // self.page_size * self.page_bytes

    @property
    def slot_bytes(self) -> int:
        return _aligned(self.payload_bytes)

    @property
    def data_offset(self) -> int:
        return ALIGNMENT + _aligned(self.num_slots * ENTRY_BYTES)

    def slot_offset(self, slot: int) -> int:
        return self.data_offset + slot * self.slot_bytes

    def size_bytes(self, num_used: int) -> int:
        """Of a file whose first num_used slots were written."""
        return self.slot_offset(num_used)

    @staticmethod
    def entry_offset(slot: int) -> int:
        return ALIGNMENT + slot * ENTRY_BYTES

    def fitting(self, segment_bytes: int) -> SegmentLayout:
        """With as many slots as fit into segment_bytes, and at least one."""
        num_slots = (segment_bytes - 2 * ALIGNMENT) // (self.slot_bytes + ENTRY_BYTES)
        return replace(self, num_slots=min(max(1, num_slots), MAX_SLOTS))

    def header(self) -> bytes:
        """The first ALIGNMENT bytes of a file."""
        fields = (self.block_tokens, self.page_size, self.num_slots, self.page_bytes, self.payload_bytes)
        packed = _HEADER.pack(_SEGMENT_MAGIC, VERSION, *fields, self.namespace)
        return (packed + _U64.pack(xxhash.xxh3_64_intdigest(packed))).ljust(ALIGNMENT, b"\0")

    def read_header(self, header: bytes) -> SegmentLayout:
        """The layout of a file that starts so; SegmentError unless it differs from this one in num_slots alone."""
        if len(header) < _HEADER.size + _U64.size:
            raise SegmentError("it ends inside its header")
        packed = header[: _HEADER.size]
        magic, version, _, _, num_slots, _, _, namespace = _HEADER.unpack(packed)
        if magic != _SEGMENT_MAGIC:
            raise SegmentError("it is not a segment")
        if version != VERSION:
            raise SegmentError(f"it has version {version} of the format, not {VERSION}")
        if _U64.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(packed):
            raise SegmentError("the checksum of its header does not agree")
        if namespace != self.namespace:
            raise SegmentError("it belongs to another namespace")
        found = replace(self, num_slots=num_slots)
        if not 1 <= num_slots <= MAX_SLOTS or found.header()[: _HEADER.size] != packed:
            raise SegmentError("its blocks have another shape")
        return found

    def entry(self, slot: int, key: bytes, checksum: bytes) -> bytes:
        """The table's row for a block, ENTRY_BYTES long."""
        packed = _ENTRY.pack(_ENTRY_MAGIC, VERSION, self.payload_bytes, self.namespace[:8], key, checksum)
        return packed + _U64.pack(xxhash.xxh3_64_intdigest(packed, slot))

    def read_table(self, table: bytes) -> Table:
        """table: what the file holds from ALIGNMENT on; it may be cut short."""
        rows = np.frombuffer(table, _ROW, min(len(table) // ENTRY_BYTES, self.num_slots))
        written = np.flatnonzero(rows.view("<u8").reshape(-1, ENTRY_BYTES // 8).any(axis=1))
        rows = rows[: int(written[-1]) + 1 if len(written) else 0]
        digest, size = xxhash.xxh3_64_intdigest, _ENTRY.size
        # A call per entry, without any Python around it: a store may open with a million.
        digests = [digest(table[at : at + size], at // ENTRY_BYTES) for at in range(0, rows.nbytes, ENTRY_BYTES)]
        fixed = np.frombuffer(self.entry(0, bytes(KEY_BYTES), bytes(CHECKSUM_BYTES)), _ROW)["fixed"]
        good = (rows["entry_checksum"] == np.array(digests, np.uint64)) & (rows["fixed"] == fixed)
        slots = np.flatnonzero(good).tolist()
        keys, checksums = rows["key"].tobytes(), rows["checksum"].tobytes()
        return Table(slots, keys, checksums, len(written) - len(slots))

    def hasher(self, key: bytes) -> xxhash.xxh3_128:
        """For `checksum`, piece by piece."""
        return xxhash.xxh3_128(self.namespace + key)

    def checksum(self, key: bytes, payload: Sequence[memoryview]) -> bytes:
        """xxh3_128 of the namespace, the key and the payload, which may lie in several pieces: the same bytes under
        another key do not verify. Gives up the GIL over large pieces."""
        state = self.hasher(key)
        for piece in payload:
            state.update(piece)
        return state.digest()


def namespace_digest(namespace: bytes, block_tokens: int, page_size: int, page_bytes: int) -> bytes:
    """32 bytes that name the folder of a namespace, and are repeated in every segment: other sizes or another version
    of the format are other folders."""
    numbers = struct.pack("<IIIQ", VERSION, block_tokens, page_size, page_bytes)
    return hashlib.blake2b(numbers + namespace, digest_size=32, person=b"HiCacheFile").digest()


def pieces(buffers: Sequence[memoryview], size_bytes: int) -> list[list[memoryview]]:
    """Cut a sequence of buffers into consecutive parts of size_bytes each, the last may have fewer; a part is one or
    more pieces."""
    parts: list[list[memoryview]] = []
    part: list[memoryview] = []
    room = size_bytes
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            piece = buffer[start : start + room]
            part.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                parts.append(part)
                part, room = [], size_bytes
    return [*parts, part] if part else parts


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
