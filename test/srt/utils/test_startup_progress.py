"""What a starting process shows of itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sglang.srt.utils.startup_progress import SILENT, StartupProgress


def test_in_a_log_a_stage_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    progress = StartupProgress(str(tmp_path / "stage"))
    progress.stage("loading weights from 3 files")
    progress.detail("loading weights, file 2 of 3")
    with progress.bar("Loading weights", 10, "tensor") as bar:
        bar.update()
    assert caplog.messages == ["loading weights from 3 files"]
    assert (tmp_path / "stage").read_text() == "loading weights, file 2 of 3"
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    assert capsys.readouterr().err == ""


def test_on_a_terminal_weights_are_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = StartupProgress(str(tmp_path / "stage"), columns=60)
    progress.stage("loading weights from 3 files")
    with progress.bar("Loading weights", 2, "tensor") as bar:
        assert (tmp_path / "stage").read_text() == "", "the bar shows that it lives"
        bar.update()
        bar.update()
    lines = capsys.readouterr().err.replace("\r", "\n").split("\n")
    assert any(line.startswith("Loading weights: 100%") for line in lines)
    assert max(map(len, lines)) <= 60


def test_one_rank_logs_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    for progress in (SILENT, StartupProgress(str(tmp_path / "stage"), columns=60, is_leader=False)):
        progress.stage("loading weights from 3 files")
        with progress.bar("Loading weights", 2, "tensor") as bar:
            bar.update()
    assert not caplog.messages and capsys.readouterr().err == ""
    assert (tmp_path / "stage").read_text() == "", "the other rank's bar is enough"
