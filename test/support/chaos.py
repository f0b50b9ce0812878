"""Chaos: one real server on device, peer, host, disk and remote store, with a router in front of it. Clients ask a
seeded mix of requests while its parts are killed, stopped, slowed, filled and damaged, and while an administrator
erases, limits, keeps and changes things, in a seeded order. Every answer is compared with the one that the server
computes without its cache. The seed draws flags of the server and whether another one shares its storage, too; the
server is restarted and killed. At the end nothing may be left over.

    python -m support.chaos --seed 7 --minutes 5      what make chaos runs

A failure leaves the plan, the logs and the server's state in build/chaos-SEED, and the command that runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from support.all_tiers import IN_PROCESS, SOURCES, AllTiers, Parts, faults, slabs_of_worker
from support.chaos_admin import Administrator
from support.chaos_ends import assert_nothing_is_left, assert_replays, held_by, unexpected_lines, with_slabs
from support.chaos_mixes import Mix, drawn_mix
from support.chaos_requests import Clients, hold_all
from support.server_fixture import NO_TLS, PATIENCE_S, Server, free_port, wait_until
from support.windowed_model import write_windowed_model

# Of the conversations, device, peer and host together hold two thirds, and the disk four fifths.
FLAGS = "--max-total-tokens 768 --hicache-ratio 0.6 --chunked-prefill-size 256 --hicache-load-or-recompute off"
DISK_TOKENS = 2000
# Where layers have a window: so long that the host has room for pools of both kinds of layers.
WINDOW = 16
WINDOWED_FLAGS = "--chunked-prefill-size 64 --hicache-ratio 0.8 --served-model-name embedded"
# Of a server as a whole, by its number.
RESTARTS = {"server restarted": 0, "server killed": 0, "neighbour restarted": 1, "neighbour killed": 1}

ROUTERS = {"none": "", "sglang": "sglang.router", "sglang-router": "sglang_router.launch_router"}


def found_router() -> str:
    """SGLang's own where it is installed."""
    return "sglang-router" if importlib.util.find_spec("sglang_router") else "sglang"


class Router:
    """A router of ROUTERS before the servers, in a process of its own."""

    def __init__(self, name: str, servers: list[Server], folder: Path) -> None:
        self._num_servers = len(servers)
        self._log = folder / "router.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        urls = [server.url for server in servers]
        command = [sys.executable, "-m", ROUTERS[name], "--worker-urls", *urls, "--port", str(port)]
        if name == "sglang-router":
            command += ["--host", "127.0.0.1", "--prometheus-port", str(free_port())]
            command += ["--worker-startup-check-interval", "1"]
        with self._log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(self.is_ready)

    def is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
            workers = httpx.get(f"{self.url}/workers", timeout=PATIENCE_S, verify=NO_TLS).json()["workers"]
            return [worker["is_healthy"] for worker in workers] == [True] * self._num_servers
        return False

    def end(self) -> None:
        self._process.terminate()
        assert self._process.wait(PATIENCE_S) in (0, -signal.SIGTERM), self._log.read_text()
        assert "Traceback" not in self._log.read_text(), self._log.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Config:
    """What of a run a seed does not decide. steps and minutes: the run ends with the first that is reached."""

    seed: int
    steps: int = 1_000_000
    minutes: float = 1e9
    # Tiers that one prompt has come from before the first fault.
    mixed: int = 5
    router: str = "none"
    # The disk tier's file system is small, and can be filled, where this user may mount one.
    small_disk: bool = False
    # Of the server's flags, beside FLAGS, and of its parts.
    mix: Mix = field(default_factory=Mix)


@dataclass(frozen=True)
class Step:
    """names: of `faults`, which begin one after the other. Waits are numbers of answers; negative ones are none."""

    names: tuple[str, ...]
    waits: tuple[int, ...]
    wait_during: int
    wait_after: int


def plan(seed: int, known: list[str]) -> Iterator[Step]:
    rng = random.Random(seed)
    while True:
        # At most one of each part.
        names = {name.split()[0]: name for name in rng.sample(known, rng.choice((1, 1, 2, 4, 8)))}
        # A store that hangs ends no detach. A server starts only where the parts of its storage are.
        alone = next((part for part in ("server", "neighbour", "storage") if part in names), None)
        chosen = (names[alone],) if alone else tuple(names.values())
        waits = tuple(rng.choice((-3, 0)) for _ in chosen)
        yield Step(chosen, waits, rng.choice((0, 3, 20)), rng.choice((-3, 0, 10)))


@dataclass(frozen=True)
class Chaos:
    tiers: AllTiers
    clients: Clients
    administrator: Administrator
    router: Router | None
    servers: list[Server]

    @property
    def names(self) -> list[str]:
        """Of all that may happen."""
        return sorted((*faults(self.tiers), *(name for name, i in RESTARTS.items() if i < len(self.servers))))

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """One of `faults` or RESTARTS, which the administrator knows of."""
        with self.administrator.during(name):
            if name in RESTARTS:
                self._restart(name)
                yield
            else:
                with faults(self.tiers)[name]():
                    yield

    def _restart(self, name: str) -> None:
        """Clients wait, unless a router has another server for them. The disk stays warm."""
        server, clients = self.servers[RESTARTS[name]], self.clients
        is_killed = name.endswith("killed")
        with contextlib.ExitStack() as stack:
            if server is self.tiers.server:
                stack.enter_context(self.administrator.gate.closed())
            if is_killed or self.router is None or len(self.servers) == 1:
                stack.enter_context(clients.gate.closed())
            clients.is_restarting = True
            if is_killed:
                server.kill()
            else:
                server.send()
                assert server.wait() == 0, server.output()
                server.assert_nothing_left()
            server.start()
            server.wait_ready()
            if self.router is not None:
                wait_until(self.router.is_ready)
            clients.is_restarting = False


@contextlib.contextmanager
def everything(folder: Path, config: Config) -> Iterator[Chaos]:
    """All parts, the server on them, and clients that have had prompts from all sources, one of them from
    `config.mixed` at the same time. Then an administrator begins. At the end all sources serve prompts again, all
    tenants are erased, and the server stops with nothing left."""
    with contextlib.ExitStack() as stack:
        mix = config.mix
        has_worker = mix.neighbour == "lends"
        num_slabs = 2 if mix.neighbour == "borrows" else 1
        parts = Parts(
            strict=mix.strict,
            num_slabs=num_slabs,
            has_worker=has_worker,
            backend=mix.backend,
            is_elsewhere=mix.is_elsewhere,
            plugin=mix.plugin,
            small_disk=config.small_disk,
            num_ranks=mix.num_ranks,
            num_kinds=2 if mix.has_windows else 1,
        )
        num_offered = num_slabs + (slabs_of_worker(mix.kv_bytes, parts) if has_worker else 0)
        tiers = stack.enter_context(AllTiers(folder, parts))
        model: tuple[str, ...] = ()
        if mix.has_windows:
            model = (*WINDOWED_FLAGS.split(), "--model-path", str(write_windowed_model(folder / "model", WINDOW)))
        record = folder / "steps"
        server = tiers.start_server(
            *FLAGS.split(),
            *model,
            *mix.flags,
            *(("--layer-stream-disk-size", "0.02", "--layer-stream-disk-path", str(folder)) if mix.swaps else ()),
            disk_tokens=DISK_TOKENS * mix.kv_bytes // 4,
            codec=mix.codec,
            storage=mix.storage,
            disk=mix.disk,
            own=("--record-steps", str(record)) if mix.records else (),
        )
        servers = [server]
        if mix.neighbour:
            servers.append(tiers.start_neighbour(mix.neighbour, mix.kv_bytes))
        for each in servers:
            each.wait_ready()
        references = hold_all(server, mix)
        state = server.state()
        assert [tier for tier in SOURCES if state["tiers"][tier].get("cached_tokens")] == []
        router = Router(config.router, servers, folder) if config.router != "none" else None
        if router is not None:
            stack.callback(router.close)
        url, drops_salts = router.url if router else "", config.router == "sglang-router"
        with Clients(servers, references, config.seed, url, drops_salts) as clients:
            clients.wait_until(
                lambda: len(clients.seen.most) >= config.mixed and all(clients.seen.tokens[s] for s in SOURCES)
            )
            before = held_by(server, tiers.disk.folder)
            if mix.strict or mix.neighbour in ("borrows", "lends"):
                before = with_slabs(before, num_offered, mix.strict, mix.num_ranks)
            with Administrator(tiers, clients, references, config.seed) as administrator:
                yield Chaos(tiers, clients, administrator, router, servers)
        kinds = clients.seen.kinds
        administrator.take_back()
        # Of another seed: the tenants that were new then are not any more.
        with Clients(servers, references, -1 - config.seed, url, drops_salts) as clients:
            clients.wait_for_tokens(*SOURCES)
            clients.wait_until(
                lambda: not any(server.state()["storage"][kind]["off"] for kind in ("reads", "writes"))
            )
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not held_by(server, tiers.disk.folder) - before, 30)
        more = held_by(server, tiers.disk.folder) - before
        assert not more, f"more is held than before: {more}, {before}"
        if router is not None:
            router.end()
        neighbours = servers[1:]
        # What borrows from another one ends before it.
        if not has_worker:
            _end(neighbours)
        administrator.assert_all_is_well()
        print(f"requests and acts: {dict(kinds + clients.seen.kinds)}", flush=True)
        _end([server])
        if has_worker:
            _end(neighbours)
        if mix.records:
            assert_replays(record)


def _end(servers: list[Server]) -> None:
    for server in servers:
        assert_nothing_is_left(server)
        assert not unexpected_lines(server.output()), unexpected_lines(server.output())


def take_step(chaos: Chaos, step: Step) -> None:
    clients = chaos.clients
    began, before = time.monotonic(), clients.seen.tokens.copy()
    clients.seen.slowest_s = 0.0
    print(f"{', '.join(step.names)} ...", end=" ", flush=True)
    with contextlib.ExitStack() as stack:
        for name, wait in zip(step.names, step.waits):
            stack.enter_context(chaos.fault(name))
            clients.wait_for_answers(wait)
        clients.wait_for_answers(step.wait_during)
    clients.wait_for_answers(step.wait_after)
    took = f"{time.monotonic() - began:.1f} s, the slowest request {clients.seen.slowest_s:.1f} s"
    print(f"{took}, {dict(clients.seen.tokens - before)}", flush=True)


def run(folder: Path, config: Config) -> None:
    print(f"{config}", flush=True)
    taken: list[Step] = []
    tiers: AllTiers | None = None
    try:
        with everything(folder, config) as chaos:
            tiers = chaos.tiers
            end = time.monotonic() + 60 * config.minutes
            for step in itertools.islice(plan(config.seed, chaos.names), config.steps):
                if time.monotonic() > end:
                    break
                taken.append(step)
                take_step(chaos, step)
    except BaseException as error:
        _keep(folder, config, taken, tiers, error)
        raise


def _keep(folder: Path, config: Config, taken: list[Step], tiers: AllTiers | None, error: BaseException) -> None:
    kept = Path("build") / f"chaos-{config.seed}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    again = f"PYTHONPATH=test python -m support.chaos --seed {config.seed} --steps {max(1, len(taken))}"
    again += f" --router {config.router} --backend {config.mix.backend}"
    again += " --strict" if config.mix.strict else " --no-strict"
    again += " --windows" if config.mix.has_windows else " --no-windows"
    again += "" if config.mix.flags else " --plain"
    text = [again, repr(config), *map(repr, taken), f"{type(error).__name__}: {error}"]
    (kept / "plan").write_text("\n".join(text) + "\n")
    for log in (*folder.glob("*.log"), *folder.glob("proxy/log")):
        shutil.copy(log, kept / log.name)
    if tiers is not None:
        (kept / "server.log").write_text(tiers.last_output)
        (kept / "state.json").write_text(tiers.last_state)
    print(f"\nfailed; see {kept}. Again: {again}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the plan, if it is to end before")
    parser.add_argument("--router", choices=ROUTERS, default=found_router())
    parser.add_argument("--backend", choices=("bluefield", "remote", IN_PROCESS), help="not by the seed")
    strict = argparse.BooleanOptionalAction
    parser.add_argument("--strict", action=strict, help="whether the lender copies for the server, not by the seed")
    parser.add_argument("--windows", action=strict, help="whether layers have windows, not by the seed")
    parser.add_argument("--plain", action="store_true", help="nothing of the server and its parts is by the seed")
    args = parser.parse_args()
    mix = Mix() if args.plain else drawn_mix(args.seed)
    given = {"backend": args.backend, "strict": args.strict, "has_windows": args.windows}
    mix = replace(mix, **{name: value for name, value in given.items() if value is not None})
    mixed = 2 if mix.flags else 5
    config = Config(args.seed, args.steps, args.minutes, mixed, args.router, True, mix)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run(Path(folder), config)


if __name__ == "__main__":
    main()
