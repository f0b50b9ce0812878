"""What holds for all tests.

Tests compute next to nothing, several processes of them at a time: more threads in each would only wait for each
other. The variable is set before torch is imported, and servers that tests start inherit it.

STRICT=1 (as `make test-all STRICT=1` sets it) fails the run if a test was skipped for another reason than the lack of
a GPU. The end of a run shows the CPU time of all its processes: `make test` has a budget.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.server_fixture import Server

os.environ.setdefault("OMP_NUM_THREADS", "1")
# While tests are imported nearly nothing becomes garbage, and each collection looks at all that there is.
gc.disable()


# Marks of what does not run by default.
_NOT_BY_DEFAULT = ("slow", "gpu", "clients")
_SKIPS = ("skip", "skipif")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`sampled(n)`: all but n of a test's cases become slow. Their names decide which: every run and every process
    chooses the same. What may be skipped is chosen last.

    Tests that share a server run first. A process whose tests are done takes over the last of another's, and would
    start the server again."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, _NOT_BY_DEFAULT)):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("sampled")
        assert marker is not None
        of_test.sort(key=lambda item: (any(map(item.get_closest_marker, _SKIPS)), zlib.crc32(item.nodeid.encode())))
        for item in of_test[marker.args[0] :]:
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """What tests have imported by now is no garbage, and much: each collection would look at it. Before each module,
    because modules import more, and tests that look for leaks collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real engine, for tests of several files: a device pool of few tokens, so that conversations move to the
    host, and are loaded back however fast this machine computes. It has a disk and publishes KV events. In the end, a
    second SIGTERM ends it in the middle of a request."""
    from support.server_fixture import Server, free_port, wait_until

    flags = "--hicache --hicache-ratio 8 --max-total-tokens 1024 --hicache-load-or-recompute off"
    storage = "--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config"
    folder = json.dumps({"path": str(tmp_path_factory.mktemp("small server"))})
    endpoints = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    events = json.dumps({"publisher": "zmq", **endpoints})
    with Server(*flags.split(), *storage, folder, "--kv-events-config", events) as server:
        yield server
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            cut = pool.submit(server.post, "/generate", body)
            wait_until(lambda: server.state()["queues"]["running"] == 1)
            server.stop(signal.SIGTERM, signal.SIGTERM)
            assert cut.result().status_code == 503


def pytest_collection(session: pytest.Session) -> None:
    """Each process of a whole run first imports a share of the test files, and so compiles them for the others. To
    rewrite their assertions takes longer than all else of a first collection. What cannot be imported yet is left to
    the collection."""
    worker, num_workers = (os.environ.get(f"PYTEST_XDIST_WORKER{of}", "") for of in ("", "_COUNT"))
    if not worker or session.config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[int(worker.removeprefix("gw")) :: int(num_workers)]:
        sys.path.insert(0, str(path.parent))
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(path.stem)


def pytest_collection_finish() -> None:
    gc.enable()


# Whether the test that runs has failed.
_failed = False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _failed
    _failed = _failed or report.failed


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """A kernel that reads where nothing is makes all later ones of its process fail: another process takes over."""
    global _failed
    failed, _failed = _failed, False
    torch = sys.modules.get("torch")
    if not failed or torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"{nodeid} has left the GPU unusable: {error}", returncode=1)


def _skips_not_for_a_gpu(terminal: pytest.TerminalReporter) -> list[str]:
    reasons = ((report.nodeid, str(report.longrepr)) for report in terminal.stats.get("skipped", []))
    return [f"{name}: {reason}" for name, reason in reasons if "GPU" not in reason and "CUDA device" not in reason]


# First of all plugins that end a session: xdist's workers have ended after it.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    terminalreporter.write_line(f"CPU time, with all processes that have ended: {seconds / 60:.1f} minutes")
    for skipped in _skips_not_for_a_gpu(terminalreporter) if os.environ.get("STRICT") else []:
        terminalreporter.write_line(f"STRICT: skipped {skipped}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("STRICT") and terminal is not None and _skips_not_for_a_gpu(terminal):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
