"""`divide_layers`: a rank's part of a model that transformers computes, by transformers' own plan of its layers.

The plan names linear layers and how each is divided. A rank keeps some outputs of the first layers of a block and the
inputs of its last layer that belong to them; the results are summed. What the plan does not divide, and what is no
plain linear layer (experts, the vocabulary), every rank computes as a whole. Attention is always divided by heads, as
the KV cache is: `OwnHeads` takes a rank's heads from layers that give all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.distributed.parallel_state import SINGLE_RANK, Shard, TensorParallelGroup

# Styles of transformers' plans. Others give or take all in all ranks, and are left whole.
_COLUMNS = frozenset({"colwise"})
_ROWS = frozenset({"rowwise", "rowwise_split_input"})
# Layers of attention whose outputs are those of KV heads.
_OF_KV_HEADS = frozenset({"k_proj", "v_proj"})
# Blocks that look at all of what their first layers give, though transformers' plan divides them.
_OVER_ALL = frozenset({"Gemma3nTextMLP"})


class SummedLinear(nn.Module):
    """A rank's inputs of a linear layer. It is given them, or all inputs. group: over which the result is summed."""

    def __init__(self, whole: nn.Linear, shard: Shard) -> None:
        super().__init__()
        self.group = SINGLE_RANK
        self.weight = _part(whole.weight[:, shard.start : shard.start + shard.size])
        self.bias = whole.bias
        self._shard = shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == self._shard.full:
            x = x[..., self._shard.start : self._shard.start + self._shard.size]
        found = self.group.all_reduce(F.linear(x, self.weight))
        return found if self.bias is None else found + self.bias


@dataclass(frozen=True)
class OwnHeads:
    """The heads of a rank. query, kv: its part of all query heads and of all KV heads. joined: layers that want the
    results of all heads, not the rank's. summed: the layers whose results are summed over ranks after `join`."""

    query: Shard
    kv: Shard
    joined: frozenset[int]
    summed: tuple[SummedLinear, ...]
    group: TensorParallelGroup

    def join(self) -> None:
        """From now on all ranks compute together."""
        for layer in self.summed:
            layer.group = self.group

    def of(self, x: torch.Tensor, shard: Shard, dim: int) -> torch.Tensor:
        """The rank's entries of a dimension over heads, which has all of them, or these alone."""
        return x if x.shape[dim] == shard.size else x.narrow(dim, shard.start, shard.size)

    def results(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """attended: (num_tokens, own heads, head_dim). The same, or that of all heads, as the layer wants it."""
        if layer not in self.joined or self.group.size == 1:
            return attended
        num_tokens, _, head_dim = attended.shape
        return self.group.all_gather(attended.reshape(num_tokens, -1)).view(num_tokens, -1, head_dim)

    def num_results(self, layer: int) -> int:
        """Heads of `results`."""
        return self.query.full if layer in self.joined else self.query.size


def divide_layers(model: Any, config: ModelConfig, group: TensorParallelGroup) -> OwnHeads:
    """Keep this rank's part of a model's layers, which meets no other rank before `join`. Raises ModelConfigError for
    what cannot be divided."""
    heads, kv_heads = group.shard(config.num_heads), group.shard_kv_heads(config.num_kv_heads)
    own, summed = set[int](), list[SummedLinear]()
    plan = (getattr(model, "tp_plan", None) or {}) if group.size > 1 else {}
    for name, layer in list(model.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style not in _COLUMNS | _ROWS or not isinstance(layer, nn.Linear):
            continue
        block_name, _, last = name.rpartition(".")
        block = model.get_submodule(block_name)
        if type(block).__name__ in _OVER_ALL:
            continue
        full = layer.out_features if style in _COLUMNS else layer.in_features
        is_attention = "attn" in block_name or "attention" in block_name
        is_kv = is_attention and last in _OF_KV_HEADS
        shard = heads.times(full // heads.full) if is_attention else group.shard(full)
        if is_kv:
            shard = kv_heads.times(full // kv_heads.full)
        # Several ranks may have the same KV heads.
        if shard.full != full or not (is_kv or shard.size * group.size == full):
            raise ModelConfigError(
                f"{config.model_path!r} cannot be divided over {group.size} ranks: {name} has {full} "
                f"{'outputs' if style in _COLUMNS else 'inputs'}; choose another --tp-size."
            )
        if style in _ROWS:
            summed.append(SummedLinear(layer, shard))
            setattr(block, last, summed[-1])
            if is_attention and isinstance(getattr(block, "layer_idx", None), int):
                own.add(block.layer_idx)
            continue
        rows = slice(shard.start, shard.start + shard.size)
        layer.weight, layer.out_features = _part(layer.weight[rows]), shard.size
        if layer.bias is not None:
            layer.bias = _part(layer.bias[rows])
    joined = frozenset(range(config.num_layers)) - own
    return OwnHeads(heads, kv_heads, joined, tuple(summed), group)


def _part(tensor: torch.Tensor) -> nn.Parameter:
    # A copy, so that the whole is given back.
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)
