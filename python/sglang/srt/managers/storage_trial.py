"""`StorageTrial`: what shows whether reads of a store work again, or are faster again, while no request waits for it.

Owns one operation at a time: a probe for the first block of some prompt, then the read of that block. No request
waits for it. What it reads is thrown away, as the request has begun to compute by then.
"""

from __future__ import annotations

import math

import numpy as np

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.storage_breaker import SOUND_S, TRIAL_PAUSE_S, StorageBreaker
from sglang.srt.managers.storage_setup import others_than
from sglang.srt.mem_cache.block_keys import NO_KEYS
from sglang.srt.mem_cache.frame_table import FrameState
from sglang.srt.mem_cache.transfer import FETCH_LINKS, PROBE, StorageAction, StorageOp, Ticket, Tier
from sglang.srt.utils.time_units import NO_LAUNCH, Seconds

# At most that long between two reads that may show that storage is not slow any more; at first TRIAL_PAUSE_S.
_MAX_DOUBT_PAUSE_S = Seconds(32.0)


class StorageTrial:
    """ticket: of what is under way. num_pages: host pages that it reads into. place: the store's, of num_stores."""

    def __init__(self, controller: HiCacheController, breaker: StorageBreaker, place: int = 0) -> None:
        self.ticket: Ticket | None = None
        self.num_pages = 0
        self.num_stores = 0
        self._place = place
        self._controller = controller
        self._breaker = breaker
        self._key = NO_KEYS
        self._doubted_at, self._doubt_pause_s = Seconds(-math.inf), TRIAL_PAUSE_S

    def begin(self, key: np.ndarray) -> None:
        """Ask for a block. key: (1, 16) uint8."""
        assert self.ticket is None, "a trial is under way"
        self._key = key
        self.ticket = self._controller.ledger.begin_storage_op(PROBE, StorageAction.EXISTS, key, skips=self._skips)

    def begin_doubt(self, key: np.ndarray, is_slow: bool) -> None:
        """Now and then, while reads look too slow to be worth it, and would not be measured again. is_slow: whether
        they do now."""
        now = self._breaker.now
        if not is_slow:
            if now >= self._doubted_at + SOUND_S:
                self._doubt_pause_s = TRIAL_PAUSE_S
        elif self.ticket is None and now >= self._doubted_at + self._doubt_pause_s:
            self._doubted_at, self._doubt_pause_s = now, Seconds(min(2 * self._doubt_pause_s, _MAX_DOUBT_PAUSE_S))
            self.begin(key)

    def end_probe(self, found: bool) -> None:
        """Read the block if it is there; if not, the trial has shown only that probes are answered."""
        self.ticket = None
        controller, names = self._controller, self._controller.tree.names.keys
        if names is None:
            return
        if not found:
            if self._breaker.is_open:
                self._breaker.end_empty_trial()
            return
        num_pages = names.block_tokens // controller.tree.page_size
        if not controller.make_room(Tier.HOST, num_pages, (), spares_pinned=True):
            if self._breaker.is_open:
                self._breaker.end_unread_trial()
            return
        frames = controller.tables[Tier.HOST].allocate(num_pages, FrameState.HELD)
        assert frames is not None, "there was room"
        self.ticket = controller.ledger.begin_storage_op(
            self._link, StorageAction.GET, self._key, frames, skips=self._skips
        )
        self.num_pages = num_pages

    def end_read(self, op: StorageOp, count: int) -> None:
        self.ticket, self.num_pages = None, 0
        self._controller.tables[Tier.HOST].free_after(op.frames, FrameState.HELD, NO_LAUNCH)
        self._breaker.end(self._link, succeeded=count > 0)

    @property
    def _link(self) -> str:
        return FETCH_LINKS[self._place]

    @property
    def _skips(self) -> tuple[int, ...]:
        return others_than(self._place, self.num_stores)
