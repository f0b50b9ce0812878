"""A scheduler that was restored from its snapshot decides as the one that it is of, byte for byte."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from sglang.srt.managers import snapshot as module
from sglang.srt.managers.schedule_batch import StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.snapshot import SnapshotError, restored, snapshot
from support.soak import Soak
from support.soak_config import SoakConfig


class Chain:
    """Deeper than pickle could follow."""

    __slots__ = ("name", "next", "values", "view")

    def __init__(self, name: int) -> None:
        self.name = name
        self.next: Chain | None = None


@dataclass
class Holder:
    first: Chain
    by_chain: dict[Chain, int]
    twice: object = None


@pytest.fixture
def with_tests(monkeypatch) -> None:
    """Classes of tests count as the package's."""
    monkeypatch.setattr(module, "_PACKAGE", ("sglang.", "support.", __name__))


def test_depth_does_not_matter_and_identity_stays(with_tests):
    chains = [Chain(i) for i in range(5 * sys.getrecursionlimit())]
    for chain, following in pairwise(chains):
        chain.next = following
    values = np.arange(12, dtype=np.int32)
    chains[0].values, chains[0].view = values.reshape(3, 4), values[2:9:3]
    limit = 7

    def below(chain: Chain) -> bool:
        return chain.name < limit and owner.first is chains[0]

    owner = Holder(chains[0], {chains[3]: 3, chains[0]: 0}, below)
    again = restored(snapshot(owner))
    assert again.first.next.next.next in again.by_chain and again.by_chain[again.first] == 0
    chain, length = again.first, 1
    while chain.next is not None and hasattr(chain.next, "next"):
        chain, length = chain.next, length + 1
        if chain.next is None:
            break
    assert length == len(chains)
    again.first.values[0, 2] = 99  # two views of one memory
    assert again.first.view.tolist() == [99, 5, 8] and values[2] == 2
    assert again.twice(again.first) and not again.twice(chain) and again.twice is not below


def test_other_classes_are_refused():
    assert restored(snapshot({"a": [1, (2, None)]})) == {"a": [1, (2, None)]}
    with pytest.raises(SnapshotError, match=r"needs subprocess\.Popen"):
        restored(pickle.dumps(__import__("subprocess").Popen))
    with pytest.raises(SnapshotError, match="cannot be read"):
        restored(snapshot([1, 2, 3])[:-5])


@pytest.mark.parametrize(
    "seed",
    [204, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(205, 215))],
)
def test_a_restored_scheduler_decides_alike(seed, with_tests, monkeypatch):
    """The pools of these seeds differ: host, storage, lending; loads and launches fail."""
    twins: dict[int, Scheduler] = {}
    compared = 0
    step = Scheduler.step

    def both(scheduler: Scheduler, inputs: StepInputs):
        nonlocal compared
        if inputs.step % 20 == 15:
            twins[id(scheduler)] = restored(snapshot(scheduler))
        decision = step(scheduler, inputs)
        if (twin := twins.get(id(scheduler))) is not None:
            assert step(twin, inputs).encode() == decision.encode()
            assert twin.state() == scheduler.state()
            compared += 1
        return decision

    monkeypatch.setattr(Scheduler, "step", both)
    Soak(SoakConfig.draw(seed, 40)).run()
    assert compared > 0


@pytest.mark.parametrize(
    "module, name",
    [("os", "system"), ("builtins", "eval"), ("builtins", "open"), ("sglang.srt.managers.crash_record", "os.system")],
)
def test_what_no_scheduler_holds_is_refused(module: str, name: str):
    """Also where a module of this package imports it."""
    data = b"\x80\x05\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    with pytest.raises(SnapshotError, match="no scheduler has"):
        restored(data + b"\x93.")
