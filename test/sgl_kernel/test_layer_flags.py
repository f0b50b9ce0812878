"""`LayerFlags` over a driver that is not there, and its binding against cuda.h."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kernel.kvcacheio import LayerFlags, layer_flags
from sgl_kernel.kvcacheio.layer_flags import FUNCTION, SIGNATURES, WAIT_VALUE_GEQ, LayerFlagsError
from support.cuda_header import assert_signatures, assert_values, needs_header

CPU = torch.device("cpu")


class Driver:
    """waits: arguments of the calls. result: of the next one."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, ...]] = []
        self.result = 0

    def cuStreamWaitValue32_v2(self, *arguments: Any) -> int:
        self.waits.append(arguments)
        return self.result

    def cuGetErrorName(self, code: int, out: Any) -> int:
        out._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0


def test_a_stream_waits_for_the_word_of_a_group():
    driver = Driver()
    flags = LayerFlags([1, 2, 4, 8], CPU, driver)
    assert len(flags) == 4 and flags.most_layers == 4
    assert flags.ends.tolist() == [1, 2, 4, 8] and flags.words.tolist() == [0] * 4
    flags.wait(2, 16, SimpleNamespace(cuda_stream=0x70))
    assert driver.waits == [(0x70, flags.words.data_ptr() + 8, 16, WAIT_VALUE_GEQ)]


def test_the_words_may_overflow():
    """As the kernel's additions do; the driver compares the difference."""
    flags = LayerFlags([1], CPU, Driver())
    assert [flags.count(blocks) for blocks in (8, 1, (1 << 32) - 10, 8)] == [8, 9, (1 << 32) - 1, 7]


def test_what_the_driver_refuses_is_told():
    driver = Driver()
    driver.result = 801
    with pytest.raises(LayerFlagsError, match=rf"{FUNCTION}: CUDA_ERROR_NOT_SUPPORTED \(801\)"):
        LayerFlags([1], CPU, driver).wait(0, 1, SimpleNamespace(cuda_stream=1))


@pytest.mark.parametrize("ends", [[], [0], [2, 2], [2, 1]])
def test_groups_have_layers(ends: list[int]):
    with pytest.raises(AssertionError):
        LayerFlags(ends, CPU, Driver())


def test_there_is_no_driver_without_a_gpu():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert layer_flags.driver() is None


@needs_header
def test_the_binding_is_that_of_the_header(tmp_path: Path):
    assert_signatures(tmp_path, SIGNATURES, {})
    assert_values(tmp_path, {"CU_STREAM_WAIT_VALUE_GEQ": WAIT_VALUE_GEQ})
