"""The offline Engine around the fake scheduler: every way to call it, and its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import sglang
from sglang.srt.entrypoints.engine import (
    Child,
    EngineDeadError,
    EngineProcesses,
    private_directory,
    refuse_mixed_installation,
)
from sglang.srt.managers.crash_folder import new_record_path
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import ChildArgs, StartupError

FAKE = (sys.executable, str(Path(__file__).parents[2] / "support" / "fake_scheduler.py"))
PARAMS = {"max_new_tokens": 5}


@pytest.fixture(scope="module")
def engine():
    """Slow enough for an answer to be left or aborted before it ends."""
    with sglang.Engine(model_path="embedded", scheduler_command=(*FAKE, "--delay-s", "0.0005")) as engine:
        yield engine


def test_generate(engine):
    one = engine.generate(input_ids=[100, 101], sampling_params=PARAMS)
    assert one["output_ids"] == [100, 101, 100, 101, 100]
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    two = engine.generate(["a b", "c"], PARAMS)
    assert [reply["meta_info"]["completion_tokens"] for reply in two] == [5, 5]
    assert engine.generate("a b", PARAMS)["text"] == two[0]["text"]


def test_server_info(engine):
    info = engine.get_server_info()
    assert info["tokenizer_path"] == info["model_path"] == "embedded" and info["model_type"] == "llama"
    assert info["internal_states"][0]["last_gen_throughput"] == 0.0


def test_stream(engine):
    events = list(engine.generate(input_ids=[100, 101], sampling_params=PARAMS, stream=True))
    assert events[-1]["output_ids"] == [100, 101, 100, 101, 100]


def test_leaving_a_stream_aborts(engine):
    before = engine.get_server_info()["internal_states"][0]["counters"]["aborted"]
    stream = engine.generate("a b", {"max_new_tokens": 3000, "ignore_eos": True}, stream=True)
    next(stream)
    stream.close()
    after = engine.get_server_info()["internal_states"][0]["counters"]["aborted"]
    assert after == before + 1


def test_async_generate(engine):
    async def main():
        replies = await asyncio.gather(*(engine.async_generate(f"n {i}", PARAMS) for i in range(8)))
        assert all(reply["meta_info"]["completion_tokens"] == 5 for reply in replies)
        stream = await engine.async_generate("a b", PARAMS, stream=True)
        return [event async for event in stream]

    assert asyncio.run(main())[-1]["meta_info"]["completion_tokens"] == 5


def test_an_engine_that_is_busy_is_not_dead(engine, monkeypatch):
    manager = engine._processes.manager
    monkeypatch.setattr(manager, "_args", replace(manager._args, max_queued_requests=1))
    monkeypatch.setattr(manager, "_num_waiting", 1)
    with pytest.raises(RuntimeError, match="the queue is full") as error:
        engine.generate("a b", PARAMS)
    assert not isinstance(error.value, EngineDeadError)


def test_wrong_requests(engine):
    for call in (
        lambda: engine.generate("a", {"n": 0}),
        lambda: engine.generate("a", return_hidden_states=True),
        lambda: engine.generate("a", rid=5),
        lambda: engine.generate("a", {"nonsense": 2}),
        lambda: engine.generate(),
        lambda: engine.generate(input_ids=[10**6]),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError, match="nonsense"):
        engine.generate("a", nonsense=1)
    with pytest.raises(TypeError):
        sglang.Engine(model_path="embedded", no_such_flag=2)


def test_logprobs_and_several_answers(engine):
    asked = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
    two = engine.generate(input_ids=[100, 101], sampling_params={"max_new_tokens": 2, "n": 2}, **asked)
    assert len(two) == 2
    for reply in two:
        assert reply["meta_info"]["input_token_logprobs"] == [(None, 100, None), (-0.101, 101, None)]
        assert reply["meta_info"]["output_top_logprobs"] == [[(-0.1, 100, None)], [(-0.101, 101, None)]]
    events = list(engine.generate(input_ids=[100, 101], sampling_params=PARAMS, stream=True, **asked))
    assert [triple[1] for triple in events[-1]["meta_info"]["output_token_logprobs"]] == [100, 101, 100, 101, 100]
    biased = engine.generate("a", {"max_new_tokens": 1, "logit_bias": {5: 1.5}}, rid="mine", cache_salt="s")
    assert biased["meta_info"]["id"] == "mine"


@pytest.mark.parametrize("rid, abort_all", [("mine", False), ("", True)])
def test_abort(engine, rid, abort_all):
    stream = engine.generate("a b", {"max_new_tokens": 3900, "ignore_eos": True}, stream=True, rid="mine")
    next(stream)
    engine.abort_request(rid, abort_all)
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_empty_rid_ends_no_request(engine):
    stream = engine.generate("a b", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    engine.abort_request()
    *_, last = stream
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 400}


def test_a_stream_may_be_given_up_in_the_engines_own_thread(engine):
    """Where garbage collection may close it."""
    stream = engine.generate("a b", {"max_new_tokens": 3900, "ignore_eos": True}, stream=True)
    next(stream)

    async def give_up() -> None:
        stream.close()

    engine._loop.run(give_up())
    assert engine._loop.run(engine._processes.manager.drained(60))


def test_threads_may_share_it(engine):
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(engine.generate(f"t {i}", PARAMS))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8


def test_flush(engine):
    assert engine.flush_cache()


def engine_directories() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("sglang-")}


def test_a_crash_raises_and_shutdown_leaves_nothing():
    before, others = engine_directories(), set(psutil.Process().children(recursive=True))
    engine = sglang.Engine(model_path="embedded", scheduler_command=(*FAKE, "--crash-at", "10"), log_level="critical")
    children = set(psutil.Process().children(recursive=True)) - others
    assert children
    with pytest.raises(EngineDeadError, match="the scheduler process ended with exit code 1"):
        engine.generate("a b", {"max_new_tokens": 50})
    for use in (lambda: engine.generate("a b", PARAMS), engine.flush_cache, engine.get_server_info):
        with pytest.raises(EngineDeadError, match="the scheduler process ended with exit code 1"):
            use()
    engine.abort_request(abort_all=True)  # there is none
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        engine.generate("a b", PARAMS)
    assert engine_directories() <= before
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


def test_a_start_that_fails_raises_the_childs_sentence():
    with pytest.raises(Exception, match=r"^no room$"):
        sglang.Engine(model_path="embedded", scheduler_command=(*FAKE, "--fail", "no room"))


def test_a_context_without_room_for_a_text_is_refused():
    sentence = "--context-length 2 has no room for a text and an answer, because the tokenizer adds .* at least 3"
    with pytest.raises(StartupError, match=sentence):
        sglang.Engine(model_path="embedded", scheduler_command=FAKE, context_length=2)
    with sglang.Engine(model_path="embedded", scheduler_command=FAKE, context_length=3) as engine:
        assert engine.generate("a", {"max_new_tokens": 1})["meta_info"]["prompt_tokens"] == 2


def test_a_program_that_forgets_to_shut_down_ends_cleanly(tmp_path):
    code = f"""
import sglang, psutil, threading
made = []
thread = threading.Thread(target=lambda: made.append(
    sglang.Engine(model_path="embedded", scheduler_command={FAKE!r})))
thread.start(); thread.join()  # its children outlive the thread that made it
print(made[0].generate("a b", {PARAMS!r})["text"])
print("pids", *[c.pid for c in psutil.Process().children(recursive=True)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split("pids")[1].split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert os.listdir(tmp_path) == []


def test_the_sockets_directory_is_private(monkeypatch, tmp_path):
    path, lock = private_directory()
    assert os.stat(path).st_mode & 0o777 == 0o700
    shutil.rmtree(path)
    os.close(lock)
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    path, lock = private_directory()
    assert path.startswith("/tmp/")
    shutil.rmtree(path)
    os.close(lock)


def test_a_directory_without_room_is_named(tmp_path):
    processes = EngineProcesses(ServerArgs(model_path="m"))
    processes._directory = str(tmp_path)
    tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda pretty: "{}"))
    assert Path(processes._tokenizer_for_child(tokenizer, "a model")).read_text() == "{}"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(StartupError, match=r"tokenizer.json \(No space left on device\): .* set another TMPDIR"):
        processes._tokenizer_for_child(tokenizer, "a model")


def test_upstreams_packages_beside_ours_are_refused(monkeypatch):
    refuse_mixed_installation()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.distribution", lambda name: name)
        with pytest.raises(StartupError, match="pip uninstall sglang sgl-kernel"):
            refuse_mixed_installation()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(StartupError, match="mixed"):
        refuse_mixed_installation()


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_log_names_the_crash_record_of_a_scheduler_that_a_signal_ended(is_killed, tmp_path, caplog):
    """One that ends by an error names it itself."""
    processes = EngineProcesses(ServerArgs(model_path="m", crash_dump_folder=str(tmp_path)))
    code = "import sys; sys.exit(3)" if not is_killed else "import os; os.kill(os.getpid(), 9)"
    child = Child("scheduler", (sys.executable, "-c", code), ChildArgs(server_args={}, ipc={}))
    processes._children.append(child)
    record = new_record_path(tmp_path, child.process.pid)
    record.touch()
    end = asyncio.run(processes.wait_for_death())
    child.end()
    assert end == f"the scheduler process {'was killed by SIGKILL' if is_killed else 'ended with exit code 3'}"
    assert (f"sglang.srt.managers.replay {record}" in caplog.text) == is_killed


def test_what_a_signal_ended_is_named_before_what_ended_with_it():
    processes = EngineProcesses(ServerArgs(model_path="m"))
    for name, code in (
        ("scheduler rank 0", "import sys; sys.exit(1)"),
        ("scheduler rank 1", "import os; os.abort()"),
    ):
        child = Child(name, (sys.executable, "-c", code), ChildArgs(server_args={}, ipc={}))
        child.process.wait()
        processes._children.append(child)
    end = asyncio.run(processes.wait_for_death())
    for child in processes._children:
        child.end()
    assert end == "the scheduler rank 1 process was killed by SIGABRT"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other numbers")
def test_a_signal_without_a_name_is_named_by_its_number():
    """An error here would leave the engine's callers waiting."""
    processes = EngineProcesses(ServerArgs(model_path="m"))
    code = "import os; os.kill(os.getpid(), 40)"
    child = Child("scheduler", (sys.executable, "-c", code), ChildArgs(server_args={}, ipc={}))
    processes._children.append(child)
    end = asyncio.run(processes.wait_for_death())
    child.end()
    assert end == "the scheduler process was killed by signal 40"
