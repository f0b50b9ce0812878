"""Documents that device and host hold together, but neither alone, are found, though the order is the worst for least
recently used. They are asked about one by one, and so many at once that the device has room for some only."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark.simulator.small_machine import SmallMachine
from benchmark.simulator.workloads import Conversation, Turn, Workload, random_tokens

from sglang.simulator.simulation import Simulation
from sglang.srt.mem_cache.transfer import Tier

DOCUMENT, NUM_DOCUMENTS, QUESTION, ANSWER = 116, 8, 3, 2
# A chunk is far longer than what is loaded for a question.
SIZES, CHUNK = {Tier.DEVICE: 584, Tier.HOST: 584}, 208
ROUNDS = 4


def found(all_at_once: bool) -> tuple[list[int], dict[str, int]]:
    """Document tokens that were found, by request of the rounds after the first; and counters."""
    sim = Simulation(
        (machine := SmallMachine(SIZES, page_size=1, chunk_tokens=CHUNK, context_len=256)).config(),
        machine.hardware(),
    )
    rng = np.random.default_rng(1)
    documents = [random_tokens(rng, DOCUMENT) for _ in range(NUM_DOCUMENTS)]
    gap_s = [1.0] + [0.0 if all_at_once else 1.0] * (ROUNDS - 1)
    asked = [
        Conversation(100.0 * number + i * gap_s[number], each, (Turn(random_tokens(rng, QUESTION), ANSWER),))
        for number in range(ROUNDS)
        for i, each in enumerate(documents)
    ]
    times = sim.run(Workload("documents", tuple(asked), max_in_flight=None).source())
    shares = {int(rid.partition("-")[0]): sum(each.cached_tokens_details.values()) for rid, each in times.items()}
    return [shares[i] for i in range(NUM_DOCUMENTS, len(asked))], sim.core.scheduler.cache.all_counters()


@pytest.mark.parametrize("all_at_once", [False, True], ids=["one by one", "all at once"])
def test_documents_that_fit_in_the_sum_are_found(all_at_once: bool) -> None:
    tokens, counters = found(all_at_once)
    assert len(tokens) == NUM_DOCUMENTS * (ROUNDS - 1)
    if not all_at_once:
        assert set(tokens) == {DOCUMENT}
    assert sum(tokens) >= 0.97 * DOCUMENT * len(tokens)
    assert counters["backup_dropped_tokens"] == 0, "a copy takes longer than a step, and requests wait for it"
