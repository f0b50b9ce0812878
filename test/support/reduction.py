"""`reduce_progress`: what the ranks of one model agree on, without a group of processes that reduces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang.srt.managers.progress import Progress, pack_progress, unpack_progress


def reduce_progress(ranks: Sequence[Progress]) -> Progress:
    """See `unpack_progress`. ranks: of each rank, rank 0 first."""
    return unpack_progress(np.min([pack_progress(rank) for rank in ranks], axis=0), ranks[0])
