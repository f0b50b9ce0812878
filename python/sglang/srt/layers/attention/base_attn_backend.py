"""The interface that every attention backend implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments


@dataclass(frozen=True)
class AttentionMetadata:
    """What a forward pass needs beside the segments, the same for every layer.

    q_lens: number of query tokens per request, in the order in which their rows stand in q.
    scale: factor on q.k, normally head_dim ** -0.5.
    """

    q_lens: tuple[int, ...]
    scale: float


@dataclass(frozen=True)
class BatchKey:
    """What a backend's plan was made for, so that all layers of a forward pass but the first find it again. It holds
    the segments themselves (not their id()): no others can come to lie at the same address."""

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


class AttentionBackend(Protocol):
    """capturing: set by whoever captures a CUDA graph, before the forward passes that warm up for it and until the
    capture is over. What `forward` does with a `PagedSegments` of one query each then depends on the batch's size
    only, and may be captured if it has run once before with that very object: memory is allocated then, kernels are
    compiled, plans are made. False at first."""

    capturing: bool

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """Attention of a batch; every request attends to all its segments, merged by log-sum-exp.

        q: (num_tokens, num_q_heads, head_dim), the requests' rows one after the other. segments: a list per
        request. Returns (num_tokens, num_q_heads, head_dim) in q's dtype. The KV of the batch's own tokens is
        already in the pool.
        """
        ...

    def before_replay(self, segments: PagedSegments) -> None:
        """A CUDA graph that a decode's `forward` was captured in is about to be replayed with what segments holds
        now, the numpy arrays too. What is captured reads kv_lens, starts and table on the device and nothing of them
        on the host; who plans on the host does so again here."""
        ...

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one request's queries to one segment.

        q: (q_len, num_q_heads, head_dim). Returns out of the same shape, float32, and lse (q_len, num_q_heads)
        float32, natural logarithm; an empty segment gives zeros and -inf.
        """
        ...
