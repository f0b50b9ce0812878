"""What a scheduler publishes where the publisher does not keep up."""

from __future__ import annotations

import numpy as np

from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, EventBatch, KVEventsConfig
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from support.kv_subscriber import KvSubscriber


class Full:
    """A publisher with a queue of one batch, which a test sends."""

    def __init__(self) -> None:
        self.has_gap = False
        self.queue: list[EventBatch] = []
        self.num_dropped = 0

    @property
    def keeps_up(self) -> bool:
        return not self.queue

    def publish(self, events: EventBatch) -> None:
        if self.queue:
            self.has_gap = True
            self.num_dropped += 1
        else:
            self.queue.append(events)


def test_after_a_gap_all_is_told_anew() -> None:
    hardware = SimulatedHardware(2, lambda launch: 1e-3, h2d_bandwidth=1e5)
    config = SchedulerConfig(page_size=4, num_device_pages=30, num_host_pages=60, context_len=100, page_bytes=100)
    sim = Simulation(config, hardware)
    publisher, subscriber = Full(), KvSubscriber()
    events = SchedulerKvEventsPublisher(sim.core.scheduler.cache, publisher, KVEventsConfig(), None)

    def ask(seed: int) -> None:
        tokens = np.random.default_rng(seed).integers(10, 1000, 50).astype(np.int32)
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        sim.run([(sim.now, TokenizedGenerateReqInput(f"{seed}", ids_to_bytes(tokens), params))])
        events.publish_kv_events()

    def send() -> None:
        for batch in publisher.queue:
            subscriber.apply(batch.events)
        publisher.queue.clear()

    ask(1)
    send()
    before = {medium: set(blocks) for medium, blocks in subscriber.blocks.items()}
    assert len(before["GPU"]) == 12
    # The second does not fit the queue; pages leave the device, which the subscriber does not hear.
    for seed in range(2, 8):
        ask(seed)
    assert publisher.num_dropped == 1, "what follows is of no use, and is not told"
    send()
    assert subscriber.blocks != before
    ask(8)
    (batch,) = publisher.queue
    assert batch.events[0] == AllBlocksCleared() and not publisher.has_gap
    send()
    for tier, medium in (("device", "GPU"), ("host", "CPU_PINNED")):
        cached = sim.core.scheduler.cache.tiers_state()[tier]["cached_tokens"]
        assert 4 * len(subscriber.blocks[medium]) == cached > 0, "exactly what the tiers have"
    ask(9)
    assert publisher.queue and AllBlocksCleared() not in publisher.queue[0].events
