"""`StorageLink` and `StoreSlot`: operations in order, whatever the store does."""

from __future__ import annotations

import queue
import random
import threading
import time

import numpy as np
import pytest

from sglang.srt.mem_cache.block_keys import NO_KEYS
from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.storage_link import StorageLink, StoreSlot
from sglang.srt.mem_cache.transfer import GateError, StorageAction, StorageOp, Ticket
from sglang.srt.utils.stream import ThreadStream
from support.stream_emulator import StreamEmulator


class Store:
    """Counts what it is asked; `fails` makes every call raise."""

    name, block_tokens = "test", 4

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.fails = False

    def _called(self, *call: object) -> None:
        self.calls.append(call)
        if self.fails:
            raise OSError("the disk is gone")

    def exists(self, keys) -> int:
        self._called("exists", keys)
        return len(keys) - 1

    def get(self, keys, frames) -> int:
        self._called("get", keys, frames.tolist())
        return len(keys)

    def set(self, keys, frames, tenant=b"") -> int:
        self._called("set", keys, frames.tolist())
        return len(keys)

    def clear(self) -> bool:
        self._called("clear")
        return True

    def close(self) -> None:
        self._called("close")

    def stats(self) -> dict[str, int]:
        return {}


def no_store(setup: str) -> Store:
    raise StoreError(f"cannot open {setup}")


class Rig:
    def __init__(self, name: str = "fetch", store: Store | None = None, open_store=no_store) -> None:
        self.emulator = StreamEmulator(0)
        self.slot = StoreSlot(open_store, store)
        self.notified = 0
        self.link = StorageLink(name, self.slot, self.emulator.stream(name), self.notify)
        self.seq = 0

    def notify(self) -> None:
        self.notified += 1

    def submit(self, action: StorageAction, num_keys: int = 2, setup: str = "") -> Ticket:
        op = operation(self.link.name, self.seq, action, num_keys, setup)
        self.link.submit(op)
        self.seq += 1
        return op.ticket

    def run(self) -> list[tuple[int, bool, int]]:
        self.emulator.run(100)
        return [(r.seq, r.ok, r.count) for r in self.link.poll()]


def operation(link: str, seq: int, action: StorageAction, num_keys: int = 2, setup: str = "") -> StorageOp:
    keys = np.arange(num_keys * 16, dtype=np.uint8).reshape(-1, 16) if num_keys else NO_KEYS
    return StorageOp(Ticket(link, seq), action, keys, np.arange(num_keys, dtype=np.int32), num_keys * 100, setup)


A, B = bytes(range(16)), bytes(range(16, 32))


def test_operations_run_in_order_and_count():
    rig = Rig(store=Store())
    for action in (StorageAction.EXISTS, StorageAction.GET, StorageAction.SET, StorageAction.CLEAR):
        rig.submit(action)
    assert rig.link.poll() == [], "nothing has run yet"
    assert rig.run() == [(0, True, 1), (1, True, 2), (2, True, 2), (3, True, 1)]
    assert rig.slot.store.calls == [("exists", [A, B]), ("get", [A, B], [0, 1]), ("set", [A, B], [0, 1]), ("clear",)]
    assert rig.notified == 4 and rig.link.poll() == []


def test_of_a_synchronous_store_the_caller_waits_for_reads_alone():
    rig = Rig(store=Store())
    rig.slot.store.is_synchronous = True
    for action in (StorageAction.GET, StorageAction.SET, StorageAction.EXISTS):
        rig.submit(action)
    assert [call[0] for call in rig.slot.store.calls] == ["get"]
    assert rig.run() == [(0, True, 2), (1, True, 2), (2, True, 1)]


def test_the_order_of_numbers_is_asserted():
    rig = Rig(store=Store())
    rig.submit(StorageAction.EXISTS)
    for seq in (0, 2):
        with pytest.raises(AssertionError, match="out of order"):
            rig.link.submit(operation("fetch", seq, StorageAction.EXISTS))
    with pytest.raises(AssertionError, match="out of order"):
        rig.link.submit(operation("store", 1, StorageAction.SET))


def test_what_is_cancelled_before_it_starts_does_nothing_and_keeps_its_number():
    rig = Rig(store=Store())
    first, second = rig.submit(StorageAction.GET), rig.submit(StorageAction.GET)
    rig.link.cancel(second)
    rig.link.cancel(Ticket("fetch", 2))  # a decision's cancels are passed on before its operations
    rig.submit(StorageAction.GET)
    assert rig.run() == [(0, True, 2), (1, False, 0), (2, False, 0)]
    assert len(rig.slot.store.calls) == 1
    rig.link.cancel(first)
    rig.link.cancel(second)
    assert not rig.link._cancelled, "a cancel that comes too late leaves nothing behind"
    rig.submit(StorageAction.GET)
    assert rig.run() == [(3, True, 2)]


def test_a_store_that_raises_brought_nothing():
    rig = Rig(store=Store())
    rig.slot.store.fails = True
    rig.submit(StorageAction.GET)
    rig.emulator.run(100)
    (result,) = rig.link.poll()
    assert (result.ok, result.count, result.error) == (False, 0, "the disk is gone")
    rig.slot.store.fails = False
    rig.submit(StorageAction.GET)
    assert rig.run() == [(1, True, 2)], "the next may succeed"


def test_without_a_store_nothing_is_there():
    rig = Rig()
    for action in (StorageAction.EXISTS, StorageAction.GET, StorageAction.SET, StorageAction.CLEAR):
        rig.submit(action)
    rig.submit(StorageAction.DETACH, 0)
    assert [count for _, _, count in rig.run()] == [0] * 5


def test_attach_and_detach():
    opened = []

    def open_store(setup: str) -> Store:
        opened.append((setup, Store()))
        return opened[-1][1]

    rig = Rig("probe", open_store=open_store)
    rig.submit(StorageAction.ATTACH, 0, "here")
    rig.submit(StorageAction.EXISTS)
    rig.submit(StorageAction.DETACH, 0)
    rig.submit(StorageAction.EXISTS)
    assert rig.run() == [(0, True, 1), (1, True, 1), (2, True, 1), (3, True, 0)]
    assert [setup for setup, _ in opened] == ["here"]
    assert opened[0][1].calls[-1] == ("close",) and rig.slot.store is None


def test_a_store_that_does_not_open_says_why_and_leaves_none():
    rig = Rig("probe")
    rig.submit(StorageAction.ATTACH, 0, "there")
    assert rig.run() == [(0, True, 0)]
    assert rig.slot.last_error == "cannot open there" and rig.slot.store is None


def test_a_store_left_by_an_attachment_that_failed_elsewhere_is_closed_first():
    """A rank may have succeeded where another one failed; its store holds a lock on its folder."""
    left = Store()
    seen = []

    def open_store(setup: str) -> Store:
        seen.append(left.calls == [("close",)])
        return Store()

    rig = Rig("probe", left, open_store)
    rig.submit(StorageAction.ATTACH, 0)
    assert rig.run() == [(0, True, 1)] and seen == [True]


def test_a_store_that_cannot_close_is_gone_all_the_same():
    rig = Rig("probe", Store())
    rig.slot.store.fails = True
    rig.submit(StorageAction.DETACH, 0)
    assert rig.run() == [(0, False, 0)] and rig.slot.store is None


def test_a_launch_may_not_wait_for_storage():
    rig = Rig(store=Store())
    ticket = rig.submit(StorageAction.GET)
    with pytest.raises(GateError, match="may not wait"):
        rig.link.gate(ticket)


def test_the_bytes_are_limited_and_questions_are_not():
    stream = ThreadStream("fetch")
    slept: list[float] = []
    limit = RateLimit(2000.0, clock=lambda: 0.0, sleep=slept.append)
    link = StorageLink("fetch", StoreSlot(no_store, Store()), stream, rate_limit=limit)
    link.submit(operation("fetch", 0, StorageAction.EXISTS, 200))
    link.submit(operation("fetch", 1, StorageAction.GET, 4))
    stream.record().synchronize()
    assert slept == [0.2], "400 bytes at 2,000 per second, and what moves nothing takes no time"
    assert [r.count for r in link.poll()] == [199, 4]
    stream.close()


def test_a_dead_thread_raises_where_results_are_awaited():
    stream = ThreadStream("fetch")
    link = StorageLink("fetch", StoreSlot(no_store, Store()), stream)

    def die() -> None:
        raise SystemExit

    stream.enqueue(die)
    deadline = time.monotonic() + 5
    with pytest.raises(RuntimeError, match="stream fetch died"):
        while time.monotonic() < deadline:
            link.poll()
            time.sleep(0.001)


def test_what_an_operation_took_is_measured():
    rig = Rig(store=Store())
    times = iter((1.0, 3.5, 10.0, 10.25))
    rig.link = StorageLink("fetch", rig.slot, rig.emulator.stream("fetch"), clock=lambda: next(times))
    for _ in range(3):
        ticket = rig.submit(StorageAction.GET)
        if ticket.seq == 1:
            rig.link.cancel(ticket)
    rig.emulator.run(100)
    assert [r.seconds for r in rig.link.poll()] == [2.5, 0.0, 0.25]


def test_operations_that_overlap_share_the_time():
    """Begun at 0 and 1; the second waits for the first, which ends at 4."""

    store = OverlappingStore()
    rig = Rig(store=store)
    times = iter((0.0, 1.0, 4.0, 6.0))
    rig.link = StorageLink("fetch", rig.slot, rig.emulator.stream("fetch"), clock=lambda: next(times))
    for _ in range(2):
        rig.submit(StorageAction.GET)
    rig.emulator.run(100)
    for read in store.reads:
        read.end(2)
    assert [r.seconds for r in rig.link.poll()] == [4.0, 2.0]


class OverlappingStore(Store):
    """Reads end when the test says so: `reads[i].end(count)`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []

    def start_get(self, keys, frames, on_end):
        self._called("start_get", keys, frames.tolist())
        self.reads.append(Read(on_end))
        return self.reads[-1].give_up


class Read:
    def __init__(self, on_end) -> None:
        self.end = on_end
        self.times_given_up = 0

    def give_up(self) -> None:
        self.times_given_up += 1


def reading(num_reads: int) -> tuple[Rig, list[Read], list[Ticket]]:
    """A rig with so many reads under way."""
    store = OverlappingStore()
    rig = Rig(store=store)
    tickets = [rig.submit(StorageAction.GET) for _ in range(num_reads)]
    assert rig.run() == [], "all are under way, none has ended"
    assert len(store.reads) == num_reads
    return rig, store.reads, tickets


def test_reads_that_overlap_end_in_any_order_and_are_reported_in_theirs():
    rig, reads, _ = reading(4)
    reads[2].end(1)
    reads[1].end(2)
    assert rig.run() == [] and rig.notified == 2, "the first is still under way"
    reads[0].end(0)
    assert rig.run() == [(0, True, 0), (1, True, 2), (2, True, 1)], "each with its own count"
    reads[3].end(2)
    assert rig.run() == [(3, True, 2)] and rig.notified == 4
    assert not rig.link._begun and not rig.link._cancelled


def test_what_runs_by_itself_waits_in_line_behind_reads_only_to_be_reported():
    rig, reads, _ = reading(1)
    rig.submit(StorageAction.EXISTS)
    assert rig.run() == [], "it has run, and its turn has not come"
    assert rig.slot.store.calls[-1] == ("exists", [A, B])
    reads[0].end(2)
    assert rig.run() == [(0, True, 2), (1, True, 1)]


def test_a_read_cancelled_before_it_starts_is_not_started():
    store = OverlappingStore()
    rig = Rig(store=store)
    rig.submit(StorageAction.GET)
    rig.link.cancel(rig.submit(StorageAction.GET))
    assert rig.run() == [] and len(store.reads) == 1
    store.reads[0].end(2)
    assert rig.run() == [(0, True, 2), (1, False, 0)]
    assert store.reads[0].times_given_up == 0 and rig.notified == 2


def test_a_read_cancelled_under_way_is_given_up_and_ends_when_the_store_says_so():
    rig, reads, tickets = reading(2)
    rig.link.cancel(tickets[0])
    assert [read.times_given_up for read in reads] == [1, 0]
    assert rig.run() == [] and rig.notified == 0, "its pages are the store's until it has ended"
    reads[1].end(2)
    reads[0].end(1)
    assert rig.run() == [(0, True, 1), (1, True, 2)] and rig.notified == 2


def test_a_read_cancelled_after_its_end_is_left_alone():
    rig, reads, tickets = reading(2)
    reads[1].end(2)
    rig.link.cancel(tickets[1])  # ended, not reported yet
    reads[0].end(2)
    assert rig.run() == [(0, True, 2), (1, True, 2)]
    rig.link.cancel(tickets[0])  # reported
    assert [read.times_given_up for read in reads] == [0, 0]
    assert not rig.link._cancelled, "a cancel that comes too late leaves nothing behind"


def test_a_read_cancelled_while_it_is_being_started_is_given_up_once_it_has_been():
    """The store is still talking to its proxy when nobody wants the read any more."""
    store = OverlappingStore()
    rig = Rig(store=store)
    ticket = rig.submit(StorageAction.GET)
    start_get = store.start_get

    def cancelled_meanwhile(*args):
        rig.link.cancel(ticket)
        return start_get(*args)

    store.start_get = cancelled_meanwhile
    assert rig.run() == [] and store.reads[0].times_given_up == 1
    store.reads[0].end(0)
    assert rig.run() == [(0, True, 0)]


def test_a_store_may_end_a_read_when_it_is_given_up():
    rig, reads, tickets = reading(1)
    rig.link._begun[0].give_up = lambda: reads[0].end(1)
    rig.link.cancel(tickets[0])
    assert rig.run() == [(0, True, 1)] and rig.notified == 1


def test_a_store_may_answer_before_start_get_returns():
    class Quick(OverlappingStore):
        def start_get(self, keys, frames, on_end):
            give_up = super().start_get(keys, frames, on_end)
            on_end(1)
            return give_up

    rig = Rig(store=Quick())
    tickets = [rig.submit(StorageAction.GET) for _ in range(2)]
    assert rig.run() == [(0, True, 1), (1, True, 1)] and rig.notified == 2
    rig.link.cancel(tickets[1])
    assert rig.slot.store.reads[1].times_given_up == 0


def test_a_read_that_cannot_be_started_brought_nothing_and_the_others_go_on():
    rig, reads, _ = reading(1)
    rig.slot.store.fails = True
    rig.submit(StorageAction.GET)
    rig.emulator.run(100)
    rig.slot.store.fails = False
    rig.submit(StorageAction.GET)
    assert rig.run() == []
    reads[1].end(2)
    reads[0].end(1)
    assert rig.run() == [(0, True, 1), (1, False, 0), (2, True, 2)]


def test_other_links_work_beside_reads_and_a_new_store_takes_them_after():
    """What a read began with is its store to the end; attach, detach and clear come when nothing is in flight."""
    rig, reads, _ = reading(2)
    for name, action in (("store", StorageAction.SET), ("probe", StorageAction.EXISTS)):
        link = StorageLink(name, rig.slot, rig.emulator.stream(name))
        link.submit(operation(name, 0, action))
        rig.emulator.run(100)
        assert [(r.seq, r.ok) for r in link.poll()] == [(0, True)], "nobody waits for the reads"
    for read in reads:
        read.end(2)
    assert len(rig.run()) == 2
    first, second = rig.slot.store, OverlappingStore()
    rig.slot._open_store = lambda setup: second
    for seq, action in enumerate((StorageAction.CLEAR, StorageAction.DETACH, StorageAction.ATTACH), 1):
        link.submit(operation("probe", seq, action, 0))
    rig.submit(StorageAction.GET)
    assert rig.run() == [] and [r.count for r in link.poll()] == [1, 1, 1]
    assert first.calls[-2:] == [("clear",), ("close",)] and len(first.reads) == 2
    second.reads[0].end(1)
    assert rig.run() == [(2, True, 1)]


def test_reads_that_end_on_threads_are_each_reported_once_in_order():
    """Threads of a store end reads in any order while others are begun, cancelled and polled for."""
    num_reads = 400
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    given_up: list[int] = []
    notified: queue.SimpleQueue = queue.SimpleQueue()

    class Threaded(Store):
        def start_get(self, keys, frames, on_end):
            number = len(keys)
            waiting.put((number, on_end))
            return lambda: given_up.append(number)

    def end_some(seed: int) -> None:
        rng, held = random.Random(seed), []
        while (item := waiting.get()) is not None:
            held.append(item)
            while held and rng.random() < 0.6:
                number, on_end = held.pop(rng.randrange(len(held)))
                on_end(number)
        for number, on_end in held:
            on_end(number)

    stream = ThreadStream("fetch")
    link = StorageLink("fetch", StoreSlot(no_store, Threaded()), stream, lambda: notified.put(None))
    threads = [threading.Thread(target=end_some, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng, results, cancelled = random.Random(0), [], set()
    for seq in range(num_reads):
        link.submit(operation("fetch", seq, StorageAction.GET, 1 + seq % 50))
        if rng.random() < 0.3:
            cancelled.add(rng.randrange(seq + 1))
            link.cancel(Ticket("fetch", max(cancelled)))
        results += link.poll()
    stream.record().synchronize()
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    results += link.poll()
    stream.close()
    assert [r.seq for r in results] == list(range(num_reads))
    for result in results:
        if result.ok:
            assert result.count == 1 + result.seq % 50, "the count of another"
        else:
            assert result.seq in cancelled and result.error == "cancelled"
    assert notified.qsize() == num_reads
    assert all(result.seconds >= 0 for result in results)
    assert not link._begun and not link._cancelled
