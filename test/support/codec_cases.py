"""KV for the tests of codecs, and a call that reads and writes between guard bytes."""

from __future__ import annotations

import numpy as np

from sgl_kernel.kvcodec import reference
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.offload.codec import MAX_PIECE_BYTES, BlockLayout, Codec, make_codec

KEY = bytes(range(16))
GUARD = 64
GUARD_BYTE = 0xA5
CONFIGS: dict[str, dict[str, object]] = {
    "lossless": {},
    "lossless-1": {"codec": "lossless", "level": 1},
    "lossless-deflate": {"codec": "lossless", "coder": "deflate"},
    "binned": {"codec": "binned"},
    "binned-cachegen": {"codec": "binned", "bins": "cachegen"},
    "binned-isal": {"codec": "binned", "bins": 16, "level": 1},
    "binned-zstd": {"codec": "binned", "k_bins": [[1, 32], [None, 16]], "coder": "zstd"},
    "raw": {"codec": "raw"},
}


def kv_block(
    num_pages: int,
    num_layers: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> BlockLayout:
    """A block of K and V."""
    return BlockLayout(
        num_pages, PageLayout.kv(page_size, num_layers, num_kv_heads, head_dim, dtype), max_piece_bytes
    )


SMALL = kv_block(num_pages=4, num_layers=3, page_size=4, num_kv_heads=2, head_dim=16, dtype="bfloat16")
# A page of SMALL does not fit into a piece of it, nor does a whole number of vectors divide it evenly.
CUT = kv_block(4, 3, 4, 2, 16, "bfloat16", max_piece_bytes=1000)


def normal_kv(layout: BlockLayout, seed: int = 0, dtype: str | None = None) -> np.ndarray:
    """(block_bytes,) uint8: Gaussian, with a few channels twenty times as large."""
    rng = np.random.default_rng(seed)
    dim = layout.page.components[0].shape[-1]
    values = rng.normal(size=(layout.block_bytes // layout.vector_bytes, dim)).astype(np.float32)
    values[:, rng.random(dim) < 0.1] *= 20
    return reference.from_float32(values, dtype or layout.page.dtype).copy()


def encode(codec: Codec, raw: np.ndarray, piece: int = 0, key: bytes = KEY) -> np.ndarray:
    """The stored bytes of a piece. raw: the whole block."""
    start, end = codec.layout.piece(piece)
    out, inner = guarded(codec.max_stored_bytes(end - start))
    size = codec.encode(raw[start:end], piece, key, inner)
    check_guards(out)
    return inner[:size].copy()


def decode(codec: Codec, stored: np.ndarray, piece: int = 0, key: bytes = KEY) -> np.ndarray:
    """Through all three steps, each output between guards that must stay, also if a step raises."""
    raw_bytes = codec.layout.raw_bytes(piece)
    mid, inner_mid = guarded(codec.mid_bytes(raw_bytes))
    out, inner_out = guarded(raw_bytes)
    try:
        header = codec.parse(stored, piece, key)
        codec.decompress(stored, header, inner_mid)
        codec.dequantize(stored, header, inner_mid, inner_out)
    finally:
        check_guards(mid)
        check_guards(out)
    return inner_out


def guarded(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A buffer, and the (size,) in its middle, at an odd address."""
    buffer = np.full(size + 2 * GUARD + 1, GUARD_BYTE, np.uint8)
    return buffer, buffer[GUARD + 1 : GUARD + 1 + size]


def check_guards(buffer: np.ndarray) -> None:
    edges = np.concatenate([buffer[: GUARD + 1], buffer[len(buffer) - GUARD :]])
    assert (edges == GUARD_BYTE).all(), "something was written beside the buffer"


def round_trip(layout: BlockLayout, config: dict[str, object], raw: np.ndarray) -> np.ndarray:
    codec = make_codec(config, layout)
    return np.concatenate([decode(codec, encode(codec, raw, p), p) for p in range(layout.num_pieces)])
