"""A queue of requests that lack more blocks than the host has room for: what is fetched must still be there when its
request starts. All that is asserted happens on the virtual clock."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark.harm import run_server
from benchmark.simulator.small_machine import SmallMachine
from benchmark.simulator.workloads import Conversation, Turn, Workload, random_tokens

from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.transfer import Tier

DEVICE, HOST, PEER, REMOTE = Tier.DEVICE, Tier.HOST, Tier.PEER, Tier.REMOTE
NUM_DOCUMENTS, DOCUMENT_TOKENS = 32, 1024


def asked_twice() -> Workload:
    """Each document once, with time enough to store it; then all of them at the same moment."""
    rng = np.random.default_rng(5)
    texts = [random_tokens(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    starts = [0.5 * i for i in range(NUM_DOCUMENTS)] + [0.5 * NUM_DOCUMENTS + 5.0] * NUM_DOCUMENTS
    talks = [
        Conversation(start, text, (Turn(random_tokens(rng, 8), 4),), think_s=0.0)
        for start, text in zip(starts, texts * 2, strict=True)
    ]
    return Workload("asked twice", tuple(talks), max_in_flight=None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["auto", "write_through"])
@pytest.mark.parametrize("with_peers", [False, True])
def test_a_queue_finds_what_storage_has(policy: str, with_peers: bool):
    assert policy in WRITE_POLICIES
    sizes = {DEVICE: 8192, HOST: 8192, REMOTE: 65536} | ({PEER: 4096} if with_peers else {})
    run = run_server(SmallMachine(sizes, write_policy=policy), [asked_twice()])
    prompts = run.counters["prompt_tokens"]
    found = sum(n for name, n in run.counters.items() if name.startswith("hit_tokens_"))
    # At most half of all prompts. The end of each document is no whole block, and some fetches are slower than
    # computing.
    assert found / prompts > 0.3, f"hits {found / prompts:.2f} of at most 0.5: {run.counters}"
