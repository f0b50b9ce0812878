"""The registry of codecs, and `make_codec`: from settings, as a person or a manifest gives them, to a codec.

A new codec is a file with a subclass of `PieceCodec`, one line in `CODECS`, and the C of its two stages of reading
(csrc/kvplane/piece.c). Imports a codec when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.offload.codec.base import Codec, PieceCodec
from sglang.srt.offload.codec.layout import BlockLayout
from sglang.srt.utils.registry import load_object, read_options

# The name that the setting `codec` takes -> "module:class".
CODECS: dict[str, str] = {
    "lossless": "sglang.srt.offload.codec.lossless:LosslessCodec",
    "binned": "sglang.srt.offload.codec.binned:BinnedCodec",
    "raw": "sglang.srt.offload.codec.base:RawCodec",
}
DEFAULT_CODEC = "lossless"


def codec_class(name: str) -> type[PieceCodec]:
    """name: one of `CODECS`."""
    found: type[PieceCodec] = load_object(CODECS[name])
    return found


def make_codec(config: Mapping[str, Any], layout: BlockLayout, mac_key: bytes = b"") -> Codec:
    """The codec of settings like {"codec": "binned", "k_bins": [[10, 32], [null, 16]], "v_bins": 16}.

    codec: one of `CODECS`, `DEFAULT_CODEC` where it is left out. The others are options of the codec's class.
    mac_key: with which pieces are authenticated; empty: they are not. ValueError, with what to do, for anything else.
    """
    codec, settings = check_codec(config)
    made = codec.from_settings(layout, settings)
    made.mac_key = mac_key
    return made


def codec_of_layers(config: Mapping[str, Any], layers: Sequence[int], num_layers: int) -> dict[str, Any]:
    """The settings with which some of a model's layers are coded as in a cache of all num_layers. Raises
    ValueError."""
    codec, settings = check_codec(config)
    return {"codec": codec.name, **codec.of_layers(settings, layers, num_layers)}


def check_codec(config: Mapping[str, Any]) -> tuple[type[PieceCodec], dict[str, Any]]:
    """The class of a codec and its own settings. Checks what needs no layout of the cache. Raises ValueError."""
    settings = dict(config)
    name = settings.pop("codec", DEFAULT_CODEC)
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: use one of {', '.join(CODECS)}")
    codec = codec_class(name)
    read_options(codec.options, settings, f"codec {name}")
    return codec, settings


def is_lossy_codec(config: Any) -> bool:
    """Whether a codec changes what it stores. config: its name, or its settings. False for an unknown one, which
    `make_codec` refuses."""
    name = config.get("codec", DEFAULT_CODEC) if isinstance(config, dict) else config
    return isinstance(name, str) and name in CODECS and codec_class(name).lossy
