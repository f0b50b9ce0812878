"""Scheduling policy: tables in, decisions out."""

from __future__ import annotations

import random
from itertools import product

import pytest

from sglang.srt.managers.cost_model import LoadLimit
from sglang.srt.managers.schedule_policy import (
    FETCH_PATIENCE,
    NO_LOADS,
    AdmissionNeed,
    BatchRoom,
    Candidate,
    LoadTimes,
    PrefillWork,
    balanced_order,
    best_recompute_len,
    blocks_to_fetch,
    choose_victim,
    chunk_of,
    count_prepared,
    decode_reserve,
    fetch_rank,
    pages_for,
    pages_to_admit,
    pairs_of,
    should_fill_bubble,
    stall_seconds,
    tokens_to_load,
)


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "pages"),
    [(0, 1, 0), (1, 1, 1), (7, 1, 7), (0, 16, 0), (1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 16, 2), (32, 16, 2)],
)
def test_pages_for(num_tokens: int, page_size: int, pages: int):
    assert pages_for(num_tokens, page_size) == pages


@pytest.mark.parametrize(
    ("active", "ratio", "page_size", "reserve"),
    [
        ([], 0.3, 1, 0),
        ([100], 0.3, 1, 30),
        ([100, 50], 0.3, 1, 45),
        ([100, 50], 1.0, 1, 150),
        ([100, 50], 1.0, 16, 7 + 4),
        ([100], 0.3, 16, 2),
        # At least one page each, whatever is left.
        ([0, 1, 2], 0.3, 1, 3),
        ([0, 1, 2], 1.0, 16, 3),
        ([5], 0.0, 4, 1),
    ],
)
def test_decode_reserve(active: list[int], ratio: float, page_size: int, reserve: int):
    assert decode_reserve(iter(active), ratio, page_size) == reserve


#   need, own future, retracted before, available, reserve, worst reserve, anything active -> admitted
@pytest.mark.parametrize(
    ("need", "future", "retracted", "available", "reserve", "worst", "active", "admitted"),
    [
        # Nothing active: whatever fits, and no reserve.
        (10, 90, False, 10, 0, 0, False, True),
        (11, 90, False, 10, 0, 0, False, False),
        (10, 90, True, 10, 0, 0, False, True),
        (0, 90, False, 0, 0, 0, False, True),
        # Beside others: the optimistic reserve, and one page.
        (10, 90, False, 16, 5, 50, True, True),
        (10, 90, False, 15, 5, 50, True, False),
        (1, 90, False, 2, 0, 0, True, True),
        (1, 90, False, 1, 0, 0, True, False),
        # Retracted once: only if its worst case and everybody's fit.
        (10, 90, True, 150, 5, 50, True, True),
        (10, 90, True, 149, 5, 50, True, False),
        (10, 0, True, 60, 5, 50, True, True),
        (10, 0, True, 59, 5, 50, True, False),
    ],
)
def test_pages_to_admit(need, future, retracted, available, reserve, worst, active, admitted):
    req = AdmissionNeed(need=need, own_future=future, was_retracted=retracted)
    assert (pages_to_admit(req, reserve, worst, active) <= available) is admitted


def test_a_retracted_request_is_never_admitted_more_readily():
    for need in (1, 5):
        for future in range(4):
            for worst in range(1, 8):
                for reserve in range(1, worst + 1):
                    again = pages_to_admit(AdmissionNeed(need, future, True), reserve, worst, True)
                    first = pages_to_admit(AdmissionNeed(need, future, False), reserve, worst, True)
                    assert again >= first or future + worst <= reserve


@pytest.mark.parametrize(("orders", "victim"), [([3], 0), ([1, 2, 3], 2), ([7, 2, 5], 0), ([0, 9, 4], 1)])
def test_choose_victim_takes_the_youngest(orders: list[int], victim: int):
    assert choose_victim(orders) == victim


@pytest.mark.parametrize(
    ("num_tokens", "budget", "page_size", "chunk"),
    [
        (10, 100, 1, 10),
        (100, 100, 16, 100),
        (101, 100, 1, 100),
        # Only the last chunk may end inside a page.
        (101, 100, 16, 96),
        (17, 16, 16, 16),
        (17, 15, 16, 0),
        (5, 15, 16, 5),
        (0, 15, 16, 0),
        (3, 0, 1, 0),
    ],
)
def test_chunk_of(num_tokens: int, budget: int, page_size: int, chunk: int):
    assert chunk_of(num_tokens, budget, page_size) == chunk


def order(queue: list[Candidate], load_ratio: float = 10) -> str:
    return "".join("abcdefgh"[place] for place, _ in balanced_order(queue, LoadLimit(0, load_ratio, 0)))


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ([], ""),
        # Nothing to load: first come, first served.
        ([Candidate(5), Candidate(1), Candidate(9)], "abc"),
        # Strata, Figure 7: C and D both load; F, which only computes, comes between.
        ([Candidate(1, ((1, 10),)), Candidate(1, ((2, 11),)), Candidate(9)], "acb"),
        # The oldest comes first, whatever it loads; then those that it leaves room for.
        ([Candidate(1, ((1, 99),)), Candidate(1, ((2, 1),)), Candidate(1)], "acb"),
        # Enough computation has come before: it may load.
        ([Candidate(10), Candidate(1, ((1, 99),)), Candidate(1)], "abc"),
        # D0 and D1 load the same: D1 comes right after D0, and costs nothing more.
        ([Candidate(1, ((1, 5),)), Candidate(1), Candidate(1, ((1, 5),))], "acb"),
        # ... also if what they load goes on differently, and although the batch is then bound by loading.
        ([Candidate(1, ((1, 5),)), Candidate(1), Candidate(1, ((1, 5), (2, 90)))], "acb"),
        # Put off twice, kept in order, behind all others.
        ([Candidate(1), Candidate(1, ((1, 50),)), Candidate(1, ((2, 40),)), Candidate(1), Candidate(1)], "adebc"),
        # Put off, then taken along with one that shares its load once there is enough to compute.
        ([Candidate(1), Candidate(1, ((1, 50),)), Candidate(9), Candidate(1, ((1, 50),))], "acdb"),
    ],
)
def test_batches_are_balanced(queue: list[Candidate], expected: str) -> None:
    assert order(queue) == expected


def printed_algorithm(queue: list[Candidate], limit: LoadLimit) -> list[tuple[int, bool]]:
    """Algorithm 1 of Strata as it is printed, for a batch that is never full; only that bundle hits are looked for
    among those that were put off, too, and that what may be loaded can have more terms than one."""
    left, batch, deprioritised = list(range(len(queue))), list[int](), list[int]()
    hits = set[int]()

    def loads(batch: list[int]) -> float:
        cost: dict[int, float] = {}
        for place in batch:
            for node, tokens in queue[place].loads:
                cost[node] = max(cost.get(node, 0), tokens)
        return sum(cost.values())

    def is_bundle_hit(place: int) -> bool:
        nodes = {node for each in batch for node, _ in queue[each].loads}
        return any(node in nodes for node, _ in queue[place].loads)

    def add_bundle_hits() -> None:
        for place in sorted(left + deprioritised):
            if is_bundle_hit(place):
                batch.append(place)
                hits.add(place)
                (left if place in left else deprioritised).remove(place)

    def loading_bound(place: int) -> bool:
        more = loads([*batch, place]) - loads(batch)
        compute = sum(queue[each].compute for each in [*batch, place])
        pairs = sum(queue[each].pairs for each in [*batch, place])
        most = limit.free + limit.per_token * compute + limit.per_pair * pairs
        return more > 0 and loads(batch) + more > most

    if left:
        batch.append(left.pop(0))
        add_bundle_hits()
    while left:
        place = left.pop(0)
        if loading_bound(place):
            deprioritised.append(place)
        else:
            batch.append(place)
            add_bundle_hits()
    return [(place, place in hits) for place in batch + deprioritised]


def random_queue(rng: random.Random) -> list[Candidate]:
    # Documents as paths of nodes; a request needs some of one's nodes, the last perhaps in part.
    documents = [[(10 * d + i, rng.choice((1, 20, 300))) for i in range(rng.randint(1, 3))] for d in range(4)]
    queue = []
    for _ in range(rng.randint(1, 20)):
        loads = list(rng.choice(documents))[: rng.randint(1, 3)] if rng.random() < 0.6 else []
        if loads and rng.random() < 0.3:
            loads[-1] = (loads[-1][0], max(1, loads[-1][1] // 2))
        prefix = sum(tokens for _, tokens in loads) + rng.choice((0, 0, 70))
        queue.append(Candidate(rng.choice((1, 5, 50)), tuple(loads), prefix))
    return queue


LIMITS = (LoadLimit(0, 4, 0), LoadLimit(60, 4, 0), LoadLimit(0, 0, 0.05), LoadLimit(30, 1, 0.01), LoadLimit(0, 0, 0))


@pytest.mark.parametrize("seed", range(60))
def test_balanced_order_is_the_printed_algorithm(seed: int) -> None:
    print(f"seed {seed}")
    queue = random_queue(random.Random(seed))
    for limit in LIMITS:
        found = list(balanced_order(queue, limit))
        assert sorted(place for place, _ in found) == list(range(len(queue))) and found[0] == (0, False)
        assert found == printed_algorithm(queue, limit) == list(balanced_order(queue, limit))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # The third would load 100 with 1 token to compute, and the first two load 100 with 2.
        (LoadLimit(0, 50, 0), "abdc"),
        (LoadLimit(0, 66, 0), "abdc"),
        (LoadLimit(0, 67, 0), "abcd"),
        # What loads for nothing does so once per batch, not once per request.
        (LoadLimit(100, 0, 0), "abdc"),
        (LoadLimit(199, 0, 0), "abdc"),
        (LoadLimit(200, 0, 0), "abcd"),
        # Pairs: 1 and 101 and 101 of them.
        (LoadLimit(0, 0, 0.985), "abdc"),
        (LoadLimit(0, 0, 1), "abcd"),
        (LoadLimit(50, 10, 0.59), "abdc"),
        (LoadLimit(50, 10, 0.60), "abcd"),
    ],
)
def test_a_batch_may_load_for_its_start_its_tokens_and_its_pairs(limit: LoadLimit, expected: str) -> None:
    queue = [
        Candidate(1),
        Candidate(1, ((1, 100),), prefix=100),
        Candidate(1, ((2, 100),), prefix=100),
        Candidate(1),
    ]
    assert "".join("abcd"[place] for place, _ in balanced_order(queue, limit)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starves(seed: int) -> None:
    """Whatever comes meanwhile, a batch has room for at least the first of the order: whoever has n before it in the
    queue is in one of the next n + 1 batches."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    limit = LIMITS[seed % len(LIMITS)]
    queue: list[tuple[int, Candidate]] = []
    latest: dict[int, int] = {}
    born = 0
    for round_ in range(200):
        for candidate in random_queue(rng)[: rng.choice((0, 0, 1, 6))]:
            latest[born] = round_ + len(queue)
            queue.append((born, candidate))
            born += 1
        if not queue:
            continue
        order = [place for place, _ in balanced_order([candidate for _, candidate in queue], limit)]
        assert order[0] == 0
        taken = {queue[place][0] for place in order[: rng.choice((1, 1, 3))]}
        assert all(round_ <= latest[each] for each in taken)
        queue = [each for each in queue if each[0] not in taken]
    assert born > 100 and all(latest[each] >= 199 for each, _ in queue)


@pytest.mark.parametrize(("prefix", "new"), [(0, 0), (0, 1), (0, 5), (7, 1), (7, 5), (100, 33)])
def test_pairs_are_what_causal_attention_computes(prefix: int, new: int) -> None:
    assert pairs_of(prefix, new) == sum(1 for q in range(prefix, prefix + new) for k in range(prefix + new) if k <= q)
    assert Candidate(new, prefix=prefix).pairs == pairs_of(prefix, new)


def test_work_of_a_batch_is_the_sum_of_its_requests() -> None:
    work = PrefillWork().plus(100, 20).plus(0, 5)
    assert work == PrefillWork(new=25, prefix=100, pairs=20 * 100 + 210 + 15)


@pytest.mark.parametrize(("front", "rest"), [(7, 3), (1, 10), (16, 16)])
def test_a_prompt_cut_in_two_has_the_pairs_of_the_whole(front: int, rest: int) -> None:
    """A front that is computed instead of loaded is a row of its own: no pair is lost or counted twice."""
    whole, cut = PrefillWork().plus(30, front + rest), PrefillWork().plus(30, front).plus(30 + front, rest)
    assert (cut.new, cut.pairs) == (whole.new, whole.pairs)


def test_times_of_loads() -> None:
    one, other = LoadTimes.between(2.0, 6.0, 4), LoadTimes.between(0.0, 8.0, 2)
    assert (one, other) == (LoadTimes(3.0, 6.0), LoadTimes(4.0, 8.0))
    assert one.and_also(other) == other.and_also(one) == LoadTimes(4.0, 8.0)
    assert one.and_also(LoadTimes(2.0, 9.0)) == LoadTimes(3.0, 9.0)
    assert one.and_also(NO_LOADS) == NO_LOADS.and_also(one) == one


@pytest.mark.parametrize(
    ("loads", "start", "compute_s", "num_layers", "stall_s"),
    [
        (NO_LOADS, 5.0, 1.0, 4, 0.0),
        # All is in before it starts.
        (LoadTimes(1.0, 4.0), 4.0, 1.0, 4, 0.0),
        # The last layer is in when the layer before it is computed: hidden to the last moment, and a little later.
        (LoadTimes(1.0, 7.0), 4.0, 4.0, 4, 0.0),
        (LoadTimes(1.0, 8.0), 4.0, 4.0, 4, 1.0),
        # It waits for the first layer, after which all is hidden.
        (LoadTimes(6.0, 7.0), 4.0, 4.0, 4, 2.0),
        # It computes nothing to speak of: it waits for all.
        (LoadTimes(2.0, 8.0), 0.0, 0.0, 4, 8.0),
        # One layer hides nothing.
        (LoadTimes(8.0, 8.0), 0.0, 100.0, 1, 8.0),
    ],
)
def test_stall_seconds(loads: LoadTimes, start: float, compute_s: float, num_layers: int, stall_s: float) -> None:
    assert stall_seconds(loads, start, compute_s, num_layers) == pytest.approx(stall_s)


@pytest.mark.parametrize("seed", range(40))
def test_stall_seconds_is_what_layers_computed_one_by_one_wait(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    layers, begin, takes = rng.randint(1, 8), rng.uniform(-5, 5), rng.choice((0.0, rng.uniform(0, 8)))
    start, compute_s = rng.uniform(-5, 5), rng.choice((0.0, rng.uniform(0, 8)))
    time = start
    for layer in range(layers):
        time = max(time, begin + takes * (layer + 1) / layers) + compute_s / layers
    loads = LoadTimes.between(begin, begin + takes, layers)
    assert stall_seconds(loads, start, compute_s, layers) == pytest.approx(time - start - compute_s)


@pytest.mark.parametrize(
    ("stall_s", "other_work_s", "waits"),
    [(9.0, None, False), (0.0, 0.0, False), (0.1, 0.0, True), (1.0, 1.0, False), (1.1, 1.0, True), (0.9, 1.0, False)],
)
def test_waits_for_load(stall_s: float, other_work_s: float | None, waits: bool) -> None:
    assert should_fill_bubble(stall_s, other_work_s) is waits


LOADER = Candidate(compute=10, loads=((7, 40), (8, 5)), prefix=45)
SHARER = Candidate(compute=10, loads=((7, 40), (9, 3)), prefix=43)
COMPUTER = Candidate(compute=30)


@pytest.mark.parametrize(
    ("room", "prepared"),
    [
        (BatchRoom(num_reqs=9, new_tokens=50, num_pages=1000), 3),
        (BatchRoom(num_reqs=2, new_tokens=50, num_pages=1000), 2),
        (BatchRoom(num_reqs=0, new_tokens=50, num_pages=1000), 0),
        # The third one is computed in part, and is the last one then.
        (BatchRoom(num_reqs=9, new_tokens=30, num_pages=1000), 3),
        (BatchRoom(num_reqs=9, new_tokens=20, num_pages=1000), 2),
        (BatchRoom(num_reqs=9, new_tokens=5, num_pages=1000), 1),
        # 55, 53 and 30 tokens.
        (BatchRoom(num_reqs=9, new_tokens=50, num_pages=138), 3),
        (BatchRoom(num_reqs=9, new_tokens=50, num_pages=137), 2),
        (BatchRoom(num_reqs=9, new_tokens=50, num_pages=54), 0),
    ],
)
def test_the_batch_that_is_held(room: BatchRoom, prepared: int) -> None:
    assert count_prepared([LOADER, SHARER, COMPUTER], room, page_size=1) == prepared


def test_a_batch_that_is_held_ends_with_a_request_that_is_computed_in_part() -> None:
    room = BatchRoom(num_reqs=9, new_tokens=25, num_pages=1000)
    assert count_prepared([COMPUTER, LOADER], room, page_size=1) == 1
    # A page of 16 tokens is left of the budget, and no whole page of another request.
    assert count_prepared([LOADER, COMPUTER], room, page_size=16) == 1


def test_what_a_batch_loads_counts_once() -> None:
    assert tokens_to_load([LOADER, SHARER, COMPUTER]) == 40 + 5 + 3
    shorter = Candidate(compute=1, loads=((7, 12),), prefix=12)
    assert tokens_to_load([shorter, LOADER]) == tokens_to_load([LOADER, shorter]) == 45
    assert tokens_to_load([]) == 0


@pytest.mark.parametrize("seed", range(60))
def test_the_front_to_recompute_makes_the_shortest_launch(seed: int) -> None:
    """Against all fronts, with costs of the kind that is fitted: a load has a latency, which is saved where nothing
    is left to load, and a front is one more row, which reads what is before it."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    page, layers = rng.choice((1, 3, 16)), rng.choice((1, 2, 32))
    num_load, above, chunk = page * rng.randint(0, 60), rng.choice((0, 500)), rng.choice((1, 40))
    token_s, pair_s = rng.choice((1e-3, 1e-4)), rng.choice((0.0, 1e-6, 1e-5))
    context_s = rng.choice((0.0, 0.0, 1e-6, 1e-4))
    load_s, latency_s = rng.choice((1e-5, 1e-3, 1e-2)), rng.choice((0.0, 1e-3, 3e-2))
    free_at = rng.choice((0.0, 0.05))

    def seconds_of(front: int) -> float:
        work = PrefillWork().plus(above + num_load, chunk)
        if front:
            work = work.plus(above, front)
        compute_s = token_s * work.new + context_s * work.prefix + pair_s * work.pairs
        left = num_load - front
        loads = LoadTimes.between(free_at, free_at + latency_s + load_s * left, layers) if left else NO_LOADS
        return compute_s + stall_seconds(loads, 0.0, compute_s, layers)

    for max_front in (0, page - 1, num_load // 3, num_load, 10 * num_load):
        front = best_recompute_len(num_load, page, seconds_of, max_front)
        assert front % page == 0 and 0 <= front <= min(num_load, max_front)
        best = min(seconds_of(each) for each in range(0, min(num_load, max_front) + 1, page))
        assert seconds_of(front) == pytest.approx(best)


def test_the_front_to_recompute_by_hand() -> None:
    """100 tokens at 3 ms to load or 1 ms to compute, in one layer: nothing is hidden, 25 less to load is 75 ms less,
    and each token computed is 1 ms more; all of them are cheapest. With as many layers as one likes loading and
    computing go on at once, and meet at 75."""
    load = lambda front, layers: LoadTimes.between(0.0, 3.0 * (100 - front), layers)  # noqa: E731
    for layers, best in ((1, 100), (10**6, 75)):
        seconds = lambda front: front + stall_seconds(load(front, layers), 0.0, front, layers)  # noqa: B023, E731
        assert best_recompute_len(100, 1, seconds, 100) == best
        assert best_recompute_len(100, 16, seconds, 100) == {100: 96, 75: 80}[best]
        assert best_recompute_len(100, 1, seconds, 60) == 60


def test_no_front_where_computing_never_pays() -> None:
    for num_load, page in product((0, 1, 64), (1, 16)):
        assert best_recompute_len(num_load, page, lambda front: 1.0, 64) == 0
        assert best_recompute_len(num_load, page, lambda front: float(front), 64) == 0


# -- the order of fetches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_sjf_prefers_short_jobs_and_starves_nobody(seed: int) -> None:
    """Jobs come while blocks are begun, one by one. Whoever comes once FETCH_PATIENCE * n further blocks have been
    begun does not come before a job of n."""
    rng = random.Random(seed)
    jobs: dict[int, list[int]] = {}  # left, begun before, wanted
    begun, came, turns = 0, 0, []
    while came < 150 or jobs:
        if came < 150 and (not jobs or rng.random() < 0.4):
            n = rng.choice((1, 2, 40))
            jobs[came] = [n, begun, n]
            came += 1
            continue
        first = min(jobs, key=lambda i: fetch_rank("sjf", jobs[i][0], jobs[i][1]))
        for other, (_, before, wanted) in jobs.items():
            assert other == first or jobs[first][1] < before + FETCH_PATIENCE * wanted
        alike = [i for i, job in jobs.items() if job[1] == jobs[first][1]]
        assert jobs[first][0] == min(jobs[i][0] for i in alike)
        begun += 1
        turns.append(first)
        jobs[first][0] -= 1
        if not jobs[first][0]:
            del jobs[first]
    assert len(set(turns)) == 150


def test_fifo_ranks_all_alike() -> None:
    assert len({fetch_rank("fifo", n, before) for n in (1, 100) for before in (0, 1000)}) == 1


# -- fetch or compute -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_link_s", "fetch_block_s", "compute_block_s", "others_s", "wanted"),
    [
        (0.0, 1.0, 2.0, 0.0, 10),  # fetching is faster
        (0.0, 2.0, 1.0, 0.0, 0),  # computing is
        (8.0, 1.0, 2.0, 0.0, 10),  # 18 against 20
        (12.0, 1.0, 2.0, 0.0, 0),  # 22 against 20
        (12.0, 1.0, 2.0, 9.0, 10),  # others are computed meanwhile
        (0.0, 3.0, 1.0, 15.0, 5),  # what comes while others are computed
        (0.0, 0.0, 0.0, 0.0, 10),  # of equals the longest fetch
    ],
)
def test_what_comes_sooner_is_done(
    on_link_s: float, fetch_block_s: float, compute_block_s: float, others_s: float, wanted: int
) -> None:
    fetch_s = lambda n: on_link_s + n * fetch_block_s  # noqa: E731
    compute_s = lambda n: (10 - n) * compute_block_s  # noqa: E731
    assert blocks_to_fetch(10, fetch_s, compute_s, others_s) == wanted


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_is_much_sooner(seed: int) -> None:
    rng = random.Random(seed)
    n, others_s = rng.randrange(1, 400), rng.choice((0.0, rng.uniform(0, 3)))
    on_link_s, block_s, token_s, pair_s = (rng.uniform(0, 10.0**-e) for e in (0, 2, 4, 7))
    fetch_s = lambda k: on_link_s + k * block_s  # noqa: E731
    compute_s = lambda k: token_s * 64 * (n - k) + pair_s * 64 * 64 * (n * n - k * k) / 2  # noqa: E731
    ready = [max(fetch_s(k) if k else 0.0, others_s) + compute_s(k) for k in range(n + 1)]
    found = blocks_to_fetch(n, fetch_s, compute_s, others_s)
    # Between two lengths that are looked at lie n / 64 others.
    step = -(-n // 64)
    assert ready[found] <= min(ready) + step * max(block_s, token_s * 64 + pair_s * 64 * 64 * n) + 1e-9
    assert found in (0, n) or ready[found] <= min(ready[0], ready[n])
    # The scheduler looks no further into a queue that is computed for as long as the whole fetch takes.
    assert blocks_to_fetch(n, fetch_s, compute_s, fetch_s(n)) == n
