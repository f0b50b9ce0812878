"""Modules of Triton kernels, for packages that compute otherwise where Triton is not installed."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def triton_module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
