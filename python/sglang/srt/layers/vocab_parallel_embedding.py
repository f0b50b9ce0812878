"""The vocabulary, divided over the ranks of a tensor-parallel group: embedding and logits. Owns its rank's rows.

Every rank has the same number of rows. If the vocabulary does not divide, the last ranks' rows end in zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.weights import WeightTarget


class _VocabRows(nn.Module):
    """weight: (ceil(vocab_size / ranks), hidden_size)."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, group: TensorParallelGroup) -> None:
        super().__init__()
        self.group = group
        self.shard = group.shard(vocab_size)
        self.weight = nn.Parameter(torch.empty(self.shard.size, hidden_size, dtype=dtype), requires_grad=False)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        shape = (self.shard.full, self.weight.shape[1])
        return {f"{name}.weight": WeightTarget(self.weight, shape, 0, self.shard.start)}


class VocabParallelEmbedding(_VocabRows):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (num_tokens,) int64. Returns (num_tokens, hidden_size), the same on every rank."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        hidden = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self.group.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0))


class ParallelLMHead(_VocabRows):
    """tied: the embedding whose rows these are; None for rows of its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        group: TensorParallelGroup,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(vocab_size, 0 if tied else hidden_size, dtype, group)
        if tied is not None:
            self.weight = tied.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (num_rows, hidden_size). Returns logits of the whole vocabulary, (num_rows, vocab_size) float32, on
        every rank."""
        return self.group.all_gather(F.linear(hidden, self.weight))[:, : self.shard.full].float()
