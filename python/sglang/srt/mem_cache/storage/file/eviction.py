"""Which segment of a full disk goes next, and which of its blocks are copied to another one before.

Pure functions over the times at which blocks were last used. Owns nothing, and opens no file.

Eviction by whole files loses what is used together with what is not, or keeps both. A block is *hot* if it was used
later than a quarter of all bytes were. Eviction by blocks would then keep it, with a margin: a segment is an eighth
of the limit at most. Stores that share a limit may have blocks of different sizes, in segments of about one size. The
segment that goes gives most for its price, as in Rosenblum and Ousterhout's log-structured file system (1992):

    (1 - u) * age / (1 + u)      u: share of its blocks that are hot; age: mean, since the use of its other blocks

A segment with more hot blocks than can be copied goes after those with fewer. Where none can be copied, a segment
with hot blocks goes last, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.storage.file.segment_index import Segment

# Of blocks that differ in size.
_SAMPLED_USES = 1 << 16


@dataclass(frozen=True)
class Victim:
    """hot: the slots whose blocks are copied forward before the segment goes, in ascending order."""

    segment: Segment
    hot: list[int]


@dataclass(frozen=True)
class Candidates:
    """segments: all of a store; max_copies: of blocks, which must have pages of `page_size`."""

    segments: list[Segment]
    max_copies: int
    page_size: int

    def most_copies(self, segment: Segment) -> int:
        return self.max_copies if segment.layout.page_size == self.page_size else 0


def choose_victim(stores: Sequence[Candidates], evictable: Collection[Segment]) -> Victim | None:
    """stores: that share a disk; evictable: of their segments."""
    if not evictable:
        return None
    if (empty := next((segment for segment in evictable if not segment.used), None)) is not None:
        return Victim(empty, [])
    # Over all slots, as there may be thousands of segments.
    filled = [(segment, store.most_copies(segment)) for store in stores for segment in store.segments if segment.used]
    sizes = np.array([segment.used for segment, _ in filled])
    starts = np.cumsum(sizes) - sizes
    uses = np.concatenate([segment.uses[: segment.used] for segment, _ in filled])
    newest = int(uses.max())
    slot_bytes = np.array([segment.layout.slot_bytes for segment, _ in filled])
    is_hot = uses > _end_of_first_quarter(uses, sizes, slot_bytes)
    for start, (segment, _) in zip(starts.tolist(), filled):
        if segment.spare:  # Memory has these blocks, and stores them again when it gives them up.
            is_hot[start + np.array(list(segment.spare))] = False
    is_cold = (uses > 0) & ~is_hot
    num_hot = np.add.reduceat(is_hot, starts, dtype=np.int64)
    num_cold = np.add.reduceat(is_cold, starts, dtype=np.int64)
    # Of differences, as a float has no room for the time since 1970 in ns.
    age = np.add.reduceat(np.where(is_cold, newest - uses, 0), starts, dtype=np.float64) / np.maximum(num_cold, 1)
    age[(num_cold == 0) & (num_hot == 0)] = newest
    share = num_hot / sizes
    gain = (1 - share) * age / (1 + share)
    index_of = {segment: i for i, (segment, _) in enumerate(filled)}

    def rank(segment: Segment) -> tuple[bool, float, int]:
        i = index_of[segment]
        most = filled[i][1]
        if num_hot[i] and not most:
            return True, 1.0, segment.used_ns
        return bool(num_hot[i] > most), -float(gain[i]), segment.used_ns

    victim = min(evictable, key=rank)
    i = index_of[victim]
    hot = np.flatnonzero(is_hot[starts[i] : starts[i] + victim.used])
    # The front of a prompt was used last.
    hot = np.sort(hot[np.argsort(-victim.uses[hot], kind="stable")[: filled[i][1]]])
    return Victim(victim, hot.tolist())


def _end_of_first_quarter(uses: np.ndarray, num_slots: np.ndarray, slot_bytes: np.ndarray) -> int:
    """The use of the block at a quarter of the bytes, in the order of use. uses: of all slots, 0 where there is no
    block; num_slots, slot_bytes: of each segment."""
    is_live = uses > 0
    live = uses[is_live]
    if not len(live):
        return 0
    if (slot_bytes == slot_bytes[0]).all():
        return int(np.partition(live, len(live) // 4)[len(live) // 4])
    # Of a sample, as sorting a million takes long.
    sampled = slice(None, None, 1 + len(live) // _SAMPLED_USES)
    order = np.argsort(live[sampled])
    ends = np.cumsum(np.repeat(slot_bytes, num_slots)[is_live][sampled][order])
    return int(live[sampled][order][np.searchsorted(ends, ends[-1] / 4, side="right")])
