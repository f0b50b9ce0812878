"""Blocks of one tenant, erased and limited, where several stores share the folder, example by example."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from test_file_store_shared import Killed, Process, folder_of, start

from sglang.srt.mem_cache.storage.file import tenant_blocks
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.storage.file.tenant_log import TenantLog
from sglang.srt.mem_cache.transfer import Tier
from support.fake_pages import BLOCK_TOKENS, keys_of

__all__ = ["start"]  # the fixture of the other file

ALICE, BOB = b"alice---", b"bob-----"


def put(process: Process, tenant: bytes, *numbers: int) -> int:
    keys = keys_of(*numbers)
    process.pool.put(keys, process.frames(keys))
    return process.store.set(keys, process.frames(keys), tenant)


def payload(process: Process, number: int) -> bytes:
    """What a block's first page holds, which no other block has."""
    (key,) = keys_of(number)
    pages = process.frames([key])
    process.pool.put([key], pages)
    return bytes(b"".join(process.pool.buffers(pages))[:200])


def on_disk(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder_of(root).glob("*.kv")))


def test_a_tenants_blocks_leave_the_disk_and_no_others(start, tmp_path: Path) -> None:
    process, other = start(), start()
    put(process, ALICE, 1, 2, 3)
    put(process, BOB, 4, 5)
    put(process, b"", 6)
    put(other, ALICE, 7, 8)
    secrets = {number: payload(process, number) for number in range(1, 9)}
    assert all(secret in on_disk(tmp_path / "root") for secret in secrets.values())
    assert process.store.erase(ALICE)
    left = on_disk(tmp_path / "root")
    assert [number for number, secret in secrets.items() if secret in left] == [4, 5, 6]
    for each in (process, other, start()):
        assert [number for number in range(1, 9) if each.exists(number)] == [4, 5, 6]
        assert each.get(4, 5, 6) == 3 and each.no_errors()
    # They may be stored again, and are erased again.
    put(other, ALICE, 1)
    assert process.get(1) == 1 and process.store.erase(ALICE) and not other.exists(1)


def test_what_was_erased_does_not_come_back_after_a_power_cut(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, fsync, on_stable_storage = start(), os.fsync, []
    put(process, ALICE, 1)
    secret = payload(process, 1)
    assert secret in on_disk(tmp_path / "root")

    def note(fd: int) -> None:
        fsync(fd)
        on_stable_storage.append(Path(f"/proc/self/fd/{fd}").read_bytes())

    monkeypatch.setattr(os, "fsync", note)
    assert process.store.erase(ALICE)
    segment = on_disk(tmp_path / "root")
    assert secret not in segment and segment in on_stable_storage


def test_nothing_of_a_tenant_is_nothing_to_erase(start) -> None:
    process = start()
    assert process.store.erase(ALICE)
    put(process, b"", 1)
    assert process.store.erase(ALICE) and process.get(1) == 1


def test_a_segment_without_blocks_gives_its_space_back(start, tmp_path: Path) -> None:
    process = start()
    put(process, ALICE, *range(20))
    before = process.stat("size_bytes")
    assert process.store.erase(ALICE)
    assert process.stat("blocks") == 0 and process.stat("size_bytes") < before / 2
    assert len(list(folder_of(tmp_path / "root").glob("*.kv"))) <= 1
    put(process, ALICE, *range(20, 40))
    assert process.get(*range(20, 40)) == 20


def test_blocks_that_another_process_is_writing_are_waited_for(start, tmp_path: Path) -> None:
    process, other = start(), start()
    put(process, ALICE, 1)
    outcomes = []
    process.store._tenants._sleep = lambda seconds: outcomes.append(seconds)  # type: ignore[method-assign]
    other.during_write(lambda: outcomes.append(process.store.erase(ALICE)))
    put(other, ALICE, 2)
    assert outcomes[-1] is False and sum(outcomes[:-1]) >= tenant_blocks.WAIT_S, "it was being written all the time"
    assert not process.exists(1) and process.exists(2)
    assert process.store.erase(ALICE) and not process.exists(2), "it is still known whose it is"


def test_a_block_that_is_read_meanwhile_is_no_error(start) -> None:
    process, other = start(), start()
    put(process, ALICE, 1, 2)
    read = other.store._files.read
    keys = keys_of(1, 2)

    def erased_before(*args: object) -> object:
        other.store._files.read = read  # type: ignore[method-assign]
        assert process.store.erase(ALICE)
        return read(*args)  # type: ignore[arg-type]

    other.store._files.read = erased_before  # type: ignore[method-assign,assignment]
    assert other.store.get(keys, other.frames(keys)) == 0
    assert other.no_errors() and not other.exists(1)


def test_a_process_that_dies_while_it_writes_leaves_whose_they_are(start, tmp_path: Path) -> None:
    process = start()
    put(process, ALICE, 1, 2)
    log = folder_of(tmp_path / "root") / "tenants"
    with open(log, "ab") as file:
        file.write(b"torn")
    put(process, ALICE, 3)
    assert process.store.erase(ALICE) and not any(process.exists(n) for n in (1, 2, 3))


def test_blocks_from_before_there_was_a_log_are_told_of(start, tmp_path: Path, caplog) -> None:
    process = start()
    put(process, ALICE, 1)
    process.store.close()
    (folder_of(tmp_path / "root") / "tenants").unlink()
    again = start()
    with caplog.at_level(logging.WARNING):
        assert not again.store.erase(ALICE)
    assert "clear it, and delete" in caplog.text and again.exists(1)
    again.store.clear()


def test_a_folder_that_was_deleted_has_a_log_again(start, tmp_path: Path) -> None:
    process = start()
    put(process, ALICE, 1)
    shutil.rmtree(tmp_path / "root")
    put(process, ALICE, 2)
    put(process, ALICE, 3)
    assert process.exists(3) and process.store.erase(ALICE) and not process.exists(3)


def test_what_is_no_tenants_in_a_folder_that_was_deleted_is_known_to_be_none(start, tmp_path: Path) -> None:
    process = start()
    put(process, ALICE, 1)
    shutil.rmtree(tmp_path / "root")
    put(process, b"", 2)
    put(process, b"", 3)
    put(process, ALICE, 4)
    assert process.exists(3, 4) == 2 and process.store.erase(ALICE) and process.exists(3) and not process.exists(4)


def test_a_log_that_a_full_disk_has_cut_short_is_made_anew(start, tmp_path: Path) -> None:
    """An empty file is what is left where there was room for a name and for nothing else."""
    process = start()
    (folder_of(tmp_path / "root") / "tenants").write_bytes(b"")
    assert put(process, ALICE, 1) and process.exists(1) and process.no_errors()
    assert process.store.erase(ALICE) and not process.exists(1)


def test_no_block_is_written_of_which_it_cannot_be_noted_whose_it_is(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    put(process, ALICE, 1)
    log = TenantLog(folder_of(tmp_path / "root"), lambda num_bytes: None)
    write = os.write
    # As a disk on which a part has room.
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]) if ALICE in data else write(fd, data))
    with pytest.raises(OSError, match="No space"):
        log.append(ALICE, keys_of(2, 3))
    assert not put(process, ALICE, 2)
    monkeypatch.undo()
    assert log.keys_of(ALICE) == keys_of(1)
    assert not process.exists(2) and process.store.erase(ALICE) and not process.exists(1)


def test_a_limit_keeps_what_was_used_last(start) -> None:
    process = start()
    put(process, BOB, 100, 101)
    assert process.store.limit(ALICE, 10, Tier.DISK)
    for number in range(30):
        assert put(process, ALICE, number) == 1
        process.exists(0)
    kept = [number for number in range(30) if process.exists(number)]
    assert len(kept) <= 10 and {0, 29} <= set(kept), "one is used all the time, one is the newest"
    assert process.get(100, 101) == 2
    assert process.store.limit(ALICE, 0, Tier.DISK) and not process.exists(0) and process.get(100, 101) == 2
    assert process.store.limit(ALICE, -1, Tier.DISK)
    put(process, ALICE, *range(40, 60))
    assert process.get(*range(40, 60)) == 20


def test_what_is_over_a_limit_counts_as_stored(start) -> None:
    """Else memory, which has it, would have it written again and again."""
    process = start()
    assert process.store.limit(ALICE, 0, Tier.DISK)
    assert put(process, ALICE, *range(5)) == 5 and process.exists(0) == 0
    assert process.store.touch(keys_of(*range(5))) == 5
    assert process.stat("written_blocks") == 0
    assert process.store.limit(ALICE, 3, Tier.DISK)
    assert process.store.touch(keys_of(0)) == 0, "now it may be stored"
    assert put(process, ALICE, *range(8)) == 8
    assert process.stat("written_blocks") == 3
    assert process.store.touch(keys_of(*range(8))) == 8
    assert put(process, BOB, 20) == 1 and process.get(20) == 1


@pytest.mark.parametrize("fails", [False, True], ids=["erased when read", "still there"])
def test_a_damaged_blocks_bytes_are_erased_too(start, tmp_path: Path, fails: bool) -> None:
    """fails: the disk, when the entry is to be erased."""
    process = start()
    put(process, ALICE, 1, 2)
    secret = payload(process, 1)
    (path,) = folder_of(tmp_path / "root").glob("*.kv")
    data = bytearray(path.read_bytes())
    at = data.index(secret)
    data[at + 500] ^= 1
    path.write_bytes(data)
    if fails:
        process.store._files.erase_entry = mock.Mock(side_effect=OSError)  # type: ignore[method-assign]
    assert process.get(1, 2) == 0
    assert process.store.erase(ALICE) and secret not in on_disk(tmp_path / "root")
    assert keys_of(1)[0] not in on_disk(tmp_path / "root")


@pytest.mark.parametrize("how", ["damaged", "cut short"])
def test_a_segment_whose_head_is_damaged_is_deleted(start, tmp_path: Path, monkeypatch, how: str) -> None:
    """No index has it any more, so that nothing finds its blocks. While another process writes to it, it stays."""
    monkeypatch.setattr(tenant_blocks, "WAIT_S", 0.0)
    process, other = start(), start()
    put(other, ALICE, 1, 2)
    (path,) = folder_of(tmp_path / "root").glob("*.kv")
    secret, whole = payload(other, 1), path.read_bytes()
    path.write_bytes(bytes(64) + whole[64:] if how == "damaged" else whole[:10])
    assert not process.exists(1)
    assert process.store.erase(BOB)
    assert process.store.erase(ALICE) == (how == "cut short"), "which has no blocks"
    assert path.exists()
    other.store.close()
    assert process.store.erase(ALICE) and not path.exists() and secret not in on_disk(tmp_path / "root")
    assert put(process, ALICE, 1) == 1 and process.get(1) == 1


def test_blocks_that_a_dead_process_was_writing_are_erased(start, tmp_path: Path) -> None:
    process, other = start(), start()
    put(process, ALICE, 1)
    secret = payload(other, 5)

    def die() -> None:
        raise Killed

    write = other.store._files.write_payloads
    other.store._files.write_payloads = lambda *args: (write(*args), die())  # type: ignore[assignment]
    with pytest.raises(Killed):
        put(other, ALICE, 5)
    other.die()
    assert secret in on_disk(tmp_path / "root")
    process.store._tenants._sleep = lambda seconds: pytest.fail("no process is writing")  # type: ignore[method-assign]
    assert process.store.erase(ALICE)
    assert secret not in on_disk(tmp_path / "root")


def test_leftovers_of_other_models_are_erased(tmp_path: Path, start, caplog) -> None:
    """Folders of other settings that no process uses: with a block of the tenant they are emptied."""

    def leave(model: str, tenant: bytes) -> Path:
        before = set((tmp_path / "root").glob("*/*.kv"))
        process = Process(tmp_path / "root")
        process.store.close()
        process.store = HiCacheFile(tmp_path / "root", model, process.pool, BLOCK_TOKENS)
        put(process, tenant, 1, 2)
        process.store.close()
        (made,) = set((tmp_path / "root").glob("*/*.kv")) - before
        return made

    of_alice, of_bob = leave("another model", ALICE), leave("a third", BOB)
    process = start()
    put(process, b"", 3)
    assert process.store.erase(ALICE)
    assert not of_alice.exists() and of_bob.exists()
    (of_bob.parent / "tenants").unlink()
    with caplog.at_level(logging.WARNING):
        assert not process.store.erase(ALICE)
    assert "delete the folders" in caplog.text


def test_a_log_is_rewritten_when_it_has_grown(tmp_path: Path) -> None:
    log = TenantLog(tmp_path, lambda num_bytes: None)
    log.create(is_complete=True)
    keys = keys_of(*range(1000))
    is_large = [log.append(ALICE, keys) for _ in range(60)]
    assert not is_large[0] and is_large[-1]
    size = (tmp_path / "tenants").stat().st_size
    log.rewrite(lambda tenant, key: key in keys[:10])
    assert log.keys_of(ALICE) == keys[:10] and log.is_complete
    assert (tmp_path / "tenants").stat().st_size < size / 1000
    assert log.keys_of(BOB) == []
