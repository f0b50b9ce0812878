"""`SimulatedStream`: the layer stream cache of a simulation. Moves nothing; owns when buffers are filled and read.

Every number that comes out of it is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.transfer import Tier

# (tier, frames there) -> seconds that one layer of these pages takes to a buffer while nothing else is on the link.
CopySeconds = Callable[[Tier, np.ndarray], float]
# What differs by less is the same.
SAME_S = 1e-10
Parts = Sequence[tuple[Tier, np.ndarray]]


@dataclass(frozen=True)
class PieceCost:
    """What a piece of one layer costs. copy_s: by the tier it comes from; alone_s: all of it. attend_s: attention
    over it."""

    copy_s: tuple[tuple[Tier, float], ...]
    attend_s: float
    alone_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone_s", sum(seconds for _, seconds in self.copy_s))


class SimulatedStream:
    """num_buffers buffers of buffer_pages pages of one layer, as in `LayerStreamCache`.

    Pieces are copied one after another, over all layers and launches. Piece n is copied from

        max(it was submitted, piece n - 1 has come, piece n - num_buffers was read)

    and is read from the later of its coming and of whatever was computed before. The rest of a layer is computed
    behind its last piece, while the next ones come.

    Loads that were submitted before the launch share their link evenly with its copies: a copy takes twice as long
    until it has left them what they need. They themselves are as fast as ever, and those that are submitted later
    slow only the next launch, as with all that runs beside it.
    """

    def __init__(self, num_buffers: int, buffer_pages: int, copy_seconds: CopySeconds) -> None:
        self._buffer_pages = buffer_pages
        self._copy_seconds = copy_seconds
        self._free_at = 0.0
        # When what was last in each buffer has been read, the next one to be filled first.
        self._read = deque([0.0] * num_buffers, maxlen=num_buffers)
        self._submitted = 0.0
        self._owed: dict[Tier, float] = {}
        # The parts that were cut last: long ones are the same launch after launch.
        self._cut: tuple[Parts, list[tuple[int, tuple[tuple[Tier, float], ...]]]] = ((), [])

    def pieces(self, parts: Parts, attend_s: float) -> list[PieceCost]:
        """Cut a run of pages as `LayerStreamCache.pieces` does. attend_s: attention over all of it, in one layer."""
        if self._cut[0] is not parts:
            self._cut = (
                parts,
                [
                    (
                        sum(len(frames) for _, frames in piece),
                        tuple((tier, self._copy_seconds(tier, frames)) for tier, frames in piece),
                    )
                    for piece in cut(parts, self._buffer_pages)
                ],
            )
        pages = sum(n for n, _ in self._cut[1])
        return [PieceCost(copy_s, attend_s * n / pages) for n, copy_s in self._cut[1]]

    def begin(self, submitted: float, loads_s: Mapping[Tier, float]) -> None:
        """What follows is of one launch, submitted then. loads_s: how long the links of these tiers have loads to
        carry from its start on."""
        self._submitted = submitted
        self._owed = {tier: seconds for tier, seconds in loads_s.items() if seconds}

    def layer(self, pieces: Sequence[PieceCost], time: float) -> tuple[float, float]:
        """One layer, of which everything before its attention is over at `time`. Returns when all pieces have been
        read, and how long the copies took, in all."""
        # A long request has thousands of pieces: no calls where none are needed.
        read, copied_s = self._read, 0.0
        free_at = max(self._submitted, self._free_at)
        for piece in pieces:
            seconds = piece.alone_s if not self._owed else self._shared_seconds(piece)
            if read[0] > free_at:
                free_at = read[0]
            free_at += seconds
            time = (time if time > free_at else free_at) + piece.attend_s
            read.append(time)
            copied_s += seconds
        self._free_at = free_at
        return time, copied_s

    def layers(self, pieces: Sequence[PieceCost], num_layers: int, rest_s: float, time: float) -> tuple[float, float]:
        """So many layers of which nothing else has to be waited for, each with rest_s behind its pieces. As soon as a
        layer leaves everything as the one before did, the others are not gone through. Returns when the last one is
        over, and how long the copies took."""
        copied_s, before = 0.0, np.empty(0)
        for done in range(1, num_layers + 1):
            began = time
            time, seconds = self.layer(pieces, time)
            time += rest_s
            copied_s += seconds
            now = np.array([time - began, time - self._free_at, *(time - read for read in self._read)])
            if not self._owed and len(before) and np.allclose(before, now, rtol=0.0, atol=SAME_S):
                left = num_layers - done
                later = left * (time - began)
                self._free_at += later
                self._read.extend([read + later for read in self._read])
                return time + later, copied_s + left * seconds
            before = now
        return time, copied_s

    def _shared_seconds(self, piece: PieceCost) -> float:
        """Of a copy, while loads want their part of its link."""
        seconds = piece.alone_s
        for tier, alone in piece.copy_s:
            owed = self._owed.pop(tier, 0.0)
            shared = min(alone, owed)
            if owed > shared:
                self._owed[tier] = owed - shared
            seconds += shared
        return seconds


def cut(parts: Parts, buffer_pages: int) -> list[list[tuple[Tier, np.ndarray]]]:
    """Pieces of buffer_pages pages, the last one perhaps shorter, each of runs of one tier."""
    pieces: list[list[tuple[Tier, np.ndarray]]] = []
    room = 0
    for tier, frames in parts:
        while len(frames):
            if not room:
                pieces.append([])
                room = buffer_pages
            taken, frames = frames[:room], frames[room:]
            last = pieces[-1]
            if last and last[-1][0] == tier:
                last[-1] = tier, np.concatenate((last[-1][1], taken))
            else:
                last.append((tier, taken))
            room -= len(taken)
    return pieces
