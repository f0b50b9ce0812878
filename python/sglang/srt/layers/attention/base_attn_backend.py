"""The interface that every attention backend implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.mem_cache.kv_view import KVSegment, KVView


@dataclass(frozen=True)
class AttentionMetadata:
    """What a forward pass needs beside the segments, the same for every layer.

    q_lens: number of query tokens per request, in the order in which their rows stand in q.
    scale: factor on q.k, normally head_dim ** -0.5.
    """

    q_lens: tuple[int, ...]
    scale: float


class AttentionBackend(Protocol):
    def forward(
        self, q: torch.Tensor, view: KVView, segments: list[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """Attention of a batch; every request attends to all its segments, merged by log-sum-exp.

        q: (num_tokens, num_q_heads, head_dim), the requests' rows one after the other. segments: a list per
        request. Returns (num_tokens, num_q_heads, head_dim) in q's dtype. The KV of the batch's own tokens is
        already in the pool.
        """
        ...

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one request's queries to one segment.

        q: (q_len, num_q_heads, head_dim). Returns out of the same shape, float32, and lse (q_len, num_q_heads)
        float32, natural logarithm; an empty segment gives zeros and -inf.
        """
        ...
