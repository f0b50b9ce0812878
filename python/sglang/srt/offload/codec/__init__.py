"""Codecs of the remote tier: blocks of KV to stored pieces and back.

One file per codec behind the protocol `Codec` (`base.py`); `make_codec` picks one. Depends on numpy, on the entropy
coders' libraries and on `sgl_kernel.kvcodec`; knows no store, socket, thread or model.
"""

from sglang.srt.offload.codec.base import Codec
from sglang.srt.offload.codec.header import HEADER_BYTES, CodecError, PieceHeader
from sglang.srt.offload.codec.layout import MAX_PIECE_BYTES, BlockLayout
from sglang.srt.offload.codec.registry import make_codec

__all__ = ["HEADER_BYTES", "MAX_PIECE_BYTES", "BlockLayout", "Codec", "CodecError", "PieceHeader", "make_codec"]
