"""`launch`, `Recording`: launches of Triton kernels that repeat themselves.

Owns compiled kernels by what they depend on. Triton binds and specializes the arguments of each launch anew, a third
of the host's time for a short prefill. The layers of a forward pass launch the same kernels with the same numbers and
other tensors: all but the first go to the compiled kernel at once, as `JITFunction.run` of Triton 3.6 and 3.7 does in
the end. A tensor on a GPU goes as its address, which Triton would ask the driver about otherwise. A `Recording` does
not even look at arguments again. Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# Batches of ever new sizes bring new numbers; then all are forgotten.
_MOST_KEPT = 8192
# Triton compiles kernels of their own for addresses that are multiples of so many bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class _Compiled:
    """run(stream, *before, *args, *constants) launches it with a grid."""

    run: Callable[..., None]
    before: tuple[Any, ...]
    constants: tuple[Any, ...]


# By kernel, grid, GPU, arguments without the tensors' places and floats, and options.
_kept: dict[tuple[Any, ...], _Compiled] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> _Compiled | None:
    """`kernel[grid](*args, **options)` on the current stream of the current device.

    kernel: a function of `triton.jit` that lives as long as the process, without hooks. args: tensors, numbers or
    None for its first parameters, of one type each time. options: all its other parameters, which are constants,
    and Triton's options. Returns what was launched; None if the interpreter did it.
    """
    signature: list[Any] = []
    passed: list[Any] = []
    on_gpu = False
    for each in args:
        if isinstance(each, torch.Tensor):
            address = each.data_ptr()
            signature += (each.dtype, address % ALIGNMENT == 0)
            if each.is_cuda:
                on_gpu = True
                passed.append(address)
            else:
                passed.append(each)
        else:
            # Triton compiles nothing for a float's value.
            signature.append(float if isinstance(each, float) else each)
            passed.append(each)
    key = (id(kernel), grid, torch.cuda.current_device() if on_gpu else None, *signature, *options.items())
    kept = _kept.get(key)
    if kept is not None:
        kept.run(_stream(on_gpu), *kept.before, *passed, *kept.constants)
        return kept
    constants = tuple(options[name] for name in kernel.arg_names[len(args) :])
    # On a GPU it is only compiled, and launched below: Triton asks the driver about the address of each tensor, which
    # fails for a range of slabs whose first place has no memory.
    done = kernel.warmup(*args, grid=grid, **options) if on_gpu else None
    is_launched = done is None
    if is_launched:
        done = kernel[grid](*args, **options)
    if done is None:  # the interpreter's
        return None
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    # The first look at `run` loads the kernel, and brings `function`.
    run = partial(done.run, *(*grid, 1, 1)[:3])
    # No metadata of a launch, and no hooks.
    before = (done.function, done.packed_metadata, None, None, None)
    found = _kept[key] = _Compiled(run, before, constants)
    if not is_launched:
        found.run(_stream(on_gpu), *found.before, *passed, *found.constants)
    return found


class Recording:
    """Launches, to be made again with other tensors and floats in the place of those that are given. given: those
    that launches get as arguments, the same objects. The others' memory is kept, and used again."""

    def __init__(self, *given: Any) -> None:
        self._given = given
        # What is called with which values, and the places among them of what is given.
        self._launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int]]]] = []
        # Launches know addresses alone.
        self._memory: list[Any] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """See `launch`."""
        compiled = launch(kernel, grid, *args, **options)
        self._memory += [arg for arg in args if not any(arg is given for given in self._given)]
        places = [(i, j) for i, arg in enumerate(args) for j, given in enumerate(self._given) if arg is given]
        if compiled is None:
            self._launches.append((partial(_interpret, kernel[grid], options), list(args), places))
            return
        before = len(compiled.before)
        values = [*compiled.before, *map(_passed, args), *compiled.constants]
        self._launches.append((compiled.run, values, [(before + i, j) for i, j in places]))

    def end(self) -> None:
        """Nothing more is recorded: what was given is not needed any more."""
        self._given = ()

    def repeat(self, *given: Any) -> None:
        """given: as before, tensors of the same device, type, strides and alignment."""
        stream = _stream(any(isinstance(each, torch.Tensor) and each.is_cuda for each in given))
        passed = [_passed(each) for each in given]
        for run, values, places in self._launches:
            for i, j in places:
                values[i] = passed[j]
            run(stream, *values)


def _stream(on_gpu: bool) -> int:
    return torch.cuda.current_stream().cuda_stream if on_gpu else 0


def _passed(each: Any) -> Any:
    return each.data_ptr() if isinstance(each, torch.Tensor) and each.is_cuda else each


def _interpret(run: Callable[..., Any], options: dict[str, Any], stream: int, *args: Any) -> None:
    run(*args, **options)
