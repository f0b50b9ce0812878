"""`shown_size`."""

from __future__ import annotations

import pytest

from sglang.srt.utils.byte_sizes import shown_size


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (30e6, "30.00 MB"),
        (64 << 30, "68.72 GB"),
        (2e13, "20000.00 GB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_they_fill(num_bytes: float, shown: str) -> None:
    assert shown_size(num_bytes) == shown
