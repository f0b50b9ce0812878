"""`GGUFWeights`: the tensors of a GGUF file under Hugging Face's names, dequantised when they are read.

Owns a mapping of the file. A part of a tensor's rows costs the time and memory of that part alone, except of queries
and keys whose rows the converter has moved: their heads are put in order whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import constants, quants

from sglang.srt.configs.gguf_model import GGUF_LINK, TensorEntry, read_tensor_list


class GGUFWeights:
    """As an open safetensors file. path: a directory of `ensure_gguf_model`."""

    def __init__(self, path: Path) -> None:
        self._entries = read_tensor_list(path)
        self._bytes = np.memmap(path / GGUF_LINK, mode="r")

    def __enter__(self) -> GGUFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        """The mapping goes with the last tensor that refers to it."""

    def keys(self) -> list[str]:
        return list(self._entries)

    def get_slice(self, name: str) -> GGUFTensor:
        entry = self._entries[name]
        return GGUFTensor(entry, self._bytes[entry.offset : entry.offset + entry.size_bytes])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]


@dataclass(frozen=True)
class GGUFTensor:
    """data: (size_bytes,) uint8, read only."""

    entry: TensorEntry
    data: np.ndarray

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """float32, of its own memory."""
        index = index if isinstance(index, tuple) else (index,)
        rows = self.data.reshape(self.entry.shape[0], -1) if len(self.entry.shape) > 1 else self.data[None]
        if len(self.entry.shape) > 1 and not self.entry.interleaved_heads:
            rows, index = rows[index[0]], (slice(None), *index[1:])
        kind = constants.GGMLQuantizationType[self.entry.type]
        values = np.require(quants.dequantize(rows, kind), np.float32, "W").reshape(-1, *self.entry.shape[1:])
        return torch.from_numpy(self._in_order(values)[index])

    def _in_order(self, values: np.ndarray) -> np.ndarray:
        """Pairs of rows that are rotated together lie side by side in the file; here they lie half a head apart."""
        heads = self.entry.interleaved_heads
        if not heads:
            return values
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
