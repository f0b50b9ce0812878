"""`CudaStream`: a stream of a GPU, and the threads that give it work.

Owns a CUDA stream, the thread on which work is given to it, and the thread that waits for the device on request.
Work runs on the host in the order in which it was enqueued, with the CUDA stream current; what it
starts on the device is over later, in the same order:

    thread      | work 1 | work 2 | record |        | work 3 |      told the device
    device          | ---- work 1 ---- | -- work 2 -- | event passes | work 3 |
    completions                                       | when_done(...) |

To wait for another stream's event, the thread waits until that event has been recorded on the device, which is soon,
and the device until it has been passed. What a closure decided on the host, such as a failure, is therefore known
to those that wait for its event before the device is done.

An event is one of CUDA's, or a point that a kernel tells of while it goes on (`KernelEvent`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch

from sgl_kernel.kvcacheio import LayerFlags
from sglang.srt.utils.stream import Event, ThreadStream

# Of the process: held while a graph is captured, and by each completion.
_CAPTURE_LOCK = threading.Lock()


class CudaEvent:
    recorded = True

    def __init__(self) -> None:
        self._on_device = threading.Event()
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """On the current stream; called once, by the stream's thread."""
        self._event.record()
        self._on_device.set()

    def give_up(self) -> None:
        """Its stream died: nothing comes that could be waited for."""
        self._on_device.set()

    def query(self) -> bool:
        return self._on_device.is_set() and self._event.query()

    def wait(self) -> None:
        """Make the current stream wait for it."""
        self._on_device.wait()
        self._event.wait()


class KernelLaunch:
    """A kernel that counts flags up while it runs, which need not have been launched yet; see `LayerFlags`."""

    def __init__(self, flags: LayerFlags) -> None:
        self._flags = flags
        # What the flags reach; None if nothing was launched.
        self._value: int | None = None
        self._is_known = threading.Event()

    def begin(self, value: int) -> None:
        """It has been launched on the device; called by the stream's thread."""
        self._value = value
        self._is_known.set()

    def end(self) -> None:
        """It failed, or its stream died: nothing comes that could be waited for. No change after `begin`."""
        self._is_known.set()

    def events(self) -> list[KernelEvent]:
        """One for each flag."""
        return [KernelEvent(self, group) for group in range(len(self._flags))]

    def wait(self, group: int) -> None:
        """Make the current stream wait until a flag has been counted up."""
        self._is_known.wait()
        if self._value is not None:
            self._flags.wait(group, self._value, torch.cuda.current_stream())


class KernelEvent:
    recorded = True

    def __init__(self, launch: KernelLaunch, group: int) -> None:
        self._launch = launch
        self._group = group

    def query(self) -> bool:
        """The flag is in the device's memory: it is not looked at, and the device waits."""
        return False

    def wait(self) -> None:
        self._launch.wait(self._group)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What the current stream is given becomes the graph. pool: memory of other graphs to use, or None. Other threads
    may make CUDA calls meanwhile, but completions wait: they free pinned memory that this stream has used, for which
    torch records an event on it, and such an event of a captured stream must never be queried."""
    with (
        _CAPTURE_LOCK,
        torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"),
    ):
        yield


class CudaStream(ThreadStream):
    """See `Stream`. device: a CUDA device. priority: as of `torch.cuda.Stream`, -1 before 0. An error that the device
    reports, which is seen when something is done, kills the stream like one of a closure."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        on_death: Callable[[], None] = lambda: None,
        priority: int = 0,
    ) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority)
        self._completions: SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = SimpleQueue()
        self._completer = threading.Thread(target=self._complete, name=f"{name} done", daemon=True)
        super().__init__(name, on_death)
        self._completer.start()

    def when_done(self, work: Callable[[], None]) -> None:
        def hand_over() -> None:
            # Blocking: a thread that spins would keep the others from Python.
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._completions.put((event, work))

        self.enqueue(hand_over)

    def record(self) -> Event:
        event = CudaEvent()

        def record() -> None:
            try:
                event.record()
            except BaseException:
                event.give_up()
                raise

        self.enqueue(record, always=True)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent | KernelEvent)
        if not event.query():
            self.enqueue(event.wait, always=True)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3

    def wait_for_mark(self, mark: Any) -> None:
        mark.synchronize()

    def close(self) -> None:
        """Run what is enqueued, then end the threads."""
        super().close()
        self._completions.put(None)
        self._completer.join()

    def _run(self) -> None:
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            super()._run()

    def _complete(self) -> None:
        torch.cuda.set_device(self.device)
        while (item := self._completions.get()) is not None:
            event, work = item
            self._try(event.synchronize)
            if self._error is None:
                with _CAPTURE_LOCK:
                    self._try(work)


def make_stream(
    name: str, device: torch.device, on_death: Callable[[], None] = lambda: None, urgent: bool = False
) -> ThreadStream:
    """A stream of the device. urgent: on a GPU its kernels, which are few and small, take the next room
    there is: the blocks of a large matrix product would keep them waiting."""
    return (
        CudaStream(name, device, on_death, -1 if urgent else 0)
        if device.type == "cuda"
        else ThreadStream(name, on_death)
    )
