"""What the server tells of itself under upstream's names: `/server_info` and `/model_info`. Pure functions.

Upstream's benchmarks, profiler and gateways read these fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.server_args import ServerArgs


def read_model_kind(model_dir: Path) -> dict[str, Any]:
    """The model's type and architectures, as its config.json has them; both null where that tells nothing."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        config = {}
    return {name: config.get(name) for name in ("model_type", "architectures")}


def model_info(args: ServerArgs, ready_info: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    return {
        "model_path": args.model_path,
        **_names(args),
        "is_generation": True,
        "preferred_sampling_params": None,
        "max_context_length": context_length,
        "weight_version": "default",
        "load_format": args.load_format,
        "reasoning_parser": args.reasoning_parser,
        "tool_call_parser": args.tool_call_parser,
        "disaggregation_mode": "null",
        # Of a model for text and images, too: it is served for text.
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": ready_info.get("model_type"),
        "architectures": ready_info.get("architectures"),
    }


def server_info(args: ServerArgs, ready_info: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """state: as `GET /hicache/state` shows it."""
    return {
        **args.shown(),
        **ready_info,
        **_names(args),
        "version": sglang.__version__,
        "internal_states": [{**state, **_internal_state(args, ready_info, state)}],
    }


def _internal_state(args: ServerArgs, ready_info: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of upstream's state of one data-parallel rank that is known here."""
    return {
        "dp_size": 1,
        "tp_size": args.tp_size,
        "world_size": args.tp_size,
        "disaggregation_mode": "null",
        "effective_max_running_requests_per_dp": ready_info.get("max_running_requests"),
        "last_gen_throughput": state.get("gen_throughput", 0.0),
        "memory_usage": {"token_capacity": ready_info.get("max_total_num_tokens")},
    }


def _names(args: ServerArgs) -> dict[str, str]:
    return {"tokenizer_path": args.tokenizer_path or args.model_path, "served_model_name": args.model_name}
