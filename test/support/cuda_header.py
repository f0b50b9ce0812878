"""Checks of bindings to libcuda against the toolkit's cuda.h, by the C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def header() -> Path | None:
    """The folder of cuda.h, of a toolkit or of Triton."""
    folders = [*Path("/usr/local").glob("cuda*/include")]
    if triton := importlib.util.find_spec("triton"):
        folders += [Path(each) / "backends/nvidia/include" for each in triton.submodule_search_locations or ()]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


needs_header = pytest.mark.skipif(
    header() is None or shutil.which("gcc") is None, reason="needs gcc and the CUDA toolkit's cuda.h"
)
_C_TYPES: dict[Any, str] = {
    ctypes.c_int: "int",
    ctypes.c_uint: "unsigned int",
    ctypes.c_ubyte: "unsigned char",
    ctypes.c_ulonglong: "unsigned long long",  # size_t, too
    ctypes.c_void_p: "void*",
    ctypes.c_char_p: "const char*",
}


def compile_c(tmp_path: Path, source: str, *flags: str) -> Path:
    (tmp_path / "check.c").write_text(f"#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\n{source}")
    command = ["gcc", f"-I{header()}", *flags, str(tmp_path / "check.c"), "-o", str(tmp_path / "check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tmp_path / "check"


def layout_of(structs: Mapping[str, type[ctypes.Structure]]) -> dict[str, int]:
    """Sizes of structs and offsets of their fields, in bytes, by C expression. structs: by their names in cuda.h."""
    found: dict[str, int] = {}
    for name, struct in structs.items():
        found[f"sizeof({name})"] = ctypes.sizeof(struct)
        for each, *_ in struct._fields_:
            found[f"offsetof({name}, {each})"] = getattr(struct, each).offset
    return found


def assert_values(tmp_path: Path, expected: Mapping[str, int]) -> None:
    """expected: by C expression."""
    lines = "".join(f'printf("%lld\\n", (long long)({each}));\n' for each in expected)
    done = subprocess.run([compile_c(tmp_path, f"int main() {{ {lines} }}")], capture_output=True, text=True)
    assert dict(zip(expected, map(int, done.stdout.split()), strict=True)) == expected


def assert_signatures(
    tmp_path: Path, signatures: Mapping[str, tuple[Any, ...]], structs: Mapping[str, type[ctypes.Structure]]
) -> None:
    """Each function is called by one whose parameters are ours; not linked. Contexts and streams are pointers, and a
    size_t is as long as a long long."""
    c_types = _C_TYPES | {struct: name for name, struct in structs.items()}
    source = ""
    for name, takes in signatures.items():
        parameters = [c_types[each] if each in c_types else f"{c_types[each._type_]}*" for each in takes]
        arguments = [f"a{i}" for i in range(len(takes))]
        for i, parameter in enumerate(parameters):
            if parameter in ("void**", "unsigned long long*"):
                arguments[i] = f"(void*){arguments[i]}"
        declared = ", ".join(f"{parameter} a{i}" for i, parameter in enumerate(parameters))
        source += f"CUresult our_{name}({declared}) {{ return {name}({', '.join(arguments)}); }}\n"
    compile_c(tmp_path, source, "-c", "-Wall", "-Wconversion", "-Werror")
