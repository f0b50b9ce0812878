"""`SlotPool`: one buffer of a pipeline, allocated once and divided into slots, one per piece on its way.

A free list, not a ring: with several threads per stage, pieces are done in another order than they began.
"""

from __future__ import annotations

import mmap
import queue
from typing import Protocol

import numpy as np


class Slot(Protocol):
    """memory: (slot_bytes,) uint8."""

    memory: np.ndarray


class Slots(Protocol):
    num_slots: int

    def acquire(self, block: bool = True) -> Slot | None:
        """A slot for the caller alone, or None if none is free and it shall not wait for one."""
        ...

    def release(self, slot: Slot) -> None: ...

    @property
    def num_free(self) -> int: ...


class _PoolSlot:
    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory


class SlotPool:
    """The memory is touched when it is made, so that no page fault falls into a fetch."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert num_slots >= 1
        self.num_slots = num_slots
        memory = np.frombuffer(mmap.mmap(-1, num_slots * slot_bytes), np.uint8)
        memory[:: mmap.PAGESIZE] = 0
        self._slots = [_PoolSlot(memory[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(num_slots)]
        self._free: queue.SimpleQueue[_PoolSlot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    def acquire(self, block: bool = True) -> Slot | None:
        try:
            return self._free.get(block)
        except queue.Empty:
            return None

    def release(self, slot: Slot) -> None:
        assert isinstance(slot, _PoolSlot)
        self._free.put(slot)

    @property
    def num_free(self) -> int:
        return self._free.qsize()


class FreshSlots:
    """The baseline without memory management (ShadowServe 6.4, "no MM"): memory is mapped for each piece and given
    back after it; on the CPU what that costs are page faults, on a SmartNIC registration comes on top."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(num_slots):
            self._free.put(None)

    def acquire(self, block: bool = True) -> Slot | None:
        try:
            self._free.get(block)
        except queue.Empty:
            return None
        return _PoolSlot(np.frombuffer(mmap.mmap(-1, self._slot_bytes), np.uint8))

    def release(self, slot: Slot) -> None:
        assert isinstance(slot, _PoolSlot)
        slot.memory = slot.memory[:0].copy()
        self._free.put(None)

    @property
    def num_free(self) -> int:
        return self._free.qsize()
