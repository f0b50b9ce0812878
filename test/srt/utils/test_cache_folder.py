"""Which folders of the user's cache go when there are too many. Locks of one process and of several work alike."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from sglang.srt.utils.cache_folder import hold_folder, trim_folders, user_cache


def make(parent, *names):
    """Folders, of which each was used a second after the one before."""
    for second, name in enumerate(names):
        (parent / name).mkdir()
        (parent / name / "config.json").write_text("{}")
        os.utime(parent / name, (second, second))


def left(parent):
    return sorted(folder.name for folder in parent.iterdir())


def test_the_least_recently_used_go(tmp_path):
    make(tmp_path, "a", "b", "c", "d", ".writing-x")
    trim_folders(tmp_path, 4)
    assert left(tmp_path) == [".writing-x", "a", "b", "c", "d"]
    trim_folders(tmp_path, 2)
    assert left(tmp_path) == [".writing-x", "c", "d"]


def test_a_folder_that_is_held_stays(tmp_path):
    make(tmp_path, "a", "b", "c")
    assert hold_folder(tmp_path / "a") and hold_folder(tmp_path / "a")
    os.utime(tmp_path / "a", (0, 0))
    trim_folders(tmp_path, 1)
    assert left(tmp_path) == ["a", "c"]


def test_holding_is_using(tmp_path):
    make(tmp_path, "a", "b")
    assert hold_folder(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mtime > 1e9
    trim_folders(tmp_path, 1)
    assert left(tmp_path) == ["a"]


def test_what_was_removed_is_not_held(tmp_path):
    make(tmp_path, "a")
    assert hold_folder(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "z")
    assert not hold_folder(tmp_path / "a")
    make(tmp_path, "a")
    assert not hold_folder(tmp_path / "a"), "the lock is still of the folder that was there before"
    assert hold_folder(tmp_path / "a")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        user_cache()
    assert user_cache("here") == Path("here")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert user_cache() == Path("there")
