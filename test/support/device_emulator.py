"""The device emulator, the fourth of the nets: a CUDA device that is not there, in host memory.

On a machine without a GPU nothing shows of what a GPU's code path can get wrong: a tensor that lies on the wrong
side, a host that waits for the device where it must not, work that begins before what it reads is there. Here tensors
say that they are on `cuda:0`, and what is done to them happens late: every operation is queued on the stream that is
current, and one thread runs what stands at the head of some stream, chosen at random by seed. Order within a stream
and events hold, nothing else does. Values are those of the CPU, bit for bit.

- A tensor of the device has no values yet when its maker returns: floats are NaN until its operation has run.
- Operations between tensors of both sides fail, but for copies.
- Where the host would wait for the device (`.item()`, `.tolist()`, a blocking copy, a result's size that depends on
  values), it does, and it is counted: `syncs`.
- A copy from pinned memory that does not block reads that memory when its turn comes.

Not emulated: memory that torch's caching allocator gives out again too early (a tensor made on one stream and dropped
while another still uses it), speed, and CUDA kernels: the transfers of `sgl_kernel` run their reference.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import xgrammar
from torch.utils._python_dispatch import TorchDispatchMode

import sgl_kernel.kvcacheio as kvcacheio
from sgl_kernel import elementwise, experts, quantized, sampling
from sgl_kernel.kvcacheio import KVPages, reference
from sgl_kernel.kvcacheio.layout import check_fit, check_indices
from sglang.srt.mem_cache import link, memory_pool_host

_DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
# How often the device takes its time, and how long at most.
_LATE_RATE, _LATE_S = 0.02, 1e-3
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default, _aten.empty_like.default}


class EmulatedTensor(torch.Tensor):
    """A tensor that says it is the device's. host: its memory."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> EmulatedTensor:
        # Torch wants a view to be of its base's kind, and bases are made outside of inference mode.
        with torch.inference_mode(False):
            tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                host.size(),
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=_DEVICE,
            )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What torch does in C++ for these asks for a real device.
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            parts = index if isinstance(index, tuple) else (index,)
            if all(isinstance(part, torch.Tensor) for part in parts):
                assert isinstance(value, torch.Tensor), "a number that is set by tensors is copied to the device"
                return _aten.index_put_.default(tensor, list(parts), value)
            view = _index(tensor, index)
            return view.copy_(value) if isinstance(value, torch.Tensor) else view.fill_(value)
        if func is torch.Tensor.copy_:
            return _device().dispatch(_aten.copy_.default, args, kwargs or {})
        if func is torch.Tensor.__invert__:
            return _aten.bitwise_not.default(*args)
        if func is torch.Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if func is torch.Tensor.numpy:
            raise TypeError("numpy() of a tensor on the device")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _device().dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EmulatedTensor({tuple(self.shape)}, {self.dtype})"


def _index(tensor: EmulatedTensor, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if all(isinstance(part, torch.Tensor) for part in parts):
        return _aten.index.Tensor(tensor, list(parts))
    for part in parts:
        if isinstance(part, torch.Tensor):
            raise NotImplementedError("tensors as an index beside others")
        if isinstance(part, list):
            raise TypeError("a list as an index is copied to the device, for which the host waits")
    return EmulatedTensor(tensor.host[index])


class _Mode(TorchDispatchMode):
    """For what names the device and has no tensor of it yet; for one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device().dispatch(func, args, kwargs or {})


class _Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._passed: threading.Event | None = None
        self._time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        passed = self._passed = threading.Event()

        def set_it() -> None:
            self._time = time.perf_counter()
            passed.set()

        (stream or _device().current).put(set_it)

    def wait(self, stream: _Stream | None = None) -> None:
        if self._passed is not None:
            (stream or _device().current).put(self._passed)

    def query(self) -> bool:
        return self._passed is None or self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed is None or self._passed.wait(60), "the device does nothing any more"
        _device().raise_if_broken()

    def elapsed_time(self, end: _Event) -> float:
        assert self.query() and end.query(), "an event that has not been passed has no time"
        return (end._time - self._time) * 1e3


class _Graph:
    """What was done while it was captured, to be done again with the same memory."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def replay(self) -> None:
        assert self.work, "the graph is empty: nothing was captured"
        stream = _device().current
        for work in self.work:
            stream.put(work)


@contextlib.contextmanager
def _capture(
    graph: _Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    assert capture_error_mode == "thread_local", "other threads use the device meanwhile"
    stream = stream or _device().current
    stream.captured = graph.work
    try:
        yield
    finally:
        stream.captured = None


class _Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        # Work, or an event to wait for.
        self.queue: deque[Callable[[], None] | threading.Event] = deque()
        self.captured: list[Callable[[], None]] | None = None
        _device().streams.append(self)

    def put(self, item: Callable[[], None] | threading.Event) -> None:
        device = _device()
        if self.captured is not None:
            assert callable(item), "a graph that waits for another stream"
            self.captured.append(item)
            return
        with device.changed:
            self.queue.append(item)
            device.changed.notify()

    def synchronize(self) -> None:
        assert self.captured is None, "the host waits for the device while a graph is captured"
        event = _Event()
        event.record(self)
        event.synchronize()


_active: EmulatedDevice | None = None


def _device() -> EmulatedDevice:
    assert _active is not None, "no device is emulated"
    return _active


class EmulatedDevice:
    """Within `emulated_device`. seed: of the order in which streams get their turn. syncs: where the host waited,
    operation -> how often."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.changed = threading.Condition()
        self.streams: list[_Stream] = []
        self.syncs: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._ends = False
        self._local = threading.local()
        self._default: _Stream | None = None
        self._thread = threading.Thread(target=self._run, name="emulated device", daemon=True)

    # -- what torch.cuda is -------------------------------------------------------------------------------------

    @property
    def current(self) -> _Stream:
        """The stream that is current on this thread."""
        if self._default is None:
            self._default = _Stream()
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current
        self._local.stream = stream
        try:
            with _Mode():
                yield
        finally:
            self._local.stream = before

    def synchronize(self, device: Any = None) -> None:
        self.syncs["synchronize"] += 1
        for stream in list(self.streams):
            stream.synchronize()

    def raise_if_broken(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the emulated device failed: {self._error}") from self._error

    # -- operations ---------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in (_aten.pin_memory.default, _aten._pin_memory.default):
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func is _aten.is_pinned.default:
            return getattr(args[0], "is_pinned_here", False)
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if isinstance(x, EmulatedTensor)]
        target = kwargs.get("device")
        if not here and (target is None or torch.device(target).type == "cpu"):
            return func(*args, **kwargs)
        with _Mode():
            # What consists of other operations, which arrives whole in inference mode.
            if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                return parts
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return self._copy(func, args, kwargs)
        for x in tensors:
            if not isinstance(x, EmulatedTensor) and x.dim():
                raise RuntimeError(f"{func} of tensors on the device and on the host, {tuple(x.shape)}")
        host_args, host_kwargs = _map(_to_host, (args, kwargs))

        def run() -> Any:
            return func(*host_args, **host_kwargs)

        writes = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if writes:
            self.current.put(_quiet(run))
            return args[0] if writes[0].name == func._schema.arguments[0].name else kwargs[writes[0].name]
        if any(r.alias_info is not None for r in func._schema.returns):
            return _wrap(run())
        try:
            meta_args, meta_kwargs = _map(_to_meta, (args, kwargs))
            shapes = func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            # Its size depends on values.
            return self._waited(func, run)
        outs = _map(_like, shapes)
        if func not in _EMPTY:
            flat_outs = _leaves(outs)

            def fill() -> None:
                for out, result in zip(flat_outs, _leaves(run())):
                    if isinstance(out, torch.Tensor):
                        out.copy_(result)

            self.current.put(_quiet(fill))
        return _wrap(outs)

    def _waited(self, func: Any, run: Callable[[], Any]) -> Any:
        self.syncs[str(func)] += 1
        self.current.synchronize()
        return _wrap(run())

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Between the two sides, or within the device."""
        in_place = func is _aten.copy_.default
        source = args[1] if in_place else args[0]
        waits = not (kwargs.get("non_blocking", False) or (in_place and len(args) > 2 and args[2]))
        if in_place:
            target: Any = args[0]
            out, goes_here = _to_host(target), isinstance(target, EmulatedTensor)
        else:
            device = kwargs.get("device")
            goes_here = isinstance(source, EmulatedTensor) if device is None else torch.device(device).type == "cuda"
            out = _like(torch.empty_strided((0,), (1,), dtype=kwargs.get("dtype") or source.dtype), source)
            target = EmulatedTensor(out) if goes_here else out
        comes_from_here = isinstance(source, EmulatedTensor)
        host = _to_host(source)
        if goes_here and not comes_from_here and not getattr(source, "is_pinned_here", False):
            # From pageable memory: it is read before the call returns.
            host = host.clone()

        def run() -> None:
            out.copy_(host)

        self.current.put(_quiet(run))
        if comes_from_here != goes_here and waits:
            self.syncs[str(func)] += 1
            self.current.synchronize()
        return target

    # -- the device ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self.changed:
            self._ends = True
            self.changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not (ready := [stream for stream in self.streams if _can_run(stream)]) and not self._ends:
                    self.changed.wait(0.1)
                if not ready:
                    return
                work = self._random.choice(ready).queue.popleft()
            assert callable(work)
            if self._random.random() < _LATE_RATE:
                time.sleep(self._random.random() * _LATE_S)
            try:
                work()
            except BaseException as error:
                self._error = self._error or error


def launch(kernel: Callable[..., None], *tensors: Any) -> None:
    """A kernel of one's own: called with the memory of these tensors when its turn comes."""
    hosts = [_to_host(tensor) for tensor in tensors]
    _device().current.put(_quiet(lambda: kernel(*hosts)))


def _can_run(stream: _Stream) -> bool:
    while stream.queue and isinstance(head := stream.queue[0], threading.Event) and head.is_set():
        stream.queue.popleft()
    return bool(stream.queue) and not isinstance(stream.queue[0], threading.Event)


def _quiet(work: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            work()

    return run


# Torch's own `tree_map` and `tree_flatten` know more, and take several times as long.
def _map(change: Callable[[Any], Any], x: Any) -> Any:
    """The same tuples, lists and dicts, with their leaves changed."""
    if isinstance(x, (tuple, list)):
        changed = [_map(change, each) for each in x]
        return type(x)(changed) if type(x) in (tuple, list) else type(x)(*changed)
    if isinstance(x, dict):
        return {key: _map(change, each) for key, each in x.items()}
    return change(x)


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list, dict)):
        return [leaf for each in (x.values() if isinstance(x, dict) else x) for leaf in _leaves(each)]
    return [x]


def _to_host(x: Any) -> Any:
    if isinstance(x, EmulatedTensor):
        return x.host
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _to_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        host = _to_host(x)
        return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _like(x: Any, shape_of: torch.Tensor | None = None) -> Any:
    """Memory for a result: nothing is there yet."""
    if not isinstance(x, torch.Tensor):
        return x
    of = x if shape_of is None else shape_of
    out = torch.empty_strided(of.size(), of.stride(), dtype=x.dtype, device="cpu")
    return out.fill_(float("nan")) if out.dtype.is_floating_point else out.fill_(1)


def _wrap(x: Any) -> Any:
    return _map(lambda each: EmulatedTensor(each) if isinstance(each, torch.Tensor) else each, x)


def _copy_pages(src: KVPages, dst: KVPages, src_pages: Any, dst_pages: Any, **options: Any) -> None:
    """In the place of `kvcacheio.copy_pages`."""
    check_fit(src, dst)
    if not any(isinstance(side.components[0], EmulatedTensor) for side in (src, dst)):
        real_copy_pages(src, dst, src_pages, dst_pages, **options)
        return
    chosen = kvcacheio.pick_between(options.get("backend", "auto"), src, dst)
    on_device = chosen in kvcacheio.KERNELS
    for pages in (src_pages, dst_pages):
        assert isinstance(pages, EmulatedTensor) == on_device, f"page numbers for {chosen} lie on the wrong side"
    src_side, dst_side = (KVPages(*map(_to_host, side.components)) for side in (src, dst))
    src_there, dst_there = (_to_host(pages) for pages in (src_pages, dst_pages))

    def run() -> None:
        check_indices(src_side, dst_side, src_there, dst_there)
        reference.copy_pages(src_side, dst_side, src_there, dst_there)

    _device().current.put(_quiet(run))


class _Flags:
    """In the place of `LayerFlags`."""

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        self.ends = list(ends)
        self.words = [0] * len(ends)
        self._num_launches = 0

    def __len__(self) -> int:
        return len(self.words)

    def count(self) -> int:
        self._num_launches += 1
        return self._num_launches

    def wait(self, group: int, value: int, stream: _Stream) -> None:
        stream.put(_Reached(self.words, group, value))


class _Reached(threading.Event):
    """Passes when a word has reached a value."""

    def __init__(self, words: list[int], group: int, value: int) -> None:
        super().__init__()
        self._words, self._group, self._value = words, group, value

    def is_set(self) -> bool:
        return self._words[self._group] >= self._value


def _load_layers(src: KVPages, dst: KVPages, src_pages: Any, dst_pages: Any, flags: _Flags) -> int:
    """In the place of `kvcacheio.load_layers`. Other streams may get their turn behind each group."""
    stream = _device().current

    def count_up(group: int) -> None:
        flags.words[group] += 1

    for group, (begin, end) in enumerate(itertools.pairwise((0, *flags.ends))):
        layers = range(begin, end)
        _copy_pages(src.part(layers), dst.part(layers), src_pages, dst_pages, backend="persistent")
        stream.put(partial(count_up, group))
    return flags.count()


def _mask_tokens(logits: Any, mask: Any, indices: Any) -> None:
    """In the place of xgrammar's function."""
    if not isinstance(logits, EmulatedTensor):
        real_mask_tokens(logits, mask, indices=indices)
        return
    assert isinstance(indices, EmulatedTensor), "rows on the host are copied to the device, for which the host waits"
    launch(lambda *there: real_mask_tokens(there[0], there[1], indices=there[2]), logits, mask, indices)


real_copy_pages = kvcacheio.copy_pages
real_mask_tokens = xgrammar.apply_token_bitmask_inplace


@contextlib.contextmanager
def emulated_device(seed: int = 0) -> Iterator[EmulatedDevice]:
    """A device `cuda:0`, on this thread and on those of streams. One at a time; name it with its index."""
    global _active
    assert _active is None, "a device is emulated already"
    device = _active = EmulatedDevice(seed)
    device.start()

    @contextlib.contextmanager
    def nothing(*args: Any) -> Iterator[None]:
        yield

    patches = {
        "_lazy_init": lambda: None,
        "CUDAGraph": _Graph,
        "graph": _capture,
        "Event": _Event,
        "Stream": _Stream,
        "stream": device.stream,
        "current_stream": lambda device_=None: device.current,
        "set_device": lambda device_: None,
        "device": nothing,
        "synchronize": device.synchronize,
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(kvcacheio, "copy_pages", _copy_pages))
        stack.enter_context(mock.patch.object(link, "load_layers", _load_layers))
        stack.enter_context(mock.patch.object(link, "LayerFlags", _Flags))
        stack.enter_context(mock.patch.object(xgrammar, "apply_token_bitmask_inplace", _mask_tokens))
        for package in (elementwise, experts, quantized, sampling):
            stack.enter_context(mock.patch.object(package, "triton_module", lambda name: None))
        for name in ("cuda_register", "cuda_unregister"):
            stack.enter_context(mock.patch.object(memory_pool_host, name, lambda *args: None))
        stack.enter_context(_Mode())
        try:
            yield device
        finally:
            device.stop()
            _active = None
    device.raise_if_broken()
