"""From the host to a device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

CPU = torch.device("cpu")


def settle_memory(device: torch.device) -> None:
    """Wait until a GPU has filled what this thread has allocated: its streams do not wait for that by themselves."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on the CPU it is the array's own memory. To a GPU it is one copy from
    pinned memory, in the order of the current stream; torch keeps that memory for as long as the copy needs it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_device_together(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each of the arrays (one-dimensional, of one type), in one copy."""
    joined = to_device(np.concatenate(arrays), device)
    return list(joined.split([len(array) for array in arrays]))
