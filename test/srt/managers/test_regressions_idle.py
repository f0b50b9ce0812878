"""An idle moment must end when a request comes."""

from __future__ import annotations

import gc
import types

import pytest

from sglang.srt.managers import scheduler_process


@pytest.mark.parametrize(("num_nodes", "checked"), [(10, 1), (100_000, 0)])
def test_a_large_tree_is_not_walked_for_seconds(num_nodes: int, checked: int) -> None:
    checks = []
    cache = types.SimpleNamespace(tree=types.SimpleNamespace(num_nodes=num_nodes))
    scheduler = types.SimpleNamespace(cache=cache, check_invariants=lambda: checks.append(1))
    scheduler_process.tidy_up(types.SimpleNamespace(scheduler=scheduler, record=None))  # type: ignore[arg-type]
    gc.unfreeze()
    assert len(checks) == checked
