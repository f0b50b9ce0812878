"""Loading a model that transformers computes: from safetensors or at random, by transformers' own code.

Owns nothing after it returns. Reads local files only, and runs no code that comes with a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_files import ModelConfigError, some
from sglang.srt.configs.quantization import UNUSED
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.weights import extremes
from sglang.srt.model_loader.non_finite import refuse_non_finite
from sglang.srt.models.transformers_model import PAGED_WITH_MASKS, TransformersForCausalLM


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
    if not is_dummy:
        numbers = {name: extremes(tensor.detach()) for name, tensor in model.named_parameters()}
        refuse_non_finite(numbers, config.local_path, config.dtype)
    model.inspect_layers(device)
    return model


def _read(config: ModelConfig) -> Any:
    # The server shows the progress, and what does not fit is an error.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        # With output_loading_info it is a pair, which its type does not tell.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.local_path,
            config=config.hf_config,
            dtype=config.dtype,
            attn_implementation=PAGED_WITH_MASKS,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelConfigError(
            f"transformers cannot load the weights in {str(config.local_path)!r}: {reason}"
        ) from error
    model, info = loaded
    # Of another shape: name, shape in the file, shape in the model.
    names = {
        "missing": info["missing_keys"],
        "unexpected": [name for name in info["unexpected_keys"] if not name.endswith(UNUSED)],
        "of another shape": [name for name, *_ in info["mismatched_keys"]],
    }
    parts = [f"{kind}: {some(sorted(found))}" for kind, found in names.items() if found]
    if parts:
        raise ModelConfigError(
            f"The weights in {str(config.local_path)!r} do not fit {type(model).__name__}; {'; '.join(parts)}."
        )
    return model
