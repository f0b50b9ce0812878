"""What upstream's tools read of /server_info and /model_info."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.server_info import model_info, read_model_kind, server_info
from sglang.srt.server_args import ServerArgs

READY: dict[str, Any] = {"max_total_num_tokens": 4096, "max_running_requests": 256, "page_size": 16}
KIND = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def test_names_that_no_flag_gives() -> None:
    args = ServerArgs(model_path="m")
    names = {"model_path": "m", "tokenizer_path": "m", "served_model_name": "m"}
    assert names.items() <= server_info(args, READY, {}).items()
    assert names.items() <= model_info(args, READY, 100).items()
    args = ServerArgs(model_path="m", tokenizer_path="t", served_model_name="s", api_key="secret")
    info = server_info(args, READY, {})
    names = {"model_path": "m", "tokenizer_path": "t", "served_model_name": "s"}
    assert names.items() <= info.items() and names.items() <= model_info(args, READY, 100).items()
    assert info["api_key"] is None and info["page_size"] == 16


def test_the_state_of_a_rank() -> None:
    """As sglang.bench_one_batch_server reads it: what stands in /hicache/state, and upstream's names beside it."""
    state = {"tiers": {"device": {"total_tokens": 4096}}, "gen_throughput": 12.5}
    (found,) = server_info(ServerArgs(model_path="m", tp_size=2), READY, state)["internal_states"]
    assert found == {
        **state,
        **{"dp_size": 1, "tp_size": 2, "world_size": 2},
        "disaggregation_mode": "null",
        "effective_max_running_requests_per_dp": 256,
        "last_gen_throughput": 12.5,
        "memory_usage": {"token_capacity": 4096},
    }


def test_what_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIND | {"vocab_size": 5}))
    assert read_model_kind(tmp_path) == KIND
    (tmp_path / "config.json").write_text("{}")
    assert read_model_kind(tmp_path) == {"model_type": None, "architectures": None}
    args = ServerArgs(model_path="m", tool_call_parser="hermes", reasoning_parser="qwen3")
    info = model_info(args, READY | KIND, 100)
    assert KIND.items() <= info.items()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")
    assert (info["load_format"], info["is_generation"], info["max_context_length"]) == ("auto", True, 100)
    assert info["has_image_understanding"] is info["has_audio_understanding"] is False
    assert info["preferred_sampling_params"] is None and info["disaggregation_mode"] == "null"
