"""`RankSync`: how the ranks of one model step together. Owns the sockets between ranks and the reduction.

Rank 0 receives the requests and reads the clock. For every step it sends each other rank one `Tick`, and all ranks
meet in one reduction of fixed shape. Then all have the same inputs and decide alike. A rank without a tick sleeps on
its socket. A rank whose work completes pokes rank 0 through a named pipe that wakes its poller, because only rank 0
starts steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch
import zmq

from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.managers.io_struct import AdminReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.progress import Progress, pack_progress, unpack_progress
from sglang.srt.managers.schedule_batch import StorageRequest
from sglang.srt.sampling.logprob_types import LaunchFindings
from sglang.srt.utils.child_process import open_pull, open_push
from sglang.srt.utils.time_units import Seconds


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 sends the other ranks for one step; see `StepInputs`."""

    now: Seconds
    new: tuple[TokenizedGenerateReqInput, ...] = ()
    aborts: tuple[str, ...] = ()
    flush: tuple[str, ...] = ()
    storage: tuple[StorageRequest, ...] = ()
    admin: tuple[AdminReqInput, ...] = ()
    # Costs and results of rank 0 that no step has taken yet.
    results: dict[int, bytes] = {}
    findings: dict[int, LaunchFindings] = {}
    cost: dict[str, dict[int, float]] = {}
    # Of borrowed memory, see `SlabReport.sources`: what rank 0 has where. Empty: as in the last tick that told.
    slab_sources: bytes = b""


class RankSync:
    """directory: the server's own, with the sockets `rank_<n>_in` and the pipe `poke`, which the parent made.

    socket: where a rank other than 0 receives ticks; None at rank 0. poke_fd: the pipe's end; None with one rank."""

    def __init__(self, group: TensorParallelGroup, context: zmq.Context, directory: str) -> None:
        self._group = group
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Tick).decode
        # The slabs that the other ranks were told of.
        self._told_sources = b""
        # Sockets to the other ranks; at rank 0 only.
        self._followers: list[zmq.Socket] = []
        self.socket: zmq.Socket | None = None
        self.poke_fd: int | None = None
        pipe = f"{directory}/poke"
        if group.size == 1:
            return
        if group.rank == 0:
            # Opened for reading and writing, so that the pipe never ends while a rank is not there.
            self.poke_fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            self._followers = [open_push(context, f"ipc://{directory}/rank_{r}_in") for r in range(1, group.size)]
        else:
            self.poke_fd = os.open(pipe, os.O_WRONLY)
            os.set_blocking(self.poke_fd, False)
            self.socket = open_pull(context, f"ipc://{directory}/rank_{group.rank}_in")

    def poke(self) -> None:
        """Work completed on this rank: rank 0 should step. Called from any thread. If the pipe is full, rank 0 has
        pokes to read anyway."""
        try:
            os.write(self.poke_fd, b"\0")  # type: ignore[arg-type]
        except BlockingIOError:
            pass

    def take_pokes(self) -> bool:
        """Whether another rank has poked rank 0 since the last call."""
        if self.poke_fd is None:
            return False
        try:
            return bool(os.read(self.poke_fd, 4096))
        except BlockingIOError:
            return False

    def lead(self, tick: Tick, progress: Progress) -> Progress:
        """Rank 0: start a step on all ranks. Returns the progress that all ranks agree on."""
        if not self._followers:
            return progress
        if (sources := progress.slab_report.sources) != self._told_sources:
            self._told_sources = sources
            tick = msgspec.structs.replace(tick, slab_sources=sources)
        message = self._encode(tick)
        for follower in self._followers:
            follower.send(message)
        return self._agree(progress, tick)

    def follow(self, message: bytes, progress: Callable[[bytes], Progress]) -> tuple[Tick, Progress]:
        """Other ranks: join the step that the message starts. progress: called with `Tick.slab_sources`."""
        tick = self._decode(message)
        return tick, self._agree(progress(tick.slab_sources), tick)

    def _agree(self, progress: Progress, tick: Tick) -> Progress:
        least = self._group.reduce_min(torch.from_numpy(pack_progress(progress)))
        rank_0 = replace(progress, results=tick.results, findings=tick.findings, cost=tick.cost)
        return unpack_progress(least.numpy(), rank_0)
