"""The reference in numpy: it defines the result that `csrc/kvcodec.c` must match byte for byte. For
`deflate_literals`, which has many valid streams, it defines what the stream decodes to.

Arguments have been checked (`kvcodec/__init__.py` describes them). Allocates temporaries as it goes.
"""

from __future__ import annotations

import zlib

import numpy as np

# A vector with a value beyond this, with an infinity or with a NaN is not binned.
LARGEST = np.float32(2.0**126)
# A scale below this would be subnormal, or 0.
SMALLEST_SCALE = np.float32(2.0**-126)


def split_planes(raw: np.ndarray, itemsize: int, first: np.ndarray, rest: np.ndarray) -> None:
    unsigned = np.dtype(f"<u{itemsize}")
    values = raw.view(unsigned)
    rotated = values << unsigned.type(1) | values >> unsigned.type(8 * itemsize - 1)
    planes = rotated.view(np.uint8).reshape(-1, itemsize)[:, ::-1]  # the most significant byte first
    first[:] = planes[:, 0]
    rest.reshape(itemsize - 1, -1)[:] = planes[:, 1:].T


def merge_planes(first: np.ndarray, rest: np.ndarray, itemsize: int, out: np.ndarray) -> None:
    unsigned = np.dtype(f"<u{itemsize}")
    planes = np.empty((len(first), itemsize), np.uint8)
    planes[:, -1] = first
    planes[:, :-1] = rest.reshape(itemsize - 1, -1)[::-1].T
    rotated = planes.view(unsigned)[:, 0]
    out.view(unsigned)[:] = rotated >> unsigned.type(1) | rotated << unsigned.type(8 * itemsize - 1)


def bin_vectors(
    raw: np.ndarray, dtype: str, dim: int, half: np.ndarray, scales: np.ndarray, codes: np.ndarray
) -> bool:
    values = to_float32(raw, dtype).reshape(-1, dim)
    largest = np.abs(values).max(axis=1)
    if not (largest <= LARGEST).all():
        return False
    scale = np.maximum(largest / half.astype(np.float32), SMALLEST_SCALE)
    scale[largest == 0] = 0
    scales.view(np.float32)[:] = scale
    divisor = np.where(scale == 0, np.float32(1), scale)[:, None]
    codes.reshape(-1, dim)[:] = np.rint(values / divisor).astype(np.int8)
    return True


def unbin_vectors(scales: np.ndarray, codes: np.ndarray, dtype: str, dim: int, out: np.ndarray) -> None:
    values = codes.reshape(-1, dim).astype(np.float32) * scales.view(np.float32)[:, None]
    out[:] = from_float32(values, dtype)


def deflate_literals(data: np.ndarray, out: np.ndarray) -> int | None:
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    stream = compressor.compress(data.data) + compressor.flush()
    if len(stream) > len(out):
        return None
    out[: len(stream)] = np.frombuffer(stream, np.uint8)
    return len(stream)


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """raw: bytes of values of `dtype`, little-endian."""
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of values rounded to `dtype`, to the nearest, ties to even. Finite values only."""
    values = np.ascontiguousarray(values, np.float32).reshape(-1)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype("<f2" if dtype == "float16" else "<f4").view(np.uint8)


def inflate(stream: np.ndarray, out: np.ndarray) -> bool:
    decoder = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        decoded = decoder.decompress(stream.data, len(out) + 1)
    except zlib.error:
        return False
    if len(decoded) != len(out) or not decoder.eof or decoder.unused_data:
        return False
    out[:] = np.frombuffer(decoded, np.uint8)
    return True
