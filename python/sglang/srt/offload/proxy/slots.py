"""`SlotPool`: one buffer of a pipeline, allocated once and divided into slots, one per piece on its way.

It has a free list and is no ring: with several threads per stage, pieces end in another order than they began.
"""

from __future__ import annotations

import mmap
import queue

import numpy as np


class Slot:
    """memory: (slot_bytes,) uint8. It belongs to the thread that has acquired the slot."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory


class SlotPool:
    """The memory is touched at the start, so that no page fault delays a fetch."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert num_slots >= 1
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for memory in self._memories():
            self._free.put(Slot(memory))

    def acquire(self, block: bool = True) -> Slot | None:
        """A slot for the caller alone. None if no slot is free and block is False."""
        try:
            return self._free.get(block)
        except queue.Empty:
            return None

    def release(self, slot: Slot) -> None:
        self._free.put(slot)

    @property
    def num_free(self) -> int:
        return self._free.qsize()

    def _memories(self) -> list[np.ndarray]:
        memory = _mapped(self.num_slots * self.slot_bytes)
        memory[:: mmap.PAGESIZE] = 0
        return list(memory.reshape(self.num_slots, self.slot_bytes))


class FreshSlots(SlotPool):
    """The baseline without memory management (ShadowServe 6.4, "no MM"): memory is mapped for each piece and returned
    after it. On the CPU the cost is page faults; on a SmartNIC, registration comes on top."""

    def acquire(self, block: bool = True) -> Slot | None:
        slot = super().acquire(block)
        if slot is not None:
            slot.memory = _mapped(self.slot_bytes)
        return slot

    def release(self, slot: Slot) -> None:
        slot.memory = np.empty(0, np.uint8)
        super().release(slot)

    def _memories(self) -> list[np.ndarray]:
        return [np.empty(0, np.uint8)] * self.num_slots


def _mapped(size_bytes: int) -> np.ndarray:
    """Memory of its own, untouched, returned with the last reference."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
