"""Data planes by hand: stages of a chunk, one after another or at once."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark.simulator.data_plane import (
    RAW,
    Codec,
    DataPlane,
    DataPlaneClock,
    Stage,
    loss_as_delay,
    smart_nic_stages,
)
from benchmark.simulator.profiles import (
    CHUNK_COMPRESSED_SHARE,
    CHUNK_QUANTIZED_SHARE,
    CHUNK_TOKENS,
    L40S_BLUEFIELD3,
    MODELS,
)
from benchmark.simulator.workloads import LONGBENCH_NARRATIVEQA, TRIVIAQA, LongBenchSpec

from sglang.srt.mem_cache.transfer import FETCH, StorageAction, StorageOp, Ticket

# A chunk has 10 bytes: 2, 5 and 1 seconds.
STAGES = (Stage("network", 0.2), Stage("inflate", 0.5), Stage("dma", 0.1))
GBIT = 1e9 / 8


def ends(plane: DataPlane, *submitted: tuple[int, float], busy: bool = False) -> list[float]:
    """submitted: (chunks, when)."""
    clock: DataPlaneClock = plane.fetch()
    ops = []
    for i, (n, when) in enumerate(submitted):
        op = StorageOp(
            Ticket(FETCH, i), StorageAction.GET, np.zeros((n, 16), np.uint8), np.empty(0, np.int32), 10 * n
        )
        ops.append(clock(op, when, busy))
    return ops


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    plane = DataPlane(STAGES)
    assert ends(plane, (1, 3.0)) == [pytest.approx(3 + 8)]
    assert ends(plane, (4, 0.0)) == [pytest.approx(2 + 4 * 5 + 1)]
    assert plane.pace(10) == pytest.approx(5)


def test_one_after_another_the_stages_add_up() -> None:
    plane = DataPlane(STAGES, pipelined=False)
    assert ends(plane, (4, 0.0)) == [pytest.approx(32)] and plane.pace(10) == pytest.approx(8)


def test_the_pipeline_runs_empty_between_operations_or_does_not() -> None:
    two = ((2, 0.0), (2, 0.0))
    assert ends(DataPlane(STAGES), *two) == pytest.approx([13, 26])
    assert ends(DataPlane(STAGES, overlaps=True), *two) == pytest.approx([13, 23])
    assert ends(DataPlane(STAGES, overlaps=True), (2, 0.0), (1, 50.0)) == pytest.approx([13, 58])


def test_stages_on_the_gpu_are_slower_while_it_computes() -> None:
    plane = DataPlane((Stage("network", 0.1), Stage("decompress", 0.1, busy=0.4)))
    assert plane.pace(10, False) == pytest.approx(1) and plane.pace(10, True) == pytest.approx(4)
    assert ends(plane, (2, 0.0), busy=True) == [pytest.approx(9)]
    assert DataPlane(STAGES, slower=3.0).pace(10) == pytest.approx(15)
    assert loss_as_delay(0.3) == pytest.approx(3 / 7)


def test_the_bluefield_is_what_the_paper_says() -> None:
    nic, chunk = L40S_BLUEFIELD3.nic, CHUNK_TOKENS * MODELS["Llama-3.1-8B"].kv_bytes_per_token
    assert nic is not None and chunk * CHUNK_COMPRESSED_SHARE == pytest.approx(6e6)
    codec = Codec(CHUNK_QUANTIZED_SHARE, CHUNK_COMPRESSED_SHARE)
    seconds = [s.seconds(chunk, False) for s in smart_nic_stages(nic.together, codec, 40 * GBIT)]
    assert seconds == pytest.approx([2.33e-3, 0.657e-3, 1.607e-3, 1.536e-3], rel=0.01)
    for limit in (40 * GBIT, 10 * GBIT):
        slowest = max(smart_nic_stages(nic.together, codec, limit), key=lambda stage: stage.seconds_per_byte)
        assert slowest.name == "network"
    assert smart_nic_stages(nic.together, RAW, 10 * GBIT)[0].seconds_per_byte == pytest.approx(0.8e-9)


@pytest.mark.parametrize("spec", [TRIVIAQA, LONGBENCH_NARRATIVEQA], ids=lambda s: s.name)
def test_longbench_has_the_lengths_of_the_paper(spec: LongBenchSpec) -> None:
    workload = spec.generate(1, 1.0, 32)
    lengths = [len(c.context) + 1 for c in workload.conversations]
    assert len(lengths) == 200 and np.median(lengths) == pytest.approx(spec.median, rel=0.01)
    assert np.percentile(lengths, 95) == pytest.approx(15_000, rel=0.01)
    assert {turn.output_len for c in workload.conversations for turn in c.turns} == {32}
    few = [len(c.context) for c in spec.generate(1, 1.0, 32, 20).conversations]
    assert np.mean(few) == pytest.approx(np.mean(lengths), rel=0.03)
