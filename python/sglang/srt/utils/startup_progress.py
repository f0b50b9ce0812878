"""What a starting process is doing, for people. Owns its lines of the log, its bar on a terminal, and the file that
the parent reads to tell of it."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)


class StartupProgress:
    """file: holds the stage; "" for none. It is empty while a bar is shown, which needs no other sign of life.
    columns: of the terminal that shows the log; 0 if none. is_leader: the rank that logs and shows a bar."""

    def __init__(self, file: str = "", columns: int = 0, is_leader: bool = True) -> None:
        self._file = file
        self._columns = columns
        self._is_leader = is_leader and bool(file)

    def stage(self, text: str) -> None:
        """A new one begins: a line of the log."""
        if self._is_leader:
            logger.info("%s", text)
        self._write(text)

    def detail(self, text: str) -> None:
        """Of the stage, without a line."""
        if not self._columns:
            self._write(text)

    def bar(self, text: str, total: int, unit: str) -> Any:
        """A context manager with `update()`."""
        if self._columns:
            self._write("")
        is_shown = self._columns > 0 and self._is_leader
        return tqdm(
            total=total, desc=text, unit=unit, file=sys.stderr, ncols=self._columns or None, disable=not is_shown
        )

    def _write(self, text: str) -> None:
        if not self._file:
            return
        with open(f"{self._file}.new", "w") as file:
            file.write(text)
        os.replace(f"{self._file}.new", self._file)


SILENT = StartupProgress()
