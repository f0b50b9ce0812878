"""`Sampler`: right in distribution, and a row's token depends on nothing but the row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sgl_kernel.cpu.library import LIBRARY
from sglang.srt.layers.sampler import Sampler, random_uniform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from support import fake_flashinfer


@pytest.fixture(autouse=True, params=["C", "torch"])
def way(request, monkeypatch):
    """Who draws: the CPU's kernel, or torch, as where there is no compiler, and on GPUs."""
    if request.param == "torch":
        monkeypatch.setattr("sglang.srt.layers.sampler.takes", lambda logits: False)
    elif not LIBRARY.is_available():
        pytest.skip("no C compiler")


by_torch = pytest.mark.parametrize("way", ["torch"], indirect=True)
by_the_kernel = pytest.mark.parametrize("way", ["C"], indirect=True)


def info(n, vocab_size, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, seed=0, position=0):
    """Each argument a number for all rows or a list."""

    columns = [
        value if isinstance(value, list) else [value] * n
        for value in (temperature, top_p, top_k, min_p, seed, position)
    ]
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, sampling_seed=s)
        for t, p, k, m, s in zip(*columns[:-1])
    ]
    return SamplingBatchInfo.from_params(params, vocab_size, torch.tensor(columns[-1], dtype=torch.int64))


def row_of(batch, vocab_size, i):
    columns = (batch.temperatures, batch.top_ps, batch.top_ks, batch.min_ps, batch.seeds, batch.positions)
    return info(1, vocab_size, *(column[i].item() for column in columns))


def chi_square(counts, probs):
    """The statistic's distance from its mean, in standard deviations; at most 5 is no surprise."""
    used = probs > 0
    assert counts[~used].sum() == 0, "a token of probability zero was drawn"
    expected = probs[used] * counts.sum()
    assert expected.min() > 5, "too few draws for this test"
    degrees = int(used.sum()) - 1
    statistic = ((counts[used] - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / math.sqrt(2 * degrees))


def expected_probs(logits, temperature, top_k, top_p):
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    kept, mass = [], 0.0
    for token in order.tolist():
        if len(kept) == top_k or mass >= top_p:
            break
        kept.append(token)
        mass += float(probs[token])
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept]
    return cut / cut.sum()


@pytest.mark.parametrize("seed", [1, 2**62 + 11, -5])
@pytest.mark.parametrize(
    "temperature,top_k,top_p",
    [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.5, 7, 1.0), (1.0, -1, 0.6), (0.8, 12, 0.9), (1.0, 1, 1.0), (1.3, 3, 0.9)],
)
def test_distribution(temperature, top_k, top_p, seed):
    vocab_size, draws = 40, 20000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(7)) * 1.2
    batch = info(draws, vocab_size, temperature, top_p, top_k, seed=seed, position=list(range(draws)))
    tokens = Sampler()(logits.expand(draws, -1).contiguous(), batch)
    probs = expected_probs(logits, temperature, top_k, top_p)
    if int((probs > 0).sum()) == 1:
        assert bool((tokens == probs.argmax()).all())
        return
    off = chi_square(torch.bincount(tokens, minlength=vocab_size).double(), probs)
    assert abs(off) < 5, f"seed {seed}: chi-square is {off} standard deviations off"


@by_torch
@pytest.mark.parametrize("vary", ["seed", "position", "both"])
def test_random_numbers_are_uniform_and_unrelated(vary):
    n = 100000
    i = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int64)
    u = random_uniform(i if vary != "position" else zero, i if vary != "seed" else zero)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    for bins in (64, 100):
        counts = torch.bincount((u * bins).long(), minlength=bins).double()
        assert abs(chi_square(counts, torch.full((bins,), 1 / bins, dtype=torch.float64))) < 5
    # Pairs of neighbours fill the square evenly: what is drawn at one position says nothing about the next.
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    counts = torch.bincount(pairs, minlength=256).double()
    assert abs(chi_square(counts, torch.full((256,), 1 / 256, dtype=torch.float64))) < 5
    assert u.unique().numel() == n


def test_random_numbers_of_different_seeds_do_not_repeat():
    # Counters that were merely added would give token 5 of seed 7 the number of token 6 of seed 6.
    seeds, positions = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    assert random_uniform(seeds.flatten(), positions.flatten()).unique().numel() == 300 * 300


def test_a_row_does_not_see_its_neighbours():
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        n, vocab_size = 48, 300
        # Coarse logits: ties everywhere, also at the places where top-k and top-p cut.
        logits = (torch.randn(n, vocab_size, generator=g) * 4).round() / 2
        choice = torch.randint(0, 4, (n,), generator=g).tolist()
        batch = info(
            n,
            vocab_size,
            temperature=[(0.0, 0.7, 1.0, 1.4)[c] for c in torch.randint(0, 4, (n,), generator=g).tolist()],
            top_k=[(-1, 5, -1, 40)[c] for c in choice],
            top_p=[(1.0, 1.0, 0.8, 0.95)[c] for c in choice],
            seed=torch.randint(-(2**62), 2**62, (n,), generator=g).tolist(),
            position=torch.randint(0, 10000, (n,), generator=g).tolist(),
        )
        together = Sampler()(logits, batch)
        assert together.dtype == torch.int64 and together.shape == (n,)
        alone = torch.cat([Sampler()(logits[i : i + 1], row_of(batch, vocab_size, i)) for i in range(n)])
        assert torch.equal(together, alone), f"seed {seed}"
        greedy = batch.temperatures == 0
        assert torch.equal(together[greedy], logits.argmax(-1)[greedy]), f"seed {seed}"


def test_all_greedy_and_empty():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampler()(logits, info(3, 11, temperature=0.0)), logits.argmax(-1))
    assert Sampler()(logits[:0], info(0, 11)).shape == (0,)


def test_a_tiny_temperature_is_greedy():
    logits = torch.tensor([[1e4, -1e4, 9999.0], [-3.0, 2.0, 1.0]])
    assert Sampler()(logits, info(2, 3, temperature=1e-30)).tolist() == [0, 1]


@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-53])
def test_extreme_random_numbers(monkeypatch, extreme):
    # The largest times the total must not round to the total, which no token's sum exceeds.
    monkeypatch.setattr(
        "sglang.srt.layers.sampler.random_uniform",
        lambda s, p: torch.full((s.shape[0],), extreme, dtype=torch.float64),
    )
    logits = torch.randn(400, 30, generator=torch.Generator().manual_seed(2))
    logits[:, :3] = logits[:, -3:] = -1e5
    assert bool((Sampler()(logits, info(400, 30)) == (3 if extreme == 0 else 26)).all())


def test_tokens_without_probability_are_never_drawn():
    # The last tokens underflow to zero; no random number may fall beyond the ones before.
    logits = torch.full((5000, 50), -1e5)
    logits[:, 10:20] = 0.0
    tokens = Sampler()(logits, info(5000, 50, seed=list(range(5000))))
    assert tokens.min() >= 10 and tokens.max() < 20


def test_top_p_beyond_the_first_look():
    # Flat enough that 0.95 of the mass takes more tokens than `_keep_top` looks at first, in one row of two.
    vocab_size, draws = 1400, 10000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 0.1
    peaked = logits * 40
    probs = expected_probs(logits, 1.0, -1, 0.95)
    assert int((probs > 0).sum()) > 1024 > int((expected_probs(peaked, 1.0, -1, 0.95) > 0).sum())
    batch = info(draws, vocab_size, top_p=0.95, seed=list(range(draws)))
    counts = torch.bincount(Sampler()(logits.expand(draws, -1), batch), minlength=vocab_size).double()
    assert abs(chi_square(counts, probs)) < 5
    mixed = torch.stack((logits, peaked)).repeat(50, 1)
    batch = info(100, vocab_size, top_p=0.95, seed=list(range(100)))
    together = Sampler()(mixed, batch)
    assert torch.equal(
        together, torch.cat([Sampler()(mixed[i : i + 1], row_of(batch, vocab_size, i)) for i in range(100)])
    )


def cut_batch(seed):
    """Rows of all kinds, with ties where they are cut."""
    g = torch.Generator().manual_seed(seed)
    n, vocab_size = 40, 3000
    logits = (torch.randn(n, vocab_size, generator=g) * 4).round() / 2
    logits[::3] *= 0.1  # flat ones, where top-p reaches far
    choice = torch.randint(0, 5, (n,), generator=g).tolist()
    batch = info(
        n,
        vocab_size,
        temperature=[(0.7, 1.0, 1.4, 0.0)[c] for c in torch.randint(0, 4, (n,), generator=g).tolist()],
        top_k=[(-1, 5, -1, 2000, vocab_size)[c] for c in choice],
        top_p=[(1.0, 1.0, 0.9, 0.95, 1.0)[c] for c in choice],
        min_p=[(0.0, 0.1)[c] for c in torch.randint(0, 2, (n,), generator=g).tolist()],
        seed=list(range(n)),
        position=7,
    )
    return logits, batch


@by_torch
@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_is_not_asked_gives_the_same_tokens(monkeypatch, seed):
    logits, batch = cut_batch(seed)
    want = Sampler()(logits, batch)
    monkeypatch.setattr("sglang.srt.layers.sampler._is_on_host", lambda tensor: False)
    assert torch.equal(Sampler()(logits, batch), want)


@by_torch
@pytest.mark.parametrize("seed", range(5))
def test_kernels_that_cut_give_the_same_tokens(seed):
    logits, batch = cut_batch(seed)
    want = Sampler()(logits, batch)
    with fake_flashinfer.installed() as calls:
        assert torch.equal(Sampler()(logits, batch), want)
    assert calls["top_k_renorm_probs"].called and calls["top_p_renorm_probs"].called


@by_torch
def test_a_top_k_of_more_than_32_bits_keeps_all_beside_one_that_cuts():
    """The kernels take it as an int32."""
    logits, positions = (
        torch.randn(2, 100, generator=torch.Generator().manual_seed(1)),
        torch.zeros(2, dtype=torch.int64),
    )
    for seed in range(20):
        largest = SamplingParams(top_k=1 << 31, top_p=0.9, sampling_seed=seed)
        params = [largest, SamplingParams(top_k=5, sampling_seed=seed)]
        with fake_flashinfer.installed():
            tokens = Sampler()(logits, SamplingBatchInfo.from_params(params, 100, positions))
        alone = Sampler()(logits[:1], SamplingBatchInfo.from_params([largest], 100, positions[:1]))
        assert tokens[0] == alone[0]


def drawn_rightly(logits, batch, i, token):
    """Whether a row's random number lies in the token's part of the sum of what is kept, give or take a rounding. The
    place where top-p cuts may depend on one, too."""
    weights = ((logits[i].double() - logits[i].double().max()) / batch.temperatures[i].double()).exp()
    ordered = weights.sort(descending=True).values
    before = (ordered.cumsum(0) - ordered) / weights.sum()
    uniform = random_uniform(batch.seeds[i : i + 1], batch.positions[i : i + 1]).item()
    for factor in (1 - 1e-5, 1.0, 1 + 1e-5):
        top_p = batch.top_ps[i].item() * factor if batch.top_ps[i] < 1 else 2.0
        num_kept = max(1, min(int((before < top_p).sum()), int(batch.top_ks[i])))
        # float32 tells fewer weights apart.
        least = max(ordered[num_kept - 1].item(), batch.min_ps[i].item()) * (1 - 1e-6)
        kept = torch.where(weights >= least, weights, 0.0)
        sums = kept.cumsum(0) / kept.sum()
        if kept[token] > 0 and sums[token] - kept[token] / kept.sum() - 1e-6 <= uniform <= sums[token] + 1e-6:
            return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_large_vocabularies(seed):
    """Peaked and flat rows, with and without ties, by each of the ways of cutting and by several."""
    g = torch.Generator().manual_seed(seed)
    n, vocab_size = 60, (5000, 70_001, 16_384, 20_007)[seed]
    spread = torch.tensor((0.01, 1.0, 3.0, 8.0))[torch.randint(0, 4, (n, 1), generator=g)]
    logits = torch.randn(n, vocab_size, generator=g) * spread
    logits[::4] = (logits[::4] * 2).round() / 2
    logits[1::8] = 0.0  # all alike
    logits[3::8, : vocab_size // 2] = -math.inf
    columns = {
        "temperature": (0.0, 0.3, 1.0, 1.7),
        "top_k": (-1, 1, 20, 3000),
        "top_p": (1.0, 0.001, 0.9, 0.999),
        "min_p": (0.0, 0.0, 1e-5, 0.3),
    }
    drawn = {name: [values[c] for c in torch.randint(0, 4, (n,), generator=g)] for name, values in columns.items()}
    batch = info(n, vocab_size, **drawn, seed=list(range(n)), position=seed)
    tokens = Sampler()(logits, batch).tolist()
    for i, token in enumerate(tokens):
        if batch.temperatures[i] == 0:
            assert token == int(logits[i].argmax()), f"seed {seed}, row {i}"
        else:
            assert drawn_rightly(logits, batch, i, token), f"seed {seed}, row {i}: {token}"


def test_the_likeliest_is_the_first_of_several():
    logits = torch.randint(0, 9, (50, 1003), generator=torch.Generator().manual_seed(6)).float()
    logits[7, 900], logits[8, 4], logits[9] = math.nan, math.nan, -math.inf
    want = [int(row.isnan().nonzero()[0]) if row.isnan().any() else row.tolist().index(row.max()) for row in logits]
    assert Sampler()(logits, info(50, 1003, temperature=0.0)).tolist() == want
    assert Sampler()(logits[:1, :3].clone(), info(1, 3, temperature=0.0)).tolist() == [int(logits[0, :3].argmax())]


def test_a_row_of_nan_draws_the_last_token():
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[1], logits[2, 88] = math.nan, -math.inf, math.inf
    for top_k in (-1, 5):
        assert Sampler()(logits, info(4, 90, top_k=top_k)).tolist()[:3] == [89, 89, 89]


@by_the_kernel
@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("top_p", [1.0, 0.99])
def test_extreme_random_numbers_of_many_tokens(monkeypatch, extreme, top_p):
    """Sums are rounded in other orders than the one in which tokens are looked for."""
    monkeypatch.setattr(
        "sglang.srt.layers.sampler.random_uniform",
        lambda s, p: torch.full((s.shape[0],), extreme, dtype=torch.float64),
    )
    logits = torch.randn(20, 30_011, generator=torch.Generator().manual_seed(2))
    logits[:, :3] = logits[:, -3:] = -1e5
    kept = logits >= -1e4 if top_p == 1 else torch.stack([expected_probs(row, 1.0, -1, top_p) > 0 for row in logits])
    for row, token in zip(kept, Sampler()(logits, info(20, 30_011, top_p=top_p)).tolist()):
        places = row.nonzero().flatten()
        assert token in (places[:2] if extreme == 0 else places[-2:])


@by_torch
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_draws_what_the_cpu_draws(monkeypatch, seed, with_kernels):
    if not with_kernels:
        monkeypatch.setattr("sgl_kernel.sampling.has_renorm_kernels", lambda probs: False)
    logits, batch = cut_batch(seed)
    columns = {name: value.cuda() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    there = replace(batch, **columns, cuts=replace(batch.cuts, limited=batch.cuts.limited.cuda()))
    numbers = random_uniform(batch.seeds, batch.positions)
    assert torch.equal(random_uniform(there.seeds, there.positions).cpu(), numbers)
    drawn, want = Sampler()(logits.cuda(), there).cpu(), Sampler()(logits, batch)
    # The probabilities differ in their last bits, and a number drawn may lie between.
    assert (drawn != want).sum() <= 1
