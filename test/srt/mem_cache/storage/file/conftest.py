from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.disk_fixture import Disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "root")
    yield disk
    for store in disk.stores:
        store.close()
