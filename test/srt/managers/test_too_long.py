"""How long requests wait that are longer than the memory that is there, and why they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.too_long import TooLongRequests
from sglang.srt.utils.time_units import Seconds


def waiting(rid: str, num_known: int) -> Req:
    return cast(Req, SimpleNamespace(rid=rid, num_known=num_known, least_len=num_known + 1))


class Rig:
    """Room for fewer than `limit` tokens, and for fewer than `most` with all that peers may lend; 5 s of patience."""

    def __init__(self, limit: int, most: int | None) -> None:
        self.streaming = SimpleNamespace(max_total_len=limit, max_len_with=lambda n: n, limit_flags="FLAGS")
        borrower: Any = None if most is None else SimpleNamespace(most_pages=most)
        self.too_long = TooLongRequests(cast(Any, self.streaming), borrower, 5.0)

    def ended(self, now: float, *reqs: Req) -> dict[str, str]:
        return {req.rid: message for req, message in self.too_long.take_ended(reqs, Seconds(now))}


def test_one_that_peers_could_make_room_for_waits_for_them():
    rig, req = Rig(100, 150), waiting("r", 120)
    assert not rig.ended(1.0, waiting("short", 99)) and rig.too_long.wake_at is None
    assert not rig.ended(1.0, req) and rig.too_long.wake_at == 6.0
    assert not rig.ended(5.9, req) and rig.too_long.wake_at == 6.0
    message = rig.ended(6.0, req)["r"]
    assert "120 tokens need for 5 s; there is room for 99 now" in message and rig.too_long.wake_at is None


def test_the_wait_begins_anew_once_there_was_room():
    rig, req = Rig(100, 150), waiting("r", 120)
    assert not rig.ended(1.0, req)
    rig.streaming.max_total_len = 121
    assert not rig.ended(2.0, req) and rig.too_long.wake_at is None
    rig.streaming.max_total_len = 120
    assert not rig.ended(7.0, req) and rig.too_long.wake_at == 12.0


def test_one_that_has_no_room_whatever_peers_lend_ends_at_once():
    for most, room in ((150, 149), (50, 99), (None, 99)):
        rig = Rig(100, most)
        assert f"there is room for {room}: see" in rig.ended(1.0, waiting("r", 150))["r"]
        assert rig.too_long.wake_at is None
