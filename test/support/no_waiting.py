"""`NoWaiting`: code meant for a device, run without one, fails where it would make the host wait for the device.

Tensors on torch's meta device stand for the device's: they have shapes and no values, so a value that is asked for is
an error by itself. What CUDA does silently is an error here: tensors of the host among the arguments of an operation
(they are copied), masks as indices (the host must know how many are set). A list as an index escapes it: torch makes
a tensor of the device from it, unseen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")

# Copies to the device are fine: pinned, they wait for nothing.
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::lift_fresh")
# Of these a meta tensor may give a result where a device must be asked for its size.
_WAIT = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::unique_dim", "aten::_unique2")


class WaitsForDeviceError(AssertionError):
    """The operation would wait for the device, or copy from pageable memory."""


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [t for t in tensors if t.device == DEVICE]
        name = func._schema.name
        if on_device:
            # A scalar of the host is passed by value.
            if name not in _COPIES and any(t.device != DEVICE and t.dim() for t in tensors):
                raise WaitsForDeviceError(f"{name} mixes tensors of host and device")
            if name in _WAIT:
                raise WaitsForDeviceError(f"{name} waits for the device")
            indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
            if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
                raise WaitsForDeviceError(f"{name} by a mask waits for the device")
        result = func(*args, **kwargs)
        if on_device and any(isinstance(r, torch.Tensor) and r.device != DEVICE for r in tree_leaves(result)):
            raise WaitsForDeviceError(f"{name} brings values to the host")
        return result
