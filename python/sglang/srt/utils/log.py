"""One line per event with time and level, on stderr."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, prefix: str = "") -> None:
    name = f" {prefix}" if prefix else ""
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s{name}] %(levelname)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
