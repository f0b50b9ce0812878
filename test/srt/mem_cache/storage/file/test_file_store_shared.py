"""`HiCacheFile` shared, example by example: several stores have one folder open, as processes do. flock tells open
files apart, so two stores of one process stand for two processes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang.srt.mem_cache.storage.file import folder as folder_module
from sglang.srt.mem_cache.storage.file import shared_changes
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.folder import storage_secret
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES
from sglang.srt.mem_cache.storage.file.segment_writer import WRITE_PAUSE_S
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of

NUM_BLOCKS = 32
SLOT_BYTES = BLOCK_TOKENS * 256
DATA = 2 * ALIGNMENT
SEGMENT_BYTES = DATA + 8 * (SLOT_BYTES + ENTRY_BYTES)


class Process:
    """A store with a host pool of its own."""

    def __init__(self, root: Path, page_size: int = 16, page_first: bool = True, **options: object) -> None:
        self.pool = FakePages(NUM_BLOCKS * BLOCK_TOKENS // page_size, page_size, page_first=page_first)
        self.now = 0.0
        settings = FileStoreOptions(**{"segment_bytes": SEGMENT_BYTES, **options})  # type: ignore[arg-type]
        self.store = HiCacheFile(root, "model", self.pool, BLOCK_TOKENS, settings, lambda: self.now)

    def frames(self, keys: list[bytes]) -> np.ndarray:
        return np.arange(len(keys) * self.pool.pages_per_block, dtype=np.int32)

    def set(self, *numbers: int) -> int:
        keys = keys_of(*numbers)
        self.pool.put(keys, self.frames(keys))
        return self.store.set(keys, self.frames(keys))

    def get(self, *numbers: int) -> int:
        keys = keys_of(*numbers)
        self.pool.kv[:] = 0xAA
        count = self.store.get(keys, self.frames(keys))
        for key, pages in zip(keys[:count], self.frames(keys).reshape(len(keys), -1)):
            assert self.pool.holds(key, pages)
        self.store.check_invariants()
        return count

    def exists(self, *numbers: int) -> int:
        return self.store.exists(keys_of(*numbers))

    def stat(self, name: str) -> int:
        return self.store.stats()[name]

    def no_errors(self) -> bool:
        return self.stat("read_errors") == self.stat("write_errors") == 0

    def die(self) -> None:
        """As a killed process: what it has open is closed, and nothing else happens."""
        self.store._writer.close()
        for fd in self.store._index.clear():
            os.close(fd)
        self.store._sync.changes.close()
        self.store._folder.close()

    def during_write(self, meanwhile: Callable[[], None]) -> None:
        """Between the claim and the payloads of the next write, once."""
        write = self.store._files.write_payloads

        def write_payloads(*args: object) -> list[bytes]:
            self.store._files.write_payloads = write  # type: ignore[method-assign]
            meanwhile()
            return write(*args)  # type: ignore[arg-type]

        self.store._files.write_payloads = write_payloads  # type: ignore[method-assign]


class Killed(BaseException):
    pass


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(**options: object) -> Process:
        started.append(Process(tmp_path / "root", **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.store.close()


def folder_of(root: Path) -> Path:
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    return folder


# -- each block once ------------------------------------------------------------------------------------------------


def test_each_finds_what_the_other_stores_and_stores_the_rest(start):
    a, b = start(), start()
    assert a.set(0, 1, 2, 3) == 4
    assert b.exists(0, 1, 2, 3, 4) == b.get(0, 1, 2, 3, 4) == 4
    assert b.set(0, 1, 2, 3, 4, 5) == 6 and b.stat("written_blocks") == 2
    assert a.exists(*range(6)) == a.get(*range(6)) == 6
    assert a.set(*range(6)) == 6 and a.stat("written_blocks") == 4
    assert a.stat("blocks") == b.stat("blocks") == 6 and a.stat("segments") == b.stat("segments") == 2
    assert a.no_errors() and b.no_errors()


def test_what_another_process_is_writing_is_neither_found_nor_written(start):
    a, b = start(), start()
    seen = []

    def meanwhile() -> None:
        seen.append(b.exists(0))
        seen.append(b.set(0, 1, 2, 3))
        seen.append(b.stat("written_blocks"))

    a.during_write(meanwhile)
    assert a.set(1, 2) == 2
    assert seen == [0, 1, 2], "0 and 3 were stored; 1 and 2 were being stored"
    assert b.exists(0, 1, 2, 3) == b.get(0, 1, 2, 3) == 4
    assert a.exists(0, 1, 2, 3) == 4
    assert a.stat("written_blocks") == b.stat("written_blocks") == 2


def test_what_a_dead_process_was_writing_is_stored_by_others(start, tmp_path: Path):
    a, b = start(), start()
    a.set(0)

    def die() -> None:
        raise Killed

    a.during_write(die)
    with pytest.raises(Killed):
        a.set(1, 2)
    assert b.set(1, 2) == 0, "it is still alive"
    a.die()
    assert b.exists(1) == 0
    assert b.set(0, 1, 2) == 3 and b.stat("written_blocks") == 2
    assert b.get(0, 1, 2) == 3 and b.no_errors()
    assert b.stat("segments") == 1, "the dead process's segment is filled up"
    c = start()
    assert c.get(0, 1, 2) == 3 and c.stat("blocks") == 3 and not c.store._index.claims


def test_what_could_not_be_written_is_stored_by_others(start):
    a, b = start(), start()

    def fail() -> None:
        assert b.set(0) == 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    a.during_write(fail)
    assert a.set(0, 1) == 0 and a.stat("write_errors") == 1
    assert b.set(0, 1) == b.get(0, 1) == 2


@pytest.mark.parametrize("dies", [True, False])
def test_what_was_completed_by_a_process_that_told_no_other_is_found_before_a_write(start, dies: bool):
    """It was killed before it could ring, or its number was overwritten."""
    a, b = start(), start()
    a.during_write(lambda: b.set(9))  # b sees the claim
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.store._sync.changes, "ring_stored", lambda number: [])
        a.set(0)
    if dies:
        a.die()
    assert b.exists(0) == 0
    assert b.set(0) == b.get(0) == 1 and b.stat("written_blocks") == 1, "only the other one"


def test_a_process_killed_while_it_had_the_lock_hides_nothing(start):
    a, b, c = start(), start(), start()
    assert b.set(5) == c.exists(5) == 1
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ring_erased", "ring_stored", "ring_folder"):
            patch.setattr(a.store._sync.changes, name, lambda *args: [])
        patch.setattr(a.store._sync.changes, "set_holder", lambda value: None)
        a.set(0, 1)
    assert b.exists(0) == c.exists(0) == 0
    a.store._sync.changes.set_holder(True)
    a.die()
    assert b.set(0, 1, 2) == 3 and b.stat("written_blocks") == 2
    assert c.exists(0, 1, 2, 3) == 3, "the next one tells all"


def test_a_bad_block_is_stored_again_once(start, tmp_path: Path):
    a, b = start(), start()
    a.set(0, 1, 2)
    assert b.exists(0, 1, 2) == 3
    with next(folder_of(tmp_path / "root").glob("*.kv")).open("r+b") as file:
        file.seek(DATA + SLOT_BYTES + 7)
        file.write(b"damaged")
    assert b.get(0, 1, 2) == 1 and b.stat("read_errors") == 1
    assert a.exists(0, 1, 2) == 1, "the other one knows"
    assert a.set(0, 1, 2) == 3 and a.stat("written_blocks") == 4
    assert b.get(0, 1, 2) == 3 and a.get(0, 1, 2) == 3
    assert a.stat("read_errors") == 0


def test_processes_take_turns_for_a_second_at_most(start, monkeypatch, caplog):
    monkeypatch.setattr(shared_changes, "_WAITS_S", (0.0,) * 3)
    a, b = start(), start()
    a.set(0)
    with open(b.store._sync.changes.path, "rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        for _ in range(3):
            assert a.set(0, 1) == 1, "not tried again at once"
        assert a.stat("lock_timeouts") == 1 and a.stat("write_errors") == 0
        a.now += WRITE_PAUSE_S
        assert a.set(0, 1) == 1
        assert a.exists(0) == a.get(0) == 1
    a.now += WRITE_PAUSE_S
    assert a.set(0, 1) == b.exists(0, 1) == 2
    assert a.stat("lock_timeouts") == 2
    assert len([r for r in caplog.records if "another process" in r.getMessage()]) == 1


# -- one limit ------------------------------------------------------------------------------------------------------


def test_one_limit_for_all(start, tmp_path: Path):
    limit = 16 * (2 * SLOT_BYTES + DATA)
    a, b = start(limit_bytes=limit), start(limit_bytes=limit)
    for i in range(0, 120, 2):
        assert (a if i % 4 else b).set(i, i + 1) == 2
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv")) <= limit
        assert a.stat("size_bytes") <= limit and b.stat("size_bytes") <= limit
    assert a.exists(116, 117) == b.exists(118, 119) == b.exists(116, 117) == 2
    written, evicted = (a.stat(name) + b.stat(name) for name in ("written_blocks", "evicted_blocks"))
    assert written == 120 and a.exists() == 0 and a.stat("blocks") == b.stat("blocks") == 120 - evicted
    assert a.stat("size_bytes") > limit * 0.7, "the limit is used"
    assert a.no_errors() and b.no_errors()


def test_what_another_process_uses_goes_last(start):
    limit = 8 * (2 * SLOT_BYTES + DATA)
    a, b = start(limit_bytes=limit), start(limit_bytes=limit)
    for i in range(4):
        a.set(2 * i, 2 * i + 1)
    b.now += 100.0
    assert b.get(0, 1) == b.exists(0, 1) == 2
    while not a.stat("evicted_blocks"):
        i += 1
        a.set(2 * i, 2 * i + 1)
    assert a.exists(0, 1) == 2 and a.exists(2) == 0


def test_no_process_evicts_what_another_one_writes_to(start):
    limit = 8 * (2 * (SLOT_BYTES + ENTRY_BYTES) + DATA)
    a, b = start(limit_bytes=limit), start(limit_bytes=limit)
    assert a.set(0) == 1 and a.store._index.active is not None, "half of the segment is free"
    assert [b.set(i) for i in range(10, 50)] == [1] * 40
    assert b.stat("evicted_blocks") > 20 and b.stat("size_bytes") <= limit
    assert a.exists(0) == b.exists(0) == 1, "though it is the oldest"
    a.store.close()
    assert [b.set(i) for i in range(50, 90)] == [1] * 40
    assert b.exists(0) == 0 and b.no_errors()


def test_a_smaller_limit_holds_for_the_one_that_writes(start, tmp_path: Path):
    a = start()
    a.set(*range(24))
    limit = 10 * (SLOT_BYTES + DATA)
    b = start(limit_bytes=limit, segment_bytes=1)
    assert b.stat("size_bytes") <= limit
    assert a.exists(*range(24)) == b.exists(*range(24))
    assert b.set(30) == 1 and b.stat("size_bytes") <= limit
    assert a.set(*range(24)) == 24 == b.get(*range(24))
    assert b.set(31) == 1 and b.stat("size_bytes") <= limit


def test_what_another_process_has_evicted_is_lost_and_no_error(start):
    a, b = start(), start()
    a.set(*range(8))
    a.set(*range(8, 16))
    b.exists(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.store._sync.changes, "ring_folder", lambda: [])  # b has not seen it yet
        a.store.clear()
    assert b.exists(*range(16)) == 16
    assert b.get(0, 1) == 0 and b.get(8) == 0
    assert b.stat("blocks") == 0 and b.no_errors()
    assert b.set(0, 1) == a.get(0, 1) == 2


def test_a_file_that_is_open_is_read_to_its_end(start, monkeypatch):
    a, b = start(), start()
    a.set(0, 1)
    preadv = os.preadv

    def meanwhile(fd: int, buffers: list[memoryview], at: int) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        a.store.clear()
        assert b.exists(0) == 0
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert b.get(0, 1) == 2 and b.no_errors()
    assert b.get(0, 1) == 0


def test_what_another_process_overwrites_is_lost_and_no_error(start):
    limit = 8 * (6 * SLOT_BYTES + DATA)
    a, b = start(limit_bytes=limit, is_exclusive=True), start(limit_bytes=limit)
    num_blocks = 0
    while a.store.has_room:
        a.set(num_blocks)
        num_blocks += 1
    while a.store._writer.fits(SLOT_BYTES + (0 if a.store._index.active else DATA)):
        a.set(num_blocks)
        num_blocks += 1
    assert b.exists(*range(num_blocks)) == num_blocks
    assert a.get(4, 5) == 2  # which are spare now
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ring_erased", "ring_stored"):
            patch.setattr(a.store._sync.changes, name, lambda number: [])
        assert a.set(100, 101) == 2
    segments = list(a.store._index.segments)
    assert b.get(4, 5) == 0 and b.no_errors()
    assert a.get(100, 101) == 2 and a.exists(4) == 0
    for number in segments:
        a.store._sync.changes.ring_stored(number)
    assert b.exists(100, 101) == 2 == b.get(100, 101)


def test_clear_is_for_all(start):
    a, b = start(), start()
    a.set(0, 1)
    b.set(2, 3)
    a.store.clear()
    assert a.exists(0) == b.exists(2) == b.exists(0) == 0
    assert a.stat("size_bytes") == b.stat("size_bytes") == 0
    assert b.set(2, 3) == a.get(2, 3) == 2 and a.set(0) == b.get(0) == 1
    assert a.no_errors() and b.no_errors()


# -- page sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_first", [True, False], ids=["page-first", "layer-first"])
@pytest.mark.parametrize(("one", "other"), [(1, 16), (16, 1), (16, 64), (64, 32), (8, 16)])
def test_a_reader_with_another_page_size(start, one: int, other: int, page_first: bool):
    a, b = start(page_size=one), start(page_size=other, page_first=page_first)
    assert a.set(*range(10)) == 10
    assert b.get(*range(10)) == 10 and b.get(7, 3, 9) == 3
    assert b.set(*range(12)) == 12 and b.stat("written_blocks") == 2, "each block once"
    assert a.get(*range(12)) == 12
    assert a.no_errors() and b.no_errors()
    assert {s.layout.page_size for s in a.store._index.segments.values()} == {one, other}


def test_a_restart_with_another_page_size_keeps_what_is_stored(start):
    a = start(page_size=16)
    a.set(*range(12))
    a.store.close()
    b = start(page_size=32)
    assert b.get(*range(12)) == 12 and b.set(12) == 1
    assert b.stat("segments") == 3, "a segment has one page size"
    a = start(page_size=16)
    assert a.get(*range(13)) == 13 and a.set(13) == 1 and a.stat("segments") == 3


# -- earlier formats, deleted folders, odd file systems --------------------------------------------------------------


def test_an_earlier_format_is_refused_by_name(start, tmp_path: Path, caplog):
    root = tmp_path / "root"
    for name, described in (
        ("a" * 32, "v1 m float32 page 16 block 64 rank 0 of 1"),
        ("b" * 32, "v1 n page 1 block 64"),
    ):
        (root / name).mkdir(parents=True)
        (root / name / "lock").write_bytes(b"")
        (root / name / "namespace").write_text(described + "\n")
        for number in (1, 2):
            (root / name / f"{number:08d}.kv").write_bytes(b"HiCacheS\x01\0\0\0".ljust(2 << 20, b"x"))
    pool = FakePages(64)
    store = HiCacheFile(root, "v1 m float32 block 64 rank 0 of 1", pool, BLOCK_TOKENS, FileStoreOptions(6 << 20))
    assert store.stats()["refused_segments"] == 2 and store.stats()["read_errors"] == 0
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"{root}/{'a' * 32}: 2 files with 4.19 MB" in line and "delete them" in line and "b" * 32 not in line
    for i in range(400):
        pool.put(keys_of(i), np.arange(4, dtype=np.int32))
        assert store.set(keys_of(i), np.arange(4, dtype=np.int32)) == 1
    assert not list(root.glob("[ab]*/*.kv")), "they went first"
    store.close()


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, "deleted") for what in ("the root", "the folder", "changes", "lock", "namespace", "segments")),
        *((what, "moved away") for what in ("the root", "the folder", "changes")),
    ],
)
def test_what_is_deleted_at_run_time_is_made_anew(start, tmp_path: Path, caplog, what: str, how: str):
    root = tmp_path / "root"
    secret = storage_secret(root)
    a, b = start(), start()
    a.set(0, 1, 2)
    b.set(3, 4)
    folder = folder_of(root)
    paths = [{"the root": root, "the folder": folder}.get(what, folder / what)]
    for path in folder.glob("*.kv") if what == "segments" else paths:
        if how == "moved away":
            path.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    is_lost = what in ("the root", "the folder", "segments")
    if how == "moved away":  # A write finds that out.
        assert a.set(10) == b.set(10) == 1
    elif what != "segments":
        assert a.exists(0, 1, 2) == (0 if is_lost else 3)
    assert b.get(0, 1, 2) == (0 if is_lost else 3)
    assert b.set(0, 1) == 2 and a.set(0, 1, 2) == 3
    assert a.set(5) == b.set(6) == 1
    assert a.exists(0, 1, 2) == b.exists(0, 1, 2) == a.get(0, 1, 2) == b.get(0, 1, 2) == 3
    if is_lost:
        assert a.stat("written_blocks") + b.stat("written_blocks") == 10 + (how != "deleted"), "each block once"
    assert storage_secret(root) == secret
    assert {path.name for path in folder.iterdir()} >= {"lock", "changes"}
    assert a.no_errors() and b.no_errors()
    # A line per process; the second finds the folder that the first has made.
    num_lines = {"deleted": 2, "moved away": 1}[how] if what in ("the root", "the folder") else 0
    assert len(caplog.records) == num_lines
    c = start()
    assert c.get(0, 1, 2) == 3
    c.store.close()
    # Others see that the folder is in use.
    with open(folder / "lock", "rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("what", ["root", "folder", "segments"])
def test_what_is_deleted_during_a_write_is_made_anew_by_the_next(start, tmp_path: Path, caplog, what: str):
    a = start()
    a.set(0)
    folder = folder_of(tmp_path / "root")
    paths = {"root": [tmp_path / "root"], "folder": [folder], "segments": list(folder.glob("*.kv"))}[what]
    a.during_write(lambda: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in paths])
    assert a.set(1, 2) in (0, 2)
    assert a.set(1, 2, 3) == a.get(1, 2, 3) == 3 and a.no_errors()
    assert len(caplog.records) == (what != "segments")
    b = start()
    assert b.get(3) == 1 and b.exists(0) == 0
    assert a.set(0, 1, 2, 3) == b.exists(0, 1, 2, 3) == 4


def test_nothing_is_written_to_a_file_without_a_name(start, tmp_path: Path):
    a = start()
    a.set(0)
    next(folder_of(tmp_path / "root").glob("*.kv")).unlink()
    assert a.set(1, 2) == 2 and a.no_errors()
    b = start()
    assert b.get(1, 2) == 2 and b.exists(0) == 0 and a.set(0) == b.get(0) == 1


def test_a_process_that_deletes_leftovers_and_hangs_keeps_no_other_from_starting(start, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(folder_module, "_LOCK_WAITS_S", ())
    a = start()
    a.set(0)
    a.store.close()
    path = folder_of(tmp_path / "root") / "lock"
    with open(path, "rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        b = start()
        assert b.get(0) == 1 and b.set(1) == 1
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing shows that b is there
    assert b.set(2) == 1 and b.no_errors()
    with open(path, "rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_another_file_under_the_name_of_a_segment_is_taken_for_what_it_is(start, tmp_path: Path):
    a, b = start(), start()
    a.set(0, 1)
    assert b.exists(0, 1) == 2
    a.store.close()
    (path,) = folder_of(tmp_path / "root").glob("*.kv")
    data = path.read_bytes()
    path.rename(tmp_path / "old")
    path.write_bytes(data)
    assert b.set(2) == 1 and b.get(0, 1, 2) == 3 and b.no_errors()
    assert b.stat("segments") == 2


@pytest.mark.parametrize("written_before_read", [False, True])
def test_a_file_with_the_name_and_the_inode_of_one_that_is_gone_is_another(
    start, tmp_path: Path, written_before_read: bool
):
    """The order of a block's bytes follows from the page size in the header, which its checksum does not cover."""
    a, b = start(page_size=8), start(page_size=8)
    a.set(0, 1)
    assert b.get(0, 1) == 2
    a.store.clear()
    c = start(page_size=64)
    assert c.set(2, 3) == 2
    c.store.close()
    (path,) = folder_of(tmp_path / "root").glob("*.kv")
    (segment,) = b.store._index.segments.values()
    assert segment.path == str(path)
    segment.inode = path.stat().st_ino  # some file systems do that, others do not
    if written_before_read:
        assert b.set(4) == 1
    assert b.get(2, 3) == 2 and b.exists(0) == 0 and b.no_errors()
    assert b.set(4, 5) == 2
    assert start(page_size=64).get(2, 3, 4, 5) == b.get(2, 3, 4, 5) == 4 and b.no_errors()


def test_cleaners_of_temporary_folders_see_a_lock(start, tmp_path: Path):
    start()
    for folder in (tmp_path / "root", folder_of(tmp_path / "root")):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


def test_a_file_system_without_locks_has_one_writer(start, monkeypatch, caplog):
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    a = start()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "no file locks" in line and "a folder of its own" in line
    assert a.set(0, 1) == a.get(0, 1) == 2
    a.store.close()
    b = start()
    assert b.set(0, 1, 2) == b.get(0, 1, 2) == 3 and b.stat("segments") == 1 and b.no_errors()


def test_a_reader_of_a_read_only_folder_sees_what_a_writer_stores(start, monkeypatch):
    a = start()
    a.set(0)
    open_ = os.open

    def read_only(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return open_(path, flags, mode)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        b = start()
    assert b.exists(0) == 1
    assert a.set(0, 1, 2) == 3
    assert b.get(0, 1, 2) == 3 and b.set(0, 5) == 1 and b.no_errors()


def test_a_torn_entry_is_read_again(start, monkeypatch):
    a, b = start(), start()
    a.set(0)
    b.exists(0)
    a.set(1)
    pread = os.pread
    torn = []

    def pread_torn(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        if offset == ALIGNMENT and size > ENTRY_BYTES and len(torn) < 2:
            torn.append(fd)
            return data[: ENTRY_BYTES + 40] + bytes(len(data) - ENTRY_BYTES - 40)
        return data

    monkeypatch.setattr(os, "pread", pread_torn)
    assert b.exists(0, 1) == 2 and len(torn) == 2
    assert b.get(0, 1) == 2 and b.no_errors()


def test_layouts_with_a_part_per_page_share_only_with_the_same_page_size():
    from sglang.srt.mem_cache.page_layout import Component, PageLayout
    from sglang.srt.mem_cache.storage.file.segment import namespace_digest

    token = Component("K", (8,), "int8")
    whole = PageLayout((token,), 2, 16)
    scaled = PageLayout((token, Component("scale", (1,), "float32", per_page=True)), 2, 16)
    digests = [
        namespace_digest(b"m", 64, layout)
        for layout in (whole, replace(whole, page_size=32), scaled, replace(scaled, page_size=32))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert namespace_digest(b"m", 64, whole) != namespace_digest(b"m", 64, replace(whole, num_layers=3))


def test_nothing_is_read_again_while_nothing_changes(start, monkeypatch):
    a, b = start(), start()
    a.set(*range(20))
    assert b.exists(*range(20)) == 20
    read = []
    monkeypatch.setattr(b.store._sync, "_reread", lambda segment: read.append(segment.number))
    for _ in range(3):
        assert b.exists(*range(20)) == b.set(*range(20)) == b.get(*range(20)) == 20
    assert b.set(20) == 1 and not read, "what it writes itself it knows"
    assert a.set(21) == 1
    assert b.exists(20, 21) == 1 and read == [a.store._index.active.number]
