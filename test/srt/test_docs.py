"""The API reference says what is true: its examples run, and its table of refused fields is the code's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.entrypoints import request_fields
from support.server_fixture import Server

pytestmark = pytest.mark.e2e

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", API, re.DOTALL)


@pytest.fixture(scope="module")
def server():
    with Server("--hicache") as server:
        yield server


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs(server, number):
    kind, code = BLOCKS[number]
    code = code.replace("http://127.0.0.1:30000", server.url)
    # The folder of the interpreter first, so that nothing depends on what is installed elsewhere.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    is_about_errors = "top_p" in code and "max_new_tokens" not in code
    assert ('"object":"error"' in done.stdout) == is_about_errors, done.stdout


@pytest.mark.parametrize(
    "refused",
    [
        request_fields.UNSUPPORTED_CHAT,
        request_fields.UNSUPPORTED_COMPLETION,
        request_fields.UNSUPPORTED_GENERATE,
        request_fields.UNSUPPORTED_NATIVE_SAMPLING,
    ],
)
def test_every_refused_field_is_in_the_table(refused):
    table = API.split("## What is refused")[1]
    assert set(refused) <= set(re.findall(r"\w+", table))
