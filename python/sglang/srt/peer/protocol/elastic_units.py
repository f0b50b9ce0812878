"""How much a lender lends, and in what pieces: pure functions over numbers (SwiftCache 3.2, 3.4).

Owns no memory and reads no clock: the caller passes the time.

The *lender* is the paper's worker, the *borrower* its master. A page is the paper's block, all layers, K and V.
What differs from the paper:

- Units are counted in bytes, not in elements (Eq. 6-9): the paper leaves out K and V and the dtype, in which models
  differ too. A page's bytes are `PageLayout.page_bytes`.
- A unit is a *slab*, which is mapped as a whole: it is a multiple of the mapping granularity as well.
- Where the least common multiple is huge (page sizes without common factors), the slab is padded instead.
- Demand is what requests needed at the same time, where the paper looks at the longest single request, and so lends
  away what its second request would have needed.
- The layer stream cache may have several buffers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.utils.time_units import Seconds

WINDOW_S = 60.0


@dataclass(frozen=True)
class ElasticUnit:
    """A slab, the pages of each side that it holds, and the padding that each side cannot use. All sizes in bytes.

    A lender with borrowers of several page sizes still has slabs of one size. Each borrower then has a unit of its
    own, with the same slab_bytes and lender_page_bytes.
    """

    slab_bytes: int
    lender_page_bytes: int
    borrower_page_bytes: int

    def __post_init__(self) -> None:
        if min(self.lender_page_bytes, self.borrower_page_bytes) < 1:
            raise ValueError(f"pages of {self.lender_page_bytes} and {self.borrower_page_bytes} bytes")
        if self.slab_bytes < max(self.lender_page_bytes, self.borrower_page_bytes):
            raise ValueError(
                f"a slab of {self.slab_bytes:,} bytes holds no page of {self.lender_page_bytes:,} (lender) or "
                f"{self.borrower_page_bytes:,} bytes (borrower): use larger slabs or a smaller page size"
            )

    @property
    def lender_pages(self) -> int:
        """The paper's MEU_i."""
        return self.slab_bytes // self.lender_page_bytes

    @property
    def borrower_pages(self) -> int:
        """The paper's MEU_m."""
        return self.slab_bytes // self.borrower_page_bytes

    @property
    def lender_padding(self) -> int:
        return self.slab_bytes % self.lender_page_bytes

    @property
    def borrower_padding(self) -> int:
        return self.slab_bytes % self.borrower_page_bytes


def elastic_unit(
    lender_page_bytes: int,
    borrower_page_bytes: int,
    granularity: int,
    max_slab_bytes: int,
    padded_slab_bytes: int,
) -> ElasticUnit:
    """The unit in which a lender and a borrower exchange memory: SwiftCache Eq. 8 and 9, in bytes.

    granularity: what can be mapped on its own: 2 MiB on GPUs, a page of the system on the CPU. Where the least
    common multiple of all three is at most max_slab_bytes, that is the slab, without padding. Else the slab
    is a multiple of lcm(lender page, granularity), so that only the borrower has padding, less than one page of its
    own; or, where even one such multiple is too large, of the granularity alone. It is the smallest one of at least
    padded_slab_bytes and one page of each, or the largest one that is permitted. Raises ValueError where no slab
    holds a page of each.
    """
    if min(lender_page_bytes, borrower_page_bytes, granularity, padded_slab_bytes) < 1:
        raise ValueError("page sizes, granularity and slab size have to be at least 1 byte")
    if padded_slab_bytes > max_slab_bytes:
        raise ValueError(f"slabs of at least {padded_slab_bytes:,} and at most {max_slab_bytes:,} bytes")
    exact = math.lcm(lender_page_bytes, borrower_page_bytes, granularity)
    if exact <= max_slab_bytes:
        return ElasticUnit(exact, lender_page_bytes, borrower_page_bytes)
    larger_page = max(lender_page_bytes, borrower_page_bytes)
    for multiple in (math.lcm(lender_page_bytes, granularity), granularity):
        smallest = _round_up(max(padded_slab_bytes, larger_page), multiple)
        slab_bytes = min(smallest, max_slab_bytes // multiple * multiple)
        if slab_bytes >= larger_page:
            return ElasticUnit(slab_bytes, lender_page_bytes, borrower_page_bytes)
    raise ValueError(
        f"a page of {larger_page:,} bytes, mapped in pieces of {granularity:,}, needs slabs of "
        f"{_round_up(larger_page, granularity):,}, but {max_slab_bytes:,} are permitted: permit larger slabs or use "
        "a smaller page size"
    )


def stride_bytes(slab_bytes: int, page_bytes: int, granularity: int) -> int:
    """How far apart a range's slabs lie, at least, so that all its pages have one stride."""
    return _round_up(slab_bytes, math.lcm(page_bytes, granularity))


def scale_up(num_pages: int, needed_pages: int, unit: ElasticUnit) -> tuple[int, int]:
    """Pages that the lender gets back and the borrower gives up, in whole units (Algorithm 1, SCALEUP).

    num_pages: what the lender has now. needed_pages: of its requests at the same time, the new one included. The
    result may be more than is lent; the caller has to check that.
    """
    return _whole_units(-(-max(0, needed_pages - num_pages) // unit.lender_pages), unit)


def scale_down(num_pages: int, peak_pages: int, unit: ElasticUnit) -> tuple[int, int]:
    """Pages that the lender can lend and the borrower gets, in whole units (Algorithm 1, SCALEDOWN).

    num_pages: what the lender has now. peak_pages: the most that its requests needed at the same time lately, see
    `DemandWindow`.
    """
    return _whole_units(max(0, num_pages - peak_pages) // unit.lender_pages, unit)


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


def _whole_units(num_units: int, unit: ElasticUnit) -> tuple[int, int]:
    return num_units * unit.lender_pages, num_units * unit.borrower_pages


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
