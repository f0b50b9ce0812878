"""What compiles kernels before the first request: it runs on any device, and leaves no trace in the pool."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config

from sgl_kernel.kvcacheio import KVPages
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.mem_cache.kv_view import KVSegment, PagedSegments
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.model_executor import kernel_warm_up
from sglang.srt.model_executor.kernel_warm_up import warm_up_kernels, warm_up_transfers
from sglang.srt.model_loader.loader import load_model
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig, reserve_slabs
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from support.pool_pages import pages_of, poison
from support.tiny_model import tiny_llama
from support.triton_runs import needs_triton


def latents(path: Any, num_heads: int) -> ModelConfig:
    """A layer with latents of 32 values and 16 rotated ones."""
    config = DeepseekV2Config(
        vocab_size=97,
        hidden_size=num_heads,
        intermediate_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return replace(ModelConfig.from_pretrained(str(path)), dtype=torch.bfloat16)


class WatchedAttention(TorchNativeAttnBackend):
    """Remembers the number of queries of each request of each batch, and of each segment."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: set[tuple[int, ...]] = set()
        self.partials: set[tuple[int, bool]] = set()

    def forward(self, q, view, segments, meta):
        self.forwards.add(meta.q_lens)
        return super().forward(q, view, segments, meta)

    def partial(self, q, view, segment, scale, mask=None):
        self.partials.add((q.shape[0], segment.causal))
        return super().partial(q, view, segment, scale, mask)


@pytest.mark.parametrize(("page_size", "is_streaming"), [(1, True), (16, False)])
def test_each_kind_of_batch_runs_and_only_the_scratch_page_is_written(tmp_path, page_size: int, is_streaming: bool):
    config = tiny_llama(tmp_path)
    attention = WatchedAttention()
    model = load_model(config, "auto", attention)
    layout = PageLayout.kv(page_size, 3, 2, 8, torch.float32)
    pool = MHATokenToKVPool(5, layout, has_scratch=True)
    poison(pool, torch.arange(5))
    warm_up_kernels(model, pool, 0.25, 97, Sampler(), attention, is_streaming)
    assert {(4,), (4, 1, 4, 1), (1, 1), (1,)} <= attention.forwards
    assert attention.partials == ({(1, False), (4, False), (4, True)} if is_streaming else set())
    assert all(math.isnan(x) for x in pages_of(pool, torch.arange(5)).flatten().tolist())


@pytest.fixture
def launched(monkeypatch) -> set[tuple[object, ...]]:
    """The kernels that attention in Triton launches, as Triton tells them apart; none of them runs."""
    from sglang.srt.layers.attention import triton_backend

    found: set[tuple[object, ...]] = set()

    def launch(kernel, grid, *args, **options):
        kinds = tuple(arg.dtype if isinstance(arg, torch.Tensor) else arg is None for arg in args)
        found.add((kernel, kinds, *sorted(options.items())))

    class Recording:
        def __init__(self, *given):
            self.launch = launch

        def end(self):
            pass

        def repeat(self, *given):
            pass

    monkeypatch.setattr(triton_backend, "launch", launch)
    monkeypatch.setattr(triton_backend, "Recording", Recording)
    return found


def paged(pool: Any, *reqs: tuple[int, int]) -> PagedSegments:
    """reqs: tokens, and new ones."""
    kv_lens, q_lens = (np.array(column) for column in zip(*reqs))
    zeros = np.zeros_like(kv_lens)
    on_device = torch.from_numpy(zeros), torch.from_numpy(kv_lens)
    pages = torch.zeros(int(kv_lens.max()), dtype=torch.int32)
    return PagedSegments(pages, 1, zeros, kv_lens, q_lens, *on_device)


@needs_triton
def test_no_attention_kernel_is_left_for_a_request(tmp_path, launched):
    """Prompts of any length, behind keys that are divided or not, and streamed, launch what was launched before."""
    from sglang.srt.layers.attention.triton_backend import HOPPER_SHARED_BYTES, Tiles, TritonAttnBackend

    attention = TritonAttnBackend(Tiles.of(8, torch.bfloat16, 1, HOPPER_SHARED_BYTES), num_sms=132)
    config = replace(tiny_llama(tmp_path), dtype=torch.bfloat16)
    model = load_model(config, "auto", attention)
    pool = MHATokenToKVPool(5, PageLayout.kv(1, 3, 2, 8, torch.bfloat16), has_scratch=True)
    warm_up_kernels(model, pool, 0.25, 97, Sampler(), attention, True)
    before = len(launched)
    q = torch.zeros(4096, 4, 8, dtype=torch.bfloat16)
    for num in (1, 4, 1000, 4096):
        for kv_len in (num, num + 9000):
            segments = paged(pool, (kv_len, num))
            attention.forward(q[:num], pool.view(0), segments, AttentionMetadata((num,), 0.25))
        for own in (KVSegment(segments.table, 9000), KVSegment(segments.table, num, num > 1)):
            attention.partial(q[:num], pool.view(0), own, 0.25)
    assert len(launched) == before


@needs_triton
@pytest.mark.parametrize("num_heads", [4, 26, 64, 132])
def test_no_attention_kernel_to_latents_is_left_for_a_request(tmp_path, launched, num_heads: int):
    """Short extends and long ones, whole or in parts, with keys that are divided or not, alone and together. How many
    blocks are divided depends on how many heads fill a GPU."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    attention = TritonAttnBackend(num_sms=132)
    assert attention.expansion is not None
    model = load_model(latents(tmp_path, num_heads), "auto", attention)
    model.finish_loading()
    attn = model.layers[0].self_attn.attn
    piece_tokens = attention.expansion.piece_tokens(attn.latent, num_heads, torch.bfloat16)
    # As many as of heads of 128.
    attention.expansion.piece_bytes //= max(1, piece_tokens * num_heads // 262144)
    piece_tokens = attention.expansion.piece_tokens(attn.latent, num_heads, torch.bfloat16)
    pool = MHATokenToKVPool(5, PageLayout.latents(1, 1, 48, torch.bfloat16), has_scratch=True)
    warm_up_kernels(model, pool, 0.25, 97, Sampler(), attention, True)
    before = set(launched)
    merges = [dict(options) for kernel, _, *options in before if kernel.fn.__name__ == "merge_extends_kernel"]
    # 132 heads fill 132 multiprocessors, however few blocks a head has.
    assert any(each["HEAD_DIM"] == 16 for each in merges) == (num_heads < 132)
    for new in (1, 48, 256, 384, 385, 1500):
        for kv_len in (new, new + 1000, piece_tokens - 800, piece_tokens + 5000):
            for beside in ((), ((300, 300),), ((900, 1), (260, 260), (256, 256)), ((257, 257), (2000, 20))):
                reqs = ((max(new, kv_len), new), *beside)
                q_lens = tuple(q_len for _, q_len in reqs)
                batch = SimpleNamespace(segments=paged(pool, *reqs), attn=AttentionMetadata(q_lens, 0.25))
                is_long = attn.expands(batch)
                assert is_long == (max(q_lens) >= 256)
                q = torch.zeros(sum(q_lens), num_heads, 32 if is_long else 48, dtype=torch.bfloat16)
                attn(q, batch, pool)
                assert launched == before, (reqs, launched - before)


@pytest.mark.parametrize("page_size", [1, 16])
def test_in_slabs_nothing_but_the_scratch_page_is_written(tmp_path, page_size: int):
    config = tiny_llama(tmp_path)
    layout = PageLayout.kv(page_size, 3, 2, 8, torch.float32)
    slabs = reserve_slabs(SlabsConfig(2, 8192, has_scratch=True), layout.page_bytes)
    slabs.allocate_all()
    pool = ElasticPool(slabs, layout)
    for slab in (0, 1):
        slabs.slab(slab)[:] = 7
    warm_up_kernels(load_model(config, "auto", WatchedAttention()), pool, 0.25, 97, Sampler(), None, False)
    warm_up_transfers(pool, MHATokenToKVPoolHost(pool, 7).kv_pages, "auto")
    assert all((slabs.slab(slab) == 7).all() for slab in (0, 1))
    assert pages_of(pool, torch.tensor([pool.num_pages])).any()


@pytest.mark.parametrize("io_backend", ["auto", "dma"])
def test_a_page_goes_to_the_host_and_back(io_backend: str):
    pool = MHATokenToKVPool(5, PageLayout.kv(4, 3, 2, 8, torch.float32), has_scratch=True)
    host = MHATokenToKVPoolHost(pool, 7)
    frames = torch.arange(5)
    poison(pool, frames)
    pool.kv_pages.k[:, 5] = 2.0
    warm_up_transfers(pool, host.kv_pages, io_backend)
    assert all(math.isnan(x) for x in pages_of(pool, frames).flatten().tolist())
    assert bool((pool.kv_pages.k[:, 5] == 2.0).all()) and bool((host.kv_pages.k[:, 0] == 2.0).all())
    assert not host.kv[1:].any()


def test_every_group_of_layers_that_a_load_may_copy_is_met(monkeypatch: pytest.MonkeyPatch):
    pool = MHATokenToKVPool(5, PageLayout.kv(4, 9, 2, 8, torch.float32), has_scratch=True)
    host = MHATokenToKVPoolHost(pool, 7)
    loaded: list[int] = []

    def load(src: KVPages, dst: KVPages, *pages: Any, backend: str) -> None:
        loaded.append(src.num_layers)

    monkeypatch.setattr(kernel_warm_up, "transfer_kv_all_layer_pf_lf", load)
    warm_up_transfers(pool, host.kv_pages, "auto")
    assert loaded == [1, 1, 2, 4, 1]
    loaded.clear()
    warm_up_transfers(pool, host.kv_pages, "auto", [True, True, True, True, True, False, True, True, False])
    assert loaded == [1, 1, 2, 4, 1, 1, 1, 2], "those above, then such of one kind that are not among them"
