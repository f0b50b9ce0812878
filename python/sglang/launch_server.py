"""`python -m sglang.launch_server --model-path <model>`: reads the flags, then serves until it is stopped."""

from __future__ import annotations

import sys

from sglang.srt.server_args import ServerArgs


def main() -> None:
    args = ServerArgs.from_cli(sys.argv[1:])
    from sglang.srt.entrypoints.http_server import launch_server  # after the flags: they answer at once

    sys.exit(launch_server(args))


if __name__ == "__main__":
    main()
