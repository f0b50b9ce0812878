"""What compiles kernels before the first request: it runs on any device, and leaves no trace in the pool."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.model_executor.kernel_warm_up import warm_up_kernels, warm_up_transfers
from sglang.srt.model_loader.loader import load_model
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.utils.device import CPU
from support.tiny_model import tiny_llama


class WatchedAttention(TorchNativeAttnBackend):
    """Remembers the number of queries of each request of each batch, and of each segment."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: set[tuple[int, ...]] = set()
        self.partials: set[tuple[int, bool]] = set()

    def forward(self, q, view, segments, meta):
        self.forwards.add(meta.q_lens)
        return super().forward(q, view, segments, meta)

    def partial(self, q, view, segment, scale):
        self.partials.add((q.shape[0], segment.causal))
        return super().partial(q, view, segment, scale)


@pytest.mark.parametrize(("page_size", "is_streaming"), [(1, True), (16, False)])
def test_each_kind_of_batch_runs_and_only_the_scratch_page_is_written(tmp_path, page_size: int, is_streaming: bool):
    config = tiny_llama(tmp_path)
    attention = WatchedAttention()
    model = load_model(config, "auto", attention)
    layout = PageLayout.kv(page_size, 3, 2, 8, torch.float32)
    pool = MHATokenToKVPool(5, layout, has_scratch=True)
    pool.poison(torch.arange(5))
    warm_up_kernels(model, pool, 0.25, 97, Sampler(), CPU, is_streaming)
    assert {(4,), (4, 1, 4, 1), (1, 1), (1,)} <= attention.forwards
    assert attention.partials == ({(1, False), (4, False), (4, True)} if is_streaming else set())
    assert all(math.isnan(x) for x in pool.pages(torch.arange(5)).flatten().tolist())


@pytest.mark.parametrize("page_size", [1, 16])
def test_in_slabs_nothing_but_the_scratch_page_is_written(tmp_path, page_size: int):
    config = tiny_llama(tmp_path)
    layout = PageLayout.kv(page_size, 3, 2, 8, torch.float32)
    slabs = reserve_slabs(SlabsConfig(2, 8192, has_scratch=True), layout.page_bytes)
    slabs.allocate_all()
    pool = ElasticPool(slabs, layout)
    for slab in (0, 1):
        slabs.slab(slab)[:] = 7
    warm_up_kernels(load_model(config, "auto", WatchedAttention()), pool, 0.25, 97, Sampler(), CPU, False)
    warm_up_transfers(pool, MHATokenToKVPoolHost(pool, 7).kv_pages, "auto")
    assert all((slabs.slab(slab) == 7).all() for slab in (0, 1))
    assert pool.pages(torch.tensor([pool.num_pages])).any()


@pytest.mark.parametrize("io_backend", ["auto", "dma"])
def test_a_page_goes_to_the_host_and_back(io_backend: str):
    pool = MHATokenToKVPool(5, PageLayout.kv(4, 3, 2, 8, torch.float32), has_scratch=True)
    host = MHATokenToKVPoolHost(pool, 7)
    frames = torch.arange(5)
    pool.poison(frames)
    pool.kv_pages.k[:, 5] = 2.0
    warm_up_transfers(pool, host.kv_pages, io_backend)
    assert all(math.isnan(x) for x in pool.pages(frames).flatten().tolist())
    assert bool((pool.kv_pages.k[:, 5] == 2.0).all()) and bool((host.kv_pages.k[:, 0] == 2.0).all())
    assert not host.kv[1:].any()
