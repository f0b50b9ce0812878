"""`make_codec`: from settings, as a person or a manifest gives them, to a codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.offload.codec.base import Codec, RawCodec
from sglang.srt.offload.codec.binned import BinnedCodec, Bins, cachegen_bins
from sglang.srt.offload.codec.entropy import CODERS, Deflate, Zstd
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.offload.codec.lossless import LosslessCodec

CODECS = ("lossless", "binned", "raw")
_SETTINGS = {
    "lossless": {"coder", "level"},
    "binned": {"bins", "k_bins", "v_bins", "coder", "level"},
    "raw": set(),
}


def make_codec(config: Mapping[str, Any], layout: BlockLayout) -> Codec:
    """The codec of settings like {"codec": "binned", "k_bins": [[10, 32], [null, 16]], "v_bins": 16}.

    codec: "lossless" (default), "binned" or "raw". coder: "zstd" or "deflate" (default of lossless and binned), with
    `level` 0 (default, entropy only) or the library's. bins: of K and V, a number, or "cachegen"; k_bins and v_bins:
    a number or runs of [number of layers, bins]; 255 by default. ValueError, with what to do, for anything else.
    """
    settings = dict(config)
    name = settings.pop("codec", "lossless")
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: use one of {', '.join(CODECS)}")
    unknown = sorted(set(settings) - _SETTINGS[name])
    if unknown:
        known = ", ".join(sorted(_SETTINGS[name])) or "none"
        raise ValueError(f"codec {name} has no setting {unknown[0]!r}: its settings are {known}")
    if name == "raw":
        return RawCodec(layout)
    if name == "lossless":
        return LosslessCodec(layout, _coder(settings, "zstd"))
    k_bins, v_bins = _bins(settings, layout.page.num_layers)
    return BinnedCodec(layout, k_bins, v_bins, _coder(settings, "deflate"))


def _coder(settings: Mapping[str, Any], default: str) -> Zstd | Deflate:
    name, level = settings.get("coder", default), settings.get("level", 0)
    if name not in CODERS:
        raise ValueError(f"unknown coder {name!r}: use one of {', '.join(CODERS)}")
    if type(level) is not int:
        raise ValueError(f"level {level!r} is no whole number")
    return CODERS[name](level)


def _bins(settings: Mapping[str, Any], num_layers: int) -> tuple[Bins, Bins]:
    both = settings.get("bins", 255)
    if "bins" in settings and ("k_bins" in settings or "v_bins" in settings):
        raise ValueError("bins is for K and V alike: give either bins, or k_bins and v_bins")
    if both == "cachegen":
        return cachegen_bins(num_layers)
    k_bins, v_bins = (_parsed(settings.get(key, both), key) for key in ("k_bins", "v_bins"))
    return k_bins, v_bins


def _parsed(bins: Any, key: str) -> Bins:
    if type(bins) is int:
        return bins
    try:
        runs = [(count, value) for count, value in bins]
    except (TypeError, ValueError):
        runs = []
    good = all(type(value) is int and (count is None or (type(count) is int and count > 0)) for count, value in runs)
    if not runs or not good or any(count is None for count, _ in runs[:-1]):
        raise ValueError(
            f"{key} {bins!r}: give a number of bins, or runs like [[10, 32], [null, 16]] of [number of layers, bins]"
        )
    return runs
