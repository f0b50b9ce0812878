"""`LentMemory`: a lender's device pool, in slabs that it can lend, on one rank.

Owns the memory, the coordinator and the thread that overwrites slabs. Which slabs this rank may use is `LentPlaces`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.lender_coordinator import LenderCoordinator
from sglang.srt.peer.lent_places import LentOptions, LentPlaces
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.scrubber import Scrubber
from sglang.srt.peer.memory.slabs import SlabFiles
from sglang.srt.peer.protocol.lender import LenderTiming


class LentMemory(LentPlaces):
    """config.num_slabs slabs.

    pool: the engine's device pool in the slabs, of the given layout. Its scratch page, if config has one, is never
    lent. endpoint, directory, notify: see `LenderCoordinator`. Raises PeerError, SlabError, and ValueError where a
    slab has no room for a page.
    """

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        config: SlabsConfig,
        layout: PageLayout,
        notify: Callable[[], None] = lambda: None,
        options: LentOptions | None = None,
    ) -> None:
        options = options or LentOptions()
        assert not options.strict or config.device.type == "cpu", "copies for borrowers are made in host memory"
        self.slabs = reserve_slabs(config, layout.page_bytes)
        self.slabs.allocate_all()
        self.pool = ElasticPool(self.slabs, layout)
        self._thread = Scrubber(lambda slab: self.slabs.scrub(slab), notify)
        files = SlabFiles(config.num_slabs, config.slab_bytes, self.slabs.fileno)
        self.coordinator = LenderCoordinator(
            endpoint,
            directory,
            files,
            notify,
            options.strict,
            LenderTiming.of(options.timing),
            num_lendable=options.num_lendable,
        )
        super().__init__(self.coordinator, self._thread, config.num_slabs, self.slabs.slab_bytes, options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "slab_padding_bytes": self.pool.slab_padding_bytes}

    def close(self) -> None:
        """Ends the threads. Borrowers keep what they have until they give it back or end."""
        self.coordinator.close()
        self._thread.close()
