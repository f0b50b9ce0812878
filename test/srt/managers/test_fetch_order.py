"""`FetchOrder` beside a plain model: the least rank first, of equals the oldest."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from sglang.srt.managers.fetch_order import FetchOrder
from sglang.srt.managers.prefetch import Prefetch
from sglang.srt.managers.schedule_policy import FETCH_ORDERS, fetch_rank


def prefetch(rng: random.Random) -> Prefetch:
    """One of a few chains of keys, so that requests share blocks; it asked from some block on."""
    chain, num_blocks = rng.randrange(3), rng.randrange(1, 8)
    keys = np.array([[chain] * 8 + [i] * 8 for i in range(num_blocks)], np.uint8)
    probed = rng.randrange(num_blocks)
    left = num_blocks - probed
    return Prefetch("", np.empty(0, np.int32), 1.0, keys=keys, probed=probed, blocks_left=left, begun_before=0)


@pytest.mark.parametrize("policy", FETCH_ORDERS)
def test_random_arrivals(policy: str):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    order = FetchOrder(policy)
    # The oldest first.
    model: dict[str, Prefetch] = {}

    def rank(each: Prefetch) -> int:
        return fetch_rank(policy, each.blocks_left, each.begun_before)

    for i in range(400):
        choice, rid = rng.random(), rng.choice(list(model)) if model else ""
        if choice < 0.4 or not rid:
            new = prefetch(rng)
            new.begun_before = i
            expected = sum(each.blocks_left for each in model.values() if rank(each) <= rank(new))
            assert order.blocks_before(new) == expected
            model[f"r{i}"] = new
            order.add(f"r{i}", new)
        elif choice < 0.7:
            model[rid].blocks_left = rng.randrange(1, 9)
            order.update(rid, model[rid])
        else:
            del model[rid]
            order.remove(rid)
        wanted = sorted(model, key=lambda rid: rank(model[rid]))
        assert list(order) == wanted and len(order) == len(model)
        for before, after in itertools.pairwise(wanted):
            assert order.is_before(before, after) and not order.is_before(after, before)
        for mine in model.values():
            last = rng.randrange(mine.probed, len(mine.keys))
            lacking = {
                rid
                for rid, each in model.items()
                if each.probed <= last < len(each.keys) and (each.keys[last] == mine.keys[last]).all()
            }
            assert lacking <= set(order.alike(mine, last))
        order.check_invariants(model)
