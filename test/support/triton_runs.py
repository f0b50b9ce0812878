"""Triton kernels where there is no GPU: under its interpreter, and compiled.

The interpreter has to be chosen before Triton is imported, so it runs in a process of its own: the test's file as a
script. It checks index arithmetic and masks, not races, and multiplies no matrices of bfloat16.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed: pip install '.[gpu]'")
# Shared memory that a program may use, by capability: of Hopper, Ampere, Ada, and Blackwell in data centres and not.
SHARED_BYTES = {90: 227 << 10, 80: 163 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}
# What multiplies matrices there.
PRODUCT_INSTRUCTIONS = {90: "wgmma.mma_async", 80: "mma.sync", 89: "mma.sync", 100: "tcgen05.mma", 120: "mma.sync"}
# Arguments of attention's kernels that are None unless keys have a part of its own for all heads.
NO_ROTARY = ("rotary_ptr", "r_page_stride", "r_token_stride")


def run_interpreted(file: str, *args: str) -> str:
    """Runs the script under the interpreter, and returns what it printed."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(file).parent), *sys.path]),
    }
    done = subprocess.run([sys.executable, file, *args], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Collection[str],
    num_warps: int = 4,
    num_stages: int = 3,
    capability: int = 90,
) -> Any:
    """What `triton.compile` returns: `asm["ptx"]`, `metadata.shared`. types: of the arguments that are no constants.
    aligned: those that are multiples of 16. Fails if it does not fit into shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if name in aligned and name not in constants
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert result.metadata.shared <= SHARED_BYTES[capability]
    return result


def spilled_bytes(result: Any) -> int:
    """Of a thread. result: of `compile_kernel`."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])
