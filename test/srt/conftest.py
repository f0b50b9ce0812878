"""Being here, this puts its folder on the import path: tests below may import `server_fixture`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """SGLANG_TEST_DEVICE=emulated: engines of this test are on a device of its own."""
    if os.environ.get("SGLANG_TEST_DEVICE") != "emulated":
        yield
        return
    from sglang.test.device_emulator import emulated_device

    with emulated_device(int(os.environ.get("SEED", "0"))):
        yield
