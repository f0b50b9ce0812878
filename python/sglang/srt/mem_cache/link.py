"""`CopyLink`: a link that copies between the device pool and one below it, in order, on a stream of its own.

Owns its operations until they are polled. Never decides what moves; never touches frame states.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from sgl_kernel.kvcacheio import (
    KERNELS,
    KVPages,
    LayerFlags,
    load_layers,
    pick_backend,
    pick_between,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_pf_lf,
)
from sglang.srt.mem_cache.copy_parts import LAYERS_AT_ONCE, CopyPart, copy_parts, load_parts
from sglang.srt.mem_cache.hybrid_pages import HybridPages
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.transfer import (
    H2D,
    LOAD_LINKS,
    P2D,
    GateError,
    LoadFailedError,
    OpResult,
    Ticket,
    Tier,
    TransferOp,
)
from sglang.srt.utils.cuda_stream import KernelLaunch
from sglang.srt.utils.device import CPU, to_device
from sglang.srt.utils.stream import Event, Stream

logger = logging.getLogger(__name__)

_KEPT_OPERATIONS = 4096


class HasPages(Protocol):
    """A pool: the device's, or below it the host's, or memory of peers."""

    @property
    def kv_pages(self) -> KVPages | HybridPages: ...


@runtime_checkable
class CopiesPages(HasPages, Protocol):
    """A pool whose memory is partly out of reach, and which therefore copies its pages itself. Called on a stream,
    loads and backups each from one thread. Both methods raise LoadFailedError.

    page_numbers_on_host: whether src and dst must lie in host memory, whatever the backend."""

    page_numbers_on_host: bool

    def load_layer(self, layer: int, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str) -> None:
        """As `transfer_kv_per_layer_pf_lf`. pages: this layer of the device pool, or of a layer stream's buffer."""
        ...

    def back_up(
        self, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str, layers: range | None = None
    ) -> None:
        """As `transfer_kv_all_layer_lf_pf`, from the device pool. pages: its layers `layers`; None: all."""
        ...


class Fence(Protocol):
    """The end of a launch; see `ModelExecutor.fence`."""

    @property
    def event(self) -> Event: ...

    @property
    def failed(self) -> bool: ...


class _Operation:
    """The part of an operation that is kept. Its index arrays and events would be gigabytes after thousands of long
    loads."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.layer_events: list[Event] = []
        # Arrays of the operation from some page on, by name and page; while it runs. Converted once per operation,
        # not per layer.
        self.frames: dict[tuple[str, int], torch.Tensor] = {}
        self.cancelled = False
        self.finished = False
        self.error = ""
        self.began: Any = None
        self.ended: Any = None


class CopyGate:
    def __init__(self, operation: _Operation) -> None:
        self._operation = operation
        # The layers of a group have one event: what waits for it last, and for which.
        self._waits: tuple[Stream, Event] | None = None

    def wait(self, layer: int, stream: Stream) -> None:
        # The order matters: the stream sets `finished`, then drops the events.
        events = self._operation.layer_events
        if self._operation.finished:
            return
        if layer >= len(events) or not events[layer].recorded:
            raise GateError(f"{self._operation.ticket}: layer {layer} is awaited but was never enqueued")
        if self._waits != (waits := (stream, events[layer])):
            stream.wait(events[layer])
            self._waits = waits

    def check(self) -> None:
        if self._operation.error:
            raise LoadFailedError(f"{self._operation.ticket}: {self._operation.error}")


@dataclass(frozen=True)
class CopyOptions:
    """How a link copies."""

    # See `kvcacheio.pick_backend`.
    io_backend: str = "auto"
    # The link is no faster than this, for experiments.
    rate_limit: RateLimit | None = None
    # Where kernels run; None for the device pool's.
    device: torch.device | None = None
    # Of each layer, whether it has a window; none: no load leaves any out.
    windowed: Sequence[bool] = ()


class CopyLink:
    """Copies between the device pool and host_pool, which is the host's or the memory of peers. For copies from peers
    to the host the host's pool takes the place of the device pool.

    fence: launch number -> its fence; None if the launch ended long ago. notify: called from the stream after every
    operation.
    """

    def __init__(
        self,
        name: str,
        device_pool: HasPages,
        host_pool: HasPages,
        stream: Stream,
        fence: Callable[[int], Fence | None],
        notify: Callable[[], None] = lambda: None,
        options: CopyOptions = CopyOptions(),
    ) -> None:
        self.name = name
        self.device_pool = device_pool
        self.host_pool = host_pool
        self._copier = host_pool if isinstance(host_pool, CopiesPages) else None
        self.stream = stream
        self.fence = fence
        self.notify = notify
        self.rate_limit = options.rate_limit
        # Where kernels run.
        self._device = options.device or device_pool.kv_pages.device
        pages = device_pool.kv_pages
        # Any layer: all are alike.
        above, below = pages.part(range(1)), host_pool.kv_pages.part(range(1))
        self._load_backend = self._backend(options.io_backend, below, above)
        self._backup_backend = self._backend(options.io_backend, above, below)
        in_groups = self._device.type != "cpu" and self._copier is None and self._load_backend in KERNELS
        hybrids = [each for each in (pages, host_pool.kv_pages) if isinstance(each, HybridPages)]
        self._is_hybrid = bool(hybrids)
        windowed = hybrids[0].windowed if hybrids else options.windowed
        at_once = LAYERS_AT_ONCE if in_groups else 1
        # For all layers, and for loads that leave some out.
        kinds = windowed if self._is_hybrid else ()
        self._backups = copy_parts(pages, host_pool.kv_pages, range(pages.num_layers), kinds)
        if name in LOAD_LINKS.values() or self._copier is not None:
            self._loads = load_parts(pages, host_pool.kv_pages, at_once, kinds)
            self._cut_loads = load_parts(pages, host_pool.kv_pages, at_once, windowed)
        else:
            # Nothing waits for single layers of what moves from peers; only a pool that copies its pages itself takes
            # them one by one. Once it runs it is not cancelled.
            self._loads = self._backups
            self._cut_loads = copy_parts(pages, host_pool.kv_pages, range(pages.num_layers), windowed)
        # For loads that are one kernel each, which cannot be held back between layers.
        self._flags: LayerFlags | None = None
        is_persistent = in_groups and self._load_backend == "persistent" and self.rate_limit is None
        if is_persistent and not self._is_hybrid and name in LOAD_LINKS.values():
            self._flags = LayerFlags([part.layers[-1] + 1 for part in self._loads], self._device)
        self._operations: dict[int, _Operation] = {}
        self._next_seq = 0
        self._results: deque[OpResult] = deque()

    def submit(self, op: TransferOp) -> None:
        link, seq = op.ticket
        assert link == self.name and seq == self._next_seq, f"{op.ticket} out of order, {self._next_seq} expected"
        self._next_seq += 1
        operation = self._operations[seq] = _Operation(op.ticket)
        self._operations.pop(seq - _KEPT_OPERATIONS, None)
        is_cut = bool(op.num_full_only_pages or op.num_windowed_only_pages)
        if op.src != Tier.DEVICE and self._flags is not None and not is_cut:
            launch = KernelLaunch(self._flags)
            self._enqueue(op, operation, partial(self._load_by_one_kernel, op, launch=launch))
            self.stream.enqueue(launch.end, always=True)
            events = zip(self._loads, launch.events(), strict=True)
            operation.layer_events = [event for part, event in events for _ in part.layers]
        elif op.src != Tier.DEVICE:
            events_of: dict[int, Event] = {}
            for part in self._cut_loads if is_cut else self._loads:
                first = op.num_full_only_pages if part.of_windows else op.num_windowed_only_pages
                if first < len(op.src_frames):
                    self._enqueue(op, operation, partial(self._load, part=part), first, part.of_windows)
                events_of |= dict.fromkeys(part.layers, self.stream.record())
            operation.layer_events = [events_of[layer] for layer in range(len(events_of))]
        else:
            fence = None if op.after is None else self.fence(op.after)
            if fence is not None:
                self.stream.wait(fence.event)
            for part in self._backups:
                first = op.num_full_only_pages if part.of_windows else 0
                if first < len(op.src_frames):
                    work = partial(self._back_up, op, fence=fence, part=part)
                    self._enqueue(op, operation, work, first, part.of_windows)
        self.stream.enqueue(partial(self._end, operation))
        self.stream.when_done(partial(self._finish, operation))

    def cancel(self, ticket: Ticket) -> None:
        operation = self._operations.get(ticket.seq)
        if operation is not None:
            operation.cancelled = True

    def gate(self, ticket: Ticket) -> CopyGate:
        operation = self._operations.get(ticket.seq)
        if operation is None:
            raise GateError(f"{ticket} is awaited but was never submitted")
        return CopyGate(operation)

    def poll(self) -> list[OpResult]:
        self.stream.raise_if_dead()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def _enqueue(
        self,
        op: TransferOp,
        operation: _Operation,
        work: partial[None],
        first: int = 0,
        of_windows: bool = False,
    ) -> None:
        """first: of the operation's pages, the first that the part works on. of_windows: whether its layers have a
        window, which matters in a hybrid pool."""
        self.stream.enqueue(partial(self._guard, op, operation, work, first, of_windows))

    # -- on the stream ------------------------------------------------------------------------------------------

    def _load(self, src: torch.Tensor, dst: torch.Tensor, part: CopyPart) -> None:
        with self._pace(len(src) * sum(part.above.run_bytes) * len(part.layers)):
            if self._copier is not None:
                self._copier.load_layer(part.layers[0], part.above, src, dst, self._load_backend)
                return
            transfer_kv_all_layer_pf_lf(part.below, part.above, src, dst, backend=self._load_backend)

    def _load_by_one_kernel(self, op: TransferOp, src: torch.Tensor, dst: torch.Tensor, launch: KernelLaunch) -> None:
        pages, below = self.device_pool.kv_pages, self.host_pool.kv_pages
        assert self._flags is not None and isinstance(pages, KVPages) and isinstance(below, KVPages)
        launch.begin(load_layers(below, pages, src, dst, self._flags))

    def _back_up(
        self, op: TransferOp, src: torch.Tensor, dst: torch.Tensor, fence: Fence | None, part: CopyPart
    ) -> None:
        if fence is not None and fence.failed:
            raise LoadFailedError(f"launch {op.after}, which writes the source of this backup, failed")
        with self._pace(len(src) * sum(part.above.run_bytes) * len(part.layers)):
            if self._copier is not None:
                layers = range(part.layers[0], part.layers[-1] + 1)
                self._copier.back_up(part.above, src, dst, self._backup_backend, layers)
                return
            transfer_kv_all_layer_lf_pf(part.above, part.below, src, dst, backend=self._backup_backend)

    def _pace(self, size_bytes: int) -> AbstractContextManager[None]:
        return self.rate_limit.transfer(size_bytes) if self.rate_limit else nullcontext()

    def _guard(
        self,
        op: TransferOp,
        operation: _Operation,
        work: Callable[[torch.Tensor, torch.Tensor], None],
        first: int,
        of_windows: bool,
    ) -> None:
        """Run one part of an operation; an error fails the operation, not the stream."""
        if operation.began is None:
            operation.began = self.stream.mark()
        if operation.error:
            return
        if operation.cancelled:
            operation.error = "cancelled"
            return
        try:
            work(*self._frames(op, operation, first, of_windows and self._is_hybrid))
        except LoadFailedError as error:
            operation.error = str(error)
        except Exception as error:
            logger.exception("%s failed", operation.ticket)
            operation.error = str(error) or type(error).__name__

    def _frames(
        self, op: TransferOp, operation: _Operation, first: int, of_windows: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and destination of a part, from its first page on. of_windows: in the pools for layers with a
        window, where a tier has one."""

        def there(name: str, start: int) -> torch.Tensor:
            found = operation.frames.get((name, start))
            if found is None:
                backend = self._backup_backend if op.src == Tier.DEVICE else self._load_backend
                where = page_numbers_device(self.host_pool, backend, self._device)
                found = to_device(getattr(op, name)[start:].astype(np.int64), where)
                operation.frames[name, start] = found
            return found

        # These begin behind what is left out.
        of_src = ("src_windowed", 0) if of_windows and op.src_windowed is not None else ("src_frames", first)
        of_dst = ("dst_windowed", 0) if of_windows and op.dst_windowed is not None else ("dst_frames", first)
        return there(*of_src), there(*of_dst)

    def _backend(self, io_backend: str, src: KVPages, dst: KVPages) -> str:
        """What `auto` is; the CPU's code chooses for itself."""
        return io_backend if self._device.type == "cpu" else pick_between(io_backend, src, dst)

    def _end(self, operation: _Operation) -> None:
        operation.ended = self.stream.mark()
        operation.frames = {}

    def _finish(self, operation: _Operation) -> None:
        error = operation.error
        seconds = 0.0 if operation.began is None else self.stream.seconds(operation.began, operation.ended)
        self._results.append(OpResult(operation.ticket.seq, ok=not error, error=error, seconds=seconds))
        operation.finished = True
        operation.layer_events = []
        self.notify()


def kernel_links_of(io_backend: str, run_bytes: int, device: torch.device) -> tuple[str, ...]:
    """Links whose loads are kernels of a GPU. run_bytes: of a page and layer."""
    return (H2D, P2D) if pick_backend(io_backend, device, run_bytes) in KERNELS else ()


def page_numbers_device(pool: HasPages, io_backend: str, device: torch.device) -> torch.device:
    """Where page numbers must lie for copies between a pool and the device."""
    if isinstance(pool, CopiesPages) and pool.page_numbers_on_host:
        return CPU
    return index_device(io_backend, device)


def index_device(io_backend: str, device: torch.device) -> torch.device:
    """The device on which page numbers must lie: the GPU for a kernel, host memory for the code that plans copies."""
    return device if pick_backend(io_backend, device) in KERNELS else CPU
