"""The messages between lenders and borrowers of slabs: msgspec structs, no pickle, no KV.

Over ZeroMQ there is one message in each direction, a heartbeat, which holds the sender's whole view. A heartbeat is
sent as soon as the view changes, and again at an interval. No message is acknowledged by itself: the next heartbeat
repairs what was lost. `sequence` tells which of two views is newer. The older one is dropped, whether it came late or
twice.

- Register: `Register`, in every BorrowerHeartbeat.
- Lend: a `Lease` that the borrower did not know.
- Recall: `num_allowed` in a LenderHeartbeat. The borrower chooses which slabs it gives back. If it keeps more past
  the deadline, the lender names slabs: the `due_in_s` of their leases.
- Give back: `given_back` in a BorrowerHeartbeat, until the LenderHeartbeat has no such lease any more.

Over the slab channel (a Unix socket, `slab_channel.py`) a borrower asks for a slab's memory: Fetch, answered by Slab
or Refused. For strict leases it sends memory of its own instead: Stage, answered by Staged or Refused. From then on
that connection is for copies: Copy, answered by Copied or CopyRefused, in order.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

# Room for thousands of leases.
MAX_HEARTBEAT_BYTES = 1 << 20
# Of one Copy.
MAX_COPY_PAGES = 8192
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
# Names a message, a life or a lease. It fits 64 bits.
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# Ranks add amounts, in 64 bits.
_Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Token = Annotated[bytes, msgspec.Meta(max_length=64)]


class BorrowerId(NamedTuple):
    """One life of a borrower, that is, one process. A higher incarnation of a name does not prove that the lower one
    has ended."""

    name: str
    incarnation: int


class LeaseId(NamedTuple):
    """A lease, among all that a lender's name ever granted."""

    # The lender's life that granted the lease. A lender's next life has a higher epoch, and memory of its own.
    epoch: int
    number: int


class Register(msgspec.Struct, frozen=True, kw_only=True):
    """A borrower's name, and how much it would borrow."""

    name: _Name
    incarnation: _Number
    # Of the borrower's pages. A slab must have room for one.
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]
    # How much the borrower would like to have from this lender in all, what it has included.
    demand_bytes: _Amount
    # What a slab saves the borrower, see `SlabUse`: in microseconds. 0: nothing, or it is not known.
    slab_value_us: _Amount = 0
    # Ranks of the borrower's engine. Each borrows from the same rank of the lender's. 0: not told.
    num_ranks: _Amount = 0


class BorrowerHeartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A borrower's view of its leases with one lender."""

    sequence: _Number
    register: Register
    # Of the lender whose leases these are; 0 before the borrower knows it.
    epoch: _Number
    # Numbers of the leases whose memory the borrower may have mapped.
    mapped: tuple[_Number, ...]
    # Numbers of the leases whose slabs the borrower will not touch again.
    given_back: tuple[_Number, ...]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, as its lender describes it."""

    number: _Number
    slab: _Number
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    # A secret, which requests for the memory, or for copies, have to show.
    token: _Token
    # The lender copies for the borrower, which gets no memory.
    strict: bool
    # Seconds from the sending of the message until a recalled slab is due; None: the slab is not recalled.
    due_in_s: Annotated[float, msgspec.Meta(ge=0)] | None


class LenderHeartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A lender's view of its leases with one borrower."""

    sequence: _Number
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    # Of the borrower that the message is for.
    incarnation: _Number
    # All leases of that borrower.
    leases: tuple[Lease, ...]
    # Path of the slab channel.
    slab_socket: Annotated[str, msgspec.Meta(max_length=107)] = ""
    # How many of the leases the borrower may keep, those left out that are recalled by name; None: all.
    num_allowed: _Amount | None = None
    # Of all slabs of this lender; 0: not told.
    slab_bytes: _Amount = 0
    # Every lease is strict.
    strict: bool = False
    # How many slabs the lender may ever lend; 0: see `why_nothing_is_lent`.
    num_lendable: _Amount = 0
    # Ranks of the lender's engine, which lends to engines with as many; 0: not told.
    num_ranks: _Amount = 0


class Fetch(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A borrower asks for the memory of a lease's slab, to map it."""

    name: _Name
    incarnation: _Number
    epoch: _Number
    number: _Number
    token: _Token


class Slab(msgspec.Struct, tag=True, frozen=True):
    """The answer to Fetch. The memory's file descriptor comes with this message."""

    number: _Number


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The answer to Fetch or Stage where the borrower has no such lease, or the slab is recalled."""

    number: _Number


class Stage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A borrower with a strict lease sends staging memory, through which copies go. The memory's file descriptor
    comes with this message."""

    name: _Name
    incarnation: _Number
    epoch: _Number
    number: _Number
    token: _Token
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]


class Staged(msgspec.Struct, tag=True, frozen=True):
    """The answer to Stage: the borrower may ask for copies."""


class Copy(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Copy runs of bytes of each page of a slab. A page is cut into `parts` equal parts. The run is at the same place
    of each: one layer of K and of V, for instance, where there are two parts."""

    sequence: _Number
    # From the staging memory to the slab, else from the slab.
    to_slab: bool
    # Of the lease.
    number: _Number
    token: _Token
    # Of a page. Page p begins at p * page_bytes of the slab.
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]
    # Of a page, all of one size.
    parts: Annotated[int, msgspec.Meta(ge=1)]
    first_byte: _Number
    run_bytes: Annotated[int, msgspec.Meta(ge=1)]
    # Where the runs lie in the staging memory, one after the other in the order of `pages`.
    staging_byte: _Number
    # (n,) int32, as bytes: numbers of pages within the slab.
    pages: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COPY_PAGES)]


class Copied(msgspec.Struct, tag=True, frozen=True):
    """The answer to Copy: it is done."""

    sequence: _Number


class CopyRefused(msgspec.Struct, tag=True, frozen=True):
    """The answer to Copy: nothing was copied."""

    sequence: _Number
    reason: Annotated[str, msgspec.Meta(max_length=400)]
