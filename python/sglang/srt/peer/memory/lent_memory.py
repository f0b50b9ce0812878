"""`LentMemory`: a lender's device pool, in slabs that it can lend, on one rank.

Owns the memory, the coordinator and the thread that overwrites slabs. Which slabs this rank may use is `LentPlaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hybrid_pages import regions_of
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.lent_places import LentOptions, LentPlaces
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.scrubber import Scrubber
from sglang.srt.peer.memory.slabs import SlabFiles
from sglang.srt.peer.protocol.lender import LenderLimits, LenderTiming


def allocate_pool(
    config: SlabsConfig, layout: PageLayout, windowed: Sequence[bool] = (), num_windowed_pages: int = 0
) -> ElasticPool:
    """A device pool of config.num_slabs slabs that can be lent. Its scratch page, if config has one, never is. Raises
    SlabError, and ValueError where a slab has no room for a page."""
    in_slabs = regions_of(layout, 0, windowed, num_windowed_pages)[0][1]
    slabs = reserve_slabs(config, in_slabs.page_bytes)
    slabs.allocate_all()
    return ElasticPool(slabs, layout, windowed, num_windowed_pages)


class LentMemory(LentPlaces):
    """pool: the engine's device pool, as of `allocate_pool`. endpoint, directory, notify: see `LenderCoordinator`.
    Raises PeerError."""

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        pool: ElasticPool,
        notify: Callable[[], None] = lambda: None,
        options: LentOptions | None = None,
    ) -> None:
        options = options or LentOptions()
        assert not options.strict or pool.kv.is_cpu, "copies for borrowers are made in host memory"
        self.pool, self.slabs = pool, pool.slabs
        num_slabs, slab_bytes = self.slabs.num_slabs, self.slabs.slab_bytes
        self._thread = Scrubber(lambda slab: self.slabs.scrub(slab), notify)
        files = SlabFiles(num_slabs, slab_bytes, self.slabs.fileno)
        self.coordinator = LenderCoordinator(
            endpoint,
            directory,
            files,
            notify,
            options.strict,
            LenderTiming.of(options.timing),
            limits=LenderLimits(options.num_lendable, options.num_ranks),
        )
        super().__init__(self.coordinator, self._thread, num_slabs, slab_bytes, options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "slab_padding_bytes": self.pool.slab_padding_bytes}

    def close(self) -> None:
        """Ends the threads. Borrowers keep what they have until they give it back or end."""
        self.coordinator.close()
        self._thread.close()
