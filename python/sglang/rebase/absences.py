"""Metrics and interface members of upstream that are not here, each with the reason. Stateless.

What is asked for, a flag, a field or an endpoint, is refused by the server with a sentence. A metric or a member is
only looked for and not found. Their reasons stand here, for those who compare the two.
"""

from __future__ import annotations

_HYBRID = "no models with Mamba or sliding-window layers"
_MULTIMODAL = "no encoders"
_DISAGGREGATION = "prefill and decode run in one engine"
_SPLIT = "a model is split by --tp-size alone"
_DRAFTS = "no drafts"
_EXPERTS = "no models with experts"
_LORA = "no LoRA adapters"
_GRAMMARS = "not measured"
_LINKS = "hicache_link_bytes has the bytes of each link, GET /hicache/state the speeds"
_WORK = "not measured: GET /hicache/state has what launches take"
_START = "the log has what a start takes"
_CPU = "exporters of the system measure it"
_SESSIONS = "sessions are not opened, and hold nothing by themselves"
_ROUTING = "routing keys have no effect"
_RETRACTED = "num_retracted_requests_total counts the requests"

# A name that ends with "_" stands for all that begin with it. Without the prefix "sglang:".
ABSENT_METRICS = {
    "backup_bandwidth": _LINKS,
    "backup_pgs": _LINKS,
    "prefetch_bandwidth": _LINKS,
    "prefetch_pgs": _LINKS,
    "hicache_backup_bytes_total": _LINKS,
    "hicache_backup_duration_seconds": _LINKS,
    "load_back_bytes_total": _LINKS,
    "load_back_duration_seconds": _LINKS,
    "context_len": "GET /v1/models has it",
    "cuda_graph_passes_total": _WORK,
    "is_cuda_graph": _WORK,
    "decode_sum_seq_lens": _WORK,
    "estimated_": _WORK,
    "eviction_duration_seconds": _WORK,
    "forward_execution_seconds_total": _WORK,
    "func_latency_seconds": _WORK,
    "fwd_occupancy": _WORK,
    "get_loads_duration_seconds": _WORK,
    "scheduler_idle_seconds_total": _WORK,
    "scheduler_stage_seconds_total": _WORK,
    "utilization": _WORK,
    "per_stage_req_latency_seconds": "--enable-trace has the stages of a request",
    "prefill_effective_tokens_total": "realtime_tokens has the tokens by mode",
    "new_token_ratio": "no memory is reserved by a ratio",
    "max_running_requests_under_SLO": "no such limit",
    "decode_deferred_": _DISAGGREGATION,
    "num_bootstrap_failed_reqs_total": _DISAGGREGATION,
    "num_decode_": _DISAGGREGATION,
    "num_prefill_": _DISAGGREGATION,
    "num_transfer_failed_reqs_total": _DISAGGREGATION,
    "kv_transfer_": _DISAGGREGATION,
    "pending_prealloc_token_usage": _DISAGGREGATION,
    "prealloc_": _DISAGGREGATION,
    "dp_": _SPLIT,
    "encoder_": _MULTIMODAL,
    "eplb_": _EXPERTS,
    "grammar_": _GRAMMARS,
    "num_grammar_": _GRAMMARS,
    "num_so_requests_total": _GRAMMARS,
    "graph_memory_usage_gb": _START,
    "weight_load_duration_seconds": _START,
    "weight_memory_usage_gb": _START,
    "startup_": _START,
    "kv_cache_memory_usage_gb": "max_total_num_tokens has the size in tokens",
    "process_cpu_seconds_total": _CPU,
    "scheduler_process_cpu_seconds_total": _CPU,
    "hicache_host_mamba_": _HYBRID,
    "hicache_prefetch_aux_": _HYBRID,
    "mamba_": _HYBRID,
    "swa_": _HYBRID,
    "lora_": _LORA,
    "spec_": _DRAFTS,
    "num_paused_reqs": "generation is not paused",
    "num_retracted_input_tokens_total": _RETRACTED,
    "num_retracted_output_tokens_total": _RETRACTED,
    "num_retracted_reqs": _RETRACTED,
    "num_streaming_sessions": _SESSIONS,
    "streaming_session_held_tokens": _SESSIONS,
    "failed_session_recoveries_total": _SESSIONS,
    "num_unique_running_routing_keys": _ROUTING,
    "routing_": _ROUTING,
    "prefill_delayer_": "prompts are not delayed for a fuller batch",
    "storage_prefetch_deferred_tokens_total": "hicache_prefetch_dropped_tokens counts what the host had no room for",
    "storage_prefetch_unfulfilled_tokens_total": "hicache_storage_losses counts what storage had lost",
}

_TREE = "nothing is called through it: the scheduler's seam is KVCache, and the tree is HiRadixTree"
_STAGING = "a plugin has staging memory, and no pool of the engine's"
_V2 = "the v2 methods are never called"

# Interface -> member -> reason; "*" stands for all.
ABSENT_MEMBERS = {
    "BasePrefixCache": {"*": _TREE},
    "PoolName": {"*": f"one pool of KV: {_V2}"},
    "PoolTransferResult": {"update_": _V2},
    "StorageMedium": dict.fromkeys(("GPU", "CPU", "DISK", "EXTERNAL"), "a text, in srt/disaggregation/kv_events.py"),
    "HostKVCache": dict.fromkeys(
        (
            *("alloc", "free", "available_size", "clear", "destroy", "init_kv_buffer"),
            *("backup_from_device_all_layer", "backup_from_device_all_layer_physical"),
            *("load_to_device_per_layer", "load_to_device_per_layer_physical", "prepare_transfer_indices"),
            *("device_row_stride_bytes", "device_rows_packed"),
        ),
        _STAGING,
    ),
}


def absent_metric(name: str) -> str | None:
    return _reason(ABSENT_METRICS, name.removeprefix("sglang:"))


def absent_member(interface: str, member: str) -> str | None:
    reasons = ABSENT_MEMBERS.get(interface, {})
    return reasons.get("*") or _reason(reasons, member)


def _reason(reasons: dict[str, str], name: str) -> str | None:
    if name in reasons:
        return reasons[name]
    return next((reason for start, reason in reasons.items() if start.endswith("_") and name.startswith(start)), None)
