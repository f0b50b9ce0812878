"""`LayerFlags`: how a kernel that loads many layers tells of each group of them while it goes on.

Owns a word of a GPU's memory for each group, and the binding to the driver's call that makes a stream wait for a
word. Every block of the kernel adds 1 to a group's word when it is done with the group. Words are never set back, so
that nothing has to happen before a launch: the kernels run in order on one stream, and a group is there when its word
has reached the number of all blocks until then. They are compared as the driver does it, which lets them overflow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from sgl_kernel.libcuda import bind, error_of

FUNCTION = "cuStreamWaitValue32_v2"
# The stream waits until (int32) (word - value) >= 0.
WAIT_VALUE_GEQ = 0
_WORDS = 1 << 32

# What each function takes; all return a CUresult. Streams are pointers.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    FUNCTION: (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_uint),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class LayerFlagsError(RuntimeError):
    """The driver refused to let a stream wait; the message names the function and the error."""


@cache
def driver() -> Any:
    """The functions of SIGNATURES; None where the driver is older than CUDA 11.7, or there is none."""
    try:
        # None is short: a wait blocks while the stream's queue is full.
        return bind(SIGNATURES)
    except OSError:
        return None


class LayerFlags:
    """Of one stream's kernels, one after the other; any stream of the device may wait. ends: of each group the layer
    behind it, rising. libcuda: by default `driver`, which must be there."""

    def __init__(self, ends: Sequence[int], device: torch.device, libcuda: Any = None) -> None:
        assert ends and all(a < b for a, b in zip((0, *ends), ends)), ends
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)
        self.words = torch.zeros(len(ends), dtype=torch.int32, device=device)
        if device.type == "cuda":
            # Other streams use both.
            torch.cuda.current_stream(device).synchronize()
        self.most_layers = max(end - begin for begin, end in zip((0, *ends), ends))
        self._address = self.words.data_ptr()
        self._libcuda = libcuda or driver()
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self.words)

    def count(self, num_blocks: int) -> int:
        """A kernel of so many blocks has been launched. Returns the value that all words reach when it is done."""
        self._num_blocks = (self._num_blocks + num_blocks) % _WORDS
        return self._num_blocks

    def wait(self, group: int, value: int, stream: Any) -> None:
        """Make a `torch.cuda.Stream` wait until a group's word has reached a value. Raises LayerFlagsError."""
        address = self._address + group * self.words.itemsize
        if error := error_of(self._libcuda, FUNCTION, stream.cuda_stream, address, value, WAIT_VALUE_GEQ):
            raise LayerFlagsError(error)
