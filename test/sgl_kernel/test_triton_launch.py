"""Repeated launches go to what was compiled for the same numbers, types and alignment, with all arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sgl_kernel import triton_launch
from sgl_kernel.triton_launch import Recording, launch


class Compiled:
    """What a launch by Triton returns."""

    function = 0xF0
    packed_metadata = (4, 1, 0)

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *values: Any) -> None:
        assert (stream, function, metadata) == (0, self.function, self.packed_metadata)
        # Of the launch: its metadata, and the hooks before and after it.
        assert values[:3] == (None, None, None)
        self._calls.append(((x, y, z), *values[3:]))


class Kernel:
    """A `triton.jit` function of two tensors, a number and two constants."""

    arg_names = ("x_ptr", "y_ptr", "n", "BLOCK", "LAST")

    def __init__(self, is_interpreted: bool = False) -> None:
        self.compiled = 0
        self.direct: list[tuple[Any, ...]] = []
        self._is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def run(*args: Any, BLOCK: int, LAST: bool | None, num_warps: int = 4) -> Compiled | None:
            assert len(args) == 3
            self.compiled += 1
            return None if self._is_interpreted else Compiled(self.direct)

        return run

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        assert self._is_interpreted, "only what a GPU runs is compiled by itself"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_launch, "_kept", {})
    yield


def test_the_second_launch_goes_to_the_compiled_kernel_with_its_own_tensors() -> None:
    kernel, (x, y, z) = Kernel(), (torch.zeros(64) for _ in range(3))
    launch(kernel, (7, 2), x, y, 5, LAST=None, num_warps=8, BLOCK=32)
    launch(kernel, (7, 2), z, None, 5, LAST=None, num_warps=8, BLOCK=32)
    assert kernel.compiled == 2 and kernel.direct == []
    launch(kernel, (7, 2), y, z, 5, LAST=None, num_warps=8, BLOCK=32)
    assert kernel.compiled == 2
    ((grid, *values),) = kernel.direct
    assert grid == (7, 2, 1) and values[0] is y and values[1] is z and values[2:] == [5, 32, None]


@pytest.mark.parametrize(
    "change", ["kernel", "grid", "number", "dtype", "alignment", "no tensor", "constant", "option", "nothing"]
)
def test_what_triton_compiles_anew_is_compiled_anew(change: str) -> None:
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    first = {"BLOCK": 32, "LAST": True, "num_warps": 4}
    launch(kernel, (7,), x, y, 16, **first)
    other = Kernel() if change == "kernel" else kernel
    grid = (8,) if change == "grid" else (7,)
    x = {"dtype": x.to(torch.float16), "alignment": x[1:], "no tensor": None}.get(change, x)
    number = 17 if change == "number" else 16
    changed = {"constant": {"BLOCK": 64}, "option": {"num_warps": 8}}.get(change, {})
    launch(other, grid, x, y, number, **{**first, **changed})
    assert len(kernel.direct) == (change == "nothing")
    assert kernel.compiled + other.compiled * (other is not kernel) == 2 - (change == "nothing")


def test_floats_compile_nothing() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    for number in (0.5, 0.25):
        launch(kernel, (7,), x, x, number, BLOCK=32, LAST=None)
    assert kernel.compiled == 1 and [values[3] for values in kernel.direct] == [0.25]


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_a_recording_is_repeated_with_what_is_given(is_interpreted: bool) -> None:
    kernel, (x, y, z, part) = Kernel(is_interpreted), (torch.zeros(64) for _ in range(4))
    first, second = 0.5, 0.25
    recording = Recording(x, first)
    recording.launch(kernel, (7, 2), x, part, first, BLOCK=32, LAST=None)
    recording.launch(kernel, (3,), part, x, 5, BLOCK=32, LAST=None)
    kernel.direct.clear()
    for given in ((y, second), (z, first)):
        recording.repeat(*given)
    assert kernel.compiled == (6 if is_interpreted else 2)
    if not is_interpreted:
        assert [values[0] for values in kernel.direct] == [(7, 2, 1), (3, 1, 1)] * 2
        calls = [values[1:] for values in kernel.direct]
        for (of_first, of_second), (tensor, number) in zip((calls[:2], calls[2:]), ((y, second), (z, first))):
            assert of_first[0] is tensor and of_first[1] is part and of_first[2:] == (number, 32, None)
            assert of_second[0] is part and of_second[1] is tensor and of_second[2:] == (5, 32, None)


def test_a_recording_keeps_the_memory_of_the_others() -> None:
    """It knows addresses alone, on a GPU."""
    x, part = torch.zeros(64), torch.zeros(64)
    recording = Recording(x)
    recording.launch(Kernel(), (1,), x, part, 1, BLOCK=1, LAST=False)
    there = weakref.ref(part)
    recording._launches.clear()
    del part
    gc.collect()
    assert there() is not None


class OnGpu(torch.Tensor):
    """A tensor that says it is a GPU's."""

    is_cuda = True


class LoadedLate:
    """What Triton compiles: `run` loads it, and nothing is known of it before."""

    packed_metadata = (4, 1, 0)
    function: int | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Callable[..., None]:
        self.function = 0xF1
        return lambda *values: self.calls.append(values)


class KernelOfGpu(Kernel):
    """Triton asks the driver about each tensor that it launches a kernel with, and the driver knows of none here."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = LoadedLate()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> LoadedLate:
        self.compiled += 1
        return self.loaded


def test_a_gpus_tensors_go_as_addresses_from_the_first_launch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a range of slabs nothing may be mapped at its first address."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "_stream", lambda on_gpu: 7 if on_gpu else 0)
    kernel, host = KernelOfGpu(), torch.zeros(64)
    x, y = (torch.zeros(64).as_subclass(OnGpu) for _ in range(2))
    for tensor in (x, y):
        launch(kernel, (7, 2), tensor, host, 5, BLOCK=32, LAST=None)
    assert kernel.compiled == 1
    before = (7, 2, 1, 7, 0xF1, LoadedLate.packed_metadata, None, None, None)
    assert [values[:9] for values in kernel.loaded.calls] == [before] * 2
    assert [values[9] for values in kernel.loaded.calls] == [x.data_ptr(), y.data_ptr()]
    assert all(values[10] is host and values[11:] == (5, 32, None) for values in kernel.loaded.calls)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_interpreter_runs_each_launch(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, x = Kernel(is_interpreted=True), torch.zeros(4)
    for _ in range(3):
        launch(kernel, (1,), x.as_subclass(OnGpu) if on_gpu else x, x, 1, BLOCK=1, LAST=False)
    assert kernel.compiled == 3 and not triton_launch._kept


def test_no_more_are_kept_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_MOST_KEPT", 3)
    kernel = Kernel()
    for n in range(20):
        launch(kernel, (1,), None, None, n, BLOCK=1, LAST=False)
        assert len(triton_launch._kept) <= 3
    assert kernel.compiled == 20
