"""`python serve_fake.py '<json list of the fake scheduler's flags>' <drain timeout> <server flags>`: a whole server
with the fake scheduler in the model's place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import exit_now

FAKE = (sys.executable, str(Path(__file__).with_name("fake_scheduler.py")))

if __name__ == "__main__":
    flags, timeout, *argv = sys.argv[1:]
    exit_now(launch_server(ServerArgs.from_cli(argv), (*FAKE, *json.loads(flags)), float(timeout)))
