"""Progress, its reduction over ranks, recording and replay."""

from __future__ import annotations

import io

import pytest

from sglang.srt.managers.engine_core import (
    COUNTS_PER_STEP,
    Progress,
    ReplayMismatchError,
    reduce_progress,
    replay,
)
from sglang.srt.mem_cache.transfer import D2H, EXEC, FETCH, H2D, LINKS, PROBE, STORAGE_LINKS, STORE
from sglang.test.soak import Soak, SoakConfig


def progress(exec_done: int, h2d: int = 0, d2h: int = 0, failed: dict[str, int] | None = None) -> Progress:
    results = {seq: bytes([seq]) * 4 for seq in range(exec_done)}
    return Progress(dict.fromkeys(STORAGE_LINKS, 0) | {EXEC: exec_done, H2D: h2d, D2H: d2h}, failed or {}, results)


@pytest.mark.parametrize(
    ("ranks", "done", "failed"),
    [
        ([progress(3, 2, 1)], (3, 2, 1), {}),
        ([progress(3, 2, 1), progress(1, 5, 0)], (1, 2, 0), {}),
        # One rank's load 1 failed; the other has completed it: both hear of it.
        ([progress(3, 2, 0, {H2D: 1}), progress(3, 4, 0)], (3, 2, 0), {H2D: 1}),
        # The other rank is not there yet: nobody hears of it.
        ([progress(3, 2, 0, {H2D: 1}), progress(3, 1, 0)], (3, 1, 0), {}),
        # Both failed, at different numbers: the earlier counts.
        ([progress(3, 2, 0, {H2D: 1}), progress(3, 1, 0, {H2D: 0})], (3, 1, 0), {H2D: 0}),
    ],
)
def test_reduction_is_min(ranks: list[Progress], done: tuple[int, int, int], failed: dict[str, int]) -> None:
    reduced = reduce_progress(ranks)
    assert tuple(reduced.done[name] for name in (EXEC, H2D, D2H)) == done
    assert reduced.failed == failed
    assert sorted(reduced.results) == list(range(done[0]))


def stored(fetched: tuple[int, ...], consumed: int = 0) -> Progress:
    done = dict.fromkeys((EXEC, *LINKS), 0) | {FETCH: consumed + len(fetched)}
    return Progress(done, {}, {}, counts={FETCH: fetched}, consumed={FETCH: consumed})


@pytest.mark.parametrize("consumed", [0, 7])
def test_storage_has_brought_what_every_rank_has(consumed: int) -> None:
    ranks = [stored((4, 2, 9), consumed), stored((3, 5), consumed)]
    reduced = reduce_progress(ranks)
    assert reduced.done[FETCH] == consumed + 2
    assert reduced.counts == {PROBE: (), FETCH: (3, 2), STORE: ()}
    # As many as one reduction has room for.
    many = tuple(range(1, COUNTS_PER_STEP + 1))
    assert reduce_progress([stored(many, consumed)] * 2).counts[FETCH] == many


def recorded(seed: int = 3) -> bytes:
    soak = Soak(SoakConfig.draw(seed, 40))
    soak.run()
    return soak.record.getvalue()


def test_replay_notices_a_changed_decision_and_a_cut_off_record() -> None:
    data = recorded()
    steps = replay(io.BytesIO(data))
    assert steps > 20
    # Cut off in the last digest, and in the inputs before it: a digest takes 4 + 16 bytes.
    assert replay(io.BytesIO(data[:-3])) == replay(io.BytesIO(data[:-25])) == steps - 1
    with pytest.raises(ValueError, match="no record"):
        replay(io.BytesIO(b""))
    # The digest is the last thing in a frame: flip its last bit.
    broken = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ReplayMismatchError, match="decides differently"):
        replay(io.BytesIO(broken))
