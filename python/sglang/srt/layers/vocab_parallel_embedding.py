"""The vocabulary, divided over the ranks of a tensor-parallel group: embedding and logits. Owns its rank's rows.

Every rank has the same number of rows. If the vocabulary does not divide, the last ranks' rows end in zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.linear import Weight
from sglang.srt.layers.weights import WeightTarget


class _VocabRows(Weight):
    """weight: (ceil(vocab_size / ranks), hidden_size)."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, group: TensorParallelGroup) -> None:
        shard = group.shard(vocab_size)
        super().__init__(shard.size, hidden_size, dtype)
        self.group = group
        self.shard = shard

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        weight = self.loaded()
        shape = (self.shard.full, weight.shape[1])
        return {f"{name}.weight": WeightTarget(weight, shape, 0, self.shard.start)}


class VocabParallelEmbedding(_VocabRows):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (num_tokens,) int64. Returns (num_tokens, hidden_size), the same on every rank."""
        if self.group.size == 1:
            return self._rows(input_ids)
        rows = input_ids - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        hidden = self._rows(rows.masked_fill_(elsewhere, 0))
        return self.group.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.rows(index)
        assert self.weight is not None
        return F.embedding(index, self.weight)


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
        self._tied = tied
        if tied is not None:
            self.weight = tied.weight

    def finish_loading(self) -> None:
        if self._tied is None:
            super().finish_loading()
            return
        self._tied.finish_loading()
        self.weight, self.packed = self._tied.weight, self._tied.packed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (num_rows, hidden_size). Returns logits of the whole vocabulary, (num_rows, vocab_size) float32, on
        every rank."""
        return self.group.all_gather(self.product(hidden), torch.float32)[:, : self.shard.full].contiguous()
