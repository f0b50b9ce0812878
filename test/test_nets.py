"""The nets hold: a short soak survives, and every planted bug is caught."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from support.mutations import LENDERS, MUTATIONS, QUEUES, configurations, first_tries, hunt
from support.residency_events import (
    ALTERNATING_LOADS,
    COMPUTED_HOLE,
    EVENTS,
    FETCHED_HOLE,
    GIVEN_UP_DUPLICATE,
    HOLE,
    LATE_LINK,
    LOSSY,
    MOVED,
    REWRITTEN_DUPLICATE,
    TWO_LOADS,
)
from support.soak import Soak
from support.soak_config import SoakConfig
from support.tier_mixes import TIER_MIXES, tier_mix, unused_parts


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Injected failures are logged with their tracebacks, thousands of them."""
    logger = logging.getLogger("sglang")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


# A small device and a long queue: many steps.
LONG = (100, 102, 103, 104, 105, 106, 107, 109, 111, 114)
# Configurations that take longer than the others, and are of use for what these do not catch. Those above 5000 are of
# mixes that run below.
LONG_CONFIGURATIONS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 17, 20, 22, 45, 237, 313),
    *(402, 504, 507, 522, 708, 1001, 1043, 5001, 5004, 6000, 9000),
)
# Mixes that run by default. Together they have all parts, and all events of EVENTS_OF_MIXES.
SHORT_MIXES = (
    ("peer", "disk"),
    ("peer", "remote", "stream"),
    ("remote", "lent"),
)
# Bugs that take longer to catch than the others.
LONG_HUNTS = (
    "own_slabs_count_as_agreed",
    "streamed_host_pages_free_at_once",
    "front_one_page_short",
    "front_not_computed",
    "claim_outlives_its_request",
    "gate_of_the_layer_before",
    "preload_not_waited_for",
    "preload_kept_when_its_load_fails",
    "partial_nodes_match_as_whole",
    "partial_nodes_are_computed_on",
    "computed_pages_give_way_to_partial_ones",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed in LONG else ()) for seed in range(100, 116)]
)
def test_soak(seed: int) -> None:
    soak = Soak(SoakConfig.draw(seed, 250))
    soak.run()
    assert soak.num_finished > 0


CONFIGURATIONS = list(configurations())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=str(c.seed), marks=pytest.mark.slow if c.seed in LONG_CONFIGURATIONS else ())
        for c in CONFIGURATIONS
        if c.seed not in (*QUEUES, *LENDERS)
    ],
)
def test_without_a_bug_the_hunt_finds_nothing(config: SoakConfig) -> None:
    Soak(config).run()


@pytest.mark.slow
def test_where_requests_queue_the_hunt_finds_nothing_and_every_mechanism_acts() -> None:
    counters: Counter[str] = Counter()
    for config in CONFIGURATIONS:
        if config.seed in QUEUES:
            soak = Soak(config)
            soak.run()
            counters.update(soak.ranks[0].core.scheduler.counters)
    assert all(counters[name] > 0 for name in SCHEDULING_COUNTERS), f"idle: {counters}"


@pytest.mark.parametrize("config", [c for c in CONFIGURATIONS if c.seed in LENDERS], ids=lambda config: config.seed)
def test_where_a_worker_lends_the_hunt_finds_nothing_and_slabs_go_both_ways(config: SoakConfig) -> None:
    soak = Soak(config)
    soak.run()
    counters = soak.ranks[0].core.scheduler.counters
    assert min(counters["slabs_lent"], counters["slabs_asked_back"], counters["retracted_reqs"]) > 0, f"{counters}"


# Seeds of short runs of a mix that together use all its parts and have its events. They save time, nothing else:
# where they no longer do, others are tried.
FIRST_SEEDS = {
    ("peer",): (2,),
    ("disk",): (6, 5),
    ("remote",): (6,),
    ("peer", "disk"): (4,),
    ("peer", "remote"): (2, 3),
    ("peer", "stream"): (1,),
    ("disk", "remote"): (4,),
    ("disk", "stream"): (0, 4),
    ("remote", "stream"): (4,),
    ("peer", "disk", "remote"): (3,),
    ("peer", "disk", "stream"): (5,),
    ("peer", "remote", "stream"): (2,),
    ("disk", "remote", "stream"): (7, 3),
    ("peer", "disk", "remote", "stream"): (8, 0),
    ("disk", "lent"): (4,),
    ("remote", "lent"): (3,),
    ("disk", "remote", "lent"): (0, 5),
}
# What happens to residency in the runs of a mix, each kind in one mix at least.
EVENTS_OF_MIXES = {
    ("peer",): (TWO_LOADS, ALTERNATING_LOADS, HOLE, COMPUTED_HOLE, GIVEN_UP_DUPLICATE, REWRITTEN_DUPLICATE),
    ("disk",): (LATE_LINK, HOLE, COMPUTED_HOLE, GIVEN_UP_DUPLICATE),
    ("peer", "disk"): (
        *(LOSSY, MOVED, TWO_LOADS, ALTERNATING_LOADS, HOLE, COMPUTED_HOLE, FETCHED_HOLE),
        *(GIVEN_UP_DUPLICATE, REWRITTEN_DUPLICATE),
    ),
    ("peer", "remote"): (MOVED, FETCHED_HOLE, TWO_LOADS),
    ("disk", "stream"): (LOSSY, HOLE, COMPUTED_HOLE, FETCHED_HOLE, REWRITTEN_DUPLICATE),
    ("peer", "remote", "stream"): (LATE_LINK, REWRITTEN_DUPLICATE),
    ("disk", "remote", "lent"): (HOLE, COMPUTED_HOLE, FETCHED_HOLE, GIVEN_UP_DUPLICATE, REWRITTEN_DUPLICATE),
}


@pytest.mark.parametrize(
    "mix",
    [pytest.param(mix, id="+".join(mix), marks=() if mix in SHORT_MIXES else pytest.mark.slow) for mix in TIER_MIXES],
)
def test_every_mix_of_tiers_is_met(mix: tuple[str, ...]) -> None:
    unused, missing, first = set(mix), set(EVENTS_OF_MIXES.get(mix, ())), FIRST_SEEDS.get(mix, ())
    for seed in (*first, *(seed for seed in range(16) if seed not in first)):
        soak = Soak(tier_mix(mix, seed))
        soak.run()
        unused &= unused_parts(mix, soak)
        missing -= {event for event, count in soak.events.counts.items() if count}
        if not unused and not missing:
            return
    raise AssertionError(f"of {'+'.join(mix)}, {unused or 'nothing'} served nothing; never happened: {missing}")


def test_routers_of_two_ranks_know_pages_of_one_token_on_disk_and_remote() -> None:
    """No mix has both, as ranks go by the page size."""
    config = replace(tier_mix(("disk", "remote"), 5), num_ranks=2, steps=200, admin_rate=0.02)
    assert config.page_size == 1 and config.storage is not None
    storage = replace(config.storage, write_policy="write_through")
    soak = Soak(replace(config, write_policy="write_through", storage=storage))
    soak.run()
    assert {"GPU", "CPU_PINNED", "DISK", "EXTERNAL"} <= soak.router.subscriber.media


def test_every_kind_of_event_is_expected_of_a_mix() -> None:
    assert {event for events in EVENTS_OF_MIXES.values() for event in events} == set(EVENTS)
    by_default = [EVENTS_OF_MIXES.get(mix, ()) for mix in SHORT_MIXES]
    assert {event for events in by_default for event in events} == set(EVENTS)
    assert set(SHORT_MIXES) <= set(TIER_MIXES)
    assert {part for mix in SHORT_MIXES for part in mix} == {part for mix in TIER_MIXES for part in mix}


def test_the_policy_auto_is_met_with_everything_else() -> None:
    soaks = [SoakConfig.draw(seed, 1) for seed in range(100, 116) if seed not in LONG]
    configs = [*(tier_mix(mix, FIRST_SEEDS.get(mix, (0,))[0]) for mix in SHORT_MIXES), *soaks]
    auto = [config for config in configs if config.write_policy == "auto"]
    assert {config.eviction_policy for config in auto} == set(EVICTION_POLICIES)
    for name, is_met in {
        "several ranks": lambda config: config.num_ranks > 1,
        "streaming": lambda config: config.streams,
        "lossy storage": lambda config: config.storage is not None and config.storage.is_lossy,
        "late links": lambda config: config.hang_rate > 0,
        "slabs that come and go": lambda config: config.num_peer_pages and config.slab_rate,
        "pages that are lent": lambda config: config.lend_rate > 0,
        "attached and detached storage": lambda config: config.storage_request_rate > 0,
    }.items():
        assert any(is_met(config) for config in auto), f"auto never meets {name}"


def test_the_first_tries_are_of_what_exists() -> None:
    """`python -m support.mutations --first-tries stale` writes them."""
    seeds = [config.seed for config in CONFIGURATIONS]
    assert len(set(seeds)) == len(seeds) and set(first_tries().values()) <= set(seeds)
    assert first_tries().keys() == MUTATIONS.keys()


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG_HUNTS else ()) for name in MUTATIONS]
)
def test_planted_bugs_are_caught(name: str) -> None:
    assert hunt(name) is not None, f"{name} survives the soak"
