"""Single layers against the formulas they are named after."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.distributed.parallel_state import SINGLE_RANK, Shard
from sglang.srt.layers.layernorm import QKNorm, RMSNorm
from sglang.srt.layers.linear import GatedLinear, MergedColumnParallelLinear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype, tolerance):
    torch.manual_seed(1)
    x = torch.randn(5, 24).to(dtype)
    x[3] = 0  # eps alone keeps this row finite
    norm = RMSNorm(24, 0.5, dtype)
    norm.weight.uniform_(0.5, 2)
    before = x.clone()
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight.double()
    got = norm(x)
    assert got.dtype == dtype and (got.double() - want).abs().max() < tolerance
    assert torch.equal(x, before)


def test_rms_norm_of_heads_at_once():
    torch.manual_seed(1)
    x = torch.randn(7, 5, 8)[:, :3]  # strided, as a slice of a fused projection is
    norm = QKNorm(2, 1, 8, 1e-6, torch.float32)
    norm.weight.uniform_(0.5, 2)
    for head in range(3):
        alone = RMSNorm(8, 1e-6, torch.float32)
        alone.weight.copy_(norm.weight[head])
        assert torch.equal(norm(x)[:, head], alone(x[:, head]))


@pytest.mark.parametrize("finished", [False, True])
def test_a_gated_layer(finished):
    torch.manual_seed(1)
    layer = GatedLinear(10, Shard(5, 0, 5), True, torch.float32)
    layer.loaded().data.normal_()
    layer.bias.data.normal_()
    x = torch.randn(4, 10)
    gate, up = torch.nn.functional.linear(x, layer.loaded(), layer.bias).chunk(2, dim=1)
    if finished:
        layer.finish_loading()
    assert (layer(x) - gate * torch.sigmoid(gate) * up).abs().max() < 1e-5


def test_rotary_turns_pairs_by_position():
    rotary = RotaryEmbedding(8, 100, {"rope_type": "default", "rope_theta": 100.0}, torch.float32)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([99, 0, 7])
    got = torch.view_as_complex(rotary.at(positions)(x.clone()).unflatten(-1, (2, 4)).mT.contiguous())
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(4) / 4)
    want = torch.view_as_complex(x.unflatten(-1, (2, 4)).mT.contiguous()) * torch.polar(torch.ones(3, 1, 4), angles)
    assert (got - want).abs().max() < 2e-5


def test_a_position_has_the_same_bits_wherever_it_stands():
    rotary = RotaryEmbedding(8, 100, {"rope_type": "default", "rope_theta": 100.0}, torch.float32)
    many = rotary.lookup(torch.arange(100))
    for position in range(100):
        one = rotary.lookup(torch.tensor([position]))
        assert all(torch.equal(a[0], b[position]) for a, b in zip(one, many))


def test_merged_linear_is_its_parts():
    torch.manual_seed(1)
    linear = MergedColumnParallelLinear(6, [SINGLE_RANK.shard(n) for n in (4, 2, 2)], True, torch.float32)
    shards = {name: target.tensor for name, target in linear.weight_targets(("q", "k", "v")).items()}
    for shard in shards.values():
        shard.normal_()
    x = torch.randn(3, 6)
    want = torch.cat([x @ shards[f"{name}.weight"].T + shards[f"{name}.bias"] for name in "qkv"], dim=1)
    assert (linear(x) - want).abs().max() < 1e-5
    assert sorted(shards) == ["k.bias", "k.weight", "q.bias", "q.weight", "v.bias", "v.weight"]
