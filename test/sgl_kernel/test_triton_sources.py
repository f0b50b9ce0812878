"""What the Triton of the oldest torch that is served does not compile, and the one of these tests does: 3.6, beside
torch 2.11. `make test-oldest-triton` compiles all kernels with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "python", ROOT / "sgl-kernel" / "python"]


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions that Triton compiles, by file and name."""
    for folder in FOLDERS:
        for file in sorted(folder.rglob("*.py")):
            text = file.read_text()
            if "triton" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                    yield f"{file.name}:{node.name}", node


def test_kernels_return_no_none() -> None:
    found = dict(kernels())
    assert len(found) > 30, "the kernels are somewhere else"
    for name, kernel in found.items():
        returned = [
            node.value for node in ast.walk(kernel) if isinstance(node, ast.Return) and node.value is not None
        ]
        is_none = [isinstance(value, ast.Constant) and value.value is None for value in returned]
        assert not any(is_none), f"{name} returns None, which Triton 3.6 takes for a tensor"
