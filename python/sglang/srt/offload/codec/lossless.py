"""Lossless: exponents are coded; signs and mantissas look random and are stored as they are.

    raw       s eeeeeeee mmmmmmm  (bfloat16)   every value, rotated left by one bit, gives
    exponents   eeeeeeee                        one byte for the entropy coder, and
    rest                 mmmmmmm s              the others, plane after plane

    payload   rest, (item_bytes - 1) * n bytes | exponents, coded
    mid       exponents, n bytes

In float32 the byte holds the exponent alone, too. In float16 it holds 5 bits of exponent and 3 of mantissa. Values of
one byte, and pages with values of several sizes, are not split: every byte goes through the coder. Every bit comes
back, including those of NaNs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sgl_kernel import kvcodec
from sglang.srt.offload.codec.base import PieceCodec
from sglang.srt.offload.codec.entropy import EntropyCoder, Zstd, coder_options, make_coder
from sglang.srt.offload.codec.header import PieceHeader
from sglang.srt.offload.codec.layout import BlockLayout


class LosslessCodec(PieceCodec):
    name = "lossless"
    codec_id = 2
    summary = "every bit"
    options = coder_options("zstd")

    @classmethod
    def from_settings(cls, layout: BlockLayout, settings: Mapping[str, Any]) -> LosslessCodec:
        return cls(layout, make_coder(settings, "zstd"))

    def __init__(self, layout: BlockLayout, coder: EntropyCoder | None = None) -> None:
        self._coder = coder or Zstd()
        super().__init__(layout)

    @property
    def coder_name(self) -> str:
        return self._coder.name

    def mid_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // self.layout.value_bytes

    def _settings(self) -> dict[str, object]:
        return {"coder": self._coder.name, "level": self._coder.level}

    def _compress(self, raw: np.ndarray, piece: int, payload: np.ndarray) -> int | None:
        rest_bytes = len(raw) - self.mid_bytes(len(raw))
        exponents = raw
        if rest_bytes:
            exponents = np.empty(self.mid_bytes(len(raw)), np.uint8)
            kvcodec.split_planes(raw, self.layout.value_bytes, exponents, payload[:rest_bytes])
        coded_bytes = self._coder.compress_into(exponents, payload[rest_bytes : len(raw) - 1])
        return None if coded_bytes is None else rest_bytes + coded_bytes

    def _decompress(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None:
        self._coder.decompress_into(payload[header.raw_bytes - header.mid_bytes :], mid)

    def _dequantize(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        rest = payload[: header.raw_bytes - header.mid_bytes]
        if len(rest):
            kvcodec.merge_planes(mid, rest, self.layout.value_bytes, out)
        else:
            np.copyto(out, mid)
