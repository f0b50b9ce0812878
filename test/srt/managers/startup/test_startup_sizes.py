"""What the flags leave of memory, and what is refused with the flag to change."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sgl_kernel.kvcacheio import pick
from sglang.srt.configs.latent import LatentConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK, TensorParallelGroup
from sglang.srt.layers.attention.latent_expansion import PIECE_BYTES
from sglang.srt.managers.startup import sizes
from sglang.srt.managers.startup.device import page_layout, pick_page_size
from sglang.srt.managers.startup.sizes import build_config, device_pages, graph_batch_size_for, kernel_links
from sglang.srt.mem_cache.memory_pool_host import _RESERVE_BYTES, _RESERVE_BYTES_BESIDE_PINNED
from sglang.srt.mem_cache.transfer import H2D, P2D
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU
from support.tiny_model import tiny_llama

GPU = torch.device("cuda")


def test_a_gpu_with_small_pages_says_how_large_they_should_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path)
    monkeypatch.setattr(pick, "_installed", lambda package: True)
    for backend, batch in (("kernel", object()), ("auto", None), ("auto", object())):
        monkeypatch.setattr(pick, "memcpy_batch", lambda batch=batch: batch)
        args = ServerArgs(
            model_path="embedded", enable_hierarchical_cache=True, page_size=1, hicache_io_backend=backend
        )
        with caplog.at_level(logging.INFO):
            assert kernel_links(args, model, SINGLE_RANK, torch.device("cuda")) == (H2D, P2D)
    run_bytes = page_layout(model, 1, 1).run_bytes[0]
    (message,) = (record.message for record in caplog.records)
    size = int(re.search(r"--page-size (\d+)", message)[1])  # type: ignore[index]
    assert size * run_bytes >= 64 << 10 > size // 2 * run_bytes
    args = ServerArgs(model_path="embedded", enable_hierarchical_cache=True, page_size=1, hicache_io_backend="dma")
    assert kernel_links(args, model, SINGLE_RANK, torch.device("cuda")) == ()
    assert kernel_links(args, model, SINGLE_RANK, CPU) == ()


@pytest.mark.parametrize(
    ("device", "hierarchy", "flag", "kv_heads", "size"),
    [
        (GPU, True, None, 8, 64),
        # Pages of few heads are small.
        (GPU, True, None, 2, 128),
        (GPU, True, None, 1, 256),
        (GPU, True, 1, 8, 1),
        (GPU, True, 16, 8, 16),
        (GPU, False, None, 8, 1),
        (CPU, True, None, 8, 1),
        (CPU, False, 16, 8, 16),
    ],
)
def test_pages_of_a_gpu_with_a_host_are_what_its_copy_engines_load(
    tmp_path: Path, device: torch.device, hierarchy: bool, flag: int | None, kv_heads: int, size: int
) -> None:
    """Where the flag does not say otherwise."""
    model = tiny_llama(tmp_path, num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=128)
    args = ServerArgs(model_path="embedded", enable_hierarchical_cache=hierarchy, page_size=flag)
    assert pick_page_size(args, replace(model, dtype=torch.float16), 1, device) == size


def test_a_device_has_two_pages_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path)
    page_bytes = page_layout(model, 64, 1).page_bytes
    monkeypatch.setattr(sizes, "kv_cache_bytes", lambda *args: 7 * page_bytes)
    args = ServerArgs(model_path="embedded", page_size=64)
    assert device_pages(args, model, SINGLE_RANK, GPU, weight_bytes=5 * page_bytes) == (2, page_bytes)
    with pytest.raises(StartupError, match=r"left for 1 pages of 64 tokens.*raise --mem-fraction-static"):
        device_pages(args, model, SINGLE_RANK, GPU, weight_bytes=6 * page_bytes)


@pytest.mark.parametrize(("flag", "value"), [("hicache_size", 1e-6), ("hicache_ratio", 1e-4)])
def test_a_host_pool_without_room_for_a_page_is_refused(tmp_path: Path, flag: str, value: float) -> None:
    model = tiny_llama(tmp_path)
    args = ServerArgs(
        model_path="embedded", enable_hierarchical_cache=True, max_total_tokens=1024, page_size=16, **{flag: value}
    )
    with pytest.raises(StartupError, match=f"--{flag.replace('_', '-')} {value:g} has no room for a page"):
        build_config(args, model, SINGLE_RANK)


@pytest.mark.parametrize("has_its_own", [True, False])
def test_a_gpu_in_host_memory_leaves_room_for_its_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_its_own: bool
) -> None:
    model, free = tiny_llama(tmp_path), 20 << 30
    page_bytes = page_layout(model, 16, 1).page_bytes
    monkeypatch.setattr(sizes, "free_memory", lambda device, num_ranks: free // num_ranks)
    monkeypatch.setattr(sizes, "kv_cache_bytes", lambda args, device, num_ranks: 4 << 30)
    monkeypatch.setattr(sizes, "has_memory_of_its_own", lambda device: has_its_own)
    args = ServerArgs(
        model_path="embedded", enable_hierarchical_cache=True, page_size=16, max_total_tokens=16384, hicache_size=50.0
    )
    left = free - (0 if has_its_own else 1024 * page_bytes)
    found = build_config(args, model, SINGLE_RANK, GPU).num_host_pages
    assert found == (left - _RESERVE_BYTES_BESIDE_PINNED) // page_bytes


class Alike(TensorParallelGroup):
    """All ranks found the same."""

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.mark.parametrize(("num_kv_heads", "num_pools"), [(4, 4), (2, 2), (1, 1)])
def test_ranks_that_cache_the_same_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kv_heads: int, num_pools: int
) -> None:
    """What limits host memory is divided by the number of pools, and four ranks' device pools are in it too."""
    model, free = tiny_llama(tmp_path, num_key_value_heads=num_kv_heads), 20 << 30
    page_bytes = page_layout(model, 16, 4).page_bytes
    monkeypatch.setattr(sizes, "free_memory", lambda device, num_ranks: free // num_ranks)

    def build(**options: float) -> int:
        """Pages of each host pool."""
        args = ServerArgs(
            model_path="embedded",
            enable_hierarchical_cache=True,
            page_size=16,
            max_total_tokens=16384,
            **options,  # type: ignore[arg-type]
        )
        found = {build_config(args, model, Alike(rank, 4)).num_host_pages for rank in range(4)}
        assert len(found) == 1
        return found.pop()

    assert build(hicache_ratio=3.0) == 3 * 1024
    assert build(hicache_size=0.1) == int(1e8 / num_pools) // page_bytes
    reserve = _RESERVE_BYTES
    taken = 4 * 1024 * page_bytes
    assert build(hicache_size=50.0) == max(0, (free - taken) // num_pools - reserve) // page_bytes
    monkeypatch.setattr(sizes, "has_shared_memory", lambda: False)
    assert build(hicache_size=0.1) == int(1e8 / 4) // page_bytes


def test_keys_and_values_of_latents_have_room_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long extends make them for a while, beside the pool."""
    model = tiny_llama(tmp_path)
    latents = replace(model, latent=LatentConfig(rank=12, rotary_dim=4, key_dim=8, value_dim=8))
    args = ServerArgs(model_path="embedded", page_size=16)
    free = PIECE_BYTES + (1 << 20)
    monkeypatch.setattr(sizes, "kv_cache_bytes", lambda args, device, num_ranks: free)
    for each, device, left in ((model, GPU, free), (latents, GPU, 1 << 20), (latents, CPU, free)):
        num_pages, page_bytes = device_pages(args, each, SINGLE_RANK, device)
        enough = 4 * each.context_length // 16 if device == CPU else num_pages
        assert num_pages == min(left // page_bytes, enough)
    free = PIECE_BYTES // 2
    with pytest.raises(StartupError, match="left for 0 pages"):
        device_pages(args, latents, SINGLE_RANK, GPU)


def test_buffers_that_leave_the_device_nothing_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)

    def build(tokens: int) -> int:
        """The device's pages that the buffers leave."""
        args = ServerArgs(
            model_path="embedded",
            enable_hierarchical_cache=True,
            hicache_size=0.1,
            max_total_tokens=tokens,
            page_size=1,
            layer_stream=model.num_layers,
            layer_stream_tokens=1024,
        )
        return build_config(args, model, SINGLE_RANK).num_device_pages

    assert build(2048) == 1024
    with pytest.raises(StartupError, match="take all 1024 tokens of the device: lower --layer-stream"):
        build(1024)


def test_buffers_and_swap_files_have_room_for_a_page(tmp_path: Path) -> None:
    def build(**options: object) -> None:
        args = ServerArgs(
            model_path="embedded",
            enable_hierarchical_cache=True,
            hicache_size=0.1,
            max_total_tokens=2048,
            **{"layer_stream": 2, "layer_stream_tokens": 64, **options},  # type: ignore[arg-type]
        )
        build_config(args, tiny_llama(tmp_path), SINGLE_RANK)

    build()
    with pytest.raises(StartupError, match="take all 2048 tokens of the device: lower --layer-stream"):
        build(layer_stream=100_000)
    with pytest.raises(StartupError, match="--layer-stream-disk-size 1e-08 GB has no room for one page"):
        build(layer_stream_disk_size=1e-8, layer_stream_disk_path=str(tmp_path))


def test_what_is_masked_on_the_host_is_no_graph(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    windowed = replace(model, windows=(None, 32) * (model.num_layers // 2))
    args = ServerArgs(model_path="embedded", max_total_tokens=1024, max_running_requests=8)
    config = build_config(args, model, SINGLE_RANK)

    def size(of_model: ModelConfig, computes_masked: bool, device: str = "cuda") -> int:
        return graph_batch_size_for(args, of_model, config, torch.device(device), computes_masked)

    assert size(model, False) == size(model, True) == size(windowed, True) == 8
    assert size(windowed, False) == size(model, True, "cpu") == 0
    of_transformers = replace(model, model_impl="transformers")
    assert size(of_transformers, True) == 0
    args = replace(args, cuda_graph_max_bs_decode=4)
    assert size(of_transformers, True) == size(model, True) == 4 and size(of_transformers, False) == 0
