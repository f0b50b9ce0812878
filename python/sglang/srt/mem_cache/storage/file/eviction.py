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
    uses = np.concatenate([segment.uses[: segment.used] for segment in segments])
    uses = uses[uses > 0]
    newest = int(uses.max(initial=0))
    hot_since = int(np.partition(uses, len(uses) // 4)[len(uses) // 4]) if len(uses) else 0

    def rank(segment: Segment) -> tuple[bool, float]:
        is_hot = _are_hot(segment, hot_since)
        num_hot = int(np.count_nonzero(is_hot))
        most = max_copies if segment.layout.page_size == page_size else 0
        if num_hot and not most:
            return True, segment.used_ns
        cold = segment.uses[: segment.used][~is_hot]
        # Of differences, as a float has no room for the time since 1970 in ns.
        ages = newest - cold[cold > 0]
        age = float(ages.mean()) if len(ages) else float(newest if not num_hot else 0)
        share = num_hot / max(1, segment.used)
        return num_hot > most, -(1 - share) * age / (1 + share)

    segment = min(evictable, key=rank)
    if segment.layout.page_size != page_size:
        return Victim(segment, [])
    hot = np.flatnonzero(_are_hot(segment, hot_since))
    # The front of a prompt was used last.
    hot = np.sort(hot[np.argsort(-segment.uses[hot], kind="stable")[:max_copies]])
    return Victim(segment, hot.tolist())


def _are_hot(segment: Segment, hot_since: int) -> np.ndarray:
    """(used slots,) bool. Memory has spare blocks, and stores them again when it gives them up."""
    is_hot: np.ndarray = segment.uses[: segment.used] > hot_since
    if segment.spare:
        is_hot[list(segment.spare)] = False
    return is_hot
