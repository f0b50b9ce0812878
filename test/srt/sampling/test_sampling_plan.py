"""`SamplingPlan` and `LogprobQuery` against row-by-row loops, and neither waits for a device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.logprobs import LogprobQuery
from sglang.srt.sampling.penalties import PenaltyTable
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_plan import SamplingPlan
from support.no_waiting import DEVICE, NoWaiting, WaitsForDeviceError

VOCAB_SIZE = 50


def spec_of(rng: random.Random) -> SampleSpec:
    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB_SIZE), rng.randint(0, n)))

    params = SamplingParams(
        temperature=rng.choice((0.0, 1e-60, 0.7, 1.3)),
        top_p=rng.choice((1.0, 1.0 - 1e-12, 0.8)),
        top_k=rng.choice((-1, 1, 5, VOCAB_SIZE, 10 * VOCAB_SIZE)),
        min_p=rng.choice((0.0, 1e-60, 0.05)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.4)),
        min_new_tokens=rng.choice((0, 0, 4)),
        logit_bias={token: rng.uniform(-5, 5) for token in tokens(3)},
        sampling_seed=rng.choice((None, rng.randint(-(2**62), 2**62))),
    )
    logprobs = LogprobSpec(top=rng.randint(0, 4), token_ids=tokens(3)) if rng.random() < 0.5 else None
    return SampleSpec(params, tokens(2), rng.randint(1, 9), logprobs)


def shaped(specs, logits, slots, positions, penalties):
    """One row after the other."""
    logits = logits.clone()
    for row, spec in enumerate(specs):
        p = spec.params
        if p.has_penalties:
            values = torch.tensor([[p.frequency_penalty], [p.presence_penalty], [p.repetition_penalty]])
            penalties.apply(logits, torch.tensor([row]), slots[row : row + 1], values)
        for token, bias in p.logit_bias.items():
            logits[row, token] += bias
        if positions[row] - spec.num_prompt < p.min_new_tokens:
            logits[row, list(spec.stop_ids)] = -torch.inf
    return logits


def told(logits, tokens, specs):
    found = []
    for row, token, spec in zip(logits.log_softmax(-1), tokens.tolist(), specs):
        best = row.topk(min(spec.top, len(row)))
        top = list(zip(best.values.tolist(), best.indices.tolist()))
        asked = [(float(row[token]), token) for token in spec.token_ids]
        found.append(TokenLogprob(token, float(row[token]), top, asked))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_against_rows_one_by_one(seed: int):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n = rng.randint(0, 9)
    specs = tuple(spec_of(rng) for _ in range(n))
    plan = SamplingPlan(specs, VOCAB_SIZE)
    penalties = PenaltyTable(2 * n + 1, VOCAB_SIZE)
    slots = torch.randperm(2 * n + 1, generator=generator)[:n]
    for slot in slots.tolist():
        penalties.start(slot, torch.randint(VOCAB_SIZE, (rng.randint(0, 60),), generator=generator))
    positions = np.array([spec.num_prompt for spec in specs], np.int32)
    for _ in range(7):  # some requests get past their minimum on the way
        logits = torch.randn(n, VOCAB_SIZE, generator=generator) * 3
        before = logits.clone()
        got = plan.shape(logits, slots, positions, penalties)
        assert torch.equal(got, shaped(specs, logits, slots, positions, penalties)), f"seed {seed}"
        assert torch.equal(logits, before)
        tokens = Sampler()(got, plan.info(torch.from_numpy(positions).long()))
        before_counts = [penalties._counts[slot].sum().item() for slot in slots.tolist()]
        plan.count(penalties, slots, tokens)
        for row, slot in enumerate(slots.tolist()):
            grown = penalties._counts[slot].sum().item() - before_counts[row]
            assert grown == specs[row].params.has_penalties
        wanted = [i for i, spec in enumerate(specs) if spec.logprobs]
        found = plan.begin_logprobs(logits, tokens)
        assert list(plan.logprob_rows) == wanted and (found is None) == (not wanted)
        if found is not None:
            assert found.finish() == told(logits[wanted], tokens[wanted], [specs[i].logprobs for i in wanted])
        positions += np.array([rng.random() < 0.7 for _ in range(n)], np.int32)


def test_nothing_asked_is_nothing_done():
    plan = SamplingPlan((SampleSpec(SamplingParams(min_new_tokens=2), (3,), 5),), VOCAB_SIZE)
    logits, slots, penalties = torch.randn(1, VOCAB_SIZE), torch.tensor([0]), PenaltyTable(1, VOCAB_SIZE)
    assert plan.shape(logits, slots, np.array([7]), penalties) is logits
    changed = plan.shape(logits, slots, np.array([6]), penalties)
    assert changed[0, 3] == -torch.inf and torch.equal(changed[0, :3], logits[0, :3])
    assert plan.begin_logprobs(logits, slots) is None


@pytest.mark.parametrize("seed", range(10))
def test_what_the_host_knows_is_what_the_columns_say(seed: int):
    rng = random.Random(seed)
    specs = [spec_of(rng) for _ in range(rng.randint(0, 6))]
    params = [spec.params for spec in specs]
    info = SamplingBatchInfo.from_params(params, VOCAB_SIZE, torch.zeros(len(params), dtype=torch.int64))
    cuts, drawn = info.cuts, info.temperatures > 0
    by_top_k, by_top_p = drawn & (info.top_ks < VOCAB_SIZE), drawn & (info.top_ps < 1)
    limited = by_top_k | by_top_p
    assert info.is_all_greedy == (not drawn.any()) and cuts.has_greedy == (not drawn.all())
    assert (cuts.has_top_k, cuts.has_top_p) == (by_top_k.any(), by_top_p.any())
    assert cuts.has_min_p == (info.min_ps > 0).any() and cuts.num_limited == limited.sum()
    assert cuts.deepest_top_k == max(info.top_ks[limited].tolist(), default=VOCAB_SIZE)
    assert (cuts.limited is None) == (cuts.num_limited in (0, len(params)))
    if cuts.limited is not None:
        assert torch.equal(cuts.limited, limited.nonzero()[:, 0])


@pytest.mark.parametrize("top,token_ids", [(0, ()), (3, ()), (0, (4, 1)), (60, (2,))])
def test_logprobs_arrive_as_one_tensor(top: int, token_ids: tuple[int, ...]):
    logits, tokens = torch.randn(4, VOCAB_SIZE), torch.tensor([1, 2, 3, 49])
    specs = [
        LogprobSpec(top=top, token_ids=token_ids),
        LogprobSpec(),
        LogprobSpec(top=1),
        LogprobSpec(token_ids=(9,)),
    ]
    found = LogprobQuery(specs).begin(logits, tokens)
    assert found.packed.dim() == 1 and found.packed.dtype == torch.int32
    host = torch.empty_like(found.packed)
    host.copy_(found.packed)
    assert found.finish(host) == found.finish() == told(logits, tokens, specs)


@pytest.mark.parametrize("seed", range(10))
def test_no_step_waits_for_the_device(seed: int):
    rng = random.Random(seed)
    specs = tuple(spec_of(rng) for _ in range(6))
    n = len(specs)
    with NoWaiting(), torch.inference_mode():
        plan = SamplingPlan(specs, VOCAB_SIZE, DEVICE)
        penalties = PenaltyTable(8, VOCAB_SIZE, DEVICE)
        penalties.start(3, torch.empty(5, dtype=torch.int64, device=DEVICE))
        slots = torch.empty(n, dtype=torch.int64, device=DEVICE)
        for offset in (0, 9):
            logits = torch.empty(n, VOCAB_SIZE, device=DEVICE)
            positions = np.array([spec.num_prompt + offset for spec in specs])
            shaped_logits = plan.shape(logits, slots, positions, penalties)
            tokens = Sampler()(shaped_logits, plan.info(torch.empty(n, dtype=torch.int64, device=DEVICE)))
            assert tokens.shape == (n,) and tokens.device == DEVICE
            plan.count(penalties, slots, tokens)
            found = plan.begin_logprobs(logits, tokens)
            if found is not None:
                assert found.packed.device == DEVICE


@pytest.mark.parametrize(
    "waits",
    [
        lambda x, i: x[torch.tensor([0, 1])],
        lambda x, i: x + torch.ones(3, 4),
        lambda x, i: x[x > 0],
        lambda x, i: x.index_put_((x > 0,), x[0, 0]),
        lambda x, i: bool((x > 0).any()),
        lambda x, i: i.nonzero(),
        lambda x, i: x.cpu(),
        lambda x, i: i.tolist(),
    ],
)
def test_waiting_is_found_out(waits):
    x = torch.empty(3, 4, device=DEVICE)
    with NoWaiting(), pytest.raises((WaitsForDeviceError, RuntimeError, NotImplementedError)):
        waits(x, torch.empty(3, dtype=torch.int64, device=DEVICE))


@pytest.mark.filterwarnings("error")
def test_a_temperature_beyond_float32_is_its_largest():
    params = [SamplingParams(temperature=each) for each in (1e308, 0.5)]
    info = SamplingBatchInfo.from_params(params, 7, torch.zeros(2, dtype=torch.int64))
    assert info.temperatures.tolist() == [torch.finfo(torch.float32).max, 0.5]
