"""`SimulatedStream`: the layer stream cache of a simulation. Moves nothing; owns when buffers are filled and read.

Every number that comes out of it is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.transfer import Tier

# (tier, frames on it) -> seconds to copy one layer of the pages to a buffer while the link carries nothing else.
CopySeconds = Callable[[Tier, np.ndarray], float]
# Differences below this are rounding.
SAME_S = 1e-10
Parts = Sequence[tuple[Tier, np.ndarray]]


@dataclass(frozen=True)
class PieceCost:
    """Seconds that one piece of a layer costs."""

    # Seconds of the copies, by the tier that they come from.
    copy_s: tuple[tuple[Tier, float], ...]
    # Seconds of attention over the piece.
    attend_s: float
    # The sum of copy_s: seconds of all copies while nothing else is on the links.
    alone_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone_s", sum(seconds for _, seconds in self.copy_s))


class SimulatedStream:
    """num_buffers buffers of buffer_pages pages of one layer, as in `LayerStreamCache`.

    Pieces are copied one after another, over all layers and launches. The copy of piece n starts at

        max(its submission, the arrival of piece n - 1, the end of reading piece n - num_buffers)

    Attention reads a piece from its arrival on, but not before the computation in front of it has ended. The rest of
    a layer is computed behind its last piece, while the next pieces arrive.

    Loads that were submitted before the launch share their link evenly with its copies: a copy takes twice as long
    while such a load is under way. The loads themselves are not slowed. Loads that are submitted later slow only the
    next launch, as everything does that runs beside a launch.
    """

    def __init__(self, num_buffers: int, buffer_pages: int, copy_seconds: CopySeconds) -> None:
        self._buffer_pages = buffer_pages
        self._copy_seconds = copy_seconds
        self._free_at = 0.0
        # When each buffer's last piece has been read; the first entry is the next buffer to fill.
        self._read = deque([0.0] * num_buffers, maxlen=num_buffers)
        self._submitted = 0.0
        self._owed: dict[Tier, float] = {}
        # The parts that were cut last, with their pieces: long parts stay the same from launch to launch.
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
        """Start the account of one launch. loads_s: by tier, the seconds for which its link has loads to carry from
        the launch's start on."""
        self._submitted = submitted
        self._owed = {tier: seconds for tier, seconds in loads_s.items() if seconds}

    def layer(self, pieces: Sequence[PieceCost], time: float) -> tuple[float, float]:
        """Do one layer whose computation before attention ends at `time`. Returns when all pieces have been read, and
        the seconds of the copies."""
        # A long request has thousands of pieces, so this loop makes no calls that it does not need.
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
        """Do num_layers layers that wait for no loads, each with rest_s behind its pieces. Once a layer leaves the
        same state as the one before, the remaining layers are computed at once. Returns when the last layer ends, and
        the seconds of the copies."""
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
        """Seconds of a copy that shares its link with loads."""
        seconds = piece.alone_s
        for tier, alone in piece.copy_s:
            owed = self._owed.pop(tier, 0.0)
            shared = min(alone, owed)
            if owed > shared:
                self._owed[tier] = owed - shared
            seconds += shared
        return seconds


def cut(parts: Parts, buffer_pages: int) -> list[list[tuple[Tier, np.ndarray]]]:
    """Pieces of buffer_pages pages, each a list of runs of one tier. The last piece may be shorter."""
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
