"""The cost model against launches and loads whose true cost is known."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.cost_model import CostModel, LoadLimit, non_negative_solution
from sglang.srt.managers.expected_times import ExpectedTimes
from sglang.srt.mem_cache.transfer import D2H, H2D
from sglang.srt.utils.time_units import Seconds

# An 8B model: some ms to start, 50 us per token, a little per cached token, attention.
TRUE = {"fixed_s": 4e-3, "token_s": 5e-5, "context_s": 1e-7, "pair_s": 2e-9}
LATENCY_S, BYTE_S = 2e-5, 2e-11
BYTES_PER_TOKEN = 131072

Launch = tuple[int, int, float]


def launch(rng: random.Random) -> Launch:
    """A batch of one to eight requests."""
    new = prefix = 0
    pairs = 0.0
    for _ in range(rng.randint(1, 8)):
        n, p = int(2 ** rng.uniform(4, 11)), rng.choice([0, int(2 ** rng.uniform(8, 16))])
        new, prefix, pairs = new + n, prefix + p, pairs + n * p + n * (n + 1) / 2
    return new, prefix, pairs


def true_seconds(new: int, prefix: int, pairs: float) -> float:
    return TRUE["fixed_s"] + TRUE["token_s"] * new + TRUE["context_s"] * prefix + TRUE["pair_s"] * pairs


def trained(rng: random.Random, num_samples: int = 200, noise: float = 0.05, slower: float = 1.0) -> CostModel:
    model = CostModel(BYTES_PER_TOKEN)
    train(model, rng, num_samples, noise, slower)
    return model


def train(model: CostModel, rng: random.Random, num_samples: int, noise: float = 0.05, slower: float = 1.0) -> None:
    for _ in range(num_samples):
        sample = launch(rng)
        model.add_prefill(*sample, slower * true_seconds(*sample) * math.exp(rng.gauss(0, noise)))
        size = int(2 ** rng.uniform(16, 28))
        model.add_copy(size, slower * (LATENCY_S + BYTE_S * size) * math.exp(rng.gauss(0, noise)), H2D)


def worst_error(model: CostModel, rng: random.Random, slower: float = 1.0) -> float:
    """Relative, over launches and loads of all kinds."""
    errors = []
    for _ in range(100):
        sample = launch(rng)
        predicted = model.prefill_seconds(*sample)
        assert predicted is not None
        errors.append(predicted / (slower * true_seconds(*sample)) - 1)
        size = int(2 ** rng.uniform(16, 28))
        predicted = model.load_seconds(size)
        assert predicted is not None
        errors.append(predicted / (slower * (LATENCY_S + BYTE_S * size)) - 1)
    return max(map(abs, errors))


@pytest.mark.parametrize("seed", range(10))
def test_coefficients_are_recovered_from_noisy_samples(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = trained(rng)
    assert worst_error(model, rng) < 0.12
    state = model.state()
    assert state["token_s"] == pytest.approx(TRUE["token_s"], rel=0.2)
    assert state["pair_s"] == pytest.approx(TRUE["pair_s"], rel=0.2)
    assert state["load_byte_s"] == pytest.approx(BYTE_S, rel=0.1)
    assert state["load_latency_s"] == pytest.approx(LATENCY_S, rel=0.2)


def test_without_noise_they_are_exact_but_for_the_ridge():
    state = trained(random.Random(0), noise=0).state()
    for name, value in TRUE.items():
        # What the context costs is 1 % of a launch at most: the ridge takes it for something else.
        assert state[name] == pytest.approx(value, rel=0.02) or name == "context_s"
    assert (state["load_latency_s"], state["load_byte_s"]) == pytest.approx((LATENCY_S, BYTE_S), rel=0.01)


@pytest.mark.parametrize("slower", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_speed_is_followed(seed: int, slower: float):
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = trained(rng)
    train(model, rng, 150, slower=slower)
    assert worst_error(model, rng, slower) < 0.15


def test_nothing_is_known_before_the_first_sample():
    model = CostModel(BYTES_PER_TOKEN)
    assert model.prefill_seconds(1, 0, 1.0) is None
    assert model.decode_seconds() is None
    assert model.load_seconds(1) is None
    assert model.load_limit() is None
    assert set(model.state().values()) == {0.0}
    for seconds in (0.0, -1.0, math.inf, math.nan):
        model.add_prefill(100, 0, 5050.0, seconds)
        model.add_decode(1, 100, seconds)
        model.add_copy(100, seconds, H2D)
    assert model.prefill_seconds(1, 0, 1.0) is None and model.decode_seconds() is None and model.load_limit() is None
    with pytest.raises(ValueError, match="above 0"):
        CostModel(0)


@pytest.mark.parametrize("num_samples", [1, 2, 50])
def test_samples_that_are_all_alike_are_scaled_by_tokens_and_bytes(num_samples: int):
    model = CostModel(BYTES_PER_TOKEN)
    for _ in range(num_samples):
        model.add_prefill(8192, 1000, 4e7, 0.4)
        model.add_copy(2**20, 1e-3, H2D)
        model.add_decode(8, 10_000, 0.01)
    assert model.prefill_seconds(8192, 1000, 4e7) == pytest.approx(0.4, rel=1e-3)
    assert model.prefill_seconds(8000, 0, 3.8e7) == pytest.approx(0.39, rel=0.01)
    assert model.prefill_seconds(4096, 0, 8e6) == pytest.approx(0.2, rel=0.01)
    assert model.load_seconds(2**20) == pytest.approx(1e-3, rel=1e-3)
    assert model.load_seconds(2**26) == pytest.approx(64e-3, rel=0.01)
    assert model.load_seconds(2**14) == pytest.approx(1e-3 / 64, rel=0.1)
    assert model.decode_seconds() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_loads_that_wait_for_prefills_do_not_make_loads_slow(by_kernel: bool):
    """Of 1.6 GB, beside prefills and alone: computing makes a kernel's loads slow, so that they are no reason to
    compute."""
    model, size = CostModel(BYTES_PER_TOKEN, (H2D,) if by_kernel else ()), 1_600_000_000
    for _ in range(10):
        model.add_copy(size, 0.033, H2D)
        model.add_copy(size, 0.040, D2H)
    for _ in range(30):
        model.add_copy(size, 0.24, H2D)
    assert model.load_seconds(size) == pytest.approx(0.04 if by_kernel else 0.24, rel=0.05)
    tokens = size // BYTES_PER_TOKEN
    assert model.there_and_back_seconds(tokens, H2D) == pytest.approx(0.08 if by_kernel else 0.28, rel=0.05)


@pytest.mark.parametrize(("by_kernel", "times"), [(False, 2), (True, 8)])
def test_a_load_by_a_kernel_is_overdue_later(by_kernel: bool, times: int):
    expected = ExpectedTimes(1000.0, 4, (H2D,) if by_kernel else ())
    expected.loads[H2D].begin(0, 0.1, Seconds(5.0))
    assert not expected.loads[H2D].is_overdue(Seconds(5.0 + times * 0.1 - 0.01))
    assert expected.loads[H2D].is_overdue(Seconds(5.0 + times * 0.1 + 0.01))


def test_a_feature_that_was_never_there_costs_nothing():
    model = CostModel(BYTES_PER_TOKEN)
    for new in (100, 1000, 4000):
        model.add_prefill(new, 0, 0.0, TRUE["fixed_s"] + TRUE["token_s"] * new)
    assert model.state()["pair_s"] == 0 and model.state()["context_s"] < 1e-3 * TRUE["token_s"]
    assert model.prefill_seconds(2000, 0, 0.0) == pytest.approx(TRUE["fixed_s"] + TRUE["token_s"] * 2000, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_behind_one_short_prefix_do_not_make_computing_free(seed: int):
    """A few prompts of similar length behind a system prompt, on a noisy machine: what they took is put down to what
    they computed, and not to the prefix that is the same in all."""
    print(f"seed {seed}")
    rng = random.Random(seed)

    def seconds(new: int, prefix: int) -> float:
        return 0.15 + 2e-3 * new + 5e-7 * (new * prefix + new * (new + 1) / 2)

    model = CostModel(BYTES_PER_TOKEN)
    model.add_prefill(31, 0, 31 * 16, seconds(31, 0) * rng.uniform(1, 2))
    for _ in range(4):
        new = rng.randrange(1000, 1300)
        model.add_prefill(new, 24, new * 24 + new * (new + 1) / 2, seconds(new, 24) * rng.uniform(1, 2))
    computed, hit = model.recompute_seconds(450, 1080), model.prefill_seconds(24, 1080, 24 * 1080 + 300)
    assert computed is not None and hit is not None
    assert 0.5 < computed / (seconds(630, 450) - seconds(0, 0)) < 3
    assert hit < computed, "what is cached costs less than what is computed"


@pytest.mark.parametrize("seed", range(5))
def test_a_first_call_that_warms_up_is_forgotten_at_once(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = CostModel(BYTES_PER_TOKEN)
    model.add_prefill(1000, 0, 5e5, 100 * true_seconds(1000, 0, 5e5))
    model.add_copy(2**20, 100 * (LATENCY_S + BYTE_S * 2**20), H2D)
    model.add_decode(8, 1000, 1.0)
    train(model, rng, 20)
    assert worst_error(model, rng) < 0.3
    model.add_decode(8, 1000, 0.01)
    assert model.decode_seconds() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("slower", [4, 10, 1000])
def test_a_link_that_slows_down_is_known_after_three_copies(slower: int):
    """However many it was fast before, and though copies of about one size do not tell latency from bytes. What it
    takes to load is not known any more, and believed to have changed, too."""
    model = CostModel(BYTES_PER_TOKEN)
    for i in range(200):
        size = (112, 128, 128)[i % 3] * BYTES_PER_TOKEN
        model.add_copy(size, BYTE_S * size, D2H)
        model.add_copy(size, BYTE_S * size, H2D)
    for num_tokens in (128, 128, 112):
        size = num_tokens * BYTES_PER_TOKEN
        model.add_copy(size, slower * BYTE_S * size, D2H)
    assert model.there_and_back_seconds(512, H2D) == pytest.approx(
        2 * slower * BYTE_S * 512 * BYTES_PER_TOKEN, rel=0.1
    )
    assert model.load_seconds(512 * BYTES_PER_TOKEN) == pytest.approx(
        slower * BYTE_S * 512 * BYTES_PER_TOKEN, rel=0.1
    )
    model.add_copy(512 * BYTES_PER_TOKEN, BYTE_S * 512 * BYTES_PER_TOKEN, H2D)
    assert model.load_seconds(512 * BYTES_PER_TOKEN) < 2 * BYTE_S * 512 * BYTES_PER_TOKEN, "loads are as fast as ever"


@pytest.mark.parametrize("slower", [4, 100, 1000])
def test_a_link_that_becomes_fast_is_known_after_three_copies(slower: int):
    """One or two fast ones may be chance. Loads are believed to have changed, too."""
    model, size = CostModel(BYTES_PER_TOKEN), 128 * BYTES_PER_TOKEN
    for _ in range(60):
        assert not model.add_copy(size, slower * BYTE_S * size, D2H)
        model.add_copy(size, slower * BYTE_S * size, H2D)
    for _ in range(2):
        assert model.add_copy(size, BYTE_S * size, D2H), "it was far faster than expected"
        assert model.load_seconds(size) == pytest.approx(slower * BYTE_S * size, rel=0.1)
    model.add_copy(size, BYTE_S * size, D2H)
    # The more they differ, the less the older ones count.
    assert BYTE_S * size <= model.load_seconds(size) < (2.5 if slower < 10 else 1.4) * BYTE_S * size


def test_while_old_and_new_samples_are_mixed_a_slow_link_does_not_look_free():
    """Small copies that were slow and large ones that were fast look as if bytes cost nothing."""
    model = CostModel(BYTES_PER_TOKEN)
    for num_tokens, seconds in ((128, 0.01), (112, 0.1), (128, 0.01), (112, 0.1)):
        model.add_copy(num_tokens * BYTES_PER_TOKEN, seconds, D2H)
    assert model.load_seconds(BYTES_PER_TOKEN, H2D) > 0.01, "all of it is put down to the operation"
    assert model.there_and_back_seconds(1024, H2D) > 0.02


def test_a_tiny_copy_says_nothing_of_a_large_one():
    """A load of one token (two prompts begin alike) takes as long as one of hundreds."""
    costs = CostModel(bytes_per_token=2048)
    costs.add_copy(2048, 4e-4, H2D)
    alone = costs.load_seconds(512 * 2048)
    assert alone == pytest.approx(512 * 4e-4, rel=1e-3)  # nothing better is known
    costs.add_copy(512 * 2048, 1e-3, D2H)
    assert costs.load_seconds(512 * 2048) == pytest.approx(1e-3, rel=1e-3)
    assert costs.usual_load_seconds(H2D) == pytest.approx(2e-3, rel=1e-3)
    assert costs.there_and_back_seconds(512, H2D) == pytest.approx(2e-3, rel=1e-3)
    costs.add_copy(512 * 2048, 3e-3, H2D)
    assert costs.load_seconds(512 * 2048) == pytest.approx(3e-3, rel=0.1)


def test_a_tiny_fetch_says_nothing_of_a_large_one():
    costs = CostModel(bytes_per_token=2048)
    costs.stores[0].add_fetch(2048, 4e-4)
    costs.stores[0].add_store(512 * 2048, 1e-3)
    assert costs.stores[0].fetch_seconds(1, 512 * 2048) == pytest.approx(1e-3, rel=1e-3)
    assert costs.stores[0].fetch_seconds(512, 512 * 2048) == pytest.approx(512 * 4e-4, rel=1e-3)
    assert costs.stores[0].usual_seconds(1024) == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_change_little(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = trained(rng)
    for _ in range(20):
        sample = launch(rng)
        model.add_prefill(*sample, rng.choice([30, 100, 1000]) * true_seconds(*sample))
        model.add_copy(2**20, 100 * (LATENCY_S + BYTE_S * 2**20), H2D)
        train(model, rng, 9)
    assert worst_error(model, rng) < 0.15
    # Too fast by far: it counts as three times too fast, an error of 2/3, and so is forgotten.
    sample = launch(rng)
    model.add_prefill(*sample, true_seconds(*sample) / 1000)
    model.add_copy(2**20, (LATENCY_S + BYTE_S * 2**20) / 1000, H2D)
    train(model, rng, 8)
    assert worst_error(model, rng) < 0.7
    train(model, rng, 100)
    assert worst_error(model, rng) < 0.15


def test_decode_is_expected_to_go_on_as_it_did():
    model = CostModel(BYTES_PER_TOKEN)
    for step in range(200):
        reqs = 1 + step % 32
        model.add_decode(reqs, 1000 * reqs, 5e-3 + 1e-4 * reqs)
    assert model.decode_seconds() == pytest.approx(5e-3 + 1e-4 * reqs, rel=0.02)
    model.add_decode(32, 32_000, 5e-3 + 32e-4)
    assert model.decode_seconds() == pytest.approx(5e-3 + 32e-4, rel=0.02)


def test_the_load_limit_is_where_loading_takes_as_long_as_computing():
    model = CostModel(BYTES_PER_TOKEN)
    model.add_prefill(1000, 0, 5e5, 0.05)
    assert model.load_limit() is None, "no load was measured"
    model = trained(random.Random(0), noise=0)
    limit = model.load_limit()
    assert limit is not None
    load_token_s = BYTES_PER_TOKEN * BYTE_S
    assert limit.per_token == pytest.approx(TRUE["token_s"] / load_token_s, rel=0.03)
    for new, pairs in ((1, 1.0), (100, 5050.0), (8192, 3e8)):
        loading = limit.num_tokens(new, pairs) * load_token_s
        assert loading == pytest.approx(true_seconds(new, 0, pairs), rel=0.03)
    assert LoadLimit(10.0, 2.0, 0.5).num_tokens(3, 4.0) == 18.0


@pytest.mark.parametrize("seed", range(3))
def test_the_same_samples_give_the_same_numbers_whatever_is_asked_in_between(seed: int):
    print(f"seed {seed}")
    quiet, asked = CostModel(BYTES_PER_TOKEN), CostModel(BYTES_PER_TOKEN)
    a, b = random.Random(seed), random.Random(seed)
    other = random.Random(seed + 1)
    for _ in range(50):
        train(quiet, a, 1)
        train(asked, b, 1)
        for _ in range(other.randint(0, 3)):
            asked.prefill_seconds(*launch(other))
            asked.load_limit()
        assert quiet.state() == asked.state()


positive = st.floats(1e-6, 1e3)
samples = st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 10**6), st.floats(0, 1e10), positive), max_size=30)


@settings(max_examples=150, deadline=None)
@given(samples, st.tuples(st.integers(0, 10**5), st.integers(0, 10**6), st.floats(0, 1e10)), st.data())
def test_whatever_was_measured_more_work_never_takes_less_time(measured, less, data):
    model = CostModel(BYTES_PER_TOKEN)
    for new, prefix, pairs, seconds in measured:
        model.add_prefill(new, prefix, pairs, seconds)
        model.add_decode(new, prefix, seconds)
        model.add_copy(prefix, seconds, H2D)
    assert all(0 <= c < math.inf for c in model.state().values())
    more = [each + extra for each, extra in zip(less, data.draw(st.tuples(*[st.integers(0, 10**6)] * 3)))]
    if not measured:
        return
    assert 0 <= model.prefill_seconds(*less) <= model.prefill_seconds(*more)
    assert 0 <= model.load_seconds(less[1]) <= model.load_seconds(more[1])
    limit = model.load_limit()
    assert limit is None or 0 <= limit.num_tokens(less[0], less[2]) <= limit.num_tokens(more[0], more[2])


@pytest.mark.parametrize("seed", range(50))
def test_the_non_negative_solution_is_the_best_of_all_choices(seed: int):
    """Every set of coefficients held at 0 is tried; the best that is feasible is the solution."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    # Nearly dependent columns, as sizes of launches are.
    rows = rng.uniform(0, 1, (12, 1)) + rng.choice([0.01, 0.3, 1.0]) * rng.normal(size=(12, n))
    matrix, vector = rows.T @ rows + 1e-4 * np.eye(n), rows.T @ rng.uniform(0.5, 1.5, 12)

    def cost(x: np.ndarray) -> float:
        return float(x @ matrix @ x / 2 - vector @ x)

    best = 0.0
    for free in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, n + 1)):
        x = np.zeros(n)
        x[list(free)] = np.linalg.solve(matrix[np.ix_(free, free)], vector[list(free)])
        if x.min() >= 0:
            best = min(best, cost(x))
    found = np.array(non_negative_solution(matrix.tolist(), vector.tolist()))
    assert found.min() >= 0
    assert cost(found) == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_a_prompt_is_computed_chunk_by_chunk():
    model = trained(random.Random(1), noise=0.0)
    chunk = 2048
    for start, end in ((0, 100), (0, 2048), (300, 9000), (5000, 5001)):
        parts = [(a, min(end, a + chunk)) for a in range(start, end, chunk)]
        wanted = [model.prefill_seconds(b - a, a, (b - a) * a + (b - a) * (b - a + 1) / 2) for a, b in parts]
        assert model.prompt_seconds(start, end, chunk) == pytest.approx(sum(wanted))


def test_a_prompt_longer_than_what_was_measured_is_not_known():
    model = CostModel(BYTES_PER_TOKEN)
    assert model.prompt_seconds(0, 10, 100) is None
    model.add_prefill(50, 0, 1275, 0.1)
    assert model.prompt_seconds(0, 100, 1000) is not None and model.prompt_seconds(0, 101, 1000) is None
    assert model.prompt_seconds(0, 1000, 100) is not None, "in launches that are known"


def test_a_long_prompt_takes_at_most_some_times_as_long_as_its_pieces():
    assert CostModel(BYTES_PER_TOKEN).most_prompt_seconds(0, 10, 100) is None
    model = trained(random.Random(1), noise=0.0)
    known = model.known_prefill
    end = 300 + 3 * known
    assert model.prompt_seconds(300, end, end) is None
    assert model.most_prompt_seconds(300, end, end) == pytest.approx(8 * model.prompt_seconds(300, end, known))
    assert model.most_prompt_seconds(300, 400, end) == model.prompt_seconds(300, 400, end)


def test_fetches_cost_by_operation_and_byte_until_storage_is_another():
    model = CostModel(BYTES_PER_TOKEN)
    assert model.stores[0].fetch_seconds(1, 100) is None
    for n in (1, 2, 3, 8) * 10:
        model.stores[0].add_fetch(n << 20, 2e-3 + n * 1e-3)
    assert model.stores[0].fetch_seconds(3, 5 << 20) == pytest.approx(3 * 2e-3 + 5e-3, rel=0.05)
    assert model.state()["fetch_latency_s"] == pytest.approx(2e-3, rel=0.1)
    model.forget_storage()
    assert model.stores[0].fetch_seconds(1, 100) is None


def test_two_fast_fetches_refute_slow_ones_of_any_number():
    model = CostModel(BYTES_PER_TOKEN)
    for _ in range(40):
        model.stores[0].add_fetch(10 << 20, 1.0)
    model.stores[0].add_fetch(1 << 20, 1e-3)
    assert model.stores[0].fetch_seconds(1, 10 << 20) > 0.5, "one may be chance"
    model.stores[0].add_fetch(10 << 20, 1.0)
    for _ in range(2):
        model.stores[0].add_fetch(1 << 20, 1e-3)
    assert model.stores[0].fetch_seconds(1, 10 << 20) == pytest.approx(1e-2, rel=0.1)
