"""The transfers' torch reference against numpy, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_kernel.kvcacheio import KVPages, transfer_kv_all_layer_lf_pf, transfer_kv_per_layer_pf_lf

LAYERS, HEADS, DIM = 3, 2, 4
DEVICE_PAGES, HOST_PAGES = 11, 17
# Source pages on one side, destination pages on the other: scattered, a run, one page, none.
PAGES = {
    "scattered": ([9, 0, 4, 7], [2, 16, 0, 5]),
    "run": ([3, 4, 5, 6, 7], [10, 11, 12, 13, 14]),
    "backwards": ([5, 4, 3], [0, 1, 2]),
    "one": ([10], [16]),
    "none": ([], []),
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit patterns, NaN and infinities among them: a transfer must not look at them."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def buffers(page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    device = random_bytes((2, LAYERS, DEVICE_PAGES, page_size, HEADS, DIM), dtype, seed=1)
    host = random_bytes((HOST_PAGES, 2, LAYERS, page_size, HEADS, DIM), dtype, seed=2)
    return device, host


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_load_one_layer(page_size: int, dtype: torch.dtype, pages: tuple[list[int], list[int]]):
    device, host = buffers(page_size, dtype)
    to_device, from_host = pages
    expected, source = raw(device), raw(host)
    for layer in (2, 0):
        for d, h in zip(to_device, from_host):
            for kv in range(2):
                expected[kv, layer, d] = source[h, kv, layer]
        src, dst = torch.tensor(from_host, dtype=torch.int64), torch.tensor(to_device, dtype=torch.int64)
        to = KVPages.layer_first(device).layer(layer)
        transfer_kv_per_layer_pf_lf(KVPages.page_first(host), to, src, dst, layer)
        assert np.array_equal(raw(device), expected), "wrong bytes, or bytes of another layer or page were touched"
    assert np.array_equal(raw(host), source)


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_back_up_all_layers(page_size: int, dtype: torch.dtype, pages: tuple[list[int], list[int]]):
    device, host = buffers(page_size, dtype)
    from_device, to_host = pages
    expected, source = raw(host), raw(device)
    for d, h in zip(from_device, to_host):
        expected[h] = source[:, :, d]
    src, dst = torch.tensor(from_device, dtype=torch.int64), torch.tensor(to_host, dtype=torch.int64)
    transfer_kv_all_layer_lf_pf(KVPages.layer_first(device), KVPages.page_first(host), src, dst)
    assert np.array_equal(raw(host), expected)
    assert np.array_equal(raw(device), source)


def test_a_round_trip_changes_no_byte():
    device, host = buffers(4, torch.bfloat16)
    before = raw(device)
    there, back = torch.tensor([1, 3, 8]), torch.tensor([16, 2, 9])
    on_device, on_host = KVPages.layer_first(device), KVPages.page_first(host)
    transfer_kv_all_layer_lf_pf(on_device, on_host, there, back)
    device[:, :, there] = 0
    for layer in range(LAYERS):
        transfer_kv_per_layer_pf_lf(on_host, on_device.layer(layer), back, there, layer)
    assert np.array_equal(raw(device), before)
