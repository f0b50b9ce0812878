"""Log-probabilities of tokens, from logits: found where the logits are, told where the host is.

Between the two lies one copy of one tensor, so that a stream need not wait for it: `LogprobQuery.begin` on the
stream, a copy of `LogprobTensors.packed` whenever it suits, `LogprobTensors.finish` once that has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.utils.device import CPU, to_device


@dataclass(frozen=True)
class LogprobTensors:
    """What was found for `specs`, one per row. packed: (k,) int32, beside the logits; it holds one after the other:

    token            (n,)           int32
    its logprob      (n,)           float32, bit by bit
    best logprobs    (n, deepest)   float32, bit by bit
    best tokens      (n, deepest)   int32
    asked logprobs   (num_asked,)   float32, bit by bit; each row's `LogprobSpec.token_ids` in order
    """

    specs: tuple[LogprobSpec, ...]
    packed: torch.Tensor
    deepest: int

    def finish(self, packed: torch.Tensor | None = None) -> list[TokenLogprob]:
        """packed: a finished copy of ours in host memory; None makes one and waits for it."""
        array = (self.packed.cpu() if packed is None else packed).numpy()
        n, deepest = len(self.specs), self.deepest
        tokens, chosen, best, best_tokens, asked = np.split(array, np.cumsum([n, n, n * deepest, n * deepest]))
        values = best.view(np.float32).reshape(n, deepest).tolist()
        indices = best_tokens.reshape(n, deepest).tolist()
        asked_values = asked.view(np.float32).tolist()
        found, at = [], 0
        for row, (token, logprob, spec) in enumerate(
            zip(tokens.tolist(), chosen.view(np.float32).tolist(), self.specs)
        ):
            end = at + len(spec.token_ids)
            top = list(zip(values[row][: spec.top], indices[row][: spec.top]))
            found.append(TokenLogprob(token, logprob, top, list(zip(asked_values[at:end], spec.token_ids))))
            at = end
        return found


class LogprobQuery:
    """What rows ask about, with its places in the logits on the device: made once for many launches. specs: one per
    row."""

    def __init__(self, specs: Sequence[LogprobSpec], device: torch.device = CPU) -> None:
        self.specs = tuple(specs)
        self._deepest = max((spec.top for spec in self.specs), default=0)
        places = [(row, token) for row, spec in enumerate(self.specs) for token in spec.token_ids]
        self._asked: tuple[torch.Tensor, torch.Tensor] | None = None
        if places:
            both = to_device(np.ascontiguousarray(np.array(places, np.int64).T), device)
            self._asked = (both[0], both[1])

    def begin(self, logits: torch.Tensor, tokens: torch.Tensor) -> LogprobTensors:
        """logits: (n, vocab_size) float32. tokens: (n,) int64, the one asked about in each row. Both on the device;
        waits for nothing."""
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        deepest = min(self._deepest, logits.shape[1])
        parts = [tokens.to(torch.int32), chosen.view(torch.int32)]
        if deepest:
            best = logprobs.topk(deepest, dim=-1)
            parts += [best.values.flatten().view(torch.int32), best.indices.flatten().to(torch.int32)]
        if self._asked is not None:
            parts.append(logprobs[self._asked].view(torch.int32))
        return LogprobTensors(self.specs, torch.cat(parts), deepest)
