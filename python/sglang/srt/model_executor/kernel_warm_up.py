"""Each kind of batch once before the first request, and a load and a backup: the request would wait for kernels to be
compiled otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sgl_kernel.kvcacheio import (
    KVPages,
    LayerFlags,
    load_layers,
    pick_between,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_pf_lf,
)
from sgl_kernel.quantized import MOST_ROWS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
from sglang.srt.layers.latent_attention import LatentAttention
from sglang.srt.layers.linear import Weight
from sglang.srt.layers.mixture import Mixture
from sglang.srt.mem_cache.copy_parts import LAYERS_AT_ONCE, copy_parts, load_parts
from sglang.srt.mem_cache.hybrid_pages import HybridPages
from sglang.srt.mem_cache.kv_view import KVSegment, PagedSegments
from sglang.srt.mem_cache.link import index_device
from sglang.srt.mem_cache.memory_pool import DevicePool
from sglang.srt.model_executor.forward_batch_info import CausalLM, ForwardBatch, ForwardMode, StreamedRows
from sglang.srt.model_executor.prefill_graphs import PrefillGraphs
from sglang.srt.sampling.penalties import PenaltyTable
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.device import to_device

logger = logging.getLogger(__name__)

# Keys that attention divides among programs.
_LONG = 8192
# Tokens after a request's last one, and those that are computed. Alone and together, short and long.
_BATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4, 4),),
    ((_LONG, 4), (_LONG, 1), (4, 4), (5, 1)),
    ((_LONG, 1), (5, 1)),
    ((5, 1),),
)
# Also some rows, more, and so many that quantised matrices are dequantised.
_BATCHES_OF_QUANTIZED = (((_LONG, 32),), ((_LONG, 128),), ((_LONG, MOST_ROWS + 64),))
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, sampling_seed=1),
    SamplingParams(temperature=1.0, sampling_seed=1, top_k=5, top_p=0.9, min_p=0.01),
)


def warm_up_kernels(
    model: CausalLM,
    pool: DevicePool,
    scale: float,
    vocab_size: int,
    sampler: Callable[[torch.Tensor, SamplingBatchInfo], torch.Tensor],
    attention: AttentionBackend | None,
    is_streaming: bool,
) -> None:
    """Computes on the current stream. All keys are read from the page of the pool's scratch slot, which it must have,
    and all are written to it. attention: the model's; None where no kernels of it depend on how many queries there
    are. is_streaming: prefixes may come through a layer stream cache."""
    began, device = time.monotonic(), pool.kv_pages.device

    def compute(reqs: Sequence[tuple[int, int]]) -> None:
        batch = _batch(reqs, pool, scale, device)
        state = model.embed(batch)
        for layer in range(model.num_layers):
            state = model.forward_layer(layer, state, batch, pool)
        logits = model.logits(state, batch)
        for params in _SAMPLINGS:
            rows = [params] * len(reqs)
            sampler(logits, SamplingBatchInfo.from_params(rows, vocab_size, batch.sample_rows, device))

    with torch.inference_mode():
        inner = model.model if isinstance(model, PrefillGraphs) else model
        modules = tuple(inner.modules()) if isinstance(inner, nn.Module) else ()
        is_quantized = any(isinstance(each, Weight) and each.quantized is not None for each in modules)
        for reqs in (*_BATCHES, *(_BATCHES_OF_QUANTIZED if is_quantized else ())):
            compute(reqs)
        mixture = next((each for each in modules if isinstance(each, Mixture)), None)
        for num_tokens in () if mixture is None else mixture.tokens_of_kernels():
            compute(((num_tokens, num_tokens),))
        latents = next((each for each in modules if isinstance(each, LatentAttention)), None)
        for reqs in () if latents is None else latents.batches_of_kernels():
            compute(reqs)
        q_lens = [1, 4]
        if attention is not None and (long := attention.long_extend_len) is not None:
            # One request is so long that its keys are divided, too.
            compute(((_LONG, 4), (long, long)))
            q_lens.append(long)
        for q_len in q_lens if is_streaming else ():
            # So long that each window cuts it.
            prefix_len = max(_LONG, *(window or 0 for window in model.windows))
            _stream(model, pool, _batch(((0, q_len),), pool, scale, device), q_len, prefix_len, device)
        _penalize(vocab_size, device)
    logger.info("warmed kernels up in %.1f s", time.monotonic() - began)


def warm_up_transfers(
    pool: DevicePool, host_pages: KVPages | HybridPages, io_backend: str, windowed: Sequence[bool] = ()
) -> None:
    """The page of the pool's scratch slot, which it must have, to the host's first page and back, on the current
    stream. io_backend: see `kvcacheio.pick_backend`. windowed: see `CopyOptions`. Raises LayerFlagsError where the
    driver lets no stream wait."""
    assert pool.scratch_slot is not None and pool.windowed_scratch_slot is not None, (
        "a warm-up writes to scratch slots"
    )
    pages, device = pool.kv_pages, pool.kv_pages.device
    for each in (pages, host_pages):
        windowed = each.windowed if isinstance(each, HybridPages) else windowed
    is_hybrid = isinstance(pages, HybridPages)
    has_parts = is_hybrid or isinstance(host_pages, HybridPages)
    scratch_pages = [slot // pool.page_size for slot in (pool.scratch_slot, pool.windowed_scratch_slot)]

    def frames(of_windows: bool, backend: str) -> list[torch.Tensor]:
        """The scratch page that layers of a kind have, and the host's first page."""
        scratch = scratch_pages[is_hybrid and of_windows]
        return [to_device(np.array([page]), index_device(backend, device)) for page in (scratch, 0)]

    above, below = pages.part(range(1)), host_pages.part(range(1))
    kinds = windowed if has_parts else ()
    backend = pick_between(io_backend, above, below)
    for part in copy_parts(pages, host_pages, range(pages.num_layers), kinds):
        scratch, first = frames(part.of_windows, backend)
        transfer_kv_all_layer_lf_pf(part.above, part.below, scratch, first, backend=backend)
    backend = pick_between(io_backend, below, above)
    loads = load_parts(pages, host_pages, LAYERS_AT_ONCE, kinds)
    if backend == "persistent" and isinstance(pages, KVPages) and isinstance(host_pages, KVPages):
        flags = LayerFlags([part.layers[-1] + 1 for part in loads], device)
        scratch, first = frames(False, backend)
        value = load_layers(host_pages, pages, first, scratch, flags)
        flags.wait(len(flags) - 1, value, torch.cuda.current_stream(device))
        loads = []
    loads += load_parts(pages, host_pages, LAYERS_AT_ONCE, windowed) if windowed else []
    for part in {part.layers: part for part in loads}.values():
        scratch, first = frames(part.of_windows, backend)
        transfer_kv_all_layer_pf_lf(part.below, part.above, first, scratch, backend=backend)


def _batch(reqs: Sequence[tuple[int, int]], pool: DevicePool, scale: float, device: torch.device) -> ForwardBatch:
    assert pool.scratch_slot is not None and pool.windowed_scratch_slot is not None, (
        "a warm-up writes to scratch slots"
    )
    kv_lens, q_lens = (np.array(column, np.int64) for column in zip(*reqs, strict=True))
    starts, zeros = np.zeros_like(kv_lens), torch.zeros(int(q_lens.sum()), dtype=torch.int64, device=device)
    table = _scratch_pages(pool, int(kv_lens.max()), device).to(torch.int32)
    on_device = [torch.from_numpy(column).to(device) for column in (starts, kv_lens)]
    rows = torch.from_numpy(np.cumsum(q_lens) - 1).to(device)
    segments = windowed_segments = PagedSegments(table, pool.page_size, starts, kv_lens, q_lens, *on_device)
    if pool.num_windowed_pages:
        windowed_table = torch.full_like(table, pool.windowed_scratch_slot // pool.page_size)
        windowed_segments = replace(segments, table=windowed_table)
    return ForwardBatch(
        seq=-1,
        mode=ForwardMode.DECODE if bool((q_lens == 1).all()) else ForwardMode.EXTEND,
        input_ids=zeros,
        positions=zeros,
        out_loc=torch.stack((zeros + pool.scratch_slot, zeros + pool.windowed_scratch_slot)),
        segments=segments,
        windowed_segments=windowed_segments,
        attn=AttentionMetadata(tuple(q_lens.tolist()), scale),
        sample_rows=rows,
        sample_slots=rows,
        sampling=SamplingBatchInfo.from_params([], 1, zeros[:0], device),
    )


def _stream(
    model: CausalLM, pool: DevicePool, batch: ForwardBatch, q_len: int, prefix_len: int, device: torch.device
) -> None:
    """A request behind a long prefix that is not on the device."""
    # The executor's own table has int32, the layer stream cache's pages int64.
    own = KVSegment(_scratch_pages(pool, q_len, device).to(torch.int32), q_len, q_len > 1)
    batch.streamed = [StreamedRows(slice(0, q_len), 0, prefix_len, [own])]
    prefix = KVSegment(_scratch_pages(pool, prefix_len, device), prefix_len)
    state = model.embed(batch)
    for layer in range(model.num_layers):
        state = model.begin_layer(layer, state, batch, pool)
        state = model.attend(layer, state, batch, 0, pool.view(layer), prefix, 0)
        state = model.end_layer(layer, state, batch)


def _penalize(vocab_size: int, device: torch.device) -> None:
    table, first = PenaltyTable(1, vocab_size, device), torch.zeros(1, dtype=torch.int64, device=device)
    table.start(0, first)
    table.apply(torch.zeros(1, vocab_size, device=device), first, first, torch.ones(3, 1, device=device))


def _scratch_pages(pool: DevicePool, num_tokens: int, device: torch.device) -> torch.Tensor:
    """The page of the scratch slot, as often as num_tokens fill it: int64."""
    assert pool.scratch_slot is not None
    count = max(1, -(-num_tokens // pool.page_size))
    return torch.full((count,), pool.scratch_slot // pool.page_size, dtype=torch.int64, device=device)
