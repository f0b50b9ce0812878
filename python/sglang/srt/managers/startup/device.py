"""Which device a rank computes on, what its memory has room for, and what is not served there. Owns nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from sgl_kernel.kvcacheio import page_size_for_dma, why_not
from sglang.srt.configs.kv_cache_dtype import pick_kv_cache_dtype, read_kv_scales
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.attention_registry import pick_attention_backend
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.model_loader.loader import checkpoint_kv_scales
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU, cpu_has_instructions_for, has_e4m3, shared_memory_bytes
from sglang.srt.utils.memory import available_memory

# Of what is free, where the system has to live in the same memory; of all memory, where it does not.
CPU_MEM_FRACTION = 0.6
GPU_MEM_FRACTION = 0.88
# Of pages that go to the host and back, at least and at most: copy engines load such at nearly the link's speed, and
# beside prefills, which kernels wait for (docs/records/measurements.md). Prompts share whole pages.
_GPU_PAGE_SIZE, _MOST_GPU_PAGE_SIZE = 64, 256
# Of shared memory, what the smallest tiles take of latents of 8 bits that are computed with in float32.
_WIDE_LATENTS_BYTES = 135 << 10

logger = logging.getLogger(__name__)


def pick_device(args: ServerArgs, rank: int) -> torch.device:
    """--device auto: a GPU if there is one. Ranks take one GPU each. Raises StartupError where that cannot be."""
    if args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is a build without CUDA)"
        raise StartupError(f"--device cuda: torch finds no GPU here{build}; use --device cpu")
    if args.tp_size > torch.cuda.device_count():
        raise StartupError(
            f"--tp-size {args.tp_size} needs as many GPUs, and there are {torch.cuda.device_count()}; lower it"
        )
    gpus = [torch.cuda.get_device_properties(i) for i in range(args.tp_size)]
    # Of them depend the batches that warm up kernels, whose collectives must be the same.
    kinds = {(gpu.major, gpu.minor, gpu.multi_processor_count) for gpu in gpus}
    if len(kinds) > 1:
        names = ", ".join(f"{i}: {gpu.name}" for i, gpu in enumerate(gpus))
        raise StartupError(
            f"--tp-size {args.tp_size} needs GPUs of one kind, and there are {names}; name equal ones in "
            "CUDA_VISIBLE_DEVICES"
        )
    # For whatever names no index: kernels that are loaded, collectives.
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def check_device(args: ServerArgs, device: torch.device) -> str:
    """Raises StartupError for what was asked for and cannot be had on the device. Returns the attention backend."""
    if device.type == "cuda" and args.peer_strict:
        # Its worker's copies, and the staging memory that they go through, are the host's.
        raise StartupError("--peer-strict is not served on a GPU yet: drop it, or use --device cpu")
    if reason := why_not(args.hicache_io_backend, device):
        raise StartupError(f"--hicache-io-backend {args.hicache_io_backend} cannot run here: {reason}")
    try:
        return pick_attention_backend(args.attention_backend, device)
    except ValueError as error:
        raise StartupError(f"--attention-backend: {error}") from error


def page_layout(model: ModelConfig, page_size: int, num_ranks: int) -> PageLayout:
    """What a page of one rank's KV cache holds. page_size: in tokens."""
    if model.latent is not None:
        return PageLayout.latents(page_size, model.num_layers, model.head_dim, model.kv_dtype)
    heads = model.kv_heads_per_rank(num_ranks)
    return PageLayout.kv(page_size, model.num_layers, heads, model.head_dim, model.kv_dtype)


def pick_page_size(args: ServerArgs, model: ModelConfig, num_ranks: int, device: torch.device) -> int:
    """Tokens per page: --page-size, or what the device's copies are fast with."""
    if args.page_size is not None:
        return args.page_size
    if device.type != "cuda" or not args.enable_hierarchical_cache:
        return 1
    for_dma = page_size_for_dma(max(page_layout(model, 1, num_ranks).run_bytes))
    return min(max(_GPU_PAGE_SIZE, for_dma), _MOST_GPU_PAGE_SIZE)


def pick_dtype(args: ServerArgs, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """What weights and KV cache are computed and kept in. stored: what the model's config names, or the user. --dtype
    auto takes that, except on a CPU that has no instructions for it."""
    if args.dtype != "auto" or device.type != "cpu" or cpu_has_instructions_for(stored):
        return stored
    logger.info(
        "--dtype auto: float32, as this CPU has no instructions for the model's %s; --dtype %s would keep it",
        *(str(stored).removeprefix("torch."),) * 2,
    )
    return torch.float32


def with_kv_cache(args: ServerArgs, model: ModelConfig, backend: str, device: torch.device) -> ModelConfig:
    """A config with the data type and the scales of the KV cache. backend: of attention. Raises StartupError where it
    does not read such a cache, or ModelConfigError or ModelLoadError for the scales."""
    if (latent := model.latent) is not None:
        if backend == "flashinfer":
            raise StartupError("FlashInfer's attention does not read latents yet: use --attention-backend triton")
        sizes = latent.rank, latent.rotary_dim
        if backend == "triton" and any(size < 16 or size & (size - 1) for size in sizes):
            raise StartupError(
                f"Triton's attention reads latents whose kv_lora_rank and qk_rope_head_dim are powers of two, 16 at "
                f"least, and the model's are {sizes[0]} and {sizes[1]}: use --device cpu"
            )
    kv_cache_dtype = pick_kv_cache_dtype(args.kv_cache_dtype)
    if kv_cache_dtype is None or kv_cache_dtype == model.dtype:
        checkpoint_kv_scales(model, args.load_format, args.tp_size)  # they are not used: a line in the log
        return model
    flag = f"--kv-cache-dtype {args.kv_cache_dtype}"
    if backend == "flashinfer":
        raise StartupError(f"{flag} is not served by FlashInfer's attention yet: use --attention-backend triton")
    if kv_cache_dtype is torch.float8_e4m3fn and not has_e4m3(device):
        raise StartupError(f"{flag} needs a GPU of compute capability 8.9 or more: use fp8_e5m2")
    is_wide = backend == "triton" and model.dtype is torch.float32 and kv_cache_dtype.itemsize == 1
    if model.latent is not None and is_wide and shared_memory_bytes(device) < _WIDE_LATENTS_BYTES:
        raise StartupError(
            f"{flag} with latents in float32 does not fit into this GPU's shared memory: use --dtype bfloat16"
        )
    model = replace(model, kv_cache_dtype=kv_cache_dtype)
    if args.quantization_param_path is not None:
        scales = read_kv_scales(args.quantization_param_path, kv_cache_dtype, args.tp_size, model.num_layers)
    else:
        scales = checkpoint_kv_scales(model, args.load_format, args.tp_size)
    return replace(model, kv_scales=scales)


def has_memory_of_its_own(device: torch.device) -> bool:
    """Whether it is not the host's, as the CPU's and an integrated GPU's is."""
    return device.type == "cuda" and not getattr(torch.cuda.get_device_properties(device), "is_integrated", 0)


def free_memory(device: torch.device, num_ranks: int) -> int:
    """Bytes that a rank may still take. Ranks share the memory of a machine, and none of a GPU's. Of an integrated
    GPU CUDA does not count what files are cached in, as weights are that were read."""
    if has_memory_of_its_own(device):
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() // num_ranks


def kv_cache_bytes(args: ServerArgs, device: torch.device, num_ranks: int) -> int:
    """What --mem-fraction-static leaves for the KV cache once the weights are there. On a GPU it is a fraction of all
    memory, weights included, as in SGLang; on the CPU of what is free."""
    free = free_memory(device, num_ranks)
    if device.type == "cpu":
        return int(free * (args.mem_fraction_static or CPU_MEM_FRACTION))
    total = torch.cuda.mem_get_info(device)[1]
    return max(0, free - int(total * (1 - (args.mem_fraction_static or GPU_MEM_FRACTION))))
