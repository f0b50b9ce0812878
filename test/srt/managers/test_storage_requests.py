"""`StorageRequests`: what reads files is not waited for."""

import threading

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    DetachHiCacheStorageReqInput,
)
from sglang.srt.managers.storage_requests import StorageRequests
from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.transfer import StorageAction


def attach(id: str, backend: str = "file") -> AttachHiCacheStorageReqInput:
    return AttachHiCacheStorageReqInput(
        id=id, backend=backend, extra_config="", prefetch_policy="timeout", write_policy="auto"
    )


class _Opener:
    """Reads when it may."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.read_by = ""

    def setup(self, backend, extra_config, prefetch_policy, write_policy):
        self.may_read.wait()
        self.read_by = threading.current_thread().name
        if backend == "none":
            raise StoreError("no such backend")
        if backend == "gone":
            raise FileNotFoundError(2, "No such file or directory", "model.safetensors")
        if backend == "bug":
            raise ZeroDivisionError
        return (backend, prefetch_policy, write_policy)


def test_a_request_to_attach_waits_for_its_files_and_no_other_does():
    opener, notified = _Opener(), threading.Semaphore(0)
    requests = StorageRequests(opener, notified.release)
    requests.add(attach("a"))
    requests.add(DetachHiCacheStorageReqInput(id="b"))
    requests.add(attach("c", "none"))
    requests.add(attach("d", "gone"))
    assert [each.id for each in requests.take_ready()[0]] == ["b"]
    assert requests.take_ready() == ([], [])
    opener.may_read.set()
    for _ in range(4):
        notified.acquire()
    ready, failed = requests.take_ready()
    assert [(each.id, each.action, each.what) for each in ready] == [
        ("a", StorageAction.ATTACH, ("file", "timeout", "auto")),
    ]
    assert failed[0] == ("c", "no such backend")
    assert failed[1][0] == "d" and "model.safetensors" in failed[1][1]
    assert opener.read_by.startswith("storage-settings")
    assert requests.take_ready() == ([], [])


def test_what_reads_nothing_is_ready_at_once():
    requests = StorageRequests(_Opener(), lambda: None)
    requests.add(ClearHiCacheReqInput(id="a"))
    assert [each.action for each in requests.take_ready()[0]] == [StorageAction.CLEAR]


def test_without_a_host_tier_there_is_a_sentence():
    notified = threading.Semaphore(0)
    requests = StorageRequests(None, notified.release)
    requests.add(attach("a"))
    notified.acquire()
    ready, failed = requests.take_ready()
    assert not ready and "start the server with --hicache" in failed[0][1]


def test_a_bug_ends_no_server(caplog):
    opener, notified = _Opener(), threading.Semaphore(0)
    opener.may_read.set()
    requests = StorageRequests(opener, notified.release)
    requests.add(attach("a", "bug"))
    notified.acquire()
    ready, failed = requests.take_ready()
    assert not ready and failed[0][0] == "a" and "ZeroDivisionError" in failed[0][1] and "Traceback" in caplog.text


def test_where_no_thread_can_be_started_there_is_a_sentence(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    requests = StorageRequests(_Opener(), lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        requests.add(attach("a"))
    ready, failed = requests.take_ready()
    assert not ready and failed == [
        ("a", "the server has no thread for this request (can't start new thread): try again later")
    ]
