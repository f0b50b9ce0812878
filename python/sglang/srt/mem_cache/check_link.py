"""`CheckLink`: compares cached pages of the device with the same tokens' pages computed anew, for the canary.

Owns the folder with the evidence. Changes no page; decides nothing: an operation whose pages differ
fails, and the canary draws the conclusions.

Computing in other batches changes the last bits, so a page counts as different where, in a layer and component,

    |cached - computed| > limit * root mean square of computed + 2 eps * |computed|

anywhere, with the dtype's eps, and a limit of 128 eps, from 0.01 to 1. The second part is for a cache of 8 bits,
whose values round to other neighbours.

In a model of 30 layers (SmolLM2-135M, on a CPU) chunks of other sizes deviated by 1.4e-5 times that in float32, 0.026
in float16 and 0.17 in bfloat16.

A flipped bit of a small number may stay below that; another token's KV, zeros and NaN never do.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.hybrid_pages import HybridPages
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.mem_cache.page_memory import indexable
from sglang.srt.mem_cache.transfer import CHECK, TIER_NAMES, CheckOp, GateError, LayerGate, OpResult, Ticket
from sglang.srt.utils.device import to_device
from sglang.srt.utils.stream import Stream

logger = logging.getLogger(__name__)

# So much is compared at a time, a page at least. It takes 4 to 12 times as much memory, beside the pool: keys and
# values of 16 bits 7 times, of 8 bits 12 times.
_BYTES_AT_A_TIME = 32 << 20
# Files of evidence that are kept, the first ones.
_MAX_FILES = 16
_SMALLEST = 1e-30


def tolerance(dtype: torch.dtype) -> float:
    """Of a deviation, as a multiple of the root mean square."""
    return min(1.0, max(0.01, 128 * torch.finfo(dtype).eps)) if dtype.is_floating_point else 0.0


class CheckLink:
    """folder: where the evidence of a difference goes; made when it is needed. stream: what compares; it may wait for
    the device. notify: called from there after every operation."""

    name = CHECK

    def __init__(
        self, pool: DevicePool, folder: Path, rank: int, stream: Stream, notify: Callable[[], None] = lambda: None
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._rank = rank
        self._notify = notify
        self._stream = stream
        self._cuda_stream = torch.cuda.Stream(pool.kv.device) if pool.kv.is_cuda else None
        if pool.kv.is_cuda:
            # A thread begins on the first GPU, and would make a context there.
            stream.enqueue(partial(torch.cuda.set_device, pool.kv.device))
        self._next_seq = 0
        self._results: deque[OpResult] = deque()

    def submit(self, op: CheckOp) -> None:
        assert op.ticket == (self.name, self._next_seq), f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        self._stream.enqueue(partial(self._run, op))

    def cancel(self, ticket: Ticket) -> None:
        """It is over soon."""

    def gate(self, ticket: Ticket) -> LayerGate:
        raise GateError(f"{ticket}: nothing waits for a comparison")

    def poll(self) -> list[OpResult]:
        self._stream.raise_if_dead()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    # -- on the stream ------------------------------------------------------------------------------------------

    def _run(self, op: CheckOp) -> None:
        differing = None
        try:
            # None is no context at all.
            with torch.cuda.stream(self._cuda_stream):
                differing = self._first_differing(op)
                if differing is not None:
                    self._report(op, differing)
        except Exception:
            # Such as too little memory: no reason to stop serving.
            logger.exception("the canary could not compare %d pages", len(op.src_frames))
        self._results.append(OpResult(op.ticket.seq, ok=differing is None))
        self._notify()

    def _first_differing(self, op: CheckOp) -> int | None:
        """The place of the first page that differs among the operation's."""
        at_a_time = max(1, _BYTES_AT_A_TIME // self._pool.page_layout.page_bytes)
        for start in range(0, len(op.src_frames), at_a_time):
            part = slice(start, start + at_a_time)
            cached, computed = self._read_both(op, part)
            differs = torch.zeros(len(op.src_frames[part]), dtype=torch.bool, device=self._pool.kv.device)
            for of_cached, of_computed in zip(cached, computed):
                differs |= _differs(of_cached, of_computed)
            on_host = differs.cpu()
            if on_host.any():
                return start + int(on_host.nonzero()[0].item())
        return None

    def _read_both(self, op: CheckOp, part: slice) -> list[list[torch.Tensor]]:
        """Some of the pages as they were cached, and as they were computed."""
        cached, computed = (op.src_frames, op.src_windowed), (op.dst_frames, op.dst_windowed)
        return [
            self._read(frames[part], None if windowed is None else windowed[part])
            for frames, windowed in (cached, computed)
        ]

    def _read(self, frames: np.ndarray, windowed: np.ndarray | None) -> list[torch.Tensor]:
        """(num_layers, n, ...) of each component. windowed: the pages' frames in the pool for layers with a window,
        if there is one."""
        pages = self._pool.kv_pages
        if not isinstance(pages, HybridPages):
            return _select(pages, frames)
        assert windowed is not None, "layers with a window have frames of their own"
        found = []
        for of_full, of_windows in zip(_select(pages.full, frames), _select(pages.of_windows, windowed), strict=True):
            by_kind = {False: iter(of_full), True: iter(of_windows)}
            found.append(torch.stack([next(by_kind[each]) for each in pages.windowed]))
        return found

    def _report(self, op: CheckOp, place: int) -> None:
        """A line in the log, and a file with the page as it was cached and as it was computed."""
        page = self._pool.page_size
        end = len(op.tokens) - (len(op.src_frames) - place - 1) * page
        cached, computed = self._read_both(op, slice(place, place + 1))
        logger.error(
            "CANARY: cached KV differs from what the model computes: tokens %d to %d of a prompt, from %s. %s",
            end - page,
            end,
            TIER_NAMES[op.came_from],
            self._keep(op, end, cached, computed),
        )

    def _keep(self, op: CheckOp, end: int, cached: list[torch.Tensor], computed: list[torch.Tensor]) -> str:
        arrays: dict[str, Any] = {"tokens": op.tokens[:end], "came_from": np.array(TIER_NAMES[op.came_from])}
        for name, components in (("cached", cached), ("computed", computed)):
            # NumPy lacks some of torch's dtypes; float32 holds all values of the smaller ones.
            arrays |= {f"{name}_{i}": each[:, 0].float().cpu().numpy() for i, each in enumerate(components)}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            num_files = sum(1 for _ in self._folder.glob("difference-*.npz"))
            if num_files >= _MAX_FILES:
                return f"{self._folder} has {num_files} files already; no more are written."
            path = self._free_path()
            with path.open("xb") as file:
                path.chmod(0o600)
                np.savez_compressed(file, **arrays)
        except OSError as error:
            return f"Its evidence could not be kept: {error}."
        return f"Its tokens and both versions of the page are in {path}."

    def _free_path(self) -> Path:
        number = 0
        while (path := self._folder / f"difference-{number}-rank-{self._rank}.npz").exists():
            number += 1
        return path


def _select(pages: KVPages, frames: np.ndarray) -> list[torch.Tensor]:
    """(num_layers, n, ...) of each component."""
    indices = to_device(frames.astype(np.int64), pages.device)
    return [indexable(each).index_select(1, indices).view(each.dtype) for each in pages.components]


def _differs(cached: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """(n,) bool, of (num_layers, n, ...) each."""
    dtype = computed.dtype
    step = 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    cached, computed = cached.flatten(2).float(), computed.flatten(2).float()
    size = computed.square().mean(dim=2).sqrt().clamp_min(_SMALLEST)
    deviation = ((cached - computed).abs() - step * computed.abs()).amax(dim=2)
    # A NaN is not within any limit.
    return ~(deviation <= tolerance(dtype) * size).all(dim=0)
