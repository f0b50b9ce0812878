"""Random schedules with real memory, real sockets and real processes: no borrower
ever reads a lender's bytes, and no lender a borrower's.

Slabs that are mapped at the lender are full of its own bytes. A borrower checks that a slab begins as zeros and that
it keeps what the borrower wrote there. Slabs are recalled; borrowers stand still, are killed and start anew, in this
process and others.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.transfer import LoadFailedError
from sglang.srt.peer.memory.slabs import SlabRange
from support.children import DEADLINE_S, Child, wait_until
from support.strict_process import FOREIGN, NUM_SLABS, OWN, borrow, borrowed_memory, lent_memory

HOME = b"\1" * NUM_SLABS


class BorrowerSide:
    """In this process. It holds what it is lent until a step lets it give back."""

    def __init__(self, endpoint: str, number: int) -> None:
        self.memory = borrowed_memory([endpoint], f"m{number}")
        self.pool = self.memory.pool
        self.mover = self.pool.mover()
        self.device = MHATokenToKVPool(self.pool.slab_pages, self.pool.page_layout)
        self.own = float(number)
        self.held: set[int] = set()

    def check(self, seen: Counter[str]) -> None:
        """A slab is zeros at first, then what this borrower wrote."""
        report = self.memory.poll_mapped()
        self.memory.mark_in_use(report.mapped)
        here = set(np.flatnonzero(np.frombuffer(report.mapped, np.uint8)).tolist())
        for place in sorted(here):
            try:
                if place not in self.held:
                    self.read(place)
                    assert not self.device.kv.any(), "a slab came with what another process had there"
                    self.device.kv.fill_(self.own)
                    self.mover.back_up(self.device.kv_pages, self.pages, self.frames(place), "auto")
                    self.held.add(place)
                    seen["lent"] += 1
                self.read(place)
                assert (self.device.kv == self.own).all(), "another process wrote to a slab that is lent"
                seen["read"] += 1
            except LoadFailedError:
                seen["refused"] += 1

    def give_back(self) -> None:
        report = self.memory.poll_mapped()
        here = [place for place in range(NUM_SLABS) if report.mapped[place]]
        chosen = here[: sum(report.num_wanted)]
        gone = [place for place in range(NUM_SLABS) if place not in here]
        self.memory.give_back([*gone, *chosen], chosen)
        self.held.difference_update(gone, chosen)

    @property
    def pages(self) -> torch.Tensor:
        return torch.arange(self.pool.slab_pages)

    def frames(self, place: int) -> torch.Tensor:
        return torch.from_numpy(self.pool.frames_of(place)).long()

    def read(self, place: int) -> None:
        self.device.kv.fill_(float("nan"))
        for layer in range(self.device.page_layout.num_layers):
            self.mover.load_layer(layer, self.device.kv_pages.layer(layer), self.frames(place), self.pages, "auto")


class World:
    def __init__(self, directory: Path, strict: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        self.endpoint = f"ipc://{directory}/peers"
        self.lender = lent_memory(self.endpoint, directory, strict, recall_s=0.05)
        self.is_home = [False] * NUM_SLABS
        self.borrowers = [BorrowerSide(self.endpoint, number) for number in (1, 2)]
        self.child = Child(borrow, self.endpoint)
        self.is_stopped = False
        self.seen: Counter[str] = Counter()

    @property
    def child_has_borrowed(self) -> bool:
        """A process of its own, which fails an assertion and ends if it reads what it did not write."""
        return any(each[0] == "has" and each[1] for each in self.child.said)

    def stop_or_go_on(self) -> None:
        self.is_stopped = not self.is_stopped
        if self.is_stopped:
            self.child.stop()
        else:
            self.child.go_on()

    def look(self) -> None:
        """A slab that is mapped again is zeros, and is filled. One that stays mapped keeps the lender's bytes."""
        for slab, is_home in enumerate(self.lender.poll_mapped().mapped):
            memory = self.lender.slabs.slab(slab)
            if is_home and not self.is_home[slab]:
                assert not memory.any(), "a slab comes back with what others wrote"
                memory[:] = OWN
                self.seen["home"] += 1
            elif is_home:
                assert (memory == OWN).all(), "a borrower wrote to a slab of the lender"
            self.is_home[slab] = bool(is_home)
        slabs = self.lender.state()["slabs"]
        assert min(slabs.values()) >= 0 and sum(slabs.values()) == NUM_SLABS, slabs
        self.seen["quarantined"] += slabs["quarantined"] > 0
        assert self.child.is_alive, "the child found what it had not written"
        # On its own thread; a failure ends that, and the next `here` raises.
        coordinator = self.lender.coordinator
        coordinator._submit(coordinator._lender.check_invariants)
        for borrower in self.borrowers:
            for each in borrower.memory.coordinator._links.values():
                borrower.memory.coordinator._submit(each.borrower.check_invariants)

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.15:
            home = [slab for slab in range(NUM_SLABS) if self.is_home[slab]]
            leaving = self.rng.sample(home, self.rng.randint(0, len(home)))
            self.lender.lend(leaving)
            for slab in leaving:
                self.is_home[slab] = False
        elif dice < 0.3:
            self.lender.recall(self.rng.randrange(NUM_SLABS + 1))
        elif dice < 0.5:
            self.rng.choice(self.borrowers).give_back()
        elif dice < 0.52:
            self.stop_or_go_on()
        elif dice < 0.53 and self.child_has_borrowed:
            self.child.kill()
            self.child, self.is_stopped = Child(borrow, self.endpoint), False
            self.seen["killed"] += 1
        else:
            self.rng.choice(self.borrowers).check(self.seen)
        self.look()
        time.sleep(0.001)  # others have a processor, too

    def bring_home(self) -> None:
        """Nobody stands still: all that is lent can be had back."""
        if self.is_stopped:
            self.stop_or_go_on()

        def all_home() -> bool:
            self.lender.recall(NUM_SLABS)
            for borrower in self.borrowers:
                borrower.give_back()
            return self.lender.poll_mapped().mapped == HOME

        wait_until(all_home, "all slabs to be given back")
        self.look()
        assert self.lender.state()["slabs"]["home"] == NUM_SLABS

    def close(self) -> None:
        self.child.kill()
        for borrower in self.borrowers:
            borrower.memory.close()
        self.lender.close()


@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
@pytest.mark.parametrize("steps", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_schedules(steps: int, strict: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    seed = int(os.environ.get("SEED", 0))
    print(f"seed {seed}")
    is_long = steps > 1000
    world = World(tmp_path, strict, seed)
    assert FOREIGN not in (borrower.own for borrower in world.borrowers)
    try:
        world.look()
        world.child.wait_for("has")
        wanted = {"home", "lent", "read"}
        end = time.monotonic() + DEADLINE_S
        while steps > 0 or not (wanted <= set(+world.seen) or time.monotonic() > end):
            world.step()
            steps -= 1
        world.bring_home()
    finally:
        world.close()
    seen = set(+world.seen)
    assert seen >= wanted and not (strict and "quarantined" in seen), world.seen
    if is_long:
        assert "killed" in seen and ("quarantined" in seen) != strict, world.seen


def test_a_lender_that_does_not_scrub_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(SlabRange, "scrub", lambda slabs, index: None)
    world = World(tmp_path, strict=False, seed=0)
    try:
        world.look()
        with pytest.raises(AssertionError, match=r"another process had there|with what others wrote"):
            for _ in range(5000):
                world.step()
    finally:
        world.close()
