"""Being here, this puts its folder on the import path: tests below may import `server_fixture`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """SGLANG_TEST_DEVICE=emulated: engines of this test are on a device of its own."""
    if os.environ.get("SGLANG_TEST_DEVICE") != "emulated":
        yield
        return
    from support.device_emulator import emulated_device

    with emulated_device(int(os.environ.get("SEED", "0"))):
        yield


def pytest_sessionfinish() -> None:
    """Ends what forks children of tests (`children.py`), so that its CPU time is counted with that of the tests."""
    if (forkserver := sys.modules.get("multiprocessing.forkserver")) is not None:
        forkserver._forkserver._stop()
