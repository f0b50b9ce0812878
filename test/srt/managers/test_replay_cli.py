"""`python -m sglang.srt.managers.replay FILE`: exit codes and what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.managers.replay import main
from support.soak import Soak
from support.soak_config import SoakConfig


@pytest.fixture(scope="module")
def record() -> bytes:
    soak = Soak(SoakConfig.draw(3, 40))
    soak.run()
    return soak.record.getvalue()


def test_a_faithful_record_agrees(record: bytes, tmp_path: Path) -> None:
    path = tmp_path / "steps.rec"
    path.write_bytes(record)
    done = subprocess.run(
        [sys.executable, "-m", "sglang.srt.managers.replay", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "steps, all recorded decisions the same" in done.stdout


def test_a_changed_decision_is_named(record: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.rec"
    # The digest of the last decision is the last thing in the file: flip its last bit.
    path.write_bytes(record[:-1] + bytes([record[-1] ^ 1]))
    assert main([str(path)]) == 1
    assert "decides differently" in capsys.readouterr().out


def test_a_record_without_a_whole_step_is_named(
    record: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.rec"
    begin = 0
    for _ in range(2):  # the format and the configuration
        begin += 4 + int.from_bytes(record[begin : begin + 4], "little")
    first = 4 + int.from_bytes(record[begin : begin + 4], "little")
    for end in (begin, begin + first - 1, begin + first, begin + first + 19):
        path.write_bytes(record[:end])
        assert main([str(path)]) == 1
        assert "there is no whole step" in capsys.readouterr().out
    path.write_bytes(record[: begin + first + 20])
    assert main([str(path)]) == 0
    assert "1 steps" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"no record at all", (5).to_bytes(4, "little") + b"\x80abcd"])
def test_another_file_is_refused(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path} ")


def test_wrong_calls_say_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 2
    assert capsys.readouterr().err.startswith("usage: ")
    assert main([str(tmp_path / "absent")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
