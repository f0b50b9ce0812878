"""How long the path of a Unix socket may be."""

from __future__ import annotations

import os

# sun_path has 108 bytes, one of them for the zero at the end.
MAX_PATH_BYTES = 107


def fits(path: str | os.PathLike[str]) -> bool:
    return len(os.fsencode(path)) <= MAX_PATH_BYTES
