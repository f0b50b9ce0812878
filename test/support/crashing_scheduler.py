"""`python crashing_scheduler.py '<json>'`: the real scheduler process, in which a certain token is a bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, bytes_to_ids
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_process import start
from sglang.srt.utils.child_process import run_child
from sglang.srt.utils.time_units import Seconds

BAD_TOKEN = 666


def fail_on_a_bad_token(replace: Callable[[type, str, Any], None] = setattr) -> None:
    add = Scheduler._add

    def failing(scheduler: Scheduler, msg: TokenizedGenerateReqInput, now: Seconds) -> None:
        assert BAD_TOKEN not in bytes_to_ids(msg.input_ids), "a bad token"
        add(scheduler, msg, now)

    replace(Scheduler, "_add", failing)


if __name__ == "__main__":
    fail_on_a_bad_token()
    run_child(start)
