"""What a writer leaves behind where something fails, or where a read comes between its looks at the index."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from sglang.srt.mem_cache.storage.file import segment_writer
from sglang.srt.mem_cache.storage.file.segment_index import number_of, slot_of
from support.disk_fixture import Disk, fill
from support.fake_pages import keys_of


def fails(*_: Any) -> NoReturn:
    raise OSError(errno.EIO, "planted")


def let_pause_pass(disk: Disk) -> None:
    disk.clock.now += segment_writer.WRITE_PAUSE_S


# -- what fails -----------------------------------------------------------------------------------------------------


def test_a_look_at_the_folder_that_fails_leaves_its_lock(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    a, b = disk.open(), disk.open()
    with monkeypatch.context() as patch:
        patch.setattr(a._sync, "refresh_locked", fails)
        assert disk.set(a, keys_of(1)) == 0
    assert disk.set(b, keys_of(2)) == 1 and b.stats()["lock_timeouts"] == 0
    let_pause_pass(disk)
    assert disk.set(a, keys_of(1)) == 1


@pytest.mark.parametrize("part", ["claiming", "table"])
def test_a_claim_over_spare_blocks_that_fails_leaves_no_file_open(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, part: str
):
    store, groups = fill(disk)
    assert disk.get(store, groups[2]) == 4
    before = disk.num_open()
    with monkeypatch.context() as patch:
        if part == "claiming":
            patch.setattr(store._writer, "claiming", fails)
        else:
            patch.setattr(store._files, "claim", fails)
        assert disk.set(store, keys_of(2000)) == 0
    assert disk.num_open() == before and not store._index.claims
    store.check_invariants()
    let_pause_pass(disk)
    assert disk.set(store, keys_of(2000)) == 1 and disk.get(store, keys_of(2000)) == 1


def test_a_claim_of_which_a_part_is_written_claims_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    assert disk.set(store, keys_of(0)) == 1
    claim = store._files.claim

    def half(fd: int, layout: Any, slot: int, keys: Sequence[bytes]) -> None:
        claim(fd, layout, slot, keys[:1])
        fails()

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "claim", half)
        assert disk.set(store, keys_of(1, 2)) == 0
    assert store.stats()["write_errors"] == 1 and not store._index.claims
    assert not disk.open()._index.claims, "what was written of the claim was taken back"
    let_pause_pass(disk)
    assert disk.set(store, keys_of(1, 2)) == 2 and disk.get(store, keys_of(0, 1, 2)) == 3


def test_a_segment_that_others_are_not_told_of_is_not_begun(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    with monkeypatch.context() as patch:
        patch.setattr(store._sync, "ring_folder", fails)
        assert disk.set(store, keys_of(1)) == 0
    assert disk.segments() == [] and disk.num_open() == 0
    assert store.stats()["segments"] == store.stats()["size_bytes"] == 0
    store.check_invariants()
    let_pause_pass(disk)
    assert disk.set(store, keys_of(1)) == 1


def test_clearing_tells_that_a_file_stays(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    assert disk.set(store, keys_of(1)) == 1
    bad = disk.folder / "00000077.kv"
    bad.write_bytes(b"no segment" * 1000)
    store._sync.unusable.add(77)
    unlink = os.unlink

    def stays(path: str, **more: Any) -> None:
        if str(path) == str(bad):
            raise PermissionError(errno.EACCES, "planted")
        unlink(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", stays)
        assert not store.clear()
    assert store._sync.unusable == {77}
    assert store.clear() and not bad.exists() and not store._sync.unusable


def test_a_folder_that_is_deleted_twice_is_missed_twice(disk: Disk):
    store = disk.open()
    for _ in range(2):
        assert disk.set(store, keys_of(1)) == 1 == store.exists(keys_of(1))
        shutil.rmtree(disk.folder)
        assert store.exists(keys_of(1)) == 0 and store.stats()["size_bytes"] == 0
        let_pause_pass(disk)


def test_what_a_dead_writer_had_claimed_is_taken_back_with_its_segment(disk: Disk):
    dead = disk.open()
    assert disk.set(dead, keys_of(0)) == 1
    assert dead._writer._held is not None
    segment, fd = dead._writer._held
    dead._files.claim(fd, segment.layout, 1, keys_of(7))  # and it is killed
    dead._writer.close()
    store, other = disk.open(), disk.open()
    assert disk.set(store, keys_of(1)) == 1
    assert slot_of(store._index.places[keys_of(1)[0]]) == 1 and not store._index.claims
    assert disk.set(other, keys_of(7)) == 1


# -- reads in between -----------------------------------------------------------------------------------------------


def test_spare_blocks_that_a_read_forgets_meanwhile(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store, groups = fill(disk)
    assert disk.get(store, groups[2]) == 4
    places = [store._index.places[key] for key in groups[2]]
    segment = store._index.segments[number_of(places[0])]
    with open(segment.path, "r+b") as file:
        for place in places:
            file.seek(segment.layout.slot_offset(slot_of(place)) + 50)
            file.write(b"damage!!")
    open_locked, before = store._writer._open_locked, disk.num_open()

    def reads_first(segment: Any) -> int | None:
        fd = open_locked(segment)
        store.get(groups[2], disk.pages[:4].reshape(-1))
        return fd

    monkeypatch.setattr(store._writer, "_open_locked", reads_first)
    disk.set(store, keys_of(2000))
    assert disk.num_open() <= before + 1, "the read may have opened the segment, the writer has not kept it"
    assert not any(store._files.is_written_by_another(each.path) for each in store._index.segments.values())
    store.check_invariants()


def test_a_claim_of_a_segment_that_a_read_finds_gone(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store = disk.open()
    assert disk.set(store, keys_of(0)) == 1
    segment = store._index.active
    assert segment is not None

    def deletes(tenant: bytes, keys: Sequence[bytes]) -> None:
        os.unlink(segment.path)
        assert store.get(keys_of(0), disk.pages[:1].reshape(-1)) == 0

    with monkeypatch.context() as patch:
        patch.setattr(store._writer, "claiming", deletes)
        assert disk.set(store, keys_of(1)) == 0 and not store._index.claims
    let_pause_pass(disk)
    assert disk.set(store, keys_of(1)) == 1 == disk.get(store, keys_of(1))


def test_a_block_that_was_overwritten_while_it_was_read_is_read_again(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    store, keys = disk.open(), keys_of(0, 1, 2)
    assert disk.set(store, keys) == 3
    (path,) = disk.segments()
    offset = store._files.layout.slot_offset(1) + 9
    preadv, torn = os.preadv, []

    def tears(fd: int, buffers: Any, at: int) -> int:
        if torn:
            return preadv(fd, buffers, at)
        torn.append(at)
        (before,) = path.read_bytes()[offset : offset + 1]
        with open(path, "r+b", buffering=0) as file:
            file.seek(offset)
            file.write(bytes([before ^ 1]))
            done = preadv(fd, buffers, at)
            file.seek(offset)
            file.write(bytes([before]))
        return done

    monkeypatch.setattr(os, "preadv", tears)
    assert disk.get(store, keys) == 3
    assert torn and store.stats()["read_errors"] == 0 and store.exists(keys) == 3
