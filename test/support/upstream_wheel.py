"""Upstream's wheel, downloaded once (28 to 39 MB) into the user's cache folder; without a network a test skips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.rebase.upstream_names import RECORDED

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-test"
# The version whose names this engine has.
STANDS_ON: str = json.loads(RECORDED.read_text())["version"]


def upstream_wheel(version: str) -> Path:
    """Which interpreter it was built for does not matter: only Python source is read from it."""
    if not list(_CACHE.glob(f"sglang-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", f"sglang=={version}", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_34_x86_64", "--quiet"]
        command += ["--timeout=10", "--retries=0", "--disable-pip-version-check", f"--dest={_CACHE}"]
        try:
            _CACHE.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"upstream's wheel cannot be had: {error}")
        if done.returncode:
            pytest.skip(f"upstream's wheel cannot be had: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    return next(_CACHE.glob(f"sglang-{version}-*.whl"))
