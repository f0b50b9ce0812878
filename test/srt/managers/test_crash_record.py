"""Crash records: what is on disk when, what is removed, and that a crash of a real server replays to its step."""

from __future__ import annotations

import io
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from managers.test_scheduler import request

from sglang.srt.managers import crash_record, replay
from sglang.srt.managers.crash_folder import remove_old_records, replay_hint
from sglang.srt.managers.crash_record import CrashRecord
from sglang.srt.managers.schedule_batch import BatchDecision, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.step_record import ReplayMismatchError
from sglang.srt.managers.step_record import replay as replayed
from sglang.srt.mem_cache.transfer import EXEC
from support.crashing_scheduler import BAD_TOKEN, fail_on_a_bad_token
from support.server_fixture import Server
from support.soak import Soak
from support.soak_config import SoakConfig


def record_of(folder: Path, max_bytes: int = 1 << 30, num_ranks: int = 1) -> tuple[CrashRecord, int]:
    """The record of rank 0 of a soak, and its number of steps. The soak's own checks look at the scheduler too, so
    they are left out."""
    soak = Soak(SoakConfig.draw(3, 40))
    core = soak.ranks[0].core
    record = CrashRecord(folder, core.scheduler, max_bytes)
    core.record = record
    soak.run()
    return record, core.num_steps


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_kept_record_replays_and_is_small(tmp_path):
    record, num_steps = record_of(tmp_path)
    assert files(tmp_path) == [record.path.name] and record.path.stat().st_mode & 0o777 == 0o600
    assert os.path.getsize(record.path) == record.num_bytes < 400 * num_steps
    record.keep()
    record.remove()  # too late: it stays
    assert replay.main([str(record.path)]) == 0
    with open(record.path, "rb") as file:
        assert replayed(file) == num_steps


def test_every_step_is_on_disk_before_it_is_taken(tmp_path):
    """As a process that is killed leaves it: not closed, and perhaps cut off."""
    record, num_steps = record_of(tmp_path)
    data = record.path.read_bytes()
    assert replayed(io.BytesIO(data)) == num_steps - 1, "the last decision's digest is not there"
    cut = replayed(io.BytesIO(data[: len(data) // 2]))
    assert 0 < cut < num_steps
    record.remove()
    assert files(tmp_path) == []


def test_a_changed_decision_is_noticed(tmp_path, monkeypatch):
    record, _ = record_of(tmp_path)
    record.keep()
    monkeypatch.setattr("sglang.srt.managers.step_record.digest_of", lambda decision: b"another")
    with open(record.path, "rb") as file, pytest.raises(ReplayMismatchError, match="step 0 "):
        replayed(file)


def test_a_disk_that_is_full_ends_the_record_alone(tmp_path, monkeypatch, caplog):
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash_record.os, "write", full)
    record, _ = record_of(tmp_path)
    assert not record.is_open and files(tmp_path) == []
    assert sum("no more is recorded (No space left" in each.message for each in caplog.records) == 1


def test_a_folder_that_cannot_be_written_any_more_ends_the_record_alone(tmp_path, monkeypatch, caplog):
    """As a file system that an error has made read-only."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    record, _ = record_of(tmp_path)
    monkeypatch.setattr(Path, "unlink", refuse)
    record.remove()
    assert not record.is_open
    monkeypatch.setattr(crash_record.os, "write", refuse)
    record, _ = record_of(tmp_path)
    assert not record.is_open
    assert sum("no more is recorded (Read-only" in each.message for each in caplog.records) == 1


def test_only_the_newest_records_of_ended_processes_stay(tmp_path):
    for day in range(1, 9):
        (tmp_path / f"crash-2026010{day}-000000-1.rec").write_bytes(b"x")
    (tmp_path / "other").touch()
    running, _ = record_of(tmp_path)
    assert files(tmp_path) == [
        *(f"crash-2026010{day}-000000-1.rec" for day in (6, 7, 8)),
        running.path.name,
        "other",
    ]
    for day in range(1, 9):
        (tmp_path / f"crash-3000010{day}-000000-1.rec").write_bytes(b"x")
    remove_old_records(tmp_path)
    assert running.path.exists(), "its process runs"
    running.remove()


def test_a_step_that_fails_is_the_last_in_the_record(tmp_path, monkeypatch):
    fails_at, step = 20, Scheduler.step

    def failing(scheduler: Scheduler, inputs: StepInputs) -> BatchDecision:
        assert inputs.step < fails_at, "a bug"
        return step(scheduler, inputs)

    monkeypatch.setattr(Scheduler, "step", failing)
    with pytest.raises(AssertionError, match="a bug"):
        record_of(tmp_path)
    (name,) = files(tmp_path)
    with open(tmp_path / name, "rb") as file, pytest.raises(AssertionError, match="a bug"):
        replayed(file)
    fails_at += 1
    with open(tmp_path / name, "rb") as file:
        assert replayed(file) == 20


def test_a_long_record_begins_anew_with_a_snapshot(tmp_path):
    """The soak's own checks hang on its scheduler, and are no part of a server's."""
    config = SchedulerConfig(page_size=1, num_device_pages=64, num_host_pages=0, page_bytes=8, context_len=60)
    scheduler = Scheduler(config)
    record = CrashRecord(tmp_path, scheduler, max_bytes=500)
    sizes = []
    for step in range(64):
        new = (request(f"r{step}", [step, 5, 6]),) if step % 4 == 0 else ()
        inputs = StepInputs(step=step, now=float(step), new=new, done={EXEC: 0})
        record.inputs(inputs)
        record.decision(scheduler.step(inputs))
        sizes.append(record.num_bytes)
    assert any(after < before for before, after in pairwise(sizes)), "it has begun anew"
    record.keep()
    with open(record.path, "rb") as file:
        assert 0 < replayed(file) < 64
    assert files(tmp_path) == [record.path.name]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("tp", [1, 2])
def test_a_crash_of_a_server_replays_to_the_failing_step(tp, tmp_path, monkeypatch, capsys):
    flags = ["--crash-dump-folder", str(tmp_path), "--hicache", "--tp-size", str(tp)]
    with Server(*flags, script="serve_crashing.py") as server:
        ask = {"input_ids": [300, 301], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        assert server.post("/generate", ask).status_code == 200
        reply = server.post("/generate", {**ask, "input_ids": [300, BAD_TOKEN]})
        assert reply.status_code == 500 and server.wait() == 1
        output = server.output()
    (name,) = files(tmp_path)
    path = str(tmp_path / name)
    assert f"to replay the crash: python -m sglang.srt.managers.replay {path}" in output
    assert "AssertionError: a bad token" in output
    # The code of today has no such error: all steps replay, the last one too.
    assert replay.main([path]) == 0
    num_steps = int(capsys.readouterr().out.split(": ")[1].split()[0])
    # The code that crashed fails again, at the step behind those that it took.
    steps = []
    step = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda self, inputs: steps.append(inputs) or step(self, inputs))
    fail_on_a_bad_token(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="a bad token"):
        replay.main([path])
    assert len(steps) == num_steps + 1 and steps[-1].new[0].input_ids.endswith(BAD_TOKEN.to_bytes(4, "little"))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_clean_end_removes_the_record_and_a_kill_leaves_it(number, tmp_path):
    with Server("--crash-dump-folder", str(tmp_path)) as server:
        assert server.post("/generate", {"input_ids": [300], "sampling_params": {"max_new_tokens": 4}})
        if number == signal.SIGTERM:
            server.stop()
            assert files(tmp_path) == []
            return
        server.child("scheduler_process").kill()
        assert server.wait() == 1
        output = server.output()
    (name,) = files(tmp_path)
    assert output.count(replay_hint(tmp_path / name)) == 1
    assert replay.main([str(tmp_path / name)]) == 0
