"""`PageTable` beside a plain dict, on the CPU and with a table apart from its mirror, as on a GPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sglang.srt.model_executor.launch import PageRun
from sglang.srt.model_executor.page_table import PageTable

SLOTS = 6


class Apart(PageTable):
    """The table is another memory than the mirror: what a device without one would have."""

    def __init__(self, num_places: int) -> None:
        super().__init__(SLOTS, torch.device("cpu"), num_places)
        self._is_apart = True
        self._use_tables(self._new_tables())


def appends(*each: tuple[int, int, int]) -> np.ndarray:
    return np.array(each, np.int32).reshape(-1, 3).T


def run(slot: int, first: int, frames: list[int], fresh: bool = False) -> PageRun:
    return PageRun(slot, first, np.array(frames, np.int32), fresh)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [lambda n: PageTable(SLOTS, torch.device("cpu"), n), Apart])
@pytest.mark.parametrize("seed", range(6))
def test_any_launches_leave_the_pages_that_a_dict_has(kind, seed):
    print("seed", seed)
    rng = random.Random(seed)
    table, model = kind(256), {}
    for step in range(300):
        runs, singles = [], []
        for slot in rng.sample(range(SLOTS), rng.randrange(3)):
            fresh = slot not in model or rng.random() < 0.2
            old = [] if fresh else model[slot]
            first = rng.randint(max(0, len(old) - 3), len(old))
            frames = [rng.randrange(1000) for _ in range(rng.choice((1, 5, 70, 200)))]
            model[slot] = old[:first] + frames + old[first + len(frames) :]
            runs.append(run(slot, first, frames, fresh))
        for slot in rng.sample(sorted(model), rng.randint(0, len(model))):
            frame = rng.randrange(1000)
            singles.append((slot, len(model[slot]), frame))
            model[slot].append(frame)
        table.apply(runs, appends(*singles))
        if rng.random() < 0.7:
            table.write(*map(torch.from_numpy, table.changes()))
        elif table._is_apart:
            continue  # a launch that is void: the device hears of it later
        for slot, pages in model.items():
            where = table.starts[slot] + np.arange(len(pages))
            assert table.pages(slot, 0, len(pages)).tolist() == pages, (step, slot)
            assert table.at(where).tolist() == [pages]
    assert table.version > 0, "the table grew"


def test_room_is_used_again():
    table = PageTable(SLOTS, torch.device("cpu"), 256)
    for _ in range(50):
        table.apply([run(slot, 0, [1] * 60, fresh=True) for slot in range(4)], appends())
    assert table.version == 0 and len(table.table) == 256


def test_what_a_launch_under_way_has_seen_stays_when_the_table_grows():
    table = PageTable(SLOTS, torch.device("cpu"), 64)
    table.apply([run(0, 0, [7, 8], fresh=True)], appends())
    seen = table.pages(0, 0, 2)
    table.apply([run(1, 0, [1] * 500, fresh=True)], appends())
    assert table.version > 0 and seen.tolist() == [7, 8] == table.pages(0, 0, 2).tolist()
