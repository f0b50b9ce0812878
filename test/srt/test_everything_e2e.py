"""Everything at once: one server whose prompts come from device, peer, host, disk and remote store, all real, while
each of these parts is killed, stopped, slowed and brought back. Its answers are those that it computes without the
cache."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sglang.srt.server_args import ServerArgs
from support.all_tiers import borrowed_tokens
from support.chaos import FLAGS, Chaos, Config, everything, run
from support.chaos_mixes import drawn_mix
from support.server_fixture import Server

pytestmark = pytest.mark.e2e

# As one step: what happens at the same time.
STEPS = (
    ("lender killed",),
    ("lender stopped",),
    ("store killed",),
    ("store stopped",),
    ("store slow",),
    ("proxy killed",),
    ("proxy stopped",),
    ("disk slow",),
    ("disk full",),
    ("disk gone",),
    ("lender killed", "store killed", "proxy killed", "disk deleted"),
    ("lender stopped", "store stopped", "proxy stopped", "disk hangs"),
)


def is_left_alone(server: Server) -> bool:
    """Whether the disk goes on without the remote store, or storage hangs as a whole."""
    state = server.state()
    return bool(state["tiers"]["remote"]["left_alone"] or state["storage"]["reads"]["off"])


def go_through(chaos: Chaos, names: tuple[str, ...]) -> None:
    clients, server = chaos.clients, chaos.tiers.server
    began, before = time.monotonic(), clients.seen.tokens.copy()
    clients.seen.slowest_s = 0.0
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(chaos.fault(name))
        if "lender killed" in names:
            clients.wait_until(lambda: borrowed_tokens(server) == 0)
        # A proxy that is stopped before it listens is out of reach, and nothing hangs.
        if "store stopped" in names and "proxy stopped" not in names:
            clients.wait_until(lambda: is_left_alone(server))
        clients.wait_for_answers(2)
    clients.wait_for_answers(1)
    took = f"{time.monotonic() - began:.1f} s, the slowest request {clients.seen.slowest_s:.1f} s"
    print(f"{', '.join(names)}: {took}, {dict(clients.seen.tokens - before)}", flush=True)


@pytest.mark.slow
def test_all_sources_while_each_part_is_killed_stopped_and_slowed(tmp_path: Path) -> None:
    with everything(tmp_path, Config(seed=1, mixed=4)) as chaos:
        for names in STEPS:
            go_through(chaos, names)


@pytest.mark.slow
def test_a_short_chaos(tmp_path: Path) -> None:
    run(tmp_path, Config(seed=1, steps=2, mixed=2, router="sglang"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bluefield", "remote"])
@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
def test_chaos(strict: bool, backend: str, tmp_path: Path) -> None:
    """SEED: of the faults, the clients and the server's flags. SOAK_S: how long they last."""
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    minutes = float(os.environ.get("SOAK_S", "100")) / 60
    mix = replace(drawn_mix(seed), strict=strict, backend=backend)
    run(tmp_path, Config(seed, minutes=minutes, mixed=2, router="sglang", mix=mix))


def test_a_server_takes_the_flags_of_any_seed() -> None:
    for seed in range(200):
        flags = (*FLAGS.split(), *drawn_mix(seed).flags)
        ServerArgs.from_cli(["--model-path", "embedded", "--hicache", *flags]).check()
