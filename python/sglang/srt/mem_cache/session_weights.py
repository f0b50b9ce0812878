"""How much longer a session's pages stay: pure functions over plain numbers.

A tier ranks pages by their last use, and gives up the least recent. That is greedy-dual (Young, 1994; Cao and Irani,
1997) with pages of one size and one cost: the clock of launches is its inflation. One use is worth T launches, the
age at which the tier gives pages up (the characteristic time of Che, Tung and Wang, 2002). GDSF (Cherkasova, 1998)
counts uses, and here those to come count: a page that is found once in the T launches after it would have gone is
worth another T. Its bonus, in launches, is

    T * P,   P = (F(2 T) - F(T)) / (1 - F(T))

where F(x) is the probability that the session has returned x launches after its answer. P is the chance that one that
is not back at the age T is back at 2 T. The bonus is added to the last use when the answer ends. It is fixed there,
so that a lazy heap can rank it, and decays by itself as the clock runs.

The bonus is at most T. An abandoned session's pages stay twice as long as without it at the most, and a client
who inserts a share s of all tokens has at most 2 s / (1 + s) of the memory, whatever it claims of sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Returns(NamedTuple):
    """When a session may be back after its answer. The weights' sum is the probability that it returns at all."""

    # (n,) int64, launches.
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
    return Returns(gaps, weights)


def bonus_launches(returns: Returns, age: int) -> int:
    """How many launches longer a page stays than one without a session. age: T, at which the tier gives pages up; 0
    while it gives up none."""
    gaps, weights = returns
    in_second = float(weights[(gaps > age) & (gaps <= 2 * age)].sum())
    if age <= 0 or not in_second:
        return 0
    not_in_first = 1.0 - float(weights[gaps <= age].sum())
    # Rounding may make a certain return a little more than that.
    return round(age * min(1.0, in_second / max(not_in_first, in_second)))
