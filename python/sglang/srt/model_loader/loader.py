"""Filling a model with weights, from safetensors, quantised or not, from GGUF or at random.

Owns nothing after it returns. Tensors go straight from the mapped file into the (fused) parameters, one at a time,
and a rank reads only its part of each. Loading therefore takes no memory beyond the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.gguf_model import GGUF_LINK, gguf_file_of, read_tensor_list
from sglang.srt.configs.kv_cache_dtype import KVScales, is_kv_scale, stored_kv_scales
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import TRANSFORMERS
from sglang.srt.configs.model_files import (
    INDEX,
    ModelConfigError,
    is_gguf,
    open_weight_file,
    some,
    weight_file_names,
)
from sglang.srt.distributed.parallel_state import SINGLE_RANK, TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.weights import QuantizedTarget, WeightTarget
from sglang.srt.model_loader.gguf_weights import GGUFWeights
from sglang.srt.model_loader.non_finite import refuse_non_finite
from sglang.srt.model_loader.quantized_weights import (
    QuantizedWeights,
    formats_asked,
    pick_weight_formats,
    plain_names,
    unused_biases,
)
from sglang.srt.model_loader.stacked_experts import fill_stacked
from sglang.srt.models.registry import get_model_class
from sglang.srt.utils.device import CPU
from sglang.srt.utils.startup_progress import SILENT, StartupProgress

logger = logging.getLogger(__name__)

# Of the names of tensors.
_PREFIX, _HEAD = "model.", "lm_head."
# Of the text model in a checkpoint of text and images, as older and newer ones have it -> in one of text.
_TEXT_PREFIXES = {
    "language_model.model.": _PREFIX,
    "language_model.lm_head.": _HEAD,
    "model.language_model.": _PREFIX,
    "language_model.": _PREFIX,
}

# Types of weights that are not quantised, as safetensors names them.
_FLOATS = ("F16", "BF16", "F32", "F64")

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


class ModelLoadError(RuntimeError):
    """The weights do not fit the model, or there are none; the message names the error."""


def load_model(
    config: ModelConfig,
    load_format: str,
    attn_backend: AttentionBackend,
    seed: int = 0,
    device: torch.device = CPU,
    group: TensorParallelGroup = SINGLE_RANK,
    progress: StartupProgress = SILENT,
) -> Any:
    """A `CausalLM` in config.dtype on `device`, this rank's part of it. load_format: all but "dummy" read
    config.local_path. "dummy" reads only config.json and draws weights from `seed`. They are the same on every run
    and for any number of ranks, but not the same on a GPU as on the CPU. Raises ModelConfigError if the model does
    not divide by the group's size, ModelLoadError if the weights do not fit."""
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(f"load format {load_format!r} is not supported; choose from {', '.join(LOAD_FORMATS)}.")
    config.check_tensor_parallel(group.size)
    if config.model_impl == TRANSFORMERS:
        from sglang.srt.model_loader.transformers_loader import load_transformers_model

        progress.stage("loading weights with transformers")
        try:
            return load_transformers_model(config, load_format == "dummy", attn_backend, seed, device, group)
        except ModelConfigError as error:
            raise ModelLoadError(str(error)) from error
    if load_format != "dummy" and _is_headless(_weight_files(config.local_path, load_format)):
        logger.info("the checkpoint is of a model without a head: it is for embeddings")
        config = replace(config, tie_word_embeddings=True)
    with device:
        model = get_model_class(config)(config, attn_backend, group)
    if load_format == "dummy":
        progress.stage("making up weights")
        _fill_at_random(model.weight_targets(), seed, norm=0.0 if config.norms_from_one else 1.0)
    else:
        try:
            _load_files(model, config, load_format, progress)
        except ModelConfigError as error:
            raise ModelLoadError(str(error)) from error
    return model.eval()


def with_weight_format(
    config: ModelConfig, load_format: str, num_ranks: int, device: torch.device, asked: str | None = None
) -> ModelConfig:
    """How decoder layers keep their matrices on this device: a quantised checkpoint's, or those of any one as asked.
    asked: as --quantization takes it. Raises ModelConfigError if it cannot be, ModelLoadError if there is no
    checkpoint to look at."""
    stored = config.quantization
    if is_gguf(config.local_path, load_format):
        if asked is not None:
            raise ModelConfigError(f"--quantization {asked} is not for a GGUF file, whose weights are dequantised.")
        return config
    if stored is None:
        if asked is None:
            return config
        formats = formats_asked(config, asked, num_ranks, device)
    elif asked not in (None, stored.method):
        raise ModelConfigError(f"--quantization {asked}: the checkpoint has {stored.method}; leave the flag out.")
    else:
        names = () if load_format == "dummy" else _weight_files(config.local_path, load_format)
        formats = pick_weight_formats(config, names, num_ranks, device)
    return replace(config, weight_format=formats.layers, expert_format=formats.experts)


def checkpoint_kv_scales(config: ModelConfig, load_format: str, num_ranks: int) -> KVScales:
    """What the checkpoint has for a KV cache of fp8_e4m3, see `stored_kv_scales`. Raises ModelConfigError, or
    ModelLoadError if its files cannot be read."""
    if load_format == "dummy" or is_gguf(config.local_path, load_format):
        return ()
    stored = _weight_files(config.local_path, load_format)
    if config.kv_dtype != torch.float8_e4m3fn:
        if any(map(is_kv_scale, stored)):
            logger.info("the checkpoint's KV scales are not used: they are for --kv-cache-dtype fp8_e4m3")
        return ()
    shards = TensorParallelGroup(size=num_ranks).kv_heads_of_ranks(config.num_kv_heads)
    heads_of_ranks = [slice(shard.start, shard.start + shard.size) for shard in shards]
    scales = stored_kv_scales(stored, _Reader(stored), config.num_layers, config.num_kv_heads, heads_of_ranks)
    if scales:
        logger.info("K and V are stored with the checkpoint's scales")
    return scales


def _weight_files(path: Path, load_format: str) -> dict[str, Path]:
    """Tensor name -> file."""
    try:
        if is_gguf(path, load_format):
            return dict.fromkeys(read_tensor_list(path), path / GGUF_LINK)
        names = weight_file_names(path)
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from error
    if isinstance(names, dict):
        return {name: path / file for name, file in names.items()}
    where: dict[str, Path] = {}
    for file in names:
        with _open(path / file) as f:
            for name in f.keys():  # noqa: SIM118
                if name in where:
                    raise ModelLoadError(f"{where[name].name} and {file} both hold {name!r}; one is too many.")
                where[name] = path / file
    return where


def _load_files(model: Any, config: ModelConfig, load_format: str, progress: StartupProgress) -> None:
    """Raises ModelConfigError, too."""
    targets, path = model.weight_targets(), config.local_path
    gguf_file = gguf_file_of(path)
    files = stored = _weight_files(path, load_format)
    quantization = None if gguf_file is not None else config.quantization
    if quantization is not None:
        files = {name: stored[held] for name, held in plain_names(stored).items()}
    full_names = _full_names(files)
    where = {name: file for name, file in files.items() if not model.ignores_weight(full_names[name])}
    named = {full_names[name] for name in where}
    plan: dict[str, list[WeightTarget]] = {}
    for name in where:
        full = full_names[name]
        parts = (full,) if full in targets else model.parts_of_fused(full)
        if parts and all(part in targets and (part == full or part not in named) for part in parts):
            plan[name] = [targets.pop(part) for part in parts]
    unexpected = sorted(where.keys() - plan.keys())
    read = _Reader(stored)
    if quantization is not None and unexpected:
        unused = unused_biases(unexpected, stored, read)
        where = {name: file for name, file in where.items() if name not in unused}
        unexpected = [name for name in unexpected if name not in unused]
    missing = sorted(targets)
    if missing or unexpected:
        parts = [
            f"{kind}: {some(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ModelLoadError(
            f"The weights in {str(gguf_file or path)!r} do not fit {config.architecture}; {'; '.join(parts)}."
        )

    config_name = "config.json" if gguf_file is None else f"the metadata of {str(gguf_file)!r}"
    by_file: dict[Path, list[str]] = {}
    for name, file in where.items():
        by_file.setdefault(file, []).append(name)
    progress.stage(f"loading weights from {len(by_file)} file{'s' * (len(by_file) > 1)}")
    with progress.bar("Loading weights", len(where), "tensor") as bar, torch.inference_mode():
        for number, (file, names) in enumerate(sorted(by_file.items()), 1):
            progress.detail(f"loading weights, file {number} of {len(by_file)}")
            with _open(file) as f:
                if quantization is not None:
                    f = QuantizedWeights(f, quantization, stored, read)
                held = set(f.keys())
                numbers: dict[str, list[torch.Tensor]] = {}
                for name in names:
                    if name not in held:
                        raise _not_held(file, name)
                    if config.experts is not None and model.stacks_experts(full_names[name]):
                        fill_stacked(name, f.get_slice(name), plan[name], config.experts.num_experts, config_name)
                    else:
                        _copy(name, f, plan[name], config_name)
                    numbers[name] = [each for target in plan[name] for each in target.extremes()]
                    bar.update()
                refuse_non_finite(numbers, gguf_file or file, config.dtype)


def _full_names(names: Iterable[str]) -> dict[str, str]:
    """A checkpoint's names -> those of the model with a head. A model that was saved without one, as for embeddings,
    has names without its prefix; one of text and images has another before those of its text model."""
    text = {name: _text_name(name) for name in names}
    has_prefix = any(name.startswith(_PREFIX) for name in text.values())
    return {
        name: found if has_prefix or found.startswith(_HEAD) else f"{_PREFIX}{found}" for name, found in text.items()
    }


def _text_name(name: str) -> str:
    for prefix, plain in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _is_headless(names: Iterable[str]) -> bool:
    return not any(_text_name(name).startswith((_PREFIX, _HEAD)) for name in names)


def _copy(name: str, file: Any, targets: list[WeightTarget], config_name: str) -> None:
    """targets: their tensors stand in the file's tensor one below the other, or a few in each entry of its first
    dimension. config_name: in errors."""
    source = file.get_slice(name)
    if hasattr(source, "get_dtype") and (kind := source.get_dtype()) not in _FLOATS:
        raise ModelLoadError(f"{name!r} is of the type {kind}, and weights are of {', '.join(_FLOATS)}.")
    shape = tuple(source.get_shape())
    shown, is_stacked = f"{shape}", len(shape) == 3
    if is_stacked:
        source = file.get_tensor(name).flatten(0, 1)  # a view of the mapped file, not yet a copy
        shape = tuple(source.shape)
        shown += f", as a matrix {shape}"
    rows = sum(target.shape[0] for target in targets)
    wanted = (rows, *targets[0].shape[1:])
    if shape != wanted:
        raise ModelLoadError(f"{name!r} has the shape {shown}, but {config_name} asks for {wanted}.")
    if all(target.is_whole for target in targets) and not is_stacked:
        source = file.get_tensor(name)
    offset = 0
    for target in targets:
        if is_stacked:
            target.fill(source[offset : offset + target.shape[0]])
        else:
            target.fill(source, offset)
        offset += target.shape[0]


class _Reader:
    """Whole tensors by name; None if there is none of that name. Files stay open: to parse a header for each of the
    thousands of scales of a mixture of experts takes far longer than to load it."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        # With the names that each holds.
        self._open: dict[Path, tuple[Any, frozenset[str]]] = {}

    def __call__(self, name: str) -> torch.Tensor | None:
        path = self._files.get(name)
        if path is None:
            return None
        if path not in self._open:
            opened = _open(path)
            self._open[path] = opened, frozenset(opened.keys())
        file, held = self._open[path]
        if name not in held:
            raise _not_held(path, name)
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _not_held(file: Path, name: str) -> ModelLoadError:
    return ModelLoadError(f"{file.name} does not hold {name!r}, although {INDEX} lists it there.")


def _open(file: Path) -> Any:
    if file.name == GGUF_LINK:
        return GGUFWeights(file.parent)
    try:
        return open_weight_file(file, "pt")
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from error


@torch.inference_mode()
def _fill_at_random(targets: dict[str, WeightTarget], seed: int, norm: float = 1.0) -> None:
    """norm: of norms' weights. Matrices keep the scale of their input, so that activations neither vanish nor blow
    up. Every rank draws all of a tensor and keeps its part. The numbers are drawn on the weights' device, because a
    CPU would take minutes for billions of them."""
    device = next(iter(targets.values())).tensor.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in sorted(targets.items()):
        if name.endswith("norm.weight"):
            target.tensor.fill_(norm)
        else:
            std = 1.0 if "embed_tokens" in name or len(target.shape) < 2 else target.shape[-1] ** -0.5
            dtype = drawn_dtype(target, device)
            drawn = torch.randn(target.shape, generator=generator, dtype=dtype, device=device)
            target.fill(drawn.mul_(std))


def drawn_dtype(target: WeightTarget, device: torch.device) -> torch.dtype:
    """float32 on the CPU for every dtype of the model: the same numbers, rounded. Quantised weights are made of it
    everywhere, as a target's own dtype is that of its scales."""
    is_float32 = device.type == "cpu" or isinstance(target, QuantizedTarget)
    return torch.float32 if is_float32 else target.tensor.dtype
