"""`Launch`: what the scheduler tells an executor to run. Plain data over numpy; no torch, thread or clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sglang.srt.mem_cache.transfer import Ticket
from sglang.srt.sampling.sampling_params import SamplingParams


class LaunchMode(IntEnum):
    EXTEND = 0
    DECODE = 1


@dataclass(frozen=True)
class PageRun:
    """Pages first_page.. of a slot are these frames from now on. fresh: the slot has a new request."""

    slot: int
    first_page: int
    frames: np.ndarray
    fresh: bool = False


@dataclass(frozen=True)
class Launch:
    """One forward pass. slots, starts, lens: (num_reqs,) int32; request i computes tokens starts[i] .. + lens[i].

    input_ids: (sum(lens),) int32; -1 stands for the token that the slot's previous launch samples. samples:
    (num_reqs,) bool, whether the request's last row is sampled. sampling: parameters of the sampled requests; the
    token they draw has position starts + lens. page_appends: (3, n) int32, single pages: slot, place in the sequence,
    frame; applied after page_runs. gates: loads that the pass waits for, layer by layer.
    """

    seq: int
    mode: LaunchMode
    slots: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    input_ids: np.ndarray
    samples: np.ndarray
    sampling: tuple[SamplingParams, ...]
    page_runs: tuple[PageRun, ...]
    page_appends: np.ndarray
    gates: tuple[Ticket, ...]
