"""The interface that every attention backend implements."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments

if TYPE_CHECKING:
    from sglang.srt.layers.attention.latent_expansion import LatentExpansion


@dataclass(frozen=True)
class AttentionMetadata:
    """Parameters beside the segments: of a forward pass q_lens, and of its layers, all or one of them, the others."""

    # Number of query tokens per request, in the order of their rows in q.
    q_lens: tuple[int, ...]
    # Factor on q.k, normally head_dim ** -0.5.
    scale: float
    # Tokens that a query sees, itself included; None for all.
    window: int | None = None
    # Scores are softcap * tanh(score / softcap).
    softcap: float | None = None
    # (num_q_heads,): a score that takes part in the softmax and has no value.
    sinks: torch.Tensor | None = None

    @property
    def is_ordinary(self) -> bool:
        """Any backend computes it."""
        return self.window is None and self.softcap is None and self.sinks is None


# Kernels read keys and values in tiles of at most so many tokens. Of a tile that begins before a window, what is
# hidden has a weight of 0, but has to be finite.
WINDOW_TILE = 128


@dataclass(frozen=True)
class PartialMask:
    """What hides tokens of a segment from queries, or caps scores. window, softcap: as in `AttentionMetadata`.
    distance: the first query follows the segment's first token by so many."""

    window: int | None
    softcap: float | None
    distance: int


@dataclass(frozen=True)
class BatchKey:
    """The batch for which a backend has made its plan, so that all layers but the first find the plan again. It holds
    the segments themselves (not their id()), so that no other segments can come to lie at the same address."""

    segments: tuple[tuple[KVSegment, ...], ...]
    page_size: int
    q_lens: tuple[int, ...]

    @classmethod
    def of(cls, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> BatchKey:
        assert len(segments) == len(q_lens), f"{len(segments)} requests, {len(q_lens)} query lengths"
        for of_req, q_len in zip(segments, q_lens):
            assert not any(segment.causal for segment in of_req[:-1]), "only the last segment may be causal"
            if of_req and of_req[-1].causal:
                assert of_req[-1].length == q_len, "a causal segment's tokens are the queries"
        return cls(tuple(tuple(of_req) for of_req in segments), page_size, q_lens)

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        if page_size != self.page_size or q_lens != self.q_lens or len(segments) != len(self.segments):
            return False
        return all(
            len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs))
            for mine, theirs in zip(self.segments, segments)
        )


class Matching(Protocol):
    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        """Whether a plan was made for this batch."""
        ...


_Plan = TypeVar("_Plan", bound=Matching)


class RecentPlans(Generic[_Plan]):
    """The plans of the last two batches, by their segments. A batch has other segments for layers with a window where
    these have a pool of their own, and a backend works on both in turn."""

    def __init__(self) -> None:
        # The newest first.
        self._plans: deque[_Plan] = deque(maxlen=2)

    def find(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> _Plan | None:
        for plan in self._plans:
            if plan.matches(segments, page_size, q_lens):
                return plan
        return None

    def keep(self, plan: _Plan) -> _Plan:
        self._plans.appendleft(plan)
        return plan


def longest_request(segments: Sequence[list[KVSegment]]) -> int:
    """Its keys. A window of as many hides none."""
    if isinstance(segments, PagedSegments):
        return int(segments.kv_lens.max(initial=0))
    return max((sum(segment.length for segment in of_req) for of_req in segments), default=0)


class AttentionBackend(Protocol):
    """capturing: set around the capture of a CUDA graph, and before the forward passes that warm up for it. False at
    first. While it is set, the work of `forward` with a `PagedSegments` of one query each depends on the batch's size
    only. It may be captured if it has run once before with the same object: then memory is allocated, kernels are
    compiled and plans are made. captures_extends: whether that holds for any numbers of queries, too, with as many
    rows as q has; the last request then has none. long_extend_len: known behind a batch with extends, the fewest
    queries of a request for which other kernels are compiled than for a few; None where there are no others.
    computes_masked: whether `forward` takes windows, capped scores and sinks, and `partial` a mask. expansion: what
    computes long extends of latents; None where `forward` computes all of them."""

    capturing: bool
    captures_extends: bool
    computes_masked: bool

    @property
    def expansion(self) -> LatentExpansion | None: ...

    @property
    def long_extend_len(self) -> int | None: ...

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """Attention of a batch; every request attends to all its segments, merged by log-sum-exp.

        q: (num_tokens, num_q_heads, head_dim), the requests' rows one after the other. view.k: (num_pages,
        page_size, num_kv_heads, head_dim). view.v: (num_pages, page_size, num_kv_heads, value_dim); it may be a part
        of view.k's memory, with the strides of that. segments: a list per request. Returns (num_tokens,
        num_q_heads, value_dim) in q's dtype. The KV of the batch's own tokens is already in the pool.
        """
        ...

    def before_replay(self, segments: PagedSegments) -> None:
        """Called before a replay of a CUDA graph in which `forward` was captured, with the current content of
        segments, the numpy arrays too. The captured work reads kv_lens, starts and table on the device and none of
        them on the host. A backend that plans on the host plans again in this call."""
        ...

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one request's queries to one segment.

        q: (q_len, num_q_heads, head_dim). mask: of a single query it hides nothing. Returns out (q_len,
        num_q_heads, value_dim) float32, and lse (q_len, num_q_heads) float32, natural logarithm; a query that sees
        no token has zeros and -inf.
        """
        ...
