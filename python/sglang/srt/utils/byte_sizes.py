"""Numbers of bytes as people read them."""

from __future__ import annotations

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def shown_size(num_bytes: float) -> str:
    """For instance "64.00 GB" or "30.00 MB"."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:g} bytes"
