"""Slabs are overwritten by another thread, and are nobody's until then."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.peer.memory.scrubber import Scrubber
from support.children import wait_until


def test_slabs_come_back_in_order_once_they_are_overwritten():
    may_go_on, notified, scrubbed = threading.Semaphore(0), threading.Event(), []

    def scrub(slab: int) -> None:
        may_go_on.acquire()
        scrubbed.append((slab, threading.current_thread().name))

    scrubber = Scrubber(scrub, notified.set)
    scrubber.submit([3, 1])
    assert scrubber.take_done() == []
    may_go_on.release()
    wait_until(notified.is_set, "the first slab")
    assert scrubber.take_done() == [3] and scrubbed == [(3, "peer-scrubber")]
    may_go_on.release()
    done: list[int] = []
    wait_until(lambda: done.extend(scrubber.take_done()) or done == [1], "the second slab")
    scrubber.close()
    scrubber.close()


def test_a_slab_that_cannot_be_overwritten_is_an_error():
    def scrub(slab: int) -> None:
        raise OSError("the device is gone")

    notified = threading.Event()
    scrubber = Scrubber(scrub, notified.set)
    scrubber.submit([0])
    wait_until(notified.is_set, "the error")
    with pytest.raises(RuntimeError, match="could not be overwritten"):
        scrubber.take_done()
    scrubber.close()
