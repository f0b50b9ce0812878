"""The recorded names are those of upstream's wheel; nothing of the version before it is in no table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang.rebase.report import compare
from sglang.rebase.stands import same_paths
from sglang.rebase.upstream_names import RECORDED, load_names
from support.upstream_wheel import STANDS_ON, upstream_wheel

pytestmark = pytest.mark.clients


def test_the_recorded_names_are_the_wheel_s() -> None:
    wheel = load_names(str(upstream_wheel(STANDS_ON)))
    assert load_names(str(RECORDED)) == replace(wheel, files=same_paths(wheel))


def test_nothing_is_to_decide_since_the_version_before() -> None:
    before, now = (load_names(str(upstream_wheel(version))) for version in ("0.5.21", STANDS_ON))
    found = compare(before, now)
    assert found and [each.name for each in found if each.needs_decision] == []
