"""How coordinators end: their sockets go with them, and a program that forgets to close them ends all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.memory.slabs import SlabFiles


def test_an_endpoints_socket_goes_with_its_coordinator(private: Path):
    for _ in range(2):
        lender = LenderCoordinator(f"ipc://{private}/peers", private, SlabFiles(1, 4096, int))
        assert (private / "peers").is_socket()
        lender.close()
        lender.close()
        assert list(private.iterdir()) == []


FORGETS_TO_CLOSE = """
import atexit, sys, time

def wait():
    # It is registered first, so it runs last: the threads take another turn or two, and would find what was closed.
    deadline = time.monotonic() + 120
    for coordinator in made:
        for _ in range(2):
            seen = coordinator.status()
            while coordinator.status() is seen and coordinator._error is None and time.monotonic() < deadline:
                time.sleep(0.01)

atexit.register(wait)
from pathlib import Path
from sglang.srt.peer.borrower_coordinator import BorrowerCoordinator
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.memory.slabs import SlabFiles

endpoint = "ipc://" + sys.argv[1] + "/peers"
made = [LenderCoordinator(endpoint, Path(sys.argv[1]), SlabFiles(1, 4096, int))]
made.append(BorrowerCoordinator([endpoint], "master", 4096))
"""


def test_a_program_that_forgets_to_close_ends_without_a_word(private: Path):
    """Nothing is closed under the threads that use it."""
    command = [sys.executable, "-c", FORGETS_TO_CLOSE, str(private)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
