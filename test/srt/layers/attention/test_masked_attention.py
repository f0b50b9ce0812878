"""`masked_attention` against a softmax of whole matrices."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.layers.attention import masked_attention as module
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.masked_attention import masked_attention
from support.attention_cases import LAYOUTS, SMALL_TYPES, Case


def masked_reference(q, k, v, meta):
    """q: (n, heads, d), k, v: (length, kv_heads, d), float64; the last n keys are the queries' own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * meta.scale
    if meta.softcap is not None:
        scores = torch.tanh(scores / meta.softcap) * meta.softcap
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (meta.window or len(k)))
    scores = scores.masked_fill(hidden, -math.inf).exp()
    sinks = 0.0 if meta.sinks is None else meta.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", scores / (scores.sum(-1, keepdim=True) + sinks), v)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("block", [128, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "variant",
    [{}, {"window": 1}, {"window": 13}, {"softcap": 0.7}, {"sinks": torch.linspace(-2, 2, 8)}, {"all": True}],
    ids=str,
)
def test_against_whole_matrices(variant: dict, layout: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    if "all" in variant:
        variant = {"window": 20, "softcap": 1.5, "sinks": torch.linspace(-1, 1, 8)}
    for seed in range(4):
        case = Case(seed, 1 + seed * 3, layout, torch.float32, kv_dtype=(None, *SMALL_TYPES)[seed])
        meta = AttentionMetadata(case.q_lens, case.scale, **variant)
        got = masked_attention(case.q, case.view, case.segments, meta)
        row = 0
        for of_req, q_len in zip(case.segments, case.q_lens):
            slots = [
                (segment.pages[at // case.view.page_size], at % case.view.page_size)
                for segment in of_req
                for at in [torch.arange(segment.skip, segment.skip + segment.length)]
            ]
            k, v = (torch.cat([x[slot] for slot in slots]).double() for x in (case.view.k, case.view.v))
            want = masked_reference(case.q[row : row + q_len].double(), k, v, meta)
            assert torch.allclose(got[row : row + q_len].double(), want, atol=1e-5), case.name
            row += q_len
        if not variant:
            assert meta.is_ordinary
            assert torch.allclose(got.double(), torch.cat(case.want), atol=1e-5), case.name


def test_no_keys_give_zeros() -> None:
    case = Case(0, 4, "layer_first", torch.float32, q_lens=(1, 3))
    assert not masked_attention(case.q, case.view, [[], []], AttentionMetadata(case.q_lens, 1.0, window=2)).any()
