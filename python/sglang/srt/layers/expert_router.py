"""`ExpertRouter`: which experts compute a token, and the weights of their results. Owns the gate, on every rank.

The weights are the softmax over all experts: Shazeer et al. 2017, section 2. DeepSeek's models choose among the
experts of the best groups alone (DeepSeek-V2, 2024, section 2.1.3), and since DeepSeek-V3 (2024, section 2.1.2) by
the sigmoid of a score with a correction that is learned beside the weights. gpt-oss's gate has a bias, and its
weights are the softmax over a token's experts alone.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang.srt.configs.experts import ExpertsConfig
from sglang.srt.layers.linear import Weight
from sglang.srt.layers.weights import WeightTarget

# Of a group, the scores that are added up for its own.
_OF_A_GROUP = 2


class ExpertRouter(nn.Module):
    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.groups = config, config.groups
        # The gate of models that have groups is computed in float32.
        self._dtype = dtype if self.groups is None else torch.float32
        self.gate = Weight(config.num_experts, hidden_size, self._dtype)
        self.bias: nn.Parameter | None = None
        if config.clamped is not None:
            self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=dtype), requires_grad=False)
        self.correction: nn.Parameter | None = None
        if self.groups is not None and self.groups.has_correction:
            self.correction = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (num_tokens, hidden_size). Returns weights, float32, and experts, int64, (num_tokens, top_k) each."""
        config, groups = self.config, self.groups
        logits = self.gate.product(x.to(self._dtype), self.bias)
        if config.clamped is not None:
            best, chosen = logits.topk(config.top_k)
            return best.softmax(-1, torch.float32), chosen
        scores = logits.softmax(-1, torch.float32) if self.correction is None else logits.sigmoid()
        if groups is None:
            weights, chosen = scores.topk(config.top_k)
        else:
            ranks = scores if self.correction is None else scores + self.correction
            chosen = self._among_best_groups(ranks).topk(config.top_k).indices
            weights = scores.gather(1, chosen)
        if config.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights if groups is None else weights * groups.scale), chosen

    def _among_best_groups(self, ranks: torch.Tensor) -> torch.Tensor:
        """ranks: (num_tokens, num_experts). The same, with -inf for experts of other groups."""
        groups = self.groups
        assert groups is not None
        if groups.kept == groups.total:
            return ranks
        of_groups = ranks.unflatten(1, (groups.total, -1))
        if self.correction is None:
            best = of_groups.amax(-1)
        else:
            best = of_groups.topk(min(_OF_A_GROUP, of_groups.shape[2])).values.sum(-1)
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(groups.kept).indices, False)
        return of_groups.masked_fill(is_left_out[..., None], -math.inf).flatten(1)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {"weight": WeightTarget.whole(self.gate.loaded())}
        if self.bias is not None:
            targets["bias"] = WeightTarget.whole(self.bias)
        if self.correction is not None:
            targets["e_score_correction_bias"] = WeightTarget.whole(self.correction)
        return targets
