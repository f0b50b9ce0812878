"""`CudaOnCPU`: the kernels of a CUDA C++ file, compiled by g++ and run on the CPU; see cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HEADER = Path(__file__).with_suffix(".h")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_STATEMENT = re.compile(r"asm volatile\((.*?)\);", re.DOTALL)
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
# The first word with a dot, and a number behind it, which is its operand.
_INSTRUCTION = re.compile(r"\b([a-z]+(?:\.[\w:]+)+)(?: (\d+))?")
_OPERAND = re.compile(r'"[=+]?[rl]"\s*\(')
_KERNEL = re.compile(r"__global__ void.*?\b(sgl_\w+)\(", re.DOTALL)


def on_cpu(source: str) -> str:
    """The text with a call in the place of each PTX statement: operands in their order, without constraints."""

    def call(statement: re.Match[str]) -> str:
        template, *operands = _parts(statement[1])
        instruction = _INSTRUCTION.search("".join(_TEXT.findall(template)))
        assert instruction is not None, statement[0]
        values = [value for part in operands[:2] for value in _values(part)] + [instruction[2]] * bool(instruction[2])
        return f"ptx_{re.sub(r'[^A-Za-z0-9]+', '_', instruction[1])}({', '.join(values)});"

    return _STATEMENT.sub(call, source).replace("extern __shared__", "extern")


def _parts(statement: str) -> list[str]:
    """Template, outputs, inputs and what else is written, which colons outside of texts separate."""
    bare = _TEXT.sub(lambda text: "_" * len(text[0]), statement)
    cuts = [-1, *(i for i, letter in enumerate(bare) if letter == ":"), len(bare)]
    return [statement[a + 1 : b] for a, b in pairwise(cuts)]


def _values(operands: str) -> list[str]:
    found = []
    for begin in _OPERAND.finditer(operands):
        depth, end = 1, begin.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(operands[end], 0)
            end += 1
        found.append(operands[begin.end() : end - 1])
    return found


class CudaOnCPU:
    """source: the text. folder: for what is compiled. ring_bytes: of the dynamic shared memory, which the text calls
    `ring`."""

    def __init__(self, source: str, folder: Path, ring_bytes: int) -> None:
        self._kernels = _KERNEL.findall(source)
        parameters = "unsigned grid, unsigned block, const unsigned long long* arguments, unsigned seed"
        launches = "\n".join(
            f'extern "C" const char* launch_{name}({parameters}) {{\n'
            f"    return on_cpu::launch({name}, grid, block, arguments, seed);\n}}"
            for name in self._kernels
        )
        (folder / "kernels.cpp").write_text(
            f'#include "{HEADER}"\n'
            f"{on_cpu(source)}\n"
            f"alignas(128) char ring[{ring_bytes}];\n"
            f'extern "C" void tell_additions(void (*callback)(unsigned int*)) {{ on_cpu::on_add = callback; }}\n'
            f"{launches}\n"
        )
        command = ["g++", "-std=c++17", "-O1", "-g", "-shared", "-fPIC"]
        library = folder / "kernels.so"
        done = subprocess.run(
            [*command, str(folder / "kernels.cpp"), "-o", str(library)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        arguments: Sequence[Any],
        seed: int = 0,
        on_add: Callable[[int], None] = lambda address: None,
    ) -> None:
        """on_add: called with the address of a word that `atomicAdd` has changed; ctypes drops what it raises.
        Raises AssertionError for what no GPU would take, or does not wait for."""
        assert name in self._kernels
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(on_add)
        self._library.tell_additions(callback)
        launch = self._library[f"launch_{name}"]
        launch.restype = ctypes.c_char_p
        bits = np.array([int(each) & (1 << 64) - 1 for each in arguments], np.uint64)
        error = launch(grid, block, ctypes.c_void_p(bits.ctypes.data), seed)
        self._library.tell_additions(None)
        assert error is None, error.decode()
