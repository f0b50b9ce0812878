"""What lenders and borrowers of slabs say to each other: msgspec structs, no pickle, no KV.

Over ZeroMQ there is one message each way, a heartbeat, and it is the sender's whole view: sent as soon as the view
changes, and again every so often. So nothing is acknowledged by itself, and what was lost is repaired by the next
one; `sequence` tells which of two views is the newer, and the older is dropped, be it late or doubled.

- register: `Register`, in every BorrowerHeartbeat.
- lend: a `Lend` that the borrower did not know.
- reclaim: its `reclaim_in_s`.
- acknowledge: `released` in a BorrowerHeartbeat, until the LenderHeartbeat has no such lease any more.

Over the slab channel (a Unix socket, `slab_channel.py`) a borrower asks for a slab's memory: Fetch, answered by Slab
or Refused. For strict leases it sends memory of its own instead: Stage, answered by Staged or Refused. From then on
that connection is for copies: Copy, answered by Copied or CopyRefused, in order.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

# Room for thousands of leases.
MAX_HEARTBEAT_BYTES = 1 << 20
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Token = Annotated[bytes, msgspec.Meta(max_length=64)]
# Of one Copy.
MAX_COPY_PAGES = 8192


class BorrowerId(NamedTuple):
    """One life of a borrower. A name's next life has a higher incarnation, and tells nothing of the former one's
    end."""

    name: str
    incarnation: int


class LeaseId(NamedTuple):
    """epoch: the lender's life that made the lease; a lender's next life has a higher one, and memory of its own."""

    epoch: int
    number: int


class Register(msgspec.Struct, frozen=True, kw_only=True):
    """page_bytes: what a slab must at least have room for. want_bytes: how much it would like to have, all in all.
    strict: it maps nothing, the lender executes the copies."""

    name: _Name
    incarnation: _Number
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]
    want_bytes: _Number
    strict: bool = False


class BorrowerHeartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """epoch: of the lender whose leases these are, 0 before it is known. mapped: numbers of leases whose memory the
    borrower may use. released: of those it will not touch again."""

    sequence: _Number
    register: Register
    epoch: _Number
    mapped: tuple[_Number, ...]
    released: tuple[_Number, ...]


class Lend(msgspec.Struct, frozen=True, kw_only=True):
    """token: to be shown for the memory. reclaim_in_s: the lease is asked back, and this many seconds are left from
    the sending of the message; None: it is not."""

    number: _Number
    slab: _Number
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    token: _Token
    strict: bool
    reclaim_in_s: Annotated[float, msgspec.Meta(ge=0)] | None


class LenderHeartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """incarnation: of the borrower it is for. lends: every lease of that borrower. slab_socket: path of the slab
    channel."""

    sequence: _Number
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    incarnation: _Number
    lends: tuple[Lend, ...]
    slab_socket: Annotated[str, msgspec.Meta(max_length=107)] = ""


class Fetch(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """I want to map a lease's slab."""

    name: _Name
    incarnation: _Number
    epoch: _Number
    number: _Number
    token: _Token


class Slab(msgspec.Struct, tag=True, frozen=True):
    """The memory's file descriptor comes with this message."""

    number: _Number


class Refused(msgspec.Struct, tag=True, frozen=True):
    """There is no such lease, or it is asked back."""

    number: _Number


class Stage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """I have such a strict lease. Copies go through memory of mine, whose file descriptor comes with this message."""

    name: _Name
    incarnation: _Number
    epoch: _Number
    number: _Number
    token: _Token
    size_bytes: Annotated[int, msgspec.Meta(ge=1)]


class Staged(msgspec.Struct, tag=True, frozen=True):
    """Copies may be asked for."""


class Copy(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Copy two runs of bytes of each page of a slab: run_bytes at first_byte of its first half, and as many at the
    same place of its second half, which are K and V of some layers.

    to_slab: from the staging memory, else to it. number, token: of the lease. page_bytes: of a page; page p begins at
    p * page_bytes of the slab. pages: (n,) int32, as bytes. staging_byte: where the n pairs of runs lie in the
    staging memory, one after the other."""

    sequence: _Number
    to_slab: bool
    number: _Number
    token: _Token
    page_bytes: Annotated[int, msgspec.Meta(ge=2)]
    first_byte: _Number
    run_bytes: Annotated[int, msgspec.Meta(ge=1)]
    staging_byte: _Number
    pages: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COPY_PAGES)]


class Copied(msgspec.Struct, tag=True, frozen=True):
    """It is done."""

    sequence: _Number


class CopyRefused(msgspec.Struct, tag=True, frozen=True):
    """Nothing was copied."""

    sequence: _Number
    why: Annotated[str, msgspec.Meta(max_length=400)]
