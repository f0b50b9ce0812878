"""A second network namespace with a link to it, whose rate can be changed and which can be cut: another machine, as
far as TCP is concerned. Needs the right to make namespaces, and `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class Elsewhere:
    """address: of the other machine, as seen from here. command: what runs a program there."""

    def __init__(self, name: str, network: str) -> None:
        self.here, self.address = f"{network}.1", f"{network}.2"
        self._name = name
        self._link = name
        self.command = ["ip", "netns", "exec", name]

    def limit(self, megabits: float) -> None:
        """Of the link, both ways."""
        # Half a millisecond's bytes: with fewer, the timer's wake-ups and not the rate would be the limit.
        burst = f"{max(64, int(megabits / 16))}kb"
        shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", burst, "latency", "50ms"]
        _run("tc", "qdisc", "replace", "dev", f"{self._link}h", *shape)
        _run(*self.command, "tc", "qdisc", "replace", "dev", f"{self._link}t", *shape)

    def cut(self) -> None:
        """Nothing arrives any more, and neither side is told."""
        _run("ip", "-n", self._name, "link", "set", f"{self._link}t", "down")

    def mend(self) -> None:
        _run("ip", "-n", self._name, "link", "set", f"{self._link}t", "up")


@contextmanager
def elsewhere(megabits: float) -> Iterator[Elsewhere]:
    """Raises RuntimeError where namespaces are not allowed."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise RuntimeError("ip and tc (iproute2) are not installed")
    # Of its own, as several processes may run tests.
    number = os.getpid() % 12_500
    name = f"kv{number}"
    there = Elsewhere(name, f"10.{200 + number // 250}.{number % 250}")
    here_link, there_link = f"{there._link}h", f"{there._link}t"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", here_link, "type", "veth", "peer", "name", there_link, "netns", name)
        _run("ip", "addr", "add", f"{there.here}/24", "dev", here_link)
        _run("ip", "link", "set", here_link, "up")
        _run("ip", "-n", name, "addr", "add", f"{there.address}/24", "dev", there_link)
        _run("ip", "-n", name, "link", "set", there_link, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        there.limit(megabits)
        yield there
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
