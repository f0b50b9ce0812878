"""`Launch`: the scheduler's order to an executor. Plain data over numpy; no torch, thread or clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sglang.srt.mem_cache.transfer import Ticket, Tier
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sample_spec import SampleSpec

# In place of a token that was drawn, because the request's grammar could not be followed.
NO_TOKEN = -1


class LaunchMode(IntEnum):
    EXTEND = 0
    DECODE = 1


@dataclass(frozen=True)
class PageRun:
    """From now on, the pages of a slot from first_page on are these frames."""

    slot: int
    first_page: int
    # int32
    frames: np.ndarray
    # The slot has a new request.
    fresh: bool = False


@dataclass(frozen=True)
class PromptRows:
    """Rows of a request's part of a launch that predict prompt tokens whose log-probabilities are requested."""

    # The request's place in the launch.
    req: int
    first_row: int
    # (n,) int32, the tokens that rows first_row.. predict.
    targets: np.ndarray
    spec: LogprobSpec


@dataclass(frozen=True)
class StreamedPrefix:
    """Tokens [start, end) of a request are not on the device. Attention reads them layer by layer through the layer
    stream cache. start and end are multiples of the page size."""

    # The request's place in the launch.
    req: int
    start: int
    end: int
    # In order: the tier and the frames on it, int32. The tuple stays the same object as long as nothing moves.
    parts: tuple[tuple[Tier, np.ndarray], ...]


@dataclass(frozen=True)
class Launch:
    """One forward pass. Request i computes tokens starts[i] .. starts[i] + lens[i]."""

    seq: int
    mode: LaunchMode
    # (num_reqs,) int32 each.
    slots: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    # (sum(lens),) int32; -1 stands for the token that the slot's previous launch samples.
    input_ids: np.ndarray
    # (num_reqs,) bool, whether the request's last row is sampled.
    samples: np.ndarray
    # How tokens are drawn, one per sampled request. The token that a request draws has position starts + lens.
    sampling: tuple[SampleSpec, ...]
    page_runs: tuple[PageRun, ...]
    # (3, n) int32, single pages: slot, place in the sequence, frame; applied after page_runs.
    page_appends: np.ndarray
    # Loads that the pass waits for, layer by layer.
    gates: tuple[Ticket, ...]
    # (slot, int32): for slots that begin to sample with penalties or a grammar, the tokens that were generated before
    # this launch.
    output_ids: tuple[tuple[int, np.ndarray], ...] = ()
    prompt_logprobs: tuple[PromptRows, ...] = ()
    # Prefixes that are not on the device. The page table has no pages for them.
    streams: tuple[StreamedPrefix, ...] = ()
    # (2, n) int32: pages of the device, and the frames that they have from now on in the pool for layers with a
    # window; None where there is no such pool. Later ones come after earlier ones of the same page. Applied first.
    windowed_frames: np.ndarray | None = None
