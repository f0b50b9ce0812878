"""`LeaseState`: what has become of a slab between a lender and a borrower. Owns the names, which both sides use.

A lease is the lender's promise that one borrower may use one slab until it gives the slab back. The lender counts
every slab, lent or not; the borrower counts its leases. Each side goes from state to state when it acts itself, or
when it hears that the other side did, so the two may differ for as long as a message takes.
"""

from __future__ import annotations

from enum import Enum, auto


class LeaseState(Enum):
    """A borrower that copies through its lender (strict mode) needs no memory: its leases begin as HELD."""

    # There is no lease: the slab is the lender's own. At the lender only.
    FREE = auto()
    # There is a lease. The borrower does not have the slab's memory yet.
    GRANTED = auto()
    # The borrower uses the slab: it was given the memory, or may ask for copies.
    HELD = auto()
    # The lender has recalled the slab, and the borrower is to give it back before a deadline.
    RECALLED = auto()
    # The deadline has passed, and the borrower may still have mapped the slab. At the lender only.
    QUARANTINED = auto()
    # The borrower will not touch the slab again. At the borrower: the lender has not confirmed it yet. At the lender:
    # the lease has ended, and the engine is to overwrite the slab.
    GIVEN_BACK = auto()


def ranks_differ(num_ranks: int, num_theirs: int) -> bool:
    """Whether two engines are known to have different numbers of ranks: then some rank has none to lend to, or to
    borrow from. 0: not told."""
    return 0 not in (num_ranks, num_theirs) and num_ranks != num_theirs
