"""`python -m sglang.launch_server --model-path <model>`: reads the flags, then serves until it is stopped."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys


def stop_at_once() -> None:
    """Until the server handles signals itself: SIGTERM and SIGINT end a process that has nothing to close, as they
    would a server that is starting."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def fill_standard_streams() -> None:
    """In place of those that are closed: else sockets would get their numbers, and children inherit none."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def main() -> None:
    fill_standard_streams()
    stop_at_once()
    from sglang.srt.server_args import ServerArgs  # imports take a second, more on a busy machine

    args = ServerArgs.from_cli(sys.argv[1:])
    from sglang.srt.configs.smollm2_model import fetched_or_embedded

    args = dataclasses.replace(args, model_path=fetched_or_embedded(args.model_path))
    from sglang.srt.entrypoints.http_server import launch_server  # after the flags: they answer at once
    from sglang.srt.utils.child_process import exit_now

    exit_now(launch_server(args))


if __name__ == "__main__":
    main()
