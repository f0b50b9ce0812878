"""`SamplingPlan`: how a launch's samples are drawn, made once for as long as the same requests are sampled.

Owns the parameters as columns on the device and the places in the logits that are changed before drawing. Using it
waits for no device: what depends on a request's progress is decided from positions on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.sampling.logprobs import LogprobQuery, LogprobTensors
from sglang.srt.sampling.penalties import PenaltyTable
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.device import CPU, to_device


class SamplingPlan:
    """specs: one per sampled row. logprob_rows: the rows that want log-probabilities of their tokens, in the order of
    `begin_logprobs`."""

    def __init__(self, specs: tuple[SampleSpec, ...], vocab_size: int, device: torch.device = CPU) -> None:
        self.specs = specs
        self.device = device
        params = [spec.params for spec in specs]
        # Without positions: `info` gives them.
        self._info = SamplingBatchInfo.from_params(
            params, vocab_size, torch.empty(0, dtype=torch.int64, device=device), device
        )
        penalised = [i for i, p in enumerate(params) if p.has_penalties]
        self._penalised = _rows(penalised, device)
        if penalised:
            names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
            values = [[getattr(params[i], name) for i in penalised] for name in names]
            self._penalties = to_device(np.array(values, np.float32), device)
        biases = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        self._biased = _Places([place[:2] for place in biases], device) if biases else None
        if biases:
            self._biases = to_device(np.array([bias for *_, bias in biases], np.float32), device)
        at_least = [i for i, s in enumerate(specs) if s.params.min_new_tokens and s.stop_ids]
        self._at_least = np.array(at_least, np.int64)
        self._may_stop_from = np.array([specs[i].num_prompt + params[i].min_new_tokens for i in at_least], np.int64)
        # The rows that may not stop yet, and where their stop tokens are: the same for many launches.
        self._may_not_stop: tuple[list[int], _Places | None] = ([], None)
        self.embedding_rows = tuple(i for i, s in enumerate(specs) if s.wants_embedding)
        # Whose tokens a grammar restricts.
        self.grammar_rows = tuple(i for i, p in enumerate(params) if p.grammar is not None)
        self.logprob_rows = tuple(i for i, s in enumerate(specs) if s.logprobs is not None)
        # The same rows on the device; None for none.
        self.embedding_index = _rows(self.embedding_rows, device)
        self.grammar_index = _rows(self.grammar_rows, device)
        self._logprob_index = _rows(self.logprob_rows, device)
        if self.logprob_rows:
            self._logprob_query = LogprobQuery([s.logprobs for s in specs if s.logprobs is not None], device)

    def info(self, positions: torch.Tensor) -> SamplingBatchInfo:
        """positions: (n,) int64 on the device, index of the token to be drawn in each row's sequence."""
        return self._info.at(positions)

    def shape(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: np.ndarray, penalties: PenaltyTable
    ) -> torch.Tensor:
        """Penalties, biases and minimum lengths. logits: (n, vocab_size) float32, not changed; the same tensor comes
        back where no row asks for any. slots: (n,) int64 on the device. positions: as for `info`, on the host."""
        may_not_stop = self._stop_places(positions)
        if self._penalised is None and self._biased is None and may_not_stop is None:
            return logits
        logits = logits.clone()
        if self._penalised is not None:
            rows = self._penalised
            penalties.apply(logits, rows, slots.index_select(0, rows), self._penalties)
        if self._biased is not None:
            places = self._biased.index
            logits.index_put_(places, logits[places] + self._biases)
        if may_not_stop is not None:
            logits.index_put_(may_not_stop.index, logits.new_full((), -torch.inf))
        return logits

    def count(self, penalties: PenaltyTable, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """The rows have drawn tokens (n,) int64; slots: as for `shape`."""
        if self._penalised is not None:
            penalties.add(slots.index_select(0, self._penalised), tokens.index_select(0, self._penalised))

    def begin_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> LogprobTensors | None:
        """logits: (n, vocab_size) float32, the model's own. tokens: (n,) int64, drawn. None where no row asks, else
        of `logprob_rows`."""
        if (rows := self._logprob_index) is None:
            return None
        return self._logprob_query.begin(logits.index_select(0, rows), tokens.index_select(0, rows))

    def _stop_places(self, positions: np.ndarray) -> _Places | None:
        """Places of the stop tokens of all rows that have not reached their minimum length."""
        if not len(self._at_least):
            return None
        rows = self._at_least[positions[self._at_least] < self._may_stop_from].tolist()
        if rows != self._may_not_stop[0]:
            places = [(row, token) for row in rows for token in self.specs[row].stop_ids]
            self._may_not_stop = (rows, _Places(places, self.device) if places else None)
        return self._may_not_stop[1]


def _rows(rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """(n,) int64 on the device; None for none, which is not worth a copy."""
    return to_device(np.array(rows, np.int64), device) if rows else None


class _Places:
    """Some of a matrix's entries. index: their rows and their columns, for `tensor[index]`."""

    def __init__(self, places: Sequence[tuple[int, int]], device: torch.device) -> None:
        both = to_device(np.ascontiguousarray(np.array(places, np.int64).T), device)
        self.index = (both[0], both[1])
