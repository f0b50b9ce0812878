"""Requests wait for their grammars beside the scheduler, in order, and can leave meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import GrammarError
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams


class SlowCache:
    """Compiles when it is allowed to."""

    def __init__(self) -> None:
        self.allowed: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.error: Exception | None = None
        self.held: list[str] = []
        self.is_full = False

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec.source in self.compiled

    def get(self, spec: GrammarSpec) -> Any:
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


def request(rid: str, source: str | None) -> TokenizedGenerateReqInput:
    grammar = GrammarSpec("regex", source) if source is not None else None
    return TokenizedGenerateReqInput(rid=rid, input_ids=b"", sampling_params=SamplingParams(grammar=grammar))


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


def test_a_grammar_that_was_given_up_before_it_was_held_is_compiled_again():
    fixture = Fixture()
    fixture.cache.allow("a")
    assert not fixture.manager.add(request("1", "a"))
    assert fixture.notified.acquire(timeout=60)
    fixture.cache.compiled.clear()
    assert fixture.manager.take_ready() == ([], [])
    assert fixture.take() == (["1"], [])


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
