"""A slow or hanging disk: where this folder is on PYTHONPATH, reads and writes of many buffers wait.

The file that HICACHE_TEST_DISK names has the seconds that each takes, or "hang": until the file changes. Without the
file nothing waits. Only the disk tier reads and writes so.
"""

import os
import time

_FILE = os.environ.get("HICACHE_TEST_DISK", "")
_preadv, _pwritev = os.preadv, os.pwritev


def _pause() -> None:
    end = None
    while True:
        try:
            with open(_FILE) as file:
                wanted = file.read().strip()
        except OSError:
            return
        if wanted != "hang":
            end = end or time.monotonic() + float(wanted or 0)
            if time.monotonic() >= end:
                return
        time.sleep(0.01)


def _slow_preadv(*arguments):
    _pause()
    return _preadv(*arguments)


def _slow_pwritev(*arguments):
    _pause()
    return _pwritev(*arguments)


if _FILE:
    os.preadv, os.pwritev = _slow_preadv, _slow_pwritev
