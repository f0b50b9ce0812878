"""Filling a model with weights, from safetensors or at random.

Owns nothing after it returns. Tensors go straight from the mapped file into the (fused) parameters, one at a time,
so loading takes no memory beyond the model's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.models.registry import get_model_class

LOAD_FORMATS = ("auto", "safetensors", "dummy")
_INDEX = "model.safetensors.index.json"


class ModelLoadError(RuntimeError):
    """The weights do not fit the model, or there are none; the message names what is wrong."""


def load_model(
    config: ModelConfig,
    load_format: str,
    attn_backend: AttentionBackend,
    seed: int = 0,
    device: str = "cpu",
    quiet: bool = False,
) -> Any:
    """A `CausalLM` in config.dtype on `device`. load_format: "auto" and "safetensors" read config.local_path,
    "dummy" draws weights from `seed` (the same on every run; reads only config.json)."""
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(f"load format {load_format!r} is not supported; choose from {', '.join(LOAD_FORMATS)}.")
    with torch.device(device):
        model = get_model_class(config.architecture)(config, attn_backend)
    if load_format == "dummy":
        _fill_at_random(model.weight_targets(), seed)
    else:
        _load_safetensors(model, config.local_path, quiet)
    return model.eval()


def _weight_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = path / _INDEX
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        absent = sorted({name for name in weight_map.values() if not (path / name).is_file()})
        if absent:
            raise ModelLoadError(f"{_INDEX} names files that are not there: {_some(absent)}.")
        return {name: path / file for name, file in weight_map.items()}
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors") in files:
        # Some repositories carry the weights a second time in their trainer's format.
        files = [path / "model.safetensors"]
    if not files:
        raise ModelLoadError(
            f"{str(path)!r} has no *.safetensors; other formats are not read (convert with save_pretrained), "
            "and --load-format dummy runs without weights."
        )
    where = {}
    for file in files:
        with _open(file) as f:
            where.update(dict.fromkeys(f.keys(), file))
    return where


def _load_safetensors(model: Any, path: Path, quiet: bool) -> None:
    targets = model.weight_targets()
    where = {name: file for name, file in _weight_files(path).items() if not model.ignores_weight(name)}
    missing, unexpected = sorted(targets.keys() - where.keys()), sorted(where.keys() - targets.keys())
    if missing or unexpected:
        parts = [
            f"{kind}: {_some(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ModelLoadError(f"The weights in {str(path)!r} do not fit {type(model).__name__}; {'; '.join(parts)}.")

    by_file: dict[Path, list[str]] = {}
    for name, file in where.items():
        by_file.setdefault(file, []).append(name)
    progress = tqdm(
        total=len(where),
        desc="Loading weights",
        unit="tensor",
        file=sys.stderr,
        disable=quiet or not sys.stderr.isatty(),
    )
    with progress, torch.inference_mode():
        for file, names in sorted(by_file.items()):
            with _open(file) as f:
                held = set(f.keys())
                for name in names:
                    if name not in held:
                        raise ModelLoadError(f"{file.name} does not hold {name!r}, which {_INDEX} says it does.")
                    _copy(name, f.get_tensor(name), targets[name])
                    progress.update()


def _copy(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    # A norm's weight is repeated over the heads of a fused parameter.
    fits = tensor.shape == (target.shape[-1:] if name.endswith("norm.weight") else target.shape)
    if not fits:
        raise ModelLoadError(
            f"{name!r} has the shape {tuple(tensor.shape)}, but config.json asks for {tuple(target.shape)}."
        )
    target.copy_(tensor)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ModelLoadError(f"{str(file)!r} cannot be read as safetensors (incomplete download?): {e}.") from e


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@torch.inference_mode()
def _fill_at_random(targets: dict[str, torch.Tensor], seed: int) -> None:
    """Norms are 1; matrices keep the scale of their input, so that activations neither vanish nor blow up."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name in sorted(targets):
        target = targets[name]
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            std = 1.0 if "embed_tokens" in name or target.ndim < 2 else target.shape[-1] ** -0.5
            target.copy_(torch.randn(target.shape, generator=generator).mul_(std))
