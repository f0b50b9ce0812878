"""A scheduler as bytes, and back: where a crash record begins when the run before it is not kept. Stateless.

A scheduler is plain data, but a deep one: nodes of trees and lists refer to each other without end, and pickle
follows references by recursion. So objects of this package are written as empty shells where they are met, and what
they hold follows one by one. What is restored is no valid memory of another process, only its bookkeeping.

Only records of one's own servers may be read: unpickling runs code of this package, and what is not made by this
module may misuse that. Modules other than the ones below are refused.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from sglang.srt.mem_cache.page_watcher import PageWatcher

_PACKAGE = "sglang."
_ALLOWED = ("builtins", "collections", "copyreg", "functools", "itertools", "msgspec", "numpy", "random")

# Of builtins: what runs code or reads files that a record names.
_REFUSED = frozenset({"eval", "exec", "compile", "open", "__import__", "input", "breakpoint"})

_UNSET = object()


class SnapshotError(ValueError):
    """The bytes are no snapshot of this version."""


def snapshot(obj: Any) -> bytes:
    file = io.BytesIO()
    # So much is allocated, and nothing freed, that garbage collection would take most of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _Pickler(file).dump_deep(obj)
    finally:
        if was_enabled:
            gc.enable()
    return file.getvalue()


def restored(data: bytes) -> Any:
    """Raises SnapshotError."""
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        obj = unpickler.load()
        while (batch := unpickler.load()) is not None:
            for shell, state in batch:
                for name, value in state.items():
                    object.__setattr__(shell, name, value)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError) as error:
        raise SnapshotError(f"the snapshot cannot be read: {error}") from error
    return obj


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        # Objects that were written as shells, and whose state is not.
        self._shells: list[Any] = []

    def dump_deep(self, obj: Any) -> None:
        self.dump(obj)
        while self._shells:
            batch, self._shells = self._shells, []
            self.dump([(shell, _state_of(shell)) for shell in batch])
        self.dump(None)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType:
            return _reduced_function(obj)
        if kind is np.ndarray and type(obj.base) is np.ndarray and obj.base.flags.c_contiguous:
            # Two arrays over one memory stay so: one of them may be written, and the other read.
            offset = obj.__array_interface__["data"][0] - obj.base.__array_interface__["data"][0]
            return np.ndarray, (obj.shape, obj.dtype, obj.base, offset, obj.strides)
        if isinstance(obj, PageWatcher):
            return PageWatcher, ()  # a restored scheduler has no subscribers
        # An object with a hash of its own may be a key of a table, which needs it whole.
        if kind.__module__.startswith(_PACKAGE) and kind.__hash__ is object.__hash__:
            self._shells.append(obj)
            return object.__new__, (kind,)
        return NotImplemented


def _state_of(obj: Any) -> dict[str, Any]:
    state = dict(getattr(obj, "__dict__", {}))
    for name in _slots_of(obj.__class__):
        if (value := getattr(obj, name, _UNSET)) is not _UNSET:
            state[name] = value
    return state


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for each in slots for name in ((each,) if isinstance(each, str) else each))


def _reduced_function(function: types.FunctionType) -> Any:
    """Functions of a module by their name, as ever; those made inside of others by the place of their code, with what
    they refer to."""
    if "<" not in function.__qualname__:
        return NotImplemented
    cells = function.__closure__ or ()
    made = (function.__module__, function.__qualname__, function.__code__.co_firstlineno, len(cells))
    # What it refers to comes after it is made: it may refer to what holds it.
    return _function, made, ([cell.cell_contents for cell in cells], function.__defaults__), None, None, _fill


def _function(module: str, qualname: str, line: int, num_cells: int) -> types.FunctionType:
    home = sys.modules[module]
    code = next(
        code
        for code in _codes_below(home)
        if (code.co_qualname, code.co_firstlineno, len(code.co_freevars)) == (qualname, line, num_cells)
    )
    return types.FunctionType(
        code, home.__dict__, code.co_name, None, tuple(types.CellType() for _ in range(num_cells))
    )


def _fill(function: types.FunctionType, state: tuple[list[Any], tuple[Any, ...] | None]) -> None:
    values, function.__defaults__ = state
    for cell, value in zip(function.__closure__ or (), values):
        cell.cell_contents = value


def _codes_below(module: types.ModuleType) -> Iterator[types.CodeType]:
    assert module.__file__ is not None
    with open(module.__file__, "rb") as file:
        left = [compile(file.read(), module.__file__, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        yield code
        left += [each for each in code.co_consts if isinstance(each, types.CodeType)]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module.startswith(_PACKAGE) or module.partition(".")[0] in _ALLOWED:
            found = super().find_class(module, name)
            # A dotted name leads from an allowed module to what that imports.
            home = getattr(found, "__module__", None) or module
            if not home.startswith(_PACKAGE) and home.partition(".")[0] not in _ALLOWED:
                found = None
        if found is None or (module == "builtins" and name in _REFUSED):
            raise SnapshotError(f"the snapshot needs {module}.{name}, which no scheduler has")
        return found
