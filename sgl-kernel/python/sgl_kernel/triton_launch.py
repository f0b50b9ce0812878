"""`launch`: launches of Triton kernels that repeat themselves.

Owns compiled kernels by what they depend on. Triton binds and specializes the arguments of each launch anew, a third
of the host's time for a short prefill. The layers of a forward pass launch the same kernels with the same numbers and
other tensors: all but the first go to the compiled kernel at once. Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Batches of ever new sizes bring new numbers; then all are forgotten.
_MOST_KEPT = 8192
# Triton compiles kernels of their own for addresses that are multiples of so many bytes.
_ALIGNMENT = 16

# By kernel, grid, GPU, arguments without the tensors' places, and options: the launch of what was compiled for them,
# and the values of its constants.
_kept: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)` on the current stream.

    kernel: a function of `triton.jit` that lives as long as the process, without hooks. args: tensors, numbers or
    None for its first parameters, of one type each time. options: all its other parameters, which are constants,
    and Triton's options.
    """
    signature: list[Any] = []
    on_gpu = False
    for each in args:
        if isinstance(each, torch.Tensor):
            signature += (each.dtype, each.data_ptr() % _ALIGNMENT == 0)
            on_gpu = on_gpu or each.is_cuda
        else:
            signature.append(each)
    key = (id(kernel), grid, torch.cuda.current_device() if on_gpu else None, *signature, *options.items())
    kept = _kept.get(key)
    if kept is not None:
        compiled, constants = kept
        compiled(*args, *constants)
        return
    constants = tuple(options[name] for name in kernel.arg_names[len(args) :])
    done = kernel[grid](*args, **options)
    if done is None:  # the interpreter's
        return
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[key] = done[(*grid, 1, 1)[:3]], constants
