"""Entropy coders: bytes to fewer bytes, and back into a caller's buffer.

Decoding writes at most the buffer and releases the GIL. It raises `CodecError` unless the stream is valid, whole and
exactly as long as the buffer. The libraries' objects are not safe to share, so that each thread has its own.

Level 0 means *entropy only*: no search for repeated strings. KV has none, and a coder that finds some by chance codes
worse (docs/records/experiments.md). Levels from 1 on are the library's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import zstandard
from isal import igzip_lib

from sgl_kernel import kvcodec
from sglang.srt.offload.codec.header import CodecError
from sglang.srt.utils.registry import WHOLE_NUMBER, Option, one_of

# The most memory that a frame may ask its reader for; pieces are far smaller.
_ZSTD_MAX_WINDOW_BYTES = 8 << 20


class EntropyCoder(Protocol):
    """level: see above; ValueError for a level that the coder does not have."""

    name: ClassVar[str]
    level: int

    def compress_into(self, data: np.ndarray, out: np.ndarray) -> int | None:
        """The length of the stream at the front of out; None if out is too small for it."""
        ...

    def decompress_into(self, data: np.ndarray, out: np.ndarray) -> None: ...


class Zstd:
    name: ClassVar[str] = "zstd"

    def __init__(self, level: int = 0) -> None:
        if not 0 <= level <= 19:
            raise ValueError(f"zstd has no level {level}: use 0 (entropy only) or 1 to 19")
        self.level = level
        self._local = threading.local()

    def compress_into(self, data: np.ndarray, out: np.ndarray) -> int | None:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(compression_params=self._parameters())
        return _put(compressor.compress(data.data), out)

    def decompress_into(self, data: np.ndarray, out: np.ndarray) -> None:
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
            self._local.decompressor = decompressor
        try:
            # With room for the whole frame, zstd decodes straight into it. Only a second read shows that the frame
            # has ended.
            with decompressor.stream_reader(data.data) as reader:
                num_read = reader.readinto(out)
                has_more = num_read == len(out) and reader.read(1)
        except zstandard.ZstdError as e:
            raise CodecError(f"not a zstd frame: {e}") from e
        if num_read != len(out) or has_more:
            raise CodecError(f"a zstd frame of {num_read}{'+' if has_more else ''} bytes, expected {len(out)}")

    def _parameters(self) -> zstandard.ZstdCompressionParameters:
        if self.level:
            return zstandard.ZstdCompressionParameters.from_level(self.level, write_checksum=False)
        # The fast strategy with the least search: a table of 64 entries, matches of 7 bytes and more. A window of 32
        # KiB gives a Huffman code per 32 KiB, so that K and V of a token have codes of their own.
        return zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=15, hash_log=6, min_match=7, write_checksum=False
        )


class Deflate:
    """Raw Deflate (RFC 1951, no zlib header), which BlueField-3 decodes. Levels 1 to 3 are ISA-L's, which has no
    entropy-only level, and decodes matches faster than our loops do."""

    name: ClassVar[str] = "deflate"

    def __init__(self, level: int = 0) -> None:
        if not 0 <= level <= 3:
            raise ValueError(f"deflate has no level {level}: use 0 (entropy only) or 1 to 3")
        self.level = level

    def compress_into(self, data: np.ndarray, out: np.ndarray) -> int | None:
        if self.level:
            return _put(igzip_lib.compress(data, self.level, igzip_lib.COMP_DEFLATE), out)
        return kvcodec.deflate_literals(data, out)

    def decompress_into(self, data: np.ndarray, out: np.ndarray) -> None:
        if not self.level:
            if not kvcodec.inflate(data, out):
                raise CodecError(f"not a Deflate stream of {len(out)} bytes")
            return
        # ISA-L's binding decodes into memory of its own, at most one byte more than expected.
        decompressor = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_DEFLATE)
        try:
            decoded = decompressor.decompress(data, len(out) + 1)
        except igzip_lib.IsalError as e:  # type: ignore[misc]  # the stub has it as a value
            raise CodecError(f"not a Deflate stream: {e}") from e
        if len(decoded) != len(out) or not decompressor.eof or decompressor.unused_data:
            raise CodecError(f"a Deflate stream of {len(decoded)} bytes, expected {len(out)} and an end")
        np.copyto(out, np.frombuffer(decoded, np.uint8))


def _put(stream: bytes, out: np.ndarray) -> int | None:
    if len(stream) > len(out):
        return None
    out[: len(stream)] = np.frombuffer(stream, np.uint8)
    return len(stream)


CODERS: dict[str, type[Zstd] | type[Deflate]] = {"zstd": Zstd, "deflate": Deflate}


def coder_options(default: str) -> tuple[Option, ...]:
    """The options of a codec with an entropy coder."""
    return (
        Option("coder", one_of(tuple(CODERS)), default, "the entropy coder"),
        Option(
            "level", WHOLE_NUMBER, 0, "0 codes entropy only; from 1 on the library's levels, 19 of zstd, 3 of deflate"
        ),
    )


def make_coder(settings: Mapping[str, Any], default: str) -> EntropyCoder:
    """settings: checked against `coder_options`. ValueError for a level that the coder does not have."""
    return CODERS[settings.get("coder", default)](settings.get("level", 0))
