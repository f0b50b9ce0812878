"""The clock of the processes. What decides never reads it: the time comes in as a parameter."""

from __future__ import annotations

import time

from sglang.srt.utils.time_units import Seconds


def monotonic() -> Seconds:
    """Seconds since some moment in the past; never goes back."""
    return Seconds(time.monotonic())
