"""How much a lender lends, and how slabs lie: pure functions over numbers (SwiftCache 3.2, 3.4).

Owns no memory and reads no clock: the caller passes the time.

The *lender* is the paper's worker, the *borrower* its master. A page is the paper's block, all layers, K and V.
What differs from the paper:

- The unit is a *slab* of a size that both sides are given. Each side has padding, less than a page of its own per
  slab. The paper takes a multiple of both pages (Eq. 6-9); docs/design/decisions.md has why this does not.
- Sizes are counted in bytes, not in elements: the paper leaves out K and V and the dtype, in which models differ too.
  A page's bytes are `PageLayout.page_bytes`.
- Demand is what requests needed at the same time, where the paper looks at the longest single request, and so lends
  away what its second request would have needed.
- The layer stream cache may have several buffers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from sglang.srt.utils.time_units import Seconds

WINDOW_S = 60.0


def stride_bytes(slab_bytes: int, page_bytes: int, granularity: int) -> int:
    """How far apart a range's slabs lie, at least, so that all its pages have one stride."""
    return _round_up(slab_bytes, math.lcm(page_bytes, granularity))


def scratch_bytes(page_bytes: int, granularity: int) -> int:
    """What one page behind the last slab takes."""
    return _round_up(page_bytes, granularity)


def pages_of_slabs(size_bytes: int, slab_bytes: int, page_bytes: int, granularity: int) -> int:
    """How many pages lie in the whole slabs that size_bytes of memory hold, beside one page behind the last slab."""
    num_slabs = max(0, size_bytes - scratch_bytes(page_bytes, granularity)) // slab_bytes
    return num_slabs * (slab_bytes // page_bytes)


def scale_up(num_pages: int, needed_pages: int, slab_pages: int) -> int:
    """Slabs that a lender lacks (Algorithm 1, SCALEUP).

    num_pages: what the lender has now. needed_pages: of its requests at the same time, the new one included. The
    result may be more than is lent; the caller has to check that.
    """
    return -(-max(0, needed_pages - num_pages) // slab_pages)


def scale_down(num_pages: int, peak_pages: int, slab_pages: int) -> int:
    """Slabs that a lender can lend (Algorithm 1, SCALEDOWN).

    num_pages: what the lender has now. peak_pages: the most that its requests needed at the same time lately, see
    `DemandWindow`.
    """
    return max(0, num_pages - peak_pages) // slab_pages


class DemandWindow:
    """The most pages that requests needed at the same time in the last window_s seconds.

    A demand holds from one call of `add` to the next: one that has not changed for longer than the window still
    counts. Times are seconds of one clock that never goes back. O(1) per call, amortised.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        # (until when it was the demand, pages), pages descending: a demand below a later one can never be the peak
        # again. The last entry is the demand now.
        self._peaks: deque[tuple[float, int]] = deque()
        self._now = -math.inf

    def add(self, now: Seconds, pages: int) -> None:
        """From now on, requests need so many pages: running ones, and those that wait for memory."""
        self._advance(now)
        if self._peaks:
            self._peaks[-1] = (now, self._peaks[-1][1])
        while self._peaks and self._peaks[-1][1] <= pages:
            self._peaks.pop()
        self._peaks.append((math.inf, pages))

    def peak(self, now: Seconds) -> int:
        """The largest demand in the window; 0 if there was none yet."""
        self._advance(now)
        while self._peaks and self._peaks[0][0] + self.window_s <= now:
            self._peaks.popleft()
        return self._peaks[0][1] if self._peaks else 0

    @property
    def falls_at(self) -> float | None:
        """When the peak falls, if the demand does not change; None if never."""
        until = self._peaks[0][0] if self._peaks else math.inf
        return until + self.window_s if until < math.inf else None

    def _advance(self, now: Seconds) -> None:
        assert now >= self._now, f"time went back from {self._now} to {now}"
        self._now = now


def layer_stream_sizes(
    k_master: int, k_workers: Sequence[int], num_layers: int, num_buffers: int = 1
) -> tuple[int, int]:
    """(N_LSC, N_RC): blocks of a layer in each buffer of the layer stream cache, and whole blocks in the regular one.

    k_master: blocks of a single layer that the master's memory holds (Eq. 3). k_workers: whole blocks that each
    worker lends (Eq. 2). num_buffers: layers that are in the stream cache at the same time, the paper's is 1:

        N_LSC = min(sum of k_workers, floor(k_master / num_buffers))      Eq. 4
        N_RC  = floor((k_master - num_buffers * N_LSC) / num_layers)      Eq. 5

    The longest context is N_LSC + N_RC blocks.
    """
    if num_layers < 1 or num_buffers < 1 or min(k_master, *k_workers, 0) < 0:
        raise ValueError(
            f"{num_layers} layers, {num_buffers} buffers, {k_master} blocks of the master and {list(k_workers)} of "
            "workers: there has to be a layer and a buffer, and no fewer than 0 blocks"
        )
    num_streamed = min(sum(k_workers), k_master // num_buffers)
    return num_streamed, (k_master - num_buffers * num_streamed) // num_layers


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
