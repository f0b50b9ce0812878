"""The batches that launches are built from, and what is remembered of a launch until it is over. Plain data over
numpy; batch_builder.py fills them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import NO_LOADS, PrefillWork
from sglang.srt.mem_cache.transfer import Ticket
from sglang.srt.model_executor.launch import Launch, LaunchMode, PageRun, PromptRows, StreamedPrefix
from sglang.srt.utils.time_units import LaunchSeq


@dataclass
class LaunchRecord:
    """What a launch will answer."""

    # The requests in it, and those that it samples, each with the epoch in which it asked.
    reqs: list[tuple[Req, int]]
    sampled: list[tuple[Req, int]]
    # Whether it waits for loads.
    has_gates: bool = False
    # Of a prefill: how far each request is computed then, and the work.
    ends: tuple[int, ...] = ()
    work: PrefillWork | None = None
    # Of a decode: tokens that it attends to.
    context: int = 0
    # Tokens that come through the layer stream cache, and how many of them from disk.
    streamed: int = 0
    from_disk: int = 0


class ExtendBatch:
    """Collects one prefill launch."""

    def __init__(self, seq: LaunchSeq, page_runs: list[PageRun]) -> None:
        self.seq = seq
        self.page_runs = page_runs
        self.reqs: list[Req] = []
        self.starts: list[int] = []
        self.lens: list[int] = []
        self.ids: list[np.ndarray] = []
        self.samples: list[bool] = []
        # Loads that the launch waits for, in order.
        self.gates: dict[Ticket, None] = {}
        # See `Launch.output_ids`.
        self.output_ids: list[tuple[int, np.ndarray]] = []
        self.prompt_logprobs: list[PromptRows] = []
        self.work = PrefillWork()
        # When what it waits for arrives.
        self.loads = NO_LOADS
        self.streams: tuple[StreamedPrefix, ...] = ()
        # See `Launch`.
        self.windowed_frames: np.ndarray | None = None

    def add(self, req: Req, start: int, ids: np.ndarray, samples: bool) -> None:
        self.reqs.append(req)
        self.starts.append(start)
        self.lens.append(len(ids))
        self.ids.append(ids)
        self.samples.append(samples)
        self.work = self.work.plus(start, len(ids))

    def launch(self) -> Launch:
        return Launch(
            seq=self.seq,
            mode=LaunchMode.EXTEND,
            slots=np.array([r.slot for r in self.reqs], np.int32),
            starts=np.array(self.starts, np.int32),
            lens=np.array(self.lens, np.int32),
            input_ids=np.concatenate(self.ids),
            samples=np.array(self.samples, np.bool_),
            sampling=tuple(r.spec for r, s in zip(self.reqs, self.samples) if s),
            page_runs=tuple(self.page_runs),
            page_appends=np.empty((3, 0), np.int32),
            gates=tuple(self.gates),
            output_ids=tuple(self.output_ids),
            prompt_logprobs=tuple(self.prompt_logprobs),
            streams=self.streams,
            windowed_frames=self.windowed_frames,
        )

    def record(self) -> LaunchRecord:
        return LaunchRecord(
            [(r, r.epoch) for r in self.reqs],
            [(r, r.epoch) for r, s in zip(self.reqs, self.samples) if s],
            has_gates=bool(self.gates),
            ends=tuple(start + n for start, n in zip(self.starts, self.lens)),
            work=self.work,
        )


class DecodeBatch:
    """The running requests as arrays, kept from launch to launch until one joins, leaves or has all its tokens on
    their way."""

    def __init__(self, reqs: list[Req], version: int) -> None:
        n = len(reqs)
        self.reqs = reqs
        # Of the running requests, see `RequestQueues`.
        self.version = version
        self.members = [(r, r.epoch) for r in reqs]
        self.slots = np.array([r.slot for r in reqs], np.int32)
        # The token that each computes next.
        self.starts = np.array([r.computed for r in reqs], np.int32)
        # When the decoded tokens of each enter the tree.
        self.insert_at = np.array([r.insert_at for r in reqs], np.int32)
        self.everyone = np.arange(n)
        self.ones = np.ones(n, np.int32)
        self.unknown = np.full(n, -1, np.int32)
        self.samples = np.ones(n, np.bool_)
        self.sampling = tuple(r.spec for r in reqs)
        self.steps_left = min((r.max_len - r.length for r in reqs), default=0)
