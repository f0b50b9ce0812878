"""What is copied to tiers when copies have been slow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang.srt.managers.load_planner import BELIEVED_S
from sglang.srt.mem_cache.transfer import D2H, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.time_units import Seconds
from support.local_engine import LocalEngine
from support.tiny_model import tiny_llama


def test_a_moment_of_slow_copies_is_not_believed_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped_s = 0.0
    engine = LocalEngine(
        tiny_llama(tmp_path),
        num_device_pages=800,
        num_host_pages=800,
        page_size=4,
        load_or_recompute=True,
        clock=lambda: Seconds(monotonic() + skipped_s),
    )
    costs = engine.scheduler.planner.expected.costs
    # So long that no copy of this machine looks slow beside it, however busy the machine is.
    monkeypatch.setattr(costs, "recompute_seconds", lambda start, end: 100.0)

    def num_copied(seed: int) -> int:
        """Tokens of a new prompt of 200 that the host has."""
        text = np.random.default_rng(seed).integers(3, 97, 200).astype(np.int32)
        engine.generate([text], SamplingParams(max_new_tokens=2))
        engine.settle()
        tree = engine.scheduler.cache.tree
        return sum(len(node.key) for node in tree.match("", text).path if node.frames[Tier.HOST] is not None)

    for seed in range(3):
        assert num_copied(seed) == 200
    for _ in range(100):
        costs.add_copy(int(costs._usual_bytes), 1000.0, D2H)
    assert num_copied(3) == 0 == num_copied(4)
    skipped_s += BELIEVED_S
    assert num_copied(5) > 0, "it is measured once more, by a small copy, and by others as that was fast"
    assert num_copied(6) == 200
    engine.close()
