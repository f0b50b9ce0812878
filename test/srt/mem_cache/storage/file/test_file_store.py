"""`HiCacheFile`, example by example: round trips, damage, full and read-only disks, kill -9, eviction, threads."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.file import backend, segment_index, segment_writer, store_log
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.folder import storage_secret
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES, SegmentLayout
from sglang.srt.mem_cache.storage.file.segment_index import number_of
from sglang.srt.mem_cache.storage.registry import StoreParams, storage_backend
from support.children import wait_until
from support.disk_fixture import DATA, NUM_BLOCKS, SLOT_BYTES, Disk, fill, flip, swap
from support.fake_pages import BLOCK_TOKENS, FakePages, key_of, keys_of
from support.pool_pages import pages_of

# -- round trips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_first", [True, False], ids=["page-first", "layer-first"])
@pytest.mark.parametrize("item_bytes", [4, 2], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_blocks_come_back_byte_for_byte(tmp_path: Path, page_size: int, item_bytes: int, page_first: bool):
    # 3 heads of 8: blocks of 12 or 24 KiB, and of 4 KiB and a half with 1 layer and 1 head of 9.
    for token_bytes, num_layers in ((3 * 8 * item_bytes, 2), (9 * item_bytes, 1)):
        disk = Disk(tmp_path / str(token_bytes), page_size=page_size, token_bytes=token_bytes, page_first=page_first)
        keys = keys_of(*range(NUM_BLOCKS))
        store = disk.open()
        assert disk.set(store, keys) == NUM_BLOCKS
        assert disk.get(store, keys) == NUM_BLOCKS
        # In another order, and from other places of the pool.
        shuffled = random.Random(num_layers).sample(keys, 20)
        assert disk.get(store, shuffled) == 20
        store.close()
        store = disk.open()
        assert disk.get(store, keys) == NUM_BLOCKS
        assert store.stats()["read_errors"] == 0
        store.close()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("aligned", [True, False])
def test_writes_go_past_the_page_cache(
    tmp_path: Path, aligned: bool, page_size: int, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(tmp_path, page_size=page_size, token_bytes=1024, aligned=aligned)
    store = disk.open(segment_bytes=1 << 20)
    direct: set[int] = set()
    written = {True: 0, False: 0}
    open_, pwritev = os.open, os.pwritev

    def noting(path: str, flags: int, mode: int = 0o777) -> int:
        fd = open_(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def counting(fd: int, buffers: list[memoryview], at: int) -> int:
        done = pwritev(fd, buffers, at)
        written[fd in direct] += done
        return done

    try:
        os.close(open_(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    monkeypatch.setattr(os, "open", noting)
    monkeypatch.setattr(os, "pwritev", counting)
    keys = keys_of(*range(12))
    assert disk.set(store, keys) == disk.get(store, keys) == 12
    assert written[True] == 12 * BLOCK_TOKENS * 4096
    assert store._files._staged == (not aligned), "unaligned memory is copied first"
    store.close()


@pytest.mark.parametrize("page_first", [True, False])
@pytest.mark.parametrize("when", ["open", "write"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, when: str, page_first: bool, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(tmp_path, page_first=page_first)
    store = disk.open()
    direct: set[int] = set()
    open_, pwritev = os.open, os.pwritev
    refused = []

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            if when == "open":
                refused.append(path)
                raise OSError(errno.EINVAL, "Invalid argument")
            flags &= ~os.O_DIRECT
            fd = open_(path, flags, mode)
            direct.add(fd)
            return fd
        fd = open_(path, flags, mode)
        direct.discard(fd)
        return fd

    def failing(fd: int, buffers: list[memoryview], at: int) -> int:
        if fd in direct:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(fd, buffers, at)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "pwritev", failing)
    keys = keys_of(*range(20))
    assert disk.set(store, keys) == disk.get(store, keys) == 20
    assert len(refused) <= 2, "asked once with the pool's memory, once with aligned memory"
    assert store.stats()["write_errors"] == 0
    store.close()


def test_only_leading_blocks_count(disk: Disk):
    store = disk.open()
    assert store.exists(keys_of(1, 2)) == 0 and disk.get(store, keys_of(1, 2)) == 0
    assert store.exists([]) == 0 and disk.get(store, []) == 0 and disk.set(store, []) == 0
    disk.set(store, keys_of(1, 2, 4))
    assert store.exists(keys_of(1, 2, 3, 4)) == 2
    assert disk.get(store, keys_of(1, 2, 3, 4)) == 2
    assert store.exists(keys_of(3, 1)) == 0
    assert store.exists(keys_of(4, 1, 2)) == 3


def test_what_is_stored_is_not_stored_again(disk: Disk):
    store = disk.open()
    assert disk.set(store, keys_of(1, 2, 3)) == 3
    size = store.stats()["size_bytes"]
    assert disk.set(store, keys_of(1, 2, 3)) == 3
    assert store.stats()["size_bytes"] == size
    assert disk.set(store, keys_of(1, 5, 3, 5, 5)) == 5
    assert store.stats()["written_blocks"] == store.stats()["blocks"] == 4
    assert disk.get(store, keys_of(5, 3, 2, 1, 5)) == 5


def test_stats_say_what_is_on_disk(disk: Disk):
    store = disk.open(limit_bytes=10**9)
    disk.set(store, keys_of(*range(20)))
    stats = store.stats()
    assert stats["blocks"] == 20 and stats["limit_bytes"] == 10**9 and stats["segments"] == len(disk.segments()) == 3
    assert stats["size_bytes"] == sum(p.stat().st_size for p in disk.segments())
    assert stats["read_errors"] == stats["write_errors"] == stats["evicted_blocks"] == 0


def test_neighbours_are_read_at_once(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    disk.set(store, keys_of(*range(8)))
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(len(buffers)) or preadv(fd, buffers, at))
    assert disk.get(store, keys_of(*range(7, -1, -1))) == 8
    assert len(calls) == 1


def test_many_files_are_read_with_few_open(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segment_index, "MAX_OPEN_FILES", 2)
    store = disk.open(segment_bytes=1)
    keys = keys_of(*range(10))
    disk.set(store, keys)
    assert len(disk.segments()) == 10
    for key in [*keys, *keys]:
        assert disk.get(store, [key]) == 1
    assert disk.num_open() <= 3, "two to read, one to write"


def test_more_buffers_than_one_call_takes_and_calls_that_fall_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path, page_size=1)
    rng = random.Random(1)

    def some(buffers: list[memoryview]) -> list[memoryview]:
        assert len(buffers) <= 1024
        kept = buffers[: rng.randint(1, len(buffers))]
        return [*kept[:-1], kept[-1][: rng.randint(1, len(kept[-1]))]]

    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, some(buffers), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, some(buffers), at))
    store = disk.open(segment_bytes=64 << 20)
    keys = keys_of(*range(NUM_BLOCKS))
    assert disk.set(store, keys) == NUM_BLOCKS and disk.get(store, keys) == NUM_BLOCKS
    store.close()


# -- damage -------------------------------------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut inside a payload": lambda p: os.truncate(p, DATA + 3 * SLOT_BYTES + 100),
    "cut inside the table": lambda p: os.truncate(p, ALIGNMENT + ENTRY_BYTES * 2 + 5),
    "cut inside the header": lambda p: os.truncate(p, 20),
    "empty": lambda p: os.truncate(p, 0),
    "bit of a payload": lambda p: flip(p, DATA + 2 * SLOT_BYTES + 777),
    "last bit of a payload": lambda p: flip(p, DATA + 3 * SLOT_BYTES - 1),
    "bit of a key": lambda p: flip(p, ALIGNMENT + 2 * ENTRY_BYTES + 30),
    "bit of a checksum": lambda p: flip(p, ALIGNMENT + 2 * ENTRY_BYTES + 45),
    "bit of an entry's namespace": lambda p: flip(p, ALIGNMENT + 2 * ENTRY_BYTES + 17),
    "bit of the header's magic": lambda p: flip(p, 3),
    "foreign version": lambda p: flip(p, 8),
    "bit of the header's shape": lambda p: flip(p, 20),
    "foreign namespace": lambda p: flip(p, 50),
    "missing": lambda p: p.unlink(),
    "swapped payloads": lambda p: swap(p, DATA + SLOT_BYTES, DATA + 4 * SLOT_BYTES, SLOT_BYTES),
    "swapped entries": lambda p: swap(p, ALIGNMENT + ENTRY_BYTES, ALIGNMENT + 4 * ENTRY_BYTES, ENTRY_BYTES),
    "all zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "a link to elsewhere": lambda p: (p.rename(p.with_suffix(".moved")), p.symlink_to(p.with_suffix(".moved"))),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("restart", [False, True], ids=["while open", "before a start"])
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_counted_and_stored_anew(
    disk: Disk, caplog: pytest.LogCaptureFixture, what: str, restart: bool
):
    keys = keys_of(*range(8))
    store = disk.open()
    assert disk.set(store, keys) == 8
    (path,) = disk.segments()
    assert path.stat().st_size == DATA + 8 * SLOT_BYTES
    if restart:
        store.close()
    DAMAGE[what](path)
    if restart:
        store = disk.open()
    count = disk.get(store, keys)
    in_payload = what in ("cut inside a payload", "bit of a payload", "last bit of a payload", "swapped payloads")
    if in_payload:
        assert count < 8
    elif restart:
        assert count < 8, "the table or the header is damaged"
    # A missing file may have been evicted by another process.
    if count < 8 and what != "missing" and not (restart and what == "empty"):
        assert store.stats()["read_errors"] > 0
        assert 1 <= len([r for r in caplog.records if r.levelno == logging.WARNING]) <= 2
    assert store.exists(keys) == disk.get(store, keys) == count, "a bad block is forgotten"
    # A write may be the first to find that the file is gone; it tries again after a pause.
    if disk.set(store, keys) < 8:
        disk.clock.now += segment_writer.WRITE_PAUSE_S
        assert disk.set(store, keys) == 8
    assert disk.get(store, keys) == 8
    store.close()
    store = disk.open()
    expected = 8 if restart or in_payload or what == "missing" else None
    if expected is not None:
        assert disk.get(store, keys) == expected, "stored anew for good"
    disk.set(store, keys)
    assert disk.get(store, keys) == 8


def test_a_bad_block_ends_the_count_and_later_ones_stay(disk: Disk):
    keys = keys_of(*range(8))
    store = disk.open()
    disk.set(store, keys)
    flip(disk.segments()[0], DATA + 2 * SLOT_BYTES)
    assert disk.get(store, keys) == 2
    assert store.stats()["read_errors"] == 1 and store.stats()["blocks"] == 7
    assert disk.get(store, keys[3:]) == 5
    store.close()
    store = disk.open()
    assert store.exists(keys) == 2 and store.stats()["blocks"] == 7, "a restart does not bring it back"


def test_a_bad_block_that_could_not_be_erased_gives_way_to_its_successor(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    def pwrite(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    keys = keys_of(0, 1, 2)
    store = disk.open()
    disk.set(store, keys)
    flip(disk.segments()[0], DATA + SLOT_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert disk.get(store, keys) == 1
    assert disk.set(store, keys) == 3
    store.close()
    store = disk.open()
    assert disk.get(store, keys) == 3 and store.stats()["blocks"] == 3 and store.stats()["read_errors"] == 0


def test_no_block_is_lost_while_no_descriptor_is_left(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    keys = keys_of(0, 1, 2)
    store = disk.open()
    disk.set(store, keys)

    def refuse(path: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "open_to_read", refuse)
        assert disk.get(store, keys) == 0 and store.stats()["read_errors"] == 1
    assert disk.get(store, keys) == 3


def test_a_disk_that_fails_to_read_is_asked_once_per_request(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open(segment_bytes=1)
    keys = keys_of(*range(6))
    disk.set(store, keys)
    calls = []

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        calls.append(at)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        assert disk.get(store, keys) == 0
    assert len(calls) == 1
    assert store.stats()["read_errors"] == 1 and store.stats()["blocks"] == 5
    assert disk.get(store, keys[1:]) == 5
    assert disk.set(store, keys) == disk.get(store, keys) == 6


def test_blocks_before_the_one_that_cannot_be_read_count(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    keys = keys_of(*range(8))
    disk.set(store, keys)
    preadv = os.preadv

    def up_to_the_fourth(fd: int, buffers: list[memoryview], at: int) -> int:
        room = DATA + 3 * SLOT_BYTES - at
        if room <= 0:
            raise OSError(errno.EIO, "Input/output error")
        while sum(map(len, buffers)) > room:
            buffers = buffers[:-1]
        return preadv(fd, buffers, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", up_to_the_fourth)
        assert disk.get(store, keys) == 3
    assert store.stats()["blocks"] == 7
    assert disk.get(store, keys) == 3


def test_two_namespaces_share_nothing(disk: Disk):
    a, b = disk.open("model A"), disk.open("model B")
    disk.set(a, keys_of(1, 2))
    assert b.exists(keys_of(1)) == disk.get(b, keys_of(1)) == 0
    disk.set(b, keys_of(3))
    assert a.exists(keys_of(3)) == 0
    assert b.clear()
    assert disk.get(a, keys_of(1, 2)) == 2


def test_the_checksum_covers_key_and_namespace():
    layout = SegmentLayout(bytes(32), 64, PageLayout.kv(16, 2, 1, 8, "float32"), 8)
    payload = [memoryview(b"abc"), memoryview(b"def")]
    checksum = layout.checksum(key_of(1), payload)
    assert checksum == layout.checksum(key_of(1), [memoryview(b"abcdef")])
    assert checksum != layout.checksum(key_of(2), payload)
    assert checksum != replace(layout, namespace=bytes(31) + b"1").checksum(key_of(1), payload)


def test_a_segment_of_another_namespace_is_not_read_even_in_our_folder(disk: Disk, caplog: pytest.LogCaptureFixture):
    a = disk.open("model A")
    disk.set(a, keys_of(1, 2))
    folder_a = disk.folder
    a.close()
    b = disk.open("model B")
    disk.set(b, keys_of(3))
    b.close()
    (folder_b,) = [p for p in disk.root.iterdir() if p.is_dir() and p != folder_a]
    (folder_b / "00000001.kv").replace(folder_a / "00000002.kv")
    a = disk.open("model A")
    assert a.exists(keys_of(3)) == 0 and disk.get(a, keys_of(1, 2)) == 2
    assert a.stats()["read_errors"] == 1 and "another namespace" in caplog.text


# -- full, read-only, unusable --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nothing", "half", "entries"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EFBIG])
def test_a_failed_write_leaves_nothing_reachable(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, code: int
):
    store = disk.open()
    disk.set(store, keys_of(0, 1))
    pwritev = os.pwritev
    calls = []

    def failing(fd: int, buffers: list[memoryview], at: int) -> int:
        calls.append(at)
        if how == "entries" and at >= DATA:
            return pwritev(fd, buffers, at)
        if how != "nothing" and len(calls) == 1:
            return pwritev(fd, buffers[: max(1, len(buffers) // 2)], at)
        raise OSError(code, os.strerror(code))

    keys = keys_of(0, 1, 2, 3, 4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        assert disk.set(store, keys) == 2
        attempts = len(calls)
        assert disk.set(store, keys) == 2
        assert len(calls) == attempts, "not tried again at once"
        disk.clock.now += segment_writer.WRITE_PAUSE_S
        assert disk.set(store, keys) == 2
        assert len(calls) > attempts
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and os.strerror(code) in warnings[0] and "path" in warnings[0]
    assert store.stats()["write_errors"] == 2
    assert disk.get(store, keys) == 2
    assert disk.segments()[0].stat().st_size == DATA + 2 * SLOT_BYTES, "what was written of it is given back"
    store.close()
    store = disk.open()
    assert store.exists(keys) == 2
    assert disk.set(store, keys) == disk.get(store, keys) == 6


def test_on_a_full_disk_the_oldest_makes_room(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    disk.set(store, keys_of(*range(8)))
    disk.set(store, keys_of(*range(8, 16)))
    pwritev = os.pwritev
    full = [True]

    def failing(fd: int, buffers: list[memoryview], at: int) -> int:
        if full and full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", failing)
    assert disk.set(store, keys_of(20, 21)) == 2
    assert store.exists(keys_of(0)) == 0 and store.exists(keys_of(*range(8, 16))) == 8
    assert store.stats()["write_errors"] == 0 and store.stats()["evicted_blocks"] == 8
    assert disk.get(store, keys_of(20, 21)) == 2


def test_without_a_limit_a_share_of_the_file_system_stays_free(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    assert disk.set(store, keys_of(*range(8))) == disk.set(store, keys_of(*range(8))) == 8
    size = store.stats()["size_bytes"]
    statvfs = SimpleNamespace(f_blocks=1000, f_frsize=4096, f_bavail=99)
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs)
    # Others fill the disk: the store replaces what is oldest, and does not grow.
    assert disk.set(store, keys_of(10, 11)) == 2
    assert store.exists(keys_of(0, 1)) == store.stats()["copied_blocks"] == 1, "the front was copied forward"
    assert store.stats()["size_bytes"] < size
    # All that is left was stored just now, so there is nothing to evict.
    assert disk.set(store, keys_of(*range(10, 30))) < 20
    assert store.stats()["write_errors"] == 1
    statvfs.f_bavail = 900
    disk.clock.now += 60
    assert disk.set(store, keys_of(*range(10, 30))) == 20


class ReadOnly:
    """os.open as on a read-only mount: root ignores mode bits, so tests cannot use them."""

    def __init__(self) -> None:
        self.open = os.open

    def __call__(self, path: object, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return self.open(path, flags, mode)  # type: ignore[arg-type]


def test_a_read_only_folder_is_read(disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    store = disk.open()
    disk.set(store, keys_of(*range(8)))
    store.close()
    flip(disk.segments()[0], DATA + 5 * SLOT_BYTES)
    monkeypatch.setattr(os, "open", ReadOnly())
    store = disk.open()
    also = disk.open()
    assert len([r for r in caplog.records if "cannot be written" in r.getMessage()]) == 2
    assert disk.get(store, keys_of(*range(8))) == 5
    assert disk.set(store, keys_of(*range(8))) == 5
    assert disk.set(store, keys_of(0, 1, 30)) == 2
    assert store.stats()["write_errors"] == 0
    assert disk.get(also, keys_of(0, 1)) == 2
    store.clear()
    assert store.exists(keys_of(0)) == 0


def test_a_disk_that_turns_read_only_counts_errors(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    disk.set(store, keys_of(0, 1))
    monkeypatch.setattr(os, "open", ReadOnly())
    assert disk.set(store, keys_of(0, 1, 2)) == 2
    assert store.stats()["write_errors"] == 1
    assert disk.get(store, keys_of(0, 1, 2)) == 2


def test_clearing_a_folder_whose_files_stay_is_no_success(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    disk.set(store, keys_of(0, 1))

    def unlink(path: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as changed:
        changed.setattr(os, "unlink", unlink)
        assert not store.clear()
    assert store.exists(keys_of(0, 1)) == 0 and store.stats()["write_errors"] >= 1
    store.close()
    again = disk.open()
    assert disk.get(again, keys_of(0, 1)) == 2
    assert again.clear() and disk.segments() == []


def test_folders_that_cannot_be_used_are_refused_with_what_to_do(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    disk.root.write_text("a file")
    with pytest.raises(StoreError, match=r"cannot use the folder .*path in --hicache-storage-backend-extra-config"):
        disk.open()
    with pytest.raises(StoreError, match="cannot use the folder"):
        storage_secret(disk.root)
    disk.root.unlink()
    disk.root.symlink_to(disk.root.parent / "absent")
    with pytest.raises(StoreError, match="a link to what is not there"):
        storage_secret(disk.root)
    disk.root.unlink()

    def mkdir(path: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(StoreError, match="Permission denied"):
        disk.open()


def test_what_is_on_disk_is_for_its_owner_alone(disk: Disk):
    store = disk.open("model A")
    disk.set(store, keys_of(1))
    storage_secret(disk.root)
    assert stat.S_IMODE(disk.root.stat().st_mode) == stat.S_IMODE(disk.folder.stat().st_mode) == 0o700
    for path in (*disk.segments(), disk.root / "secret", disk.folder / "lock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert (disk.folder / "namespace").read_text() == "model A\n"


# -- eviction -----------------------------------------------------------------------------------------------------


def on_disk(disk: Disk) -> int:
    return sum(path.stat().st_blocks * 512 for path in disk.root.rglob("*.kv"))


def test_the_limit_holds_and_what_was_not_used_for_longest_goes(disk: Disk):
    limit = 16 * (2 * SLOT_BYTES + DATA)
    store = disk.open(limit_bytes=limit)
    for i in range(0, 200, 4):
        assert disk.set(store, keys_of(*range(i, i + 4))) == 4
        assert disk.get(store, keys_of(0, 1, 2, 3)) == 4, "used all the time"
        assert store.stats()["size_bytes"] <= limit and on_disk(disk) <= limit
        store.check_invariants()
    assert store.exists(keys_of(*range(196, 200))) == 4
    assert store.exists(keys_of(4)) == 0
    stats = store.stats()
    assert stats["evicted_blocks"] > 0 and stats["evicted_blocks"] + stats["blocks"] == 200
    assert stats["size_bytes"] > limit * 0.7, "the limit is used"
    assert stats["read_errors"] == stats["write_errors"] == 0


def test_the_front_of_a_prompt_goes_after_its_end(disk: Disk):
    store = disk.open(limit_bytes=8 * (2 * SLOT_BYTES + DATA))
    prompt = keys_of(*range(6))
    for key in prompt:
        disk.set(store, [key])
    for i in range(100, 130):
        if store.stats()["evicted_blocks"] == 0:
            assert disk.get(store, prompt) == 6
        disk.set(store, keys_of(i))
        left = [key for key in prompt if key in store._index]
        assert left == prompt[: len(left)]
    assert left == []


def test_files_that_are_no_segments_any_more_are_counted_and_deleted(disk: Disk):
    """They are found where slots of blocks that memory has read are to be used again."""
    store, groups = fill(disk)
    for path in disk.segments():
        flip(path, 3)
    for i, group in enumerate(groups[:-2]):
        disk.get(store, group)
        disk.set(store, keys_of(2000 + i))
        disk.clock.now += segment_writer.WRITE_PAUSE_S
    store.check_invariants()
    stats = store.stats()
    # One that was found with the last write is deleted with the next one.
    assert stats["read_errors"] > 0 and stats["segments"] <= len(disk.segments()) <= stats["segments"] + 1
    for path in disk.segments():
        flip(path, 3)
    disk.get(store, groups[0])
    assert store.clear() and disk.segments() == []


def test_a_file_that_has_become_a_segment_is_not_deleted(disk: Disk):
    store, other = disk.open(), disk.open()
    assert disk.set(other, keys_of(*range(8))) == 8
    other.close()
    # As it was found while it was empty.
    store._sync.unusable.add(int(disk.segments()[0].stem))
    assert disk.set(store, keys_of(9)) == 1
    assert disk.get(store, keys_of(*range(8))) == 8 and not store._sync.unusable


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_segment_that_cannot_be_read_for_a_while_is_not_deleted(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, error: int
):
    """It may be another process's, which writes to it."""
    store, other = disk.open(), disk.open()
    assert disk.set(store, keys_of(100)) == 1
    own = disk.segments()
    assert disk.set(other, keys_of(*range(20))) == 20
    theirs = [str(path) for path in disk.segments() if path not in own]
    open_, is_down = os.open, [True]

    def fails(path: object, *args: object, **options: object) -> int:
        if is_down[0] and str(path) in theirs:
            raise OSError(error, os.strerror(error))
        return open_(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fails)
    assert disk.set(store, keys_of(101, 102)) == 2
    with pytest.raises(OSError, match="may have blocks of the tenant"):
        store._tenants._delete_unusable(set())
    assert store.exists(keys_of(0)) == 0 and all(Path(path).exists() for path in theirs)
    is_down[0] = False
    assert disk.set(store, keys_of(103)) == 1
    assert store.exists(keys_of(*range(20))) == disk.get(store, keys_of(*range(20))) == 20
    assert disk.get(other, keys_of(*range(20))) == 20


def test_what_memory_has_read_from_a_full_exclusive_store_makes_room(disk: Disk):
    store, groups = fill(disk)
    num_segments, num_evicted = store.stats()["segments"], store.stats()["evicted_blocks"]
    read = groups[2] + groups[5]
    assert disk.get(store, groups[2]) == disk.get(store, groups[5]) == 4
    # Memory gives some of it up.
    assert disk.set(store, groups[2][:2]) == 2
    assert store.exists(groups[5]) == 4, "until the room is needed it stays"
    for i in range(3):
        assert disk.set(store, keys_of(2000 + 2 * i, 2001 + 2 * i)) == 2
        store.check_invariants()
    stats = store.stats()
    assert stats["segments"] == num_segments and stats["evicted_blocks"] == num_evicted + 6, "no file had to go"
    assert [key in store._index for key in read] == [True] * 2 + [False] * 6
    assert disk.get(store, keys_of(*range(2000, 2006))) == 6
    # Nothing more is spare: the oldest file goes.
    disk.set(store, keys_of(*range(2000, 2006)))
    assert disk.set(store, keys_of(3000)) == 1
    assert store.stats()["evicted_blocks"] > num_evicted + 6
    store.close()
    store = disk.open()
    assert disk.get(store, keys_of(*range(2000, 2006))) == 6, "the tables are right"
    assert store.stats()["read_errors"] == 0


def test_a_full_store_stays_full_while_a_segment_makes_room(disk: Disk):
    store, _ = fill(disk)
    for i in range(40):
        disk.set(store, keys_of(2000 + i))
        assert not store.has_room
    store.clear()
    assert store.has_room


def test_what_is_being_read_is_not_overwritten(disk: Disk):
    store, groups = fill(disk)
    assert disk.get(store, groups[2]) == 4
    segment = store._index.segments[number_of(store._index.places[groups[2][0]])]
    spare = [segment.key(slot) for slot in segment.spare]
    segment.pins += 1
    for i in range(12):
        assert disk.set(store, keys_of(2000 + i)) == 1
        assert segment.number not in store._index.segments or all(key in store._index for key in spare)
    store._unpin([segment])
    assert store.stats()["blocks"] == store.stats()["written_blocks"] - store.stats()["evicted_blocks"]
    store.check_invariants()


@pytest.mark.parametrize("call", ["pwritev", "pwrite"])
def test_an_overwrite_that_fails_loses_only_what_was_spare(disk: Disk, monkeypatch: pytest.MonkeyPatch, call: str):
    store, groups = fill(disk)
    assert disk.get(store, groups[2]) == 4
    num_calls = 0

    with monkeypatch.context() as patch:

        def fails(*args: object) -> int:
            nonlocal num_calls
            num_calls += 1  # the slots were claimed
            if call == "pwrite":
                patch.setattr(os, "pwrite", fails)
            raise OSError(errno.EIO, "planted")

        patch.setattr(os, "pwritev", fails)
        assert disk.set(store, keys_of(2000, 2001, 2002)) == 0
    assert num_calls > (call == "pwrite") and store.stats()["write_errors"] == 1
    store.check_invariants()
    others = [group for group in groups if group != groups[2]]
    assert [disk.get(store, group) for group in others] == [4] * len(others)
    store.close()
    store = disk.open()
    assert [disk.get(store, group) for group in others] == [4] * len(others)
    assert store.stats()["read_errors"] == 0


def test_a_prompt_longer_than_the_limit_keeps_its_front(disk: Disk):
    store = disk.open(limit_bytes=10 * (SLOT_BYTES + DATA))
    disk.set(store, keys_of(100, 101, 102))
    keys = keys_of(*range(NUM_BLOCKS))
    count = disk.set(store, keys)
    assert 8 <= count < NUM_BLOCKS
    assert store.exists(keys) == disk.get(store, keys) == count
    assert disk.set(store, keys) == count
    assert store.stats()["write_errors"] == 0


def test_a_smaller_limit_holds_from_the_start(disk: Disk):
    store = disk.open()
    disk.set(store, keys_of(*range(8)))
    disk.set(store, keys_of(*range(8, 20)))
    assert disk.get(store, keys_of(*range(8))) == 8
    store.close()
    limit = 9 * SLOT_BYTES + DATA
    store = disk.open(limit_bytes=limit)
    assert store.exists(keys_of(*range(8))) == 8, "the order of use survives a restart"
    assert store.stats()["size_bytes"] <= limit and on_disk(disk) <= limit
    store.close()
    store = disk.open(limit_bytes=SLOT_BYTES + DATA)
    store.check_invariants()
    assert disk.set(store, keys_of(50)) == disk.get(store, keys_of(50)) == 1
    assert on_disk(disk) <= SLOT_BYTES + DATA


def test_the_order_of_use_survives_a_restart(disk: Disk):
    store = disk.open()
    prompts = [keys_of(*range(i, i + 8)) for i in (0, 8, 16)]
    for prompt in prompts:
        disk.set(store, prompt)
    assert disk.get(store, prompts[0]) == 8
    store.close()
    store = disk.open(limit_bytes=2 * (8 * SLOT_BYTES + DATA))
    assert [store.exists(prompt) for prompt in prompts] == [8, 0, 8]


def test_a_limit_below_one_block_is_refused(disk: Disk):
    with pytest.raises(StoreError, match=r"limit_gb .* less than one block"):
        disk.open(limit_bytes=SLOT_BYTES)


def test_leftovers_of_other_models_go_first_unless_in_use(disk: Disk):
    old, used = disk.open("last week's weights"), disk.open("another model")
    disk.set(old, keys_of(*range(16)))
    disk.set(used, keys_of(*range(8)))
    old.close()
    limit = 20 * SLOT_BYTES + 4 * DATA
    store = disk.open("model A", limit_bytes=limit)
    assert store.stats()["leftover_bytes"] == 0, "other ranks may be starting"
    disk.set(store, keys_of(0))
    assert 12 * SLOT_BYTES < store.stats()["leftover_bytes"] < 20 * SLOT_BYTES
    for i in range(0, 16, 2):
        assert disk.set(store, keys_of(i, i + 1)) == 2
        stats = store.stats()
        assert stats["size_bytes"] + stats["leftover_bytes"] <= limit
    assert store.stats()["blocks"] == 16 and store.stats()["evicted_blocks"] == 0
    assert disk.get(used, keys_of(*range(8))) == 8
    store.close()
    assert disk.open("last week's weights").stats()["blocks"] < 16


def test_a_leftover_that_was_opened_again_stays(disk: Disk):
    other = disk.open("model B")
    disk.set(other, keys_of(*range(16)))
    other.close()
    store = disk.open("model A", limit_bytes=18 * SLOT_BYTES + 4 * DATA)
    assert disk.set(store, keys_of(0)) == 1
    assert store.stats()["leftover_bytes"] >= 16 * SLOT_BYTES
    other = disk.open("model B")
    for i in range(0, 8, 2):
        assert disk.set(store, keys_of(i, i + 1)) == 2
    assert store.stats()["leftover_bytes"] == 0
    assert store.stats()["blocks"] >= 6
    assert disk.get(other, keys_of(*range(16))) == 16


def test_a_segment_evicted_while_it_is_read_is_read_to_its_end(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open(limit_bytes=16 * (SLOT_BYTES + DATA))
    keys = keys_of(0, 1)
    disk.set(store, keys)
    preadv = os.preadv

    def meanwhile(fd: int, buffers: list[memoryview], at: int) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        # The pool's pages 20 and up; those being read are pages 0 to 2.
        for i in range(100, 130):
            frames = disk.pages[20]
            disk.pool.put(keys_of(i), frames)
            assert store.set(keys_of(i), frames) == 1
        assert store.exists(keys) == 0
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", meanwhile)
    before = disk.num_open()
    assert store.get(keys, disk.pages[:2].reshape(-1)) == 2
    assert all(disk.pool.holds(k, p) for k, p in zip(keys, disk.pages))
    store.check_invariants()
    assert disk.num_open() <= before, "and closed"
    assert store.stats()["read_errors"] == 0


def test_clear_while_open_and_after(disk: Disk):
    store = disk.open()
    disk.set(store, keys_of(*range(20)))
    store.clear()
    store.check_invariants()
    assert store.stats()["blocks"] == store.stats()["size_bytes"] == 0 and disk.segments() == []
    assert store.exists(keys_of(0)) == disk.get(store, keys_of(0)) == 0
    assert disk.set(store, keys_of(0, 1)) == disk.get(store, keys_of(0, 1)) == 2
    store.close()
    assert disk.open().stats()["blocks"] == 2


# -- processes ----------------------------------------------------------------------------------------------------


def test_a_start_goes_on_filling_the_last_segment(disk: Disk):
    for i in range(8):
        store = disk.open()
        assert disk.set(store, keys_of(*range(i + 1))) == disk.get(store, keys_of(*range(i + 1))) == i + 1
        store.close()
    assert len(disk.segments()) == 1


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from support.fake_pages import BLOCK_TOKENS, FakePages, keys_of
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile

root, seed, first, limit = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
pool = FakePages(64, token_bytes=1024)
store = HiCacheFile(root, "model A", pool, BLOCK_TOKENS, FileStoreOptions(limit, segment_bytes=3 << 20))
print("ready", flush=True)
rng = np.random.default_rng(seed)
while True:
    keys = keys_of(*range(first, first + int(rng.integers(1, 9))))
    frames = rng.permutation(64)[: 4 * len(keys)].astype(np.int32)
    pool.put(keys, frames)
    assert store.set(keys, frames) == len(keys)
    first += len(keys)
    print("stored", flush=True)
"""


def start_child(root: Path, seed: int = 0, first: int = 0, limit: int = 0) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(Path(__file__).parents[4]),
        str(root),
        str(seed),
        str(first),
        str(limit),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(120)
    assert child.stdout is not None
    child.stdout.close()


def test_kill_9_at_any_moment_leaves_only_what_is_right(tmp_path: Path):
    seed = 20261121
    print(f"seed {seed}")
    rng = random.Random(seed)
    limit = 20 << 20
    pool = FakePages(64, token_bytes=1024)
    frames = np.arange(4, dtype=np.int32)
    first = stored = 0
    for round_ in range(4):
        child = start_child(tmp_path, seed + round_, first, limit)
        assert child.stdout is not None
        for _ in range(rng.randrange(80)):
            assert child.stdout.readline() == "stored\n"
        time.sleep(rng.uniform(0, 0.002))  # somewhere in the next one
        kill(child)
        store = HiCacheFile(tmp_path, "model A", pool, BLOCK_TOKENS, FileStoreOptions(limit, segment_bytes=3 << 20))
        store.check_invariants()
        blocks = store.stats()["blocks"]
        present = [k for k in map(key_of, range(first + 5000)) if store.exists([k])]
        assert len(present) == blocks
        first = max((int.from_bytes(k, "big") + 1 for k in present), default=first)
        for key in present:
            pool.kv[:] = 0
            assert store.get([key], frames) == 1
            assert pool.holds(key, frames)
        assert store.stats()["read_errors"] == 0, "a killed process leaves no torn block behind"
        pool.put(keys_of(first), frames)
        assert store.set(keys_of(first), frames) == 1
        stored = max(stored, blocks)
        store.close()
    assert stored > 20, "the child stored something"


@pytest.mark.parametrize("written", [0, 1, ALIGNMENT, ALIGNMENT + 100])
def test_a_process_killed_while_it_began_a_segment(disk: Disk, written: int):
    store = disk.open()
    disk.set(store, keys_of(1))
    store.close()
    header = disk.segments()[0].read_bytes()[:ALIGNMENT]
    (disk.folder / "00000002.kv").write_bytes((header + bytes(100))[:written])
    store = disk.open()
    assert store.stats()["read_errors"] == (written == 1)
    assert disk.get(store, keys_of(1)) == 1
    assert disk.set(store, keys_of(1, 2, 3)) == disk.get(store, keys_of(1, 2, 3)) == 3
    store.close()
    store = disk.open()
    assert disk.get(store, keys_of(1, 2, 3)) == 3 and store.stats()["read_errors"] == 0


# -- threads and time -----------------------------------------------------------------------------------------------


def test_get_set_exists_and_stats_at_once(tmp_path: Path):
    limit = 4 << 20
    pool = FakePages(256, token_bytes=256)
    store = HiCacheFile(tmp_path, "model A", pool, BLOCK_TOKENS, FileStoreOptions(limit))
    stop = threading.Event()
    failures: list[BaseException] = []
    counts = dict.fromkeys(("set", "get", "got", "look"), 0)

    def worker(work: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not stop.is_set():
                work(rng)
        except BaseException as error:
            failures.append(error)
            stop.set()

    def prompt(rng: random.Random) -> list[bytes]:
        start = rng.randrange(30) * 10
        return keys_of(*range(start, start + rng.randint(1, 10)))

    def do_set(rng: random.Random) -> None:
        keys = prompt(rng)
        frames = np.array(rng.sample(range(128), 4 * len(keys)), np.int32)
        pool.put(keys, frames)
        # Fewer than all where the other threads used every old segment meanwhile.
        counts["set"] += store.set(keys, frames) == len(keys)

    def do_get(rng: random.Random) -> None:
        keys = prompt(rng)
        frames = np.array(rng.sample(range(128, 256), 4 * len(keys)), np.int32)
        pool.kv[128:] = 0
        count = store.get(keys, frames)
        assert all(pool.holds(key, pages) for key, pages in zip(keys[:count], frames.reshape(-1, 4)))
        counts["get"] += 1
        counts["got"] += count

    def look(rng: random.Random) -> None:
        assert 0 <= store.exists(prompt(rng)) <= 10
        assert store.stats()["size_bytes"] <= limit
        counts["look"] += 1
        time.sleep(0.0005)

    threads = [threading.Thread(target=worker, args=(work, i)) for i, work in enumerate((do_set, do_get, look))]
    for thread in threads:
        thread.start()
    wait_until(
        lambda: failures or (min(counts.values()) > 100 and store.stats()["evicted_blocks"] > 500),
        f"more than {counts}",
    )
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    store.check_invariants()
    stats = store.stats()
    assert stats["read_errors"] == stats["write_errors"] == 0
    store.close()


def test_a_slow_disk_holds_up_nobody_else(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    disk.set(store, keys_of(*range(4)))
    preadv = os.preadv
    reading, others_done = threading.Event(), threading.Event()

    def slow(fd: int, buffers: list[memoryview], at: int) -> int:
        reading.set()
        assert others_done.wait(60), "others wait for it"
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", slow)
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(store.get(keys_of(0, 1), disk.pages[:2].reshape(-1))))
    thread.start()
    assert reading.wait(60)
    assert store.exists(keys_of(0, 1, 2)) == 3
    assert store.set(keys_of(9), disk.pages[9]) == 1
    assert store.stats()["blocks"] == 5
    others_done.set()
    thread.join()
    assert counts == [2]


def test_log_lines_are_few(disk: Disk, caplog: pytest.LogCaptureFixture):
    store = disk.open()
    keys = keys_of(*range(8))
    disk.set(store, keys)
    for i in range(8):
        flip(disk.segments()[0], DATA + i * SLOT_BYTES)
        assert disk.get(store, [keys[i]]) == 0
    assert store.stats()["read_errors"] == 8
    assert len(caplog.records) == 1
    disk.set(store, keys)
    disk.clock.now += store_log.LOG_INTERVAL_S
    flip(disk.segments()[0], DATA)
    assert disk.get(store, keys) == 0
    assert len(caplog.records) == 2 and "9 bad blocks and files" in caplog.records[1].getMessage()


# -- secret and configuration --------------------------------------------------------------------------------------


def test_all_ranks_agree_on_one_secret(tmp_path: Path):
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(storage_secret(tmp_path / "root"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 32
    assert storage_secret(tmp_path / "root") == found[0] != storage_secret(tmp_path / "other")
    assert [p.name for p in (tmp_path / "root").iterdir()] == ["secret"]


def test_a_secret_that_is_none_is_refused(tmp_path: Path):
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(StoreError, match="delete it"):
        storage_secret(tmp_path)


def opened(config: dict[str, object], tp_size: int = 1) -> BlockStore:
    params = StoreParams(config, "model A", FakePages(64), BLOCK_TOKENS, model_name="", tp_size=tp_size)
    return storage_backend("file").open(params)


def test_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = json.loads(f'{{"path": "{tmp_path}/here", "limit_gb": 0.5, "segment_mb": 4, "daily_write_gb": 3}}')
    store = opened(config, tp_size=2)
    assert store.stats()["limit_bytes"] == 25 * 10**7 and (tmp_path / "here").is_dir()
    assert store.stats()["daily_limit_bytes"] == 15 * 10**8
    store.close()
    # What a rank has less than a byte of is not without a limit.
    store = opened({"path": f"{tmp_path}/small", "daily_write_gb": 1e-9}, tp_size=2)
    assert store.stats()["daily_limit_bytes"] == 1
    store.close()
    monkeypatch.setenv(backend.ROOT_ENV, str(tmp_path / "there"))
    store = opened({})
    assert store.stats()["limit_bytes"] == 0 and (tmp_path / "there").is_dir()
    store.close()
    for wrong, match in (
        ({"size": 1}, "no option 'size'"),
        ({"limit_gb": -1}, "limit_gb .* -1"),
        ({"limit_gb": "5"}, 'limit_gb .* "5"'),
        ({"segment_mb": 0}, "segment_mb .* 0"),
        ({"rewrite_share": 1.5}, "rewrite_share .* 1.5"),
        ({"daily_write_gb": -1}, "daily_write_gb .* -1"),
        ({"daily_write_gb": 0}, "daily_write_gb .* 0"),
        ({"path": ""}, 'path is ""'),
        ({"path": 5}, "path is 5"),
    ):
        with pytest.raises(StoreError, match=match):
            opened(wrong)


def test_the_default_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(backend.ROOT_ENV, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(backend, "TEMPORARY_ROOT", str(tmp_path / "tmp"))
    assert backend.find_root(None) == tmp_path / ".cache/sglang/hicache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert backend.find_root(None) == tmp_path / "cache/sglang/hicache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert backend.find_root(None) == tmp_path / ".cache/sglang/hicache"
    monkeypatch.setenv(backend.ROOT_ENV, str(tmp_path / "named"))
    assert backend.find_root(None) == tmp_path / "named" and backend.find_root("/there") == Path("/there")
    monkeypatch.delenv(backend.ROOT_ENV)
    for home in (tmp_path / "none", Path("relative")):
        monkeypatch.setenv("HOME", str(home))
        assert backend.find_root(None) == tmp_path / "tmp"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert backend.find_root(None) == tmp_path / "tmp"


def test_the_temporary_folder_is_not_taken_from_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(backend.ROOT_ENV, raising=False)
    monkeypatch.setattr(backend, "_user_cache", lambda: None)
    monkeypatch.setattr(backend, "TEMPORARY_ROOT", str(tmp_path / "hicache"))
    assert backend.find_root(None) == tmp_path / "hicache"
    (tmp_path / "hicache").mkdir()
    assert backend.find_root(None) == tmp_path / "hicache"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        backend.find_root(None)


def test_loads_neither_torch_nor_what_is_above():
    code = "import sys, json, sglang.srt.mem_cache.storage.file.backend; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = json.loads(done.stdout)
    assert not [m for m in loaded if m.split(".")[0] in ("torch", "zmq") or m.startswith("sglang.srt.managers")]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_the_real_host_pool(tmp_path: Path, layout: str):
    torch = pytest.importorskip("torch")
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

    device = MHATokenToKVPool(4, PageLayout.kv(16, 2, 2, 8, torch.bfloat16))
    host = MHATokenToKVPoolHost(device, 64, layout)
    host.kv.copy_(torch.randn(host.kv.shape))
    frames = np.random.default_rng(0).permutation(64)[:24].astype(np.int32)
    before = pages_of(host, torch.from_numpy(frames).long())
    store = HiCacheFile(tmp_path, "model A", host, BLOCK_TOKENS)
    assert store.set(keys_of(*range(6)), frames) == 6
    host.kv.zero_()
    # Elsewhere in the pool than they were.
    elsewhere = np.ascontiguousarray(frames[::-1])
    assert store.get(keys_of(*range(6)), elsewhere) == 6
    assert torch.equal(pages_of(host, torch.from_numpy(elsewhere).long()), before)
    store.close()
