"""Loading a model that transformers computes: from safetensors or at random, by transformers' own code.

Owns nothing after it returns. Reads local files only, and runs no code that comes with a checkpoint.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_files import ModelConfigError, some
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.models.transformers_model import PAGED, TransformersForCausalLM


def load_transformers_model(
    config: ModelConfig,
    is_dummy: bool,
    attn_backend: AttentionBackend,
    seed: int,
    device: torch.device,
    group: TensorParallelGroup,
) -> TransformersForCausalLM:
    """As `load_model`. is_dummy: draw the weights from `seed` as transformers draws them before training. Raises
    ModelConfigError, also for what only the built model shows."""
    if is_dummy:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            model = TransformersForCausalLM(config, attn_backend, group)
    else:
        model = TransformersForCausalLM(config, attn_backend, group, _read(config))
    model.to(device).eval()
    model.inspect_layers()
    return model


def _read(config: ModelConfig) -> object:
    # Progress is shown by the server.
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            config.local_path,
            config=config.hf_config,
            dtype=config.dtype,
            attn_implementation=PAGED,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelConfigError(f"transformers cannot load the weights in {str(config.local_path)!r}: {reason}") from error
    kinds = (("missing", "missing_keys"), ("unexpected", "unexpected_keys"), ("of another shape", "mismatched_keys"))
    parts = [f"{kind}: {some(sorted(map(str, info[key])))}" for kind, key in kinds if info.get(key)]
    if parts:
        raise ModelConfigError(
            f"The weights in {str(config.local_path)!r} do not fit {type(model).__name__}; {'; '.join(parts)}."
        )
    return model
