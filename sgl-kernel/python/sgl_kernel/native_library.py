"""`NativeLibrary`: C that is compiled at first use and called through ctypes, which releases the GIL.

Owns the compiled libraries and their files in the user's cache. A file's name is a hash of the sources, the command,
the compiler's version and the CPU's features; a change to one of them gives another file. Any number of processes may
compile at once: each writes a file of its own, and renames it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CSRC = Path(__file__).resolve().parent / "csrc"
# errno and floating-point traps are given up.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_TIMEOUT_S = 120

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Raises OSError where the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-kernels"
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        raise OSError("this user has no home directory: set XDG_CACHE_HOME to a writable directory") from error


@dataclass
class NativeLibrary:
    # Of its file, and in the log.
    name: str
    # Files of csrc/, those that are only included too.
    sources: Sequence[str]
    # Function -> type of its result, types of its arguments.
    functions: dict[str, tuple[Any, list[Any]]]
    # What the log tells when there is no library.
    without: str
    # To the compiler, beside the flags that all libraries have; and behind the sources.
    flags: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    _loaded: ctypes.CDLL | None = field(default=None, init=False, repr=False)
    _is_available: bool | None = field(default=None, init=False, repr=False)

    def is_available(self) -> bool:
        """Whether it can be used, compiled now if necessary. If not, one line in the log gives the reason."""
        if self._is_available is None:
            try:
                self._load()
                self._is_available = True
            except (OSError, subprocess.SubprocessError, AttributeError) as e:
                detail = getattr(e, "stderr", None) or str(e)
                logger.warning("%s: no compiled loops, %s: %s", self.name, self.without, detail.strip())
                self._is_available = False
        return self._is_available

    def function(self, name: str) -> Any:
        """A function of the library, which `is_available`."""
        return getattr(self._load(), name)

    def forget(self) -> None:
        """Compile or look for it again when it is needed next."""
        self._loaded = self._is_available = None

    def compile(self, directory: Path) -> Path:
        """The compiled library in `directory`, written first if it does not exist. OSError or SubprocessError if that
        fails."""
        return self._compile(directory, (*_FLAGS, "-fPIC", "-shared"), ".so")

    def compile_program(self, directory: Path, main: str) -> Path:
        """A program of the library's sources and `main`, as `compile`."""
        return self._compile(directory, _FLAGS, "", main)

    def _compile(self, directory: Path, flags: Sequence[str], suffix: str, *more: str) -> Path:
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise OSError("no C compiler found; install gcc or clang, or set CC")
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S
        ).stdout
        paths = [CSRC / name for name in (*self.sources, *more)]
        command = [compiler, *flags, *self.flags]
        units = [str(path) for path in paths if path.suffix == ".c"]
        made_of = [*(path.read_text() for path in paths), *command, *self.linked, version]
        digest = hashlib.sha256("\0".join((*made_of, platform.machine(), _cpu_features())).encode())
        final = directory / f"{self.name}-{digest.hexdigest()[:24]}{suffix}"
        if final.is_file():
            return final
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=directory) as ours:
            built = Path(ours) / final.name
            command += ["-o", str(built), *units, *self.linked, "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)
            built.replace(final)
        return final

    def _load(self) -> ctypes.CDLL:
        if self._loaded is None:
            library = ctypes.CDLL(str(self.compile(cache_dir())))
            for name, (result, arguments) in self.functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            self._loaded = library
        return self._loaded


def _cpu_features() -> str:
    """The features that `-march=native` depends on. Machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("flags", "Features", "model name", "model\t", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
