"""The format of a segment, the file in which `HiCacheFile` keeps blocks: a header, a table, slots of one size.

Pure: bytes in, bytes out. Opens no file, and knows neither the index nor when a segment goes.

    0        4 KiB                   data_offset
    | header | table: 64 B per slot | slot 0 | slot 1 | ... | slot num_slots - 1 |
      magic      magic, version       payload: the block's pages, page-first, then zeros up to 4 KiB
      version    namespace, key
      shape      checksum of the payload
      namespace  checksum of this entry
      checksum

    entry:  zeros --claim--> claimed: a key, no checksum --payload is written--> complete --erased--> zeros
              ^                 | its writer failed or died                         | overwritten: claimed
              +-----------------+                                                   +----------------------->

A block exists when its entry is complete and verifies, and its payload has the entry's checksum. The entry becomes
complete after the payload is written, so a process killed in between leaves a claim, which counts for nothing once
its writer is dead. What a power cut leaves is found by the checksums: the table's when the store opens, the payload's
at each read. The page size is in the header; a reader with another one permutes (`page_order`). All numbers are
little-endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from sglang.srt.mem_cache.page_layout import PageLayout

VERSION = 2
# Of the header, of the table and of each slot, so that reads and writes may go past the page cache.
ALIGNMENT = 4096
KEY_BYTES = 16
CHECKSUM_BYTES = 16
ENTRY_BYTES = 64
MAX_SLOTS = 1 << 20
# In place of the checksum: of an entry that holds no block, and of a claimed one.
NO_CHECKSUM, CLAIMED = bytes(CHECKSUM_BYTES), b"\xff" * CHECKSUM_BYTES

_SEGMENT_MAGIC = b"HiCacheS"
_ENTRY_MAGIC = b"HiCB"
_CLAIM_MAGIC = b"HiCC"
# magic, version, block_tokens, page_size, num_slots, page_bytes, payload_bytes, namespace; then their xxh3_64.
_HEADER = struct.Struct("<8sIIIIQQ32s")
# magic, version, payload_bytes, start of the namespace, key, checksum; then their xxh3_64, seeded by the slot.
_ENTRY = struct.Struct("<4sIQ8s16s16s")
_U64 = struct.Struct("<Q")
_VERSION = struct.Struct("<8sI")

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
    """What the entries of a segment hold, up to the last one that was written. slots: the complete ones; claims: the
    claimed ones; keys, checksums: of all slots, one after the other; num_bad: entries that were written and do not
    verify. An entry that is all zeros was never written, or its block was forgotten; one that does not verify has a
    key and a checksum of zeros.
    """

    slots: list[int]
    claims: list[int]
    keys: bytes
    checksums: bytes
    num_bad: int

    def changed(self, keys: bytes | bytearray, checksums: bytes | bytearray) -> list[int]:
        """The slots of which a table with these keys and checksums differs."""
        num_slots = max(len(self.keys), len(keys)) // KEY_BYTES
        words = np.zeros((2, 2, num_slots, 2), "<u8")
        for row, data in zip(words.reshape(4, -1), (self.keys, self.checksums, keys, checksums)):
            row[: len(data) // 8] = np.frombuffer(data, "<u8")
        slots: list[int] = np.flatnonzero((words[0] != words[1]).any(axis=(0, 2))).tolist()
        return slots


@dataclass(frozen=True)
class SegmentLayout:
    """Where things lie in a segment.

    namespace: 32 bytes, the digest of all that two blocks must share to be interchangeable. pages: of the host pool
    that wrote the blocks. The page size and num_slots are all in which segments of one folder may differ.
    """

    namespace: bytes
    block_tokens: int
    pages: PageLayout
    num_slots: int

    @property
    def page_size(self) -> int:
        return self.pages.page_size

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.pages.page_size

    @property
    def payload_bytes(self) -> int:
        return self.pages_per_block * self.pages.page_bytes

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
        fields = (self.block_tokens, self.page_size, self.num_slots, self.pages.page_bytes, self.payload_bytes)
        packed = _HEADER.pack(_SEGMENT_MAGIC, VERSION, *fields, self.namespace)
        return (packed + _U64.pack(xxhash.xxh3_64_intdigest(packed))).ljust(ALIGNMENT, b"\0")

    def read_header(self, header: bytes) -> SegmentLayout:
        """The layout of a file that starts so; SegmentError if it differs from this one in more than page size and
        num_slots."""
        if len(header) < _HEADER.size + _U64.size:
            raise SegmentError("it ends inside its header")
        packed = header[: _HEADER.size]
        magic, version, _, page_size, num_slots, _, _, namespace = _HEADER.unpack(packed)
        if magic != _SEGMENT_MAGIC:
            raise SegmentError("it is not a segment")
        if version != VERSION:
            raise SegmentError(f"it has version {version} of the format, not {VERSION}")
        if _U64.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(packed):
            raise SegmentError("the checksum of its header does not agree")
        if namespace != self.namespace:
            raise SegmentError("it belongs to another namespace")
        if not page_size or self.block_tokens % page_size or not 1 <= num_slots <= MAX_SLOTS:
            raise SegmentError("its blocks have another shape")
        found = replace(self, pages=replace(self.pages, page_size=page_size), num_slots=num_slots)
        if found.header()[: _HEADER.size] != packed:
            raise SegmentError("its blocks have another shape")
        return found

    def begins(self, header: bytes) -> bool:
        """Whether a file that starts so still has this layout."""
        return header.startswith(self.header()[: _HEADER.size + _U64.size])

    def entry(self, slot: int, key: bytes, checksum: bytes) -> bytes:
        """The table's row for a block, ENTRY_BYTES long."""
        return self._row(_ENTRY_MAGIC, slot, key, checksum)

    def claim(self, slot: int, key: bytes) -> bytes:
        """The table's row for a block that is being written."""
        return self._row(_CLAIM_MAGIC, slot, key, CLAIMED)

    def _row(self, magic: bytes, slot: int, key: bytes, checksum: bytes) -> bytes:
        packed = _ENTRY.pack(magic, VERSION, self.payload_bytes, self.namespace[:8], key, checksum)
        return packed + _U64.pack(xxhash.xxh3_64_intdigest(packed, slot))

    def is_entry(self, slot: int, row: bytes) -> bool:
        """Whether this is what a process may have written to the slot's entry: zeros, a claim or a complete entry."""
        if not any(row):
            return len(row) == ENTRY_BYTES
        at = _ENTRY.size - KEY_BYTES - CHECKSUM_BYTES
        key, checksum = row[at : at + KEY_BYTES], row[at + KEY_BYTES : at + KEY_BYTES + CHECKSUM_BYTES]
        return row in (self.entry(slot, key, checksum), self.claim(slot, key)) if len(row) == ENTRY_BYTES else False

    def read_table(self, table: bytes) -> Table:
        """table: what the file holds from ALIGNMENT on; it may be cut short."""
        rows = np.frombuffer(table, _ROW, min(len(table) // ENTRY_BYTES, self.num_slots))
        written = np.flatnonzero(rows.view("<u8").reshape(-1, ENTRY_BYTES // 8).any(axis=1))
        rows = rows[: int(written[-1]) + 1 if len(written) else 0]
        digest, size = xxhash.xxh3_64_intdigest, _ENTRY.size
        # A call per entry, without any Python around it: a store may open with a million.
        digests = [digest(table[at : at + size], at // ENTRY_BYTES) for at in range(0, rows.nbytes, ENTRY_BYTES)]
        verified = rows["entry_checksum"] == np.array(digests, np.uint64)
        complete, claimed = (
            verified & (rows["fixed"] == np.frombuffer(row, _ROW)["fixed"])
            for row in (self.entry(0, bytes(KEY_BYTES), NO_CHECKSUM), self.claim(0, bytes(KEY_BYTES)))
        )
        slots, claims = np.flatnonzero(complete).tolist(), np.flatnonzero(claimed).tolist()
        num_bad = len(written) - len(slots) - len(claims)
        if num_bad:
            rows = rows.copy()
            rows.view("<u8").reshape(-1, ENTRY_BYTES // 8)[~(complete | claimed)] = 0
        return Table(slots, claims, rows["key"].tobytes(), rows["checksum"].tobytes(), num_bad)

    def is_table_of(self, table: bytes, keys: bytes | bytearray, checksums: bytes | bytearray) -> bool:
        """Whether a file's table has these keys and checksums, unverified, and nothing behind them."""
        used = len(keys) // KEY_BYTES
        if len(table) < used * ENTRY_BYTES or any(table[used * ENTRY_BYTES :]):
            return False
        rows = np.frombuffer(table, _ROW, used)
        return rows["key"].tobytes() == keys and rows["checksum"].tobytes() == checksums

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


def namespace_digest(namespace: bytes, block_tokens: int, pages: PageLayout) -> bytes:
    """32 bytes that name the folder of a namespace, and are repeated in every segment: other contents of a token or
    another version of the format are other folders. So is another page size only where pages hold something that
    does not belong to one token."""
    if len(pages.per_token) == len(pages.components):
        pages = replace(pages, page_size=1)
    shape = json.dumps(pages.as_dict(), sort_keys=True).encode()
    numbers = struct.pack("<III", VERSION, block_tokens, len(shape))
    return hashlib.blake2b(numbers + shape + namespace, digest_size=32, person=b"HiCacheFile").digest()


def format_version(header: bytes) -> int | None:
    """The version of the format of a segment that starts so; None: it is no segment."""
    if len(header) < _VERSION.size:
        return None
    magic, version = _VERSION.unpack_from(header)
    return version if magic == _SEGMENT_MAGIC else None


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
