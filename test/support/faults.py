"""Faulty links and executors: failures injected by seed, late completions, operations cancelled by themselves."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.mem_cache.check_link import CheckLink
from sglang.srt.mem_cache.copy_parts import CopyPart
from sglang.srt.mem_cache.layer_stream_cache import LayerStreamCache, Piece
from sglang.srt.mem_cache.link import CopyLink, Fence
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.mem_cache.storage_link import HasWindowed, StorageLink, StoreSlot
from sglang.srt.mem_cache.transfer import LoadFailedError, OpResult, TransferOp
from sglang.srt.model_executor.executor import ModelExecutor, StepResult, _ActiveLaunch
from sglang.srt.utils.cuda_stream import KernelLaunch
from sglang.srt.utils.stream import Stream


class _Late:
    """Holds completions back, the last ones first, so that they stay in order."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._random = rng
        self._rate = rate
        self._held: list[Any] = []

    def pass_on(self, results: list[Any]) -> list[Any]:
        self._held += results
        n = len(self._held)
        while n and self._random.random() < self._rate:
            n -= 1
        ready, self._held = self._held[:n], self._held[n:]
        return ready


class FaultyLink(CopyLink):
    """fail_rate: share of operations that fail, at a random layer or after copying everything. late_rate: chance that
    a poll holds a completion back. Half of the failures come as cancellations. hangs: chance that a poll begins
    one, and for how many polls the link then reports nothing."""

    def __init__(
        self,
        *args: Any,
        seed: int,
        fail_rate: float,
        late_rate: float,
        hangs: tuple[float, int] = (0.0, 0),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(seed)
        self._fail_rate = fail_rate
        self._late = _Late(self._random, late_rate)
        self._fail_at: dict[int, int] = {}
        self._hang_rate, self._hang_polls = hangs
        self._polls_left = 0

    def submit(self, op: TransferOp) -> None:
        fails = self._random.random() < self._fail_rate
        if fails:
            self._fail_at[op.ticket.seq] = self._random.randrange(self.device_pool.kv_pages.num_layers)
        super().submit(op)
        if fails and self._random.random() < 0.5:
            self.cancel(op.ticket)

    def poll(self) -> list[OpResult]:
        if self._hang_rate and not self._polls_left and self._random.random() < self._hang_rate:
            self._polls_left = self._hang_polls
        if self._polls_left:
            self._polls_left -= 1
            return []
        return self._late.pass_on(super().poll())

    def end_hangs(self) -> None:
        """From now on the link does not hang."""
        self._hang_rate, self._polls_left = 0.0, 0

    def _enqueue(
        self, op: TransferOp, operation: Any, work: partial[None], first: int = 0, of_windows: bool = False
    ) -> None:
        part: CopyPart | None = work.keywords.get("part")
        if part is not None and self._fail_at.get(op.ticket.seq) in part.layers:
            work = partial(_fail)
        super()._enqueue(op, operation, work, first, of_windows)

    def _load_by_one_kernel(self, op: TransferOp, src: torch.Tensor, dst: torch.Tensor, launch: KernelLaunch) -> None:
        fails_at = self._fail_at.get(op.ticket.seq)
        if fails_at == 0:
            raise LoadFailedError("injected")
        super()._load_by_one_kernel(op, src, dst, launch)
        if fails_at is not None:
            raise LoadFailedError("injected")

    def _back_up(
        self, op: TransferOp, src: torch.Tensor, dst: torch.Tensor, fence: Fence | None, part: CopyPart
    ) -> None:
        if op.ticket.seq in self._fail_at:
            raise LoadFailedError("injected")
        super()._back_up(op, src, dst, fence, part)


def _fail(src: torch.Tensor, dst: torch.Tensor) -> None:
    raise LoadFailedError("injected")


class LateStorageLink(StorageLink):
    """late_rate: as for links. What fails is the store's business."""

    def __init__(
        self,
        name: str,
        slot: StoreSlot,
        stream: Stream,
        seed: int,
        late_rate: float,
        clock: Callable[[], float],
        host_pool: HasWindowed,
    ) -> None:
        super().__init__(name, slot, stream, clock=clock, host_pool=host_pool)
        self._late = _Late(random.Random(seed), late_rate)

    def poll(self) -> list[OpResult]:
        return self._late.pass_on(super().poll())


class RandomClock:
    """Every time that it is read, a random time has passed, of mean_s seconds: what work costs is then drawn by seed,
    and not measured."""

    def __init__(self, seed: int, mean_s: float) -> None:
        self._random = random.Random(seed)
        self._mean_s = mean_s
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._random.expovariate(1 / self._mean_s)
        return self._now


class FaultyCheckLink(CheckLink):
    """Keeps no evidence. fail_rate: share of comparisons that find a difference where there is none."""

    def __init__(self, pool: DevicePool, stream: Stream, seed: int, fail_rate: float) -> None:
        super().__init__(pool, Path(os.devnull), 0, stream)
        self._random = random.Random(seed)
        self._fail_rate = fail_rate

    def poll(self) -> list[OpResult]:
        return [replace(r, ok=r.ok and self._random.random() >= self._fail_rate) for r in super().poll()]


class FaultyExecutor(ModelExecutor):
    """fail_rate: share of launches whose last layer raises. late_rate: as for links."""

    def __init__(self, *args: Any, seed: int, fail_rate: float, late_rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(seed)
        self._fail_rate = fail_rate
        self._late = _Late(self._random, late_rate)

    def _layer(self, run: _ActiveLaunch, layer: int) -> None:
        super()._layer(run, layer)
        self._perhaps_fail(run, layer)

    def _end_layer(self, run: _ActiveLaunch, layer: int) -> None:
        super()._end_layer(run, layer)
        self._perhaps_fail(run, layer)

    def _perhaps_fail(self, run: _ActiveLaunch, layer: int) -> None:
        last = layer == self.model.num_layers - 1
        if last and not run.has_failed and not run.void and self._random.random() < self._fail_rate:
            run.has_failed = True

    def poll(self) -> list[StepResult]:
        return self._late.pass_on(super().poll())


class FaultyLayerStreamCache(LayerStreamCache):
    """fail_rate: share of copies that fail. What failed leaves poison."""

    def __init__(self, *args: Any, seed: int, fail_rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(seed)
        self._fail_rate = fail_rate

    def _copy(self, layer: int, piece: Piece, buffer: KVPages) -> None:
        if self._random.random() < self._fail_rate:
            buffer.k.fill_(float("nan"))
            raise LoadFailedError("injected")
        super()._copy(layer, piece, buffer)


class Gate:
    """Calls of `method` wait until it is `open`; `entered` says that somebody waits."""

    def __init__(self, owner: Any, method: str) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        real = getattr(owner, method)

        def waiting(*args: Any) -> Any:
            self.entered.set()
            assert self.open.wait(60), "the test forgot to open the gate"
            return real(*args)

        setattr(owner, method, waiting)
