"""Requests wait for their grammars beside the scheduler, in order, and can leave meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.constrained import grammar_manager
from sglang.srt.constrained.grammar_cache import MAX_HELD_BYTES, GrammarCache
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import GrammarError
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.utils.errors import RequestError


class SlowCache:
    """Compiles when it is allowed to."""

    def __init__(self) -> None:
        self.allowed: dict[str, threading.Event] = {}
        self.begun = threading.Semaphore(0)
        self.compiled: list[str] = []
        self.error: Exception | None = None
        self.held: list[str] = []
        self.is_full = False

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec.source in self.compiled

    def get(self, spec: GrammarSpec) -> Any:
        self.begun.release()
        self.allowed.setdefault(spec.source, threading.Event()).wait()
        if self.error is not None:
            raise self.error
        self.compiled.append(spec.source)

    def hold(self, spec: GrammarSpec) -> bool:
        if spec.source not in self.compiled or self.is_full:
            return False
        self.held.append(spec.source)
        return True

    def release(self, spec: GrammarSpec) -> None:
        self.held.remove(spec.source)

    def allow(self, source: str) -> None:
        self.allowed.setdefault(source, threading.Event()).set()


def request(rid: str, source: str | None, lane: int = 0) -> TokenizedGenerateReqInput:
    grammar = GrammarSpec("regex", source) if source is not None else None
    params = SamplingParams(grammar=grammar)
    return TokenizedGenerateReqInput(rid=rid, input_ids=b"", sampling_params=params, grammar_lane=lane)


class Fixture:
    def __init__(self) -> None:
        self.cache = SlowCache()
        self.notified = threading.Semaphore(0)
        self.manager = GrammarManager(self.cache, self.notified.release)  # type: ignore[arg-type]

    def take(self) -> tuple[list[str], list[tuple[str, str]]]:
        """After the next notification."""
        assert self.notified.acquire(timeout=60)
        ready, failed = self.manager.take_ready()
        return [each.rid for each in ready], failed


def test_requests_without_grammar_and_with_a_known_one_do_not_wait():
    fixture = Fixture()
    assert fixture.manager.add(request("free", None))
    fixture.cache.compiled.append("a")
    assert fixture.manager.add(request("known", "a"))
    assert fixture.manager.take_ready() == ([], [])


def test_one_compilation_serves_all_that_wait_in_their_order():
    fixture = Fixture()
    for rid, source in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "a")):
        assert not fixture.manager.add(request(rid, source))
    assert fixture.manager.abort("3") and not fixture.manager.abort("3") and not fixture.manager.abort("9")
    assert fixture.manager.take_ready() == ([], [])
    fixture.cache.allow("a")
    assert fixture.take() == (["1", "4"], [])
    fixture.cache.allow("b")
    assert fixture.take() == (["2"], [])
    assert fixture.cache.compiled == ["a", "b"] and fixture.manager.take_ready() == ([], [])


def test_a_grammar_is_held_until_its_request_has_ended_and_others_wait_for_room():
    fixture = Fixture()
    fixture.cache.compiled.append("a")
    assert fixture.manager.add(request("1", "a")) and fixture.cache.held == ["a"]
    fixture.cache.is_full = True
    assert not fixture.manager.add(request("2", "a"))
    assert fixture.manager.take_ready() == ([], [])
    fixture.manager.release("1")
    fixture.manager.release("1")
    assert fixture.cache.held == []
    fixture.cache.is_full = False
    ready, _ = fixture.manager.take_ready()
    assert [each.rid for each in ready] == ["2"] and fixture.cache.held == ["a"]
    fixture.manager.release("2")
    assert fixture.cache.held == []


def test_a_grammar_that_was_given_up_before_it_was_held_is_compiled_again():
    fixture = Fixture()
    fixture.cache.allow("a")
    assert not fixture.manager.add(request("1", "a"))
    assert fixture.notified.acquire(timeout=60)
    fixture.cache.compiled.clear()
    assert fixture.manager.take_ready() == ([], [])
    assert fixture.take() == (["1"], [])


def test_where_no_thread_can_be_started_requests_are_refused(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fixture = Fixture()
    fixture.cache.allow("a")
    fixture.cache.compiled.append("b")
    fixture.cache.is_full = True
    assert not fixture.manager.add(request("2", "b", lane=1)), "it waits for room"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RequestError, match="no thread for this request") as refusal:
            fixture.manager.add(request("1", "a"))
        fixture.cache.compiled.clear()  # what the other waits for was given up
        fixture.cache.is_full = False
        assert [rid for rid, _ in fixture.manager.take_ready()[1]] == ["2"]
    assert refusal.value.status_code == 503
    assert not fixture.manager.abort("1")
    assert not fixture.manager.add(request("3", "a"))
    assert fixture.take()[0] == ["3"]


def test_a_grammar_that_fails_ends_its_requests_and_no_others():
    fixture = Fixture()
    for rid in "12":
        assert not fixture.manager.add(request(rid, "a"))
    fixture.cache.error = GrammarError("regex is not usable")
    fixture.cache.allow("a")
    assert fixture.take() == ([], [("1", "regex is not usable"), ("2", "regex is not usable")])
    fixture.cache.error = None
    assert not fixture.manager.add(request("3", "a")), "a later request tries again"
    assert fixture.take() == (["3"], [])


def test_a_grammar_waits_for_none_of_a_slower_lane():
    fixture = Fixture()
    for lane in (2, 1, 0):
        assert not fixture.manager.add(request(f"slow {lane}", f"slow {lane}", lane))
        assert not fixture.manager.add(request(f"quick {lane}", f"quick {lane}", lane))
    for lane in (0, 1, 2):
        for source in (f"slow {lane}", f"quick {lane}"):
            fixture.cache.allow(source)
            assert fixture.take() == ([source], [])


def test_so_many_of_a_lane_may_wait_and_those_who_leave_make_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_manager, "LANES", ((0.1, 9), (1.0, 2)))
    fixture = Fixture()
    for rid in "ab":
        assert not fixture.manager.add(request(rid, rid, 1))
    assert not fixture.manager.add(request("b again", "b", 1)), "it needs no room of its own"
    with pytest.raises(RequestError) as refusal:
        fixture.manager.add(request("c", "c", 1))
    assert refusal.value.status_code == 503 and not fixture.manager.abort("c")
    assert not fixture.manager.add(request("d", "d", 0))
    for _ in "ad":
        assert fixture.cache.begun.acquire(timeout=60)
    # No thread has begun with b; one cannot be taken back.
    assert fixture.manager.abort("b")
    with pytest.raises(RequestError):
        fixture.manager.add(request("c", "c", 1))
    assert fixture.manager.abort("b again") and fixture.manager.abort("a") and fixture.manager.abort("d")
    assert not fixture.manager.add(request("c", "c", 1))
    with pytest.raises(RequestError):
        fixture.manager.add(request("e", "e", 1))
    for source in "acd":
        fixture.cache.allow(source)
    ready: list[str] = []
    while "c" not in ready:
        more, failed = fixture.take()
        assert not failed
        ready += more
    assert ready == ["c"] and "b" not in fixture.cache.compiled


def test_what_was_compiled_for_requests_that_have_left_takes_no_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_manager, "LANES", ((0.1, 1),))
    fixture = Fixture()
    assert not fixture.manager.add(request("1", "a"))
    assert fixture.cache.begun.acquire(timeout=60) and fixture.manager.abort("1")
    fixture.cache.allow("a")
    assert fixture.take() == ([], [])
    assert not fixture.manager.add(request("2", "b"))
    fixture.cache.allow("b")
    assert fixture.take() == (["2"], [])


def test_what_was_released_leaves_room_for_others() -> None:
    cache = GrammarCache(Path("none"), None)
    first, second = GrammarSpec("regex", "a"), GrammarSpec("regex", "b")
    for spec in (first, second):
        cache._compiled[spec] = SimpleNamespace(memory_size_bytes=MAX_HELD_BYTES // 2 + 1)  # type: ignore[assignment]
    assert cache.hold(first) and cache.hold(first) and not cache.hold(second)
    cache.release(first)
    assert not cache.hold(second)
    cache.release(first)
    assert cache.hold(second)
