"""The swap file: pages come back as they were written, and nothing of it has a name."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from sgl_kernel.kvcacheio import KVPages, transfer_kv_all_layer_lf_pf, transfer_kv_per_layer_pf_lf
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.swap_file import SwapFile, SwapFileError


def device_pool() -> MHATokenToKVPool:
    pool = MHATokenToKVPool(6, PageLayout.kv(2, 3, 1, 4, torch.bfloat16))
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(3)))
    return pool


def test_pages_come_back_layer_by_layer(tmp_path: Path):
    pool = device_pool()
    swap = SwapFile(tmp_path, 9, pool.page_layout)
    assert swap.kv.shape == (2, 3, 9, 2, 1, 4) and swap.kv.dtype == torch.bfloat16
    mine, there = torch.tensor([4, 0, 5]), torch.tensor([8, 2, 3])
    transfer_kv_all_layer_lf_pf(pool.kv_pages, swap.kv_pages, mine, there)
    assert torch.equal(swap.kv[:, :, there], pool.kv[:, :, mine])
    back = KVPages(*(torch.zeros(1, 3, 2, 1, 4, dtype=torch.bfloat16) for _ in "kv"))
    for layer in range(3):
        transfer_kv_per_layer_pf_lf(swap.kv_pages, back, there, torch.arange(3), layer)
        assert torch.equal(back.k[0], pool.view(layer).k[mine]) and torch.equal(back.v[0], pool.view(layer).v[mine])


def test_the_file_has_no_name_and_its_space_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def mapped() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    taken, allocate = [], os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, *what: taken.append(what) or allocate(fd, *what))
    swap = SwapFile(tmp_path, 100, device_pool().page_layout)
    assert taken == [(0, swap.kv.nbytes)] and not list(tmp_path.iterdir()) and mapped() == 1
    del swap
    gc.collect()
    assert mapped() == 0


def test_what_cannot_be_had_is_said(tmp_path: Path):
    with pytest.raises(SwapFileError, match="--layer-stream-disk-path"):
        SwapFile(tmp_path / "nowhere", 4, device_pool().page_layout)
    with pytest.raises(SwapFileError, match="--layer-stream-disk-size"):
        SwapFile(tmp_path, 1 << 50, device_pool().page_layout)
