"""Binned: every vector scaled by its largest magnitude into a few integers, then raw Deflate (ShadowServe 5).

Lossy. The error is at most half of a bin, |x - x'| <= scale / 2 with scale = max|x| / half and half = (bins - 1) //
2, plus the rounding of the result to the KV's dtype. Zeros stay zeros.

    mid       scales, n float32 | codes, n * head_dim int8
    payload   mid, coded

A piece in which a vector holds an infinity, a NaN or a magnitude above 2**126 is STORED and therefore comes back
exactly. Such a value shows that something is wrong in the engine, and must not be hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sgl_kernel import kvcodec
from sglang.srt.offload.codec.base import PieceCodec
from sglang.srt.offload.codec.entropy import Deflate, EntropyCoder, coder_options, make_coder
from sglang.srt.offload.codec.header import CodecError, PieceHeader
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.utils.registry import Kind, Option

SCALE_BYTES = 4
MIN_BINS, MAX_BINS = 3, 255
# How many pieces' arrays are remembered. They are the same in all blocks, but a block of a large model has hundreds.
_REMEMBERED_PIECES = 1024

# A number of bins, or runs of (number of layers, bins) from the first layer on; None layers: all layers that are
# left.
Bins = int | list[tuple[int | None, int]]


def _are_bins(value: Any) -> bool:
    """Whether it is JSON of `Bins`."""
    if type(value) is int:
        return True
    try:
        runs = [(count, bins) for count, bins in value]
    except (TypeError, ValueError):
        return False
    good = all(type(bins) is int and (count is None or (type(count) is int and count > 0)) for count, bins in runs)
    return bool(runs) and good and all(count is not None for count, _ in runs[:-1])


_BINS_WORDS = "a number of bins, or runs like [[10, 32], [null, 16]] of [number of layers, bins]"
_BINS = Kind(_BINS_WORDS, _are_bins)
_BINS_OR_CACHEGEN = Kind(f'{_BINS_WORDS}, or "cachegen"', lambda value: value == "cachegen" or _are_bins(value))


class BinnedCodec(PieceCodec):
    name = "binned"
    codec_id = 3
    lossy = True
    summary = f"numbers near those that were stored: each vector is scaled into {MIN_BINS} to {MAX_BINS} bins"
    options = (
        Option("bins", _BINS_OR_CACHEGEN, MAX_BINS, 'bins of K and V alike, or "cachegen" for CacheGen\'s'),
        Option("k_bins", _BINS, None, "bins of K", "`bins`"),
        Option("v_bins", _BINS, None, "bins of V", "`bins`"),
        *coder_options("deflate"),
    )

    @classmethod
    def from_settings(cls, layout: BlockLayout, settings: Mapping[str, Any]) -> BinnedCodec:
        k_bins, v_bins = _bins_of(settings, layout.page.num_layers)
        return cls(layout, k_bins, v_bins, make_coder(settings, "deflate"))

    @classmethod
    def of_layers(cls, settings: Mapping[str, Any], layers: Sequence[int], num_layers: int) -> dict[str, Any]:
        found = {name: value for name, value in settings.items() if name != "bins"}
        for name, bins in zip(("k_bins", "v_bins"), _bins_of(settings, num_layers), strict=True):
            found[name] = [[1, each] for each in bins_per_layer(bins, num_layers)[list(layers)].tolist()]
        return found

    def __init__(
        self, layout: BlockLayout, k_bins: Bins = 255, v_bins: Bins = 255, coder: EntropyCoder | None = None
    ) -> None:
        """Raises ValueError for bins that do not make up all layers, and for pages that are not of K and V."""
        shape = layout.page.kv_shape
        if shape is None or layout.page.dtype not in kvcodec.ITEM_BYTES:
            raise ValueError(
                f"codec {self.name} scales the heads of K and V in {', '.join(kvcodec.ITEM_BYTES)}, and this cache "
                f"has {layout.page}: use codec lossless or raw"
            )
        _, self._head_dim = shape
        self._coder = coder or Deflate()
        self._bins = np.stack([bins_per_layer(bins, layout.page.num_layers) for bins in (k_bins, v_bins)])
        # (2, num_layers) uint8: the largest code of K and V.
        self._half = ((self._bins - 1) // 2).astype(np.uint8)
        self._half_of_piece = lru_cache(_REMEMBERED_PIECES)(self._half_of_vectors)
        super().__init__(layout)

    @property
    def coder_name(self) -> str:
        return self._coder.name

    def mid_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // self.layout.vector_bytes * (SCALE_BYTES + self._head_dim)

    def _settings(self) -> dict[str, object]:
        k, v = (_runs(bins) for bins in self._bins)
        return {"k": k, "v": v, "coder": self._coder.name, "level": self._coder.level}

    def _compress(self, raw: np.ndarray, piece: int, payload: np.ndarray) -> int | None:
        mid = np.empty(self.mid_bytes(len(raw)), np.uint8)
        scales, codes = self._parts(mid)
        half = self._half_of_piece(piece)
        if not kvcodec.bin_vectors(raw, self.layout.page.dtype, self._head_dim, half, scales, codes):
            return None
        return self._coder.compress_into(mid, payload[: len(raw) - 1])

    def _decompress(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        self._coder.decompress_into(payload, mid)

    def _dequantize(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        scales, codes = self._parts(mid)
        values = scales.view(np.float32)
        # NaN fails both comparisons.
        if len(values) and not (values.min() >= 0 and values.max() <= kvcodec.LARGEST):
            raise CodecError("a scale is negative, infinite or not a number")
        kvcodec.unbin_vectors(scales, codes, self.layout.page.dtype, self._head_dim, out)

    def _parts(self, mid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        num_vectors = len(mid) // (SCALE_BYTES + self._head_dim)
        return mid[: SCALE_BYTES * num_vectors], mid[SCALE_BYTES * num_vectors :].view(np.int8)

    def _half_of_vectors(self, piece: int) -> np.ndarray:
        is_value, layer = self.layout.vectors(*self.layout.piece(piece))
        half = self._half[is_value.astype(np.intp), layer]
        half.flags.writeable = False
        return half


def _bins_of(settings: Mapping[str, Any], num_layers: int) -> tuple[Bins, Bins]:
    """Of K and of V."""
    if "bins" in settings and ("k_bins" in settings or "v_bins" in settings):
        raise ValueError("bins is for K and V alike: give either bins, or k_bins and v_bins")
    both = settings.get("bins", MAX_BINS)
    if both == "cachegen":
        return cachegen_bins(num_layers)
    k_bins, v_bins = (both if settings.get(name) is None else settings[name] for name in ("k_bins", "v_bins"))
    return k_bins, v_bins


def bins_per_layer(bins: Bins, num_layers: int) -> np.ndarray:
    """(num_layers,) int64. ValueError if the runs do not make up all layers."""
    if isinstance(bins, int):
        bins = [(None, bins)]
    found: list[int] = []
    for count, value in bins:
        if not MIN_BINS <= value <= MAX_BINS:
            raise ValueError(f"{value} bins: use {MIN_BINS} to {MAX_BINS}")
        found += [value] * (num_layers - len(found) if count is None else count)
    if len(found) != num_layers:
        raise ValueError(
            f"bins for {len(found)} layers, the model has {num_layers}: give runs of [number of layers, bins], the "
            "last with null layers for all that are left"
        )
    return np.asarray(found, np.int64)


def cachegen_bins(num_layers: int) -> tuple[Bins, Bins]:
    """CacheGen's bins for K and V: 32 bins in the first 10 of 32 layers of K and the first 2 of 32 of V, else 16."""
    return tuple([(math.ceil(num_layers * first / 32), 32), (None, 16)] for first in (10, 2))  # type: ignore[return-value]


def _runs(bins: np.ndarray) -> str:
    """ "10x32,22x16" for ten layers of 32 bins and 22 of 16."""
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    lengths = np.diff(starts, append=len(bins))
    return ",".join(f"{n}x{bins[at]}" for at, n in zip(starts.tolist(), lengths.tolist()))
