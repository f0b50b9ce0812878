"""Log-probabilities of tokens, from logits. Owns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, specs: Sequence[LogprobSpec]) -> list[TokenLogprob]:
    """logits: (n, vocab_size) float32. tokens: (n,) int64, the one asked about in each row. specs: one per row."""
    if not len(tokens):
        return []
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    deepest = min(max(spec.top for spec in specs), logits.shape[1])
    best = logprobs.topk(deepest, dim=-1) if deepest else None
    values, indices = (best.values.tolist(), best.indices.tolist()) if best is not None else ([], [])
    found = []
    for row, (token, logprob, spec) in enumerate(zip(tokens.tolist(), chosen, specs)):
        top = list(zip(values[row][: spec.top], indices[row][: spec.top])) if spec.top else []
        asked = []
        if spec.token_ids:
            asked = list(zip(logprobs[row, list(spec.token_ids)].tolist(), spec.token_ids))
        found.append(TokenLogprob(token, logprob, top, asked))
    return found
