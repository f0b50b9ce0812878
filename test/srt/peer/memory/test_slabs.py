"""Slabs of a range: mapped one by one, sealed, scrubbed, and gone without a trace; and what another process sees."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang.srt.peer.memory.slabs import GRANULARITY, SlabError, SlabRange, allocate_slab
from support.children import children
from support.slab_process import hold, read_beyond_the_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

SLAB = 4 * GRANULARITY


def num_fds() -> int:
    """Descriptors of slabs alone: whatever else this process does may open and close others at any time."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            count += "peer-slab" in os.readlink(f"/proc/self/fd/{fd}")
    return count


def mapped_slabs() -> int:
    return Path("/proc/self/maps").read_text().count("peer-slab")


def is_reserved(memory: tuple[int, int]) -> bool:
    """Whether all of (address, size) is mapped by this process; when it was given up, others may have got a part."""
    first, size = memory
    covered = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        covered += max(0, min(end, first + size) - max(start, first))
    return covered == size


def test_a_lenders_slabs_are_zero_and_in_one_piece():
    slabs = SlabRange.owned(3, SLAB)
    assert slabs.memory.shape == (3 * SLAB,) and slabs.memory.dtype == np.uint8 and not slabs.memory.any()
    slabs.memory[:] = 7
    assert all((slabs.slab(i) == 7).all() for i in range(3))
    slabs.scrub(1)
    assert [int(slabs.slab(i).sum()) for i in range(3)] == [7 * SLAB, 0, 7 * SLAB]
    slabs.close()


def test_both_sides_see_the_same_bytes_at_their_own_places():
    lender, borrower = SlabRange.owned(3, SLAB), SlabRange(5, SLAB, 6 * GRANULARITY)
    fd = os.dup(lender.fileno(1))
    borrower.map(4, fd)
    os.close(fd)
    borrower.slab(4)[:] = np.arange(SLAB) % 251
    assert (lender.slab(1) == np.arange(SLAB) % 251).all() and not lender.slab(0).any() and not lender.slab(2).any()
    start = 4 * 6 * GRANULARITY
    assert np.shares_memory(borrower.memory[start : start + SLAB], borrower.slab(4))
    assert [borrower.is_mapped(i) for i in range(5)] == [False] * 4 + [True]
    borrower.unmap(4)
    assert not borrower.is_mapped(4) and lender.slab(1)[5] == 5, "the lender still has it"
    lender.unmap(1)
    lender.allocate(1)
    assert not lender.slab(1).any(), "a new one"
    lender.close()


def test_the_memory_outlives_its_lender_for_as_long_as_it_is_mapped():
    lender, borrower = SlabRange.owned(1, SLAB), SlabRange(1, SLAB)
    fd = os.dup(lender.fileno(0))
    borrower.map(0, fd)
    os.close(fd)
    lender.slab(0)[:] = 3
    lender.close()
    assert (borrower.slab(0) == 3).all()
    borrower.close()


def test_a_tail_is_mapped_from_the_start_and_stays():
    before = mapped_slabs()
    slabs = SlabRange(2, SLAB, 2 * SLAB, tail_bytes=GRANULARITY)
    assert slabs.memory.shape == (4 * SLAB + GRANULARITY,) and not any(slabs.is_mapped(i) for i in range(2))
    tail = slabs.memory[4 * SLAB :]
    assert not tail.any() and num_fds() == 0, "no descriptor of it can be sent"
    slabs.allocate_all()
    slabs.memory[2 * SLAB :][:SLAB] = 7
    tail[:] = 3
    for i in (0, 1):
        slabs.scrub(i)
        slabs.unmap(i)
    with pytest.raises(AssertionError, match="there is no such slab"):
        slabs.allocate(2)
    slabs.close()
    del slabs
    gc.collect()
    assert (tail == 3).all() and mapped_slabs() == before + 1
    del tail
    gc.collect()
    assert mapped_slabs() == before


@pytest.mark.parametrize(
    "bad",
    [
        *((0, SLAB, SLAB), (1, 0, SLAB), (1, 100, SLAB), (1, SLAB, SLAB + 1), (2, SLAB, SLAB - GRANULARITY)),
        *((1, SLAB, SLAB, 1), (1, SLAB, SLAB, -GRANULARITY)),
    ],
)
def test_sizes_that_cannot_be_mapped(bad: tuple[int, ...]):
    with pytest.raises(ValueError, match=f"multiples of {GRANULARITY}"):
        SlabRange(*bad)


def test_more_addresses_than_there_are():
    with pytest.raises(SlabError, match=r"cannot map .* bytes: Cannot allocate memory"):
        SlabRange(1 << 20, 1 << 30)


def test_what_is_not_mapped_cannot_be_used():
    slabs = SlabRange(2, SLAB)
    for use in (slabs.unmap, slabs.slab, slabs.scrub):
        with pytest.raises(AssertionError, match="slab 1 is not mapped"):
            use(1)
    slabs.allocate(1)
    fd = os.dup(slabs.fileno(1))
    with pytest.raises(AssertionError, match="mapped already"):
        slabs.map(1, fd)
    with pytest.raises(AssertionError, match="mapped already, or there is no such slab"):
        slabs.map(2, fd)
    slabs.map(0, fd)
    os.close(fd)
    with pytest.raises(AssertionError, match="slab 0 was not allocated here"):
        os.dup(slabs.fileno(0))


def test_nobody_can_change_a_slabs_size():
    fd = allocate_slab(SLAB)
    for size in (0, SLAB - 1, SLAB + GRANULARITY):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert os.fstat(fd).st_size == SLAB
    os.close(fd)


def test_what_is_no_slab_is_refused(tmp_path: Path):
    slabs = SlabRange(1, SLAB)
    other_size, unsealed = allocate_slab(2 * SLAB), os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SLAB)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(SlabError, match=f"a slab of {2 * SLAB:,} bytes, where {SLAB:,} were agreed on"):
        slabs.map(0, other_size)
    with pytest.raises(SlabError, match="not sealed"):
        slabs.map(0, unsealed)
    with pytest.raises(SlabError, match="is no slab"):
        slabs.map(0, file)
    for fd in (other_size, unsealed, file):
        os.close(fd)
    with pytest.raises(SlabError, match=r"is no slab: .*Bad file descriptor"):
        slabs.map(0, file)
    assert not slabs.is_mapped(0)


def test_a_slab_that_cannot_be_mapped_leaks_nothing(monkeypatch: pytest.MonkeyPatch):
    slabs = SlabRange(1, SLAB)
    before = num_fds()
    monkeypatch.setattr(slabs._reservation, "_address", 1)  # no page begins there
    with pytest.raises(SlabError, match="Invalid argument"):
        slabs.allocate(0)
    assert num_fds() == before and not slabs.is_mapped(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("explicitly", [True, False])
def test_nothing_is_left(explicitly: bool):
    """Address space and descriptors, with close and without; a view keeps the addresses, and only those."""
    gc.collect()
    fds, slabs_before = num_fds(), mapped_slabs()
    lender, borrower = SlabRange.owned(8, SLAB), SlabRange(8, SLAB, 2 * SLAB)
    for i in range(8):
        fd = os.dup(lender.fileno(i))
        borrower.map(i, fd)
        os.close(fd)
    assert num_fds() == fds + 8, "the borrower keeps none"
    assert mapped_slabs() == slabs_before + 16
    for i in (0, 3):
        borrower.unmap(i)
        lender.unmap(i)
    assert num_fds() == fds + 6 and mapped_slabs() == slabs_before + 12
    view = borrower.memory[SLAB:]
    kept, gone = ((array.ctypes.data, array.nbytes) for array in (view, lender.memory))
    if explicitly:
        lender.close()
        borrower.close()
        assert mapped_slabs() == slabs_before and is_reserved(gone), "its addresses stay while it lives"
    del lender, borrower
    gc.collect()
    assert num_fds() == fds and is_reserved(kept) and not is_reserved(gone)
    assert mapped_slabs() == slabs_before + (0 if explicitly else 6)
    del view
    gc.collect()
    assert not is_reserved(kept) and mapped_slabs() == slabs_before


def test_another_process_sees_zeros_and_nothing_else():
    """A pool full of the lender's own bytes lends two slabs in the middle to a real process."""
    lender = SlabRange.owned(6, SLAB)
    lender.memory[:] = 0xAA
    ours, theirs = socket.socketpair()
    with children() as start, ours:
        borrower = start(hold, theirs, 2, SLAB)
        theirs.close()
        for i in (2, 3):
            lender.scrub(i)
        fds = [os.dup(lender.fileno(i)) for i in (2, 3)]
        socket.send_fds(ours, [b"x"], fds)
        for fd in fds:
            os.close(fd)
        _, seen = borrower.wait_for("looked")
        assert seen == {"bytes": [0], "beyond": 0, "resized": 0, "readable": True, "ends": [True, True, True]}
        assert [np.unique(lender.slab(i)).tolist() for i in range(6)] == [
            *([0xAA], [0xAA], [0xB0], [0xB1], [0xAA], [0xAA])
        ], "what the borrower wrote is in its slabs alone"
        ours.sendall(b"x")
        assert borrower.wait_for("unmapped")[1] == {"ends": [True, True], "mapped": 0}
        assert borrower.join() == 0
    for i in (2, 3):
        lender.scrub(i)
        assert not lender.slab(i).any(), "the lender sees nothing of the borrower's"
    lender.close()


def test_what_is_not_mapped_ends_the_process():
    """Said in the docstring, and what makes a mistake visible: no stray read finds somebody's bytes."""
    with children() as start:
        reader = start(read_beyond_the_end, SLAB)
        assert reader.join() == -signal.SIGSEGV
        reader.wait_for("read")
