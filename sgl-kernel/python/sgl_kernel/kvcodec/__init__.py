"""The inner loops of the remote tier's codecs, on the CPU: values to byte planes and back, vectors to bins and back.

Owns no memory. Compiled C where there is a compiler, else numpy (`reference.py`, which defines the result). Runs in
the calling thread, in C without the GIL, and is done when it returns. There is no state, so that any thread may call.

Contract of every function: arrays are contiguous, one-dimensional, at any address. Every size is checked against the
others here, before a byte is read or written (`KVCodecError`, a ValueError). Outputs overlap nothing. A function
writes its whole output, and nothing beside it. dtype: "bfloat16", "float16" or "float32", little-endian.
"""

from __future__ import annotations

import sys

import numpy as np

from sgl_kernel.kvcodec import native, reference

__all__ = [
    "ITEM_BYTES",
    "LARGEST",
    "KVCodecError",
    "bin_vectors",
    "deflate_literals",
    "inflate",
    "merge_planes",
    "split_planes",
    "unbin_vectors",
]

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_HALF = 127
# The largest magnitude that is binned.
LARGEST = float(reference.LARGEST)


class KVCodecError(ValueError):
    """Arguments that do not fit together."""


def split_planes(raw: np.ndarray, itemsize: int, first: np.ndarray, rest: np.ndarray) -> None:
    """Rotate values left by one bit, which puts the sign last and the exponent first, and separate their bytes.

    raw: (n * itemsize,) uint8, itemsize 2 or 4. first: (n,) uint8, the most significant bytes: the exponents of
    bfloat16 and float32. rest: ((itemsize - 1) * n,) uint8, the other bytes, plane by plane, most significant first.
    """
    _check_planes(raw, itemsize, first, rest)
    _check_writable(first, rest)
    _loops().split_planes(raw, itemsize, first, rest)


def merge_planes(first: np.ndarray, rest: np.ndarray, itemsize: int, out: np.ndarray) -> None:
    """The inverse of `split_planes`: out is its raw."""
    _check_planes(out, itemsize, first, rest)
    _check_writable(out)
    _loops().merge_planes(first, rest, itemsize, out)


def bin_vectors(
    raw: np.ndarray, dtype: str, dim: int, half: np.ndarray, scales: np.ndarray, codes: np.ndarray
) -> bool:
    """Quantize each vector by its largest magnitude: scale = max|x| / half, code = round(x / scale), ties to even.

    raw: (n * dim * item bytes,) uint8. half: (n,) uint8, 1 to 127: codes of vector i lie in -half[i]..half[i].
    scales: (4 * n,) uint8, written with float32. codes: (n * dim,) int8. A vector of zeros gets the scale 0; no other
    scale is below 2**-126. Therefore |x - code * scale| <= scale / 2, up to the rounding of one float32 division.

    Returns False, outputs undefined, where a vector holds an infinity, a NaN or a magnitude above 2**126.
    """
    _check_vectors(raw, dtype, dim, scales, codes)
    _check(half, np.uint8, len(scales) // 4, "half")
    if len(half) and not (half.min() >= 1 and half.max() <= MAX_HALF):
        raise KVCodecError(f"half must lie in 1..{MAX_HALF}, got {half.min()}..{half.max()}")
    _check_writable(scales, codes)
    return _loops().bin_vectors(raw, dtype, dim, half, scales, codes)


def unbin_vectors(scales: np.ndarray, codes: np.ndarray, dtype: str, dim: int, out: np.ndarray) -> None:
    """code * scale in float32, rounded to dtype, to the nearest, ties to even. Shapes as in `bin_vectors`, out is its
    raw. The caller has checked that scales are finite."""
    _check_vectors(out, dtype, dim, scales, codes)
    _check_writable(out)
    _loops().unbin_vectors(scales, codes, dtype, dim, out)


def deflate_literals(data: np.ndarray, out: np.ndarray) -> int | None:
    """Compress to a raw Deflate stream (RFC 1951) without matches: the Huffman codes of its bytes, 32 KiB at a time.

    data: (n,) uint8. Returns the length of the stream, at the front of out, (any,) uint8; the bytes behind it may be
    overwritten too. None, out undefined, where out is too small, by some bytes more than the stream.
    """
    _check(data, np.uint8, len(data), "data")
    _check(out, np.uint8, len(out), "out")
    _check_writable(out)
    return _loops().deflate_literals(data, out)


def inflate(stream: np.ndarray, out: np.ndarray) -> bool:
    """Decompress a raw Deflate stream (RFC 1951), any, of which the whole is stream, (any,) uint8.

    out: (n,) uint8, what it decodes to. Returns False, out undefined, where the stream is not valid, does not end
    with the last byte, or decodes to another number of bytes.
    """
    _check(stream, np.uint8, len(stream), "stream")
    _check(out, np.uint8, len(out), "out")
    _check_writable(out)
    return _loops().inflate(stream, out)


def _loops():  # type: ignore[no-untyped-def]  # one of two modules with the same functions
    return native if sys.byteorder == "little" and native.is_available() else reference


def _check_planes(raw: np.ndarray, itemsize: int, first: np.ndarray, rest: np.ndarray) -> None:
    if itemsize not in (2, 4):
        raise KVCodecError(f"values of {itemsize} bytes have no planes: 2 or 4")
    _check(first, np.uint8, len(first), "first")
    _check(rest, np.uint8, (itemsize - 1) * len(first), "rest")
    _check(raw, np.uint8, itemsize * len(first), "values")


def _check_vectors(raw: np.ndarray, dtype: str, dim: int, scales: np.ndarray, codes: np.ndarray) -> None:
    if dtype not in ITEM_BYTES:
        raise KVCodecError(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    if dim < 1 or len(codes) % dim:
        raise KVCodecError(f"{len(codes)} codes are no whole number of vectors of {dim}")
    _check(codes, np.int8, len(codes), "codes")
    _check(scales, np.uint8, 4 * (len(codes) // dim), "scales")
    _check(raw, np.uint8, len(codes) * ITEM_BYTES[dtype], "values")


def _check(array: np.ndarray, dtype: type, length: int, name: str) -> None:
    if array.dtype != dtype or array.shape != (length,) or not array.flags.c_contiguous:
        wanted = f"({length},) {np.dtype(dtype)}, contiguous"
        raise KVCodecError(f"{name} must be {wanted}, got {array.shape} {array.dtype}, strides {array.strides}")


def _check_writable(*arrays: np.ndarray) -> None:
    if not all(array.flags.writeable for array in arrays):
        raise KVCodecError("an output is read-only")
