"""`PenaltyTable`: how often each running request has generated each token. Owned by the executor, on its stream.

Frequency, presence and repetition penalties look at the tokens that a request has generated, not at its prompt, as in
SGLang. Memory is taken only when the first request asks for one: 2 bytes per slot and word of the vocabulary.
"""

from __future__ import annotations

import torch

from sgl_kernel import sampling as kernels
from sgl_kernel.cpu import sampling as cpu_sampling
from sgl_kernel.cpu.library import takes
from sglang.srt.utils.device import CPU

# What 2 bytes hold. A token that was generated more often counts as so often.
_MOST = (1 << 15) - 1


class PenaltyTable:
    """All tensors, those of the arguments too, are on `device`; nothing here waits for it."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device = CPU) -> None:
        self._shape = (max_slots, vocab_size)
        self._device = device
        self._counts: torch.Tensor | None = None

    def start(self, slot: int, tokens: torch.Tensor) -> None:
        """A request takes the slot; tokens: (n,) int64, what it has generated so far."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int16, device=self._device)
        row = torch.zeros(self._shape[1], dtype=torch.int32, device=self._device)
        row.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        self._counts[slot] = row.clamp_(max=_MOST)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Each of slots (n,), all different, has generated one more token (n,) int64."""
        assert self._counts is not None
        counts = self._counts[slots, tokens]
        self._counts[slots, tokens] = counts + (counts < _MOST)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> None:
        """Changes rows (n,) int64, all different, of logits, (num_rows, vocab_size) float32. slots: (n,) int64.
        penalties: (3, n) float32, frequency, presence and repetition; 0, 0, 1 change nothing.

        Of tokens that were generated. repetition: positive ones divided, negative ones multiplied (Keskar et al.,
        CTRL). frequency: subtracted for each time. presence: subtracted once (OpenAI's API reference).
        """
        assert self._counts is not None
        if takes(logits) or kernels.has_triton(logits):
            penalize = cpu_sampling.penalize if logits.is_cpu else kernels.penalize
            penalize(logits, rows, slots, self._counts, penalties)
            return
        counts, some = self._counts[slots], logits.index_select(0, rows)
        was_generated = counts > 0
        frequency, presence, factor = penalties[:, :, None]
        some = torch.where(was_generated, torch.where(some > 0, some / factor, some * factor), some)
        logits.index_copy_(0, rows, some - counts * frequency - was_generated * presence)
