"""`StoreLog`: what the disk tier counts, and the lines that it logs, each kind once a minute at most.

Owns the counters. Decides nothing.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sglang.srt.mem_cache.storage.registry import CONFIG_FLAG
from sglang.srt.utils.byte_sizes import shown_size

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
FULL = (errno.ENOSPC, errno.EDQUOT)
_COUNTERS = (
    *("read_blocks", "written_blocks", "copied_blocks", "evicted_blocks", "refused_blocks"),
    *("read_errors", "write_errors", "lock_timeouts"),
)


class StoreLog:
    """folder: of the namespace. clock: seconds, for the pauses between lines. Safe between threads."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._next: dict[str, float] = {}

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def count(self, name: str, num: int) -> int:
        """Returns the sum."""
        with self._lock:
            self._counters[name] += num
            return self._counters[name]

    def read_failed(self, num_blocks: int, why: str, path: str) -> None:
        total = self.count("read_errors", num_blocks)
        if self._allows("read"):
            logger.warning(
                "%s: %s; what is lost is computed again and stored anew (%d bad blocks and files since the start; "
                "look at the disk if the number grows)",
                path,
                why,
                total,
            )

    def write_failed(self, error: OSError) -> None:
        total = self.count("write_errors", 1)
        if self._allows("write"):
            advice = "free space on it or set limit_gb" if error.errno in FULL else "look at the disk"
            logger.warning(
                "storing KV in %s failed (%s): %s, or name another folder with path in %s; requests go on without "
                "(%d such failures since the start)",
                self._folder,
                error.strerror,
                advice,
                CONFIG_FLAG,
                total,
            )

    def lock_timed_out(self) -> None:
        total = self.count("lock_timeouts", 1)
        if self._allows("lock"):
            logger.warning(
                "another process has held the lock of %s for a second, so that no KV is stored for now: look for a "
                "stopped process or a slow disk (%d such pauses since the start)",
                self._folder,
                total,
            )

    def writes_refused(self, num_blocks: int, daily_bytes: int) -> None:
        total = self.count("refused_blocks", num_blocks)
        if self._allows("budget"):
            logger.warning(
                "%s were written to %s in 24 hours, so that no KV is stored for now: raise daily_write_gb in %s "
                "or leave it out (%d blocks refused since the start)",
                shown_size(daily_bytes),
                self._folder,
                CONFIG_FLAG,
                total,
            )

    def folder_is_gone(self) -> None:
        if self._allows("gone"):
            logger.warning(
                "%s was deleted, and what was stored in it is lost: the next write makes it anew", self._folder
            )

    def _allows(self, kind: str) -> bool:
        with self._lock:
            now = self._clock()
            if now < self._next.get(kind, now):
                return False
            self._next[kind] = now + LOG_INTERVAL_S
            return True
