"""`ExpertRouter`: which experts compute a token, and the weights of their results. Owns the gate, on every rank.

The weights are the softmax over all experts: Shazeer et al. 2017, section 2. DeepSeek's models choose among the
experts of the best groups alone (DeepSeek-V2, 2024, section 2.1.3), and since DeepSeek-V3 (2024, section 2.1.2) by
the sigmoid of a score with a correction that is learned beside the weights. gpt-oss's gate has a bias, and its
weights are the softmax over a token's experts alone.
"""

from __future__ import annotations

import torch
from torch import nn

from sgl_kernel import experts
from sgl_kernel.experts import Choice
from sglang.srt.configs.experts import ExpertsConfig
from sglang.srt.layers.linear import Weight
from sglang.srt.layers.weights import WeightTarget


class ExpertRouter(nn.Module):
    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, groups = config, config.groups
        # The gate of models that have groups is computed in float32.
        self._dtype = dtype if groups is None else torch.float32
        self.gate = Weight(config.num_experts, hidden_size, self._dtype)
        self.bias: nn.Parameter | None = None
        if config.clamped is not None:
            self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=dtype), requires_grad=False)
        self.correction: nn.Parameter | None = None
        if groups is not None and groups.has_correction:
            self.correction = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
        self._choice = Choice(
            config.top_k,
            scores="softmax_of_chosen" if config.clamped else "sigmoid" if self.correction is not None else "softmax",
            is_normalized=config.is_normalized,
            scale=1.0 if groups is None else groups.scale,
            num_groups=1 if groups is None else groups.total,
            kept_groups=1 if groups is None else groups.kept,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (num_tokens, hidden_size). Returns weights, float32, and experts, int64, (num_tokens, top_k) each."""
        return experts.choose(self.gate.product(x.to(self._dtype), self.bias), self._choice, self.correction)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {"weight": WeightTarget.whole(self.gate.loaded())}
        if self.bias is not None:
            targets["bias"] = WeightTarget.whole(self.bias)
        if self.correction is not None:
            targets["e_score_correction_bias"] = WeightTarget.whole(self.correction)
        return targets
