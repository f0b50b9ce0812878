"""The data plane as a program for another machine. What it does is tested in test/srt/offload/proxy/test_plane.py."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

EM_AARCH64 = 183


def compiler_for_aarch64() -> str | None:
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return found
    if importlib.util.find_spec("ziglang") is not None:
        return f"{sys.executable} -m ziglang cc -target aarch64-linux-gnu.2.31"
    return None


@pytest.mark.slow
def test_it_compiles_for_the_cores_of_a_bluefield(tmp_path: Path):
    compiler = compiler_for_aarch64()
    if compiler is None:
        pytest.skip("no C compiler for aarch64: pip install ziglang")
    out = tmp_path / "kvplane"
    arguments = ["--out", str(out), "--compiler", f"{compiler} -Wall -Werror"]
    subprocess.run([sys.executable, "-m", "sgl_kernel.kvplane", *arguments], check=True)
    program = out.read_bytes()
    assert program[:4] == b"\x7fELF" and struct.unpack_from("<H", program, 18) == (EM_AARCH64,)
    assert b"libpython" not in program


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path):
    arguments = ["--out", str(tmp_path / "kvplane"), "--compiler", "no-such-cc"]
    done = subprocess.run([sys.executable, "-m", "sgl_kernel.kvplane", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "no-such-cc" in done.stderr and "Traceback" not in done.stderr
