"""What these modules have imported is no garbage: tests here collect often, and would look at all of it each time."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    gc.collect()
    gc.freeze()
