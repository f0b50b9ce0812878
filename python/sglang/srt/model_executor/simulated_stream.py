"""`SimulatedStream`: the layer stream cache of a simulation. Moves nothing; owns when buffers are filled and read.

Every number that comes out of it is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.transfer import Tier

# (tier, frames there) -> seconds that one layer of these pages takes to a buffer while nothing else is on the link.
CopySeconds = Callable[[Tier, np.ndarray], float]
Parts = Sequence[tuple[Tier, np.ndarray]]


@dataclass(frozen=True)
class PieceCost:
    """What a piece of one layer costs. copy_s: by the tier it comes from. attend_s: attention over it."""

    copy_s: tuple[tuple[Tier, float], ...]
    attend_s: float


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
        self._owed = dict(loads_s)

    def layer(self, pieces: Sequence[PieceCost], time: float) -> tuple[float, float]:
        """One layer, of which everything before its attention is over at `time`. Returns when all pieces have been
        read, and how long the copies took, in all."""
        copied_s = 0.0
        for piece in pieces:
            seconds = 0.0
            for tier, alone in piece.copy_s:
                shared = min(alone, self._owed.get(tier, 0.0))
                if shared:
                    self._owed[tier] -= shared
                seconds += alone + shared
            self._free_at = max(self._submitted, self._free_at, self._read[0]) + seconds
            time = max(time, self._free_at) + piece.attend_s
            self._read.append(time)
            copied_s += seconds
        return time, copied_s


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
