"""`Codec`: the interface of a codec to the pipeline of the remote tier, and `PieceCodec`, the common part of all
codecs.

One call, `encode`, writes a piece. Two calls read it, because the pipeline runs them as two stages, on different
threads for different pieces:

    stored ── parse ──► header ── decompress ──► mid ── dequantize ──► out
              checks, checksum     lossless       the caller's slot     the caller's slot

No codec holds state that calls share, so that any thread may make any call. A reader never trusts stored bytes. A
piece that is not exactly as expected raises `CodecError`, and nothing outside of mid and out is ever written.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import xxhash

from sglang.srt.offload.codec.header import (
    HEADER_BYTES,
    TAG_BYTES,
    CodecError,
    PieceHeader,
    parse_header,
    tag_of,
    write_header,
)
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.utils.registry import Option


class Codec(Protocol):
    """All buffers are (n,) uint8, contiguous, at any address.

    name: as in settings. lossy: whether decoded bytes may differ from the encoded ones. spec: name, version and all
    settings. It is part of the namespace of stored objects, because pieces of another spec cannot be read.
    """

    name: ClassVar[str]
    codec_id: ClassVar[int]
    lossy: ClassVar[bool]
    layout: BlockLayout
    # With which pieces are authenticated; empty: they are not.
    mac_key: bytes

    @property
    def coder_name(self) -> str:
        """Of its entropy coder; "" without one."""
        ...

    @property
    def fingerprint(self) -> int:
        """Of codec, settings and layout, as headers have it."""
        ...

    @property
    def spec(self) -> str: ...

    def max_stored_bytes(self, raw_bytes: int) -> int:
        """The most that `encode` writes for a piece of raw_bytes, header included."""
        ...

    def mid_bytes(self, raw_bytes: int) -> int:
        """The size of the slot between `decompress` and `dequantize`."""
        ...

    def encode(self, raw: np.ndarray, piece: int, key: bytes, out: np.ndarray) -> int:
        """Write piece `piece` of the block `key` (16 bytes) to out, (>= max_stored_bytes,). Returns the number of
        bytes, header included. raw: the piece's bytes, as many as the layout has."""
        ...

    def parse(self, stored: np.ndarray, piece: int, key: bytes) -> PieceHeader:
        """Check a stored piece, checksum included, and return its header. Raises CodecError unless it is piece
        `piece` of block `key`, whole, and written with this codec, these settings and this layout."""
        ...

    def decompress(self, stored: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        """The lossless stage, into mid, (>= mid_bytes,). Without the GIL. CodecError on a bad payload."""
        ...

    def dequantize(self, stored: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        """From mid to out, (raw_bytes,). Values that were stored without coding come from `stored`. Without the
        GIL."""
        ...


class PieceCodec:
    """A codec without its two stages: header, checks, and pieces that do not compress.

    A subclass gives name, codec_id, summary, its options with `from_settings`, `_settings` and the three functions
    below. These functions see only payloads of pieces that are not STORED, and sizes that have been checked.
    """

    name: ClassVar[str]
    codec_id: ClassVar[int]
    lossy: ClassVar[bool] = False
    version: ClassVar[int] = 1
    # The accuracy of decoded values, in words for the reference.
    summary: ClassVar[str]
    options: ClassVar[tuple[Option, ...]] = ()
    # Set before the first use.
    mac_key: bytes = b""

    @classmethod
    def from_settings(cls, layout: BlockLayout, settings: Mapping[str, Any]) -> Self:
        """settings: a user's settings, checked one by one against `options`. Raises ValueError, with the remedy, for
        settings that contradict each other or do not fit the layout."""
        return cls(layout)

    @classmethod
    def of_layers(cls, settings: Mapping[str, Any], layers: Sequence[int], num_layers: int) -> dict[str, Any]:
        """Settings with which some layers are coded alone as they are in a cache of all num_layers. settings: as of
        `from_settings`. layers: ascending. Raises ValueError."""
        return dict(settings)

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout

    @property
    def spec(self) -> str:
        settings = self._settings() | ({"mac": "hmac-sha256"} if self.mac_key else {})
        return " ".join([f"{self.name}-v{self.version}", *(f"{k}={v}" for k, v in settings.items())])

    @property
    def coder_name(self) -> str:
        return ""

    @cached_property
    def fingerprint(self) -> int:
        return xxhash.xxh3_64_intdigest(f"{self.spec}\n{self.layout.spec}".encode())

    @property
    def _tag_bytes(self) -> int:
        return TAG_BYTES if self.mac_key else 0

    def max_stored_bytes(self, raw_bytes: int) -> int:
        return HEADER_BYTES + raw_bytes + self._tag_bytes

    def mid_bytes(self, raw_bytes: int) -> int:
        return 0

    def encode(self, raw: np.ndarray, piece: int, key: bytes, out: np.ndarray) -> int:
        raw_bytes = self.layout.raw_bytes(piece)
        assert raw.shape == (raw_bytes,) and raw.dtype == np.uint8, f"piece {piece} has {raw_bytes} bytes"
        assert len(out) >= self.max_stored_bytes(raw_bytes), f"{len(out)} bytes do not hold piece {piece}"
        payload_bytes = self._compress(raw, piece, out[HEADER_BYTES : HEADER_BYTES + raw_bytes])
        stored = payload_bytes is None
        if payload_bytes is None:
            payload_bytes = raw_bytes
            np.copyto(out[HEADER_BYTES : HEADER_BYTES + raw_bytes], raw)
        mid_bytes = 0 if stored else self.mid_bytes(raw_bytes)
        header = PieceHeader(self.codec_id, stored, piece, key, raw_bytes, mid_bytes, payload_bytes, self.fingerprint)
        size = HEADER_BYTES + payload_bytes
        write_header(header, out[:size])
        if self.mac_key:
            out[size : size + TAG_BYTES] = np.frombuffer(tag_of(out[:size], self.mac_key), np.uint8)
        return size + self._tag_bytes

    def parse(self, stored: np.ndarray, piece: int, key: bytes) -> PieceHeader:
        raw_bytes = self.layout.raw_bytes(piece)
        if self.mac_key:
            stored, tag = stored[:-TAG_BYTES], stored[-TAG_BYTES:]
            if not hmac.compare_digest(tag_of(stored, self.mac_key), tag.tobytes()):
                raise CodecError("it was not written with this deployment's secret, or is damaged")
        return parse_header(
            stored,
            codec_id=self.codec_id,
            fingerprint=self.fingerprint,
            piece=piece,
            key=key,
            raw_bytes=raw_bytes,
            mid_bytes=self.mid_bytes(raw_bytes),
        )

    def decompress(self, stored: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        if not header.stored:
            self._decompress(self._payload(stored, header), header, mid[: self._checked_mid(header, mid)])

    def dequantize(self, stored: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        assert out.shape == (header.raw_bytes,), f"out has {out.shape}, the piece {header.raw_bytes} bytes"
        payload = self._payload(stored, header)
        if header.stored:
            np.copyto(out, payload)
        else:
            self._dequantize(payload, header, mid[: self._checked_mid(header, mid)], out)

    def _payload(self, stored: np.ndarray, header: PieceHeader) -> np.ndarray:
        end = HEADER_BYTES + header.payload_bytes
        assert len(stored) == end + self._tag_bytes, "not the piece that the header was parsed from"
        return stored[HEADER_BYTES:end]

    def _checked_mid(self, header: PieceHeader, mid: np.ndarray) -> int:
        assert len(mid) >= header.mid_bytes, f"a slot of {len(mid)} bytes, the piece needs {header.mid_bytes}"
        return header.mid_bytes

    def _settings(self) -> dict[str, object]:
        return {}

    def _compress(self, raw: np.ndarray, piece: int, payload: np.ndarray) -> int | None:
        """Write to payload, (raw_bytes,). Returns the number of bytes, less than raw_bytes; None if that is
        impossible."""
        raise NotImplementedError

    def _decompress(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        raise NotImplementedError

    def _dequantize(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        raise NotImplementedError


class RawCodec(PieceCodec):
    """Stores every piece as it is, with header and checksum: the baseline."""

    name = "raw"
    codec_id = 1
    summary = "every bit; nothing is compressed"

    def _compress(self, raw: np.ndarray, piece: int, payload: np.ndarray) -> int | None:
        return None

    def _decompress(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        raise CodecError("a raw piece is always STORED")

    def _dequantize(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        raise CodecError("a raw piece is always STORED")
