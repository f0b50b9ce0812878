"""`Canary`: computes a share of the hits again while the server is idle, and has the results compared.

Owns the samples, the request that computes one, and what was found. Sees no KV: `CheckLink` compares. What follows
from a difference is done by the scheduler, see `Scheduler._distrust`.

    a hit starts  -> a sample: its tokens and namespace; no page is kept for it
    idle          -> a request of its own computes the tokens with `cache: bypass`; any other request ends it
    it ends       -> what the device still has of the hit is compared with what was computed, one operation for each
                     run of tokens that came from one tier
    a difference  -> the tier of the first run that differs is to blame; what follows may have been computed from it
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.namespaces import is_private
from sglang.srt.mem_cache.node import Node, is_ready
from sglang.srt.mem_cache.transfer import CHECK, TIER_NAMES, CheckOp, Ticket, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import Seconds

# The newest are kept; of the older ones the device may have nothing any more.
MAX_SAMPLES = 8
# Tokens of one launch: a request that comes waits for no more than those under way.
CHUNK = 128
# Of the device's pages: computing a sample evicts what is cached there.
DEVICE_SHARE = 0.25
# A sample that other requests ended so often is given up.
MAX_TRIES = 3
_COUNTS = ("checks", "equal_tokens", "different_tokens", "lost_samples")


@dataclass
class _Sample:
    namespace: str
    # (n,) int32, whole pages.
    tokens: np.ndarray
    num_tries: int = 0


class Canary:
    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        self.config = config
        # The request that computes a sample.
        self.req: Req | None = None
        self._sample: _Sample | None = None
        self._counts: Counter[str] = Counter()
        # By the name of the tier that brought what differs.
        self._differences = dict.fromkeys(TIER_NAMES, 0)
        self._cache = cache
        # Seeded, as all ranks sample alike.
        self._random = random.Random(0)
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._num_requests = 0
        # Whether a comparison of the last sample has found a difference.
        self._has_differed = False
        self._idle_since = Seconds(0.0)

    def note_hit(self, req: Req) -> None:
        """A request starts on what the cache has, for the first time."""
        rate, end = self.config.canary_rate, req.plan[-1].start
        if not rate or not end or self._random.random() >= rate:
            return
        if is_private(req.namespace):
            return
        page = self.config.page_size
        # Compared are pages with all their layers.
        num_pages = self.config.num_windowed_pages or self.config.num_usable_pages
        most = min(int(DEVICE_SHARE * num_pages) * page, self.config.max_resident_len - page)
        tokens = req.tokens[: max(0, min(end, most // page * page))].copy()
        if len(tokens):
            self._samples.append(_Sample(req.namespace, tokens))

    def note_busy(self, now: Seconds) -> None:
        """Other requests are there."""
        self._idle_since = now

    def wake_at(self, is_idle: bool) -> Seconds | None:
        """When a sample is due."""
        is_due = is_idle and bool(self._samples) and self.req is None and self._cache.ledger.oldest(CHECK) is None
        return Seconds(self._idle_since + self.config.canary_idle_s) if is_due else None

    def next_request(self, now: Seconds) -> TokenizedGenerateReqInput | None:
        """What computes the next sample, if one is due; the server is idle. `began` follows."""
        wake_at = self.wake_at(is_idle=True)
        if wake_at is None or now < wake_at:
            return None
        self._sample = self._samples.pop()
        self._num_requests += 1
        return TokenizedGenerateReqInput(
            rid=f"canary-{self._num_requests}",
            input_ids=ids_to_bytes(self._sample.tokens),
            sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0),
            extra_key=self._sample.namespace,
            cache="bypass",
        )

    def began(self, req: Req) -> None:
        self.req = req
        req.chunk_limit = max(CHUNK, self.config.page_size)

    def ended(self) -> None:
        """The request has ended, with or without a comparison."""
        self.req = None
        if self._sample is None:
            return
        self._sample.num_tries += 1
        if self._sample.num_tries < MAX_TRIES:
            self._samples.append(self._sample)
        else:
            self._counts["lost_samples"] += 1
        self._sample = None

    def compare(self) -> None:
        """The request has computed its sample, and still has its pages."""
        req, sample = self.req, self._sample
        assert req is not None and req.hold is not None and sample is not None
        page, tokens = self.config.page_size, sample.tokens
        match = self._cache.tree.match(sample.namespace, tokens).on_device()
        ready = takewhile(lambda node: is_ready(node, Tier.DEVICE) and not node.is_lossy, match.path)
        # Of partial nodes not all layers are there.
        by_tier: Callable[[Node], Tier | None] = lambda node: None if node.is_partial else node.came_from  # noqa: E731
        runs = [(tier, list(nodes)) for tier, nodes in groupby(ready, by_tier) if tier is not None]
        self._has_differed = False
        for tier, nodes in runs:
            start, end = nodes[0].start, min(nodes[-1].end, match.device_len)
            parts = [frames for node in nodes if (frames := node.frames[Tier.DEVICE]) is not None]
            cached = np.concatenate(parts)[: (end - start) // page]
            computed = req.hold.frames[start // page : end // page].copy()
            self._cache.ledger.begin_check(cached, computed, tokens[:end], tier)
        self._counts["lost_samples"] += not runs
        self._sample = None

    def complete(self, done: int, failed: int | None) -> list[Tier]:
        """Comparisons below `done` are over on all ranks. Returns the tiers to blame for what differs."""
        differing = []
        for seq in range(self._cache.ledger.num_done(CHECK), done):
            op = self._cache.ledger.end(Ticket(CHECK, seq))
            assert isinstance(op, CheckOp)
            num_tokens = len(op.src_frames) * self.config.page_size
            self._counts["checks"] += 1
            self._counts["different_tokens" if seq == failed else "equal_tokens"] += num_tokens
            if seq == failed and not self._has_differed:
                self._has_differed = True
                self._differences[TIER_NAMES[op.came_from]] += 1
                differing.append(op.came_from)
        return differing

    @property
    def num_differences(self) -> int:
        return sum(self._differences.values())

    def forget(self) -> None:
        """What was cached is not there any more."""
        self._samples.clear()

    def state(self) -> dict[str, Any] | None:
        """What `GET /hicache/state` shows; None if nothing is computed again."""
        if not self.config.canary_rate:
            return None
        return {
            "rate": self.config.canary_rate,
            "waiting": len(self._samples) + (self.req is not None),
            **{name: self._counts[name] for name in _COUNTS},
            "differences": dict(self._differences),
        }
