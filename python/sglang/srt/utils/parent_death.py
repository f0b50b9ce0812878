"""How a program dies with the process that started it, however that one died. On Linux only.

The children of the engine do it by themselves (`child_process`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Asks for SIGKILL at the parent's death (PR_SET_PDEATHSIG is 1), checks whether the parent has died before that, and
# becomes the command. It runs in an interpreter of its own, because code between fork and exec is not safe where
# there are threads.
_LAUNCHER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """What to start in place of the command, whose program is a path. It dies with the thread that starts it: start
    it from one that lives as long as the process."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
