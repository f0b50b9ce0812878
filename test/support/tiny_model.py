"""A Llama of three layers with random weights, on disk: for tests whose engines need a small real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang.srt.configs.model_config import ModelConfig


def tiny_llama(folder: Path, **changes: Any) -> ModelConfig:
    """folder: gets the model. changes: of transformers' LlamaConfig."""
    torch.manual_seed(3)
    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    config = LlamaConfig(**shape | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return ModelConfig.from_pretrained(str(folder), dtype="float32")
