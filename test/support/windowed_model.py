"""The embedded model as a Qwen2 of which all layers but the first have a sliding window."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.embedded_model import ensure_embedded_model


def write_windowed_model(folder: Path, window: int) -> Path:
    """Write it to a new folder. window: tokens that a query sees, itself included. Returns the folder."""
    shutil.copytree(ensure_embedded_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name in "qkv":
            projection = f"model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{projection}.bias"] = torch.zeros(len(weights[f"{projection}.weight"]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
