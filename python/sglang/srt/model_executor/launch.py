"""`Launch`: what the scheduler tells an executor to run. Plain data over numpy; no torch, thread or clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sglang.srt.mem_cache.transfer import Ticket, Tier
from sglang.srt.sampling.logprob_types import LogprobSpec
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
class SampleSpec:
    """How a request's tokens are chosen, made once per request. stop_ids: tokens that end it."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    num_prompt: int
    logprobs: LogprobSpec | None = None


@dataclass(frozen=True)
class PromptRows:
    """Rows first_row.. of the request's part of a launch (req: its place in the launch) predict the prompt's next
    tokens `targets` (n,) int32."""

    req: int
    first_row: int
    targets: np.ndarray
    spec: LogprobSpec


@dataclass(frozen=True)
class StreamedPrefix:
    """Tokens [start, end) of a request (req: its place in the launch) are not on the device: attention reads them
    layer by layer through the layer stream cache. Multiples of the page size. parts: in order, the tier and
    the frames there, int32; the same tuple for as long as nothing moves."""

    req: int
    start: int
    end: int
    parts: tuple[tuple[Tier, np.ndarray], ...]


@dataclass(frozen=True)
class Launch:
    """One forward pass. slots, starts, lens: (num_reqs,) int32; request i computes tokens starts[i] .. + lens[i].

    input_ids: (sum(lens),) int32; -1 stands for the token that the slot's previous launch samples. samples:
    (num_reqs,) bool, whether the request's last row is sampled. sampling: how, one per sampled request; the token
    they draw has position starts + lens. page_appends: (3, n) int32, single pages: slot, place in the sequence,
    frame; applied after page_runs. gates: loads that the pass waits for, layer by layer. output_ids: what requests
    with penalties have generated before this launch, for slots that begin to sample. prompt_logprobs: rows whose next
    token is known and wants its log-probability. streams: prefixes that the device does not have; the page table has
    nothing in their place.
    """

    seq: int
    mode: LaunchMode
    slots: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    input_ids: np.ndarray
    samples: np.ndarray
    sampling: tuple[SampleSpec, ...]
    page_runs: tuple[PageRun, ...]
    page_appends: np.ndarray
    gates: tuple[Ticket, ...]
    output_ids: tuple[tuple[int, np.ndarray], ...] = ()
    prompt_logprobs: tuple[PromptRows, ...] = ()
    streams: tuple[StreamedPrefix, ...] = ()
