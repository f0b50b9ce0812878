"""`Launch`: what the scheduler tells an executor to run. Plain data over numpy; no torch, thread or clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sglang.srt.mem_cache.transfer import Ticket, Tier
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sample_spec import SampleSpec


class LaunchMode(IntEnum):
    EXTEND = 0
    DECODE = 1


@dataclass(frozen=True)
class PageRun:
    """Pages first_page.. of a slot are these frames from now on."""

    slot: int
    first_page: int
    # int32
    frames: np.ndarray
    # The slot has a new request.
    fresh: bool = False


@dataclass(frozen=True)
class PromptRows:
    """Rows of a request's part of a launch that predict prompt tokens whose log-probabilities are wanted."""

    # The request's place in the launch.
    req: int
    first_row: int
    # (n,) int32, the tokens that rows first_row.. predict.
    targets: np.ndarray
    spec: LogprobSpec


@dataclass(frozen=True)
class StreamedPrefix:
    """Tokens [start, end) of a request are not on the device: attention reads them layer by layer through the layer
    stream cache. Multiples of the page size."""

    # The request's place in the launch.
    req: int
    start: int
    end: int
    # In order, the tier and the frames there, int32; the same tuple for as long as nothing moves.
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
    # How, one per sampled request; the token that it draws has position starts + lens.
    sampling: tuple[SampleSpec, ...]
    page_runs: tuple[PageRun, ...]
    # (3, n) int32, single pages: slot, place in the sequence, frame; applied after page_runs.
    page_appends: np.ndarray
    # Loads that the pass waits for, layer by layer.
    gates: tuple[Ticket, ...]
    # (slot, int32): what requests with penalties have generated before this launch, for slots that begin to sample.
    output_ids: tuple[tuple[int, np.ndarray], ...] = ()
    prompt_logprobs: tuple[PromptRows, ...] = ()
    # Prefixes that the device does not have; the page table has nothing in their place.
    streams: tuple[StreamedPrefix, ...] = ()
