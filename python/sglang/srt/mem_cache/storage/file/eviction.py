"""Which segment of a full disk goes next, and which of its blocks are copied to another one before.

Pure functions over the times at which blocks were last used. Owns nothing, and opens no file.

Eviction by whole files loses what is used together with what is not, or keeps both. A block is *hot* if it was used
later than a quarter of all blocks were. Eviction by blocks would then keep it, with a margin: a segment is an eighth
of the limit at most. The segment that goes gives most for its price, as in Rosenblum and Ousterhout's log-structured
file system (1992):

    (1 - u) * age / (1 + u)      u: share of its blocks that are hot; age: mean, since the use of its other blocks

A segment with more hot blocks than can be copied goes after those with fewer. Where none can be copied, a segment
with hot blocks goes last, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.storage.file.segment_index import Segment


@dataclass(frozen=True)
class Victim:
    """hot: the slots whose blocks are copied forward before the segment goes, in ascending order."""

    segment: Segment
    hot: list[int]


def choose_victim(
    segments: Iterable[Segment], evictable: Collection[Segment], max_copies: int, page_size: int
) -> Victim | None:
    """segments: all, with the evictable ones; max_copies: of blocks, which must have pages of `page_size`."""
    if not evictable:
        return None
    if (empty := next((segment for segment in evictable if not segment.used), None)) is not None:
        return Victim(empty, [])
    # Over all slots, as there may be thousands of segments.
    filled = [segment for segment in segments if segment.used]
    sizes = np.array([segment.used for segment in filled])
    starts = np.cumsum(sizes) - sizes
    uses = np.concatenate([segment.uses[: segment.used] for segment in filled])
    live = uses[uses > 0]
    newest = int(live.max(initial=0))
    is_hot = uses > (np.partition(live, len(live) // 4)[len(live) // 4] if len(live) else 0)
    for start, segment in zip(starts.tolist(), filled):
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
    index_of = {segment.number: i for i, segment in enumerate(filled)}

    def rank(segment: Segment) -> tuple[bool, float, int]:
        i = index_of[segment.number]
        most = max_copies if segment.layout.page_size == page_size else 0
        if num_hot[i] and not most:
            return True, 1.0, segment.used_ns
        return bool(num_hot[i] > most), -float(gain[i]), segment.used_ns

    victim = min(evictable, key=rank)
    if victim.layout.page_size != page_size:
        return Victim(victim, [])
    start = starts[index_of[victim.number]]
    hot = np.flatnonzero(is_hot[start : start + victim.used])
    # The front of a prompt was used last.
    hot = np.sort(hot[np.argsort(-victim.uses[hot], kind="stable")[:max_copies]])
    return Victim(victim, hot.tolist())
