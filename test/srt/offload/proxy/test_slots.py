"""The buffers of a pipeline: slots apart from each other, given out once, waited for."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.offload.proxy.slots import FreshSlots, SlotPool


@pytest.mark.parametrize("kind", [SlotPool, FreshSlots])
def test_slots_are_given_out_once_and_do_not_overlap(kind):
    slots = kind(3, 8192)
    held = [slots.acquire() for _ in range(3)]
    assert slots.num_free == 0 and slots.acquire(block=False) is None
    for i, slot in enumerate(held):
        assert slot.memory.shape == (8192,)
        slot.memory[:] = i + 1
    assert [set(slot.memory.tolist()) for slot in held] == [{1}, {2}, {3}]
    for slot in held:
        slots.release(slot)
    assert slots.num_free == 3


@pytest.mark.parametrize("kind", [SlotPool, FreshSlots])
def test_who_finds_no_slot_waits_for_one(kind):
    slots = kind(1, 4096)
    first, got = slots.acquire(), threading.Event()
    waiter = threading.Thread(target=lambda: (slots.acquire(), got.set()))
    waiter.start()
    assert not got.wait(0.05)
    slots.release(first)
    assert got.wait(120)
    waiter.join()


def test_a_fresh_slot_is_new_memory_each_time():
    slots = FreshSlots(1, 4096)
    slot = slots.acquire()
    slot.memory[:] = 7
    slots.release(slot)
    assert not slots.acquire().memory.any()


def test_a_pooled_slot_is_the_same_memory():
    slots = SlotPool(1, 4096)
    slot = slots.acquire()
    where = slot.memory.ctypes.data
    slots.release(slot)
    assert slots.acquire().memory.ctypes.data == where
