"""How much longer a session's pages stay: pure functions over plain numbers.

A tier ranks pages by their last use, and gives up the least recent. That is greedy-dual (Young, 1994; Cao and Irani,
1997) with pages of one size and one cost: the clock of launches is its inflation. A page's bonus is added to its last
use, in launches, when the answer ends. It is fixed there, so that a lazy heap can rank it, and decays by itself as
the clock runs.

The bonus. A page that is used once leaves the tier at the age T (the characteristic time of Che, Tung and Wang,
2002). To hold a page from T up to an age R takes its memory for

    held(R) = integral from T to R of (1 - F(x)) dx

launches, where F(x) is the probability that the session has returned x launches after its answer, and finds the page
with the probability F(R) - F(T). The same memory would have found others' pages: as many per launch as the tier
finds in the last half of its pages' lives (hits per page and time, as LHD counts them: Beckmann, Chen and Cidon,
2018). With m / T hits per page and launch, the bonus is R - T for the R that has the most of

    F(R) - F(T) - m / T * held(R)

R is at most 2 T. An abandoned session's pages then stay twice as long as without a bonus at the most, and a client
who inserts a share s of all tokens has at most 2 s / (1 + s) of the memory, whatever it claims of sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Returns(NamedTuple):
    """When a session may be back after its answer. The weights' sum is the probability that it returns at all."""

    # (n,) int64, ascending, launches.
    gaps: np.ndarray
    # (n,) float64.
    weights: np.ndarray


def expected_returns(own: Sequence[int], known: np.ndarray, return_share: float) -> Returns:
    """own: the session's last gaps. known: gaps of all sessions, int64. return_share: of all answers, those after
    which the session returned. What is known of all counts as much as one gap of the session's own (a prior with the
    information of one observation: Kass and Wasserman, 1995)."""
    if not len(known):
        return Returns(np.empty(0, np.int64), np.empty(0))
    num_own = len(own)
    gaps = np.concatenate((np.asarray(own, np.int64), known))
    weights = np.concatenate((np.ones(num_own), np.full(len(known), return_share / len(known)))) / (num_own + 1)
    order = np.argsort(gaps, kind="stable")
    return Returns(gaps[order], weights[order])


def bonus_launches(returns: Returns, age: int, price: float) -> int:
    """How many launches longer a page stays than one without a session. age: T, at which the tier gives pages up; 0
    while it gives up none. price: m."""
    gaps, weights = returns
    begin, end = np.searchsorted(gaps, (age, 2 * age), side="right").tolist()
    if age <= 0 or begin == end:
        return 0
    # F is a staircase, so that the best R is one of its steps.
    longer = gaps[begin:end] - age
    returned = np.cumsum(weights[begin:end])
    held = np.cumsum(weights[begin:end] * longer) + (1.0 - weights[:begin].sum() - returned) * longer
    worth = returned - price / age * held
    best = int(np.argmax(worth))
    return int(longer[best]) if worth[best] > 0 else 0


def price_of_memory(num_found: float, num_gone: float) -> float:
    """m: pages that a tier finds per page and T in the last half of their lives. num_found: pages that were found
    there, which had spent half of that half on the average. num_gone: pages that were given up at the end of it."""
    held = num_found / 4 + num_gone / 2
    return num_found / held if held else 0.0
