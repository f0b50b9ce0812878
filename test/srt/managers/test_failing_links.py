"""Links from the device that fail again and again: when they are left alone, and when they are tried again."""

from __future__ import annotations

import pytest

from sglang.srt.managers.failing_links import FailingLinks
from sglang.srt.utils.time_units import Seconds


class Link:
    def __init__(self) -> None:
        self.links = FailingLinks()
        self.now = 0.0

    def end(self, *are_ok: bool) -> bool:
        """Copies end, one in each step. Whether the link gets no more now."""
        for is_ok in are_ok:
            self.links.note_ended("d2h", is_ok)
            self.links.update(Seconds(self.now))
        return "d2h" in self.links.links

    def is_failing_after(self, seconds: float) -> bool:
        self.now += seconds
        self.links.update(Seconds(self.now))
        return "d2h" in self.links.links


def test_failures_in_a_row_count() -> None:
    link = Link()
    assert not link.end(False, False, True, False, False)
    assert link.end(False)


@pytest.mark.parametrize("is_ok", [False, True])
def test_it_is_tried_again_after_a_pause(is_ok: bool) -> None:
    link = Link()
    assert link.end(False, False, False)
    assert link.is_failing_after(0.9) and not link.is_failing_after(0.2)
    assert link.end(is_ok) == (not is_ok)
    if is_ok:
        assert not link.end(False, False)
    else:
        assert link.is_failing_after(1.9) and not link.is_failing_after(0.2)


def test_pauses_do_not_grow_for_ever() -> None:
    link = Link()
    for _ in range(5000):
        link.end(False)
        link.now += 8.0
    link.end(False)
    assert link.is_failing_after(7) and not link.is_failing_after(2)


def test_copies_that_began_before_a_pause_make_it_no_longer() -> None:
    link = Link()
    assert link.end(*[False] * 20)
    assert link.is_failing_after(0.9) and not link.is_failing_after(0.2)


def test_a_link_is_judged_by_the_time_of_the_step_that_learns_of_it() -> None:
    """A copy that took long has failed now, not when it began."""
    link = Link()
    link.end(False, False)
    link.now = 100.0
    assert link.end(False)


def test_links_are_judged_one_by_one() -> None:
    link = Link()
    link.links.note_ended("d2p", False)
    assert link.end(False, False, False) and link.links.links == {"d2h"}


def test_a_link_is_unsound_for_a_while_after_a_failure() -> None:
    link = Link()
    link.end(True, False, True)
    assert link.links.unsound == {"d2h"} and not link.links.links
    link.is_failing_after(29)
    assert link.links.unsound == {"d2h"}
    link.end(False, True)
    link.is_failing_after(29)
    assert link.links.unsound == {"d2h"}
    link.is_failing_after(2)
    assert not link.links.unsound
