"""`python serve_crashing.py <server flags>`: a whole server around `crashing_scheduler.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import exit_now

if __name__ == "__main__":
    ensure_embedded_model()
    command = (sys.executable, str(Path(__file__).with_name("crashing_scheduler.py")))
    exit_now(launch_server(ServerArgs.from_cli(sys.argv[1:]), command))
